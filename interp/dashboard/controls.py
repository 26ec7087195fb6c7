"""The controls of the page: prompt, the two sides, display. Every one has a label."""

from typing import Any

from dash import dcc, html

from interp.dashboard import choices
from interp.dashboard.prompt import MOST_CHARACTERS
from interp.dashboard.run import Run

SIDES = ("a", "b")


def field(label: str, control: Any, *, name: str, hint: str | None = None, **options: Any) -> html.Div:
    """A control under its label. `name` is the control's id."""
    parts = [html.Label(label, htmlFor=name, id=f"{name}-label"), control]
    return html.Div([*parts, *([html.Small(hint)] if hint else [])], className="field", **options)


def radio(
    name: str,
    options: list[dict[str, str]],
    value: str,
    label: str,
    *,
    inline: bool = False,
    hidden: bool = False,
) -> html.Fieldset:
    """Radio buttons; a fieldset, because the label belongs to the group."""
    style = "radio inline" if inline else "radio"
    return html.Fieldset(
        [html.Legend(label), dcc.RadioItems(id=name, options=options, value=value, className=style)],
        className="field",
        id=f"{name}-field",
        hidden=hidden,
    )


def select(name: str, options: list[dict[str, Any]], value: Any) -> dcc.Dropdown:
    """A drop-down list that always has a value."""
    return dcc.Dropdown(id=name, options=options, value=value, clearable=False, searchable=len(options) > 12)


def number(name: str, value: int, least: int) -> dcc.Input:
    """A whole number; sent when the field is left or Enter is pressed."""
    return dcc.Input(id=name, type="number", value=value, min=least, step=1, debounce=True)


def prompt_section(
    *, is_text: bool, typed_hint: str, limit: int, period: int, repeats: int, probe_hint: str
) -> html.Section:
    """The prompt: what kind, and the fields of each kind (a script shows those of the chosen one)."""
    kinds = [
        {"label": "Repeated random tokens", "value": "probe"},
        {"label": "Held-out sample", "value": "sample"},
        {"label": "Type your own", "value": "typed"},
    ]
    probe = [
        field("Tokens", number("prompt-period", period, 1), name="prompt-period"),
        field("Times", number("prompt-repeats", repeats, 1), name="prompt-repeats"),
        field("Seed", number("prompt-seed", 0, 0), name="prompt-seed"),
    ]
    text = dcc.Textarea(id="prompt-text", value="", placeholder=typed_hint, spellCheck="false", rows=4)
    most = f"At most {limit:,} tokens and {MOST_CHARACTERS:,} characters."
    typed = [
        field(
            "Text" if is_text else "Token ids",
            text,
            name="prompt-text",
            hint=most,
        ),
        html.Button("Read it", id="prompt-read", type="button", className="main", n_clicks=0),
    ]
    sample = [field("Sample", number("prompt-sample", 0, 0), name="prompt-sample")]
    return html.Section(
        [
            html.H2("Prompt"),
            radio("prompt-kind", kinds, "probe", "Tokens to read"),
            html.Div(
                [html.Div(probe, className="row"), html.Div(html.Small(probe_hint), className="field")],
                id="prompt-probe-fields",
            ),
            html.Div(sample, id="prompt-sample-fields", hidden=True),
            html.Div(typed, id="prompt-typed-fields", hidden=True),
            html.P(id="prompt-status", className="status", role="status"),
        ],
        className="card",
    )


def side_section(side: str, runs: tuple[Run, ...], run: int, opening: dict[str, Any]) -> html.Div:
    """Model, checkpoint, layer, reading and unit of one side."""
    chosen = runs[run]
    layer = opening["layer"]
    facts = chosen.layers[layer]
    units = next(iter(facts.n_units))
    names = [{"label": _run_label(runs, n), "value": n} for n in range(len(runs))]
    readings, kinds = choices.reading_options(facts), choices.unit_options(facts)
    heads = choices.head_options(facts, units)
    values = [{"label": "as scored", "value": "scored"}, {"label": "signed", "value": "signed"}]
    return html.Div(
        [
            field("Model", select(f"{side}-run", names, run), name=f"{side}-run", hidden=len(runs) == 1),
            _checkpoint(side, chosen),
            html.Div(
                [
                    field("Layer", select(f"{side}-layer", choices.layer_options(chosen), layer),
                          name=f"{side}-layer"),
                    html.Div(
                        field(
                            "Head or group",
                            select(f"{side}-head", heads, opening["head"]),
                            name=f"{side}-head",
                        ),
                        id=f"{side}-head-field",
                        hidden=len(heads) == 1,
                    ),
                ],
                className="row two",
            ),
            radio(
                f"{side}-reading", readings, opening["reading"], "Reading", hidden=len(readings) == 1
            ),
            html.Div(
                field("Units", select(f"{side}-units", kinds, units), name=f"{side}-units"),
                id=f"{side}-units-field",
                hidden=len(kinds) == 1,
            ),
            radio(f"{side}-values", values, "scored", "Values", inline=True),
        ],
        id=f"{side}-controls",
    )  # fmt: skip


def _run_label(runs: tuple[Run, ...], n: int) -> str:
    same = [run.name for run in runs].count(runs[n].name) > 1
    return runs[n].path if same else runs[n].name


def _checkpoint(side: str, run: Run) -> html.Div:
    last = len(run.steps) - 1
    slider = dcc.Slider(
        id=f"{side}-step", min=0, max=max(last, 1), step=1, value=run.newest(),
        marks=choices.step_marks(run.steps),
        allow_direct_input=False, included=False,
    )  # fmt: skip
    play = html.Button("Play", id=f"{side}-play", type="button", n_clicks=0)
    head = [html.Label("Checkpoint", id=f"{side}-step-title"), html.Output(id=f"{side}-step-label"), play]
    return html.Div(
        [
            html.Div(head, className="slider-head"),
            html.Div(slider, role="group", **{"aria-labelledby": f"{side}-step-title"}),
            dcc.Interval(id=f"{side}-tick", interval=700, disabled=True),
            dcc.Store(id=f"{side}-steps", data=list(run.steps)),
        ],
        id=f"{side}-checkpoint",
        className="field",
        hidden=last == 0,
    )


def display_section() -> html.Section:
    """Outlines and colours."""
    modes = [{"label": name.capitalize(), "value": name} for name in ("system", "light", "dark")]
    outlines = dcc.Checklist(
        id="targets",
        options=[{"label": "Outline induction targets", "value": "on"}],
        value=["on"],
        className="radio",
    )
    limits = [
        {"label": "largest weight", "value": "largest"},
        {"label": "99th percentile", "value": "percentile"},
    ]
    return html.Section(
        [
            html.H2("Display"),
            outlines,
            radio("contrast", limits, "largest", "Colours of the map reach to"),
            radio("mode-choice", modes, "system", "Colours", inline=True),
        ],
        className="card",
    )
