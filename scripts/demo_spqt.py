#!/usr/bin/env python3
"""What activation sparsity (SpQt) does to one model: zigzag weights, thresholds, then tokens per second and perplexity, dense and at
25, 40 and 50%, side by side. The zigzag file, the thresholds and the figures are kept beside the model; with the same program they are
not made again. Standard library only; quickstart.sh calls it."""
from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LEVELS = [25, 40, 50]
TEXT = ROOT / "scripts/data/quickstart.txt"  # measured on
# Calibrated on: English of another kind, always at hand.
CALIBRATION = [ROOT / "README.md", ROOT / "docs/ARCHITECTURE.md", ROOT / "CONTRIBUTING.md"]
LITTLE_GAIN, MUCH_LOSS = 1.25, 0.10  # what the sentence below calls little and much
ROUNDS, CALM = 3, 1.5  # rounds of the speeds; how far those of one row may lie apart for the figures to be kept


def run(command: list[str], text: str | None = None) -> str:
    done = subprocess.run(command, input=text, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"error: {' '.join(command)} failed, see above")
    return done.stdout


def row(command: list[str]) -> dict:
    return json.loads(run([*command, "--json"]).splitlines()[-1])


def make_files(lacuna: str, model: Path, zigzag: Path, thresholds: Path, threads: list[str]) -> None:
    """Made anew even where they are: another program may have made them."""
    run([lacuna, "quantize", str(model), "-o", str(zigzag), "--layout", "zz4_k", *threads])
    text = "\n\n".join(path.read_text(encoding="utf-8") for path in CALIBRATION)
    # A small search: this is a demonstration, `lacuna calibrate --help` says what more gives.
    run([lacuna, "calibrate", str(zigzag), "--text", "-", "--mode", "greedy", "--levels", ",".join(map(str, LEVELS)),
         "--tokens", "2048", "--sparse-tokens", "1024", "--ctx", "1024", "--search-windows", "1", "--search-window", "128",
         "-o", str(thresholds), *threads], text)


def measure(lacuna: str, model: Path, zigzag: Path, thresholds: Path, threads: list[str]) -> list[dict]:
    """Every row once in each round, so that what else the machine does meets them alike."""
    kinds = [(model, 0), (zigzag, 0), *((zigzag, level) for level in LEVELS)]
    flags = [["--act-sparsity", str(level), "--thresholds", str(thresholds)] if level else [] for _, level in kinds]
    speeds: list[list[float]] = [[] for _ in kinds]
    for _ in range(ROUNDS):
        for i, (path, _) in enumerate(kinds):
            speeds[i].append(row([lacuna, "bench", str(path), "--what", "decode", "--gen", "64", "--runs", "1", *flags[i], *threads])["tok_s"])
    rows = []
    for i, (path, level) in enumerate(kinds):
        quality = row([lacuna, "perplexity", str(path), "-f", str(TEXT), "--ctx", "256", *flags[i], *threads])
        rows.append({"name": "as it came" if path == model else "zz4_k", "level": level, "tok_s": statistics.median(speeds[i]),
                     "ratio": statistics.median(mine / dense for mine, dense in zip(speeds[i], speeds[1])),
                     "swing": max(speeds[i]) / min(speeds[i]), "ppl": quality["ppl"], "act_sparsity": quality["act_sparsity"]})
    return rows


def cached(path: Path, key: str) -> list[dict] | None:
    try:
        held = json.loads(path.read_text(encoding="utf-8"))
        return held["rows"] if held["key"] == key else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def sentence(rows: list[dict]) -> str:
    dense, most = rows[1], rows[-1]
    gain, loss = most["ratio"], most["ppl"] / dense["ppl"] - 1
    little, much = gain < LITTLE_GAIN, loss > MUCH_LOSS
    verdict = {(True, True): "it gains little and loses much", (True, False): "it gains little, but loses little too",
               (False, True): "it gains speed, but loses much", (False, False): "it gains speed and loses little"}[little, much]
    if gain < 1.02:
        verdict = verdict.replace("gains little", "gains nothing")
    return (f"At {most['level']}% this model decodes {gain:.2f}x as fast as dense and its perplexity is {100 * loss:.0f}% higher: "
            f"{verdict}.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("lacuna", help="the program")
    parser.add_argument("model", type=Path, help="a .gguf file; what is made lies beside it")
    parser.add_argument("--threads", default=None, help="threads to use (default: all cores)")
    options = parser.parse_args()
    threads = ["--threads", options.threads] if options.threads else []
    stem = str(options.model)[: -len(".gguf")] if options.model.suffix == ".gguf" else str(options.model)
    zigzag, thresholds, figures = Path(stem + ".zz4_k.gguf"), Path(stem + ".demo.thresholds.gguf"), Path(stem + ".demo.json")
    facts = [run([options.lacuna, "--version"]), str(Path(options.lacuna).stat().st_mtime_ns), str(options.model.stat().st_size),
             TEXT.read_text(encoding="utf-8"), str(options.threads)]
    key = hashlib.sha256("\n".join(facts).encode()).hexdigest()
    rows = cached(figures, key)
    print("measured by an earlier run of this program" if rows else "made and measured now")
    if rows is None:
        make_files(options.lacuna, options.model, zigzag, thresholds, threads)
        rows = measure(options.lacuna, options.model, zigzag, thresholds, threads)
        if max(line["swing"] for line in rows) <= CALM:  # else measured again next time
            figures.write_text(json.dumps({"key": key, "rows": rows}, indent=1) + "\n", encoding="utf-8")
    print(f"{'weights':<12}{'skipped':>9}{'realised':>10}{'tokens/s':>10}{'x dense':>9}{'perplexity':>12}{'over dense':>12}")
    for line in rows:
        sparse = line["level"] > 0
        print(f"{line['name']:<12}{(str(line['level']) + '%') if sparse else 'dense':>9}"
              f"{format(line['act_sparsity'], '.1%') if sparse else '-':>10}{line['tok_s']:>10.1f}"
              f"{line['ratio']:>9.2f}{line['ppl']:>12.2f}{line['ppl'] / rows[1]['ppl'] - 1:>+12.1%}")
    print(sentence(rows))
    swing = max(line["swing"] for line in rows)
    if swing > CALM:
        print(f"Speeds of one row differed by {swing:.1f}x between rounds: something else runs on this machine, so they say little; run this again later.")


if __name__ == "__main__":
    main()
