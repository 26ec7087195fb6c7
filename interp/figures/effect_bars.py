"""One bar a name: effects of patches, ablations or steering, with their standard errors."""

from collections.abc import Mapping

import plotly.graph_objects as go

from interp.figures.given import with_gaps
from interp.figures.theme import style, theme_of
from interp.figures.token_text import label

MOST_BARS = 40


def effect_bars(
    values: Mapping[str, float],
    *,
    errors: Mapping[str, float] | None = None,
    quantity: str = "effect",
    mode: str = "light",
    title: str | None = None,
) -> go.Figure:
    """Bars in the order given.

    Args:
        values: At most 40, by name; NaN leaves its place empty.
        errors: Standard errors by name, of all values; drawn as lines through the ends of bars.
        quantity: Name of the y axis, with its unit.
        mode: `light` or `dark`.
        title: Of the figure.

    Raises:
        ValueError: no value, or more than 40; an infinite one; a value without its error.
    """
    if not 1 <= len(values) <= MOST_BARS:
        raise ValueError(f"bars take 1 to {MOST_BARS} values; got {len(values)}")
    heights = with_gaps(list(values.values()), "values")
    if missing := [name for name in values if errors is not None and name not in errors]:
        raise ValueError(f"errors have none of {missing[0]!r}; accepted: one for each value, or no errors")
    theme, names = theme_of(mode), [label(name, limit=28).replace("␣", " ") for name in values]
    figure = go.Figure(
        go.Bar(
            x=list(range(len(names))),
            y=heights,
            error_y=None
            if errors is None
            else {
                "type": "data",
                "array": with_gaps([errors[name] for name in values], "errors"),
                "color": theme.ink,
                "thickness": 1.2,
            },
            text=names,
            textposition="none",
            marker={"color": theme.series[0]},
            hovertemplate="%{text}<br>%{y:.3f}<extra></extra>",
        )
    )
    # About as many letters as stand below one another without touching.
    turned = len(names) * max(len(name) for name in names) > 84
    style(figure, theme, title=title, height=300 + (60 if turned else 0))
    angle = {"tickangle": -90} if turned else {}
    figure.update_xaxes(
        tickmode="array", tickvals=list(range(len(names))), ticktext=names, showgrid=False, **angle
    )
    figure.update_yaxes(title_text=quantity, zeroline=True, zerolinecolor=theme.muted, zerolinewidth=1)
    figure.update_layout(bargap=0.35, showlegend=False, margin={"b": 120 if turned else 48})
    return figure
