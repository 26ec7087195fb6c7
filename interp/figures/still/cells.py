"""Heatmaps in still pictures: cells as one small PNG or as rectangles, their text, and the colour bar."""

import base64
import struct
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, UInt8

from interp.figures.still.axis import Axis
from interp.figures.still.words import text_element

Colours = Mapping[str, Any]


def colours_of(trace: Mapping[str, Any], layout: Mapping[str, Any]) -> Colours:
    """Scale, limits and bar of a heatmap: its own, or the shared ones it names."""
    shared = layout.get(trace["coloraxis"], {}) if trace.get("coloraxis") else {}
    z = np.asarray(trace["z"], dtype=np.float64)
    finite = z[np.isfinite(z)]
    low, high = (finite.min(), finite.max()) if finite.size else (0.0, 1.0)
    return {
        "scale": shared.get("colorscale") or trace["colorscale"],
        "low": shared.get("cmin", trace.get("zmin", low)),
        "high": shared.get("cmax", trace.get("zmax", high)),
        "bar": shared.get("colorbar") or trace.get("colorbar") or {},
    }


def rgb(values: Float[np.ndarray, "*cells"], colours: Colours) -> UInt8[np.ndarray, "*cells 4"]:
    """Red, green, blue and opacity of each value; NaN is clear."""
    stops = np.array([stop for stop, _ in colours["scale"]], dtype=np.float64)
    table = np.array([_hex(colour) for _, colour in colours["scale"]], dtype=np.float64)
    span = (colours["high"] - colours["low"]) or 1.0
    share = np.clip((np.nan_to_num(values) - colours["low"]) / span, 0, 1)
    channels = [np.interp(share, stops, table[:, k]) for k in range(3)]
    return np.stack([*channels, np.where(np.isfinite(values), 255, 0)], axis=-1).round().astype(np.uint8)


def _hex(colour: str) -> tuple[int, int, int]:
    return tuple(int(colour[i : i + 2], 16) for i in (1, 3, 5))


def heatmap(trace: Mapping[str, Any], x: Axis, y: Axis, layout: Mapping[str, Any]) -> list[str]:
    """The cells of one heatmap trace, and the text in them."""
    z = np.array([[np.nan if v is None else v for v in row] for row in trace["z"]], dtype=np.float64)
    colours, (rows, columns) = colours_of(trace, layout), z.shape
    pixels = rgb(z, colours)
    xs, ys = (_edges(trace.get(name), n) for name, n in (("x", columns), ("y", rows)))
    if trace.get("xgap") or trace.get("ygap"):
        gap = trace.get("xgap") or 0, trace.get("ygap") or 0
        parts = [
            _cell(pixels[i, j], x(xs[j : j + 2]), y(ys[i : i + 2]), gap) for i, j in np.ndindex(rows, columns)
        ]
    else:
        parts = [_image(pixels, x(xs[[0, -1]]), y(ys[[0, -1]]))]
    if trace.get("texttemplate") and trace.get("text") is not None:
        size = float((trace.get("textfont") or {}).get("size") or 10)
        for i, row in enumerate(trace["text"]):
            middle = float(y(ys[i : i + 2]).mean())
            parts += [
                text_element(
                    text, float(x(xs[j : j + 2]).mean()), middle, {"size": size, "color": _ink(pixels[i, j])}
                )
                for j, text in enumerate(row)
                if text
            ]
    return parts


def _edges(centres: Sequence[float] | None, n: int) -> np.ndarray:
    centres = np.arange(n) if centres is None else np.asarray(centres, dtype=np.float64)
    step = centres[1] - centres[0] if n > 1 else 1.0
    return np.append(centres - step / 2, centres[-1] + step / 2)


def _cell(pixel: np.ndarray, x: np.ndarray, y: np.ndarray, gap: tuple[float, float]) -> str:
    if not pixel[3]:
        return ""
    width, height = abs(x[1] - x[0]) - gap[0], abs(y[1] - y[0]) - gap[1]
    place = f'x="{x.min() + gap[0] / 2:.1f}" y="{y.min() + gap[1] / 2:.1f}"'
    size = f'width="{max(width, 0.5):.1f}" height="{max(height, 0.5):.1f}"'
    return f'<rect {place} {size} fill="{_css(pixel)}"/>'


def _css(pixel: np.ndarray) -> str:
    return "#" + "".join(f"{channel:02x}" for channel in pixel[:3])


def _ink(pixel: np.ndarray) -> str:
    luminance = (np.array([0.2126, 0.7152, 0.0722]) * (pixel[:3] / 255.0) ** 2.2).sum()
    return "#12161b" if luminance > 0.2 else "#ffffff"


def _image(pixels: UInt8[np.ndarray, "row column 4"], x: np.ndarray, y: np.ndarray) -> str:
    """One PNG over all cells; turned where an axis runs backwards."""
    turned = pixels[:: 1 if y[0] < y[1] else -1, :: 1 if x[0] < x[1] else -1]
    rows, columns = turned.shape[:2]
    lines = b"".join(b"\0" + turned[i].tobytes() for i in range(rows))
    header = struct.pack(">IIBBBBB", columns, rows, 8, 6, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(lines, 9)), (b"IEND", b""))
    packed = [
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in chunks
    ]
    png = b"\x89PNG\r\n\x1a\n" + b"".join(packed)
    place = f'x="{x.min():.1f}" y="{y.min():.1f}" width="{np.ptp(x):.1f}" height="{np.ptp(y):.1f}"'
    return (
        f'<image {place} preserveAspectRatio="none" style="image-rendering:pixelated" '
        f'href="data:image/png;base64,{base64.b64encode(png).decode()}"/>'
    )


def colour_bar(colours: Colours, *, left: float, top: float, height: float, name: str) -> list[str]:
    """The bar beside the plot: lowest colour at its foot, ticks, quantity."""
    bar, scale = colours["bar"], colours["scale"]
    length = height * float(bar.get("len") or 1.0)
    top += (height - length) / 2
    stops = "".join(f'<stop offset="{100 * at:.0f}%" stop-color="{colour}"/>' for at, colour in scale)
    thick, font = float(bar.get("thickness") or 12), bar.get("tickfont") or {}
    gradient = f'<linearGradient id="{name}" x1="0" y1="1" x2="0" y2="0">{stops}</linearGradient>'
    box = f'x="{left:.1f}" y="{top:.1f}" width="{thick:g}" height="{length:.1f}"'
    values = bar.get("tickvals")
    values = [colours["low"], colours["high"]] if values is None else list(values)
    texts = bar.get("ticktext")
    texts = [f"{value:.3g}".replace("-", "−") for value in values] if texts is None else list(texts)
    span = (colours["high"] - colours["low"]) or 1.0
    parts = [gradient, f'<rect {box} fill="url(#{name})"/>']
    for value, text in zip(values, texts, strict=True):
        at = top + length * (1 - (value - colours["low"]) / span)
        parts.append(text_element(text, left + thick + 5, at, font, anchor="start"))
    title = bar.get("title") or {}
    words, look = title.get("text"), title.get("font") or {}
    return [*parts, text_element(words or "", left + thick + 44, top + length / 2, look, turned=-90)]
