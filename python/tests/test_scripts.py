"""scripts/eval_images.py and the example, with pipelines and scorers that need no weights."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import lacuna

ROOT = Path(__file__).resolve().parents[2]
Image = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
ImageStat = pytest.importorskip("PIL.ImageStat", reason="Pillow is not installed")


def load(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


eval_images = load("scripts/eval_images.py")
SETTINGS: dict[str, Any] = {"seed": 5, "steps": 2, "guidance": 1.0, "height": 8, "width": 8, "policy": "f8"}
F8 = {"version": 1, "rules": [], "rest": "f8"}


class StubPipeline:
    """A picture of noise that went through a linear layer a step."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.transformer = nn.Sequential(nn.Linear(24, 24), nn.Sigmoid())
        self.calls: list[str] = []

    @torch.no_grad()
    def __call__(self, prompt: str, *, num_inference_steps: int, guidance_scale: float, height: int, width: int, generator: torch.Generator) -> Any:
        self.calls.append(prompt)
        x = torch.randn(height, width * 3, generator=generator)
        for _ in range(num_inference_steps):
            x = self.transformer(guidance_scale * x)
        return SimpleNamespace(images=[Image.fromarray((255 * x).reshape(height, width, 3).to(torch.uint8).numpy())])


def brightness(prompt: str, picture: Any) -> float:
    """Of a picture, plus the length of its prompt."""
    return len(prompt) + ImageStat.Stat(picture.convert("L")).mean[0] / 255


def run(folder: Path, pipeline: StubPipeline, settings: dict[str, Any] = SETTINGS) -> list[dict[str, Any]]:
    def compress(made: StubPipeline) -> lacuna.Report:
        return lacuna.replace_linears(made.transformer, F8)

    return eval_images.evaluate(lambda: pipeline, compress, ["a dog", "two cats", "rain"], folder, settings, {"brightness": lambda: brightness})


def test_pairs_of_pictures_and_scores(tmp_path: Path) -> None:
    pipeline = StubPipeline()
    (row,) = run(tmp_path, pipeline)
    assert pipeline.calls == ["a dog", "two cats", "rain"] * 2
    pictures = {kind: [(tmp_path / kind / f"{i:05}.png").read_bytes() for i in range(3)] for kind in ("original", "compressed")}
    assert len(set(pictures["original"])) == 3 and pictures["original"] != pictures["compressed"]
    expected = [brightness(prompt, Image.open(tmp_path / "original" / f"{i:05}.png")) for i, prompt in enumerate(["a dog", "two cats", "rain"])]
    assert row["original"] == pytest.approx(sum(expected) / 3)
    assert row["difference"] == pytest.approx(row["compressed"] - row["original"]) and 0 < abs(row["difference"]) < 0.1
    assert row["difference_stderr"] < row["original_stderr"] and row["pictures"] == 3
    assert json.loads((tmp_path / "scores.json").read_text())["rows"] == [row]


def test_a_stopped_run_goes_on_and_other_settings_do_not(tmp_path: Path) -> None:
    rows = run(tmp_path, StubPipeline())
    (tmp_path / "compressed" / "00001.png").unlink()
    again = StubPipeline()
    assert run(tmp_path, again) == rows
    assert again.calls == ["two cats"]
    with pytest.raises(eval_images.Failure, match="settings.json: steps was 2, and is 3 now; take another folder"):
        run(tmp_path, StubPipeline(), {**SETTINGS, "steps": 3})


def test_missing_weights_are_said_before_the_first_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = tmp_path / "prompts.csv"
    prompts.write_text("Prompt\na dog\n", encoding="utf-8")
    out = tmp_path / "out"
    nowhere = str(tmp_path / "nowhere")
    arguments = [nowhere, "--prompts", str(prompts), "--count", "1", "-o", str(out)]
    assert eval_images.main([*arguments, "--clip", nowhere, "--scorers", "clipscore"]) == 1
    assert "error: scorer clipscore cannot be loaded" in capsys.readouterr().err and not out.exists()
    assert eval_images.main([*arguments, "--scorers", ""]) == 1
    assert "cannot be loaded" in capsys.readouterr().err
    assert eval_images.main([*arguments, "--scorers", "beauty"]) == 1
    assert "unknown scorer beauty; known are clipscore, pickscore, imagereward" in capsys.readouterr().err
    assert eval_images.main([nowhere, "--prompts", str(prompts), "--count", "2", "-o", str(out)]) == 1
    assert "it has 1 prompts, but --count asks for 2" in capsys.readouterr().err


@torch.no_grad()
def test_the_example_compresses_a_pipeline_of_diffusers(tmp_path: Path) -> None:
    diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")
    pytest.importorskip("transformers", reason="transformers is not installed")
    example = load("python/examples/flux_diffusers.py")

    def make() -> Any:
        torch.manual_seed(3)
        return diffusers.FluxPipeline(
            scheduler=diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
            vae=None,
            text_encoder=None,
            tokenizer=None,
            text_encoder_2=None,
            tokenizer_2=None,
            transformer=diffusers.FluxTransformer2DModel(
                in_channels=16,
                num_layers=1,
                num_single_layers=1,
                attention_head_dim=16,
                num_attention_heads=2,
                joint_attention_dim=32,
                pooled_projection_dim=16,
                axes_dims_rope=(4, 6, 6),
                guidance_embeds=True,
            ).eval(),
        )

    def latents(pipeline: Any) -> torch.Tensor:
        generator = torch.Generator().manual_seed(0)
        text = torch.randn(1, 7, 32, generator=generator), torch.randn(1, 16, generator=generator)
        return pipeline(
            prompt_embeds=text[0], pooled_prompt_embeds=text[1], height=64, width=64, num_inference_steps=2, generator=generator, output_type="latent"
        ).images

    pipeline = make()
    dense = latents(pipeline)
    report = example.compress(pipeline)
    names = {one.name: one.layout for one in report.replaced}
    assert names["transformer_blocks.0.attn.to_q"] == "nm24_f8" and names["transformer_blocks.0.attn.add_q_proj"] == "f8"
    assert names["single_transformer_blocks.0.proj_out"] == "nm24_f8" and "x_embedder" not in names
    compressed = latents(pipeline)
    assert 0 < float((compressed - dense).norm() / dense.norm()) < 0.2
    lacuna.save_packed(pipeline.transformer, tmp_path / "packed.safetensors")
    other = make()
    assert example.compress(other, packed=str(tmp_path / "packed.safetensors")) is None
    assert torch.equal(latents(other), compressed)
