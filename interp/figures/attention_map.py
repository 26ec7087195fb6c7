"""One unit's weights on one sequence: destination on y, source on x, tokens as labels."""

from collections.abc import Sequence

import numpy as np
import plotly.graph_objects as go

from interp.figures.downsample import MOST_CELLS, add_note, block_extremes, block_note, causal_blank
from interp.figures.given import checked_count, checked_limit, checked_tokens, numbers
from interp.figures.theme import Theme, colour_bar, scale, style, theme_of
from interp.figures.token_text import label

# Up to this many tokens every one is labelled; beyond, every k-th (hover always names both).
MOST_LABELS = 64
# Above this many, labels need a large figure.
MOST_SMALL = 36
# Negative weights of at least this share of the limit carry a minus sign, for readers and prints without
# colour.
MARKED_SHARE = 0.1
SIGN_TEXT = {"texttemplate": "%{text}", "textfont": {"size": 10}}


def attention_map(
    matrix: np.ndarray | Sequence[Sequence[float]],
    tokens: Sequence[str | bytes],
    *,
    targets: bool = True,
    limit: float | None = None,
    signed: bool | None = None,
    most: int = MOST_CELLS,
    quantity: str = "attention",
    mode: str = "light",
    title: str | None = None,
) -> go.Figure:
    """Heatmap of weights [dest src].

    Args:
        matrix: [n n]; entry [i, j] is what destination i reads from source j. Entries above the diagonal
            that are zero are left blank.
        tokens: The n tokens; escaped, whitespace and control characters made visible.
        targets: Outline the induction targets: sources j whose previous token is an earlier copy of token i.
        limit: Upper end of the colours (and, for signed weights, minus the lower end); default the largest
            absolute weight. It is stated on the colour bar.
        signed: Use the diverging scale; default when some weight is negative.
        most: Cells a side; longer sequences are drawn as block extremes.
        quantity: Name on the colour bar.
        mode: `light` or `dark`.
        title: Of the figure.

    Returns:
        Heatmap (z as given up to `most` tokens, else block extremes, which a note states), outlines of the
        targets. Signed weights get symmetric limits, and their clearly negative cells a minus sign.

    Raises:
        ValueError: the matrix is not square, does not fit the tokens, or holds a value that is not real and
            finite; tokens that are no text; a limit that is not positive and finite; `most` below 1.
    """
    weights = _checked(matrix, tokens)
    theme, n = theme_of(mode), len(tokens)
    signed = bool(weights.min() < 0) if signed is None else signed
    top = checked_limit(limit) or float(np.abs(weights).max()) or 1.0
    shown, block = block_extremes(weights, most=checked_count(most, "most"))
    z = causal_blank(shown)
    ends = [-top, 0, top] if signed else [0, top / 2, top]
    centres = np.arange(len(z)) * block + (block - 1) / 2
    figure = go.Figure(
        go.Heatmap(
            z=z,
            x=centres,
            y=centres,
            zmin=-top if signed else 0.0,
            zmax=top,
            colorscale=scale(theme.diverging if signed else theme.sequential),
            colorbar=colour_bar(theme, quantity)
            | {"tickvals": ends, "ticktext": [_number(end) for end in ends]}
            | {"len": 0.7},
            **({"text": negative_signs(z, top), **SIGN_TEXT} if signed and n <= MOST_LABELS else {}),
            hoverongaps=False,
            name=quantity,
            hoverlabel={"align": "left"},
            hovertemplate="destination %{y}<br>reads source %{x}<br><b>%{z:.4f}</b><extra></extra>",
        )
    )
    outlined = induction_targets(tokens) if targets and block == 1 else []
    _outlines(figure, outlined, len(tokens), theme.ink if signed else theme.outline)
    style(figure, theme, title=title)
    add_note(figure, block_note(block), theme)
    _axes(figure, tokens, centres, theme)
    return figure


def _checked(matrix: np.ndarray | Sequence[Sequence[float]], tokens: Sequence[str | bytes]) -> np.ndarray:
    weights = numbers(matrix, "matrix")
    checked_tokens(tokens)
    if (
        weights.ndim != 2
        or weights.shape[0] != weights.shape[1]
        or len(weights) != len(tokens)
        or not len(tokens)
    ):
        raise ValueError(
            f"matrix has shape {weights.shape} for {len(tokens)} tokens; accepted: [n n] for n >= 1 tokens"
        )
    if not np.isfinite(weights).all():
        dest, src = np.argwhere(~np.isfinite(weights))[0]
        raise ValueError(
            f"matrix holds {weights[dest, src]} at destination {dest}, source {src}; it must be finite"
        )
    return weights


