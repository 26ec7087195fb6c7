"""The offset table: what the textbook score sees, and what cutting edges costs, in every mixer.

    python -m experiments.offset_table --out RUNS [--device cuda --processes 6] [--only copy-mamba2 ...]
    [--seeds 0 1 2]

Trains the named runs that RUNS lacks, measures them, and writes experiments/results/offset_table.jsonl (a
line for each run and seed; lines that are there are kept) and offset_table.md. The same command goes on after
a stop.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from experiments.errors import in_one_line
from experiments.seed_interval import cell
from experiments.trained_runs import Job, available_device, trained
from models.errors import ConfigError

RESULTS = Path(__file__).parent / "results"
# Run, and the steps it needs to show its circuit at most seeds where that is more than its own (LOG.md).
RUNS: dict[str, int | None] = {
    f"{task}-{mixer}": None
    for task in ("periodic", "copy")
    for mixer in (
        "softmax", "softmax-1l", "linear", "linear-1l", "linear-conv", "linear-conv-1l",
        "mamba1", "mamba1-1l", "mamba2", "mamba2-1l", "s4d",
    )
} | {
    "copy-linear-conv": 1500,
    "copy-linear-conv-1l": 1500,
    "copy-mamba1": 4000,
    "copy-mamba1-1l": 4000,
    "copy-mamba2": 2500,
    "copy-mamba2-1l": 2500,
}  # fmt: skip
COLUMNS = (
    ("order gain", "order_gain_nats"),
    ("textbook prefix", "textbook_prefix"),
    ("block prefix", "block_prefix"),
    ("largest cut", "cut_nats"),
    ("random", "random_nats"),
    ("cut − random", "effect_nats"),
    ("cut, rescaled", "renormalised_nats"),
    ("previous-token cut", "previous_nats"),
)


@in_one_line
def main(arguments: list[str] | None = None) -> int:
    """The command."""
    options = _parser().parse_args(arguments)
    unknown = set(options.only or ()) - set(RUNS)
    if unknown:
        print(
            f"offset_table: unknown runs {', '.join(sorted(unknown))}; accepted: {', '.join(RUNS)}",
            file=sys.stderr,
        )
        return 2
    device = available_device(options.device)
    jobs = [
        Job(run=run, seed=seed, settings=(*_steps(run, options.steps), *options.settings))
        for run in options.only or RUNS
        for seed in options.seeds
    ]
    store = Lines(options.results / "offset_table.jsonl")
    missing = [] if options.report else [job for job in jobs if not store.has(job)]
    for job, folder in trained(missing, options.out, device=device, n_processes=options.processes):
        store.add(job, measure(job, folder, device))
        print(f"measured {job.name}", flush=True)
    if not store.rows:
        raise ConfigError(f"{store.path} holds no runs; without --report they are trained and measured")
    (options.results / "offset_table.md").write_text(report(store.rows), encoding="utf-8")
    print(f"wrote {options.results / 'offset_table.md'}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.offset_table", description=__doc__.splitlines()[0]
    )
    parser.add_argument(
        "--out", type=Path, default=Path("runs-out"), metavar="RUNS", help="folder of the run folders"
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the table")
    parser.add_argument("--only", nargs="+", metavar="RUN", help="some of the runs")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, help="train all runs that long (for a trial)")
    parser.add_argument("--set", dest="settings", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--processes", type=int, default=1, help="runs trained at the same time")
    parser.add_argument("--report", action="store_true", help="only write the tables anew")
    return parser


def _steps(run: str, steps: int | None) -> tuple[str, ...]:
    steps = RUNS[run] if steps is None else steps
    return () if steps is None else (f"training.steps={steps}",)


class Lines:
    """A JSON Lines file with one line for each run and seed."""

    def __init__(self, path: Path):
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        text = path.read_text("utf-8") if path.is_file() else ""
        self.rows: list[dict[str, Any]] = [json.loads(line) for line in text.splitlines()]

    def has(self, job: Job) -> bool:
        """Whether this run, seed and settings were measured."""
        return any(_key(row) == (job.run, job.seed, list(job.settings)) for row in self.rows)

    def add(self, job: Job, found: dict[str, Any]) -> None:
        """Append a line."""
        row = {"run": job.run, "seed": job.seed, "settings": list(job.settings), **found}
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(row, allow_nan=False) + "\n")
        self.rows.append(row)


def _key(row: dict[str, Any]) -> tuple[str, int, list[str]]:
    return row["run"], row["seed"], row["settings"]


def measure(job: Job, folder: Path, device: str) -> dict[str, Any]:
    """The last checkpoint's numbers."""
    from experiments.offset_measure import measure_model
    from models.checkpoint import list_checkpoints, load_model, read_tensors

    step, path = list_checkpoints(folder)[-1]
    model = load_model(path, device=device).eval()
    windows = read_tensors(folder / "eval.safetensors")["tokens"]
    found = measure_model(model, windows, trained=job.config(device).data.seq)
    return {"step": step, "device": device, **found}


def report(rows: Sequence[dict[str, Any]]) -> str:
    """The table: means over seeds with 95% intervals."""
    head = [
        "run",
        "seeds",
        "steps",
        "δ* (layer), by seed",
        *(name for name, _ in COLUMNS),
        "taps zeroed, lag 0, 1, ...",
    ]
    head.append("induction heads")
    lines = [
        "# Offset table: synthetic tasks",
        "",
        "Written by `python -m experiments.offset_table`. Means over seeds ± half a 95% interval (Student's "
        "t over seeds). "
        "Nats at the positions that induction predicts on repeated distinct tokens, but for the two prefix "
        "scores (the "
        "strongest unit's). Cuts take a whole layer's edges at δ*, in the layer where that costs most.",
        "",
        "| " + " | ".join(head) + " |",
        "|" + " --- |" * len(head),
    ]
    for run, own in _grouped(rows):
        deltas = ", ".join(f"+{row['delta']} ({row['layer']})" for row in own)
        cells = [run, str(len(own)), steps_cell(own), deltas]
        cells += [cell([row[key] for row in own]) for _, key in COLUMNS]
        cells.append(taps_cell(own))
        cells.append(", ".join(str(row["n_induction"]) for row in own))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def steps_cell(rows: Sequence[dict[str, Any]]) -> str:
    """Steps trained: one number, or the least and the most."""
    steps = sorted({row["step"] for row in rows})
    return str(steps[0]) if len(steps) == 1 else f"{steps[0]} to {steps[-1]}"


def taps_cell(rows: Sequence[dict[str, Any]]) -> str:
    """Effect of each zeroed tap in the layer of delta*."""
    taps = [row["taps_nats"] for row in rows if row["taps_nats"]]
    return " · ".join(cell(values) for values in zip(*taps, strict=True)) if taps else "–"


def _grouped(rows: Iterable[dict[str, Any]]) -> list[tuple[str, list[dict[str, Any]]]]:
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(row["run"], []).append(row)
    order = [*RUNS, *(run for run in groups if run not in RUNS)]
    return [(run, sorted(groups[run], key=lambda row: row["seed"])) for run in order if run in groups]


if __name__ == "__main__":
    sys.exit(main())
