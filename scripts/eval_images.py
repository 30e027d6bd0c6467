#!/usr/bin/env python3
"""Pairs of pictures, by a diffusers pipeline as it is and with compressed linear layers, from the same prompts and seeds; and their scores (QuaSpa,
Table 3): CLIPScore, PickScore, ImageReward.

    scripts/eval_images.py black-forest-labs/FLUX.1-dev --prompts coco_captions_30k.csv --count 500 -o pairs

FOLDER gets original/00000.png, compressed/00000.png and so on, settings.json and scores.json. A run that was stopped goes on where it was: pictures
that are there are kept, as long as the settings are the same. Scorers whose weights are not here are errors before the first picture;
--scorers leaves them out.
"""

import argparse
import csv
import gc
import json
import math
import os
import statistics
import sys
from pathlib import Path
from typing import Any, Callable, Mapping, Optional, Protocol, Sequence

import torch

import lacuna

KINDS = ("original", "compressed")


class Failure(Exception):
    """Said in one line."""


class Scorer(Protocol):
    def __call__(self, prompt: str, picture: Any) -> float: ...


class ClipScorer:
    """CLIPScore (Hessel et al., arXiv:2104.08718) without its factor 2.5, in percent: 100 max(0, cos(text, picture)); with pick: PickScore (Kirstain et
    al., arXiv:2305.01569), the cosine times the model's own factor."""

    def __init__(self, model: str, processor: str, device: str, pick: bool) -> None:
        from transformers import AutoProcessor, CLIPModel

        self.model = CLIPModel.from_pretrained(model).eval().to(device)
        self.processor = AutoProcessor.from_pretrained(processor)
        self.device, self.pick = device, pick

    @torch.no_grad()
    def __call__(self, prompt: str, picture: Any) -> float:
        inputs = self.processor(text=[prompt], images=[picture], return_tensors="pt", padding=True, truncation=True, max_length=77).to(self.device)
        output = self.model(**inputs)
        text, image = (torch.nn.functional.normalize(one.float(), dim=-1) for one in (output.text_embeds, output.image_embeds))
        cosine = float((text * image).sum())
        return float(self.model.logit_scale.exp()) * cosine if self.pick else 100 * max(0.0, cosine)


class ImageRewardScorer:
    """ImageReward (Xu et al., arXiv:2304.05977), by its authors' package."""

    def __init__(self, model: str, device: str) -> None:
        import ImageReward

        self.model = ImageReward.load(model, device=device)

    def __call__(self, prompt: str, picture: Any) -> float:
        with torch.no_grad():
            return float(self.model.score(prompt, picture))


def scorers_of(args: argparse.Namespace) -> dict[str, Callable[[], Scorer]]:
    known: dict[str, tuple[str, Callable[[], Scorer]]] = {
        "clipscore": ("--clip", lambda: ClipScorer(args.clip, args.clip, args.device, pick=False)),
        "pickscore": ("--pick and --pick-processor", lambda: ClipScorer(args.pick, args.pick_processor, args.device, pick=True)),
        "imagereward": ("--image-reward", lambda: ImageRewardScorer(args.image_reward, args.device)),
    }
    out = {}
    for name in filter(None, args.scorers.split(",")):
        if name not in known:
            raise Failure(f"unknown scorer {name}; known are {', '.join(known)}")
        out[name] = guarded(name, *known[name])
    return out


def guarded(name: str, flags: str, make: Callable[[], Scorer]) -> Callable[[], Scorer]:
    def load() -> Scorer:
        try:
            return make()
        except (ImportError, OSError, ValueError) as error:
            reason = " ".join(str(error).split())
            raise Failure(f"scorer {name} cannot be loaded: {reason}; give its weights with {flags}, or leave it out with --scorers") from None

    return load


