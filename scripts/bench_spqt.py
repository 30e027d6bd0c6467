#!/usr/bin/env python3
"""Speed of activation sparsity on this machine, beside the dense model and (where builds are given) the dense peers.

Linear layers of one token: a known shape with random weights, dense q4_K, then zz4_k dense and with 25, 40, 50 and 65% of the inputs
(random ones) skipped; with --ggml the same layers on ggml (its repacked q4_K, the baseline), with --ik on ik_llama.cpp.
Decoding: a real model in a dense layout and in zz4_k, dense and at the levels asked for, with its calibrated
thresholds; llama.cpp and ik_llama.cpp read the dense file. Decoding of a shape: the same with random weights, whose uniform thresholds
are made on the spot. With --packed a shape has rows of weights that were compressed once, e.g. bm4:75 (three of four weights dropped) or gs4:50 (half of the groups of 16). A round runs everything once, the order rotates; a ratio is taken within a
round. Prints a table; --output writes the rows as JSON. Standard library only.
"""
from __future__ import annotations

import argparse
import datetime
import os
import shlex
import statistics
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from bench_peers import (ROOT, Failure, Program, Settings, commit, device, json_lines, note,  # noqa: E402
                         peers, portable_command, run, spread, write_json)

LEVELS = [25, 40, 50, 65]
WRAP: list[str] = []  # runs each measurement


def lacuna_row(binary: str, arguments: list[str], bench: str) -> dict:
    command = [*WRAP, binary, "bench", *arguments, "--json"]
    for row in json_lines(run(command).stdout, command):
        if row.get("bench") == bench:
            return row
    raise Failure(f"{shlex.join(command)}: no row of {bench}")


