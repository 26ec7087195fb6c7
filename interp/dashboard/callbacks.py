"""What happens on the page without drawing: options that depend on others, the prompt's status, and scripts.

Scripts (assets/dashboard.js) collect the controls into stores, so that a view takes a few inputs.
"""

from typing import Any

from dash import ClientsideFunction, Dash, Input, Output, State, html, no_update
from dash.exceptions import PreventUpdate

from interp.dashboard import choices
from interp.dashboard.controls import SIDES
from interp.dashboard.desk import Desk
from interp.dashboard.layout import MATRICES, TABS
from interp.dashboard.messages import attempt
from interp.dashboard.prompt import Prompt, PromptSpec
from interp.dashboard.selection import Selection
from interp.figures.token_text import visible

_SELECTION = ("run", "step", "layer", "reading", "units", "head", "values")
# Tokens that are shown of two prompts that differ.
_SHOWN = 6
_PROMPT = ("kind", "period", "repeats", "seed", "sample")


def register(app: Dash, desk: Desk) -> None:
    """Attach all of them to the app."""
    for side in SIDES:
        _offer_checkpoints(app, desk, side)
        _offer_units(app, desk, side)
        _side_scripts(app, side)
    _prompt_status(app, desk)
    _page_scripts(app)


def _offer_checkpoints(app: Dash, desk: Desk, side: str) -> None:
    @app.callback(
        Output(f"{side}-step", "max"),
        Output(f"{side}-step", "marks"),
        Output(f"{side}-step", "value"),
        Output(f"{side}-steps", "data"),
        Output(f"{side}-checkpoint", "hidden"),
        Output(f"{side}-layer", "options"),
        Output(f"{side}-layer", "value"),
        Input(f"{side}-run", "value"),
        State(f"{side}-layer", "value"),
        prevent_initial_call=True,
    )
    def offer(index: int, layer: int) -> tuple[Any, ...]:
        run, error = attempt(lambda: desk.run_at(index))
        if error is not None:
            raise PreventUpdate
        last = len(run.steps) - 1
        layers = choices.layer_options(run)
        marks = choices.step_marks(run.steps)
        kept = choices.kept(layer, layers)
        return max(last, 1), marks, run.newest(), list(run.steps), last == 0, layers, kept


def _offer_units(app: Dash, desk: Desk, side: str) -> None:
    @app.callback(
        Output(f"{side}-reading", "options"),
        Output(f"{side}-reading", "value"),
        Output(f"{side}-reading-field", "hidden"),
        Output(f"{side}-units", "options"),
        Output(f"{side}-units", "value"),
        Output(f"{side}-units-field", "hidden"),
        Output(f"{side}-head-field", "hidden"),
        Output(f"{side}-head", "options"),
        Output(f"{side}-head", "value"),
        Input(f"{side}-run", "value"),
        Input(f"{side}-layer", "value"),
        Input(f"{side}-units", "value"),
        State(f"{side}-reading", "value"),
        State(f"{side}-head", "value"),
        prevent_initial_call=True,
    )
    def offer(index: int, layer: int, units: str, reading: str, head: int) -> tuple[Any, ...]:
        run, error = attempt(lambda: desk.run_at(index))
        if error is not None:
            raise PreventUpdate
        layers = run.layers
        facts = layers[min(layer, len(layers) - 1)]
        readings, kinds = choices.reading_options(facts), choices.unit_options(facts)
        units = choices.kept(units, kinds)
        heads = choices.head_options(facts, units)
        offered = readings, choices.kept(reading, readings), len(readings) == 1
        return (*offered, kinds, units, len(kinds) == 1, len(heads) == 1, heads, choices.kept(head, heads))


def _prompt_status(app: Dash, desk: Desk) -> None:
    @app.callback(
        Output("prompt-status", "children"),
        Output("prompt-status", "className"),
        *[Input(f"{side}-selection", "data") for side in SIDES],
        Input("prompt", "data"),
    )
    def status(a: dict | None, b: dict | None, spec: dict | None) -> tuple[list[html.Span], str]:
        if a is None or spec is None:
            return no_update, no_update
        chosen = [a] if b is None or b.get("run") == a.get("run") else [a, b]
        made = [
            attempt(lambda one=one: desk.prompt(Selection.of(one), PromptSpec.of(spec))) for one in chosen
        ]
        said = [error or _said(prompt) for prompt, error in made]
        if len(said) > 1:
            said = [f"{side.upper()}: {text}" for side, text in zip(SIDES, said, strict=True)]
            said += _which([prompt for prompt, _ in made])
        wrong = any(error for _, error in made)
        return [html.Span(text) for text in said], "status error" if wrong else "status"


