"""Small multiples of attention maps: layers down, heads across, one colour scale."""

from collections.abc import Mapping

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from interp.figures.downsample import add_note, block_extremes, block_note, causal_blank
from interp.figures.given import checked_limit, numbers
from interp.figures.theme import colour_bar, scale, style, theme_of

MOST_PANELS = 144


def head_grid(
    maps: Mapping[tuple[int, int], np.ndarray],
    *,
    limit: float | None = None,
    quantity: str = "attention",
    mode: str = "light",
    title: str | None = None,
) -> go.Figure:
    """Maps [dest src] by (layer, head), each in its place; all share one scale, stated on the colour bar.

    Maps longer than a panel has pixels (110 to 200) are drawn as block extremes, which a note states.

    Args:
        maps: At most 144 square arrays.
        limit: Upper end of the colours; default the largest absolute weight of all maps.
        quantity: Name on the colour bar.
        mode: `light` or `dark`.
        title: Of the figure.

    Raises:
        ValueError: no map, more than 144, one that is not square and finite (named), or a limit that is not
            positive and finite.
    """
    if not 1 <= len(maps) <= MOST_PANELS:
        raise ValueError(f"a head grid takes 1 to {MOST_PANELS} maps; got {len(maps)}")
    maps = {place: numbers(weights, f"the map of layer, head {place}") for place, weights in maps.items()}
    for place, weights in maps.items():
        if np.ndim(weights) != 2 or len({*np.shape(weights)}) != 1 or not np.isfinite(weights).all():
            raise ValueError(
                f"the map of layer, head {place} has shape {np.shape(weights)}; accepted: square, finite"
            )
    theme = theme_of(mode)
    layers, heads = (sorted({place[axis] for place in maps}) for axis in (0, 1))
    signed = any(np.min(weights) < 0 for weights in maps.values())
    top = checked_limit(limit) or max(float(np.abs(weights).max()) for weights in maps.values()) or 1.0
    side, largest = max(110, min(200, 900 // len(heads))), 1
    figure = make_subplots(
        rows=len(layers),
        cols=len(heads),
        horizontal_spacing=0.12 / len(heads),
        vertical_spacing=0.2 / len(layers),
    )
    for (layer, head), weights in maps.items():
        # A panel shows no more cells than it has pixels.
        z, block = block_extremes(np.asarray(weights, dtype=np.float32), most=side)
        z, largest = causal_blank(z), max(largest, block)
        place = {"row": layers.index(layer) + 1, "col": heads.index(head) + 1}
        figure.add_heatmap(
            z=z, coloraxis="coloraxis", hovertemplate="@%{y} reads @%{x}: %{z:.3f}<extra></extra>", **place
        )
        figure.update_yaxes(
            range=[len(z) - 0.5, -0.5], title_text=f"L{layer}" if head == heads[0] else None, **place
        )
        figure.update_xaxes(
            range=[-0.5, len(z) - 0.5], title_text=f"H{head}" if layer == layers[-1] else None, **place
        )
    style(figure, theme, title=title, height=side * len(layers) + 110)
    add_note(figure, block_note(largest), theme)
    figure.update_xaxes(showticklabels=False, showgrid=False, ticks="", constrain="domain")
    figure.update_yaxes(showticklabels=False, showgrid=False, ticks="")
    figure.update_layout(
        plot_bgcolor=theme.missing,
        coloraxis={
            "cmin": -top if signed else 0.0,
            "cmax": top,
            "colorscale": scale(theme.diverging if signed else theme.sequential),
            "colorbar": colour_bar(theme, quantity),
        },
    )
    return figure
