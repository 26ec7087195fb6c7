"""Drawing the attention maps, and drawing them anew where one zooms into a long prompt."""

from typing import Any

import plotly.graph_objects as go
from dash import Dash, Input, Output, Patch, State, no_update
from dash.exceptions import PreventUpdate

from interp.dashboard import views
from interp.dashboard.captions import map_caption
from interp.dashboard.controls import SIDES
from interp.dashboard.desk import Desk
from interp.dashboard.layout import BLANK
from interp.dashboard.map_frame import filled_map
from interp.dashboard.messages import attempt
from interp.dashboard.prompt import PromptSpec
from interp.dashboard.request import Request, asked
from interp.dashboard.selection import Selection
from interp.dashboard.sheet import Sheet

# Side of the square of cells, pixels: what there is room for, within these.
LEAST_SIDE, MOST_SIDE = 240, 660


def register(app: Dash, desk: Desk) -> None:
    """Attach them to the app."""
    _maps(app, desk)
    for side in SIDES:
        _zoom(app, desk, side)


def _maps(app: Dash, desk: Desk) -> None:
    @app.callback(
        *[Output(f"{side}-map", "figure") for side in SIDES],
        *[Output(f"{side}-map-caption", "children") for side in SIDES],
        *[Output(f"{side}-map-caption", "className") for side in SIDES],
        *[Output(f"{side}-values-field", "hidden") for side in SIDES],
        asked("attention"),
        Input("targets", "value"),
        Input("contrast", "value"),
        Input("room", "data"),
    )
    def draw(data: dict | None, targets: list[str], contrast: str, room: int | None) -> list[Any]:
        request = Request(data)
        found = request.each(
            lambda chosen, spec: (desk.sheet(chosen, spec), _unit(desk.sheet(chosen, spec), chosen))
        )
        drawn = [side for side, (sheet, _) in found.items() if sheet is not None]
        if drawn:
            desk.prepare([Selection.of(request.raw[side]) for side in drawn], PromptSpec.of(request.spec))
        good = {side: sheet for side, (sheet, _) in found.items() if sheet is not None}
        limits = _limits(good, 99.0 if contrast == "percentile" else 100.0)
        size = _side(room, len(found))
        figures, captions, classes, hidden = [], [], [], []
        for side in SIDES:
            error = found.get(side, (None, None))[1]
            if side not in good:
                figures.append(BLANK)
                captions.append(error or "")
                hidden.append(no_update)
            else:
                options = {
                    "targets": bool(targets),
                    "limit": limits[side],
                    "side": size,
                    "mode": request.mode,
                }
                figures.append(filled_map(*good[side], **options))
                captions.append(map_caption(*good[side], limits[side], _shared(good)))
                hidden.append(not good[side][0].signed_possible)
            classes.append("caption error" if error else "caption")
        return [*figures, *captions, *classes, *hidden]


def _unit(sheet: Sheet, chosen: Selection) -> int:
    # Refuses a unit that is not there.
    sheet.of(chosen.head)
    return chosen.head


def _side(room: int | None, n_maps: int) -> int:
    """Side of the cells' square for the width that the window gives to maps: labels and borders taken off."""
    width = (room if isinstance(room, int) else 900) // n_maps - views.MAP_FRAME - 50
    return min(max(width, LEAST_SIDE), MOST_SIDE)


def _shared(drawn: dict[str, tuple[Sheet, int]]) -> bool:
    """Whether there are two maps, of the same quantity."""
    return len(drawn) > 1 and len({sheet.quantity for sheet, _ in drawn.values()}) == 1


def _limits(drawn: dict[str, tuple[Sheet, int]], percentile: float) -> dict[str, float]:
    """Upper end of the colours of each side: one for both where both show the same quantity."""
    groups = [list(drawn.values())] * len(drawn) if _shared(drawn) else [[one] for one in drawn.values()]
    found = [views.colour_limit(group, percentile=percentile) for group in groups]
    return dict(zip(drawn, found, strict=True))


def _zoom(app: Dash, desk: Desk, side: str) -> None:
    @app.callback(
        Output(f"{side}-map", "figure", allow_duplicate=True),
        Input(f"{side}-map", "relayoutData"),
        State(f"{side}-selection", "data"),
        State("prompt", "data"),
        prevent_initial_call=True,
    )
    def zoom(moved: dict | None, chosen: dict | None, spec: dict | None) -> Patch:
        if not moved or chosen is None:
            raise PreventUpdate
        sheet, error = attempt(lambda: desk.sheet(Selection.of(chosen), PromptSpec.of(spec)))
        # Short prompts are drawn cell by cell as they are.
        if error is not None or len(sheet.prompt) <= views.MOST_CELLS:
            raise PreventUpdate
        window = _window(moved, len(sheet.prompt))
        if window is None:
            raise PreventUpdate
        return _patched(views.zoomed(sheet, Selection.of(chosen).head, *window))


def _window(moved: dict, n: int) -> tuple[tuple[float, float], tuple[float, float]] | None:
    """Rows and columns of a zoom, the whole map after a double click; None for other changes."""
    whole = (-0.5, n - 0.5)
    ends = []
    for axis in ("yaxis", "xaxis"):
        for name in (axis, f"{axis}2"):
            if f"{name}.range[0]" in moved:
                ends.append((moved[f"{name}.range[0]"], moved[f"{name}.range[1]"]))
                break
            if moved.get(f"{name}.autorange"):
                ends.append(whole)
                break
    return None if len(ends) < 2 else (ends[0], ends[1])


def _patched(window: dict[str, Any]) -> Patch:
    arrays = go.Figure(go.Heatmap({name: window[name] for name in "zxy"})).to_dict()["data"][0]
    figure = Patch()
    for name in "zxy":
        figure["data"][0][name] = arrays[name]
    for axis in "xy":
        figure["layout"][f"{axis}axis"]["tickvals"] = window[axis].tolist()
        figure["layout"][f"{axis}axis"]["ticktext"] = window[f"{axis}_names"]
        figure["layout"][f"{axis}axis2"]["tickvals"] = window[f"{axis}_ticks"]
        figure["layout"][f"{axis}axis2"]["ticktext"] = [str(place) for place in window[f"{axis}_ticks"]]
    return figure
