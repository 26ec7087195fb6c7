"""`make demo`: train small softmax, linear and Mamba models, find their induction heads, write one report.

The runs are the named runs `demo-*`. Two train at a time, one thread each; a finished run in the folder is
used again.
"""

import argparse
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.errors import in_one_line
from experiments.typed_command import typed_command
from interp.standard_output import printed, say

RUNS = ("demo-softmax", "demo-mamba1", "demo-mamba2", "demo-linear")
AT_ONCE = 2
COLUMNS = (
    *("run", "task", "strongest cut", "offset", "nats", "copying", "prefix", "chance"),
    *("induction", "gain", "onset", "half"),
)


@in_one_line
def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m experiments.demo", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("demo-out"), metavar="DIR", help="default: demo-out")
    out = parser.parse_args(argv).out
    started = time.perf_counter()
    _make_folder(out)
    failed = train_all(out)
    if failed:
        print(f"demo: training failed: {', '.join(failed)}", file=sys.stderr)
        return 1
    reports = detect_all(out)
    print_summary(reports)
    from interp.report import write_report

    write_report(out / "report.html", reports)
    say(f"Report: {out / 'report.html'}  (one page, opens from the file)")
    next_step = f"{typed_command('detect-induction', 'interp.cli')} {shlex.quote(str(out / RUNS[0]))}"
    say(f"Took {time.perf_counter() - started:.0f} s. One run alone: {next_step}")
    return 0


def _make_folder(out: Path) -> None:
    from models.errors import CheckpointError

    if out.exists() and not out.is_dir():
        raise CheckpointError(f"{out} is a file; accepted: a folder, made where there is none")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"{out} cannot be made: {error.strerror}") from error


def train_all(out: Path) -> list[str]:
    """Train every run that is not finished, `AT_ONCE` at a time; returns the names of those that failed."""
    waiting, running, failed = list(RUNS), {}, []
    try:
        while waiting or running:
            while waiting and len(running) < AT_ONCE:
                name = waiting.pop(0)
                there = (out / name / "run.json").is_file()
                running[name] = (_start(name, out / name), time.perf_counter())
                say(f"training {name} ..." if not there else f"training what {name} lacks ...")
            for name, (process, start) in list(running.items()):
                if process.poll() is not None:
                    del running[name]
                    if process.returncode:
                        failed.append(name)
                    else:
                        say(f"trained  {name} in {time.perf_counter() - start:.0f} s")
            time.sleep(0.1)
    finally:
        # After an error or Ctrl-C: what is half-trained is gone on with next time.
        for process, _ in running.values():
            process.terminate()
            process.wait()
    return failed


def _start(name: str, folder: Path) -> subprocess.Popen:
    command = [sys.executable, "-m", "experiments.cli", name, "--out", str(folder), "--quiet"]
    if (folder / "run.json").is_file():
        command.append("--resume")
    return subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"})


def detect_all(out: Path) -> dict:
    """`detect-induction` on each series; also written as JSON beside the runs."""
    from interp import detect
    from interp.records import to_json, write_text

    reports = {}
    for name in RUNS:
        say(f"reading  {name} ...")
        reports[name] = detect(out / name)
        write_text(out / f"{name}.json", to_json(reports[name]))
    return reports


def print_summary(reports: Mapping) -> None:
    """One row a run: the unit whose edges matter most at the last checkpoint, and when induction appeared."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from experiments.runs import load_run

    title = "Last checkpoint of each run; gain is the order gain (nats), onset and half are its steps"
    table = Table(title=title, title_justify="left", box=box.SIMPLE)
    for column in COLUMNS:
        table.add_column(column, no_wrap=True, justify="left" if column in COLUMNS[:3] else "right")
    for name, report in reports.items():
        table.add_row(name, load_run(name).data.kind.replace("_", " "), *_cells(report))
    with printed():
        Console(width=132).print(table)
    say(
        "Cuts and copying are of the mixer's own reading (pattern, ssm) at the offset shown, cuts in\n"
        "nats above random edges; prefix matching is of the same reading at +1. The block reading, which\n"
        "counts the convolution in, may match at +1. Gains of different tasks do not compare; a model can\n"
        "gain from order without any unit that passes the rule for induction heads."
    )


def _cells(report: Any) -> list[str]:
    from interp.records import strongest_unit
    from interp.unit_name import unit_name

    last = report.checkpoints[-1]
    best = strongest_unit(last.heads)
    units = {(head.layer, head.head) for head in last.heads}
    found = {(head.layer, head.head) for head in report.induction_heads()}
    gain = (report.phase_transition or {}).get("order_gain")
    return [
        unit_name(best, with_reading=True),
        f"+{best.offset}",
        "-" if best.offset_effect_nats is None else f"{best.offset_effect_nats:.2f}",
        "-" if best.copying_offset is None else f"{best.copying_offset:.2f}",
        f"{best.prefix_matching:.2f}",
        f"{best.prefix_matching_chance:.2f}",
        f"{len(found)} of {len(units)}",
        f"{last.order_gain_nats:.2f}",
        "none" if gain is None else "{:g}-{:g}".format(*gain["onset_step"]),
        "" if gain is None else f"{gain['midpoint_step']:.0f}",
    ]


if __name__ == "__main__":
    raise SystemExit(main())
