"""Effects by layer and head, or by layer and position: the grid of a patching sweep."""

from collections.abc import Mapping

import numpy as np
import plotly.graph_objects as go

from interp.figures.given import with_gaps
from interp.figures.score_matrix import MOST_NUMBERED, MOST_NUMBERED_COLUMNS, signed_text
from interp.figures.theme import colour_bar, on_colour, scale, style, theme_of


def effect_matrix(
    values: Mapping[tuple[int, int], float],
    *,
    rows: str = "layer",
    columns: str = "head",
    quantity: str = "effect",
    mode: str = "light",
    title: str | None = None,
) -> go.Figure:
    """Heatmap of effects, the first row on top; places without a value are left blank.

    Args:
        values: By (layer, head), (layer, position) or any other pair of numbers; NaN is left blank.
        rows, columns: What the numbers are.
        quantity: Name on the colour bar, whose limits are symmetric about 0.
        mode: `light` or `dark`.
        title: Of the figure.

    Raises:
        ValueError: no value, or an infinite one.
    """
    if not values:
        raise ValueError("no effect to draw; give at least one")
    theme = theme_of(mode)
    layers, places = (sorted({key[k] for key in values}) for k in (0, 1))
    z = np.full((len(layers), len(places)), np.nan)
    effects = with_gaps(list(values.values()), "values")
    for (layer, place), value in zip(values, effects, strict=True):
        z[layers.index(layer), places.index(place)] = value
    top = float(np.abs(effects[np.isfinite(effects)]).max(initial=0.0)) or 1.0
    figure = go.Figure(
        go.Heatmap(
            z=z,
            zmin=-top,
            zmax=top,
            colorscale=scale(theme.diverging),
            colorbar=colour_bar(theme, quantity) | {"tickvals": [-top, 0, top], "tickformat": ".2~g"},
            xgap=2,
            ygap=2,
            hoverongaps=False,
            customdata=[[layer] * len(places) for layer in layers],
            hovertemplate=f"{rows} %{{customdata}}, {columns} %{{x}}<br>%{{z:.3f}}<extra></extra>",
        )
    )
    if len(places) <= MOST_NUMBERED_COLUMNS and z.size <= MOST_NUMBERED:
        down, across = np.nonzero(np.isfinite(z))
        inks = [
            on_colour(theme, (z[r, h] + top) / (2 * top), signed=True)
            for r, h in zip(down, across, strict=True)
        ]
        figure.add_scatter(
            x=across,
            y=down,
            text=[signed_text(z[r, h]) for r, h in zip(down, across, strict=True)],
            mode="text",
            textfont={"color": inks, "size": 12},
            hoverinfo="skip",
        )
    style(
        figure,
        theme,
        title=title,
        height=(26 if len(layers) > 6 else 44) * len(layers) + (112 if title else 84),
    )
    stride = max(1, -(-len(places) // 16))
    bare = {"showgrid": False, "showline": False, "ticks": "", "tickmode": "array"}
    marks = list(range(0, len(places), stride))
    figure.update_xaxes(
        **bare,
        tickvals=marks,
        ticktext=[str(places[k]) for k in marks],
        range=[-0.5, len(places) - 0.5],
        title_text=columns,
    )
    figure.update_yaxes(
        **bare,
        tickvals=list(range(len(layers))),
        ticktext=[str(layer) for layer in layers],
        range=[len(layers) - 0.5, -0.5],
        title_text=rows,
    )
    figure.update_layout(plot_bgcolor=theme.missing, showlegend=False)
    return figure
