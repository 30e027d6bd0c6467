#!/usr/bin/env python3
"""Times `lacuna bench --device cuda` for several shapes and sparsities.
--what groups: the same layers, or copies of one matrix (--single), in gs4 at several weight sparsities and group sizes, stream-K and slice-K, beside zz4_k, gq4, gq2
and nm24_q4 dense, PyTorch's int4 kernel, ggml's Q4_K (--ggml) and Sparse-Marlin's 2:4 kernel (--sparse-marlin).
--what linear: beside PyTorch's int4 kernel (torch._weight_int4pack_mm, groups of 128) and ggml's Q4_K (--ggml) on the same layers of the same device in
the same run: a CUDA graph of one token, every layer's weights in memory of their own, results checked first. --what decode: whole tokens and the prefill of a prompt, beside llama.cpp's
llama-bench (a CUDA build, --llama-bench) on the same shape in q4_K with the same q6_K head, with flash attention, in alternating rounds.
--what whole: whole tokens, random weights in f16, 8 and 4 bits and group-sparse at several sparsities (--weights), on one device and on several (--gpus): milliseconds a
token, device memory, tokens/s of each output length (--lengths) after --input tokens. A file of each model is written to --scratch, which may be memory, and
removed before the next; --out is written after each, and kept where a later one fails.
Prints a table; --out keeps {command, commit, date, device, driver, rows}."""
import argparse
import json
import pathlib
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

from gpu_results import save

# layers, then N x K of the groups of one layer: q+k+v, o, gate+up, down.
SHAPES = {
    "llama-2-7b": (32, [(12288, 4096), (4096, 4096), (22016, 4096), (4096, 11008)]),
    "llama-3-8b": (32, [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)]),
    "llama-2-13b": (40, [(15360, 5120), (5120, 5120), (27648, 5120), (5120, 13824)]),
    "llama-3.2-1b": (16, [(3072, 2048), (2048, 2048), (16384, 2048), (2048, 8192)]),
    "llama-2-70b": (40, [(10240, 8192), (8192, 8192), (57344, 8192), (8192, 28672)]),  # 40 of its 80 layers
}
GROUP = 128

# --what whole, by name: layout of the matrices and of the head, then what `lacuna synth` has to know. In groups of 16, as GQSA has them.
WHOLE = {
    "f16": ("f16", "f16", []),
    "w8": ("q8_0", "q8_0", []),
    "w4": ("zz4_k", "q6_K", []),
    "w4-g128": ("gq4", "q6_K", ["--group-size", "128"]),
    **{f"w{bits}s{sparsity}": (f"gs{bits}", head, ["--group-size", "16", "--weight-sparsity", str(sparsity)])
       for bits, head in ((8, "q8_0"), (4, "q6_K")) for sparsity in (30, 40, 50)},
}


