"""The table of whole models: its lines, one a contender, as `results/whole-model-h200.md`.

    python -m experiments.benchmarks.whole_models.table LINES.jsonl
"""

import argparse
import json
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
    (RESULTS / "whole-model-h200.md").write_text(text, encoding="utf-8")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
