"""One look for every figure: colours, scales, fonts and layout, light and dark.

Categorical colours follow Okabe and Ito (distinct under the common colour-vision deficiencies); every role
keeps its
hue in both modes. The sequential scale has even lightness steps (OKLab); the diverging one is symmetric in
lightness
about a neutral middle. Fonts are the system's; nothing is fetched.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import plotly.graph_objects as go

MODES = ("light", "dark")
FONT = (
    '-apple-system, BlinkMacSystemFont, "Segoe UI", Roboto, "Helvetica Neue", "DejaVu Sans", '
    "Arial, sans-serif"
)
MONOSPACE = 'ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace'
# Beside colour, for black-and-white print: markers of lines, fills of bars, strokes of edges, by series.
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "x", "star", "pentagon")
FILLS = ("", "/", "x", ".", "\\", "-", "+")
STROKES = ("solid", "dash", "dot")


@dataclass(frozen=True, kw_only=True)
class Theme:
    """Colours of one mode. `roles` names what a line shows; `series` colours runs side by side, in order."""

    mode: str
    background: str
    panel: str
    ink: str
    muted: str
    grid: str
    roles: dict[str, str]
    series: tuple[str, ...]
    sequential: tuple[str, ...]
    diverging: tuple[str, ...]
    outline: str
    missing: str


LIGHT = Theme(
    mode="light",
    background="#ffffff",
    panel="#ffffff",
    ink="#1c2128",
    muted="#5a6470",
    grid="#e4e7eb",
    roles={
        "prefix_matching": "#0072b2",
        "order_gain": "#d55e00",
        "in_context_learning": "#007a5a",
        "copying": "#a8487f",
        "previous_token": "#9a6a00",
        "other": "#a9b1ba",
    },
    series=("#0072b2", "#d55e00", "#007a5a", "#a8487f", "#9a6a00", "#3b9ad0", "#4a525c"),
    sequential=(
        *("#f3f8f9", "#c4e8f2", "#99d6ec", "#72c2e5", "#4facdc", "#3396d1"),
        *("#207fc2", "#1a68b0", "#1b5299", "#1d3d7f", "#1b2b62"),
    ),
    diverging=(
        *("#035ea3", "#267cc9", "#5e9bda", "#8ebae9", "#bfd9f4", "#f7f7f7"),
        *("#f2cdbd", "#e3a68b", "#d07f5a", "#bb5825", "#963d05"),
    ),
    outline="#d55e00",
    missing="#eef0f2",
)
DARK = Theme(
    mode="dark",
    background="#15191f",
    panel="#15191f",
    ink="#e6e9ed",
    muted="#9ba6b2",
    grid="#2b323b",
    roles={
        "prefix_matching": "#56b4e9",
        "order_gain": "#f08a4b",
        "in_context_learning": "#3fc79a",
        "copying": "#e39bc6",
        "previous_token": "#e6b23c",
        "other": "#5d6874",
    },
    series=("#56b4e9", "#f08a4b", "#3fc79a", "#e39bc6", "#e6b23c", "#a6d8f5", "#b5bec8"),
    sequential=(
        *("#171f30", "#0a3057", "#00466e", "#065d80", "#067493", "#0c8da4"),
        *("#07a9a6", "#46c29f", "#90d39b", "#c8e2a7", "#f3f1c7"),
    ),
    diverging=(
        *("#73bffe", "#439de3", "#397cb1", "#305d81", "#283f52", "#222222"),
        *("#4e3625", "#794c2c", "#a66434", "#d47e3c", "#fe9c53"),
    ),
    outline="#f08a4b",
    missing="#20262e",
)


def theme_of(mode: str) -> Theme:
    """The theme named `light` or `dark`; ValueError for another name."""
    if mode not in MODES:
        raise ValueError(f"mode {mode!r}; accepted: {', '.join(MODES)}")
    return LIGHT if mode == "light" else DARK


def scale(colours: Sequence[str]) -> list[list[float | str]]:
    """Evenly spaced stops, as plotly takes them."""
    return [[index / (len(colours) - 1), colour] for index, colour in enumerate(colours)]


def transparent(colour: str, alpha: float) -> str:
    """A hex colour with an opacity in [0, 1]."""
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},{alpha:g})"


def on_colour(theme: Theme, share: float, *, signed: bool) -> str:
    """Ink that reads on the scale's colour at `share` in [0, 1] of its range."""
    colours = theme.diverging if signed else theme.sequential
    colour = colours[round(min(max(share, 0.0), 1.0) * (len(colours) - 1))]
    red, green, blue = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    luminance = 0.2126 * red**2.2 + 0.7152 * green**2.2 + 0.0722 * blue**2.2
    return "#12161b" if luminance > 0.2 else "#ffffff"


def style(
    figure: go.Figure, theme: Theme, *, title: str | None = None, height: int | None = None
) -> go.Figure:
    """Apply the theme to a figure and return it. Margins grow with tick labels; the width is the
    container's."""
    figure.update_layout(
        template="none",
        title={"text": title, "x": 0, "xref": "paper", "xanchor": "left", "font": {"size": 15}}
        if title
        else None,
        font={"family": FONT, "size": 13, "color": theme.ink},
        paper_bgcolor=theme.background,
        plot_bgcolor=theme.panel,
        colorway=list(theme.series),
        hoverlabel={
            "bgcolor": theme.background,
            "bordercolor": theme.muted,
            "font": {"color": theme.ink, "size": 13},
        },
        margin={"l": 60, "r": 20, "t": 48 if title else 20, "b": 48},
        height=height,
        autosize=True,
        # Plotly's own button would upload the figure.
        modebar={"remove": ["sendChartToCloud"]},
    )
    axis = {
        "gridcolor": theme.grid,
        "linecolor": theme.muted,
        "tickcolor": theme.muted,
        "tickfont": {"color": theme.muted, "size": 12},
        "title": {"font": {"color": theme.ink, "size": 13}},
        "zeroline": False,
        "automargin": True,
        "ticks": "outside",
        "ticklen": 4,
    }
    figure.update_xaxes(**axis)
    figure.update_yaxes(**axis)
    return figure


def colour_bar(theme: Theme, title: str) -> dict:
    """A thin colour bar with its quantity beside it."""
    return {
        "title": {"text": title, "side": "right", "font": {"size": 12, "color": theme.ink}},
        "thickness": 12,
        "outlinewidth": 0,
        "ticks": "outside",
        "ticklen": 3,
        "tickcolor": theme.muted,
        "tickfont": {"size": 11, "color": theme.muted},
        "xpad": 8,
    }
