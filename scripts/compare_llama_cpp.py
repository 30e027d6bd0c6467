#!/usr/bin/env python3
"""Compares lacuna's numbers with llama.cpp's on the same GGUF files.

For each model: the tokens of the whole text, the greedy continuation of ten prompts, the perplexity at two contexts, and the mean
Kullback-Leibler divergence of both programs from a float32 evaluation of the same dequantized weights (llama.cpp's own float32
path on an F32 file that its llama-quantize makes, with a float32 KV cache and without flash attention).
Needs numpy and, beside the programs of llama.cpp, the declarations of its C interface (llama_cpp/llama_cpp.py of llama-cpp-python).
"""
from __future__ import annotations

import argparse
import contextlib
import ctypes
import datetime
import functools
import hashlib
import importlib
import json
import os
import re
import shlex
import subprocess
import sys
import types
import typing
from pathlib import Path

import numpy

from bench_peers import ROOT, Failure, commit, device, json_lines, note, portable_command, run, write_json

PROMPTS = [
    "The capital of France is",
    "Water boils at a lower temperature on a mountain because",
    "def fibonacci(n):\n    \"\"\"Returns the n-th Fibonacci number.\"\"\"\n",
    "Once upon a time, in a village by the sea, there lived",
    "Three reasons to learn a second language are:\n1.",
    "The difference between a list and a tuple in Python is that",
    "In 1969, the first people to walk on the Moon",
    "La bibliothèque est fermée le dimanche, donc",
    "#include <vector>\n\n// Returns the largest element of v.\nint largest(const std::vector<int>& v) {\n",
    "Q: If a train travels 60 km in 45 minutes, how fast does it go?\nA:",
]
PERPLEXITY_TOLERANCE = 0.005  # relative
CANDIDATE_MARGIN = 0.1        # logits, at the first token where the greedy texts part


def load_binding(binding: Path, library_folder: Path) -> types.ModuleType:
    """The low-level module of llama-cpp-python, without its package's __init__ (which would need more packages)."""
    if not (binding / "llama_cpp" / "llama_cpp.py").is_file():
        raise Failure(f"{binding}: no llama_cpp/llama_cpp.py in it; pass the unpacked source package of llama-cpp-python")
    if not (library_folder / "libllama.so").is_file():
        raise Failure(f"{library_folder}: no libllama.so in it; llama.cpp must be built with shared libraries")
    os.environ["LLAMA_CPP_LIB_PATH"] = str(library_folder)
    package = types.ModuleType("llama_cpp")
    package.__path__ = [str(binding / "llama_cpp")]
    sys.modules["llama_cpp"] = package
    sys.modules.setdefault("typing_extensions", typing)  # it asks only for TypeAlias
    return importlib.import_module("llama_cpp.llama_cpp")


