"""The page: controls on the left, four views on the right. A function, so that each window begins anew."""

from typing import Any

from dash import dcc, html

from interp.dashboard.controls import SIDES, display_section, prompt_section, radio, side_section
from interp.dashboard.desk import Desk
from interp.dashboard.opening import default_prompt, detection_probe, trained_tokens
from interp.dashboard.prompt import MOST_CHARACTERS, most_tokens
from interp.dashboard.run import Run
from interp.subject import Subject

TABS = {
    "attention": "Attention",
    "cuts": "Offsets and cuts",
    "training": "Training",
    "state": "Recurrent state",
}
# Views whose parts are headed by what is chosen.
HEADED = ("map", "text", "cuts", "training", "state")
MATRICES = {"prefix_matching": "Prefix matching", "previous_token": "Previous token"}
# A figure that takes no room.
BLANK = {
    "data": [],
    "layout": {
        "xaxis": {"visible": False},
        "yaxis": {"visible": False},
        "height": 40,
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "margin": {"l": 0, "r": 0, "t": 0, "b": 0},
    },
}
_CONFIG = {
    "displaylogo": False,
    "modeBarButtons": [["toImage", "zoom2d", "pan2d", "resetScale2d"]],
    # Plotly's own button would upload the figure.
    "showSendToCloud": False,
    "plotlyServerURL": "",
}
LEDES = {
    "attention": "Each row is a token that reads, each column a token that is read: the stronger the "
    "colour, the more. Outlined are the induction targets, the tokens that followed earlier copies of the "
    "row's token. "
    "Click a cell to choose its row.",
    "text": "The same weights on the text. Click a token (or move with the arrow keys) to see what it reads "
    "and what reads it; a line under a token marks an induction target.",
    "cuts": "Left: how much the chosen unit reads at each distance from earlier copies of the reading token. "
    "Right: what the model loses at the tokens that induction predicts when those edges are cut.",
    "training": "Scores of all units over training. Click a point to move to its checkpoint, and a cell of a "
    "matrix to choose its layer and head.",
    "state": "How much the layer's memory holds after each token: the Euclidean norm of its recurrent state.",
}


def page(desk: Desk) -> html.Div:
    """The whole page for one window."""
    names = " and ".join(run.path for run in desk.runs)
    unread = [html.P(said, className="status error", role="status") for said in desk.unread()]
    header = html.Header(
        [html.H1("Attention dashboard"), html.P(names, className="path"), *unread], className="page-header"
    )
    views = html.Main(
        [
            _tabs(),
            _attention(),
            _cuts(),
            _training(),
            _state(),
        ]
    )
    return html.Div([header, _sidebar(desk), views, *_stores()], id="page", className="page")


def page_without_model(said: str) -> html.Div:
    """The page where no checkpoint can be read: why."""
    why = html.P(f"No checkpoint can be read: {said}", className="status error", role="alert")
    return html.Div(html.Header([html.H1("Attention dashboard"), why], className="page-header"), id="page")


def _tabs() -> html.Div:
    """Buttons with the roles that screen readers know; dcc.Tabs cannot be reached by keyboard."""
    buttons = [
        html.Button(
            text,
            id=f"tab-{name}",
            type="button",
            role="tab",
            className="tab",
            **{"aria-controls": f"panel-{name}", "aria-selected": "false", "data-tab": name},
        )
        for name, text in TABS.items()
    ]
    return html.Div(buttons, role="tablist", className="tabs", **{"aria-label": "Views"})


def _stores() -> list[Any]:
    stores = [
        dcc.Store(id="tab", data="attention"),
        dcc.Store(id="room"),
        dcc.Store(id="most-characters", data=MOST_CHARACTERS),
    ]
    names = ["mode", "prompt", "selected", "strips", "drawn"]
    names += [f"{side}-selection" for side in SIDES] + [f"{view}-request" for view in TABS]
    return [*stores, *(dcc.Store(id=name) for name in names)]


def _sidebar(desk: Desk) -> html.Aside:
    run = desk.runs[0]
    subject = run.load(run.newest()).subject
    ids = f"for example 3 1 4 1 5, each from 0 to {subject.d_vocab - 1}"
    hint = ids if subject.tokenizer is None else "any text; Ctrl and Enter reads it"
    spec = default_prompt(run, subject)
    second = len(desk.runs) - 1
    compare = dcc.Checklist(
        id="compare",
        options=[{"label": "Compare with a second map", "value": "on"}],
        value=["on"] if second else [],
        className="radio",
    )
    side_b = side_section("b", desk.runs, second, desk.opening(second))
    return html.Aside(
        [
            prompt_section(
                is_text=subject.tokenizer is not None,
                typed_hint=hint,
                limit=most_tokens(subject),
                period=spec.period,
                repeats=spec.repeats,
                probe_hint=_probe_hint(run, subject),
            ),
            html.Section(
                [html.H2("Map A"), side_section("a", desk.runs, 0, desk.opening(0))], className="card"
            ),
            html.Section(
                [compare, html.Div([html.H2("Map B"), side_b], className="side-b")],
                className="card",
            ),
            display_section(),
        ],
        **{"aria-label": "What is shown"},
    )  # fmt: skip


