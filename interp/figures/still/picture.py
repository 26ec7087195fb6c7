"""The whole picture: axes laid out, traces over their grids, shapes, notes and titles."""

import base64
from collections.abc import Mapping
from typing import Any

import numpy as np
import plotly.graph_objects as go

from interp.figures.step_slider import SLIDER_PX
from interp.figures.still.arrays import unpacked
from interp.figures.still.axis import Axis
from interp.figures.still.cells import colour_bar, colours_of, heatmap
from interp.figures.still.traces import DASHES, bars, scatter
from interp.figures.still.words import ANCHORS, escaped, text_element, width_of

WIDTH, HEIGHT = 760, 360
# A colour bar with its numbers and its name.
BAR_PX = 84
KINDS = ("heatmap", "scatter", "bar")


def svg(figure: go.Figure, *, width: int = WIDTH) -> str:
    """A still SVG picture of a figure.

    Args:
        width: In pixels, for figures without a width of their own.

    Raises:
        ValueError: a trace that is no heatmap, scatter or bar.
    """
    data = unpacked(figure.to_plotly_json())
    traces = data["data"]
    layout = _still_layout(data["layout"], traces)
    for trace in traces:
        if trace["type"] not in KINDS:
            raise ValueError(f"a trace of type {trace['type']!r}; accepted: {', '.join(KINDS)}")
    size = int(layout.get("width") or width), layout["height"]
    axes = _axes(layout, traces, size)
    parts = [f'<rect width="100%" height="100%" fill="{escaped(layout.get("paper_bgcolor") or "#ffffff")}"/>']
    parts += _grounds(axes, layout) + _shapes(layout, axes, size, below=True)
    # Overlaid axes carry labels for axes that carry the cells: all grids first, then all traces.
    for axis in axes.values():
        parts += axis.drawn()
    parts += _traces(traces, axes, layout) + _bars_of_colour(traces, layout, size)
    parts += (
        _shapes(layout, axes, size, below=False) + _notes(layout, axes, size) + _legend(traces, layout, size)
    )
    parts.append(_title(layout))
    family = escaped((layout.get("font") or {}).get("family") or "sans-serif")
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{size[0]}" height="{size[1]}"'
    return f'{head} viewBox="0 0 {size[0]} {size[1]}" font-family="{family}">{"".join(parts)}</svg>'


def data_address(figure: go.Figure, *, width: int = WIDTH) -> str:
    """The picture as a `data:` address for an `img` element, in which nothing can run."""
    text = svg(figure, width=width).encode("utf-8")
    return "data:image/svg+xml;base64," + base64.b64encode(text).decode("ascii")


def _still_layout(layout: dict[str, Any], traces: list[dict]) -> dict[str, Any]:
    """The layout without room for an animation's controls, and with room for a colour bar."""
    margin = {"l": 60, "r": 20, "t": 20, "b": 48} | (layout.get("margin") or {})
    height = int(layout.get("height") or HEIGHT)
    if layout.get("sliders"):
        margin["b"], height = margin["b"] - SLIDER_PX, height - SLIDER_PX
    if any(_has_scale(trace) for trace in traces):
        margin["r"] = max(margin["r"], BAR_PX)
    return {**layout, "margin": margin, "height": height}


def _has_scale(trace: Mapping[str, Any]) -> bool:
    return trace["type"] == "heatmap" and trace.get("showscale") is not False


def _plot(layout: Mapping[str, Any], size: tuple[int, int]) -> tuple[float, float, float, float]:
    """Left, right, top and bottom pixels inside the margins."""
    margin = layout["margin"]
    return margin["l"], size[0] - margin["r"], margin["t"], size[1] - margin["b"]


