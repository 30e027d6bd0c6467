#!/usr/bin/env python3
"""Perplexity of a model after every method of the compressor: the AWP paper's tables on a model at hand.

Tables: pruning (50 to 90%), quantization (INT4, INT3, INT2), joint (25, 50, 75% with INT4, and INT2 beside the last at the same stored bits).
gqsa (W4 with 20 to 50% of groups of 16 dropped: GQSA's one shot, with its block optimisation, with both stages, and the same from awp+'s
groups). Every row compresses the model with `lacuna compress`, then runs `lacuna perplexity` (protocol hf) on each text. With --device cuda both
run on the GPU; what they score is then the same values as float32 rows, since packed layouts of dropped weights run on the CPU so far.
Several runs may fill one file's tables at once with --output of their own and be joined by --join. The dense model's row comes first; with --dense a run whose dense perplexity is off by more than 0.5% is refused. Rows that the output file already has, made by
the same commit, are kept: a run that was stopped goes on, with more tables or columns where they are asked for. A method that takes longer
than --limit is stopped, and its row says so. Standard library only.
"""
from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from bench_peers import ROOT, Failure, device, json_lines, note, portable_command, run, write_json  # noqa: E402

PRUNING = ["magnitude", "wanda", "sparsegpt", "awp", "awp+"]
QUANTIZATION = ["rtn", "gptq", "awq", "awp", "awp+"]
PATTERN = ["magnitude", "wanda", "sparsegpt", "awp", "awp+"]
JOINT = ["awq+wanda", "wanda+awq", "sparsegpt", "awp", "awp+"]


def settings(table: str, group: int) -> list[tuple[str, list[str]]]:
    """Columns of a table: (title, flags)."""
    grid = ["--group-size", str(group)]
    if table == "pruning":
        return [(f"{s}%", ["--sparsity", str(s)]) for s in (50, 60, 70, 80, 90)]
    if table == "quantization":
        return [(f"INT{b}", ["--bits", str(b), *grid]) for b in (4, 3, 2)]
    if table == "gqsa":
        return [(f"W4S{s}", ["--bits", "4", "--sparsity", str(s), "--group-size", "16"]) for s in (20, 30, 40, 50)]
    if table == "2:4":
        return [("2:4", ["--pattern", "2:4"])]
    return [(f"{s}% + INT4", ["--sparsity", str(s), "--bits", "4", *grid]) for s in (25, 50, 75)]


# Dropping as their papers do, where that is not the same number in each row.
PATTERNS = {"magnitude": ["--pattern", "unstructured"], "sparsegpt": ["--pattern", "unstructured"]}
# Rows that are more than a method's name: its flags; the stages that are left out, and those that a stage adds.
ONE_SHOT, BLOCKS, BOTH = ["--bqpo-epochs", "0", "--e2e-epochs", "0"], ["--bqpo-epochs", "5", "--e2e-epochs", "0"], ["--bqpo-epochs", "5", "--e2e-epochs", "2"]
STAGES = {f"{method}{name}": (method, [*stages, *([] if method == "gqsa" else ["--pattern", "group16"])])
          for method in ("gqsa", "awp+") for name, stages in ((", one shot", ONE_SHOT), (", bqpo", BLOCKS), (", bqpo, e2e", BOTH))}
METHODS = {"gqsa": list(STAGES), "pruning": PRUNING, "2:4": PATTERN, "quantization": QUANTIZATION, "joint": JOINT}


def built_from(binary: str) -> str:
    """The commit that the program was built from: where it runs, there may be no repository."""
    found = re.search(r"^commit +(\S+)", run([binary, "--version"]).stdout, re.MULTILINE)
    if not found:
        raise Failure(f"{binary} --version names no commit")
    if found.group(1) == "unknown":
        raise Failure(f"{binary} was built outside a repository: nothing tells its rows from another program's")
    if found.group(1).endswith("-dirty"):
        note(f"{binary}: built from {found.group(1)}: rows of two such builds are not told apart")
    return found.group(1)


