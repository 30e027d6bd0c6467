#!/usr/bin/env python3
"""Runs lm-evaluation-harness and `lacuna eval` on the first questions of the same files and compares them question by question.

    scripts/compare_lm_eval.py MODEL --data FOLDER [--limit N] [--kv TYPE] [--threads N] [--tasks A,B] [--errors N] [--output FILE]

MODEL: a Hugging Face folder, or a .gguf file that transformers can read (packages gguf and lm_eval[hf]); FOLDER: hellaswag_val_full.txt(.bz2), ARC-Easy-Test.jsonl, ARC-Challenge-Test.jsonl,
piqa-dev.jsonl with piqa-dev-labels.lst, winogrande-dev.jsonl, lambada-openai-test.jsonl. The harness's own tasks, model class (transformers in float32) and metrics are used. LACUNA names the program. Exits
with 1 where an accuracy, a standard error, a number of tokens or a greedy match differs, or with --errors N, for weights that lacuna multiplies with rounded inputs, where
an accuracy differs by more than N standard errors.
"""

import argparse
import bz2
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROGRAM = os.environ.get("LACUNA", str(ROOT / "build" / "release" / "lacuna"))
sys.dont_write_bytecode = True
sys.path.insert(0, str(ROOT / "tests" / "fixtures"))

from generate import zero_shot as harness  # noqa: E402


def json_lines(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]


def hellaswag_text(folder, scratch):
    packed, plain = folder / "hellaswag_val_full.txt.bz2", folder / "hellaswag_val_full.txt"
    if plain.exists():
        return plain
    out = scratch / plain.name
    out.write_bytes(bz2.decompress(packed.read_bytes()))
    return out


def hellaswag_rows(path):
    """ctx_a and ctx_b of llama.cpp's lines: a context that ends in no full stop goes on after the last one."""
    lines, rows = path.read_text(encoding="utf-8").split("\n"), []
    for at in range(0, len(lines) - 5, 6):
        label, context = lines[at].split(": ", 1)
        begun = ""
        if not context.endswith("."):
            last = [*re.finditer(r"[.!?][\"']? +(?=\S)", lines[at])][-1].end()
            context, begun = lines[at][len(label) + 2:last].rstrip(" "), lines[at][last:]
        rows.append({"activity_label": label, "ctx_a": context, "ctx_b": begun, "endings": lines[at + 2:at + 6], "label": lines[at + 1]})
    return rows


def arc_rows(path):
    return [{"question": row["question"]["stem"], "answerKey": row["answerKey"],
             "choices": {key: [choice[key] for choice in row["question"]["choices"]] for key in ("text", "label")}} for row in json_lines(path)]


def piqa_rows(path):
    labels = (path.parent / "piqa-dev-labels.lst").read_text().split()
    return [{**row, "label": int(label)} for row, label in zip(json_lines(path), labels, strict=True)]


TASKS = {  # yaml of the harness, split, file, rows
    "hellaswag": ("hellaswag/hellaswag.yaml", "validation", None, hellaswag_rows),
    "arc-easy": ("arc/arc_easy.yaml", "test", "ARC-Easy-Test.jsonl", arc_rows),
    "arc-challenge": ("arc/arc_easy.yaml", "test", "ARC-Challenge-Test.jsonl", arc_rows),
    "piqa": ("piqa/piqa.yaml", "validation", "piqa-dev.jsonl", piqa_rows),
    "winogrande": ("winogrande/default.yaml", "validation", "winogrande-dev.jsonl", json_lines),
    "lambada": ("lambada/lambada_openai.yaml", "test", "lambada-openai-test.jsonl", json_lines),
}


def adds_bos(path):
    """Whether texts begin with BOS, as the file says: the tokenizer that transformers makes of a .gguf file has its own default."""
    import gguf

    reader = gguf.GGUFReader(path)
    said = reader.get_field("tokenizer.ggml.add_bos_token")
    if said is None:
        raise SystemExit(f"error: {path} does not say whether texts begin with BOS (tokenizer.ggml.add_bos_token), so that both programs may read different ones")
    return bool(said.contents())


