#!/usr/bin/env python3
"""Runs lacuna, llama.cpp and (where a build is given) ik_llama.cpp alternately on the same GGUF files and compares their speed.

A round runs every program once, in an order that rotates from round to round, so that a machine that slows down slows all of them.
Each peer is first tried with every option set of its list; the rounds use, for prefill and for decode, the one that was best there.
A ratio is taken within a round (ours / theirs of the same round); the table gives the median and the range over the rounds.
Standard library only.
"""
from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import selectors
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIMIT_S = 1800  # of one run of one program; the slowest model here takes under a minute


class Failure(Exception):
    """An error whose text is meant for the user."""


@dataclass
class Run:
    """What one process gave: its output, wall-clock time and peak resident memory."""

    stdout: str
    wall_s: float
    peak_bytes: int


def run(command: list[str], folder: str | None = None) -> Run:
    """folder: where it runs."""
    started = time.monotonic()
    try:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, cwd=folder)
    except OSError as error:
        raise Failure(f"{command[0]}: cannot be started: {error}") from error
    try:
        stdout, stderr, usage, status = _collect(process)
    except TimeoutError:
        process.kill()
        process.wait()
        raise Failure(f"{shlex.join(command)}: still running after {LIMIT_S} s, stopped") from None
    wall_s = time.monotonic() - started
    if status != 0:
        tail = "\n".join(stderr.decode(errors="replace").splitlines()[-8:])
        raise Failure(f"{shlex.join(command)}: exit status {status}\n{tail}")
    return Run(stdout.decode(errors="replace"), wall_s, usage.ru_maxrss * 1024)


def _collect(process: subprocess.Popen) -> tuple[bytes, bytes, object, int]:
    """Reads both pipes to their end, then reaps the child with wait4, which gives the child's own resource usage."""
    deadline = time.monotonic() + LIMIT_S
    parts = {process.stdout: [], process.stderr: []}
    with selectors.DefaultSelector() as selector:
        for pipe in parts:
            selector.register(pipe, selectors.EVENT_READ)
        while selector.get_map():
            ready = selector.select(timeout=deadline - time.monotonic())
            if not ready:
                raise TimeoutError
            for key, _ in ready:
                data = os.read(key.fd, 65536)
                if data:
                    parts[key.fileobj].append(data)
                else:
                    selector.unregister(key.fileobj)
                    key.fileobj.close()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    return b"".join(parts[process.stdout]), b"".join(parts[process.stderr]), usage, process.returncode


@dataclass
class Settings:
    threads: int
    prompt: int
    generate: int
    context: int = 0  # tokens in the cache before those that are timed; where there are some, decode alone is measured

    @property
    def what(self) -> list[str]:
        return ["decode"] if self.context else ["prefill", "decode"]


@dataclass
class Program:
    """One of the programs compared. `options` lists the option sets tried; `best` is filled by the trial."""

    name: str
    version: str
    options: list[list[str]]
    best: dict[str, list[str]] = field(default_factory=dict)  # "prefill" or "decode" -> option set

    def measure(self, model: Path, what: list[str], options: list[str], settings: Settings) -> dict[str, dict]:
        """{"prefill": row, "decode": row} for those asked for; each row has at least tok_s."""
        raise NotImplementedError

    def first_token(self, model: Path, options: list[str], settings: Settings) -> Run:
        """A process that loads the model, reads a one-word prompt and generates one token."""
        raise NotImplementedError


class Lacuna(Program):
    def __init__(self, binary: Path):
        version = run([str(binary), "--version"]).stdout.strip().splitlines()
        super().__init__("lacuna", version[0] if version else "unknown", [[]])
        self.binary = binary

    def measure(self, model, what, options, settings):
        command = [str(self.binary), "bench", str(model), "--what", ",".join(what), "--runs", "1", "--prompt", str(settings.prompt),
                   "--gen", str(settings.generate), "--context", str(settings.context), "--threads", str(settings.threads), "--json", *options]
        result = run(command)
        rows = {}
        for row in json_lines(result.stdout, command):
            if row.get("bench") in what:
                rows[row["bench"]] = row
        missing = [name for name in what if "tok_s" not in rows.get(name, {})]
        if missing:
            raise Failure(f"{shlex.join(command)}: no row with tok_s for {', '.join(missing)}")
        return rows

    def first_token(self, model, options, settings):
        return run([str(self.binary), "run", str(model), "-p", "Hello", "-n", "1", "--temp", "0", "--threads", str(settings.threads), "--json"])