class LlamaCpp:
    """A model loaded by llama.cpp, evaluated through its C interface."""

    def __init__(self, api: types.ModuleType, path: Path, context: int, threads: int, float32: bool = False):
        self.api = api
        self.model = api.llama_model_load_from_file(str(path).encode(), api.llama_model_default_params())
        if not self.model:
            raise Failure(f"{path}: llama.cpp cannot load it")
        self.vocab = api.llama_model_get_vocab(self.model)
        self.n_vocab = api.llama_vocab_n_tokens(self.vocab)
        parameters = api.llama_context_default_params()
        parameters.n_ctx = parameters.n_batch = context
        parameters.n_ubatch = min(context, 512)
        parameters.n_threads = parameters.n_threads_batch = threads
        if float32:
            parameters.type_k = parameters.type_v = 0  # GGML_TYPE_F32
            parameters.flash_attn_type = 0             # disabled
        self.context = api.llama_init_from_model(self.model, parameters)
        if not self.context:
            raise Failure(f"{path}: llama.cpp cannot make a context of {context} tokens")
        self.batch = api.llama_batch_init(context, 0, 1)

    def close(self) -> None:
        self.api.llama_batch_free(self.batch)
        self.api.llama_free(self.context)
        self.api.llama_model_free(self.model)

    def __enter__(self) -> "LlamaCpp":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def tokenize(self, text: bytes, special: bool) -> list[int]:
        """Adds BOS where the model asks for it; `special`: whether texts of control tokens are read as those tokens."""
        room = len(text) + 16
        tokens = (ctypes.c_int32 * room)()
        count = self.api.llama_tokenize(self.vocab, text, len(text), tokens, room, True, special)
        if count < 0:
            raise Failure(f"llama.cpp: {len(text)} bytes of text became more than {room} tokens")
        return list(tokens[:count])

    def clear(self) -> None:
        self.api.llama_memory_clear(self.api.llama_get_memory(self.context), True)

    def evaluate(self, tokens: list[int], start: int, scored_from: int) -> numpy.ndarray:
        """Logits [len(tokens) - scored_from, n_vocab] of tokens at positions start, start + 1, ..., from index scored_from on."""
        for i, token in enumerate(tokens):
            self.batch.token[i] = token
            self.batch.pos[i] = start + i
            self.batch.n_seq_id[i] = 1
            self.batch.seq_id[i][0] = 0
            self.batch.logits[i] = i >= scored_from
        self.batch.n_tokens = len(tokens)
        status = self.api.llama_decode(self.context, self.batch)
        if status != 0:
            raise Failure(f"llama.cpp: llama_decode returned {status}")
        rows = len(tokens) - scored_from
        flat = numpy.ctypeslib.as_array(ctypes.cast(self.api.llama_get_logits(self.context), ctypes.POINTER(ctypes.c_float)),
                                        shape=(rows * self.n_vocab,))
        return flat.reshape(rows, self.n_vocab).copy()

    def greedy(self, prompt: list[int], count: int) -> tuple[list[int], list[numpy.ndarray]]:
        """`count` tokens, going on past an end-of-generation token, and the logits each was taken from."""
        self.clear()
        ids, rows = [], []
        logits = self.evaluate(prompt, 0, len(prompt) - 1)[0]
        while True:
            ids.append(int(logits.argmax()))
            rows.append(logits)
            if len(ids) == count:
                return ids, rows
            logits = self.evaluate([ids[-1]], len(prompt) + len(ids) - 1, 0)[0]


class Lacuna:
    def __init__(self, binary: Path, threads: int):
        if not binary.is_file():
            raise Failure(f"{binary}: not built; run scripts/build.sh, or pass --lacuna PROGRAM")
        self.binary, self.threads = binary, threads

    def ask(self, *arguments: str) -> dict:
        command = [str(self.binary), *arguments, "--json"]
        rows = json_lines(run(command).stdout, command)
        if not rows:
            raise Failure(f"{shlex.join(command)}: printed no JSON")
        return rows[-1]

    def greedy(self, model: Path, prompt: str, count: int) -> tuple[list[int], list[int]]:
        row = self.ask("run", str(model), "-p", prompt, "-n", str(count), "--temp", "0", "--ignore-eos", "--threads", str(self.threads))
        return row["prompt_ids"], row["ids"]

    def tokenize(self, model: Path, text: Path) -> list[int]:
        return self.ask("tokenize", str(model), "-f", str(text))["ids"]

    def perplexity(self, model: Path, text: Path, context: int, chunks: int, logits: Path | None = None) -> dict:
        more = ["--logits-out", str(logits)] if logits else []
        return self.ask("perplexity", str(model), "-f", str(text), "--ctx", str(context), "--protocol", "llama.cpp", "--chunks", str(chunks),
                        "--threads", str(self.threads), *more)


def compare_tokens(model: Path, text: Path, ours: Lacuna | None, theirs: LlamaCpp) -> dict:
    expected = theirs.tokenize(text.read_bytes(), special=False)
    row = {"check": "tokens", "model": model.name, "text": text.name, "llama_cpp_tokens": len(expected)}
    if ours:
        got = ours.tokenize(model, text)
        row["ok"] = got == expected
        if got != expected:
            first = next((i for i, (a, b) in enumerate(zip(got, expected)) if a != b), min(len(got), len(expected)))
            row["first_difference"] = {"position": first, "lacuna": got[first:first + 4], "llama_cpp": expected[first:first + 4]}
    return row