def read_prompts(path: str, count: int) -> list[str]:
    """The first `count` of the column Prompt."""
    try:
        with open(path, newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            if reader.fieldnames is None or "Prompt" not in reader.fieldnames:
                raise Failure(f"{path}: it has no column Prompt")
            prompts = [row["Prompt"] for row in reader if row["Prompt"]]
    except (OSError, UnicodeDecodeError) as error:
        raise Failure(f"{path}: {error}") from None
    if len(prompts) < count:
        raise Failure(f"{path}: it has {len(prompts)} prompts, but --count asks for {count}")
    return prompts[:count]


def check_settings(folder: Path, settings: Mapping[str, Any]) -> None:
    """Writes settings.json, or throws where one is there that differs."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "settings.json"
    if path.exists():
        before = json.loads(path.read_text(encoding="utf-8"))
        for key in sorted(set(before) | set(settings)):
            if before.get(key) != settings.get(key):
                raise Failure(f"{path}: {key} was {before.get(key)!r}, and is {settings.get(key)!r} now; take another folder")
        return
    write_whole(path, json.dumps(dict(settings), indent=1) + "\n")


def write_whole(path: Path, text: str) -> None:
    unfinished = path.with_name(path.name + ".unfinished")
    unfinished.write_text(text, encoding="utf-8")
    os.replace(unfinished, path)


def generate(pipeline: Any, prompts: Sequence[str], folder: Path, settings: Mapping[str, Any]) -> None:
    """Pictures that are not there yet. The seed of picture i is seed + i, drawn on the CPU, so that it does not depend on the device."""
    folder.mkdir(parents=True, exist_ok=True)
    for i, prompt in enumerate(prompts):
        path = folder / f"{i:05}.png"
        if path.exists():
            continue
        generator = torch.Generator().manual_seed(settings["seed"] + i)
        picture = pipeline(
            prompt,
            num_inference_steps=settings["steps"],
            guidance_scale=settings["guidance"],
            height=settings["height"],
            width=settings["width"],
            generator=generator,
        ).images[0]
        unfinished = path.with_suffix(".unfinished")
        picture.save(unfinished, format="PNG")
        os.replace(unfinished, path)
        print(f"{folder.name} {i + 1} of {len(prompts)}", file=sys.stderr, flush=True)


def score(prompts: Sequence[str], folder: Path, scorers: Mapping[str, Callable[[], Scorer]]) -> list[dict[str, Any]]:
    """A row a scorer: means with standard errors, and those of the differences of pairs."""
    from PIL import Image

    rows = []
    for name, load in scorers.items():
        scorer = load()
        values: dict[str, list[float]] = {}
        for kind in KINDS:
            values[kind] = []
            for i, prompt in enumerate(prompts):
                with Image.open(folder / kind / f"{i:05}.png") as picture:
                    values[kind].append(scorer(prompt, picture.convert("RGB")))
                if not math.isfinite(values[kind][-1]):
                    raise Failure(f"{folder / kind / f'{i:05}.png'}: {name} is {values[kind][-1]}")
        differences = [b - a for a, b in zip(values["original"], values["compressed"])]
        row: dict[str, Any] = {"eval": "images", "score": name, "pictures": len(prompts)}
        for key, numbers in (*values.items(), ("difference", differences)):
            row[key] = statistics.fmean(numbers)
            row[f"{key}_stderr"] = statistics.stdev(numbers) / math.sqrt(len(numbers)) if len(numbers) > 1 else None
        rows.append(row)
        del scorer
        gc.collect()
    return rows


def evaluate(
    pipeline: Callable[[], Any],
    compress: Callable[[Any], Optional[lacuna.Report]],
    prompts: Sequence[str],
    folder: Path,
    settings: Mapping[str, Any],
    scorers: Mapping[str, Callable[[], Scorer]],
) -> list[dict[str, Any]]:
    """pipeline: makes it; compress: of its linear layers, in place."""
    for load in scorers.values():  # what is missing is said before hours of work
        load()
    check_settings(folder, settings)
    made = pipeline()
    generate(made, prompts, folder / "original", settings)
    if report := compress(made):
        print(report, file=sys.stderr)
    generate(made, prompts, folder / "compressed", settings)
    del made
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    rows = score(prompts, folder, scorers)
    write_whole(folder / "scores.json", json.dumps({"settings": dict(settings), "rows": rows}, indent=1) + "\n")
    return rows


def load_tensors(path: Optional[str], suffix: str) -> Optional[dict[str, torch.Tensor]]:
    """Of a file of `lacuna image compress` (docs/image.md, "Masks"), by the weights' names."""
    if path is None:
        return None
    from safetensors.torch import load_file

    return {name.removesuffix(suffix): one for name, one in load_file(path).items() if name.endswith(suffix)}


def pipeline_of(args: argparse.Namespace) -> Any:
    try:
        from diffusers import DiffusionPipeline

        return DiffusionPipeline.from_pretrained(args.pipeline, torch_dtype=getattr(torch, args.dtype)).to(args.device)
    except (ImportError, OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise Failure(f"pipeline {args.pipeline} cannot be loaded: {reason}; give a folder of diffusers with its weights") from None


def compress_with(args: argparse.Namespace) -> Callable[[Any], Optional[lacuna.Report]]:
    def compress(pipeline: Any) -> Optional[lacuna.Report]:
        pipeline.transformer.to("cpu")
        if args.packed:
            lacuna.load_packed(pipeline.transformer, args.packed, args.device)
            return None
        masks, norms = load_tensors(args.masks, ""), load_tensors(args.norms, ".norm")
        report = lacuna.replace_linears(pipeline.transformer, args.policy, masks=masks, norms=norms)
        pipeline.transformer.to(args.device)
        return report

    return compress


def parse(arguments: Optional[Sequence[str]]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pipeline", help="a folder of diffusers, or a name on the Hugging Face hub")
    parser.add_argument("--prompts", required=True, help="a CSV file with a column Prompt")
    parser.add_argument("--count", type=int, default=500, help="prompts, from the first")
    parser.add_argument("-o", "--out", required=True, metavar="FOLDER")
    parser.add_argument("--policy", default="quaspa", help="a built-in policy or a JSON file (docs/image.md)")
    parser.add_argument("--packed", help="a file of save_packed in place of a policy")
    parser.add_argument("--masks", help="safetensors of 2:4 masks by the weights' names")
    parser.add_argument("--norms", help="safetensors of column norms, for Wanda")
    parser.add_argument("--steps", type=int, default=28)
    parser.add_argument("--guidance", type=float, default=3.5)
    parser.add_argument("--height", type=int, default=1024)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--seed", type=int, default=0, help="of the first picture")
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "float16", "bfloat16"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--scorers", default="clipscore,pickscore,imagereward")
    parser.add_argument("--clip", default="openai/clip-vit-large-patch14")
    parser.add_argument("--pick", default="yuvalkirstain/PickScore_v1")
    parser.add_argument("--pick-processor", default="laion/CLIP-ViT-H-14-laion2B-s32B-b79K")
    parser.add_argument("--image-reward", default="ImageReward-v1.0")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    args = parser.parse_args(arguments)
    if args.count < 1:
        parser.error("--count must be at least 1")
    if args.packed and (args.masks or args.norms):
        parser.error("--packed has its masks already; leave out --masks and --norms")
    return args


def main(arguments: Optional[Sequence[str]] = None) -> int:
    args = parse(arguments)
    kept = ("pipeline", "count", "policy", "packed", "masks", "norms", "steps", "guidance", "height", "width", "seed", "dtype")
    settings = {key: getattr(args, key) for key in kept}
    try:
        prompts = read_prompts(args.prompts, args.count)
        rows = evaluate(lambda: pipeline_of(args), compress_with(args), prompts, Path(args.out), settings, scorers_of(args))
    except (Failure, lacuna.Error) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for row in rows:
        if args.json:
            print(json.dumps(row))
            continue
        spread = "" if row["difference_stderr"] is None else f" +- {row['difference_stderr']:.4f}"
        print(f"{row['score']:12} original {row['original']:.4f}  compressed {row['compressed']:.4f}  difference {row['difference']:+.4f}{spread}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
