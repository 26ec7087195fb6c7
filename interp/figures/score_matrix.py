"""Layer x head matrices of a score, for one checkpoint or, with a slider, for a series."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import plotly.graph_objects as go

from interp.figures.step_slider import SLIDER_PX, add_step_slider
from interp.figures.theme import Theme, colour_bar, on_colour, scale, style, theme_of
from interp.records import CheckpointScores
from interp.unit_name import UNIT_LETTERS

# (label, lowest, highest): None is the largest absolute value, the same on both sides.
SCORES = {
    "prefix_matching": ("prefix matching", 0.0, 1.0),
    "previous_token": ("previous token", 0.0, 1.0),
    "copying_edge": ("copying at +1", -1.0, 1.0),
    "copying_offset": ("copying at the strongest offset", -1.0, 1.0),
    "copying": ("copying (logit)", -1.0, 1.0),
    "copying_eigenvalue": ("copying (eigenvalue)", -1.0, 1.0),
    "offset_effect_nats": ("effect: cut − random edges (nats)", None, None),
}
# Numbers are written into cells up to this many columns and cells.
MOST_NUMBERED_COLUMNS, MOST_NUMBERED = 12, 200


def score_matrix(
    checkpoints: Sequence[CheckpointScores],
    *,
    score: str = "prefix_matching",
    reading: str = "pattern",
    mode: str = "light",
    title: str | None = None,
    slider: bool = True,
) -> go.Figure:
    """Matrix of one score under one reading; layer 0 on top, units without the score left blank.

    Args:
        checkpoints: One, or a series: then one frame for each (named by its step), the last one shown.
        score: A key of `SCORES`.
        reading: `pattern`, `ssm` or `block`.
        mode: `light` or `dark`.
        title: Of the figure; default the score's name.
        slider: Draw plotly's own slider and play button for a series.

    Returns:
        A heatmap whose z is [layer head]; ranges are fixed and stated on the colour bar: [0, 1] for shares,
        symmetric
        for signed scores. Induction heads are outlined.

    Raises:
        ValueError: unknown score, or no unit has this reading.
    """
    if score not in SCORES:
        raise ValueError(f"score {score!r}; accepted: {', '.join(SCORES)}")
    series = _series(checkpoints, score, reading, theme_of(mode))
    figure = go.Figure(_traces(series))
    n_layers, letter = len(series.layers), series.letter
    height = (26 if n_layers > 6 else 44) * n_layers + 118
    style(figure, series.theme, title=title or SCORES[score][0], height=height)
    _layout(figure, series.layers, series.tables[0][0].shape[1], letter, series.theme)
    if slider and len(checkpoints) > 1:
        kinds = ("heatmap", "scatter", "scatter")
        figure.frames = [
            {"name": name, "data": [{"type": kind, **part} for kind, part in zip(kinds, parts, strict=True)]}
            for name, parts in score_frames(checkpoints, score=score, reading=reading, mode=mode).items()
        ]
        figure.update_layout(height=height + SLIDER_PX, margin={"b": 46 + SLIDER_PX})
        steps = [checkpoint.step for checkpoint in checkpoints]
        add_step_slider(figure, steps, series.theme, left=-40, down=34)
    return figure


def score_frames(
    checkpoints: Sequence[CheckpointScores], *, score: str, reading: str, mode: str = "light"
) -> dict[str, list[dict[str, Any]]]:
    """What changes from checkpoint to checkpoint in the three traces of `score_matrix`, by step: plain JSON
    values."""
    series = _series(checkpoints, score, reading, theme_of(mode))
    return {str(c.step): _moving(series, index) for index, c in enumerate(checkpoints)}


@dataclass(frozen=True, kw_only=True)
class _Series:
    """[layer head] tables of one score with the places of induction heads, one a checkpoint, and their
    limits."""

    tables: list[tuple[np.ndarray, list[tuple[int, int]]]]
    layers: list[int]
    letter: str
    limits: tuple[float, float]
    score: str
    theme: Theme


def _series(checkpoints: Sequence[CheckpointScores], score: str, reading: str, theme: Theme) -> _Series:
    units = [head for checkpoint in checkpoints for head in checkpoint.heads if head.reading == reading]
    if not units:
        there = sorted({head.reading for checkpoint in checkpoints for head in checkpoint.heads})
        raise ValueError(f"no unit has the reading {reading!r}; there are: {', '.join(there) or 'none'}")
    layers = sorted({head.layer for head in units})
    n_heads = 1 + max(head.head for head in units)
    tables = [_table(checkpoint, score, reading, layers, n_heads) for checkpoint in checkpoints]
    letter = UNIT_LETTERS.get(units[0].unit, "")
    return _Series(
        tables=tables, layers=layers, letter=letter, limits=_limits(score, tables), score=score, theme=theme
    )


def _table(
    checkpoint: CheckpointScores, score: str, reading: str, layers: list[int], n_heads: int
) -> tuple[np.ndarray, list[tuple[int, int]]]:
    """[layer head] values, NaN where there is none, and the (row, head) places of induction heads."""
    values, induction = np.full((len(layers), n_heads), np.nan), []
    for head in checkpoint.heads:
        if head.reading != reading:
            continue
        row, value = layers.index(head.layer), getattr(head, score)
        values[row, head.head] = np.nan if value is None else value
        if head.is_induction:
            induction.append((row, head.head))
    return values, induction


def _limits(score: str, tables: list[tuple[np.ndarray, list]]) -> tuple[float, float]:
    _, low, high = SCORES[score]
    values = np.concatenate([table.ravel() for table, _ in tables])
    values = values[np.isfinite(values)]
    largest = float(np.abs(values).max()) if values.size else 1.0
    if low is None:
        return -(largest or 1.0), largest or 1.0
    # A share that leaves [0, 1] (signed weights) gets a symmetric scale rather than a clipped one.
    if values.size and (values.min() < low - 1e-6 or values.max() > high + 1e-6):
        return (-largest, largest) if values.min() < -1e-6 else (0.0, largest)
    return low, high


def _moving(series: _Series, index: int) -> list[dict[str, Any]]:
    """The members of cells, numbers and outlines that differ between checkpoints."""
    (values, induction), (low, high) = series.tables[index], series.limits
    numbered = values.shape[1] <= MOST_NUMBERED_COLUMNS and values.size <= MOST_NUMBERED
    flat = [float(value) if np.isfinite(value) else None for value in values.ravel()]
    shares = [0.0 if value is None else (value - low) / (high - low) for value in flat]
    texts = ["" if value is None or not numbered else signed_text(value) for value in flat]
    inks = [on_colour(series.theme, share, signed=low < 0) for share in shares]
    paths = [_outline(row, column, 0.46) for row, column in induction]
    return [
        {"z": [flat[i : i + values.shape[1]] for i in range(0, len(flat), values.shape[1])]},
        {"text": texts, "textfont": {"color": inks, "size": 12 if values.shape[1] <= 8 else 10}},
        {"x": [x for xs, _ in paths for x in xs], "y": [y for _, ys in paths for y in ys]},
    ]


def signed_text(value: float) -> str:
    """Two decimals with a real minus sign, no minus zero."""
    return f"{value:.2f}".replace("-0.00", "0.00").replace("-", "−")


def _traces(series: _Series) -> list[dict[str, Any]]:
    """Cells, their numbers, and the outlines of induction heads, at the last checkpoint."""
    cells, numbers, outlines = _moving(series, -1)
    values, (low, high), theme = series.tables[-1][0], series.limits, series.theme
    rows, columns = np.mgrid[: values.shape[0], : values.shape[1]]
    unit = "unit" if series.letter != "H" else "head"
    heatmap = {
        "type": "heatmap",
        "zmin": low,
        "zmax": high,
        "colorscale": scale(theme.diverging if low < 0 else theme.sequential),
        "colorbar": colour_bar(theme, "") | {"tickvals": [low, (low + high) / 2, high], "tickformat": ".3~g"},
        "xgap": 2,
        "ygap": 2,
        "hoverongaps": False,
        "customdata": [[layer] * values.shape[1] for layer in series.layers],
        "hovertemplate": f"layer %{{customdata}}, {unit} %{{x}}<br>%{{z:.3f}}<extra></extra>",
        "name": SCORES[series.score][0],
    }
    still = {"type": "scatter", "hoverinfo": "skip", "showlegend": False}
    places = {"x": columns.ravel().tolist(), "y": rows.ravel().tolist(), "mode": "text"}
    line = {"color": theme.ink if low < 0 else theme.outline, "width": 2.4}
    return [
        {**heatmap, **cells},
        {**still, **places, **numbers},
        {**still, "mode": "lines", "line": line, **outlines},
    ]


def _outline(row: int, column: int, half: float) -> tuple[list, list]:
    left, right, up, down = column - half, column + half, row - half, row + half
    return [left, right, right, left, left, None], [up, up, down, down, up, None]


def _layout(figure: go.Figure, layers: list[int], n_heads: int, letter: str, theme: Theme) -> None:
    stride = 1 if n_heads <= 16 else 4 if n_heads <= 64 else 16
    columns = list(range(0, n_heads, stride))
    row_stride = max(1, len(layers) // 16)
    rows = list(range(0, len(layers), row_stride))
    units = {"H": "head", "S": "state index", "C": "cluster"}.get(letter, "whole layer")
    figure.update_xaxes(
        tickmode="array",
        tickvals=columns,
        ticktext=[str(column) for column in columns] if letter else [""] * len(columns),
        range=[-0.5, n_heads - 0.5],
        title={"text": units, "standoff": 6},
        showgrid=False,
        showline=False,
        ticks="",
    )
    figure.update_yaxes(
        tickmode="array",
        tickvals=rows,
        ticktext=[str(layers[row]) for row in rows],
        range=[len(layers) - 0.5, -0.5],
        title={"text": "layer", "standoff": 6},
        showgrid=False,
        showline=False,
        ticks="",
    )
    figure.update_layout(plot_bgcolor=theme.missing, margin={"l": 52, "r": 10, "t": 42, "b": 46})