class Ggml(Program):
    """llama.cpp, or a program that comes from it: both have llama-bench with JSON output."""

    def __init__(self, name: str, folder: Path, version: str, options: list[list[str]], completion: str, quiet: list[str],
                 after: Callable[[int, int], list[str]]):
        """after: the arguments of llama-bench for decoding (second) tokens after (first) ones."""
        super().__init__(name, version, options)
        self.after = after
        self.bin = folder / "bin" if (folder / "bin").is_dir() else folder
        self.completion, self.quiet = completion, quiet
        if not (self.bin / "llama-bench").is_file():
            raise Failure(f"{folder}: no bin/llama-bench in it; pass the folder of a finished build of {name}")

    def measure(self, model, what, options, settings):
        if settings.context:
            lengths = ["-p", "0", *self.after(settings.context, settings.generate)]
        else:
            lengths = ["-p", str(settings.prompt if "prefill" in what else 0), "-n", str(settings.generate if "decode" in what else 0)]
        command = [str(self.bin / "llama-bench"), "-m", str(model), "-t", str(settings.threads), *lengths, "-r", "1", "-o", "json", *options]
        result = run(command)
        try:
            tests = json.loads(result.stdout[result.stdout.index("["):])
        except ValueError as error:
            raise Failure(f"{shlex.join(command)}: the output is not JSON: {error}") from error
        rows = {"decode" if test["n_gen"] else "prefill": {"tok_s": test["avg_ts"]} for test in tests}
        missing = [name for name in what if name not in rows]
        if missing:
            raise Failure(f"{shlex.join(command)}: no result for {', '.join(missing)}")
        return rows

    def first_token(self, model, options, settings):
        binary = self.bin / self.completion
        if not binary.is_file():
            raise Failure(f"{binary}: not built, but it is needed for the time to the first token (--skip-load leaves that out)")
        with tempfile.TemporaryDirectory() as folder:  # ik_llama.cpp's program leaves a main.log where it runs
            return run([str(binary.resolve()), "-m", str(model.resolve()), "-p", "Hello", "-n", "1", "--temp", "0", "-c", "512",
                        "-t", str(settings.threads), *self.quiet, *llama_bench_to_cli(options)], folder)


def llama_bench_to_cli(options: list[str]) -> list[str]:
    """llama-bench gives its switches a value ("-rtr 1"), the command-line programs of ik_llama.cpp do not ("-rtr"); "-fa" has one in both."""
    arguments = []
    for name, value in zip(options[::2], options[1::2]):
        if name == "-fa":
            arguments += [name, "on" if value == "1" else "off"]
        elif value == "1":
            arguments.append(name)
    return arguments


def json_lines(text: str, command: list[str]) -> list[dict]:
    rows = []
    for line in text.splitlines():
        if line.strip():
            try:
                rows.append(json.loads(line))
            except ValueError as error:
                raise Failure(f"{shlex.join(command)}: a line of its output is not JSON ({error}): {line[:120]}") from error
    return rows


def choose_options(program: Program, model: Path, settings: Settings) -> None:
    """Tries every option set once and keeps the best one for each of prefill and decode."""
    if len(program.options) == 1:
        program.best = {"prefill": program.options[0], "decode": program.options[0]}
        return
    found = []
    for options in program.options:
        rows = program.measure(model, settings.what, options, settings)
        found.append((options, rows))
        note(f"  trial  {program.name} {' '.join(options)}: " + ", ".join(f"{k} {v['tok_s']:.1f}" for k, v in sorted(rows.items())))
    program.best = {what: max(found, key=lambda item: item[1][what]["tok_s"])[0] for what in settings.what}


