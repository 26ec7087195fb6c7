"""Figures of a notebook as still pictures, like the records: small, and there for readers who run nothing."""

from typing import Any

import plotly.graph_objects as go
import plotly.io as pio
from plotly.io.base_renderers import MimetypeRenderer

from interp.display.page import escaped
from interp.figures.still import data_address

NAME = "still"


class StillRenderer(MimetypeRenderer):
    """A plotly renderer whose output is one picture."""

    def to_mimebundle(self, fig_dict: dict[str, Any]) -> dict[str, str]:
        """`text/html` with the picture."""
        figure = go.Figure(fig_dict)
        words = escaped(figure.layout.title.text or "figure")
        return {"text/html": f'<img alt="{words}" src="{data_address(figure)}">', "text/plain": f"[{words}]"}


def still_figures() -> None:
    """Show plotly figures as still pictures from here on; `plotly.io.renderers.default` switches back."""
    pio.renderers[NAME] = StillRenderer()
    pio.renderers.default = NAME
