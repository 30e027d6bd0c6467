#!/usr/bin/env python3
"""Perplexity of activation sparsity that leaves out whole groups of inputs, as kernels of the gs layouts need it, beside single inputs.

Calibrates each model with groups of each size and runs `lacuna perplexity --sweep` over the stored levels. Writes the rows as JSON. Standard library only.
"""
from __future__ import annotations

import argparse
import datetime
import shlex
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from bench_peers import ROOT, Failure, commit, device, json_lines, note, portable_command, run, write_json  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", type=Path, metavar="MODEL[:G,G]", help="a GGUF file, and its sizes of groups where they are others than --groups")
    parser.add_argument("--lacuna", default=str(ROOT / "build/release/lacuna"))
    parser.add_argument("--calib", required=True, help="text that the thresholds come from")
    parser.add_argument("--text", required=True, help="text whose perplexity counts")
    parser.add_argument("--groups", default="1,8,16")
    parser.add_argument("--modes", default="uniform,greedy")
    parser.add_argument("--levels", default="25,40,50")
    parser.add_argument("--tokens", default="8192")
    parser.add_argument("--ctx", default="2048")
    parser.add_argument("--chunks", default="0", help="windows of the text; 0: all")
    parser.add_argument("--output", type=Path, required=True)
    a = parser.parse_args()
    rows = []
    for entry in a.models:
        path, _, groups = str(entry).partition(":")
        for group in (groups or a.groups).split(","):
            with tempfile.TemporaryDirectory() as folder:
                thresholds = f"{folder}/t.thresholds.gguf"
                run([a.lacuna, "calibrate", path, "--text", a.calib, "--mode", a.modes, "--levels", a.levels, "--tokens", a.tokens, "--group", group,
                     "-o", thresholds, "--json"])
                command = [a.lacuna, "perplexity", path, "-f", a.text, "--protocol", "hf", "--ctx", a.ctx, "--chunks", a.chunks, "--sweep",
                           "--thresholds", thresholds, "--json"]
                for row in json_lines(run(command).stdout, command):
                    rows.append({"group": int(group), **row})
                    note(f"  {row['model']}, groups of {group}: {row['act_mode']} {100 * row['act_sparsity']:.1f}%: {row['ppl']:.3f}")
    write_json(a.output, {"command": portable_command(shlex.join(["scripts/group_thresholds.py", *sys.argv[1:]])), "commit": commit(),
                          "date": datetime.date.today().isoformat(), "device": device(), "driver": "none", "rows": rows})
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Failure as error:
        sys.exit(f"group_thresholds: {error}")
