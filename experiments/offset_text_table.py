"""The offset table on real text: causal profiles on held-out windows, and when order gain and ICL set in.

    python -m experiments.offset_text_table --out RUNS --set data.tokens=file --set data.path=NAME.bin.xz
    --device cuda

Trains the `gpu-text-*` runs that RUNS lacks, measures them, and writes
experiments/results/offset_text_table.jsonl, onset_text.json and offset_text_table.md. The same command goes
on after a stop.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.errors import in_one_line
from experiments.offset_table import RESULTS, Lines, steps_cell, taps_cell
from experiments.seed_interval import cell
from experiments.trained_runs import Job, available_device, trained
from interp.phase_transition import MIN_CHANGE, phase_transition
from models.errors import ConfigError

CONTROL = "gpu-text-softmax-1l"
RUNS = (
    CONTROL,
    "gpu-text-softmax",
    "gpu-text-softmax-conv",
    "gpu-text-softmax-conv-1l",
    "gpu-text-linear",
    "gpu-text-linear-conv",
    "gpu-text-mamba2",
    "gpu-text-mamba2-standard",
)
# The separator between documents.
IGNORED = frozenset({0})
SERIES = ("order_gain", "in_context_learning")
# Drift is gone from a difference of paired windows, and induction adds only about .07 to .2 nats here. The
# control against its own other seeds stays within .05 and has no transition.
MIN_CHANGE_ABOVE_CONTROL_NATS = 0.05


@in_one_line
def main(arguments: list[str] | None = None) -> int:
    """The command."""
    options = _parser().parse_args(arguments)
    device = available_device(options.device)
    settings = tuple(options.settings)
    jobs = [
        Job(run=run, seed=seed, settings=settings, series=True)
        for run in options.only or RUNS
        for seed in options.seeds
    ]
    store = Lines(options.results / "offset_text_table.jsonl")
    missing = [] if options.report else [job for job in jobs if not store.has(job)]
    for job, folder in trained(missing, options.out, device=device, n_processes=options.processes):
        store.add(job, measure(job, folder, device, options.every))
        print(f"measured {job.name}", flush=True)
    if not store.rows:
        raise ConfigError(f"{store.path} holds no runs; without --report they are trained and measured")
    found = onsets(store.rows)
    (options.results / "onset_text.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    (options.results / "offset_text_table.md").write_text(report(store.rows, found), encoding="utf-8")
    print(f"wrote {options.results / 'offset_text_table.md'}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.offset_text_table", description=__doc__.splitlines()[0]
    )
    parser.add_argument(
        "--out", type=Path, default=Path("runs-out"), metavar="RUNS", help="folder of the run folders"
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the table")
    parser.add_argument("--only", nargs="+", metavar="RUN", help="some of the runs (any text run)")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument(
        "--every", type=int, default=1, help="of the checkpoints, take every n-th for the onsets"
    )
    parser.add_argument("--set", dest="settings", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--processes", type=int, default=1, help="runs trained at the same time")
    parser.add_argument("--report", action="store_true", help="only write the tables anew")
    return parser


def measure(job: Job, folder: Path, device: str, every: int) -> dict[str, Any]:
    """The last checkpoint's profiles (probe and text), and the behaviour of the series."""
    from experiments.offset_measure import measure_model, measure_windows
    from models.checkpoint import list_checkpoints, load_model, read_tensors

    windows = read_tensors(folder / "eval.safetensors")["tokens"]
    seq = job.config(device).data.seq
    checkpoints = list_checkpoints(folder)
    step, path = checkpoints[-1]
    model = load_model(path, device=device).eval()
    found = {
        "step": step,
        "device": device,
        "probe": measure_model(model, windows, trained=seq),
        "text": measure_windows(model, windows, ignored=IGNORED),
    }
    kept = [one for n, one in enumerate(checkpoints) if (len(checkpoints) - 1 - n) % every == 0]
    return {**found, "series": series(kept, windows, seq, device)}


