"""Names beside the right ends of lines, spread so that they do not overlap."""

from collections.abc import Iterable, Sequence

import plotly.graph_objects as go


def spread(ends: Sequence[float], *, gap: float, low: float, high: float) -> list[float]:
    """Places near `ends`, each at least `gap` from the next, inside [low, high] where they fit."""
    order = sorted(range(len(ends)), key=lambda index: ends[index])
    placed: list[list] = []
    for index in order:
        placed.append([[index], min(max(ends[index], low), high)])
        # Overlapping blocks of labels join and move to the middle of where their members want to be.
        while len(placed) > 1 and _bottom(placed[-1], gap) < _top(placed[-2], gap) + gap:
            upper, lower = placed.pop(), placed.pop()
            members = lower[0] + upper[0]
            wanted = [
                min(max(ends[m], low), high) - gap * (k - (len(members) - 1) / 2)
                for k, m in enumerate(members)
            ]
            half = gap * (len(members) - 1) / 2
            middle = sum(wanted) / len(wanted)
            placed.append([members, min(max(middle, low + half), max(high - half, low + half))])
    places = [0.0] * len(ends)
    for members, middle in placed:
        for k, member in enumerate(members):
            places[member] = middle + gap * (k - (len(members) - 1) / 2)
    return places


def _bottom(block: list, gap: float) -> float:
    return block[1] - gap * (len(block[0]) - 1) / 2


def _top(block: list, gap: float) -> float:
    return block[1] + gap * (len(block[0]) - 1) / 2


def room_for(texts: Iterable[str], *, size: int = 12) -> int:
    """Right margin, in pixels, that the longest label needs."""
    return 22 + round(0.62 * size * max((len(text) for text in texts), default=0))


def label_ends(
    figure: go.Figure,
    labels: Sequence[tuple[str, float, str]],
    *,
    yref: str = "y",
    y_range: tuple[float, float],
    panel_px: float,
    size: int = 12,
) -> None:
    """Add `(text, y, colour)` labels in the right margin, beside a panel `panel_px` high whose axis spans
    `y_range`."""
    low, high = y_range
    gap = (size + 4) / panel_px * (high - low)
    places = spread([y for _, y, _ in labels], gap=gap, low=low + gap / 2, high=high - gap / 2)
    for (text, _, colour), place in zip(labels, places, strict=True):
        figure.add_annotation(
            text=text,
            x=1,
            y=place,
            xref="paper",
            yref=yref,
            xanchor="left",
            yanchor="middle",
            xshift=8,
            showarrow=False,
            font={"size": size, "color": colour},
        )