def write_code_points(path: Path) -> Path:
    """Each control character, and one code point in 4096 of all planes, each between letters: vocabularies lack bytes of some."""
    points = [*range(1, 0x20), 0x7f, *range(0x80, 0x110000, 0x1000)]
    path.write_text("".join(f"x{chr(point)}y" for point in points if not 0xd800 <= point < 0xe000), encoding="utf-8")
    return path


def compare_greedy(model: Path, ours: Lacuna, theirs: LlamaCpp, count: int, float32: typing.Callable[[], LlamaCpp]) -> dict:
    """Where two texts part, the row says by how much llama.cpp's choice is ahead of ours in llama.cpp's logits, which decides, and
    in those of the float32 evaluation (negative: float32 prefers ours): both programs round activations to 8 bits."""
    row = {"check": "greedy", "model": model.name, "prompts": len(PROMPTS), "tokens": count, "identical": 0, "differences": []}
    for number, prompt in enumerate(PROMPTS):
        prompt_ids = theirs.tokenize(prompt.encode(), special=False)
        our_prompt, got = ours.greedy(model, prompt, count)
        if our_prompt != prompt_ids:
            row["differences"].append({"prompt": number, "prompt_ids": our_prompt, "llama_cpp_prompt_ids": prompt_ids, "ok": False})
            continue
        expected, logits = theirs.greedy(prompt_ids, count)
        if len(got) != count:
            raise Failure(f"{model}: prompt {number}: lacuna gave {len(got)} tokens, {count} were asked for")
        if got == expected:
            row["identical"] += 1
            continue
        place = next(i for i, (a, b) in enumerate(zip(got, expected)) if a != b)
        margin = float(logits[place][expected[place]] - logits[place][got[place]])
        exact = float32()
        exact.clear()
        tokens = prompt_ids + expected[:place]
        true = exact.evaluate(tokens, 0, len(tokens) - 1)[0]
        true_margin = float(true[expected[place]] - true[got[place]])
        row["differences"].append({"prompt": number, "position": place, "lacuna": got[place], "llama_cpp": expected[place],
                                   "margin": margin, "ok": margin <= CANDIDATE_MARGIN,
                                   "float32_margin": true_margin, "float32_ok": true_margin <= CANDIDATE_MARGIN})
    row["ok"] = all(d["ok"] for d in row["differences"])
    row["float32_ok"] = all(d.get("float32_ok", False) for d in row["differences"])
    return row


def llama_cpp_perplexity(bin_folder: Path, model: Path, text: Path, context: int, chunks: int, threads: int) -> tuple[float, float]:
    command = [str(bin_folder / "llama-perplexity"), "-m", str(model), "-f", str(text), "-c", str(context), "--chunks", str(chunks),
               "-t", str(threads)]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    found = re.search(r"Final estimate: PPL = ([0-9.]+) \+/- ([0-9.]+)", done.stdout + done.stderr)
    if done.returncode != 0 or not found:
        tail = "\n".join(done.stderr.splitlines()[-8:])
        raise Failure(f"{shlex.join(command)}: exit status {done.returncode}, no final estimate\n{tail}")
    return float(found[1]), float(found[2])


def compare_perplexity(model: Path, text: Path, context: int, chunks: int, ours: Lacuna | None, bin_folder: Path, threads: int) -> dict:
    expected, error = llama_cpp_perplexity(bin_folder, model, text, context, chunks, threads)
    row = {"check": "perplexity", "model": model.name, "text": text.name, "ctx": context, "chunks": chunks, "protocol": "llama.cpp",
           "llama_cpp": expected, "llama_cpp_stderr": error}
    if ours:
        got = ours.perplexity(model, text, context, chunks)
        row.update(lacuna=got["ppl"], lacuna_stderr=got.get("stderr"), tokens=got.get("tokens"), text_sha256=got.get("text_sha256"),
                   relative_difference=got["ppl"] / expected - 1)
        row["ok"] = abs(row["relative_difference"]) <= PERPLEXITY_TOLERANCE
    return row


