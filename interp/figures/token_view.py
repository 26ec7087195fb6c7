"""A sequence as running text, every token coloured by a weight: what one token reads, or what reads it."""

from collections.abc import Sequence

import numpy as np
import plotly.graph_objects as go

from interp.figures.attention_map import MARKED_SHARE
from interp.figures.given import checked_count, checked_limit, checked_tokens, numbers
from interp.figures.theme import MONOSPACE, colour_bar, on_colour, scale, style, theme_of
from interp.figures.token_text import label
from models.whole import is_whole


def token_view(
    weights: np.ndarray | Sequence[float],
    tokens: Sequence[str | bytes],
    *,
    selected: int | None = None,
    n_columns: int = 16,
    limit: float | None = None,
    quantity: str = "attention",
    mode: str = "light",
    title: str | None = None,
) -> go.Figure:
    """Tokens in reading order, `n_columns` a row; clearly negative weights carry a minus sign.

    Args:
        weights: [n] one for each token; negative ones give the diverging scale with symmetric limits.
        tokens: The n tokens, escaped and made visible.
        selected: Position outlined: the token that reads or is read.
        n_columns: Tokens a row.
        limit: Upper end of the colours, default the largest absolute weight; stated on the colour bar.
        quantity: Name on the colour bar.
        mode: `light` or `dark`.
        title: Of the figure.

    Raises:
        ValueError: weights and tokens differ in number or are none, `selected` lies outside, `n_columns` is
            below 1, or a limit that is not positive and finite.
    """
    values, n = numbers(weights, "weights"), len(checked_tokens(tokens))
    if values.shape != (n,) or not n or not np.isfinite(values).all():
        raise ValueError(f"weights have shape {values.shape} for {n} tokens; accepted: [n], finite, n >= 1")
    if selected is not None and not (is_whole(selected) and 0 <= selected < n):
        raise ValueError(f"selected {selected}; accepted: 0 to {n - 1}")
    checked_count(n_columns, "n_columns")
    theme, signed = theme_of(mode), bool(values.min() < 0)
    top = checked_limit(limit) or float(np.abs(values).max()) or 1.0
    low = -top if signed else 0.0
    rows = -(-n // n_columns)
    z = np.full(rows * n_columns, np.nan)
    z[:n] = values
    names = [label(token, limit=None) for token in tokens]
    blank = [""] * (rows * n_columns - n)
    figure = go.Figure(
        go.Heatmap(
            z=z.reshape(rows, n_columns),
            zmin=low,
            zmax=top,
            colorscale=scale(theme.diverging if signed else theme.sequential),
            colorbar=colour_bar(theme, quantity)
            | {"tickvals": [low, (low + top) / 2, top], "tickformat": ".2~g"},
            customdata=np.array([f"@{i} ‘{name}’" for i, name in enumerate(names)] + blank).reshape(
                rows, n_columns
            ),
            hovertemplate="%{customdata}<br>%{z:.4f}<extra></extra>",
            hoverongaps=False,
            xgap=3,
            ygap=5,
        )
    )
    inks = [on_colour(theme, (value - low) / (top - low), signed=signed) for value in values]
    figure.add_scatter(
        x=np.arange(n) % n_columns,
        y=np.arange(n) // n_columns,
        text=[label(token, limit=8) for token in tokens],
        mode="text",
        textfont={"color": inks, "size": 12, "family": MONOSPACE},
        hoverinfo="skip",
    )
    negative = [i for i in range(n) if values[i] <= -MARKED_SHARE * top]
    figure.add_scatter(
        x=[i % n_columns - 0.38 for i in negative],
        y=[i // n_columns - 0.24 for i in negative],
        text=["−"] * len(negative),
        mode="text",
        textfont={"color": [inks[i] for i in negative], "size": 11},
        hoverinfo="skip",
    )
    style(figure, theme, title=title, height=40 * rows + 90)
    figure.update_xaxes(visible=False, range=[-0.5, n_columns - 0.5])
    figure.update_yaxes(visible=False, range=[rows - 0.5, -0.5])
    figure.update_layout(showlegend=False, margin={"l": 10, "r": 10, "t": 48, "b": 14})
    if selected is not None:
        column, row = selected % n_columns, selected // n_columns
        figure.add_shape(
            type="rect",
            x0=column - 0.49,
            x1=column + 0.49,
            y0=row - 0.47,
            y1=row + 0.47,
            line={"color": theme.outline, "width": 2.5},
        )
    return figure
