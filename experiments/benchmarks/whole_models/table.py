"""The tables of whole models: lines, one a contender, as `results/whole-model-h200.md`.

A second table, of the losses from the same weights, where lines have them (`--same-weights`).

    python -m experiments.benchmarks.whole_models.table LINES.jsonl --versions "torch 2.11, ..."
"""

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from experiments.benchmarks.contest import RESULTS, markdown_table
from experiments.benchmarks.whole_models.contenders import D_VOCAB, SEQ, SHAPES

GOALS = {"softmax": 1.0, "linear": 1.5, "mamba1": 1.5, "mamba2": 1.5}
HEADER = (
    "model",
    "shape",
    "contender",
    "batch",
    "eager ms",
    "captured ms",
    "Mtokens/s",
    "ours is quicker by",
    "goal",
    "peak GB",
    "loss at step 1",
    "later loss (step)",
)
NOTES = f"""\
One training step: forward, backward, clipping to norm 1, fused AdamW, bfloat16 autocast, float32 weights;
vocabulary {D_VOCAB:,}, {SEQ} tokens a sequence, heads of 64; softmax and linear models have a gated MLP as
wide as flash-linear-attention's default, Mamba models none. Equal numbers of parameters (the linear peer
has an output norm of 64 more a layer). Median of steps after warm-up, all contenders of a row in one run.
Mtokens/s: of the quicker of the eager and the captured step (whole step in a CUDA graph), for peers too. A
peer whose step does not fit the memory runs at the largest halved batch that does. Losses: the same data, a
random chain with eight successors a token; initial weights are each library's own. The linear peer's
Triton kernels choose between few configurations each (`kernels/tuning.py`), not between all of theirs. A
Mamba peer's row says whether it ran mamba_ssm's kernels or, without them, its torch paths."""

# Losses at the end of a run of which the mean is shown: the number of batches that come again and again.
LAST = 16
# What a peer has to be changed in to compute our function.
LIKE_OURS = {"linear": ": denominators, no output norm"}
CURVE_NOTES = f"""\
Every step of these runs is eager; the peer starts from our initial weights and sees the same batches.
Mean of last {LAST}: of losses of different batches, ± their standard deviation. Gap: |peer - ours| / ours,
the largest over all steps and its step, and that of the means. With equal weights each peer computes
our function but for rounding (`same_weights.py`). The linear peer of this table therefore divides by its
denominators and has no output norm: it is not the one whose steps are timed."""


def table(lines: list[dict[str, Any]]) -> str:
    """One row a contender; ours first, the peer's ratio in ours' row."""
    rows = []
    for line in lines:
        same = [other for other in lines if _key(other) == _key(line) and other["who"] != line["who"]]
        ratio, goal = "", ""
        if line["who"] == "ours":
            goal = f"{GOALS[line['kind']]:.1f}x"
            ratio = f"{_rate(line) / _rate(same[0]):.2f}x" if same and same[0]["batch"] else "–"
        shape = SHAPES[line["shape"]]
        losses = line.get("losses")
        rows.append(
            [
                line["kind"],
                f"{shape.n_layers} x {shape.d_model}",
                line["who"],
                str(line["batch"]) if line["batch"] else "out of memory",
                _number(line.get("eager_ms")),
                _number(line.get("captured_ms")),
                f"{_rate(line) / 1e6:.2f}" if line["batch"] else "–",
                ratio,
                goal,
                _number(line.get("peak_gb")),
                _number(losses and losses[0], 3),
                f"{losses[2]:.3f} ({losses[1]})" if losses else "–",
            ]
        )
    return markdown_table(list(HEADER), rows)


def curve_table(lines: list[dict[str, Any]]) -> str:
    """Losses from the same weights, one row a contender, gaps in the peer's row; "" where no line has any.

    Where one contender of a model stopped early, the steps that all have are shown.
    """
    lines = [line for line in lines if line["batch"] and "curve" in line]
    if not lines:
        return ""
    header = ["model", "shape", "contender", "batch", "steps N", "step 1", "N/8", "N/4", "N/2", "3N/4", "N"]
    header += [f"mean of last {LAST}", "largest gap (step)", "gap of means"]
    rows = []
    for line in lines:
        shape = SHAPES[line["shape"]]
        who = line["who"] + (LIKE_OURS.get(line["kind"], "") if line["who"] != "ours" else "")
        row = [line["kind"], f"{shape.n_layers} x {shape.d_model}", who, str(line["batch"])]
        if not line["curve"]:
            rows.append([*row, "out of memory", *["–"] * (len(header) - 5)])
            continue
        same = [other for other in lines if _key(other) == _key(line) and other["curve"]]
        n = min(len(other["curve"]) for other in same)
        curve = line["curve"][:n]
        row += [str(n), *(_number(curve[step - 1], 4) for step in curve_steps(n))]
        row.append(f"{statistics.fmean(curve[-LAST:]):.4f} ± {statistics.pstdev(curve[-LAST:]):.4f}")
        own = [other for other in same if other["who"] == "ours"]
        if not own or line["who"] == "ours":
            row += ["", ""]
        elif own[0]["batch"] != line["batch"]:
            row += ["other batches", "–"]
        else:
            row += _gaps(own[0]["curve"][:n], curve)
        rows.append(row)
    return markdown_table(header, rows)


def curve_steps(n: int) -> list[int]:
    """Steps of a run of n that are shown, counted from 1; short runs show some twice."""
    return [1, *(max(1, n * eighths // 8) for eighths in (1, 2, 4, 6)), n]


def _gaps(ours: list[float], peer: list[float]) -> list[str]:
    """The largest relative gap of two curves with its step, and that of the means at their end."""
    gaps = [abs(theirs - own) / own for own, theirs in zip(ours, peer, strict=True)]
    step = max(range(len(gaps)), key=gaps.__getitem__)
    own_mean, their_mean = statistics.fmean(ours[-LAST:]), statistics.fmean(peer[-LAST:])
    return [f"{gaps[step]:.2%} ({step + 1})", f"{abs(their_mean - own_mean) / own_mean:.2%}"]


def _key(line: dict[str, Any]) -> tuple[str, str]:
    return line["shape"], line["kind"]


def _rate(line: dict[str, Any]) -> float:
    """Tokens a second of the quicker step."""
    quicker = min(line["eager_ms"], line.get("captured_ms", float("inf")))
    return line["batch"] * SEQ / quicker * 1e3


def _number(value: float | None, digits: int = 1) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def main(argv: list[str] | None = None) -> int:
    """Write the results file and print it."""
    parser = argparse.ArgumentParser(prog="python -m experiments.benchmarks.whole_models.table")
    parser.add_argument("lines", type=Path)
    parser.add_argument("--versions", required=True, help="date, machine and versions, one line")
    options = parser.parse_args(argv)
    lines = [json.loads(line) for line in options.lines.read_text(encoding="utf-8").splitlines()]
    text = f"# Training whole models on one H200\n\n{options.versions}\n\n{table(lines)}\n\n{NOTES}\n"
    if curves := curve_table(lines):
        text += f"\n## Losses from the same initial weights\n\n{curves}\n\n{CURVE_NOTES}\n"
    (RESULTS / "whole-model-h200.md").write_text(text, encoding="utf-8")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
