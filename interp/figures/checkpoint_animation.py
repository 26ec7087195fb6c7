"""One unit's attention map over training: a frame a checkpoint, with slider and play button.

`score_matrix` is the same for scores: given a series, it has a frame for each checkpoint.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import plotly.graph_objects as go
from jaxtyping import Float

from interp.figures.attention_map import attention_map, negative_signs
from interp.figures.downsample import add_note, block_extremes, causal_blank
from interp.figures.given import checked_limit, numbers
from interp.figures.step_slider import SLIDER_PX, add_step_slider
from interp.figures.theme import Theme, theme_of

# Cells a side and checkpoints drawn: below 2 MB of numbers at most.
MOST_CELLS, MOST_FRAMES = 96, 40


def checkpoint_animation(
    maps: Mapping[int, Float[np.ndarray, "dest src"] | Sequence[Sequence[float]]],
    tokens: Sequence[str | bytes],
    *,
    targets: bool = True,
    limit: float | None = None,
    quantity: str = "attention",
    mode: str = "light",
    title: str | None = None,
) -> go.Figure:
    """Attention maps of one unit on one sequence, by training step; the last step is shown first.

    Args:
        maps: [n n] weights by step. More than 40 steps: evenly spread, the first and the last among them,
            which a note states, as it does block extremes for sequences of more than 96 tokens.
        tokens: The n tokens.
        targets, limit, quantity, mode, title: As of `attention_map`; by default the limit is the largest
            absolute weight of all frames, so that colours mean the same at every step.

    Raises:
        ValueError: no map, a negative step, or a map that `attention_map` refuses (named by its step).
    """
    if not maps or min(maps) < 0:
        raise ValueError(f"steps {sorted(maps)}; accepted: at least one, none negative")
    given = {step: numbers(maps[step], f"the map of step {step}") for step in sorted(maps)}
    weights = {step: matrix.astype(np.float32) for step, matrix in given.items()}
    for step, matrix in weights.items():
        if matrix.shape != (len(tokens), len(tokens)) or not np.isfinite(matrix).all():
            raise ValueError(
                f"the map of step {step} has shape {matrix.shape} for {len(tokens)} tokens; accepted: "
                "[n n], finite"
            )
    steps = _spread(list(weights), MOST_FRAMES)
    signed = any(float(matrix.min()) < 0 for matrix in weights.values())
    top = checked_limit(limit) or max(float(np.abs(matrix).max()) for matrix in weights.values()) or 1.0
    options = {"quantity": quantity, "mode": mode, "title": title}
    options = {"quantity": quantity, "mode": mode, "title": title, "most": MOST_CELLS}
    figure = attention_map(weights[steps[-1]], tokens, targets=targets, limit=top, signed=signed, **options)
    if len(steps) < len(weights):
        _add_words(figure, f"{len(steps)} of {len(weights)} checkpoints", theme_of(mode))
    marked = figure.data[0].texttemplate is not None
    figure.data[0].update(_moving(weights[steps[-1]], top, marked))
    if len(steps) == 1:
        return figure
    figure.frames = [
        {
            "name": str(step),
            "data": [{"type": "heatmap", **_moving(weights[step], top, marked)}],
            "traces": [0],
        }
        for step in steps
    ]
    margin, height = figure.layout.margin, figure.layout.height
    figure.update_layout(height=height + SLIDER_PX, margin={"b": margin.b + SLIDER_PX})
    return add_step_slider(figure, steps, theme_of(mode), left=12 - margin.l, down=margin.b - SLIDER_PX)


def _moving(matrix: np.ndarray, top: float, marked: bool) -> dict:
    """What differs between frames: the cells, and where they are marked, their signs."""
    z = causal_blank(block_extremes(matrix, most=MOST_CELLS)[0])
    return {"z": z} | ({"text": negative_signs(z, top)} if marked else {})


def _add_words(figure: go.Figure, words: str, theme: Theme) -> None:
    """Say it in the note that is there, or in one of its own."""
    if figure.layout.annotations:
        figure.layout.annotations[0].text += f"; {words}"
        return
    add_note(figure, words, theme)
    figure.update_layout(height=figure.layout.height + 14, margin={"t": figure.layout.margin.t + 14})


def _spread(steps: list[int], most: int) -> list[int]:
    """At most `most` of the steps, evenly, the first and the last among them."""
    return steps if len(steps) <= most else [steps[round(i)] for i in np.linspace(0, len(steps) - 1, most)]