def measure_round(program: Program, model: Path, settings: Settings) -> dict[str, dict]:
    """One round of one program: a single process where prefill and decode want the same options, else one each."""
    if all(program.best[what] == program.best["decode"] for what in settings.what):
        return program.measure(model, settings.what, program.best["decode"], settings)
    return {**program.measure(model, ["prefill"], program.best["prefill"], settings),
            **program.measure(model, ["decode"], program.best["decode"], settings)}


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def spread(values: list[float]) -> dict:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def bench_model(model: Path, programs: list[Program], settings: Settings, rounds: int, with_load: bool) -> list[dict]:
    bytes_of_file = model.stat().st_size
    note(f"{model.name}: {bytes_of_file / 1e6:.0f} MB, load average {os.getloadavg()[0]:.2f}")
    with open(model, "rb") as file:  # into the page cache, so that no program pays for the disk
        while file.read(1 << 24):
            pass
    for program in programs:
        choose_options(program, model, settings)
    speeds = {(p.name, what): [] for p in programs for what in settings.what}
    extra = {}
    firsts = {p.name: [] for p in programs}
    loads = []
    for index in range(rounds):
        loads.append(os.getloadavg()[0])
        turn = index % len(programs)
        for program in programs[turn:] + programs[:turn]:
            rows = measure_round(program, model, settings)
            for what, row in rows.items():
                speeds[program.name, what].append(row["tok_s"])
                if program.name == "lacuna":
                    extra[what] = {key: row[key] for key in ("m", "gb_s", "ceiling_gb_s", "checked") if key in row}
            if with_load:
                firsts[program.name].append(program.first_token(model, program.best["decode"], settings))
        note(f"  round {index + 1} of {rounds}: " + ", ".join(
            f"{p.name} " + " / ".join(f"{speeds[p.name, what][-1]:.1f}" for what in settings.what) for p in programs))
    result = []
    for what in settings.what:
        for program in programs:
            values = speeds[program.name, what]
            row = {
                "bench": what, "model": model.name, "bytes": bytes_of_file, "program": program.name, "version": program.version,
                "options": " ".join(program.best[what]), "device": "cpu", "threads": settings.threads,
                "tokens": settings.prompt if what == "prefill" else settings.generate,
                **({"context": settings.context} if settings.context else {}), "tok_s": statistics.median(values), "tok_s_min": min(values), "tok_s_max": max(values), "runs": len(values),
                "samples": values, "load_average": max(loads),
            }
            if program.name == "lacuna":
                row.update(extra.get(what, {}))
            else:
                ours = speeds.get(("lacuna", what))
                if ours:
                    row["lacuna_ratio"] = spread([a / b for a, b in zip(ours, values)])
            result.append(row)
    for program in programs if with_load else []:
        runs = firsts[program.name]
        result.append({"bench": "load", "model": model.name, "program": program.name, "version": program.version,
                       "options": " ".join(program.best["decode"]), "first_token_s": spread([run.wall_s for run in runs]),
                       "peak_bytes": max(run.peak_bytes for run in runs)})
    return result


def print_tables(rows: list[dict]) -> None:
    print(f"{'model':<28} {'what':<21} {'program':<14} {'options':<14} {'tok/s':>8} {'min - max':>17}   lacuna / it (range)")
    for row in rows:
        if row["bench"] == "load":
            continue
        ratio = row.get("lacuna_ratio")
        ratio_text = f"{ratio['median']:.2f}x ({ratio['min']:.2f} - {ratio['max']:.2f})" if ratio else ""
        what = f"{row['bench']} {row['tokens']}" + (f" after {row['context']}" if "context" in row else "")
        limits = f"{row['tok_s_min']:.1f} - {row['tok_s_max']:.1f}"
        print(f"{row['model']:<28} {what:<21} {row['program']:<14} {row['options']:<14} {row['tok_s']:>8.1f} {limits:>17}   {ratio_text}")
    loads = [row for row in rows if row["bench"] == "load"]
    if not loads:
        return
    print()
    print(f"{'model':<28} {'program':<14} {'options':<14} {'start to first token, s':>24} {'its peak memory, MB':>20}")
    for row in loads:
        first = row["first_token_s"]
        text = f"{first['median']:.2f} ({first['min']:.2f} - {first['max']:.2f})"
        print(f"{row['model']:<28} {row['program']:<14} {row['options']:<14} {text:>24} {row['peak_bytes'] / 1e6:>20.0f}")


def device() -> str:
    fields = {}
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        fields.setdefault(key.strip(), value.strip())
    memory_gb = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    name = f"{fields.get('model name', 'unknown CPU')} (family {fields.get('cpu family', '?')}, model {fields.get('model', '?')})"
    return f"{name}, {os.cpu_count()} CPUs, {memory_gb:.0f} GB"


