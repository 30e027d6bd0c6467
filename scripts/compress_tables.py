#!/usr/bin/env python3
"""Perplexity of a model after every method of the compressor: the AWP paper's tables on a model at hand.

Tables: pruning (50 to 90%), quantization (INT4, INT3, INT2), joint (25, 50, 75% with INT4, and INT2 beside the last at the same stored bits);
gqsa (what the GQSA paper's Tables 1 to 3 compare: INT2 in whole rows, in groups of --group-size, of 64, and of 48, which takes as many bits as
W4S50; 2:4 alone and with INT4; whole layers dropped; W4 with 20 to 50% of groups of 16 dropped: GQSA's one shot, with its block
optimisation, with both stages, and the same from awp+'s groups; with --task zero-shot accuracies too); figure8 (its Figure 8: --sparsities in
groups of 16, --groups at 50%). Every cell of the last two has its bits a weight beside it. Every row compresses the model with `lacuna compress`, then runs `lacuna perplexity` (protocol hf) on each text. With --device cuda both
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
JOINT = ["awq+wanda", "wanda+awq", "sparsegpt", "awp", "awp+"]
TABLES = ["pruning", "2:4", "quantization", "joint", "gqsa", "figure8"]
# Dropping as their papers do, where that is not the same number in each row.
PATTERNS = {"magnitude": ["--pattern", "unstructured"], "sparsegpt": ["--pattern", "unstructured"]}
# What is as long as W4S50 in groups of 16 (1/16 + (4 + 20/16) / 2 = 2.69 bits a weight) without dropping anything: 2 + 32/48 = 2.67.
EQUAL_BITS_GROUP = 48

Rows = dict[str, tuple[str, list[str]]]  # by what the row is called: the method and its flags


def stages(group: int) -> Rows:
    """Rows of GQSA's stages, and of the same from awp+'s groups."""
    trained = {", one shot": ("0", "0"), ", bqpo": ("5", "0"), ", bqpo, e2e": ("5", "2")}
    return {f"{method}{name}": (method, ["--bqpo-epochs", blocks, "--e2e-epochs", net, *([] if method == "gqsa" else ["--pattern", f"group{group}"])])
            for method in ("gqsa", "awp+") for name, (blocks, net) in trained.items()}


def columns_of(table: str, a: argparse.Namespace) -> list[tuple[str, Rows]]:
    """Columns of a table: the title, and the rows that it has."""
    grid = ["--group-size", str(a.group_size)]

    def plain(methods: list[str], flags: list[str]) -> Rows:
        return {m: (m, flags + (PATTERNS.get(m, []) if "--sparsity" in flags else [])) for m in methods}

    def gqsa(sparsity: int, group: int) -> Rows:
        flags = ["--bits", "4", "--sparsity", str(sparsity), "--group-size", str(group)]
        return {row: (method, flags + more) for row, (method, more) in stages(group).items()}

    if table == "pruning":
        return [(f"{s}%", plain(PRUNING, ["--sparsity", str(s)])) for s in (50, 60, 70, 80, 90)]
    if table == "2:4":
        return [("2:4", plain(PRUNING, ["--pattern", "2:4"]))]
    if table == "quantization":
        return [(f"INT{b}", plain(QUANTIZATION, ["--bits", str(b), *grid])) for b in (4, 3, 2)]
    if table == "joint":
        return [(f"{s}% + INT4", plain(JOINT, ["--sparsity", str(s), "--bits", "4", *grid])) for s in (25, 50, 75)]
    if table == "gqsa":  # its paper's Tables 1 to 3
        two_bits = ["rtn", "gptq", "awq", "omniquant", "awp+"]
        return [("W2 rows", plain(two_bits, ["--bits", "2", "--group-size", "0"])),
                (f"W2 g{a.group_size}", plain(two_bits, ["--bits", "2", *grid])),
                ("W2 g64", plain(two_bits, ["--bits", "2", "--group-size", "64"])),
                (f"W2 g{EQUAL_BITS_GROUP}", plain(two_bits, ["--bits", "2", "--group-size", str(EQUAL_BITS_GROUP)])),
                ("2:4", plain(["sparsegpt", "wanda", "awp", "awp+"], ["--pattern", "2:4"])),
                ("W4 2:4", plain(["sparsegpt", "wanda+awq", "awp", "awp+"], ["--pattern", "2:4", "--bits", "4", *grid])),
                *((f"layers {n}", {"shortgpt": ("", ["--drop-layers", n])}) for n in a.layers.split(",")),
                *((f"W4S{s}", gqsa(s, 16)) for s in a.sparsities or (20, 30, 40, 50))]
    # figure8: sparsities in groups of 16, then sizes of groups at 50%
    swept = [(s, 16) for s in a.sparsities or (20, 30, 40, 50, 60, 70, 80)]
    swept += [(50, g) for g in a.groups or (8, 16, 32, 64, 128) if (50, g) not in swept]
    return [(f"W4S{s} g{g}", gqsa(s, g)) for s, g in swept]


def names_in(text: str | None, known: list[str], flag: str) -> list[str]:
    """The known names that a list with commas between them holds; names may have commas themselves, the longest that fits counts. All: no text."""
    if text is None:
        return known
    found: list[str] = []
    rest = text
    while rest:
        fitting = [name for name in known if rest == name or rest.startswith(name + ",")]
        if not fitting:
            raise Failure(f"{flag}: '{rest}' begins with none of: {'; '.join(known)}")
        name = max(fitting, key=len)
        found.append(name)
        rest = rest[len(name) + 1:].lstrip()
    return [name for name in known if name in found]


def with_rates(method: str, flags: list[str], rates: list[str]) -> list[str]:
    """The flags with those of --rates that a stage of this row's training takes; one that is there already gets the value."""
    runs = {"--bqpo-": "--bqpo-epochs" in flags and flags[flags.index("--bqpo-epochs") + 1] != "0",
            "--e2e-": "--e2e-epochs" in flags and flags[flags.index("--e2e-epochs") + 1] != "0", "--omniquant-": method == "omniquant"}
    out = list(flags)
    for name, value in zip(rates[::2], rates[1::2]):
        if not any(on and name.startswith(stage) for stage, on in runs.items()):
            continue
        if name in out:
            out[out.index(name) + 1] = value
        else:
            out += [name, value]
    return out


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


