"""Several runs on one log-step axis: the same quantity, one line a run."""

from collections.abc import Mapping, Sequence

import numpy as np
import plotly.graph_objects as go

from interp.figures.direct_label import label_ends, room_for
from interp.figures.given import last_value, with_gaps
from interp.figures.step_axis import axis_layout, positions
from interp.figures.theme import SYMBOLS, style, theme_of
from interp.figures.token_text import label


def run_comparison(
    curves: Mapping[str, tuple[Sequence[int], Sequence[float]]],
    *,
    quantity: str,
    midpoints: Mapping[str, float] | None = None,
    y_range: tuple[float, float] | None = None,
    mode: str = "light",
    title: str | None = None,
) -> go.Figure:
    """Lines of several runs, named at their right ends.

    Args:
        curves: (steps, values) by run name; NaN is a gap in its line.
        quantity: Name of the y axis, with its unit.
        midpoints: Midpoint step of the run's transition; marked on its line.
        y_range: Of the y axis; default the values' own, with 0 in it.
        mode: `light` or `dark`.
        title: Of the figure.

    Raises:
        ValueError: no curve, or one with fewer than two steps (named); an infinite value; a line of gaps
            alone.
    """
    if not curves:
        raise ValueError("no curve to draw; give at least one")
    for name, (steps, values) in curves.items():
        if len(steps) != len(values) or len(steps) < 2:
            raise ValueError(
                f"run {name!r} has {len(steps)} steps and {len(values)} values; accepted: the same, at "
                f"least 2"
            )
    curves = {name: (steps, with_gaps(values, f"run {name!r}")) for name, (steps, values) in curves.items()}
    theme, figure, labels = theme_of(mode), go.Figure(), []
    grid = sorted({int(step) for steps, _ in curves.values() for step in steps})
    ends = {name: last_value(values) for name, (_, values) in curves.items()}
    every = np.concatenate([values[np.isfinite(values)] for _, values in curves.values()])
    margin = 0.06 * float(np.ptp([0.0, *every]) or 1.0)
    span = y_range or (min(0.0, float(every.min())) - margin, max(0.0, float(every.max())) + margin)
    looks = zip(theme.series * 4, SYMBOLS * 4, strict=True)
    for (name, (steps, values)), (colour, symbol) in zip(curves.items(), looks, strict=False):
        places, text = positions(grid, steps), label(name, limit=28).replace("␣", " ")
        figure.add_scatter(
            x=places,
            y=values,
            customdata=list(steps),
            mode="lines+markers",
            line={"color": colour, "width": 2.2},
            marker={"size": 5, "symbol": symbol},
            name=text,
            hovertemplate=f"{text}<br>step %{{customdata:,}}<br>%{{y:.3f}}<extra></extra>",
        )
        labels.append((text, ends[name], colour))
        if (middle := (midpoints or {}).get(name)) is not None:
            place = positions(grid, [middle])
            marker = {
                "symbol": "diamond",
                "size": 11,
                "color": colour,
                "line": {"color": theme.background, "width": 1.5},
            }
            figure.add_scatter(
                x=place,
                y=np.interp(place, places, values),
                mode="markers",
                marker=marker,
                hovertemplate=f"{text}<br>midpoint {middle:,.0f}<extra></extra>",
                name=f"{text} midpoint",
            )
    style(figure, theme, title=title, height=282)
    figure.update_xaxes(**axis_layout(grid))
    figure.update_yaxes(title_text=quantity, range=span)
    label_ends(figure, labels, y_range=span, panel_px=190)
    figure.update_layout(
        showlegend=False,
        margin={"l": 64, "r": room_for(text for text, _, _ in labels), "t": 52 if title else 32, "b": 52},
    )
    return figure
