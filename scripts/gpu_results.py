"""What the scripts that measure on a GPU share: result files, and times of CUDA graphs through PyTorch."""
import datetime
import json
import os
import pathlib
import shlex
import statistics
import subprocess
import sys


def git_commit() -> str:
    """Empty outside of a checkout."""
    return subprocess.run(["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"], capture_output=True, text=True).stdout.strip()


def device_and_driver() -> list[str]:
    """Of the first GPU that programs see."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0] or "0"
    query = subprocess.run(["nvidia-smi", "-i", first, "--query-gpu=name,driver_version", "--format=csv,noheader"], check=True, capture_output=True, text=True)
    return [part.strip() for part in query.stdout.splitlines()[0].split(",")]


def save(out: str | pathlib.Path | None, rows: list[dict], *, command: list[str] | None = None, commit: str | None = None, **more) -> None:
    """Writes {command, commit, date, device, driver, rows, ...} in one step: a run that is cut short leaves the file of the step before."""
    if not out:
        return
    device, driver = device_and_driver()
    result = {"command": shlex.join(command or sys.argv), "commit": commit or git_commit(), "date": datetime.date.today().isoformat(), "device": device, "driver": driver,
              "rows": rows, **more}
    path = pathlib.Path(out)
    temporary = path.with_name(path.name + ".part")
    temporary.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    temporary.replace(path)


def graph_times(call, runs: int, launches: int = 8) -> dict:
    """Milliseconds of call(i), launched `launches` times in a CUDA graph: {median_ms, min_ms, max_ms, runs}."""
    import torch

    stream, times = torch.cuda.Stream(), []
    with torch.cuda.stream(stream):
        for i in range(3):
            call(i)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for i in range(launches):
                call(i)
        for run in range(runs + 3):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            if run >= 3:
                times.append(begin.elapsed_time(end) / launches)
    return {"median_ms": statistics.median(times), "min_ms": min(times), "max_ms": max(times), "runs": runs}