def log_softmax(logits: numpy.ndarray) -> numpy.ndarray:
    wide = logits.astype(numpy.float64)
    wide -= wide.max(axis=1, keepdims=True)
    wide -= numpy.log(numpy.exp(wide).sum(axis=1, keepdims=True))
    return wide


def divergence(reference: numpy.ndarray, other: numpy.ndarray) -> numpy.ndarray:
    """KL(reference || other) in nats for each row of log-probabilities."""
    return (numpy.exp(reference) * (reference - other)).sum(axis=1)


def chunk_tokens(model: LlamaCpp, text: Path, context: int, chunks: int) -> list[list[int]]:
    """The windows of llama.cpp's protocol: BOS in place of the first token where the model adds one."""
    tokens = model.tokenize(text.read_bytes(), special=False)
    if len(tokens) < context * chunks:
        raise Failure(f"{text}: {len(tokens)} tokens, but {chunks} chunks of {context} need {context * chunks}; lower --chunks")
    windows = [tokens[i * context:(i + 1) * context] for i in range(chunks)]
    if model.api.llama_vocab_get_add_bos(model.vocab):
        for window in windows:
            window[0] = model.api.llama_vocab_bos(model.vocab)
    return windows


def read_logits(path: Path, n_vocab: int, rows: int) -> numpy.ndarray:
    header = numpy.fromfile(path, dtype="<i4", count=2)
    if header.size != 2 or header[0] != n_vocab or header[1] != rows:
        raise Failure(f"{path}: its header says n_vocab, rows = {header.tolist()}, expected [{n_vocab}, {rows}]")
    size = path.stat().st_size
    if size != 8 + 4 * n_vocab * rows:
        raise Failure(f"{path}: {size} bytes, expected {8 + 4 * n_vocab * rows}")
    return numpy.memmap(path, dtype="<f4", mode="r", offset=8, shape=(rows, n_vocab))


def make_float32(bin_folder: Path, model: Path, scratch: Path) -> Path:
    """model.gguf -> scratch/model-f32-<sha>.gguf: the same weights, dequantized. Kept for the next run."""
    with open(model, "rb") as file:
        sha = hashlib.file_digest(file, "sha256").hexdigest()
    out = scratch / f"{model.stem}-f32-{sha[:16]}.gguf"
    if not out.is_file():
        partial = out.with_suffix(".partial")
        run([str(bin_folder / "llama-quantize"), "--allow-requantize", str(model), str(partial), "F32"])
        os.replace(partial, out)
    return out


