"""Text of a plotly figure as SVG text: its few tags read, everything else escaped."""

import html
import re
from collections.abc import Mapping
from typing import Any

# What XML 1.0 cannot hold, escaped or not.
_FORBIDDEN = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_TAG = re.compile(r"</?([a-z]+)[^<>]*>", re.IGNORECASE)
ANCHORS = {"left": "start", "center": "middle", "right": "end"}


def escaped(text: object) -> str:
    """Any text as XML character data, fit for attributes too."""
    return html.escape(_FORBIDDEN.sub("�", str(text)), quote=True)


def lines_of(text: object) -> list[list[tuple[str, bool]]]:
    """(words, bold) runs of each line: `<br>` and `<b>` are read, other tags left out, entities resolved."""
    found: list[list[tuple[str, bool]]] = [[]]
    bold, at, text = False, 0, str(text)
    for tag in _TAG.finditer(text):
        found[-1].append((text[at : tag.start()], bold))
        at, name = tag.end(), tag[1].lower()
        if name == "br":
            found.append([])
        elif name == "b":
            bold = not tag[0].startswith("</")
    found[-1].append((text[at:], bold))
    return [[(html.unescape(words), strong) for words, strong in line if words] for line in found]


def width_of(text: object, size: float) -> float:
    """About how wide the longest line is, in pixels."""
    return 0.58 * size * max(sum(len(words) for words, _ in line) for line in lines_of(text))


def text_element(
    text: object,
    x: float,
    y: float,
    font: Mapping[str, Any],
    *,
    anchor: str = "middle",
    baseline: str = "middle",
    turned: float = 0,
) -> str:
    """Lines of text around a point; `baseline` is where the point lies: top, middle or bottom."""
    rows, size = lines_of(text), float(font.get("size") or 12)
    if not any(rows):
        return ""
    step = 1.25 * size
    first = {"top": 0.85 * size, "middle": 0.35 * size - (len(rows) - 1) * step / 2}
    top = y + first.get(baseline, -0.25 * size - (len(rows) - 1) * step)
    spans = "".join(
        f'<tspan x="{x:.1f}" y="{top + k * step:.1f}">'
        + "".join(
            f'<tspan font-weight="600">{escaped(words)}</tspan>' if bold else escaped(words)
            for words, bold in row
        )
        + "</tspan>"
        for k, row in enumerate(rows)
    )
    face = f' font-family="{escaped(font["family"])}"' if font.get("family") else ""
    turn = f' transform="rotate({turned:g} {x:.1f} {y:.1f})"' if turned else ""
    colour = escaped(font.get("color") or "#1c2128")
    return f'<text text-anchor="{anchor}" font-size="{size:g}" fill="{colour}"{face}{turn}>{spans}</text>'
