"""One request of the page: the sides that are chosen, and drawing for each of them."""

from collections.abc import Callable
from typing import Any

from dash import Input
from dash.exceptions import PreventUpdate

from interp.dashboard.controls import SIDES
from interp.dashboard.messages import attempt
from interp.dashboard.prompt import PromptSpec
from interp.dashboard.selection import Selection

# Inputs of every view, in the order in which `Request` takes them.
CHOSEN = (
    *(Input(f"{side}-selection", "data") for side in SIDES),
    Input("prompt", "data"),
    Input("mode", "data"),
)


class Request:
    """The chosen sides of one request: (side, selection) with the prompt's specification."""

    def __init__(self, tab: str, wanted: str, a: Any, b: Any, spec: Any, mode: str | None):
        if tab != wanted or a is None or spec is None or mode is None:
            raise PreventUpdate
        self.raw = {"a": a, "b": b}
        self.spec, self.mode = spec, mode

    def each(self, draw: Callable[[Selection, PromptSpec], Any]) -> dict[str, tuple[Any, str | None]]:
        """`draw` for each side that is shown: its result or an error's sentence."""
        found: dict[str, tuple[Any, str | None]] = {}
        for side in SIDES:
            raw = self.raw[side]
            if raw is not None:
                found[side] = attempt(lambda raw=raw: draw(Selection.of(raw), PromptSpec.of(self.spec)))
        return found