def compare_divergence(model: Path, text: Path, context: int, chunks: int, ours: Lacuna | None, api: types.ModuleType, bin_folder: Path,
                       threads: int, scratch: Path) -> dict:
    scored = context - 1 - context // 2  # rows of a window: every token of its second half predicts the next one
    first = context // 2
    rows: dict[str, list[numpy.ndarray]] = {"llama_cpp": [], "lacuna": []}
    agree = {"llama_cpp": 0, "lacuna": 0}
    loss = {"float32": 0.0, "llama_cpp": 0.0, "lacuna": 0.0}
    our_file = scratch / f"{model.stem}-logits.bin"
    with LlamaCpp(api, model, context, threads) as theirs, \
            LlamaCpp(api, make_float32(bin_folder, model, scratch), context, threads, float32=True) as exact:
        windows = chunk_tokens(theirs, text, context, chunks)
        our_logits = None
        if ours:
            ours.perplexity(model, text, context, chunks, logits=our_file)
            our_logits = read_logits(our_file, theirs.n_vocab, chunks * scored)
        for index, window in enumerate(windows):
            exact.clear()
            theirs.clear()
            # The last token's logits predict a token of the next window: neither program scores them.
            true = log_softmax(exact.evaluate(window, 0, first)[:scored])
            targets = (numpy.arange(scored), numpy.array(window[first + 1:]))
            loss["float32"] -= float(true[targets].sum())
            others = {"llama_cpp": theirs.evaluate(window, 0, first)[:scored]}
            if our_logits is not None:
                others["lacuna"] = our_logits[index * scored:(index + 1) * scored]
            for name, logits in others.items():
                if not numpy.isfinite(logits).all():
                    raise Failure(f"{model}: the logits of {name} hold NaN or infinity in window {index}")
                other = log_softmax(logits)
                rows[name].append(divergence(true, other))
                loss[name] -= float(other[targets].sum())
                agree[name] += int((logits.argmax(axis=1) == true.argmax(axis=1)).sum())
    row = {"check": "kl", "model": model.name, "text": text.name, "ctx": context, "chunks": chunks, "rows": scored * chunks,
           "float32_ppl": float(numpy.exp(loss["float32"] / (scored * chunks)))}
    for name, values in rows.items():
        if values:
            joined = numpy.concatenate(values)
            row[name] = {"mean": float(joined.mean()), "stderr": float(joined.std() / len(joined) ** 0.5), "max": float(joined.max()),
                         "same_first_choice": agree[name] / len(joined), "ppl": float(numpy.exp(loss[name] / len(joined)))}
    if ours:
        our_file.unlink()
        # Paired: both programs are measured on the same rows, so the chance part is that of the row-wise difference.
        gap = numpy.concatenate(rows["lacuna"]) - numpy.concatenate(rows["llama_cpp"])
        row["mean_gap"], row["gap_stderr"] = float(gap.mean()), float(gap.std() / len(gap) ** 0.5)
        row["ok"] = row["mean_gap"] <= 0
    return row


