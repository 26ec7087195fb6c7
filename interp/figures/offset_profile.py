"""Weight, or effect of cutting, by the offset from the earlier copy: where an induction head really reads."""

from collections.abc import Mapping, Sequence

import numpy as np
import plotly.graph_objects as go

from interp.figures.direct_label import room_for
from interp.figures.theme import FILLS, style, theme_of

# Name of the y axis where cuts are drawn as they are, with random edges as a line beside them.
RAW_COST = "raw cost of the cut (nats)"


def offset_profile(
    profiles: Mapping[str, Sequence[float]],
    *,
    first_offset: int = 1,
    offsets: Sequence[int] | None = None,
    controls: Mapping[str, float] | None = None,
    quantity: str = "weight",
    mode: str = "light",
    title: str | None = None,
) -> go.Figure:
    """Bars by offset, one group a unit.

    Args:
        profiles: Values by name; value k belongs to offset `first_offset` + k. Offset 1 is the token after
            the earlier copy, the textbook induction target.
        first_offset: Offset of the first value, where they follow one another.
        offsets: Offset of each value, where they do not.
        controls: Values by name drawn as lines across: what chance or a random edge gives.
        quantity: Name of the y axis, with its unit.
        mode: `light` or `dark`.
        title: Of the figure.

    Raises:
        ValueError: no profile, or another number of values than of offsets.
    """
    if not profiles:
        raise ValueError("no profile to draw; give at least one")
    for name, values in profiles.items():
        if offsets is not None and len(offsets) != len(values):
            raise ValueError(f"{name} has {len(values)} values for {len(offsets)} offsets; accepted: as many")
    theme, figure = theme_of(mode), go.Figure()
    for (name, values), colour, fill in zip(profiles.items(), theme.series * 4, FILLS * 4, strict=False):
        pattern = {"shape": fill, "fgcolor": theme.background, "fillmode": "overlay"} | {"size": 7}
        figure.add_bar(
            x=np.arange(len(values)) + first_offset if offsets is None else list(offsets),
            y=np.asarray(values, dtype=np.float64),
            name=name,
            marker={"color": colour, "line": {"width": 0}, "pattern": pattern},
            hovertemplate=f"{name}<br>offset %{{x:+d}}<br>%{{y:.3f}}<extra></extra>",
        )
    for name, value in (controls or {}).items():
        figure.add_hline(
            y=value,
            line={"color": theme.muted, "width": 1.2, "dash": "dot"},
            annotation={
                "text": name,
                "font": {"size": 11, "color": theme.muted},
                "x": 1,
                "xanchor": "left",
                "yanchor": "middle",
                "xshift": 6,
            },
        )
    style(figure, theme, title=title, height=300)
    figure.update_xaxes(title_text="offset from the earlier copy", dtick=1, tickformat="+d", showgrid=False)
    figure.update_yaxes(title_text=quantity, zeroline=True, zerolinecolor=theme.muted, zerolinewidth=1)
    legend = {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "font": {"size": 12}}
    right = room_for(controls, size=11) if controls else 10
    figure.update_layout(
        bargap=0.25,
        legend=legend,
        showlegend=len(profiles) > 1,
        margin={"l": 60, "r": right, "t": 52, "b": 50},
    )
    return figure
