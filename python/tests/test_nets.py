"""Whole nets before and after replace_linears: torch's own transformer, and an SD3-type one of diffusers."""

import contextlib
import copy
import functools
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from reference import product, quantized
from torch import Tensor, nn

import lacuna
from lacuna import PackedLinear

ROOT = Path(__file__).resolve().parents[2]
FORMS = ["f8", "nm24_f8", "nm24_bf16"]


def emulated(net: nn.Module, packed: nn.Module) -> nn.Module:
    """The dense net with the packed one's weights, and with inputs rounded as it rounds them."""
    out = copy.deepcopy(net).float()

    def round_tokens(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        codes, scale = quantized(inputs[0].cpu())
        return ((codes.float() * scale[..., None]).to(inputs[0].device),)

    def round_to_bf16(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (inputs[0].bfloat16().float(),)

    for name, layer in packed.named_modules():
        if isinstance(layer, PackedLinear):
            linear = out.get_submodule(name)
            assert isinstance(linear, nn.Linear)
            linear.weight.data.copy_(layer.dequantize())
            linear.register_forward_pre_hook(round_tokens if layer.scaled else round_to_bf16)
    return out


def relative_error(y: Tensor, expected: Tensor) -> float:
    return float((y - expected).norm() / expected.norm())


def check(net: nn.Module, packed: nn.Module, call: Any, device: torch.device) -> None:
    """call(module) -> Tensor."""
    with each_product_checked(packed) as checked:
        got = call(packed)
    assert len(checked) == sum(isinstance(one, PackedLinear) for one in packed.modules())
    dense, expected = call(net), call(emulated(net, packed))
    # Values that are off by a relative e cross a rounding boundary of E4M3, whose steps are 1/16 to 1/8, with a probability of some 16 e, which is off by
    # sqrt(16 e) / 16. Sums of float32 in another order: e = 2^-22, 1e-4 a layer. Tensor cores that keep 14 bits: e = 2^-12, 4e-3 a layer, a fifth of what
    # rounding itself is off, which is a step / sqrt(12).
    error = relative_error(expected, dense)
    assert 0 < error < 0.5
    bound = 0.5 * error if device.type == "cuda" and next(iter(checked.values())).scaled else 2e-3
    assert relative_error(got, expected) < bound
    compiled = torch.compile(packed, backend="aot_eager" if device.type == "cpu" else "inductor", fullgraph=True)
    assert relative_error(call(compiled), got) < bound
    torch.compiler.reset()


@contextlib.contextmanager
def each_product_checked(net: nn.Module) -> Iterator[dict[str, PackedLinear]]:
    """Compares every packed layer's output with the product of its input in double precision; yields the layers that ran."""
    checked: dict[str, PackedLinear] = {}

    def compare(name: str, layer: PackedLinear, inputs: tuple[Tensor, ...], y: Tensor) -> None:
        expected, bound = product(layer, inputs[0], tensor_core=y.device.type == "cuda")
        assert bool(((y.cpu().double() - expected).abs() <= bound).all()), name
        checked[name] = layer

    layers = [(name, one) for name, one in net.named_modules() if isinstance(one, PackedLinear)]
    hooks = [one.register_forward_hook(functools.partial(compare, name)) for name, one in layers]
    yield checked
    for hook in hooks:
        hook.remove()


@torch.no_grad()
@pytest.mark.parametrize("form", FORMS)
def test_a_transformer_of_torch(device: torch.device, form: str) -> None:
    """Its fast path, which reads weights itself, has to stand back."""
    layer = nn.TransformerEncoderLayer(64, 4, 128, activation="gelu", batch_first=True)
    net = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval().to(device)
    packed = copy.deepcopy(net)
    report = lacuna.replace_linears(packed, {"version": 1, "rules": [], "rest": form})
    assert [one.name for one in report.replaced] == [f"layers.{i}.linear{j}" for i in (0, 1) for j in (1, 2)]
    x = torch.randn(2, 16, 64, device=device)
    check(net, packed, lambda module: module(x), device)


@torch.no_grad()
@pytest.mark.parametrize("form", FORMS)
def test_an_sd3_transformer_of_diffusers(device: torch.device, form: str) -> None:
    diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")
    net = diffusers.SD3Transformer2DModel(
        sample_size=16,
        in_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=4,
        joint_attention_dim=32,
        caption_projection_dim=64,
        pooled_projection_dim=48,
        out_channels=4,
        pos_embed_max_size=16,
        qk_norm="rms_norm",
    )
    net = net.eval().to(device)
    packed = copy.deepcopy(net)
    report = lacuna.replace_linears(packed, "quaspa" if form == "nm24_f8" else form)
    layouts = {one.name: one.layout for one in report.replaced}
    assert layouts["transformer_blocks.0.attn.to_q"] == form
    assert layouts.get("transformer_blocks.0.attn.add_q_proj") == (None if form == "nm24_bf16" else "f8")
    assert "transformer_blocks.1.norm1.linear" not in layouts and "proj_out" not in layouts
    inputs = {
        "hidden_states": torch.randn(2, 4, 16, 16, device=device),
        "encoder_hidden_states": torch.randn(2, 7, 32, device=device),
        "pooled_projections": torch.randn(2, 48, device=device),
        "timestep": torch.tensor([500.0, 3.0], device=device),
    }
    check(net, packed, lambda module: module(**inputs).sample, device)


def test_the_benchmark_runs(device: torch.device) -> None:
    arguments = ["--device", device.type, "--nets", "transformer,moe", "--size", "tiny", "--runs", "2", "--warmup", "1", "--modes", "eager", "--json"]
    done = subprocess.run([sys.executable, ROOT / "scripts/bench_python.py", *arguments], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(row["net"], row["form"]) for row in rows] == [(net, form) for net in ("transformer", "moe") for form in ("dense", *FORMS)]
    assert all(row["median_ms"] > 0 for row in rows)
    errors = {row["form"]: row["relative_error"] for row in rows if row["net"] == "transformer"}
    assert errors["dense"] < errors["f8"] < errors["nm24_f8"] < 0.5
    sizes = {row["form"]: row["bytes"] for row in rows if row["net"] == "transformer"}
    assert sizes["nm24_f8"] < sizes["f8"] < sizes["dense"]
