"""The phase plot: head scores, order gain and in-context-learning score on one log-step axis, onsets
shaded."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go

from interp.figures.direct_label import label_ends, room_for
from interp.figures.step_axis import axis_layout, positions, short
from interp.figures.theme import SYMBOLS, Theme, style, theme_of, transparent
from interp.records import CheckpointScores, HeadScore, begins_below_chance, by_prefix_matching
from interp.unit_name import several_readings, unit_name

# (name, axis title, label) of the panels below the head scores.
LOSSES = (
    ("order_gain", "order gain<br>(nats)", "order gain"),
    ("in_context_learning", "ICL score<br>(nats)", "ICL score"),
)
PANEL_PX = {"prefix_matching": 230, "order_gain": 140, "in_context_learning": 140}
GAP_PX, TOP_PX, BOTTOM_PX = 26, 34, 56


def phase_plot(
    checkpoints: Sequence[CheckpointScores],
    *,
    transition: Mapping[str, Any] | None = None,
    n_named: int = 5,
    mode: str = "light",
    title: str | None = None,
) -> go.Figure:
    """Curves of a series of checkpoints.

    Args:
        checkpoints: At least two, in step order.
        transition: The report's `phase_transition`; each curve's onset interval is shaded in the panel of
        the curve,
            its midpoint marked by a dotted line.
        n_named: Strongest units (prefix matching at the last checkpoint) drawn in colour and named; the rest
        are grey.
        mode: `light` or `dark`.
        title: Of the figure.

    Returns:
        A figure with one trace for each unit and loss; `customdata` of every trace holds the steps.

    Raises:
        ValueError: fewer than two checkpoints.
    """
    if len(checkpoints) < 2:
        raise ValueError(f"a phase plot needs at least 2 checkpoints; got {len(checkpoints)}")
    theme = theme_of(mode)
    steps = [checkpoint.step for checkpoint in checkpoints]
    panels = ["prefix_matching", *(name for name, _, _ in LOSSES if _values(checkpoints, name)[1])]
    figure, heights = go.Figure(), [PANEL_PX[name] for name in panels]
    _head_lines(figure, checkpoints, n_named, theme)
    for index, name in enumerate(panels[1:], start=2):
        _loss_line(figure, checkpoints, name, index, theme)
    for index, name in enumerate(panels, start=1):
        _onset_band(figure, steps, (transition or {}).get(name), index, theme, theme.roles[name])
    total = sum(heights) + GAP_PX * (len(panels) - 1)
    style(figure, theme, title=title, height=total + TOP_PX + BOTTOM_PX + (30 if title else 0))
    _axes(figure, steps, panels, heights, total)
    figure.update_layout(
        hovermode="closest",
        showlegend=False,
        margin={
            "l": 84,
            "r": room_for(note.text for note in figure.layout.annotations if note.xref == "paper"),
            "t": TOP_PX + (30 if title else 0),
            "b": BOTTOM_PX,
        },
    )
    return figure


def _axes(figure: go.Figure, steps: list[int], panels: list[str], heights: list[int], total: int) -> None:
    titles = {"prefix_matching": "prefix matching", **{name: text for name, text, _ in LOSSES}}
    top = float(total)
    for index, (name, height) in enumerate(zip(panels, heights, strict=True), start=1):
        suffix, last = "" if index == 1 else str(index), index == len(panels)
        domain = [max((top - height) / total, 0.0), top / total]
        top -= height + GAP_PX
        figure.layout[f"yaxis{suffix}"].update(
            domain=domain, title={"text": titles[name], "standoff": 12}, nticks=5
        )
        figure.layout[f"xaxis{suffix}"].update(
            {
                **axis_layout(steps),
                "anchor": f"y{suffix}",
                "showticklabels": last,
                "ticks": "outside" if last else "",
            }
        )
        if index > 1:
            figure.layout[f"xaxis{suffix}"].matches = "x"
        if not last:
            figure.layout[f"xaxis{suffix}"].title = None


def _head_lines(
    figure: go.Figure, checkpoints: Sequence[CheckpointScores], n_named: int, theme: Theme
) -> None:
    final = by_prefix_matching(checkpoints[-1].heads)
    with_reading = several_readings(final)
    steps = [checkpoint.step for checkpoint in checkpoints]
    named = list(zip(final[:n_named], theme.series, SYMBOLS, strict=False))
    chance = float(np.mean([head.prefix_matching_chance for head in final])) if final else 0.0
    labels = [("chance", chance, theme.muted)]
    for head in final[len(named) :][::-1]:
        _head_line(figure, checkpoints, head, unit_name(head, with_reading=True), theme.roles["other"])
    for head, colour, symbol in named[::-1]:
        _head_line(figure, checkpoints, head, unit_name(head, with_reading=True), colour, symbol)
        star = " ●" if head.is_induction else ""
        labels.append((unit_name(head, with_reading=with_reading) + star, head.prefix_matching, colour))
    if len(final) > len(named):
        rest = float(np.mean([head.prefix_matching for head in final[len(named) :]]))
        labels.append((f"{len(final) - len(named)} others", rest, theme.muted))
    places = positions(steps)
    figure.add_shape(
        type="line",
        x0=places[0],
        x1=places[-1],
        y0=chance,
        y1=chance,
        line={"color": theme.muted, "width": 1, "dash": "dot"},
    )
    highest = max([1.0, *(h.prefix_matching for c in checkpoints for h in c.heads)])
    lowest = min([0.0, *(h.prefix_matching for c in checkpoints for h in c.heads)])
    y_range = (lowest - 0.03, highest + 0.04)
    figure.update_layout(yaxis={"range": y_range})
    label_ends(figure, labels, y_range=y_range, panel_px=PANEL_PX["prefix_matching"])


def _head_line(
    figure: go.Figure,
    checkpoints: Sequence[CheckpointScores],
    head: HeadScore,
    name: str,
    colour: str,
    symbol: str | None = None,
) -> None:
    """One unit's curve: bold with markers where it has a symbol, thin without."""
    key = (head.layer, head.head, head.unit, head.reading)
    found = [
        (checkpoint.step, unit.prefix_matching)
        for checkpoint in checkpoints
        for unit in checkpoint.heads
        if (unit.layer, unit.head, unit.unit, unit.reading) == key
    ]
    steps = [checkpoint.step for checkpoint in checkpoints]
    figure.add_scatter(
        x=positions(steps, [step for step, _ in found]),
        y=[value for _, value in found],
        customdata=[step for step, _ in found],
        mode="lines+markers" if symbol else "lines",
        line={"color": colour, "width": 2.4 if symbol else 1.2},
        marker={"size": 6, "symbol": symbol},
        name=name,
        hovertemplate=f"{name}<br>step %{{customdata:,}}<br>prefix matching %{{y:.3f}}<extra></extra>",
    )