def layers_of(shape: str) -> tuple[int, list[tuple[int, int]]]:
    """As SHAPES has them; of NxK as many copies as lacuna's src/model/shapes.h says."""
    if shape in SHAPES:
        return SHAPES[shape]
    n, k = (int(side) for side in shape.split("x"))
    return max(2, -(-(1 << 30) // (n * k))), [(n, k)]


def layers_flag(shape: str) -> list[str]:
    return ["--layers", str(SHAPES[shape][0])] if shape in SHAPES else []


def matrix(text: str) -> str:
    sides = text.split("x")
    if len(sides) != 2 or not all(side.isdecimal() and int(side) >= 256 for side in sides):
        raise argparse.ArgumentTypeError(f"{text}: expected NxK, such as 4096x4096, of 256 and more")
    return text


def percentages(text: str) -> str:
    try:
        fine = all(0 <= float(part) < 100 for part in text.split(","))
    except ValueError:
        fine = False
    if not fine:
        raise argparse.ArgumentTypeError(f"{text}: expected percentages from 0 to below 100, separated by commas, such as 0,25,50")
    return text


def lacuna_rows(program: str, shape: str, layout: str, sparsity: float, runs: int, more: list[str] | None = None) -> list[dict]:
    command = [program, "bench", "--synthetic", shape, "--device", "cuda", "--what", "linear", "--layout", layout, "--json", "--runs", str(runs),
               *layers_flag(shape), *(more or [])]
    if sparsity:
        command += ["--act-sparsity", f"{sparsity:g}"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"error: {shlex.join(command)}: {done.stderr.strip()}")
    return [json.loads(line) for line in done.stdout.splitlines()]


def decode_rows(program: str, shape: str, sparsity: float, args) -> list[dict]:
    """Whole tokens; the dense ones after the prefill of a prompt, or beside those of the sparsity."""
    prefill = not sparsity and args.prompt
    command = [program, "bench", "--synthetic", shape, "--device", "cuda", "--what", "decode,prefill" if prefill else "decode", "--layout", "zz4_k",
               "--json", "--runs", str(args.runs), "--context", args.depths, "--gen", str(args.tokens)]
    if prefill:
        command += ["--prompt", str(args.prompt)]
    if sparsity:
        command += ["--act-sparsity", f"{sparsity:g}"]
    if args.beside_dense:
        command += ["--beside-dense"]
    if args.scratch:
        command += ["--scratch", args.scratch]
    if args.tune:
        command += ["--tune"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"error: {shlex.join(command)}: {done.stderr.strip()}")
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    # Dense rows come first.
    n_dense = len(rows) // 2 if args.beside_dense else 0
    return [dict(row, asked_sparsity=0.0 if at < n_dense else sparsity / 100) for at, row in enumerate(rows)]


def llama_rows(model: pathlib.Path, shape: str, args) -> list[dict]:
    rows = []
    tokens, prompt = ["-p", "0", "-n", str(args.tokens), "-d", args.depths], ["-p", str(args.prompt), "-n", "0"]
    for what in [tokens, prompt] if args.prompt else [tokens]:
        command = [args.llama_bench, "-m", str(model), "-ngl", "99", *what, "-fa", "1", "-r", str(args.runs), "-o", "jsonl"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            sys.exit(f"error: {shlex.join(command)}: {done.stderr.strip()}")
        for line in done.stdout.splitlines():
            found = json.loads(line)
            prefill = found["n_prompt"] > 0
            times = [ns / 1e6 / (1 if prefill else args.tokens) for ns in found["samples_ns"]]
            median = statistics.median(times)
            rows.append({"bench": "prefill" if prefill else "decode",
                         "what": f"{found['n_prompt']} tokens" if prefill else f"{args.tokens} tokens at depth {found['n_depth']}", "shape": shape,
                         "layout": "q4_K+q6_K, llama.cpp", "act_sparsity": 0.0, "asked_sparsity": 0.0, "device": "cuda", "median_ms": median,
                         "min_ms": min(times), "max_ms": max(times), "runs": args.runs, "bytes": found["model_size"],
                         "tok_s": (found["n_prompt"] if prefill else 1) * 1e3 / median, "gpu": found["gpu_info"], "flash_attention": True})
    return rows


def make_model(model: pathlib.Path, shape: str, program: str) -> None:
    if not model.exists():
        done = subprocess.run([program, "synth", shape, "--layout", "q4_K", "-o", str(model)], capture_output=True, text=True)
        if done.returncode != 0:
            sys.exit(f"error: lacuna synth: {done.stderr.strip()}")


def decoding(args) -> list[dict]:
    """Every sparsity and llama.cpp once a round."""
    rows = []
    with tempfile.TemporaryDirectory(dir=args.scratch) as folder:
        for shape in args.shape or ["llama-2-7b", "llama-3.2-1b"]:
            model = pathlib.Path(folder) / f"{shape}-q4_K.gguf"
            for round_number in range(args.rounds):
                mine = []
                for sparsity in args.sparsity.split(","):
                    mine += decode_rows(args.lacuna, shape, float(sparsity), args)
                peers = []
                if args.llama_bench:
                    make_model(model, shape, args.lacuna)
                    peers = llama_rows(model, shape, args)
                    # `lacuna bench` writes a file of that size too, for as long as it runs.
                    if shutil.disk_usage(folder).free < 1.1 * model.stat().st_size:
                        model.unlink()
                by_what = {row["what"]: row for row in peers}
                for row in mine + peers:
                    row["round"] = round_number
                    peer = by_what.get(row["what"].removesuffix(", logits on the host"))
                    if peer:
                        row["speedup_over_llama_cpp"] = round(peer["median_ms"] / row["median_ms"], 3)
                    ratio = f"{row['speedup_over_llama_cpp']:.2f}x" if peer else ""
                    print(f"{shape:<12} {100 * row['act_sparsity']:4.0f}%  {row['layout']:<22} {row['what']:<48} {row['median_ms']:8.4f} ms "
                          f"({row['min_ms']:.4f} to {row['max_ms']:.4f}) {ratio:>6}", flush=True)
                rows += mine + peers
                finish(args, rows)  # what a later round's failure leaves
            model.unlink(missing_ok=True)
    return rows


def torch_row(shape: str, runs: int) -> dict | None:
    try:
        import torch
    except ImportError:
        print("PyTorch is not here: its kernel is left out", file=sys.stderr)
        return None
    layers, groups = layers_of(shape)
    torch.manual_seed(0)
    copies, inputs, worst, total = [], [], 0.0, 0
    for n, k in groups:
        codes = torch.randint(0, 16, (n, k), dtype=torch.int32, device="cuda")
        packed = torch._convert_weight_to_int4pack((codes[:, 0::2] << 4 | codes[:, 1::2]).to(torch.uint8), 8)
        scales = (torch.rand(k // GROUP, n, 2, device="cuda") * 0.01 + 0.001).to(torch.bfloat16)
        x = torch.randn(1, k, device="cuda").to(torch.bfloat16)
        weight = (codes.float() - 8).view(n, k // GROUP, GROUP) * scales[:, :, 0].t().float()[:, :, None] + scales[:, :, 1].t().float()[:, :, None]
        exact = x.double() @ weight.view(n, k).double().t()
        result = torch._weight_int4pack_mm(x, packed, GROUP, scales).double()
        worst = max(worst, float((result - exact).norm() / exact.norm()))
        del weight, codes
        copies.append([(packed.clone(), scales.clone()) for _ in range(layers)])
        inputs.append(x)
        total += layers * (packed.numel() * packed.element_size() + scales.numel() * 2)
    if not worst < 0.02:
        sys.exit(f"error: torch._weight_int4pack_mm is off by {worst:.3g}")

    def token():
        for layer in range(layers):
            for x, copy in zip(inputs, copies):
                torch._weight_int4pack_mm(x, copy[layer][0], GROUP, copy[layer][1])

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        token()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        token()
    times = []
    for run in range(runs + 3):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        if run >= 3:
            times.append(begin.elapsed_time(end))
    median = statistics.median(times)
    row = {"bench": "linear", "what": f"{layers} layers, torch._weight_int4pack_mm", "shape": shape, "layout": "int4 g128", "act_sparsity": 0.0,
           "device": "cuda", "median_ms": median, "min_ms": min(times), "max_ms": max(times), "runs": runs, "bytes": total,
           "gb_s": total / median / 1e6, "tok_s": 1e3 / median, "checked": True, "deviation": worst, "gpu": torch.cuda.get_device_name(0)}
    del graph, copies
    torch.cuda.empty_cache()
    return row


def harness_rows(program: str, shape: str, runs: int) -> list[dict]:
    """What a program of scripts/harness prints."""
    command = [program, "--device", "cuda", "--shape" if shape in SHAPES else "--single", shape, *layers_flag(shape), "--runs", str(runs)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"error: {shlex.join(command)}: {done.stderr.strip()}")
    return [dict(row, act_sparsity=0.0, tok_s=1e3 / row["median_ms"]) for row in (json.loads(line) for line in done.stdout.splitlines() if line.startswith("{"))]


def ggml_row(program: str, shape: str, runs: int) -> dict:
    row = harness_rows(program, shape, runs)[-1]
    return dict(row, what=f"{row['layers']} layers, ggml")


def group_peers(args, shape: str) -> dict[str, dict]:
    """Other programs' rows, by the name that their speed-ups get."""
    peers = {}
    if not args.no_peer and (row := torch_row(shape, args.runs)):
        peers["int4pack"] = row
    if args.ggml:
        peers["ggml"] = ggml_row(args.ggml, shape, args.runs)
    if args.sparse_marlin:
        for row in harness_rows(args.sparse_marlin, shape, args.runs):
            name = "sparse_marlin_g128" if row["layout"].endswith("g128") else "sparse_marlin"
            peers[name] = dict(row, what=f"{row['layers']} layers, Sparse-Marlin")
    return peers


def grouped(args) -> list[dict]:
    """Group-sparse layouts beside dense ones of 4 and 2 bits."""
    rows = []
    shapes = [*(args.shape or []), *(args.single or [])] or ["llama-2-7b"]
    for shape in shapes:
        mine = []
        for layout, more in [("zz4_k", []), ("gq4", ["--group-size", "128"]), ("gq2", ["--group-size", "64"]), ("nm24_q4", [])]:
            mine += [dict(row, baseline=True) for row in lacuna_rows(args.lacuna, shape, layout, 0, args.runs, more)]
        peers = group_peers(args, shape)
        for layout in args.layout or ["gs4"]:
            for group in args.groups.split(","):
                for sparsity in args.weight_sparsity.split(","):
                    for uneven in [[], ["--uneven-rows"]] if args.uneven and float(sparsity) > 0 else [[]]:
                        more = ["--group-size", group, "--weight-sparsity", sparsity, *uneven]
                        mine += lacuna_rows(args.lacuna, shape, layout, 0, args.runs, more)
        best = min(row["median_ms"] for row in mine if row.get("baseline") and row["layout"] in ("zz4_k", "gq4"))
        for row in [*mine, *peers.values()]:
            row["speedup_over_dense_4_bit"] = round(best / row["median_ms"], 3)
            for name, peer in peers.items():
                row["speedup_over_" + name] = round(peer["median_ms"] / row["median_ms"], 3)
            if shape not in SHAPES:
                row["product_us"] = round(1e3 * row["median_ms"] / layers_of(shape)[0], 3)
            which = f"g{row['group_size']} {100 * row['weight_sparsity']:.0f}%{' uneven' if row['uneven_rows'] else ''}" if "group_size" in row else ""
            print(f"{shape:<12} {row['layout']:<13} {which:<16} {row['what']:<36} {row['median_ms']:8.4f} ms ({row['min_ms']:.4f} to {row['max_ms']:.4f}) "
                  f"{row['gb_s']:7.1f} GB/s {row['speedup_over_dense_4_bit']:.2f}x{' ' + format(row['product_us'], '.2f') + ' us a product' if 'product_us' in row else ''}", flush=True)
        rows += [*mine, *peers.values()]
    return rows


def run_lacuna(command: list[str]) -> list[dict]:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{shlex.join(command)}: {done.stderr.strip()}")
    return [json.loads(line) for line in done.stdout.splitlines()]


def whole_command(args, model: pathlib.Path, layout: str, gpus: int) -> list[str]:
    command = [args.lacuna, "bench", str(model), "--device", "cuda", "--what", "decode", "--json", "--context", str(args.input), "--gen", args.lengths,
               "--runs", str(args.runs), "--gpus", str(gpus)]
    tunes = args.tune and gpus == 1 and layout.startswith(("zz", "gs"))  # others have no plans; a split model is not tuned
    return command + (["--deterministic"] if args.deterministic else []) + (["--tune"] if tunes else [])


def mark_speedups(rows: list[dict]) -> None:
    """Beside f16 on as many devices, and beside the same weights on one."""
    by_key = {(row["shape"], row["weights"], row["gpus"], row["what"]): row for row in rows}
    for row in rows:
        for name, key in (("speedup_over_f16", ("f16", row["gpus"])), ("speedup_over_one_gpu", (row["weights"], 1))):
            base = by_key.get((row["shape"], *key, row["what"]))
            if base and base is not row:
                row[name] = round(base["median_ms"] / row["median_ms"], 3)


def whole(args) -> int:
    """Every kind of weights, on each number of devices. Returns 1 where any of them failed, after the others."""
    rows, failed = [], 0
    print(f"{'shape':<12} {'weights':<8} {'gpus':>4} {'what':<44} {'ms a token':>10} {'tokens/s':>9} {'GiB':>6} {'of f16':>7} {'of one':>7}", flush=True)
    with tempfile.TemporaryDirectory(dir=args.scratch) as folder:
        model = pathlib.Path(folder) / "weights.gguf"
        for shape in args.shape or ["llama-2-7b", "llama-2-13b"]:
            for weights in args.weights:
                layout, head, more = WHOLE[weights]
                start = time.monotonic()
                try:
                    run_lacuna([args.lacuna, "synth", shape, "--layout", layout, "--head-layout", head, *more, *layers_option(args), "--json", "-o", str(model)])
                    synth_s = time.monotonic() - start
                    for gpus in args.gpus:
                        start = time.monotonic()
                        for row in run_lacuna(whole_command(args, model, layout, gpus)):
                            rows.append(dict(row, shape=shape, weights=weights, gpus=gpus, synth_s=round(synth_s, 2), bench_s=round(time.monotonic() - start, 2)))
                            mark_speedups(rows)
                            print_whole(rows[-1])
                        finish(args, rows)
                except RuntimeError as error:
                    failed = 1
                    print(f"error: {shape} {weights}: {error}", file=sys.stderr, flush=True)
                model.unlink(missing_ok=True)
    return failed


def layers_option(args) -> list[str]:
    return ["--layers", str(args.layers)] if args.layers else []


def print_whole(row: dict) -> None:
    ratios = [f"{row[name]:.2f}x" if name in row else "" for name in ("speedup_over_f16", "speedup_over_one_gpu")]
    print(f"{row['shape']:<12} {row['weights']:<8} {row['gpus']:>4} {row['what']:<44} {row['median_ms']:>10.4f} {row['tok_s']:>9.1f} "
          f"{row['device_memory_bytes'] / 2**30:>6.2f} {ratios[0]:>7} {ratios[1]:>7}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lacuna", required=True, help="the program, built with the CUDA backend")
    parser.add_argument("--what", choices=["linear", "decode", "groups", "whole"], default="linear")
    parser.add_argument("--shape", action="append", choices=sorted(SHAPES), help="default: 7B, 8B, 13B and 70B; of decode 7B and 1B; of whole 7B and 13B")
    parser.add_argument("--single", action="append", type=matrix, metavar="NxK", help="of groups: copies of one matrix, more than a cache holds, such as 4096x4096")
    parser.add_argument("--layout", action="append", metavar="ZIGZAG", help="of linear: zz2_k to zz8, default zz4_k; of groups: gs2 to gs16, default gs4")
    parser.add_argument("--no-peer", action="store_true", help="of linear and groups: without PyTorch's kernel")
    parser.add_argument("--ggml", metavar="PROGRAM", help="of linear and groups: what scripts/harness/build_ggml_linear.sh makes of a CUDA build of llama.cpp")
    parser.add_argument("--sparse-marlin", metavar="PROGRAM", help="of groups: what scripts/harness/build_sparse_marlin.sh makes of a checkout of Sparse-Marlin")
    parser.add_argument("--sparsity", type=percentages, default="0,25,40,50,65", metavar="LIST", help="percentages, separated by commas")
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--commit", help="what the program was built from; default: git's HEAD")
    parser.add_argument("--out", type=pathlib.Path, help="JSON file, such as docs/results/spqt-cuda-linear.json")
    parser.add_argument("--llama-bench", metavar="PROGRAM", help="of decode: llama-bench of a CUDA build of llama.cpp")
    parser.add_argument("--depths", default="10,1024,3840", help="of decode: tokens in the cache, separated by commas")
    parser.add_argument("--tokens", type=int, default=64, help="of decode: tokens in a run")
    parser.add_argument("--prompt", type=int, default=512, help="of decode: tokens of a prefill; 0: none")
    parser.add_argument("--rounds", type=int, default=3, help="of decode")
    parser.add_argument("--tune", action="store_true", help="of decode, and of whole on one device: find the fastest plans before each timing")
    parser.add_argument("--beside-dense", action="store_true",
                        help="of decode: dense tokens from the same load of the model as those of each --sparsity, which are all above 0, so without prompts")
    parser.add_argument("--groups", default="8,16,32,64,128", help="of groups: inputs of a group, separated by commas")
    parser.add_argument("--weight-sparsity", default="0,20,30,40,50,60", help="of groups: percentages, separated by commas")
    parser.add_argument("--uneven", action="store_true", help="of groups: also with rows that keep different shares")
    parser.add_argument("--weights", type=lambda text: text.split(","), default=list(WHOLE), metavar="LIST",
                        help=f"of whole: some of {','.join(WHOLE)}, separated by commas; default: all")
    parser.add_argument("--gpus", type=lambda text: [int(count) for count in text.split(",")], default=[1], metavar="LIST", help="of whole: numbers of devices, such as 1,2")
    parser.add_argument("--input", type=int, default=15, help="of whole: tokens before those that are timed")
    parser.add_argument("--lengths", default="128,1024", help="of whole: tokens of an output, separated by commas")
    parser.add_argument("--layers", type=int, default=0, help="of whole: only so many layers; 0: all")
    parser.add_argument("--scratch", metavar="DIR", help="of decode and whole: where the models are written, one at a time; default: the system's folder for temporary files")
    parser.add_argument("--deterministic", action="store_true", help="of whole: sums in a fixed order")
    args = parser.parse_args()
    if unknown := [weights for weights in args.weights if weights not in WHOLE]:
        parser.error(f"--weights: {', '.join(unknown)}; known are {', '.join(WHOLE)}")
    if args.beside_dense and (args.what != "decode" or any(float(part) == 0 for part in args.sparsity.split(","))):
        parser.error("--beside-dense is of --what decode with --sparsity above 0")
    if args.what != "groups" and (args.single or args.sparse_marlin):
        parser.error("--single and --sparse-marlin are of --what groups")
    if args.what == "groups":
        return finish(args, grouped(args))
    if args.what == "decode":
        return finish(args, decoding(args))
    if args.what == "whole":
        return whole(args)
    rows = []
    for shape in args.shape or [shape for shape in SHAPES if shape != "llama-3.2-1b"]:
        peer = None if args.no_peer else torch_row(shape, args.runs)
        if peer:
            rows.append(peer)
        ggml = ggml_row(args.ggml, shape, args.runs) if args.ggml else None
        if ggml:
            rows.append(ggml)
        for layout in args.layout or ["zz4_k"]:
            for sparsity in args.sparsity.split(","):
                rows += lacuna_rows(args.lacuna, shape, layout, float(sparsity), args.runs)
        for row in [row for row in rows if row["shape"] == shape]:
            if peer:
                row["speedup_over_int4pack"] = round(peer["median_ms"] / row["median_ms"], 3)
            ratio = f"{row['speedup_over_int4pack']:.2f}x" if peer else ""
            if ggml:
                row["speedup_over_ggml"] = round(ggml["median_ms"] / row["median_ms"], 3)
                ratio += f" {row['speedup_over_ggml']:.2f}x"
            ceiling = f"{100 * row['gb_s'] / row['ceiling_gb_s']:.0f}%" if "ceiling_gb_s" in row else ""
            print(f"{shape:<12} {row['layout']:<9} {100 * row['act_sparsity']:4.0f}%  {row['what']:<44} {row['median_ms']:8.4f} ms ({row['min_ms']:.4f} to {row['max_ms']:.4f})  "
                  f"{row['gb_s']:7.1f} GB/s {ceiling:>4} {ratio:>6}", flush=True)
    return finish(args, rows)


def finish(args, rows: list[dict]) -> int:
    if args.out:
        command = ["scripts/gpu_bench.sh", *(f"--shape={shape}" for shape in args.shape or []), f"--sparsity={args.sparsity}", f"--runs={args.runs}"]
        command += [*(f"--layout={layout}" for layout in args.layout or []), *(["--no-peer"] if args.no_peer else []), *(["--ggml=lacuna-ggml-linear"] if args.ggml else [])]
        if args.what == "groups":
            command += [*(f"--single={single}" for single in args.single or []), *(["--sparse-marlin=lacuna-sparse-marlin"] if args.sparse_marlin else [])]
            command += ["--what=groups", f"--groups={args.groups}", f"--weight-sparsity={args.weight_sparsity}", *(["--uneven"] if args.uneven else [])]
        if args.what == "decode":
            command += ["--what=decode", f"--depths={args.depths}", f"--tokens={args.tokens}", f"--prompt={args.prompt}", f"--rounds={args.rounds}", *(["--tune"] if args.tune else []),
                        *(["--beside-dense"] if args.beside_dense else []), *(["--llama-bench=llama-bench"] if args.llama_bench else [])]
        if args.what == "whole":
            command = ["scripts/gpu_bench.sh", "--what=whole", *(f"--shape={shape}" for shape in args.shape or []), f"--weights={','.join(args.weights)}",
                       f"--gpus={','.join(map(str, args.gpus))}", f"--input={args.input}", f"--lengths={args.lengths}", f"--runs={args.runs}",
                       *(["--layers=" + str(args.layers)] if args.layers else []), *(["--deterministic"] if args.deterministic else []), *(["--tune"] if args.tune else [])]
        save(args.out, rows, command=command, commit=args.commit)
    return 0


if __name__ == "__main__":
    sys.exit(main())
