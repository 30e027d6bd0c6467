#!/usr/bin/env python3
"""QuaSpa's Table 1 and Figure 8 on this machine's GPU: `lacuna image linear --device cuda` beside PyTorch's row-wise and tensor-wise FP8 products
(cuBLAS and CUTLASS through torch._scaled_mm, with and without fast accumulation) and cuSPARSELt's FP8 2:4 product, every algorithm of it timed.
One run, random normal data, graphs of 8 launches over several copies of the operands, medians; our sparse product once more after the peers. Then the ablation, the
kernel of devices without wgmma (mma) on the same shapes, products grouped by experts, even and skewed, beside torch._scaled_grouped_mm, and what a scale a row saves
of the error beside one scale a tensor. Without PyTorch the peers are left out, and it says so.
Prints a table; --out keeps {command, commit, date, device, driver, rows}."""
import argparse
import json
import shlex
import subprocess
import sys

from gpu_results import graph_times, save

PAPER = [(m, n, k) for m in (4096, 6144, 16384, 18432) for n, k in ((3072, 3072), (12288, 3072), (3072, 12288))]
EXPERTS, OF_EXPERTS = 32, [(16384, 2048, 2048), (65536, 2048, 2048)]  # of the net flux-moe-18b: tokens of all experts, outputs and inputs of one
PARTS = ["paper", "ablation", "mma", "more", "groups", "errors"]
MORE = [(1024, 3072, 3072), (1536, 3072, 3072), (4608, 3072, 3072), (4608, 21504, 3072), (4608, 3072, 15360)]
LAUNCHES, LIMIT = 8, 448


def lacuna(program: str, flags: list[str]) -> list[dict]:
    command = [program, "image", "linear", "--device", "cuda", "--json", *flags]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"error: {shlex.join(command)}: {done.stderr.strip()}")
    return [json.loads(line) for line in done.stdout.splitlines()]


def shapes_flag(shapes: list[tuple[int, int, int]]) -> list[str]:
    return ["--shape", ",".join("x".join(map(str, shape)) for shape in shapes)]


