"""Where does a model store a pair: in the short convolution or in the state? (Arora et al., 2505.15105)

    python -m experiments.recall_interchange --out RUNS [--device cuda --processes 4] [--seeds 0 1 2]

Trains `recall-*` runs that RUNS lacks and restores clean activations one by one in sequences whose key was
replaced (interp.interchange). Prints, and writes to experiments/results, recall_interchange.md and .jsonl.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from experiments.errors import in_one_line
from experiments.offset_table import RESULTS, Lines
from experiments.seed_interval import cell
from experiments.trained_runs import Job, available_device, trained

RUNS = ("recall-mamba1", "recall-mamba1-1l", "recall-mamba2", "recall-mamba2-1l", "recall-softmax")
N_SEQUENCES = 128
# Places of restored activations whose means make the table: the paper's question in one line each.
SHOWN = (
    ("conv, key's own place", "conv", "+0"),
    ("conv, the places after", "conv", "after"),
    ("B (key), after", "k", "after"),
    ("x (value), after", "v", "after"),
    ("dt, after", "dt", "after"),
    ("state after the key", "state", "+0"),
    ("state one later", "state", "+1"),
    ("state three later", "state", "+3"),
    ("scan's output, after", "z", "after"),
    ("block's output, after", "output", "after"),
    ("scan's output, query", "z", "query"),
)


@in_one_line
def main(arguments: list[str] | None = None) -> int:
    """The command."""
    options = _parser().parse_args(arguments)
    device = available_device(options.device)
    settings = (*options.settings, *([f"training.steps={options.steps}"] if options.steps else []))
    jobs = [Job(run=run, seed=seed, settings=settings) for run in options.only for seed in options.seeds]
    store = Lines(options.results / "recall_interchange.jsonl")
    missing = [job for job in jobs if not store.has(job)]
    for job, folder in trained(missing, options.out, device=device, n_processes=options.processes):
        store.add(job, measure(job, folder, device))
        print(f"measured {job.name}", flush=True)
    text = report(store.rows)
    (options.results / "recall_interchange.md").write_text(text, encoding="utf-8")
    print(text)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.recall_interchange", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--out", type=Path, required=True, metavar="RUNS", help="folder of the run folders")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the table")
    parser.add_argument("--only", nargs="+", default=list(RUNS), metavar="RUN")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, help="train all runs that long")
    parser.add_argument("--set", dest="settings", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--processes", type=int, default=1, help="runs trained at the same time")
    return parser


def questions(config: Any, *, seed: int, n: int = N_SEQUENCES) -> Any:
    """One question of each of `n` sequences, and its corruption: another key that the sequence lacks."""
    import numpy as np

    from experiments.data.recall import sample_recall
    from interp.interchange import Recall

    rng = np.random.default_rng(seed)
    batch = sample_recall(config, n, rng)
    tokens = torch.from_numpy(batch.tokens).long()
    rows = torch.arange(n)
    scored = torch.from_numpy(batch.scored)
    # The answer's place is drawn evenly among the scored ones.
    answer = torch.from_numpy(np.array([rng.choice(np.flatnonzero(row)) for row in scored.numpy()]))
    query = answer - 1
    key = (tokens == tokens[rows, query][:, None]).int().argmax(1)
    n_keys = config.d_vocab // 2
    held = torch.zeros(n, config.d_vocab, dtype=torch.bool).scatter_(1, tokens, True)[:, :n_keys]
    put = torch.from_numpy(np.array([rng.choice(np.flatnonzero(~row)) for row in held.numpy()]))
    corrupted = tokens.clone()
    corrupted[rows, key] = put
    return Recall(tokens=tokens, corrupted=corrupted, key=key, query=query)


@torch.no_grad()
def measure(job: Job, folder: Path, device: str) -> dict[str, Any]:
    """Accuracy, restored shares by component and place, and accuracy without the earlier taps."""
    from dataclasses import replace

    from interp.errors import DetectionError
    from interp.interchange import interchange, only_current_tap
    from models.checkpoint import list_checkpoints, load_model

    step, path = list_checkpoints(folder)[-1]
    model = load_model(path, device=device).eval()
    recall = questions(job.config(device).data, seed=1000 + job.seed)
    moved = {name: getattr(recall, name).to(device) for name in ("tokens", "corrupted", "key", "query")}
    recall = replace(recall, **moved)
    found: dict[str, Any] = {"step": step, "device": device, "accuracy": _accuracy(model, recall)}
    with only_current_tap(model):
        found["accuracy_without_taps"] = _accuracy(model, recall)
    try:
        restored = interchange(model, recall)
    except DetectionError as error:
        return {**found, "reason": str(error), "restored": []}
    return {
        **found,
        "restored": [
            [one.layer, one.component, one.place, one.restored, one.standard_error] for one in restored
        ],
    }


def _accuracy(model: Any, recall: Any) -> float:
    rows = torch.arange(len(recall.tokens), device=recall.tokens.device)
    best = model(recall.tokens)[rows, recall.query].argmax(-1)
    return float((best == recall.tokens[rows, recall.query + 1]).double().mean())


def report(rows: Sequence[dict[str, Any]]) -> str:
    """The table: restored share of the answer, means over seeds with 95% intervals."""
    lines = [
        "# Interchange interventions on associative recall",
        "",
        "Written by `python -m experiments.recall_interchange`. Share of the lost answer that one clean "
        "activation of one layer "
        "brings back into a sequence whose key was replaced (1: all), mean over seeds ± half a 95% "
        "interval. `after`: the three "
        "places after the key that a convolution of four taps writes it into. `without taps`: accuracy with "
        "all taps but the "
        "current one zeroed.",
        "",
    ]
    head = ["run", "layer", "seeds", "accuracy", "without taps", *(name for name, _, _ in SHOWN)]
    lines += ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    for run in dict.fromkeys(row["run"] for row in rows):
        own = [row for row in rows if row["run"] == run]
        for layer in sorted({one[0] for row in own for one in row["restored"]}):
            cells = [run, str(layer), str(len(own))]
            cells += [cell([row[key] for row in own]) for key in ("accuracy", "accuracy_without_taps")]
            cells += [cell([_share(row, layer, part, place) for row in own]) for _, part, place in SHOWN]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _share(row: dict[str, Any], layer: int, component: str, place: str) -> float | None:
    for one in row["restored"]:
        if one[:3] == [layer, component, place]:
            return one[3]
    return None


if __name__ == "__main__":
    sys.exit(main())