def _axes(layout: Mapping[str, Any], traces: list[dict], size: tuple[int, int]) -> dict[str, Axis]:
    left, right, top, bottom = _plot(layout, size)
    names = {"x", "y", *(key.replace("axis", "") for key in layout if key[1:5] == "axis")}
    names |= {trace.get(f"{kind}axis") or kind for trace in traces for kind in "xy"}
    box = {}
    for name in sorted(names):
        own = _layout_of(layout, name)
        source = _layout_of(layout, own["overlaying"]) if own.get("overlaying") else own
        low, high = source.get("domain") or (0, 1)
        ends = (left, right) if name[0] == "x" else (bottom, top)
        box[name] = tuple(ends[0] + part * (ends[1] - ends[0]) for part in (low, high))
    found = {}
    for name in sorted(names):
        own = _layout_of(layout, name)
        if own.get("visible") is False:
            own = {
                **own,
                "showgrid": False,
                "showline": False,
                "showticklabels": False,
                "ticks": "",
                "title": None,
            }
        other = own.get("anchor") or ("y" if name[0] == "x" else "x") + name[1:]
        low, high = own.get("range") or _range(name, traces, own)
        (start, stop), across = box[name], box.get(other) or box["y" if name[0] == "x" else "x"]
        found[name] = Axis(
            kind=name[0], low=low, high=high, start=start, stop=stop, across=across, layout=own
        )
    return found


def _layout_of(layout: Mapping[str, Any], name: str) -> dict[str, Any]:
    return dict(layout.get(f"{name[0]}axis{name[1:]}") or {})


def _range(name: str, traces: list[dict], own: dict[str, Any]) -> tuple[float, float]:
    """What the traces on this axis span, bars with room at their sides and down to 0."""
    low, high, names = np.inf, -np.inf, []
    for trace in traces:
        if (trace.get(f"{name[0]}axis") or name[0]) != name or trace.get(name[0]) is None:
            continue
        values = list(trace[name[0]])
        if any(isinstance(value, str) for value in values):
            names, values = values, list(range(len(values)))
        values = np.array([np.nan if value is None else value for value in values], dtype=np.float64)
        if not np.isfinite(values).any():
            continue
        beside = 0.5 if trace["type"] == "bar" and name[0] == "x" else 0.0
        low, high = min(low, np.nanmin(values) - beside), max(high, np.nanmax(values) + beside)
        if trace["type"] == "bar" and name[0] == "y":
            low, high = min(low, 0), max(high, 0)
    if names:
        own |= {"tickvals": list(range(len(names))), "ticktext": names}
    if not np.isfinite([low, high]).all():
        return 0.0, 1.0
    pad = 0.05 * (high - low or 1.0) if name[0] == "y" else 0.0
    return low - (pad if low else 0), high + (pad if high else 0)


def _grounds(axes: Mapping[str, Axis], layout: Mapping[str, Any]) -> list[str]:
    colour = escaped(layout.get("plot_bgcolor") or "#ffffff")
    return [
        f'<rect x="{min(a.start, a.stop):.1f}" y="{min(a.across):.1f}" width="{abs(a.stop - a.start):.1f}" '
        f'height="{abs(a.across[0] - a.across[1]):.1f}" fill="{colour}"/>'
        for name, a in axes.items()
        if name[0] == "x" and not a.layout.get("overlaying")
    ]


def _traces(traces: list[dict], axes: Mapping[str, Axis], layout: Mapping[str, Any]) -> list[str]:
    parts, grouped = [], [trace for trace in traces if trace["type"] == "bar"]
    for trace in traces:
        x, y = (axes[trace.get(f"{kind}axis") or kind] for kind in "xy")
        if trace["type"] == "heatmap":
            parts += heatmap(trace, x, y, layout)
        elif trace["type"] == "scatter":
            parts += scatter(trace, x, y)
        elif trace is grouped[0]:
            parts += bars(grouped, x, y, layout)
    return parts


def _bars_of_colour(traces: list[dict], layout: Mapping[str, Any], size: tuple[int, int]) -> list[str]:
    _, right, top, bottom = _plot(layout, size)
    for trace in traces:
        if _has_scale(trace):
            colours = colours_of(trace, layout)
            return colour_bar(colours, left=right + 12, top=top, height=bottom - top, name="scale")
    return []


