#!/usr/bin/env python3
"""Tables 1 to 5 of the AWP paper (arXiv:2506.10205) on its own models, the paper's values beside ours.

Perplexity on WikiText-2 test, in windows of 4096 tokens for Llama-2, where the paper's dense values are those, and of 2048 for the others.
Models are given as Hugging Face folders or .gguf files in f16, bf16 or f32; tables of those
that are not given are left out, which the output says. As the paper has it: 128 windows of 2048 tokens of calibration text (C4 for pruning,
the Pile for rounding; the paper names none for both at once: C4 here; --calib stands for the Pile too where --calib-pile is left out), groups of 128, every token of
the text counts alike (--first-weight 1 --token-clip 0). Rows of Lacuna's own method, awp+, follow the paper's. Each model's rows are kept
in FOLDER/MODEL-TABLE.json: a run that was stopped goes on there.
"""
from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# The paper's values as printed; "-": not given, "nan": not a number.
PRUNING_7B = {"magnitude": ["14.89", "4e3", "-", "nan", "-"], "sparsegpt": ["6.51", "9.58", "-", "1e2", "-"],
              "wanda": ["6.48", "10.09", "70.04", "4e3", "1e4"], "awp": ["6.42", "9.44", "22.10", "83.28", "8e2"]}
PRUNING_13B = {"magnitude": ["6.37", "11.23", "-", "5e4", "-"], "sparsegpt": ["5.63", "7.80", "-", "1e2", "-"],
               "wanda": ["5.59", "7.97", "43.06", "1e3", "2e4"], "awp": ["5.54", "7.49", "16.57", "75.68", "1e3"]}
QUANTIZATION_8B = {"gptq": ["9.95", "12.54", "2e3"], "awq": ["6.64", "8.14", "3e4"], "awp": ["6.55", "8.06", "1e6"]}
JOINT_8B = {"awq+wanda": ["6.93", "9.71", "3e2"], "wanda+awq": ["6.81", "9.46", "2e2"], "awp": ["6.81", "9.32", "1e2"]}
JOINT_1B = {"awq+wanda": ["11.63", "23.95", "2e3"], "wanda+awq": ["11.30", "21.90", "1e3"], "awp": ["11.20", "18.41", "3e2"]}
RATIOS, BITS, JOINT = ["50%", "60%", "70%", "80%", "90%"], ["INT4", "INT3", "INT2"], ["25% + INT4", "50% + INT4", "75% + INT4"]
# number, model, table of compress_tables.py, its columns, the paper's values
TABLES = [(1, "llama-2-7b", "pruning", RATIOS, PRUNING_7B), (2, "llama-2-13b", "pruning", RATIOS, PRUNING_13B),
          (3, "llama-3.1-8b", "quantization", BITS, QUANTIZATION_8B), (4, "llama-3.1-8b", "joint", JOINT, JOINT_8B),
          (5, "llama-3.2-1b", "joint", JOINT, JOINT_1B)]
DENSE = {"llama-2-7b": "5.12", "llama-2-13b": "4.57"}  # section 4.1; a model that is off by more than 0.5% is refused
CONTEXT = {"llama-2-7b": "4096", "llama-2-13b": "4096"}  # else 2048


def shown(row: dict | None) -> str:
    if row is None or "perplexity" not in row:
        return "-"
    value = row["perplexity"]["wikitext2"]["ppl"]
    return f"{value:.2f}" if value < 1000 else f"{value:.0e}".replace("e+0", "e")


def main() -> int:
    models = list(dict.fromkeys(model for _, model, *_ in TABLES))
    parser = argparse.ArgumentParser(prog="scripts/recipes/awp_tables.sh", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    for model in models:
        parser.add_argument(f"--{model}", type=Path, metavar="MODEL", help=f"where {model} is")
    parser.add_argument("--calib", type=Path, required=True, help="text of the C4 training set, plain or JSON lines")
    parser.add_argument("--calib-pile", type=Path, help="text of the Pile")
    parser.add_argument("--text", type=Path, required=True, help="WikiText-2 test, raw")
    parser.add_argument("--output", type=Path, default=Path("awp_tables"), metavar="FOLDER", help="for the rows (%(default)s)")
    parser.add_argument("--lacuna", default=str(ROOT / "build/release/lacuna"))
    parser.add_argument("--device", default="cuda", choices=["cpu", "cuda"], help="where to compress and to score (%(default)s)")
    parser.add_argument("--samples", default="128", help="windows of calibration text (%(default)s, as the paper)")
    parser.add_argument("--columns", help="only these columns, e.g. 50%%,INT4")
    parser.add_argument("--ours", default="awp+", help="methods beside the paper's, or none (%(default)s)")
    a = parser.parse_args()
    given = {model: getattr(a, model.replace("-", "_")) for model in models}
    for model, path in given.items():
        if path is None:
            print(f"{model}: not given (--{model} MODEL), its tables are left out")
        elif not path.exists():
            sys.exit(f"awp_tables: {path}: is not there")
    if not any(given.values()):
        sys.exit("awp_tables: no model is given; name at least one, e.g. --llama-3.2-1b FOLDER")
    a.output.mkdir(parents=True, exist_ok=True)
    extra = [] if a.ours == "none" else a.ours.split(",")
    for number, model, table, columns, paper in TABLES:
        if given[model] is None:
            continue
        columns = [c for c in columns if not a.columns or c in a.columns.split(",")]
        if not columns:
            continue
        calib = a.calib_pile if table == "quantization" and a.calib_pile else a.calib
        output = a.output / f"{model}-{table}.json"
        command = [sys.executable, str(ROOT / "scripts/compress_tables.py"), "--lacuna", a.lacuna, "--model", str(given[model]), "--calib", str(calib),
                   "--text", f"wikitext2={a.text}", "--tables", table, "--columns", ",".join(columns), "--methods", ",".join([*paper, *extra]),
                   "--samples", a.samples, "--ctx", CONTEXT.get(model, "2048"),
                   *(["--dense", f"wikitext2={DENSE[model]}"] if model in DENSE else []), "--device", a.device, "--limit", "86400", "--output", str(output)]
        if subprocess.run(command, stdout=subprocess.DEVNULL, check=False).returncode != 0:
            return 1
        rows = {row["key"]: row for row in json.loads(output.read_text())["rows"]}
        dense = f"dense {shown(rows['dense'])}" + (f", the paper's {DENSE[model]}" if model in DENSE else "")
        print(f"\nTable {number}: {model}, {table}, WikiText-2 ({dense}); ours / the paper's")
        print(f"  {'':<12}" + "".join(f"{column:>18}" for column in columns))
        all_columns = dict((t[0], t[3]) for t in TABLES)[number]
        for method in [*paper, *extra]:
            cells = []
            for column in columns:
                printed = paper[method][all_columns.index(column)] if method in paper else ""
                cells.append(shown(rows.get(f"{table} {column} {method}")) + (f" / {printed}" if printed else ""))
            print(f"  {method:<12}" + "".join(f"{cell:>18}" for cell in cells))
    return 0


if __name__ == "__main__":
    sys.exit(main())