def _values(checkpoints: Sequence[CheckpointScores], name: str) -> tuple[list[int], list[float], list[float]]:
    """Steps, values and standard errors of one loss at the checkpoints that have it.

    The in-context-learning score is that of the means around its two places, where they are there: what its
    transition is fitted to.
    """
    if name == "in_context_learning" and all(c.in_context_learning_by_window for c in checkpoints):
        samples = [np.asarray(c.in_context_learning_by_window) for c in checkpoints]
        errors = [float(x.std(ddof=1) / np.sqrt(len(x))) if len(x) > 1 else 0.0 for x in samples]
        return [c.step for c in checkpoints], [float(x.mean()) for x in samples], errors
    rows = [(c.step, getattr(c, f"{name}_nats"), getattr(c, f"{name}_se_nats")) for c in checkpoints]
    rows = [(step, value, error or 0.0) for step, value, error in rows if value is not None]
    return tuple(list(column) for column in zip(*rows, strict=True)) if rows else ([], [], [])


def _loss_line(
    figure: go.Figure, checkpoints: Sequence[CheckpointScores], name: str, index: int, theme: Theme
) -> None:
    steps, values, errors = _values(checkpoints, name)
    grid = [checkpoint.step for checkpoint in checkpoints]
    colour, places = theme.roles[name], positions(grid, steps)
    axes = {"xaxis": f"x{index}", "yaxis": f"y{index}"}
    low, high = np.subtract(values, errors), np.add(values, errors)
    if any(errors):
        figure.add_scatter(
            x=np.concatenate([places, places[::-1]]),
            y=np.concatenate([high, low[::-1]]),
            fill="toself",
            fillcolor=transparent(colour, 0.18),
            line={"width": 0},
            hoverinfo="skip",
            name=f"{name} standard error",
            **axes,
        )
    figure.add_scatter(
        x=places,
        y=values,
        customdata=steps,
        mode="lines+markers",
        line={"color": colour, "width": 2.4},
        marker={"size": 5},
        name=name,
        hovertemplate="step %{customdata:,}<br>%{y:.3f} nats<extra></extra>",
        **axes,
    )
    reach = [0.0, float(low.min()), float(high.max())]
    margin = 0.08 * (max(reach) - min(reach) or 1.0)
    y_range = (min(reach) - margin, max(reach) + margin)
    figure.update_layout({f"yaxis{index}": {"range": y_range}, f"xaxis{index}": {}})
    label = next(text for key, _, text in LOSSES if key == name)
    axis = {"xref": f"x{index}", "yref": f"y{index}"}
    ends = {"y_range": y_range, "panel_px": PANEL_PX[name], "yref": f"y{index}"}
    label_ends(figure, [(label, values[-1], colour)], **ends)
    figure.add_shape(
        type="line",
        x0=places[0],
        x1=places[-1],
        y0=0,
        y1=0,
        line={"color": theme.muted, "width": 1, "dash": "dot"},
        **axis,
    )


def _onset_band(
    figure: go.Figure,
    steps: list[int],
    curve: Mapping[str, Any] | None,
    index: int,
    theme: Theme,
    colour: str,
) -> None:
    if curve is None:
        return
    suffix = "" if index == 1 else str(index)
    interval = curve.get("onset_interval")
    low, high = interval or curve["onset_step"]
    x0, x1, middle = positions(steps, [low, high, curve["midpoint_step"]])
    whole = {"xref": f"x{suffix}", "yref": f"y{suffix} domain", "y0": 0, "y1": 1, "layer": "below"}
    figure.add_shape(
        type="rect", x0=x0, x1=x1, fillcolor=transparent(colour, 0.16), line={"width": 0}, **whole
    )
    figure.add_shape(
        type="line", x0=middle, x1=middle, line={"color": colour, "width": 1.4, "dash": "dash"}, **whole
    )
    name = "rise below chance" if begins_below_chance(curve) else "onset"
    figure.add_annotation(
        text=f"{name} {short(low)}–{short(high)}{' (95%)' if interval else ''} · "
        f"midpoint {short(curve['midpoint_step'])}",
        x=x0,
        y=1,
        xref=f"x{suffix}",
        yref=f"y{suffix} domain",
        xanchor="right" if x0 > positions(steps).mean() else "left",
        yanchor="bottom",
        showarrow=False,
        font={"size": 11, "color": colour},
    )