def _place(value: float, ref: str, axes: Mapping[str, Axis], span: tuple[float, float]) -> float:
    """Pixels of a coordinate in `paper`, in an axis, or in shares of an axis' length."""
    if ref == "paper":
        return span[0] + value * (span[1] - span[0])
    name, *domain = ref.split()
    return axes[name].share(value) if domain else float(axes[name](value))


def _shapes(
    layout: Mapping[str, Any], axes: Mapping[str, Axis], size: tuple[int, int], *, below: bool
) -> list[str]:
    left, right, top, bottom = _plot(layout, size)
    parts = []
    for shape in layout.get("shapes") or ():
        if (shape.get("layer") == "below") != below:
            continue
        x0, x1 = (_place(shape[key], shape.get("xref") or "x", axes, (left, right)) for key in ("x0", "x1"))
        y0, y1 = (_place(shape[key], shape.get("yref") or "y", axes, (bottom, top)) for key in ("y0", "y1"))
        line = shape.get("line") or {}
        dash = f' stroke-dasharray="{DASHES[line["dash"]]}"' if line.get("dash") in DASHES else ""
        drawn = line.get("color") and line.get("width") != 0
        stroke = (
            f'stroke="{escaped(line["color"])}" stroke-width="{line.get("width") or 1:g}"{dash}'
            if drawn
            else ""
        )
        if shape.get("type") == "line":
            parts.append(f'<line x1="{x0:.1f}" y1="{y0:.1f}" x2="{x1:.1f}" y2="{y1:.1f}" {stroke}/>')
        else:
            place = f'x="{min(x0, x1):.1f}" y="{min(y0, y1):.1f}"'
            box = f'{place} width="{abs(x1 - x0):.1f}" height="{abs(y1 - y0):.1f}"'
            parts.append(f'<rect {box} fill="{escaped(shape.get("fillcolor") or "none")}" {stroke}/>')
    return parts


def _notes(layout: Mapping[str, Any], axes: Mapping[str, Axis], size: tuple[int, int]) -> list[str]:
    left, right, top, bottom = _plot(layout, size)
    parts = []
    for note in layout.get("annotations") or ():
        x = _place(note["x"], note.get("xref") or "x", axes, (left, right)) + (note.get("xshift") or 0)
        y = _place(note["y"], note.get("yref") or "y", axes, (bottom, top)) - (note.get("yshift") or 0)
        font, xanchor = note.get("font") or {}, note.get("xanchor") or "center"
        if note.get("bgcolor"):
            width, height = (
                width_of(note["text"], font.get("size") or 12),
                16 * (1 + note["text"].count("<br>")),
            )
            box = f'x="{x - 1:.1f}" y="{y - height / 2:.1f}" width="{width:.1f}" height="{height}"'
            parts.append(f'<rect {box} fill="{escaped(note["bgcolor"])}"/>')
        look = {"anchor": ANCHORS[xanchor], "baseline": note.get("yanchor") or "middle"}
        parts.append(text_element(note["text"], x, y, font, **look))
    return parts


def _legend(traces: list[dict], layout: Mapping[str, Any], size: tuple[int, int]) -> list[str]:
    """Names of bars beside their fills, above the plot."""
    named = [trace for trace in traces if trace["type"] == "bar" and trace.get("name")]
    if layout.get("showlegend") is False or len(named) < 2:
        return []
    (x, _, top, _), parts, font = _plot(layout, size), [], layout["font"]
    for k, trace in enumerate(named):
        shape = (trace["marker"].get("pattern") or {}).get("shape")
        fill = f"url(#fill{k})" if shape else trace["marker"]["color"]
        parts.append(f'<rect x="{x:.1f}" y="{top - 22}" width="12" height="12" fill="{escaped(fill)}"/>')
        look = {"size": 12, "color": font["color"]}
        parts.append(text_element(trace["name"], x + 17, top - 16, look, anchor="start"))
        x += 34 + width_of(trace["name"], 12)
    return parts


def _title(layout: Mapping[str, Any]) -> str:
    title, margin = layout.get("title") or {}, layout["margin"]
    font = {"color": layout["font"]["color"]} | (title.get("font") or {})
    return text_element(title.get("text") or "", margin["l"], 22, font, anchor="start")