def describe(row: dict) -> str:
    verdict = {True: "ok", False: "DIFFERS", None: "llama.cpp alone"}[row.get("ok")]
    if row["check"] == "tokens":
        detail = f"{row['llama_cpp_tokens']} tokens of {row['text']}" + (f", first difference {row['first_difference']}" if "first_difference" in row else "")
    elif row["check"] == "greedy":
        detail = f"{row['identical']} of {row['prompts']} prompts give the same {row['tokens']} tokens, float32 {'agrees' if row['float32_ok'] else 'differs'}"
        for d in row["differences"]:
            detail += f"; prompt {d['prompt']} " + (f"parts at {d['position']}, margin {d['margin']:.4f}, in float32 {d['float32_margin']:.4f}" if "margin" in d else "differs: " + str(d))
    elif row["check"] == "perplexity":
        detail = f"ctx {row['ctx']}, {row['chunks']} chunks: llama.cpp {row['llama_cpp']:.4f}"
        if "lacuna" in row:
            detail += f", lacuna {row['lacuna']:.4f} ({100 * row['relative_difference']:+.3f}%)"
    else:
        detail = f"ctx {row['ctx']}, {row['rows']} rows, float32 perplexity {row['float32_ppl']:.4f}: " + ", ".join(
            f"{name} {row[name]['mean']:.6f} +/- {row[name]['stderr']:.6f} (first choice same {100 * row[name]['same_first_choice']:.2f}%, "
            f"perplexity {row[name]['ppl']:.4f})"
            for name in ("llama_cpp", "lacuna") if name in row)
        if "mean_gap" in row:
            detail += f"; lacuna - llama.cpp {row['mean_gap']:+.6f} +/- {row['gap_stderr']:.6f}"
    return f"{row['model']:<22} {row['check']:<11} {verdict:<16} {detail}"


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="compare_llama_cpp.sh", description=__doc__.split("\n\n")[0])
    parser.add_argument("models", nargs="+", type=Path, metavar="MODEL", help="GGUF files")
    parser.add_argument("-f", "--text", type=Path, required=True, help="text file (wikitext2-raw.test.txt)")
    parser.add_argument("--lacuna", type=Path, default=ROOT / "build/release/lacuna")
    parser.add_argument("--without-lacuna", action="store_true", help="llama.cpp's figures alone (no greedy texts)")
    parser.add_argument("--llama", type=Path, required=True, metavar="FOLDER", help="folder of a build of llama.cpp")
    parser.add_argument("--binding", type=Path, required=True, metavar="FOLDER", help="unpacked source package of llama-cpp-python")
    parser.add_argument("--scratch", type=Path, required=True, help="folder for the F32 files (4 bytes a weight) and logits")
    parser.add_argument("--checks", default="tokens,greedy,perplexity,kl", help="which of them to run (default: all)")
    parser.add_argument("--tokens", type=int, default=64, help="greedy tokens per prompt")
    parser.add_argument("--chunks", type=int, default=40, help="windows of the perplexity at the first context; the same text at the others")
    parser.add_argument("--contexts", type=lambda text: [int(part) for part in text.split(",")], default=[512, 2048], help="default: 512,2048")
    parser.add_argument("--kl-chunks", type=int, default=4, help="windows of the divergence, at the first context")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--output", type=Path, default=ROOT / "docs/results/compare-llama-cpp.json")
    parser.add_argument("--typed", help="the command to write down, where a driver script made this one")
    options = parser.parse_args(arguments)
    checks = options.checks.split(",")
    unknown = set(checks) - {"tokens", "greedy", "perplexity", "kl"}
    if unknown:
        parser.error(f"--checks: unknown {', '.join(sorted(unknown))}; known: tokens, greedy, perplexity, kl")
    for path in [*options.models, options.text]:
        if not path.is_file():
            raise Failure(f"{path}: no such file")
    options.scratch.mkdir(parents=True, exist_ok=True)
    bin_folder = options.llama / "bin" if (options.llama / "bin").is_dir() else options.llama
    api = load_binding(options.binding, bin_folder)
    quiet = api.llama_log_callback(lambda level, text, data: None)  # llama.cpp's log would drown the table; kept alive until the end
    api.llama_log_set(quiet, ctypes.c_void_p(0))
    api.llama_backend_init()
    ours = None if options.without_lacuna else Lacuna(options.lacuna, options.threads)
    result = []

    def report(row: dict) -> None:
        result.append(row)
        print(describe(row), flush=True)

    for model in options.models:
        if "tokens" in checks or "greedy" in checks:
            with LlamaCpp(api, model, 512, options.threads) as theirs:
                if "tokens" in checks:
                    report(compare_tokens(model, options.text, ours, theirs))
                    report(compare_tokens(model, write_code_points(options.scratch / "code-points.txt"), ours, theirs))
                if "greedy" in checks and ours:
                    with contextlib.ExitStack() as stack:
                        # Made only if some text parts: it costs four bytes a weight.
                        float32 = functools.cache(lambda: stack.enter_context(
                            LlamaCpp(api, make_float32(bin_folder, model, options.scratch), 512, options.threads, float32=True)))
                        report(compare_greedy(model, ours, theirs, options.tokens, float32))
        if "perplexity" in checks:
            for context in options.contexts:
                chunks = max(1, options.chunks * options.contexts[0] // context)
                report(compare_perplexity(model, options.text, context, chunks, ours, bin_folder, options.threads))
        if "kl" in checks:
            report(compare_divergence(model, options.text, options.contexts[0], options.kl_chunks, ours, api, bin_folder, options.threads,
                                      options.scratch))
    write_json(options.output, {
        "command": portable_command(options.typed or shlex.join(["scripts/compare_llama_cpp.py", *arguments])), "commit": commit(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"), "device": device(), "rows": result})
    note(f"written: {options.output}")
    failed = [row for row in result if row.get("ok") is False]
    if failed:
        note(f"{len(failed)} of {len(result)} checks differ from llama.cpp by more than the limits")
    return 1 if failed else 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except Failure as failure:
        print(f"error: {failure}", file=sys.stderr)
        sys.exit(1)
