"""What the page draws: pure functions of computed records and options. `mode` is light or dark."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go
from jaxtyping import Float

from interp import figures
from interp.dashboard.causal import CutProfile
from interp.dashboard.sheet import Sheet
from interp.dashboard.states import StateNorms
from interp.figures.attention_map import induction_targets
from interp.figures.downsample import block_extremes
from interp.figures.offset_profile import RAW_COST
from interp.figures.step_axis import positions
from interp.figures.theme import style, theme_of
from interp.figures.token_text import label
from interp.offset_edges import window_matches
from interp.records import DetectionReport

# Longer prompts are drawn as block extremes; zooming in draws cell by cell.
MOST_CELLS = 512
# Offsets from earlier copies whose mean weight is shown.
OFFSETS = range(-2, 9)
# Left and right margins of a map of numbers, pixels; longer token names take more.
MAP_FRAME = 126
RIGHT_PX, TOP_PX = 66, 14
# Room of a label by its font: less, and it runs into the next. As in export_views.js.
LABEL_PX = 1.3


def attention_view(
    sheet: Sheet,
    unit: int,
    *,
    targets: bool = True,
    limit: float | None = None,
    side: int = 560,
    mode: str = "light",
) -> go.Figure:
    """The map of one unit, destination down and source across.

    Args:
        limit: Upper end of the colours, for maps side by side; default the unit's own largest size.
        side: Of the square of cells, pixels.
    """
    weights = sheet.of(unit)
    figure = figures.attention_map(
        weights,
        sheet.prompt.tokens,
        targets=False,
        limit=limit,
        signed=is_signed(sheet),
        most=MOST_CELLS,
        quantity=sheet.quantity,
        mode=mode,
    )
    # Half the size to send to the browser, and the same four digits.
    figure.data[0].z = np.asarray(figure.data[0].z, dtype=np.float32)
    if targets and len(sheet.prompt) <= MOST_CELLS:
        # As arrays: plotly checks lists number by number, which takes longer than all the rest.
        figure.data[1].x, figure.data[1].y = outlines(sheet.prompt.tokens)
    # Said in the caption; two maps have to fit beside each other.
    figure.data[0].colorbar.title.text = None
    figure.layout.annotations = ()
    left, below = figure.layout.margin.l, figure.layout.margin.b
    side = max(side + MAP_FRAME - left - RIGHT_PX, 200)
    figure.update_layout(
        margin={"r": RIGHT_PX, "t": TOP_PX},
        width=side + left + RIGHT_PX,
        height=side + TOP_PX + below,
        uirevision=revision(sheet, unit),
        dragmode="zoom",
    )
    _thin_labels(figure, side / len(sheet.prompt))
    return figure


def _thin_labels(figure: go.Figure, cell: float) -> None:
    """Leave out token labels that would touch: every k-th stays, for cells of so many pixels."""
    for axis in (figure.layout.xaxis2, figure.layout.yaxis2):
        places = axis.tickvals
        if len(places) > 1 and places[1] - places[0] == 1:
            every = math.ceil(LABEL_PX * axis.tickfont.size / cell)
            axis.update(tickvals=places[::every], ticktext=axis.ticktext[::every])


def revision(sheet: Sheet, unit: int) -> str:
    """Figures of equal revision keep the window that was zoomed into; joined cells cannot."""
    n = len(sheet.prompt)
    return f"{n}" if n <= MOST_CELLS else f"{n} {sheet.layer} {sheet.reading} {unit} {id(sheet)}"


def outlines(tokens: Sequence[str | bytes]) -> tuple[np.ndarray, np.ndarray]:
    """Squares around the induction targets as one broken line, NaN between them."""
    places = np.array(induction_targets(tokens), dtype=np.float32).reshape(-1, 2)
    corners = np.array([[-0.5, 0.5, 0.5, -0.5, -0.5, np.nan], [-0.5, -0.5, 0.5, 0.5, -0.5, np.nan]])
    x, y = places[:, 1:] + corners[0], places[:, :1] + corners[1]
    return x.ravel().astype(np.float32), y.ravel().astype(np.float32)


def colour_limit(drawn: Sequence[tuple[Sheet, int]], *, percentile: float = 100.0) -> float:
    """Upper end of the colours of one map, or of several that share them: a percentile of the sizes.

    Zeros do not count: most of a sharp head's map is empty.
    """
    sizes = np.concatenate([np.abs(sheet.of(unit)).ravel() for sheet, unit in drawn])
    sizes = sizes[sizes > 0]
    return float(np.percentile(sizes, percentile)) if sizes.size else 1.0


def is_signed(sheet: Sheet) -> bool:
    """Whether the diverging scale is used: for all units of a layer alike."""
    return bool(sheet.weights.min() < 0)


def zoomed(
    sheet: Sheet, unit: int, rows: tuple[float, float], columns: tuple[float, float]
) -> dict[str, Any]:
    """The cells inside a zoom window, exact where they are at most `MOST_CELLS` a side.

    Args:
        rows, columns: Ranges of the axes, in positions; rows may run downwards.

    Returns:
        `z`, places `x` and `y` of its columns and rows, the hover names of both, places of labels
        `x_ticks` and `y_ticks`, and `block` (positions a cell).
    """
    weights, n = sheet.of(unit), len(sheet.prompt)
    down, across = _inside(rows, n), _inside(columns, n)
    length = max(len(down), len(across))
    square = np.zeros((length, length), dtype=weights.dtype)
    square[: len(down), : len(across)] = weights[down.start : down.stop, across.start : across.stop]
    shown, block = block_extremes(square, most=MOST_CELLS)
    shown = shown[: -(-len(down) // block), : -(-len(across) // block)]
    y = down.start + np.arange(shown.shape[0]) * block + (block - 1) / 2
    x = across.start + np.arange(shown.shape[1]) * block + (block - 1) / 2
    # Above the diagonal nothing is read: blank, as in the whole map.
    z = np.where((x[None] > y[:, None]) & (shown == 0), np.nan, shown).astype(np.float32)
    tokens = sheet.prompt.tokens
    names = {"x_names": cell_names(tokens, x), "y_names": cell_names(tokens, y)}
    return {
        "z": z,
        "x": x,
        "y": y,
        **names,
        "x_ticks": _ticks(across),
        "y_ticks": _ticks(down),
        "block": block,
    }


def _ticks(places: range) -> list[int]:
    """About ten round positions in a range."""
    stride = next(k for k in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000) if len(places) / k <= 12)
    return list(range(-(-places.start // stride) * stride, places.stop, stride))


def _inside(ends: tuple[float, float], n: int) -> range:
    low, high = sorted(ends)
    start = min(max(int(np.floor(low + 0.5)), 0), n - 1)
    return range(start, max(min(int(np.ceil(high + 0.5)), n), start + 1))


def cell_names(tokens: Sequence[str | bytes], places: Float[np.ndarray, " n"]) -> list[str]:
    """What hover says of rows or columns at these places."""
    at = np.clip(places.round().astype(int), 0, len(tokens) - 1)
    return [f"‘{label(tokens[i], limit=24)}’ @{i}" for i in at]


def weight_by_offset(
    sheet: Sheet, unit: int, *, name: str = "weight", mode: str = "light"
) -> go.Figure | None:
    """Mean weight at each offset from earlier copies of the reading token; None where none comes again."""
    import torch

    matches = window_matches(torch.tensor([sheet.prompt.ids]))
    if not len(matches.pairs.dest):
        return None
    weights, n = sheet.of(unit), len(sheet.prompt)
    offsets = [offset for offset in OFFSETS if abs(offset) < n]
    found = []
    for offset in offsets:
        edges = matches.at(offset)
        found.append(float(weights[edges.dest.numpy(), edges.src.numpy()].mean()) if len(edges.dest) else 0.0)
    below = np.tril(np.ones_like(weights, dtype=bool), k=-1)
    even = float(weights[below].mean()) if n > 1 else 0.0
    return figures.offset_profile(
        {name: found},
        first_offset=offsets[0],
        controls={"all edges": even},
        quantity=f"mean {sheet.quantity}",
        mode=mode,
    )


def cut_view(profile: CutProfile, *, mode: str = "light") -> go.Figure:
    """Cost of cutting a unit's edges by offset, beside as many random edges."""
    figure = figures.offset_profile(
        profile.cut,
        first_offset=profile.offsets[0],
        controls={"random edges": profile.random},
        quantity=RAW_COST,
        mode=mode,
    )
    figure.data[0].error_y = {"array": list(profile.cut_se), "color": theme_of(mode).muted, "thickness": 1.2}
    return figure