def zero_shot(binary: str, model: Path, tasks: dict[str, str], a: argparse.Namespace) -> dict:
    """Accuracies of `lacuna eval` by task."""
    command = [binary, "eval", str(model), "--limit", str(a.limit_questions), "--threads", str(a.threads), "--device", a.device, "--json"]
    for name, data in tasks.items():
        command += ["--task", name, "--data", data]
    if a.labels:
        command += ["--labels", a.labels]
    kept = ("n", "acc", "acc_stderr", "acc_norm", "acc_norm_stderr", "ppl", "data_sha256")
    return {row["task"]: {key: row[key] for key in kept if key in row} for row in json_lines(run(command).stdout, command)}


def cell(row: dict | None, text: str, with_bits: bool) -> str:
    if row is None:
        return "-"
    if "perplexity" not in row:
        return "stopped"
    value = row["perplexity"][text]["ppl"]
    shown = f"{value:.2f}" if value is not None and value < 1e5 else "inf" if value is None else f"{value:.3g}"
    return f"{shown} ({row['effective_bits']:.2f})" if with_bits else shown


def accuracy(row: dict | None, task: str) -> str:
    if row is None or "zero_shot" not in row:
        return "-"
    score = row["zero_shot"][task]
    return f"{100 * score.get('acc_norm', score['acc']):.2f}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lacuna", default=str(ROOT / "build/release/lacuna"))
    parser.add_argument("--model", type=Path, required=True, help="a .gguf file or a Hugging Face folder")
    parser.add_argument("--calib", type=Path, required=True, help="calibration text")
    parser.add_argument("--text", action="append", required=True, metavar="NAME=FILE", help="a text to score; may be repeated")
    parser.add_argument("--tables", default="pruning,quantization,joint")
    parser.add_argument("--columns", help="only these columns, e.g. 50%%,INT4")
    parser.add_argument("--methods", help="only these rows, commas between them, e.g. 'gptq,gqsa, bqpo,awp+, one shot'")
    parser.add_argument("--sparsities", type=lambda text: [int(s) for s in text.split(",")], metavar="LIST", help="gqsa, figure8: percent, e.g. 20,50")
    parser.add_argument("--groups", type=lambda text: [int(g) for g in text.split(",")], metavar="LIST", help="figure8: sizes of groups at 50%%, e.g. 8,16,32,64,128")
    parser.add_argument("--layers", default="25%,40%", metavar="LIST", help="gqsa: whole layers to drop, numbers or percentages (%(default)s)")
    parser.add_argument("--task", action="append", default=[], metavar="NAME=FILE", help="a zero-shot task to score too, as `lacuna eval` has it; may be repeated")
    parser.add_argument("--labels", help="piqa's right answers, where --task has it")
    parser.add_argument("--limit-questions", type=int, default=0, help="questions of each task; 0: all")
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
    tasks = dict(entry.split("=", 1) for entry in a.task)
    expected = {name: float(ppl) for name, ppl in (entry.split("=", 1) for entry in a.dense)}

    made_from = built_from(a.lacuna)
    card, driver = gpu() if a.device == "cuda" else ("", "none")
    settings_now = {"model": a.model.name, "calib": a.calib.name, "texts": sorted(texts), "samples": a.samples, "seq_len": a.seq_len,
                    "inputs": a.inputs, "first_weight": a.first_weight, "token_clip": a.token_clip, "group_size": a.group_size, "ctx": a.ctx, "chunks": a.chunks, "rates": a.rates, "device": card or "cpu"}
    if tasks:
        settings_now |= {"tasks": sorted(tasks), "questions": a.limit_questions}
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

    def scored_as(model: Path) -> dict:
        scores: dict = {"perplexity": {name: perplexity(a.lacuna, model, Path(text), a) for name, text in texts.items()}}
        if tasks:
            scores["zero_shot"] = zero_shot(a.lacuna, model, tasks, a)
        return scores

    def scored(model: Path) -> dict:
        if a.device == "cpu":
            return scored_as(model)
        with tempfile.TemporaryDirectory(prefix="lacuna-rows-") as folder:
            rows_of = Path(folder) / "f32.gguf"
            run([a.lacuna, "quantize", str(model), "--layout", "f32", "-o", str(rows_of), "--threads", str(a.threads)])
            return scored_as(rows_of)

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
    dense = add("dense", lambda: {"model": a.model.name, **scored(a.model)})
    for name, ppl in expected.items():
        got = dense["perplexity"][name]["ppl"]
        if abs(got / ppl - 1) > 0.005:
            raise Failure(f"the dense model has a perplexity of {got:.4f} on {name}, expected {ppl}; compressed results would mean nothing")

    def compressed(method: str, flags: list[str]) -> dict:
        flags = with_rates(method, flags, shlex.split(a.rates))
        solving = ["--method", method, "--inputs", a.inputs, "--first-weight", a.first_weight, "--token-clip", a.token_clip] if method else []
        with tempfile.TemporaryDirectory(prefix="lacuna-compress-") as folder:
            out = Path(folder) / "model.gguf"
            command = [a.lacuna, "compress", str(a.model), "-o", str(out), "--calib", str(a.calib), *solving, *flags,
                       "--samples", str(a.samples), "--seq-len", str(a.seq_len), "--threads", str(a.threads), "--device", a.device, "--json"]
            try:
                process = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=a.limit, check=False)
            except subprocess.TimeoutExpired:
                return {"model": a.model.name, "method": method, "flags": " ".join(flags), "stopped_after_s": a.limit}
            if process.returncode != 0:
                raise Failure(f"{shlex.join(command)}: exit status {process.returncode}\n{process.stderr[-2000:]}")
            report = json_lines(process.stdout, command)
            summary = report[-1]
            matrices = [row for row in report if "tensor" in row]
            of_matrices = {"layout": matrices[0]["layout"], "loss": sum(m["loss"] for m in matrices) / len(matrices)} if matrices else {}
            training = {key: [row[key] for row in report if key in row] for key in ("omniquant", "bqpo", "e2e")}
            return {"model": a.model.name, "method": summary["method"], "flags": " ".join(flags), **of_matrices,
                    "effective_bits": summary["effective_bits"], "weight_sparsity": summary["weight_sparsity"], "bytes": summary["bytes"],
                    "solver_s": summary["solver_s"], "seconds": summary["seconds"], "peak_memory_bytes": summary["peak_memory_bytes"],
                    **{key: values for key, values in training.items() if values},
                    **{key: summary[key] for key in ("layers", "dropped_layers") if key in summary},
                    **{"block_influence": row["block_influence"] for row in report if "block_influence" in row}, **scored(out)}

    every_row = list(dict.fromkeys(row for table in TABLES for _, rows_of in columns_of(table, a) for row in rows_of))
    for table in a.tables.split(","):
        if table not in TABLES:
            raise Failure(f"--tables {table}: known are {', '.join(TABLES)}")
        columns = [c for c in columns_of(table, a) if not a.columns or c[0] in a.columns.split(",")]
        wanted = names_in(a.methods, every_row, "--methods")
        chosen = [row for row in dict.fromkeys(row for _, rows_of in columns for row in rows_of) if row in wanted]
        for title, rows_of in columns:
            for row, (method, flags) in rows_of.items():
                if row in chosen:
                    add(f"{table} {title} {row}", lambda method=method, flags=flags: compressed(method, flags))
        with_bits = table in ("gqsa", "figure8")
        width = max(16 if with_bits else 12, *(len(title) + 2 for title, _ in columns)) if columns else 12

        def show(title_of_all: str, shown) -> None:
            print(title_of_all)
            print(f"  {'':<17}" + "".join(f"{title:>{width}}" for title, _ in columns))
            for row in chosen:
                print(f"  {row:<17}" + "".join(f"{shown(found.get(f'{table} {title} {row}') if row in rows_of else None):>{width}}" for title, rows_of in columns))

        for name in texts:
            show(f"{table}, perplexity on {name} (dense {dense['perplexity'][name]['ppl']:.2f}){', bits a weight' if with_bits else ''}",
                 lambda row, name=name: cell(row, name, with_bits))
        for task in tasks:
            show(f"{table}, {task}, percent right (dense {accuracy(dense, task)})", lambda row, task=task: accuracy(row, task))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (Failure, subprocess.SubprocessError) as error:
        sys.exit(f"compress_tables: {error}")
