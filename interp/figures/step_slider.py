"""The slider and the play button of figures with one frame a checkpoint."""

from collections.abc import Sequence

import plotly.graph_objects as go

from interp.figures.step_axis import short
from interp.figures.theme import Theme

FRAME_MS = 350
SLIDER_PX = 84


def add_step_slider(
    figure: go.Figure, steps: Sequence[int], theme: Theme, *, left: int = 0, down: int = 0
) -> go.Figure:
    """Controls below a figure whose frames are named by step, the last one shown.

    Args:
        left: Pixels from the left edge of the plot at which the controls begin (negative: over the margin).
        down: Pixels kept free below the plot, for the labels of its axis.
    """
    frame = {"duration": 0, "redraw": True}
    at_once = {"mode": "immediate", "frame": frame, "transition": {"duration": 0}}
    playing = {"mode": "immediate", "fromcurrent": True, "transition": {"duration": 0}}
    playing["frame"] = {"duration": FRAME_MS, "redraw": True}
    names = [str(step) for step in steps]
    buttons = [
        {"label": "Play", "method": "animate", "args": [None, playing]},
        {"label": "Pause", "method": "animate", "args": [[None], at_once]},
    ]
    place = {"x": 0, "xanchor": "left", "y": 0, "yanchor": "top"}
    figure.update_layout(
        sliders=[
            {
                **place,
                "active": len(steps) - 1,
                "currentvalue": {"prefix": "step ", "font": {"size": 13, "color": theme.ink}},
                "font": {"size": 11, "color": theme.muted},
                "pad": {"t": 10 + down, "b": 4, "l": 118 + left},
                "ticklen": 3,
                "tickcolor": theme.muted,
                "bgcolor": theme.grid,
                "activebgcolor": theme.muted,
                "bordercolor": theme.grid,
                "steps": [
                    {"label": short(step), "value": name, "method": "animate", "args": [[name], at_once]}
                    for step, name in zip(steps, names, strict=True)
                ],
            }
        ],
        updatemenus=[
            {
                **place,
                "type": "buttons",
                "direction": "left",
                "showactive": False,
                "pad": {"t": 24 + down, "l": left, "r": 0},
                "bgcolor": theme.background,
                "bordercolor": theme.muted,
                "font": {"size": 12, "color": theme.ink},
                "buttons": buttons,
            }
        ],
    )
    return figure
