"""One axis of a figure: from values to pixels, with its ticks, grid and title."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from interp.figures.still.words import text_element, width_of


@dataclass(frozen=True, kw_only=True)
class Axis:
    """`low` and `high` are the values at `start` and `stop` pixels; `across` are the pixels of its plot at
    the axis' side and at the other one."""

    kind: str
    low: float
    high: float
    start: float
    stop: float
    across: tuple[float, float]
    layout: Mapping[str, Any]

    def __call__(self, value: Any) -> np.ndarray:
        """Pixels of values."""
        share = (np.asarray(value, dtype=np.float64) - self.low) / (self.high - self.low)
        return self.start + share * (self.stop - self.start)

    def share(self, part: float) -> float:
        """Pixels of a share of the axis' length, from its low end."""
        return self.start + part * (self.stop - self.start)

    def ticks(self) -> tuple[list[float], list[str]]:
        """Places and labels: those given, or round numbers."""
        given = self.layout.get("tickvals")
        if given is not None:
            values = [float(value) for value in given]
            texts = self.layout.get("ticktext")
            labels = [f"{v:g}" for v in values] if texts is None else [str(text) for text in texts]
        else:
            step = self.layout.get("dtick") or _round_step(
                abs(self.high - self.low), self.layout.get("nticks") or 7
            )
            first, last = sorted((self.low, self.high))
            values = (
                np.arange(np.ceil(first / step - 1e-9), np.floor(last / step + 1e-9) + 1) * step
            ).tolist()
            labels = [_label(value, self.layout.get("tickformat")) for value in values]
        inside = [
            k for k, v in enumerate(values) if min(self.low, self.high) <= v <= max(self.low, self.high)
        ]
        return [values[k] for k in inside], [labels[k] for k in inside]

    def drawn(self) -> list[str]:
        """Grid below everything, line, ticks, labels and title."""
        layout, parts = self.layout, []
        values, labels = self.ticks()
        near, far = self.across
        if layout.get("showgrid", True) and not layout.get("overlaying"):
            parts += [self._line(v, near, far, layout.get("gridcolor", "#e4e7eb"), 1) for v in values]
        if layout.get("zeroline") and min(self.low, self.high) <= 0 <= max(self.low, self.high):
            parts.append(self._line(0, near, far, layout.get("zerolinecolor", "#888888"), 1))
        # As in plotly: a line with a colour is drawn unless it is turned off.
        if layout.get("showline", "linecolor" in layout):
            ends = self.start, self.stop
            parts.append(_segment(self.kind, *ends, near, near, layout.get("linecolor", "#888888"), 1))
        outward = 4 if self.kind == "x" else -4
        if layout.get("ticks") == "outside":
            parts += [
                self._line(v, near, near + outward, layout.get("tickcolor", "#888888"), 1) for v in values
            ]
        if layout.get("showticklabels", True):
            parts += self._labels(values, labels, near + 2 * outward)
        return [*parts, self._title(labels)]

    def _line(self, value: float, near: float, far: float, colour: str, width: float) -> str:
        at = float(self(value))
        return _segment(self.kind, at, at, near, far, colour, width)

    def _labels(self, values: Sequence[float], labels: Sequence[str], at: float) -> list[str]:
        font, turned = self.layout.get("tickfont") or {}, self.layout.get("tickangle") or 0
        found = []
        for value, label in zip(values, labels, strict=True):
            place = float(self(value))
            if self.kind == "y":
                found.append(text_element(label, at, place, font, anchor="end"))
            elif turned:
                found.append(text_element(label, place, at, font, anchor="end", turned=turned))
            else:
                found.append(text_element(label, place, at, font, baseline="top"))
        return found

    def _title(self, labels: Sequence[str]) -> str:
        title = self.layout.get("title") or {}
        text, font = (
            (title.get("text"), title.get("font") or {}) if isinstance(title, Mapping) else (title, {})
        )
        if not text:
            return ""
        size = float((self.layout.get("tickfont") or {}).get("size") or 12)
        turned = self.layout.get("tickangle") or self.kind == "y"
        reach = max((width_of(label, size) for label in labels), default=0) if turned else 1.2 * size
        reach = reach if self.layout.get("showticklabels", True) else 0
        middle = (self.start + self.stop) / 2
        if self.kind == "x":
            return text_element(text, middle, self.across[0] + reach + 16, font, baseline="top")
        lines = str(text).count("<br>")
        return text_element(text, self.across[0] - reach - 20 - 8 * lines, middle, font, turned=-90)


def _segment(kind: str, a: float, b: float, near: float, far: float, colour: str, width: float) -> str:
    """A line between pixels (a, near) and (b, far), along and across the axis."""
    x1, y1, x2, y2 = (a, near, b, far) if kind == "x" else (near, a, far, b)
    line = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
    return f'<line {line} stroke="{colour}" stroke-width="{width:g}"/>'


def _round_step(length: float, n_most: int) -> float:
    raw = length / max(n_most, 2) or 1.0
    power = 10.0 ** np.floor(np.log10(raw))
    return float(next(lead for lead in (1, 2, 5, 10) if lead * power >= raw * (1 - 1e-9)) * power)


def _label(value: float, form: str | None) -> str:
    text = f"{value:+.0f}" if form == "+d" else f"{0.0 if abs(value) < 1e-12 else value:.6g}"
    return text.replace("-", "−")
