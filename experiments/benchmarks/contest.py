"""Timing several contenders side by side: interleaved rounds, medians, and the peak memory of each in a
process of its own."""

import gc
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import date
from importlib.metadata import version
from pathlib import Path

RESULTS = Path(__file__).parent / "results"
PACKAGES = ("torch", "transformers", "transformer-lens", "numpy")


def interleaved_medians(
    contenders: dict[str, Callable[[], object]], *, rounds: int, warm_up: int = 1
) -> dict[str, float]:
    """Median seconds of one call of each contender; each round calls all of them once, so that drift hits
    all alike."""
    for _ in range(warm_up):
        for call in contenders.values():
            call()
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, call in contenders.items():
            gc.collect()
            start = time.perf_counter()
            call()
            seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}


def peak_memory_mib(module: str, contender: str) -> float:
    """Peak memory of the calls above what is held before, MiB, of `python -m module --peak contender`."""
    done = subprocess.run(
        [sys.executable, "-m", module, "--peak", contender], capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout.splitlines()[-1])["peak_mib"]


def report_peak(prepare: Callable[[], Callable[[], object]]) -> None:
    """Body of such a process (Linux): imports and the objects that `prepare` makes do not count, calls do."""
    call = prepare()
    gc.collect()
    before = _resident_mib()
    # Forget the highest mark so far: that of the imports may be above what the calls take.
    Path("/proc/self/clear_refs").write_text("5")
    call()
    call()
    status = Path("/proc/self/status").read_text()
    peak = int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) / 1024
    print(json.dumps({"peak_mib": max(0.0, peak - before)}))


def machine() -> str:
    """What the numbers were measured on, in words; no name of a host."""
    import torch

    return (
        f"{platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} torch threads, "
        f"{platform.system()}"
    )


def versions() -> str:
    """Python and the packages that matter here."""
    return ", ".join(
        [f"Python {platform.python_version()}", *(f"{name} {version(name)}" for name in PACKAGES)]
    )


def write_results(name: str, title: str, table: str, notes: str) -> Path:
    """Write `results/<name>.md` with the date, machine and versions above the table; returns its path."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.md"
    path.write_text(f"# {title}\n\n{date.today()} · {machine()} · {versions()}\n\n{table}\n\n{notes}\n")
    return path


def markdown_table(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20
