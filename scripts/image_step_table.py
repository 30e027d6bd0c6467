#!/usr/bin/env python3
"""QuaSpa's Table 2 on this machine's GPU: one denoising step of FLUX.1-dev's shape and of a mixture of experts with random weights, in bf16, bf16 2:4, FP8 and
FP8 2:4 (`lacuna image bench --device cuda`), by part, with the paper's ratios. "products": how much faster the sparse products of FP8 2:4 are than the
same ones in FP8; "at 2x": what FP8's step would gain if they were twice as fast, the most that sparse tensor cores can do. Beside the attention, PyTorch's
scaled_dot_product_attention by cuDNN and by FlashAttention on the same sizes (left out without PyTorch, and it says so).
Prints tables; --out keeps {command, commit, date, device, driver, rows, attention}."""
import argparse
import json
import shlex
import statistics
import subprocess
import sys

from gpu_results import graph_times, save

POLICIES = {"bf16": "bf16", "nm24_bf16": "bf16 2:4", "f8": "FP8", "quaspa": "FP8 2:4"}
PRODUCTS = ("double_qkv", "double_out", "double_up", "double_down", "single_in", "single_out", "expert_up", "expert_down")  # sparse in quaspa and nm24_bf16
HEADS = {"flux.1-dev": 24, "flux-moe-18b": 16}


def bench(args, shape: str, policy: str, sizes: str, runs: int) -> list[dict]:
    command = [args.lacuna, "image", "bench", "--synthetic", shape, "--policy", policy, "--size", sizes, "--runs", str(runs), "--device", "cuda", "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"error: {shlex.join(command)}: {done.stderr.strip()}")
    return [json.loads(line) for line in done.stdout.splitlines()]


def attention_of_peers(shape: str, sizes: set[tuple[int, int]], runs: int) -> list[dict]:
    """Times of one layer's attention in a graph of two; sizes: images and tokens of one."""
    try:
        import torch
        from torch.nn.attention import SDPBackend, sdpa_kernel
    except ImportError:
        print("no PyTorch here: its attention is left out", file=sys.stderr)
        return []
    out = []
    for images, tokens in sorted(sizes):
        q, k, v = (torch.randn(images, HEADS[shape], tokens, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
        for name, backend in (("cuDNN", SDPBackend.CUDNN_ATTENTION), ("FlashAttention", SDPBackend.FLASH_ATTENTION)):
            try:
                with sdpa_kernel(backend):
                    times = graph_times(lambda _: torch.nn.functional.scaled_dot_product_attention(q, k, v), runs, 2)
            except RuntimeError as error:
                print(f"{name}: {str(error).splitlines()[0]}", file=sys.stderr)
                continue
            out.append({"peer": name, "shape": shape, "batch": images, "tokens": tokens, **times, "tflops": 4e-9 * images * HEADS[shape] * tokens**2 * 128 / times["median_ms"]})
    return out


def print_table(rows: list[dict], peers: list[dict]) -> None:
    cases: dict = {}
    for row in rows:
        case = cases.setdefault((row["shape"], row["height"], row["batch"], row["text_tokens"] + row["tokens"]), {})
        case.setdefault(row["policy"], {})[row["part"]] = row
    print(f"{'shape':<13}{'pixels':>7}{'batch':>6}" + "".join(f"{name:>22}" for name in POLICIES.values()) + f"{'of FP8':>8}{'products':>9}{'at 2x':>7}{'of bf16 2:4':>12}{'attention':>10}")
    for (shape, height, batch, tokens), of in cases.items():
        step = {policy: parts["step"] for policy, parts in of.items()}
        line = f"{shape:<13}{height:>7}{batch:>6}"
        line += "".join(f"{step[p]['median_ms']:>9.2f} ({step[p]['min_ms']:.2f}..{step[p]['max_ms']:.2f})".rjust(22) if p in step else " " * 22 for p in POLICIES)
        if "quaspa" in of:
            ours = step["quaspa"]["median_ms"]
            if "f8" in of:
                products = {policy: sum(of[policy][part]["median_ms"] for part in PRODUCTS if part in of[policy]) for policy in ("f8", "quaspa")}
                dense = step["f8"]["median_ms"]
                line += f"{dense / ours:>7.2f}x{products['f8'] / products['quaspa']:>8.2f}x{dense / (dense - products['f8'] / 2):>6.2f}x"
            line += f"{step['nm24_bf16']['median_ms'] / ours:>11.2f}x" if "nm24_bf16" in of else ""
            line += f"{of['quaspa']['attention']['share']:>10.0%}"
        print(line)
        for peer in peers:
            if (peer["shape"], peer["batch"], peer["tokens"]) == (shape, batch, tokens):
                parts = next(iter(of.values()))
                layers = sum(parts["step"]["layers"])
                mine = statistics.median(case["attention"]["median_ms"] for case in of.values()) / layers
                print(f"  attention of a block {mine:.4f} ms; {peer['peer']} {peer['median_ms']:.4f} ms ({peer['median_ms'] / mine:.2f}x)")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lacuna", default="build/release/lacuna", metavar="PROGRAM", help="default: %(default)s")
    parser.add_argument("--runs", type=int, default=5, help="default: %(default)s")
    parser.add_argument("--large-runs", type=int, default=2, help="of sizes from 4096 x 4096 on; default: %(default)s")
    parser.add_argument("--policies", type=lambda text: text.split(","), default=list(POLICIES), metavar="LIST", help=f"some of {','.join(POLICIES)}; default: all")
    parser.add_argument("--flux", default="512x512,1024x1024,512x512x4,1024x1024x4", metavar="SIZES", help="steps of FLUX.1-dev's shape; empty: none; default: %(default)s")
    parser.add_argument("--moe", default="2048x2048,3072x3072,4096x4096", metavar="SIZES", help="steps of the mixture of experts; empty: none; default: %(default)s")
    parser.add_argument("--out", metavar="FILE", help="keep the rows as JSON")
    args = parser.parse_args()
    rows, peers = [], []
    for shape, sizes in (("flux.1-dev", args.flux), ("flux-moe-18b", args.moe)):
        large = [size for size in sizes.split(",") if size and int(size.split("x")[0]) >= 4096]
        small = [size for size in sizes.split(",") if size and size not in large]
        mine = []
        for policy in args.policies:
            for some, runs in ((small, args.runs), (large, args.large_runs)) if args.runs != args.large_runs else ((small + large, args.runs),):
                if some:
                    mine += bench(args, shape, policy, ",".join(some), runs)
                    save(args.out, rows + mine, attention=peers)
        rows += mine
        peers += attention_of_peers(shape, {(row["batch"], row["text_tokens"] + row["tokens"]) for row in mine}, args.runs)
        save(args.out, rows, attention=peers)
    print_table(rows, peers)
    return 0


if __name__ == "__main__":
    sys.exit(main())