def negative_signs(z: np.ndarray, top: float) -> list[list[str]]:
    """A minus sign for every clearly negative cell, beside the limit `top`."""
    return np.where(z <= -MARKED_SHARE * top, "−", "").tolist()


def _number(value: float) -> str:
    return f"{value:.2g}".replace("-", "−")


def induction_targets(tokens: Sequence[str | bytes]) -> list[tuple[int, int]]:
    """All (dest, src) with src the position after an earlier copy of dest's token, by token equality."""
    places: dict[str | bytes, list[int]] = {}
    found = []
    for dest, token in enumerate(tokens):
        found += [(dest, earlier + 1) for earlier in places.get(token, [])]
        places.setdefault(token, []).append(dest)
    return found


def _outlines(figure: go.Figure, places: list[tuple[int, int]], n: int, colour: str) -> None:
    """One trace of squares, on the label axes; drawn even when empty, because axes without a trace are
    not."""
    x: list[float | None] = [None]
    y: list[float | None] = [None]
    for dest, src in places:
        x += [src - 0.5, src + 0.5, src + 0.5, src - 0.5, src - 0.5, None]
        y += [dest - 0.5, dest - 0.5, dest + 0.5, dest + 0.5, dest - 0.5, None]
    figure.add_scatter(
        x=x,
        y=y,
        xaxis="x2",
        yaxis="y2",
        mode="lines",
        line={"color": colour, "width": 1.6 if n <= MOST_LABELS else 0.6},
        name="induction targets",
        hoverinfo="skip",
    )


def _axes(figure: go.Figure, tokens: Sequence[str | bytes], centres: np.ndarray, theme: Theme) -> None:
    """The heatmap's axes name every token for the hover and are hidden; thinned labels stand on axes over
    them."""
    n = len(tokens)
    stride = 1 if n <= MOST_LABELS else next(k for k in (5, 10, 20, 25, 50, 100, 250, 10**9) if n / k <= 14)
    thin = list(range(0, n, stride))
    texts = [label(tokens[i], limit=8) for i in thin] if stride == 1 else [f"{i}" for i in thin]
    named = np.clip(centres.round().astype(int), 0, n - 1)
    full = [f"‘{label(tokens[i], limit=24)}’ @{i}" for i in named]
    size = 11 if n <= MOST_SMALL or stride > 1 else 9
    shared = {
        "showgrid": False,
        "zeroline": False,
        "showline": False,
        "ticks": "",
        "tickmode": "array",
        "automargin": False,
    }
    labels = {"tickvals": thin, "ticktext": texts, "tickfont": {"size": size, "color": theme.muted}}
    hidden = {"tickvals": centres, "ticktext": full, "showticklabels": False}
    across, down = {"range": [-0.5, n - 0.5]}, {"range": [n - 0.5, -0.5]}
    kind = " token" if stride == 1 else " position"
    font = {"size": 13, "color": theme.ink}

    def named_axis(text: str) -> dict:
        return {"title": {"text": text + kind, "standoff": 8, "font": font}}

    over_x = {"overlaying": "x", "matches": "x", "side": "bottom", "tickangle": -90 if stride == 1 else 0}
    over_y = {"overlaying": "y", "matches": "y", "side": "left"}
    reach = round(0.62 * size * max(len(text) for text in texts)) + 44
    margin = {
        "l": reach,
        "r": 104,
        "t": (44 if figure.layout.title.text else 14) + (14 if figure.layout.annotations else 0),
        "b": reach if stride == 1 else 58,
    }
    side = min(max(17 * n, 340), 700) if stride == 1 else 520
    figure.update_layout(
        xaxis={**shared, **hidden, **across},
        yaxis={**shared, **hidden, **down},
        xaxis2={**shared, **labels, **across, **over_x, **named_axis("source")},
        yaxis2={**shared, **labels, **down, **over_y, **named_axis("destination")},
        showlegend=False,
        margin=margin,
        # A fixed size keeps cells square; the overlaid axes would not follow a constrained aspect.
        autosize=False,
        width=side + margin["l"] + margin["r"],
        height=side + margin["t"] + margin["b"],
    )
