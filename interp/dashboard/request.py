"""What one view is asked to draw: the sides that are chosen, the prompt, the colours."""

from collections.abc import Callable
from typing import Any

from dash import Input
from dash.exceptions import PreventUpdate

from interp.dashboard.controls import SIDES
from interp.dashboard.messages import attempt
from interp.dashboard.prompt import PromptSpec
from interp.dashboard.selection import Selection


def asked(view: str) -> Input:
    """The input of a view: a store that a script fills while the view is in front."""
    return Input(f"{view}-request", "data")


class Request:
    """From the page's store. Where nothing is asked yet, nothing is drawn."""

    def __init__(self, data: dict[str, Any] | None):
        if data is None:
            raise PreventUpdate
        self.raw = {side: data.get(side) for side in SIDES}
        self.spec, self.mode = data.get("prompt"), data.get("mode")

    def each(self, draw: Callable[[Selection, PromptSpec], Any]) -> dict[str, tuple[Any, str | None]]:
        """`draw` for each side that is shown: its result, or an error's sentence."""
        found: dict[str, tuple[Any, str | None]] = {}
        for side, raw in self.raw.items():
            if raw is not None:
                found[side] = attempt(lambda raw=raw: draw(Selection.of(raw), PromptSpec.of(self.spec)))
        return found