def gpu() -> tuple[str, str]:
    """Name and driver of the first GPU."""
    line = run(["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]).stdout.splitlines()[0]
    name, driver = (part.strip() for part in line.split(","))
    return name, driver


def perplexity(binary: str, model: Path, text: Path, a: argparse.Namespace) -> dict:
    command = [binary, "perplexity", str(model), "-f", str(text), "--protocol", "hf", "--ctx", str(a.ctx), "--threads", str(a.threads),
               "--device", a.device, "--json"]
    if a.chunks:
        command += ["--chunks", str(a.chunks)]
    row = json_lines(run(command).stdout, command)[-1]
    return {key: row[key] for key in ("ppl", "stderr", "tokens", "text_sha256")}


def cell(row: dict, text: str) -> str:
    if "perplexity" not in row:
        return "stopped"
    value = row["perplexity"][text]["ppl"]
    return f"{value:.2f}" if value < 1e5 else f"{value:.3g}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lacuna", default=str(ROOT / "build/release/lacuna"))
    parser.add_argument("--model", type=Path, required=True, help="a .gguf file or a Hugging Face folder")
    parser.add_argument("--calib", type=Path, required=True, help="calibration text")
    parser.add_argument("--text", action="append", required=True, metavar="NAME=FILE", help="a text to score; may be repeated")
    parser.add_argument("--tables", default="pruning,quantization,joint")
    parser.add_argument("--columns", help="only these columns, e.g. 50%%,INT4")
    parser.add_argument("--methods", help="only these methods")
    parser.add_argument("--limit", type=int, default=1800, help="seconds that compressing may take (%(default)s)")
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--group-size", type=int, default=128)
    parser.add_argument("--inputs", default="compressed", choices=["compressed", "dense"])
    parser.add_argument("--first-weight", default="1", help="as `lacuna compress` has it; the papers: 1 (%(default)s)")
    parser.add_argument("--token-clip", default="0", help="the same; the papers: 0 (%(default)s)")
    parser.add_argument("--rates", default="", metavar="FLAGS", help="flags of training, e.g. '--bqpo-lr 1e-3 --e2e-lr 1e-4'")
    parser.add_argument("--ctx", type=int, default=2048)
    parser.add_argument("--chunks", type=int, default=0, help="windows of each text; 0: all")
    parser.add_argument("--dense", action="append", default=[], metavar="NAME=PPL", help="what the dense model must give on a text")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"], help="where to compress and to score (%(default)s)")
    parser.add_argument("--join", type=Path, action="append", default=[], help="rows of another run's output; may be repeated")
    parser.add_argument("--output", type=Path, required=True)
    a = parser.parse_args()
    texts = dict(entry.split("=", 1) for entry in a.text)
    expected = {name: float(ppl) for name, ppl in (entry.split("=", 1) for entry in a.dense)}

    made_from = built_from(a.lacuna)
    card, driver = gpu() if a.device == "cuda" else ("", "none")
    settings_now = {"model": a.model.name, "calib": a.calib.name, "texts": sorted(texts), "samples": a.samples, "seq_len": a.seq_len,
                    "inputs": a.inputs, "first_weight": a.first_weight, "token_clip": a.token_clip, "group_size": a.group_size, "ctx": a.ctx, "chunks": a.chunks, "rates": a.rates, "device": card or "cpu"}
    kept = {"rows": []}
    if a.output.is_file():
        kept = json.loads(a.output.read_text())
        if kept.get("commit") != made_from or kept.get("settings") != settings_now:
            note(f"{a.output}: made from another commit, or with other texts or flags; its rows are made anew")
            kept = {"rows": []}
    rows: list[dict] = kept["rows"]
    for path in a.join:
        try:
            other = json.loads(path.read_text())
            same = {"commit": other["commit"], "settings": other["settings"]}
            joined = other["rows"]
        except (OSError, ValueError, KeyError) as error:
            raise Failure(f"{path}: not an output of this script: {error}") from error
        if same != {"commit": made_from, "settings": settings_now}:
            raise Failure(f"{path}: made with {same}, this run with commit {made_from} and {settings_now}")
        rows += [row for row in joined if row["key"] not in {r["key"] for r in rows}]
    found = {row["key"]: row for row in rows}

    def save() -> None:
        write_json(a.output, {"command": portable_command(shlex.join(["scripts/compress_tables.py", *sys.argv[1:]])), "commit": made_from,
                              "date": datetime.date.today().isoformat(), "device": f"{card}; {device()}, {a.threads} threads" if card else f"{device()}, {a.threads} threads",
                              "driver": driver, "settings": settings_now,
                              "rows": rows})

    def scored(model: Path) -> dict:
        if a.device == "cpu":
            return {name: perplexity(a.lacuna, model, Path(text), a) for name, text in texts.items()}
        with tempfile.TemporaryDirectory(prefix="lacuna-rows-") as folder:
            rows_of = Path(folder) / "f32.gguf"
            run([a.lacuna, "quantize", str(model), "--layout", "f32", "-o", str(rows_of), "--threads", str(a.threads)])
            return {name: perplexity(a.lacuna, rows_of, Path(text), a) for name, text in texts.items()}

    def add(key: str, make) -> dict:
        if key not in found:
            found[key] = {"key": key, **make()}
            rows.append(found[key])
            save()
            scores = [f"{name} {score['ppl']:.4g}" for name, score in found[key].get("perplexity", {}).items()]
            note(f"  {key}: " + (", ".join(scores) or f"stopped after {a.limit} s"))
        return found[key]

    if a.join:
        save()
    dense = add("dense", lambda: {"model": a.model.name, "perplexity": scored(a.model)})
    for name, ppl in expected.items():
        got = dense["perplexity"][name]["ppl"]
        if abs(got / ppl - 1) > 0.005:
            raise Failure(f"the dense model has a perplexity of {got:.4f} on {name}, expected {ppl}; compressed results would mean nothing")

    def compressed(row: str, flags: list[str]) -> dict:
        method, stages = STAGES.get(row, (row, []))
        flags = flags + stages
        if "--bqpo-epochs" in flags:
            trained = {"--bqpo-lr": flags[flags.index("--bqpo-epochs") + 1] != "0", "--e2e-lr": flags[flags.index("--e2e-epochs") + 1] != "0"}
            rates = shlex.split(a.rates)
            flags += [word for name, value in zip(rates[::2], rates[1::2]) if trained.get(name) for word in (name, value)]
        with tempfile.TemporaryDirectory(prefix="lacuna-compress-") as folder:
            out = Path(folder) / "model.gguf"
            command = [a.lacuna, "compress", str(a.model), "-o", str(out), "--calib", str(a.calib), "--method", method, *flags,
                       "--samples", str(a.samples), "--seq-len", str(a.seq_len), "--inputs", a.inputs, "--first-weight", a.first_weight, "--token-clip", a.token_clip, "--threads", str(a.threads),
                       "--device", a.device, "--json"]
            try:
                process = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=a.limit, check=False)
            except subprocess.TimeoutExpired:
                return {"model": a.model.name, "method": method, "flags": " ".join(flags), "stopped_after_s": a.limit}
            if process.returncode != 0:
                raise Failure(f"{shlex.join(command)}: exit status {process.returncode}\n{process.stderr[-2000:]}")
            report = json_lines(process.stdout, command)
            summary = report[-1]
            matrices = [row for row in report if "tensor" in row]
            return {"model": a.model.name, "method": method, "flags": " ".join(flags), "layout": matrices[0]["layout"],
                    "effective_bits": summary["effective_bits"], "weight_sparsity": summary["weight_sparsity"], "bytes": summary["bytes"],
                    "solver_s": summary["solver_s"], "seconds": summary["seconds"], "peak_memory_bytes": summary["peak_memory_bytes"],
                    **{key: [row[key] for row in report if key in row] for key in ("bqpo", "e2e") if any(key in row for row in report)},
                    "loss": sum(m["loss"] for m in matrices) / len(matrices), "perplexity": scored(out)}

    for table in a.tables.split(","):
        if table not in METHODS:
            raise Failure(f"--tables {table}: known are {', '.join(METHODS)}")
        columns = [c for c in settings(table, a.group_size) if not a.columns or c[0] in a.columns.split(",")]
        methods = [m for m in METHODS[table] if not a.methods or m in a.methods.split(",")]
        for title, common in columns:
            for method in methods:
                flags = common + (PATTERNS.get(method, []) if "--sparsity" in common else [])
                add(f"{table} {title} {method}", lambda method=method, flags=flags: compressed(method, flags))
        for name in texts:
            print(f"{table}, perplexity on {name} (dense {dense['perplexity'][name]['ppl']:.2f})")
            print(f"  {'':<17}" + "".join(f"{title:>12}" for title, _ in columns))
            for method in methods:
                print(f"  {method:<17}" + "".join(f"{cell(found[f'{table} {title} {method}'], name):>12}" for title, _ in columns))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (Failure, subprocess.SubprocessError) as error:
        sys.exit(f"compress_tables: {error}")