class Peers:
    """Times of PyTorch's products of one shape."""

    def __init__(self, runs: int):
        import torch

        self.torch, self.runs = torch, runs

    def time(self, call, runs: int = 0) -> dict:
        return graph_times(call, runs or self.runs, LAUNCHES)

    def two_of_four(self, w):
        groups = w.view(w.shape[0], -1, 4)
        kept = self.torch.zeros_like(groups, dtype=self.torch.bool).scatter_(-1, groups.abs().topk(2, dim=-1).indices, True)
        return (groups * kept).view_as(w)

    def rows(self, shape: tuple[int, int, int]) -> list[dict]:
        torch, (m, n, k) = self.torch, shape
        copies = max(2, min(4, (240 << 20) // (m * k + n * k) + 1))
        fp8 = torch.float8_e4m3fn
        x = [torch.randn(m, k, device="cuda").mul(90).clamp(-LIMIT, LIMIT).to(fp8) for _ in range(copies)]
        w = [torch.randn(n, k, device="cuda").mul(90).clamp(-LIMIT, LIMIT) for _ in range(copies)]
        codes = [v.to(fp8) for v in w]
        of_token, of_output, one = torch.rand(m, 1, device="cuda"), torch.rand(1, n, device="cuda"), torch.ones((), device="cuda")
        out = []

        def add(name: str, call, reference=None, **more):
            result = call(0).float()
            if reference is not None and not (result - reference).norm() / reference.norm() < 2e-2:
                sys.exit(f"error: {name} {shape}: a wrong result")
            out.append({"bench": "peer", "peer": name, "M": m, "N": n, "K": k, **self.time(call), **more})
            out[-1]["tflops"] = 2e-9 * m * n * k / out[-1]["median_ms"]

        def scaled(a, b, fast):
            return lambda i: torch._scaled_mm(x[i % copies], codes[i % copies].t(), a, b, out_dtype=torch.bfloat16, use_fast_accum=fast)

        full = x[0].float() @ codes[0].float().t()
        add("row-wise", scaled(of_token, of_output, True), full * of_token * of_output)
        add("row-wise, full accumulation", scaled(of_token, of_output, False), full * of_token * of_output)
        add("tensor-wise", scaled(one, one, True), full)
        packed = [torch._cslt_compress(self.two_of_four(v).to(fp8)) for v in w]

        def sparse(algorithm):
            return lambda i: torch._cslt_sparse_mm(packed[i % copies], x[i % copies].t(), out_dtype=torch.bfloat16, alg_id=algorithm)

        times = {}
        for algorithm in range(64):
            try:
                sparse(algorithm)(0)
            except RuntimeError:
                break
            times[algorithm] = self.time(sparse(algorithm), 3)["median_ms"]
        best = min(times, key=times.get)
        reference = self.two_of_four(w[0]).to(fp8).float() @ x[0].float().t()
        add("cuSPARSELt, best algorithm", sparse(best), reference, algorithm=best, algorithms=len(times))
        add("cuSPARSELt, default", sparse(0), reference)
        return out

    def grouped(self, shape: tuple[int, int, int], skewed: bool) -> list[dict]:
        torch, (m, n, k) = self.torch, shape
        shares = torch.cumsum(torch.tensor([1 / (g + 1) if skewed else 1.0 for g in range(EXPERTS)], dtype=torch.float64), 0)
        ends = torch.round(shares / shares[-1] * m).to(torch.int32).cuda()
        x = torch.randn(m, k, device="cuda").mul(90).clamp(-LIMIT, LIMIT).to(torch.float8_e4m3fn)
        w = torch.randn(EXPERTS, n, k, device="cuda").mul(90).clamp(-LIMIT, LIMIT).to(torch.float8_e4m3fn)
        of_token, of_output = torch.rand(m, device="cuda"), torch.rand(EXPERTS, n, device="cuda")

        def call(_):
            return torch._scaled_grouped_mm(x, w.transpose(-2, -1), of_token, of_output, offs=ends, out_dtype=torch.bfloat16, use_fast_accum=True)

        try:
            y, begin, end = call(0), int(ends[0]), int(ends[1])
        except (AttributeError, RuntimeError) as error:
            print(f"torch._scaled_grouped_mm: {str(error).splitlines()[0]}", file=sys.stderr)
            return []
        exact = (x[begin:end].float() @ w[1].float().t()) * of_token[begin:end, None] * of_output[1]
        if not (y[begin:end].float() - exact).norm() / exact.norm() < 2e-2:
            sys.exit(f"error: torch._scaled_grouped_mm {shape}: a wrong result")
        return [{"bench": "peer", "peer": "grouped row-wise", "M": m, "N": n, "K": k, "groups": EXPERTS, "skewed": skewed, **self.time(call)}]

    def errors(self) -> list[dict]:
        """Relative errors of products of 4096 x 3072 x 3072 quantized to E4M3 with a scale a row and with one a tensor, of normal values and with one token
        and one output in a hundred 300 times as large and the weights of one input in a hundred 300 times as small; against what is quantized."""
        torch = self.torch
        out = []
        for outliers in (False, True):
            x, w = torch.randn(4096, 3072, device="cuda"), torch.randn(3072, 3072, device="cuda")
            if outliers:
                x[::100] *= 300
                w[:, ::100] /= 300
                w[::100] *= 300
            exact = x.double() @ w.double().t()
            for name, dims in (("a row", 1), ("a tensor", None)):
                parts = []
                for v in (x, w):
                    scale = (v.abs().amax(dims, keepdim=True) if dims else v.abs().max()) / LIMIT
                    parts.append((v / scale).to(torch.float8_e4m3fn).double() * scale.double())
                each = (parts[0] @ parts[1].t() - exact).norm(dim=1) / exact.norm(dim=1)
                out.append({"bench": "error", "scales": name, "outliers": outliers, "median_relative_error": each.median().item(), "largest_relative_error": each.max().item()})
        return out


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lacuna", default="build/release/lacuna", metavar="PROGRAM", help="default: %(default)s")
    parser.add_argument("--runs", type=int, default=15, help="default: %(default)s")
    parser.add_argument("--shapes", type=int, default=len(PAPER), metavar="N", help="only the first N of the paper's twelve shapes")
    parser.add_argument("--parts", type=lambda text: text.split(","), default=PARTS, metavar="LIST", help=f"some of {','.join(PARTS)}; default: all")
    parser.add_argument("--out", metavar="FILE", help="keep the rows as JSON")
    args = parser.parse_args()
    if unknown := set(args.parts) - set(PARTS):
        parser.error(f"--parts: {', '.join(sorted(unknown))}: expected some of {','.join(PARTS)}")
    paper, runs = PAPER[: args.shapes], ["--runs", str(args.runs)]
    rows = []
    try:
        peers = Peers(args.runs)
    except ImportError:
        peers = None
        print("no PyTorch here: peers are left out", file=sys.stderr)

    def beside_peers(shape: tuple[int, int, int], flags: list[str]) -> None:
        """Ours, the peers, and once more our sparse FP8 product."""
        nonlocal rows
        rows += lacuna(args.lacuna, [*runs, *shapes_flag([shape]), *flags])
        if peers:
            rows += peers.rows(shape)
            peers.torch.cuda.empty_cache()
            rows += [dict(row, repeated=True) for row in lacuna(args.lacuna, [*runs, *shapes_flag([shape]), "--layout", "nm24_f8"])]
        save(args.out, rows)
        if sys.stderr.isatty():
            print(f"{shape} done", file=sys.stderr)

    if "paper" in args.parts:
        for shape in paper:
            beside_peers(shape, ["--layout", "f8,nm24_f8", "--accumulate", "fast,full", "--write-back", "staged"])
    if "ablation" in args.parts:
        rows += [dict(row, ablation=True) for row in lacuna(args.lacuna, [*runs, *shapes_flag(paper), "--layout", "nm24_f8", "--write-back", "staged,direct,separate"])]
        save(args.out, rows)
    if "mma" in args.parts:
        rows += [dict(row, forced=True) for row in lacuna(args.lacuna, [*runs, *shapes_flag(paper), "--layout", "f8,nm24_f8", "--kernel", "mma"])]
        save(args.out, rows)
    if "more" in args.parts:
        for shape in MORE:
            beside_peers(shape, ["--layout", "f8,nm24_f8,bf16,nm24_bf16"])
    if "groups" in args.parts:
        for skewed in (False, True):
            for shape in OF_EXPERTS:
                rows += lacuna(args.lacuna, [*runs, *shapes_flag([shape]), "--layout", "f8,nm24_f8", "--groups", str(EXPERTS), *(["--skewed"] if skewed else [])])
                rows += peers.grouped(shape, skewed) if peers else []
    if "errors" in args.parts:
        rows += peers.errors() if peers else []
    kept = {}
    for row in rows:
        if row["bench"] == "error":
            print(f"one scale {row['scales']}{', outliers' if row['outliers'] else ''}: relative error of a token {row['median_relative_error']:.4f}, at most {row['largest_relative_error']:.4f}")
            continue
        key = row.get("peer") or f"{row['layout']}, {row['accumulate']}, {row['write_back']}{', again' if row.get('repeated') else ''}{', ablation' if row.get('ablation') else ''}{', mma' if row.get('forced') else ''}"
        groups = f"{row['groups']} groups{', skewed' if row.get('skewed') else ''}" if row.get("groups") else ""
        kept.setdefault((row["M"], row["N"], row["K"], groups), {}).setdefault(key, row)
    for shape, of in kept.items():
        ours = next(row for key, row in of.items() if key.startswith("nm24_f8, fast, staged"))["median_ms"]
        quantized = [of[key] for key in ("f8, fast, staged", "nm24_f8, fast, staged") if key in of]
        print(f"{shape[0]:>6} {shape[1]:>6} {shape[2]:>6} {shape[3]}  " + "; ".join(f"{key} {row['median_ms']:.4f} ({row['median_ms'] / ours:.2f}x)" for key, row in of.items())
              + "; with the quantization " + ", ".join(f"{row['layout']} {row['median_ms'] + row['quantize_ms']:.4f}" for row in quantized))
    save(args.out, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
