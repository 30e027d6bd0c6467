#!/usr/bin/env python3
"""Output error and speed of torch modules before and after lacuna.replace_linears, eager, compiled and, on CUDA, as a graph.

Nets have random weights: a plain transformer, a mixture of experts whose experts are modules, and an SD3-type transformer of diffusers (where that is
installed). Errors are ||y - y32|| / ||y32|| against the float32 net. A form is checked before it is timed.
"""

import argparse
import copy
import json
import statistics
import sys
import time
from dataclasses import dataclass, replace
from typing import Any, Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

import lacuna

FORMS = ("dense", "f8", "nm24_f8", "nm24_bf16")


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (one(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for one in (self.q, self.k, self.v))
        return self.o(functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(functional.gelu(self.up(x), approximate="tanh"))


class Experts(nn.Module):
    """Each token goes through all experts, weighted: routing is not what is measured."""

    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, count)
        self.experts = nn.ModuleList(Mlp(width) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        share = self.router(x).softmax(-1)
        return torch.stack([share[..., e : e + 1] * expert(x) for e, expert in enumerate(self.experts)]).sum(0)


class Block(nn.Module):
    def __init__(self, width: int, heads: int, experts: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.mlp = Experts(width, experts) if experts else Mlp(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


@dataclass(frozen=True)
class Size:
    width: int
    heads: int
    layers: int
    tokens: int


SIZES = {"tiny": Size(64, 2, 2, 64), "small": Size(512, 8, 4, 256), "flux": Size(3072, 24, 4, 4096)}
Net = tuple[nn.Module, dict[str, Tensor]]


def make_transformer(size: Size, experts: int = 0) -> Net:
    blocks = nn.Sequential(*(Block(size.width, size.heads, experts) for _ in range(size.layers)))
    return blocks, {"input": torch.randn(1, size.tokens, size.width)}


def make_sd3(size: Size) -> Net:
    """Sequences of size.tokens: of a square image, and 77 of text."""
    from diffusers import SD3Transformer2DModel

    side = 2 * int(size.tokens**0.5)
    net = SD3Transformer2DModel(
        sample_size=side,
        patch_size=2,
        in_channels=16,
        num_layers=size.layers,
        attention_head_dim=size.width // size.heads,
        num_attention_heads=size.heads,
        joint_attention_dim=size.width,
        caption_projection_dim=size.width,
        pooled_projection_dim=size.width,
        out_channels=16,
        pos_embed_max_size=side // 2,
    )
    inputs = {
        "hidden_states": torch.randn(1, 16, side, side),
        "encoder_hidden_states": torch.randn(1, 77, size.width),
        "pooled_projections": torch.randn(1, size.width),
        "timestep": torch.tensor([500.0]),
    }
    return net, inputs


NETS: dict[str, Callable[[Size], Net]] = {"transformer": make_transformer, "moe": lambda size: make_transformer(size, 4), "sd3": make_sd3}


def policy_of(net: str, form: str) -> Any:
    if net == "sd3":
        return {"nm24_f8": "quaspa"}.get(form, form)
    rules = [{"name": "*.mlp.router.weight", "layout": "bf16"}]
    return {"version": 1, "rules": rules, "rest": form}


def sample_of(output: Any) -> Tensor:
    return output.sample if hasattr(output, "sample") else output


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def as_graph(call: Callable[[], Any]) -> Callable[[], Any]:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = call()

    def replay() -> Any:
        graph.replay()
        return output

    return replay


def times(call: Callable[[], Any], device: torch.device, runs: int) -> list[float]:
    """Milliseconds of each run."""
    out = []
    for _ in range(runs):
        synchronize(device)
        begin = time.perf_counter()
        call()
        synchronize(device)
        out.append(1e3 * (time.perf_counter() - begin))
    return out


def measure(args: argparse.Namespace, net_name: str, device: torch.device, dtype: torch.dtype) -> list[dict[str, Any]]:
    size = replace(SIZES[args.size], layers=args.layers or SIZES[args.size].layers)
    rows: list[dict[str, Any]] = []
    torch.manual_seed(args.seed)
    with torch.device(device):
        dense, inputs = NETS[net_name](size)
    dense.eval().to(device)
    expected = sample_of(dense(**inputs)).float()
    dense.to(dtype)
    inputs = {name: one.to(dtype) for name, one in inputs.items()}
    for form in FORMS:
        net = dense
        if form != "dense":
            net = copy.deepcopy(dense)
            lacuna.replace_linears(net, policy_of(net_name, form))
        bytes_of_weights = sum(one.numel() * one.element_size() for one in (*net.parameters(), *net.buffers()))
        for mode in args.modes.split(","):
            called = torch.compile(net, fullgraph=True, options=lacuna.compile_options()) if mode == "compiled" else net
            call: Callable[[], Any] = lambda called=called: called(**inputs)  # noqa: E731
            if mode == "graph":
                call = as_graph(call)
            for _ in range(args.warmup):
                output = call()
            error = float((sample_of(output).float() - expected).norm() / expected.norm())
            if not error < args.most_error:
                raise SystemExit(f"error: {net_name} {form} {mode}: relative error {error}, more than --most-error {args.most_error}")
            found = times(call, device, args.runs)
            rows.append(
                {
                    "bench": "python",
                    "net": net_name,
                    "form": form,
                    "mode": mode,
                    "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
                    "dtype": str(dtype).removeprefix("torch."),
                    "width": size.width,
                    "layers": size.layers,
                    "tokens": size.tokens,
                    "relative_error": error,
                    "median_ms": statistics.median(found),
                    "min_ms": min(found),
                    "max_ms": max(found),
                    "runs": args.runs,
                    "bytes": bytes_of_weights,
                }
            )
            print_row(args, rows, rows[-1])
        torch.compiler.reset()
    return rows


def print_row(args: argparse.Namespace, rows: list[dict[str, Any]], row: dict[str, Any]) -> None:
    if args.json:
        print(json.dumps(row), flush=True)
        return
    dense = next(one for one in rows if one["form"] == "dense" and one["mode"] == row["mode"])
    print(
        f"{row['net']:12}{row['form']:10}{row['mode']:9} error {row['relative_error']:.4f}  median {row['median_ms']:9.3f} ms "
        f"({row['min_ms']:.3f} .. {row['max_ms']:.3f})  {dense['median_ms'] / row['median_ms']:.2f}x dense  {row['bytes'] / 2**20:.1f} MiB",
        flush=True,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--nets", default=",".join(NETS), help=f"of {', '.join(NETS)}")
    parser.add_argument("--size", default="small", choices=SIZES, help="flux: the width, heads and tokens of FLUX.1 at 1024 x 1024, four layers")
    parser.add_argument("--layers", type=int, default=0, help="layers of a net, in place of the size's")
    parser.add_argument("--dtype", default="", help="float32, float16 or bfloat16; default: bfloat16 on CUDA, float32 on the CPU")
    parser.add_argument("--modes", default="", help="of eager, compiled, graph (CUDA); default: all that the device has")
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--most-error", type=float, default=0.5, help="a form whose relative error is larger is not timed: an error")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    args = parser.parse_args()
    device = torch.device(args.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print("error: there is no CUDA device; use --device cpu", file=sys.stderr)
        return 1
    args.modes = args.modes or ("eager,compiled,graph" if device.type == "cuda" else "eager,compiled")
    dtype = getattr(torch, args.dtype or ("bfloat16" if device.type == "cuda" else "float32"))
    for net in args.nets.split(","):
        if net not in NETS:
            print(f"error: unknown net {net}; known are {', '.join(NETS)}", file=sys.stderr)
            return 1
        try:
            with torch.no_grad():
                measure(args, net, device, dtype)
        except ModuleNotFoundError as error:
            print(f"SKIPPED: {net}: {error}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
