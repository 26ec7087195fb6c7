"""Drawing: each callback takes what is chosen and returns figures and captions for both sides.

A side that cannot be drawn says why, and the other side goes on.
"""

from typing import Any

from dash import Dash, Input, Output, ctx

from interp.dashboard import views
from interp.dashboard.captions import cut_caption, number, state_caption, wait_caption, weight_caption
from interp.dashboard.causal import CutProfile
from interp.dashboard.controls import SIDES
from interp.dashboard.desk import Desk
from interp.dashboard.layout import BLANK, HEADED
from interp.dashboard.messages import attempt
from interp.dashboard.prompt import PromptSpec
from interp.dashboard.request import Request, asked
from interp.dashboard.selection import Selection
from interp.dashboard.sheet import Sheet
from interp.dashboard.token_cells import DIRECTIONS, start_position, strongest, token_strip
from interp.figures.token_text import visible


def register(app: Dash, desk: Desk) -> None:
    """Attach all of them to the app."""
    for attach in (_headings, _texts, _weights, _cuts, _states):
        attach(app, desk)


def _headings(app: Dash, desk: Desk) -> None:
    @app.callback(
        *[Output({"view": view, "side": side}, "children") for side in SIDES for view in HEADED],
        *[Input(f"{side}-selection", "data") for side in SIDES],
    )
    def headings(*chosen: dict | None) -> list[str]:
        lines = []
        for side, raw in zip(SIDES, chosen, strict=True):
            said = "" if raw is None else "".join(filter(None, attempt(lambda raw=raw: _heading(desk, raw))))
            lines += [f"{side.upper()}  {said}"] * len(HEADED)
        return lines


def _heading(desk: Desk, raw: dict) -> str:
    return desk.heading(Selection.of(raw))


def _texts(app: Dash, desk: Desk) -> None:
    @app.callback(
        Output("strips", "data"),
        *[Output(f"{side}-text-summary", "children") for side in SIDES],
        asked("attention"),
        Input("targets", "value"),
        Input("selected", "data"),
    )
    def draw(data: dict | None, targets: list[str], selected: int | None) -> list[Any]:
        request = Request(data)
        marked = bool(targets)
        found = request.each(
            lambda chosen, spec: _strips(
                desk.sheet(chosen, spec), chosen.head, selected, marked, request.mode
            )
        )
        strips = {side: {} if strip is None else strip[0] for side, (strip, _) in found.items()}
        return [strips, *(_summary(found.get(side)) for side in SIDES)]


def _strips(
    sheet: Sheet, unit: int, selected: int | None, targets: bool, mode: str
) -> tuple[dict[str, Any], str]:
    """Both directions as plain data for the script, and a sentence."""
    place = selected if isinstance(selected, int) and 0 <= selected < len(sheet.prompt) else None
    place = start_position(sheet.prompt.tokens) if place is None else place
    strips = {}
    for direction in DIRECTIONS:
        strip = token_strip(sheet, unit, place, direction=direction, targets=targets, mode=mode)
        low, high = strip.limits
        strips[direction] = {
            "cells": [vars(cell) for cell in strip.cells],
            "limits": f"Colours from {number(low)} to {number(high)}." if high else "Nothing.",
        }
    tokens = sheet.prompt.tokens
    most = [f"‘{visible(tokens[at])}’ @{at} ({number(value)})" for at, value in strongest(sheet, unit, place)]
    name = f"‘{visible(tokens[place])}’ @{place}"
    return strips, f"{name} reads most from {', '.join(most)}." if most else f"{name} reads nothing."


def _summary(found: tuple[Any, str | None] | None) -> str:
    # An error stands under the map.
    return "" if found is None or found[0] is None else found[0][1]


def _weights(app: Dash, desk: Desk) -> None:
    @app.callback(
        *[Output(f"{side}-weights", "figure") for side in SIDES],
        *[Output(f"{side}-weights-caption", "children") for side in SIDES],
        asked("cuts"),
    )
    def draw(data: dict | None) -> list[Any]:
        request = Request(data)
        weights = request.each(
            lambda chosen, spec: views.weight_by_offset(
                desk.sheet(chosen, spec), chosen.head, mode=request.mode
            )
        )
        return [
            *(weights.get(side, (None, None))[0] or BLANK for side in SIDES),
            *(_weights_said(weights.get(side)) for side in SIDES),
        ]


def _cuts(app: Dash, desk: Desk) -> None:
    @app.callback(
        *[Output(f"{side}-cuts", "figure") for side in SIDES],
        *[Output(f"{side}-cuts-caption", "children") for side in SIDES],
        *[Output(f"{side}-cuts-caption", "className") for side in SIDES],
        Output("measure", "hidden"),
        asked("cuts"),
        Input("measured-on", "value"),
        Input("measure", "n_clicks"),
    )
    def draw(data: dict | None, measured_on: str, clicks: int) -> list[Any]:
        request, wanted = Request(data), ctx.triggered_id == "measure"
        cuts = request.each(lambda chosen, spec: _measured(desk, chosen, spec, measured_on, wanted))
        figures, captions, classes, waiting = [], [], [], False
        for side in SIDES:
            found, error = cuts.get(side, (None, None))
            waiting |= isinstance(found, str)
            there = isinstance(found, CutProfile)
            figures.append(views.cut_view(found, mode=request.mode) if there else BLANK)
            captions.append(cut_caption(found) if there else found or error or "")
            classes.append("caption error" if error else "caption")
        return [*figures, *captions, *classes, not waiting]


def _measured(
    desk: Desk, chosen: Selection, spec: PromptSpec, measured_on: str, wanted: bool
) -> CutProfile | str:
    """The costs, or a sentence where they take so long that they are measured only when that is wanted."""
    n_weights = None if wanted else desk.waits_for_cuts(chosen, spec, measured_on)
    return desk.cuts(chosen, spec, measured_on) if n_weights is None else wait_caption(n_weights)


def _weights_said(found: tuple[Any, str | None] | None) -> str:
    return "" if found is None else (found[1] or weight_caption(found[0] is not None))


def _states(app: Dash, desk: Desk) -> None:
    @app.callback(
        *[Output(f"{side}-state", "figure") for side in SIDES],
        *[Output(f"{side}-state-caption", "children") for side in SIDES],
        *[Output(f"{side}-state-caption", "className") for side in SIDES],
        asked("state"),
    )
    def draw(data: dict | None) -> list[Any]:
        request = Request(data)
        found = request.each(
            lambda chosen, spec: (desk.states(chosen, spec), desk.prompt(chosen, spec).tokens, chosen.head)
        )
        figures, captions, classes = [], [], []
        for side in SIDES:
            made, error = found.get(side, (None, None))
            classes.append("caption error" if error else "caption")
            if made is None:
                figures.append(BLANK)
                captions.append(error or "")
                continue
            norms, tokens, head = made
            unit = head if head < len(norms.norms) else None
            figures.append(views.state_view(norms, tokens, unit=unit, mode=request.mode))
            captions.append(state_caption(norms))
        return [*figures, *captions, *classes]