def phase_view(report: DetectionReport, *, steps: Sequence[int], mode: str = "light") -> go.Figure:
    """The curves of a scored series, a line at each chosen step. `customdata` of points is their step."""
    figure = figures.phase_plot(report.checkpoints, transition=report.phase_transition, mode=mode)
    grid, theme = [checkpoint.step for checkpoint in report.checkpoints], theme_of(mode)
    for place, dash in zip(positions(grid, list(steps)), ("solid", "dot"), strict=False):
        figure.add_shape(
            type="line", x0=place, x1=place, y0=0, y1=1, xref="x", yref="paper", opacity=0.8,
            line={"color": theme.ink, "width": 1.6, "dash": dash},
        )  # fmt: skip
    return figure


def score_view(
    report: DetectionReport, *, step: int, reading: str, score: str, mode: str = "light"
) -> go.Figure:
    """Score of every unit at one checkpoint: layers down, units across."""
    return figures.score_matrix([report.at(step)], score=score, reading=reading, slider=False, mode=mode)


def state_view(
    norms: StateNorms, tokens: Sequence[str | bytes], *, unit: int | None = None, mode: str = "light"
) -> go.Figure:
    """Norm of the state after each token, a line for each unit; the chosen one stands out."""
    theme, n = theme_of(mode), norms.norms.shape[-1]
    names = [f"after ‘{label(token, limit=24)}’ @{place}" for place, token in enumerate(tokens)]
    figure = go.Figure()
    order = [row for row in range(len(norms.norms)) if row != unit] + ([] if unit is None else [unit])
    few = len(order) <= len(theme.series)
    named = len(order) > 1
    for row in (row for row in order if row < len(norms.norms)):
        chosen = row == unit or len(order) == 1
        colour = theme.series[row] if few else theme.series[0] if chosen else theme.roles["other"]
        figure.add_scatter(
            x=np.arange(n),
            y=norms.norms[row].astype(np.float64),
            mode="lines",
            line={"color": colour, "width": 2.8 if chosen else 1.3},
            opacity=1.0 if chosen or few else 0.7,
            name=f"{norms.unit} {row}" if named else norms.unit,
            showlegend=named and (few or chosen),
            customdata=names,
            hovertemplate="%{customdata}<br>norm %{y:.3f}<extra>%{fullData.name}</extra>",
        )
    style(figure, theme, height=420)
    figure.update_xaxes(title_text="position", rangemode="tozero", showgrid=False)
    figure.update_yaxes(title_text="norm of the state", rangemode="tozero")
    legend = {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "font": {"size": 12}}
    figure.update_layout(
        showlegend=named, legend=legend, hovermode="closest",
        margin={"l": 64, "r": 20, "t": 44, "b": 52},
    )  # fmt: skip
    return figure
