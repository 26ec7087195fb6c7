"""Lines, markers, text and bars of still pictures."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from interp.figures.still.axis import Axis
from interp.figures.still.words import escaped, text_element

DASHES = {"dash": "7 5", "dot": "2 3", "dashdot": "7 4 2 4"}
# Corners of markers, in half sizes.
MARKERS = {
    "square": [(-0.9, -0.9), (0.9, -0.9), (0.9, 0.9), (-0.9, 0.9)],
    "diamond": [(0, -1.25), (1.25, 0), (0, 1.25), (-1.25, 0)],
    "triangle-up": [(0, -1.2), (1.1, 0.8), (-1.1, 0.8)],
    "pentagon": [(math.sin(k * 1.2566), -math.cos(k * 1.2566)) for k in range(5)],
    "star": [
        (
            (1.3 if k % 2 == 0 else 0.55) * math.sin(k * 0.6283),
            -(1.3 if k % 2 == 0 else 0.55) * math.cos(k * 0.6283),
        )
        for k in range(10)
    ],
    "x": [(-1, -0.5), (-0.5, -1), (0, -0.5), (0.5, -1), (1, -0.5), (0.5, 0), (1, 0.5), (0.5, 1), (0, 0.5)]
    + [(-0.5, 1), (-1, 0.5), (-0.5, 0)],
}
PLACES = {"top": (-1, "bottom"), "bottom": (1, "top"), "middle": (0, "middle")}


def scatter(trace: Mapping[str, Any], x: Axis, y: Axis) -> list[str]:
    """Lines, filled areas, markers and text of one trace, in that order."""
    xs, ys = (_numbers(trace.get(name)) for name in ("x", "y"))
    if not len(xs):
        return []
    px, py, mode, parts = x(xs), y(ys), trace.get("mode") or "lines", []
    if trace.get("fill") == "toself":
        parts.append(f'<path d="{_path(px, py)}Z" fill="{escaped(trace["fillcolor"])}"/>')
    line = trace.get("line") or {}
    if "lines" in mode and line.get("width") != 0:
        dash = DASHES.get(line.get("dash") or "")
        stroke = f' stroke-dasharray="{dash}"' if dash else ""
        look = f'stroke="{escaped(line.get("color"))}" stroke-width="{line.get("width") or 2:g}"{stroke}'
        parts.append(f'<path d="{_path(px, py)}" fill="none" stroke-linejoin="round" {look}/>')
    if "markers" in mode:
        parts += _markers(trace, px, py)
    if "text" in mode:
        parts += _texts(trace, px, py)
    return parts


def _numbers(values: Sequence[Any] | None) -> np.ndarray:
    values = [] if values is None else values
    return np.array([np.nan if value is None else value for value in values], dtype=np.float64)


def _path(px: np.ndarray, py: np.ndarray) -> str:
    """Straight segments; a value that is not a number lifts the pen."""
    parts, pen = [], "M"
    for a, b in zip(px, py, strict=True):
        if not (math.isfinite(a) and math.isfinite(b)):
            pen = "M"
            continue
        parts.append(f"{pen}{a:.1f} {b:.1f}")
        pen = "L"
    return "".join(parts)


def _each(value: Any, n: int) -> list[Any]:
    return list(value) if isinstance(value, list | tuple | np.ndarray) else [value] * n


def _markers(trace: Mapping[str, Any], px: np.ndarray, py: np.ndarray) -> list[str]:
    marker = trace.get("marker") or {}
    fallback, edge = (trace.get("line") or {}).get("color"), marker.get("line") or {}
    looks = zip(
        *(_each(marker.get(name), len(px)) for name in ("symbol", "size", "color")),
        px,
        py,
        strict=True,
    )
    outline = (
        f' stroke="{escaped(edge["color"])}" stroke-width="{edge.get("width") or 1:g}"'
        if edge.get("color")
        else ""
    )
    return [
        marker_element(symbol or "circle", a, b, float(size or 6), colour or fallback or "#5a6470", outline)
        for symbol, size, colour, a, b in looks
        if math.isfinite(a) and math.isfinite(b)
    ]


def marker_element(symbol: str, x: float, y: float, size: float, colour: str, outline: str = "") -> str:
    """One marker; `-open` symbols are drawn by their edge."""
    half, colour = size / 2, escaped(colour)
    is_open = symbol.endswith("-open")
    look = f'fill="none" stroke="{colour}" stroke-width="1.3"' if is_open else f'fill="{colour}"{outline}'
    corners = MARKERS.get(symbol.removesuffix("-open"))
    if corners is None:
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{half:g}" {look}/>'
    points = " ".join(f"{x + half * a:.1f},{y + half * b:.1f}" for a, b in corners)
    return f'<polygon points="{points}" {look}/>'


def _texts(trace: Mapping[str, Any], px: np.ndarray, py: np.ndarray) -> list[str]:
    font, n = trace.get("textfont") or {}, len(px)
    colours, sizes = _each(font.get("color"), n), _each(font.get("size"), n)
    places = _each(trace.get("textposition") or "middle center", n)
    found = []
    for k, text in enumerate(_each(trace.get("text"), n)):
        if text in (None, "") or not (math.isfinite(px[k]) and math.isfinite(py[k])):
            continue
        up, baseline = PLACES[places[k].split()[0]]
        look = {"color": colours[k], "size": sizes[k], "family": font.get("family")}
        found.append(text_element(text, px[k], py[k] + 12 * up, look, baseline=baseline))
    return found


def bars(traces: Sequence[Mapping[str, Any]], x: Axis, y: Axis, layout: Mapping[str, Any]) -> list[str]:
    """Bars of all traces in groups side by side, with their fills and error bars."""
    width = (1 - float(layout.get("bargap") or 0.2)) / max(len(traces), 1)
    zero, parts = float(y(0)), []
    for k, trace in enumerate(traces):
        marker = trace.get("marker") or {}
        colours = _each(marker.get("color"), len(trace["y"]))
        shape = (marker.get("pattern") or {}).get("shape") or ""
        if shape:
            parts.append(
                fill_pattern(
                    f"fill{k}", shape, str(colours[0]), marker["pattern"].get("fgcolor") or "#ffffff"
                )
            )
        errors = (trace.get("error_y") or {}).get("array")
        for n, (place, value) in enumerate(zip(_bar_places(trace["x"]), _numbers(trace["y"]), strict=True)):
            if not math.isfinite(value):
                continue
            left = place + (k - len(traces) / 2) * width
            a, b, top = float(x(left)), float(x(left + width)), float(y(value))
            box = f'x="{a:.1f}" y="{min(top, zero):.1f}" width="{b - a:.1f}" height="{abs(top - zero):.1f}"'
            parts.append(f'<rect {box} fill="{f"url(#fill{k})" if shape else escaped(colours[n])}"/>')
            if errors is not None:
                ends = [float(end) for end in y(np.array([value - errors[n], value + errors[n]]))]
                middle, ink = (a + b) / 2, escaped(layout["font"]["color"])
                parts.append(
                    f'<path d="M{middle:.1f} {ends[0]:.1f}V{ends[1]:.1f}" stroke="{ink}" stroke-width="1.2"/>'
                )
    return parts


def _bar_places(x: Sequence[Any]) -> list[float]:
    """Numbers as they are; names by their order."""
    return [float(n) if isinstance(value, str) else float(value) for n, value in enumerate(x)]


def fill_pattern(name: str, shape: str, colour: str, line: str) -> str:
    """A hatched or dotted fill, named so that bars can use it."""
    strokes = {
        "/": "M0 7L7 0",
        "\\": "M0 0L7 7",
        "x": "M0 7L7 0M0 0L7 7",
        "-": "M0 3.5H7",
        "+": "M0 3.5H7M3.5 0V7",
    }
    drawn = f'<circle cx="3.5" cy="3.5" r="1.3" fill="{escaped(line)}"/>'
    if shape in strokes:
        drawn = f'<path d="{strokes[shape]}" stroke="{escaped(line)}" stroke-width="1.3"/>'
    ground = f'<rect width="7" height="7" fill="{escaped(colour)}"/>'
    return (
        f'<pattern id="{name}" width="7" height="7" patternUnits="userSpaceOnUse">{ground}{drawn}</pattern>'
    )