def _which(prompts: list[Prompt | None]) -> list[str]:
    """Whether both models read the same tokens, and where they differ, with what each begins."""
    if None in prompts:
        return []
    if prompts[0].tokens == prompts[1].tokens:
        return ["Both read the same tokens."]
    begin = [" ".join(f"‘{visible(token)}’" for token in one.tokens[:_SHOWN]) for one in prompts]
    more = [" ..." if len(one) > _SHOWN else "" for one in prompts]
    sides = [f"{side.upper()} {text}{dots}" for side, text, dots in zip(SIDES, begin, more, strict=True)]
    return [f"They read different tokens: {', '.join(sides)}"]


def _said(prompt: Prompt) -> str:
    n, kinds = len(prompt), len(set(prompt.ids))
    said = f"{n:,} token{'s' if n > 1 else ''}, {kinds:,} different"
    return "; ".join([said, *prompt.notes]) + "."


def _script(app: Dash, name: str, *arguments: Any, **options: Any) -> None:
    app.clientside_callback(ClientsideFunction("dashboard", name), *arguments, **options)


def _side_scripts(app: Dash, side: str) -> None:
    parts = [Input(f"{side}-{part}", "value") for part in _SELECTION]
    _script(app, f"select_{side}", Output(f"{side}-selection", "data"), Input("compare", "value"), *parts)
    _script(
        app,
        "step_label",
        Output(f"{side}-step-label", "children"),
        Input(f"{side}-step", "value"),
        Input(f"{side}-steps", "data"),
    )
    _script(
        app,
        "play",
        Output(f"{side}-tick", "disabled"),
        Output(f"{side}-play", "children"),
        Input(f"{side}-play", "n_clicks"),
        Input(f"{side}-run", "value"),
        State(f"{side}-tick", "disabled"),
    )
    _script(
        app,
        "move",
        Output(f"{side}-step", "value", allow_duplicate=True),
        Input(f"{side}-tick", "n_intervals"),
        Input(f"{side}-phase", "clickData"),
        State(f"{side}-step", "value"),
        State(f"{side}-steps", "data"),
        prevent_initial_call=True,
    )
    _script(
        app,
        "choose_unit",
        Output(f"{side}-layer", "value", allow_duplicate=True),
        Output(f"{side}-head", "value", allow_duplicate=True),
        *[Input(f"{side}-{score}", "clickData") for score in MATRICES],
        prevent_initial_call=True,
    )


def _page_scripts(app: Dash) -> None:
    fields = [Output(f"prompt-{kind}-fields", "hidden") for kind in ("probe", "sample", "typed")]
    panels = [Output(f"panel-{name}", "hidden") for name in TABS]
    clicks = [Input(f"{side}-map", "clickData") for side in SIDES]
    marks = [Output(f"tab-{name}", "aria-selected") for name in TABS]
    _script(app, "panels", *panels, *marks, Input("tab", "data"))
    asked = [Output(f"{name}-request", "data") for name in TABS]
    chosen = [Input(f"{side}-selection", "data") for side in SIDES]
    _script(
        app, "requests", *asked, Input("tab", "data"), *chosen, Input("prompt", "data"), Input("mode", "data")
    )
    _script(app, "fields", *fields, Input("prompt-kind", "value"))
    _script(app, "mode", Output("mode", "data"), Input("mode-choice", "value"))
    _script(app, "comparing", Output("page", "className"), Input("compare", "value"))
    _script(app, "pick", Output("selected", "data"), Input("prompt", "data"), *clicks)
    _script(app, "draw_strips", Output("drawn", "data"), Input("strips", "data"))
    _script(
        app,
        "prompt",
        Output("prompt", "data"),
        *[Input(f"prompt-{name}", "value") for name in _PROMPT],
        Input("prompt-read", "n_clicks"),
        State("prompt-text", "value"),
        State("most-characters", "data"),
    )