def commit() -> str:
    def git(*arguments: str) -> str:
        return subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False).stdout.strip()

    changed = "-dirty" if git("status", "--porcelain", "--untracked-files=no") else ""
    return (git("rev-parse", "HEAD") or "unknown") + changed


def portable_command(typed: str) -> str:
    """The command as someone else would type it: absolute paths, also behind NAME=, are cut to their last part."""
    return shlex.join(re.sub(r"^([^/=]+=)?/(?:.*/)?", r"\1", word) for word in shlex.split(typed))


def write_json(path: Path, value: dict) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(value, indent=1) + "\n")
    os.replace(partial, path)


def peers(llama: Path | None, llama_version: str, ik: Path | None, ik_version: str) -> list[Program]:
    """The peers that were given, with the option sets that are tried; the strongest comes last."""
    programs: list[Program] = []
    if llama:
        programs.append(Ggml("llama.cpp", llama, llama_version, [["-fa", "0"], ["-fa", "1"]], "llama-completion", ["-no-cnv", "--no-warmup"],
                             lambda context, tokens: ["-n", str(tokens), "-d", str(context)]))
    if ik:
        programs.append(Ggml("ik_llama.cpp", ik, ik_version, [["-fa", "1"], ["-fa", "1", "-rtr", "1"]], "llama-cli", ["--no-warmup"],
                             lambda context, tokens: ["-n", "0", "-gp", f"{context},{tokens}"]))
    return programs


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench_peers.sh", description=__doc__.split("\n\n")[0])
    parser.add_argument("models", nargs="+", type=Path, metavar="MODEL", help="GGUF files")
    parser.add_argument("--lacuna", type=Path, default=ROOT / "build/release/lacuna", help="our program (default: build/release/lacuna)")
    parser.add_argument("--without-lacuna", action="store_true", help="measure the peers alone")
    parser.add_argument("--llama", type=Path, required=True, metavar="FOLDER", help="folder of a build of llama.cpp")
    parser.add_argument("--llama-version", default="given build", help="what to write down as its version")
    parser.add_argument("--ik", type=Path, metavar="FOLDER", help="folder of a build of ik_llama.cpp")
    parser.add_argument("--ik-version", default="given build", help="what to write down as its version")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--prompt", type=int, default=512, help="tokens of the prefill")
    parser.add_argument("--generate", type=int, default=128, help="tokens of the decode")
    parser.add_argument("--context", type=int, default=0, help="tokens in the cache before the decode; with some, decode alone is measured")
    parser.add_argument("--skip-load", action="store_true", help="do not measure the time to the first token")
    parser.add_argument("--output", type=Path, default=ROOT / "docs/results/peers-cpu.json", help="where the JSON goes")
    parser.add_argument("--typed", help="the command to write down, where a driver script made this one")
    options = parser.parse_args(arguments)
    for name in ("rounds", "threads", "prompt", "generate"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} is {getattr(options, name)}; it must be at least 1")
    if options.context < 0:
        parser.error(f"--context is {options.context}; it must be at least 0")
    return options


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    for model in options.models:
        if not model.is_file():
            raise Failure(f"{model}: no such file; scripts/eval_models.sh gets the evaluation models")
    settings = Settings(options.threads, options.prompt, options.generate, options.context)
    programs: list[Program] = []
    if not options.without_lacuna:
        if not options.lacuna.is_file():
            raise Failure(f"{options.lacuna}: not built; run scripts/build.sh, or pass --lacuna PROGRAM")
        programs.append(Lacuna(options.lacuna))
    programs += peers(options.llama, options.llama_version, options.ik, options.ik_version)
    load = os.getloadavg()[0]
    if load > 0.5:
        note(f"warning: the load average is {load:.2f} before the start; other programs disturb these measurements")
    rows = []
    for model in options.models:
        rows += bench_model(model, programs, settings, options.rounds, not options.skip_load and not options.context)
    print_tables(rows)
    write_json(options.output, {
        "command": portable_command(options.typed or shlex.join(["scripts/bench_peers.py", *arguments])), "commit": commit(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"), "device": device(), "rows": rows,
    })
    note(f"written: {options.output}")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except Failure as failure:
        print(f"error: {failure}", file=sys.stderr)
        sys.exit(1)
