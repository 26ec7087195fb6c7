"""The prompt as text: each token with what the chosen one reads from it, and what reads the chosen one."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from interp.dashboard.sheet import Sheet
from interp.figures.attention_map import induction_targets
from interp.figures.theme import Theme, on_colour, theme_of
from interp.figures.token_text import visible

DIRECTIONS = ("reads", "read_by")
# Longest spelling of one token; hover names it whole.
_LONGEST = 24


@dataclass(frozen=True, kw_only=True)
class TokenCell:
    """One token of the text, its weight and its colours. `text` is plain text that can be seen, not HTML."""

    position: int
    text: str
    weight: float
    background: str
    ink: str
    selected: bool
    target: bool
    title: str


@dataclass(frozen=True, kw_only=True)
class TokenStrip:
    """The whole text in one direction, and the limits of its colours."""

    cells: tuple[TokenCell, ...]
    limits: tuple[float, float]
    quantity: str


def token_strip(
    sheet: Sheet,
    unit: int,
    selected: int,
    *,
    direction: str = "reads",
    targets: bool = True,
    mode: str = "light",
) -> TokenStrip:
    """What the selected token reads from each token ("reads"), or what each reads from it ("read_by").

    Args:
        targets: Mark the induction targets of the selected token (or the tokens whose target it is).

    Raises:
        ValueError: another direction, or a position outside the prompt.
        DetectionError: no such unit.
    """
    if direction not in DIRECTIONS:
        raise ValueError(f"direction {direction!r}; accepted: {', '.join(DIRECTIONS)}")
    if not 0 <= selected < len(sheet.prompt):
        raise ValueError(f"position {selected}; accepted: 0 to {len(sheet.prompt) - 1}")
    weights, theme = sheet.of(unit), theme_of(mode)
    row = weights[selected] if direction == "reads" else weights[:, selected]
    signed = bool(sheet.of(unit).min() < 0)
    top = float(np.abs(row).max())
    limits = (-top if signed else 0.0, top)
    marked = _targets(sheet.prompt.tokens, selected, direction) if targets else set()
    verb = f"@{selected} reads" if direction == "reads" else f"reads @{selected}:"
    shares = (row - limits[0]) / ((limits[1] - limits[0]) or 1.0)
    grounds = colours_at(theme, shares, signed=signed)
    cells = []
    for position, (token, value, share) in enumerate(
        zip(sheet.prompt.tokens, row.tolist(), shares.tolist(), strict=True)
    ):
        name = f"‘{visible(token)}’ @{position}"
        title = f"{verb} {value:.4f} from {name}" if direction == "reads" else f"{name} {verb} {value:.4f}"
        cells.append(
            TokenCell(
                position=position,
                text=visible(token, limit=_LONGEST),
                weight=value,
                background=grounds[position],
                ink=on_colour(theme, share, signed=signed),
                selected=position == selected,
                target=position in marked,
                title=title.replace("-", "−") if value < 0 else title,
            )
        )
    return TokenStrip(cells=tuple(cells), limits=limits, quantity=sheet.quantity)


def strongest(sheet: Sheet, unit: int, selected: int, *, n: int = 3) -> list[tuple[int, float]]:
    """The sources that the selected token reads most from: (position, weight), largest size first."""
    row = sheet.of(unit)[selected]
    order = np.argsort(-np.abs(row), kind="stable")[:n]
    return [(int(place), float(row[place])) for place in order if row[place] != 0]


def start_position(tokens: Sequence[str | bytes]) -> int:
    """The token chosen at first: with an induction target and nearest the middle, else the last."""
    middle = len(tokens) / 2
    found = {dest for dest, _ in induction_targets(tokens)}
    return min(found, key=lambda dest: (abs(dest - middle), dest), default=len(tokens) - 1)


def colours_at(theme: Theme, shares: Float[np.ndarray, " n"], *, signed: bool) -> list[str]:
    """The scale's colours at shares in [0, 1] of its range, each between the two nearest stops."""
    stops = np.array([_rgb(one) for one in (theme.diverging if signed else theme.sequential)])
    places = np.clip(shares, 0.0, 1.0).astype(np.float64) * (len(stops) - 1)
    low = np.minimum(places.astype(int), len(stops) - 2)
    over = (places - low)[:, None]
    mixed = np.rint(stops[low] * (1 - over) + stops[low + 1] * over).astype(int)
    return [f"#{red:02x}{green:02x}{blue:02x}" for red, green, blue in mixed.tolist()]


def _rgb(colour: str) -> list[int]:
    return [int(colour[i : i + 2], 16) for i in (1, 3, 5)]


def _targets(tokens: Sequence[str | bytes], selected: int, direction: str) -> set[int]:
    """Sources that induction of the selected token reads, or destinations whose induction reads it."""
    if direction == "reads":
        return {place + 1 for place in range(selected) if tokens[place] == tokens[selected]}
    if selected == 0:
        return set()
    return {place for place in range(selected, len(tokens)) if tokens[place] == tokens[selected - 1]}