def _probe_hint(run: Run, subject: Subject) -> str:
    """Where the shape comes from that a window begins with."""
    spec, trained = default_prompt(run, subject), trained_tokens(run)
    shape = f"Begins with {spec.period} × {spec.repeats}"
    if detection_probe(run, subject) is None:
        return f"{shape}; the model is too small for the probe of detect-induction."
    why = "" if trained is None else f": {run.name} was trained on sequences of {trained:,} tokens"
    return f"{shape}, as detect-induction does{why}."


def _graph(name: str, label: str) -> html.Div:
    graph = dcc.Graph(id=name, figure=BLANK, config=_CONFIG, responsive="auto")
    return html.Div(graph, role="img", **{"aria-label": label}, className="plot")


def _loading(content: Any, said: str | None = None) -> dcc.Loading:
    """Content that grows pale while it is made anew, under dots or a sentence."""
    spinner = None if said is None else html.P(said, className="waiting", role="status")
    return dcc.Loading(
        content,
        custom_spinner=spinner,
        delay_show=350,
        delay_hide=80,
        overlay_style={"visibility": "visible", "opacity": 0.5},
        type="dot",
        parent_className="loading",
    )


def _panel(name: str, *content: Any) -> html.Section:
    return html.Section(
        list(content),
        id=f"panel-{name}",
        className="panel",
        hidden=name != "attention",
        **{"aria-label": TABS[name]},
    )


def _of_side(side: str, *content: Any) -> html.Div:
    heading = html.H3(id={"view": content[0], "side": side}, className="side-heading")
    return html.Div([heading, *content[1:]], className=f"view side-{side}")


def _caption(name: str) -> html.P:
    return html.P(id=name, className="caption", role="status")


def _attention() -> html.Section:
    maps = [
        _of_side(
            side,
            "map",
            _graph(f"{side}-map", f"Attention map {side.upper()}"),
            _caption(f"{side}-map-caption"),
        )
        for side in SIDES
    ]
    texts = [
        _of_side(
            side,
            "text",
            html.P(id=f"{side}-text-summary", className="summary", role="status"),
            *[
                html.Div(
                    [
                        html.H4(title),
                        html.Div(
                            id=f"{side}-{direction}", className="strip", role="group", **{"aria-label": title}
                        ),
                        html.P(id=f"{side}-{direction}-limits", className="caption"),
                    ]
                )
                for direction, title in (("reads", "What it reads"), ("read_by", "What reads it"))
            ],
        )
        for side in SIDES
    ]  # fmt: skip
    return _panel(
        "attention",
        html.P(LEDES["attention"], className="lede"),
        html.Div(
            [
                _loading(html.Div(maps, className="sides maps")),
                html.Div(
                    [
                        html.H2("On the text"),
                        html.P(LEDES["text"], className="lede"),
                        html.Div(texts, className="sides texts"),
                    ],
                    className="on-text",
                ),
            ],
            className="attention-body",
        ),
    )


def _cuts() -> html.Section:
    options = [
        {"label": "the standard probe (8 sequences)", "value": "probe"},
        {"label": "this prompt", "value": "prompt"},
    ]
    parts = []
    for side in SIDES:
        weights = [
            html.H4("Weight by offset"),
            _graph(f"{side}-weights", "Mean weight by offset from earlier copies"),
        ]
        cuts = [html.H4("Cost of cutting"), _graph(f"{side}-cuts", "Cost of cutting edges, by offset")]
        parts.append(
            _of_side(
                side,
                "cuts",
                html.Div([html.Div([*weights, _caption(f"{side}-weights-caption")]),
                          html.Div([*cuts, _caption(f"{side}-cuts-caption")])], className="pair"),
            )
        )  # fmt: skip
    return _panel(
        "cuts",
        html.P(LEDES["cuts"], className="lede"),
        radio("measured-on", options, "probe", "Cuts are measured on"),
        html.Button(
            "Measure the cuts", id="measure", type="button", className="main", n_clicks=0, hidden=True
        ),
        _loading(html.Div(parts, className="sides stacked"), "Measuring the cuts ..."),
    )


def _training() -> html.Section:
    parts = []
    for side in SIDES:
        matrices = [
            _graph(f"{side}-{score}", f"{text} by layer and head") for score, text in MATRICES.items()
        ]
        parts.append(
            _of_side(
                side,
                "training",
                _caption(f"{side}-training-caption"),
                html.Progress(id=f"{side}-progress", hidden=True, **{"aria-label": "Checkpoints scored"}),
                _graph(f"{side}-phase", "Scores over training"),
                html.Div(matrices, className="pair"),
            )
        )
    return _panel(
        "training",
        html.P(LEDES["training"], className="lede"),
        html.Div(parts, className="sides stacked"),
        dcc.Interval(id="poll", interval=700, disabled=True),
    )


def _state() -> html.Section:
    parts = [
        _of_side(
            side,
            "state",
            _graph(f"{side}-state", "Norm of the state by position"),
            _caption(f"{side}-state-caption"),
        )
        for side in SIDES
    ]
    return _panel(
        "state",
        html.P(LEDES["state"], className="lede"),
        _loading(html.Div(parts, className="sides stacked")),
    )