def llama_cpp_build() -> Path:
    """The folder of our own build of llama.cpp, made where it is missing."""
    script = f". {shlex.quote(str(ROOT / 'scripts/lib/llama_cpp.sh'))}; llama_cpp_get; printf %s \"$llama_cpp_build\""
    done = subprocess.run(["bash", "-euo", "pipefail", "-c", script], stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        raise Failure("llama.cpp could not be built, see above")
    return Path(done.stdout)


def linear_harness(build: Path, name: str) -> str:
    """Compiles scripts/harness/ggml_linear.cc against a build; returns the program."""
    output = ROOT / "build/harness" / f"{name}-linear"
    output.parent.mkdir(parents=True, exist_ok=True)
    command = [str(ROOT / "scripts/harness/build_ggml_linear.sh"), str(build), str(output)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        raise Failure(f"{shlex.join(command)}: failed, see above")
    return done.stdout.strip()


def harness_row(program: str, shape: str, runs: int, threads: int, layers: int) -> dict:
    # The C library gives its large blocks huge pages, as ours have: ggml gains about 10%, ik_llama.cpp 15%.
    command = [*WRAP, "env", "GLIBC_TUNABLES=glibc.malloc.hugetlb=1", program, "--shape", shape, "--form", "repacked",
               "--threads", str(threads), "--runs", str(runs), *(["--layers", str(layers)] if layers else [])]
    row = json_lines(run(command).stdout, command)[0]
    return {**row, "options": row["buffer_type"] + ", huge pages"}


def choose_decode_options(program: Program, model: Path, settings: Settings) -> None:
    """Keeps the option set that decodes best; prefill would take minutes for a large model."""
    rates = [program.measure(model, ["decode"], options, settings)["decode"]["tok_s"] for options in program.options]
    program.best = {"decode": program.options[rates.index(max(rates))]}


def peer_row(program: Program, model: Path, settings: Settings) -> dict:
    rate = program.measure(model, ["decode"], program.best["decode"], settings)["decode"]["tok_s"]
    return {"bench": "decode", "tok_s": rate, "median_ms": 1e3 / rate, "options": " ".join(program.best["decode"])}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lacuna", default=str(ROOT / "build/release/lacuna"))
    parser.add_argument("--shape", action="append", default=[], help="a shape for the linear layers, e.g. llama-3.2-1b; may be repeated")
    parser.add_argument("--packed", action="append", default=[], metavar="LAYOUT[:SPARSITY[:GROUP]]",
                        help="a layout of the compressor for the shapes, with the share of weights dropped and the inputs of a group, e.g. gq4, bm4:75, gs4:50 or gs4:50:32; may be repeated")
    parser.add_argument("--act-packed", action="append", default=[], metavar="LEVEL", help="skip so many percent of the inputs of gs layouts too (random groups)")
    parser.add_argument("--layers", type=int, default=0, help="only so many layers of the shapes, for large ones")
    parser.add_argument("--only-packed", action="store_true", help="of zz4_k only the dense row")
    parser.add_argument("--dense", type=Path, help="the model in a dense layout, a GGUF file")
    parser.add_argument("--zigzag", action="append", default=[], metavar="FILE",
                        help="the same model made by `lacuna quantize` in a zigzag layout; may be repeated")
    parser.add_argument("--thresholds", help="their thresholds, made by `lacuna calibrate`")
    parser.add_argument("--act-mode", default="layered", help="which of the thresholds (default: layered)")
    parser.add_argument("--criterion", default="magnitude", help="magnitude (the default) or wina")
    parser.add_argument("--decode-shape", action="append", default=[], metavar="SHAPE",
                        help="decode random weights of a shape too, e.g. llama-2-7b; may be repeated")
    parser.add_argument("--models", type=Path, default=Path(os.environ.get("LACUNA_MODELS", Path.home() / ".cache/lacuna/models")),
                        help="folder where the file of --decode-shape is made that the peers read (default: that of scripts/lib/models.sh)")
    parser.add_argument("--context", type=int, default=10, help="tokens before the decoding; the peers decode from an empty cache")
    parser.add_argument("--levels", default="25,40,50", help="levels of decoding in percent")
    parser.add_argument("--llama", type=Path, help="folder of a build of llama.cpp")
    parser.add_argument("--ggml", type=Path, nargs="?", const=Path(), metavar="FOLDER",
                        help="time the linear layers on ggml too, from this build of llama.cpp (without FOLDER: one is built once)")
    parser.add_argument("--ik", type=Path, help="folder of a build of ik_llama.cpp: decoding, and the linear layers")
    parser.add_argument("--runs", type=int, default=3, help="timed runs of the linear layers in a round; their median counts")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--gen", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--wrap", help="a program that runs each measurement of linear layers and of our decoding: it gets the command as its arguments")
    parser.add_argument("--output", type=Path, help="JSON file for the rows")
    a = parser.parse_args()
    threads = ["--threads", str(a.threads)]
    WRAP.extend([a.wrap] if a.wrap else [])
    layers = ["--layers", str(a.layers)] if a.layers else []
    if a.packed and not a.shape and not a.decode_shape:
        parser.error("--packed needs --shape or --decode-shape")
    packed: list[tuple[str, list[str]]] = []  # name of the row, flags
    for entry in a.packed:
        layout, dropped, group = (entry.split(":") + ["", ""])[:3]
        name = layout + (f" {dropped}%" if dropped else "") + (f" g{group}" if group else "")
        flags = ["--layout", layout, *(["--weight-sparsity", dropped] if dropped else []), *(["--group-size", group] if group else [])]
        packed.append((name, flags))
        if layout.startswith("gs"):
            packed += [(f"{name}, inputs {level}%", [*flags, "--act-sparsity", level]) for level in a.act_packed]
    sections: list[tuple[str, str, list[tuple[str, object]]]] = []  # title, baseline, [(name, function)]
    harnesses: dict[str, str] = {}  # name of the row -> program; the first one is the baseline
    if a.shape and a.ggml is not None:
        harnesses["ggml q4_K"] = linear_harness(llama_cpp_build() if a.ggml == Path() else a.ggml, "llama.cpp")
    if a.shape and a.ik:
        harnesses["ik q4_K"] = linear_harness(a.ik, "ik_llama.cpp")
    for shape in a.shape:
        def linear(layout: str, level: int, shape: str = shape):
            extra = ["--act-sparsity", str(level)] if level else []
            return lambda: lacuna_row(a.lacuna, ["--synthetic", shape, "--layout", layout, "--what", "linear", "--runs", str(a.runs),
                                                 *layers, *threads, *extra], "linear")
        rows = [("q4_K", linear("q4_K", 0)), ("zz4_k dense", linear("zz4_k", 0))]
        rows += [(f"zz4_k {level}%", linear("zz4_k", level)) for level in LEVELS if not a.only_packed]
        rows += [(name, lambda flags=flags, shape=shape: lacuna_row(a.lacuna, ["--synthetic", shape, *flags, "--what", "linear", "--runs",
                                                                               str(a.runs), *layers, *threads], "linear")) for name, flags in packed]
        rows += [(name, lambda program=program, shape=shape: harness_row(program, shape, a.runs, a.threads, a.layers))
                 for name, program in harnesses.items()]
        sections.append((f"linear layers, {shape}" + (f", {a.layers} layers" if a.layers else ""), next(iter(harnesses), "q4_K"), rows))
    settings = Settings(a.threads, 512, a.gen)

    def peer_rows(model: Path) -> list[tuple[str, object]]:
        rows = []
        for program in peers(a.llama, "given build", a.ik, "given build"):
            choose_decode_options(program, model, settings)
            rows.append((program.name, lambda program=program: peer_row(program, model, settings)))
        return rows

    decoding = ["--what", "decode", "--gen", str(a.gen), "--context", str(a.context), "--runs", "1", *threads]
    levels = [int(level) for level in a.levels.split(",")]
    for shape in a.decode_shape:
        def synthetic(layout: str, level: int, shape: str = shape):
            extra = ["--act-sparsity", str(level)] if level else []
            return lambda: lacuna_row(a.lacuna, ["--synthetic", shape, "--layout", layout, *decoding, *extra], "decode")
        rows = [("lacuna q4_K", synthetic("q4_K", 0)), ("zz4_k dense", synthetic("zz4_k", 0))]
        rows += [(f"zz4_k {level}%", synthetic("zz4_k", level)) for level in levels if not a.only_packed]
        rows += [(name, lambda flags=flags, shape=shape: lacuna_row(a.lacuna, ["--synthetic", shape, *flags, *decoding], "decode"))
                 for name, flags in packed]
        if a.llama or a.ik:
            file = a.models / f"synth-{shape}-q4_K.gguf"
            if not file.is_file():
                a.models.mkdir(parents=True, exist_ok=True)
                run([a.lacuna, "synth", shape, "-o", str(file), "--layout", "q4_K"])
            rows += peer_rows(file)
        sections.append((f"decoding, {shape} with random weights", rows[-1][0] if a.llama or a.ik else "lacuna q4_K", rows))
    if a.dense:
        if not a.zigzag or not a.thresholds:
            parser.error("--dense needs --zigzag and --thresholds")
        def decode(model: str, level: int):
            extra = ["--act-sparsity", str(level), "--thresholds", a.thresholds, "--act-mode", a.act_mode, "--criterion", a.criterion]
            return lambda: lacuna_row(a.lacuna, [model, *decoding, *(extra if level else ["--dense"])], "decode")
        rows = [("lacuna dense", decode(str(a.dense), 0))]
        for file in a.zigzag:
            name = Path(file).stem.removeprefix(a.dense.stem).strip("-")
            rows.append((f"{name} dense", decode(file, 0)))
            rows += [(f"{name} {level}%", decode(file, level)) for level in levels]
        rows += peer_rows(a.dense)
        baseline = rows[-1][0] if a.llama or a.ik else "lacuna dense"
        sections.append((f"decoding, {a.dense.name}", baseline, rows))
    if not sections:
        parser.error("nothing to do: give --shape, --decode-shape or --dense")

    out = []
    for title, baseline, rows in sections:
        found: dict[str, list[dict]] = {name: [] for name, _ in rows}
        for round_ in range(a.rounds):
            shift = round_ % len(rows)
            for name, measure in rows[shift:] + rows[:shift]:
                found[name].append(measure())
                note(f"  {title}, round {round_ + 1}: {name} {found[name][-1]['median_ms']:.2f} ms")
        print(f"{title} (ratio to {baseline}, {a.rounds} rounds)")
        for name, _ in rows:
            times = [row["median_ms"] for row in found[name]]
            ratio = spread([base["median_ms"] / time for base, time in zip(found[baseline], times)])
            last = found[name][-1]
            out.append({"section": title, "name": name, "baseline": baseline, "median_ms": statistics.median(times), "min_ms": min(times),
                        "max_ms": max(times), "ratio": ratio["median"], "ratio_min": ratio["min"], "ratio_max": ratio["max"],
                        "rounds": a.rounds, **{key: last[key] for key in ("layout", "act_sparsity", "weight_sparsity", "bytes", "gb_s", "ceiling_gb_s",
                                                                          "access_ceiling_gb_s", "checked", "options")
                                            if key in last}})
            row = out[-1]
            print(f"  {name:<14} {row['median_ms']:9.2f} ms  {row['ratio']:5.2f}x ({row['ratio_min']:.2f} to {row['ratio_max']:.2f})"
                  + (f"  {row['gb_s']:.1f} GB/s" if "gb_s" in row else "")
                  + (f" of {row['ceiling_gb_s']:.1f}" if "ceiling_gb_s" in row else "")
                  + (f", {row['access_ceiling_gb_s']:.1f} for such columns" if "access_ceiling_gb_s" in row else ""))
    if a.output:
        write_json(a.output, {"command": portable_command(shlex.join(["scripts/bench_spqt.py", *sys.argv[1:]])), "commit": commit(),
                              "date": datetime.date.today().isoformat(), "device": f"{device()}, {a.threads} threads", "driver": "none",
                              "rows": out})
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Failure as error:
        sys.exit(f"bench_spqt: {error}")