def series(checkpoints: Sequence[tuple[int, Path]], windows: Any, seq: int, device: str) -> dict[str, Any]:
    """Order gain by sequence, ICL (means around its two positions) by window and hit loss, at every
    checkpoint, nats.
    """
    import torch

    from interp import in_context_learning as icl
    from interp.plan import make_plan
    from interp.subject import LanguageModelSubject
    from models.checkpoint import load_model

    found: dict[str, Any] = {"steps": [], "order_gain": [], "in_context_learning": [], "hit_loss": []}
    plan = None
    for step, path in checkpoints:
        subject = LanguageModelSubject(load_model(path, device=device))
        plan = plan or make_plan(subject, windows=windows.long(), trained=seq)
        with torch.no_grad():
            in_order, shuffled = (
                subject.losses(probe.tokens) for probe in (plan.loss_in_order, plan.loss_shuffled)
            )
            losses = subject.losses(plan.windows)
        learned = icl.in_context_learning_score(losses, plan.icl_positions)
        gain = icl.repeat_losses(in_order, shuffled, plan.loss_in_order).order_gain
        found["steps"].append(step)
        found["order_gain"].append([round(value, 5) for value in gain.tolist()])
        found["in_context_learning"].append(
            [round(value, 5) for value in learned.window_by_sequence.tolist()]
        )
        found["hit_loss"].append(icl.hit_loss(losses, plan.windows.to(losses.device))[0])
    return found