def run_harness(lm, name, rows):
    path, split, _, _ = TASKS[name]
    task, questions, scores = harness.load_task(path, split, rows), [], {}
    for i, doc in enumerate(task.eval_docs):
        requests = harness.requests_of(task, doc, name, i)
        results = lm.loglikelihood(requests, disable_tqdm=True)
        for key, value in task.process_results(doc, results).items():
            scores.setdefault(key, []).append(value)
        lengths = [len(lm._encode_pair(*request.args)[1]) if request.args[0] else None for request in requests]
        questions.append({"loglikelihoods": [ll for ll, _ in results], "greedy": [greedy for _, greedy in results], "tokens": lengths})
    figures = {}
    for key, values in scores.items():
        if key == "perplexity":
            figures["ppl"] = harness.perplexity(values)
        else:
            figures[key], figures[key + "_stderr"] = harness.mean(values), harness.mean_stderr(values)
    return questions, figures


def run_lacuna(arguments, model, files, data, answers):
    command = [PROGRAM, "eval", str(model), "--limit", str(arguments.limit), "--kv", arguments.kv, "--json", "--answers-out", str(answers)]
    if arguments.threads:
        command += ["--threads", str(arguments.threads)]
    for name, file in files.items():
        command += ["--task", name, "--data", str(file)]
    if "piqa" in files:
        command += ["--labels", str(data / "piqa-dev-labels.lst")]
    rows = [json.loads(line) for line in subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout.splitlines()]
    return {row["task"]: row for row in rows}, json_lines(answers)


def compare(name, theirs, figures, ours, row):
    largest, share, wrong = 0.0, 0.0, 0
    for a, b in zip(theirs, ours, strict=True):
        for x, y, m, n in zip(a["loglikelihoods"], b["loglikelihoods"], a["tokens"], b["tokens"], strict=True):
            largest, share = max(largest, abs(x - y)), max(share, abs(x - y) / abs(x))
            wrong += m is not None and m != n
        wrong += a["greedy"] != b["greedy"]
    same = wrong == 0 and all(abs(value - row[key]) < 1e-9 for key, value in figures.items() if key != "ppl")
    apart = max(abs(figures[key] - row[key]) / (figures[key + "_stderr"] or 1e-9) for key in ("acc", "acc_norm") if key in figures)
    return {"task": name, "n": row["n"], "same": same, "standard_errors_apart": apart, "largest_difference": largest, "largest_relative_difference": share,
            "lacuna": {key: row[key] for key in figures}, "harness": figures, "data_sha256": row["data_sha256"]}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--data", type=Path, required=True, help="folder of the files")
    parser.add_argument("--limit", type=int, default=100, help="questions of each task")
    parser.add_argument("--kv", default="f32", help="lacuna's cache")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--errors", type=float, help="standard errors that an accuracy may differ by; without it everything must be the same")
    parser.add_argument("--output", type=Path, help="write the table as JSON")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        files = {task: arguments.data / TASKS[task][2] if TASKS[task][2] else hellaswag_text(arguments.data, scratch) for task in arguments.tasks.split(",")}
        rows, answers = run_lacuna(arguments, arguments.model, files, arguments.data, scratch / "answers.jsonl")
        where = {"pretrained": str(arguments.model)}
        if arguments.model.suffix == ".gguf":
            where = {"pretrained": str(arguments.model.parent), "gguf_file": arguments.model.name, "add_bos_token": adds_bos(arguments.model)}
        # Only an empty context needs this token; some folders name none.
        lm = harness.HFLM(**where, device="cpu", dtype="float32", batch_size=1, prefix_token_id=0)
        table = []
        for task, file in files.items():
            theirs, figures = run_harness(lm, task, TASKS[task][3](file)[:arguments.limit])
            ours = [answer for answer in answers if answer["task"] == task]
            table.append(compare(task, theirs, figures, ours, rows[task]))
            print(json.dumps(table[-1]), flush=True)
    if arguments.output:
        version = subprocess.run([PROGRAM, "--version"], check=True, stdout=subprocess.PIPE, text=True).stdout
        commit = re.search(r"^commit +(\S+)", version, re.M)[1]  # of the program that was measured
        text = ",\n".join(" " + json.dumps(row) for row in table)
        head = {"command": f"scripts/compare_lm_eval.py {arguments.model.name} --data FOLDER --limit {arguments.limit} --kv {arguments.kv} --tasks {arguments.tasks}" + (f" --errors {arguments.errors:g}" if arguments.errors is not None else ""), "commit": commit, "lm_eval": harness.lm_eval.__version__}
        arguments.output.write_text("{" + json.dumps(head)[1:-1] + ', "rows": [\n' + text + "\n]}\n")
    close = (row["same"] if arguments.errors is None else row["standard_errors_apart"] <= arguments.errors for row in table)
    sys.exit(0 if all(close) else 1)


if __name__ == "__main__":
    main()
