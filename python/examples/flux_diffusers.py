#!/usr/bin/env python3
"""A picture by FLUX.1 with diffusers, its transformer's matrices FP8 and 2:4 sparse.

pip install diffusers transformers sentencepiece accelerate
python flux_diffusers.py black-forest-labs/FLUX.1-dev --prompt "a lighthouse in the fog" -o picture.png --save flux-packed.safetensors
python flux_diffusers.py black-forest-labs/FLUX.1-dev --packed flux-packed.safetensors --prompt "a harbour at night" -o picture.png
"""

import argparse
import time
from typing import Any, Optional

import torch

import lacuna


def compress(pipeline: Any, policy: str = "quaspa", packed: Optional[str] = None, device: str = "cpu") -> Optional[lacuna.Report]:
    """Swaps the linear layers of a pipeline's transformer, on the CPU, then moves the pipeline. packed: a file of save_packed, read instead.

    Any pipeline whose denoiser is called ``transformer`` serves: FLUX.1, Stable Diffusion 3, and others with a policy of their own.
    """
    report = None
    if packed is not None:
        lacuna.load_packed(pipeline.transformer, packed)
    else:
        report = lacuna.replace_linears(pipeline.transformer, policy)
    pipeline.to(device)
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pipeline", help="a folder of diffusers, or a name on the Hugging Face hub")
    parser.add_argument("--prompt", required=True)
    parser.add_argument("-o", "--out", required=True, help="the picture")
    parser.add_argument("--policy", default="quaspa", help="a built-in policy or a JSON file (docs/image.md)")
    parser.add_argument("--packed", help="a file that --save wrote: nothing is compressed")
    parser.add_argument("--save", help="write the packed weights")
    parser.add_argument("--steps", type=int, default=28)
    parser.add_argument("--size", type=int, default=1024)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--compile", action="store_true", help="torch.compile the transformer: the first picture takes minutes")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()

    from diffusers import DiffusionPipeline

    pipeline = DiffusionPipeline.from_pretrained(args.pipeline, torch_dtype=torch.bfloat16)
    if report := compress(pipeline, args.policy, args.packed, args.device):
        print(report)
    if args.save:
        lacuna.save_packed(pipeline.transformer, args.save)
    if args.compile:
        pipeline.transformer = torch.compile(pipeline.transformer, fullgraph=True)
    begin = time.perf_counter()
    generator = torch.Generator().manual_seed(args.seed)
    picture = pipeline(args.prompt, num_inference_steps=args.steps, height=args.size, width=args.size, generator=generator).images[0]
    print(f"{args.steps} steps in {time.perf_counter() - begin:.1f} s")
    picture.save(args.out)


if __name__ == "__main__":
    main()