def onsets(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Transitions of order gain and ICL over seeds (ICL also minus the control's), and their lead.

    The control stands against its own next seed: the null of the differences.
    """
    found = {}
    control = {row["seed"]: row["series"] for row in rows if row["run"] == CONTROL}
    for run in dict.fromkeys(row["run"] for row in rows):
        own = [row for row in rows if row["run"] == run]
        steps = _common([row["series"]["steps"] for row in own])
        curves = {name: _stacked(own, name, steps) for name in SERIES}
        found[run] = {"n_seeds": len(own), "raw": _transition(steps, curves, MIN_CHANGE)}
        pairs = _against(own, control, itself=run == CONTROL)
        if pairs:
            found[run] |= _minus_control(pairs)
    return found


def _against(
    own: Sequence[dict[str, Any]], control: dict[int, Any], *, itself: bool
) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Each row with the control's series of its seed; a control's with that of the control's next seed."""
    seeds = sorted(control)
    if itself and len(seeds) < 2:
        return []
    other = {seed: seeds[(n + 1) % len(seeds)] if itself else seed for n, seed in enumerate(seeds)}
    return [(row, {"series": control[other[row["seed"]]]}) for row in own if row["seed"] in other]


def _minus_control(pairs: Sequence[tuple[dict[str, Any], dict[str, Any]]]) -> dict[str, Any]:
    own, control = [row for row, _ in pairs], [row for _, row in pairs]
    steps = _common([row["series"]["steps"] for row in (*own, *control)])
    curves = {name: _stacked(own, name, steps) for name in SERIES}
    curves["in_context_learning"] = curves["in_context_learning"] - _stacked(
        control, "in_context_learning", steps
    )
    smallest = {**MIN_CHANGE, "in_context_learning": MIN_CHANGE_ABOVE_CONTROL_NATS}
    return {
        "minus_control": _transition(steps, curves, smallest),
        "icl_minus_control_nats": curves["in_context_learning"][:, -1].mean(-1).tolist(),
    }


def _common(all_steps: Sequence[Sequence[int]]) -> list[int]:
    """The grid of the series with the fewest checkpoints, as far as all of them reach."""
    low, high = max(steps[0] for steps in all_steps), min(steps[-1] for steps in all_steps)
    return [step for step in min(all_steps, key=len) if low <= step <= high]


def _stacked(rows: Sequence[dict[str, Any]], name: str, steps: Sequence[int]) -> np.ndarray:
    """[seed step sample], linear between the two checkpoints around a step at which a seed has none."""
    picked = []
    for row in rows:
        values = np.asarray(row["series"][name], dtype=np.float64)
        at = row["series"]["steps"]
        picked.append(np.stack([np.interp(steps, at, column) for column in values.T], axis=-1))
    return np.asarray(picked)


def _transition(
    steps: Sequence[int], curves: dict[str, np.ndarray], min_change: dict[str, float]
) -> dict[str, Any] | None:
    transition = phase_transition(steps, **curves, min_change=min_change)
    return None if transition is None else transition.to_dict()


def report(rows: Sequence[dict[str, Any]], found: dict[str, Any]) -> str:
    """Both tables: profiles, and onsets."""
    about = (
        "Means over seeds ± half a 95% interval (Student's t over seeds), nats. Text: held-out windows, at "
        "tokens whose "
        "bigram occurred before in the window. Cuts take a whole layer's edges at δ*, in the layer where "
        "that costs most; "
        f"`above control` subtracts the mean cut − random of `{CONTROL}`."
    )
    head = [
        "run",
        "seeds",
        "steps",
        "order gain",
        "textbook prefix",
        "block prefix",
        "δ* (layer)",
        "cut",
        "random",
    ]
    head += [
        "previous-token cut",
        "taps zeroed, lag 0, 1, ...",
        "text: loss",
        "text: δ* (layer)",
        "text: cut − random",
    ]
    head += ["text: above control", "induction heads"]
    lines = [
        "# Offset table: real text",
        "",
        "Written by `python -m experiments.offset_text_table`. " + about,
        "",
    ]
    lines += ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    control = [row["text"]["effect_nats"] for row in rows if row["run"] == CONTROL]
    base = sum(control) / len(control) if control else None
    for run in dict.fromkeys(row["run"] for row in rows):
        own = sorted((row for row in rows if row["run"] == run), key=lambda row: row["seed"])
        probe, text = [row["probe"] for row in own], [row["text"] for row in own]
        above = [None if base is None or run == CONTROL else one["effect_nats"] - base for one in text]
        cells = [run, str(len(own)), steps_cell(own)]
        cells += [
            cell([one[key] for one in probe])
            for key in ("order_gain_nats", "textbook_prefix", "block_prefix")
        ]
        cells += [
            _deltas(probe),
            *(cell([one[key] for one in probe]) for key in ("cut_nats", "random_nats", "previous_nats")),
        ]
        cells += [taps_cell(probe), cell([one["loss_nats"] for one in text]), _deltas(text)]
        cells += [cell([one["effect_nats"] for one in text]), cell(above)]
        cells.append(", ".join(str(one["n_induction"]) for one in probe))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", *_onset_lines(found)]) + "\n"


def _deltas(found: Sequence[dict[str, Any]]) -> str:
    return ", ".join(f"+{one['delta']} ({one['layer']})" for one in found)


def _onset_lines(found: dict[str, Any]) -> list[str]:
    about = (
        "Onsets in steps: the pair of checkpoints around it [95% interval over seeds and sequences]; order "
        "gain at .1 nat, ICL (means around its two positions) at 10% of its change. Seeds are put on one "
        "grid, linear between their "
        f"checkpoints. `ICL above control`: minus the ICL of `{CONTROL}` at the same seed, step "
        "and windows (the control's own row: minus another seed of it, the null), dated when it changes by "
        f"{MIN_CHANGE_ABOVE_CONTROL_NATS} nats or more. Lead: of "
        "order gain over that, 95% interval, positive when order gain comes first."
    )
    head = [
        "run",
        "order gain",
        "ICL",
        "lead over ICL",
        "ICL above control",
        "lead over it",
        "ICL − control at the end",
    ]
    lines = ["## Onsets", "", about, "", "| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    for run, one in found.items():
        raw, net = one["raw"] or {}, one.get("minus_control") or {}
        cells = [run, _onset(raw.get("order_gain")), _onset(raw.get("in_context_learning")), _lead(raw)]
        cells += [
            _onset(net.get("in_context_learning")),
            _lead(net),
            cell(one.get("icl_minus_control_nats", [])),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _onset(transition: dict[str, Any] | None) -> str:
    if transition is None:
        return "none"
    low, high = transition["onset_step"]
    interval = transition["onset_interval"]
    around = "" if interval is None else f" [{interval[0]:.0f}, {interval[1]:.0f}]"
    return f"{low:.0f} to {high:.0f}{around}"


def _lead(found: dict[str, Any]) -> str:
    if found.get("lead_steps") is None or found.get("lead_of") != ["order_gain", "in_context_learning"]:
        return "–"
    low, high = found["lead_steps"]
    return f"{low:.0f} to {high:.0f}"


if __name__ == "__main__":
    sys.exit(main())
