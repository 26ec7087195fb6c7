"""Heads as nodes by layer; Q-, K- and V-composition above its null as edges, each named and numbered."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import plotly.graph_objects as go

from interp.figures.downsample import add_note
from interp.figures.theme import STROKES, Theme, style, theme_of, transparent
from interp.figures.token_text import label

if TYPE_CHECKING:
    from interp.composition import CompositionScores

Head = tuple[int, int]
KINDS = ("q", "k", "v")
# How far edges of a kind bow aside, so that the three between one pair of heads lie apart; and where along
# the edge its number stands.
BOW = {"q": -0.22, "k": 0.0, "v": 0.22}
LABEL_AT = {"q": 0.36, "k": 0.5, "v": 0.64}
# Height of a layer, least and most, and of all of them where that lies between.
LEAST_PX, MOST_PX, ALL_PX = 56, 170, 900
N_CURVE = 21


@dataclass(frozen=True, kw_only=True)
class _Edge:
    kind: str
    sender: Head
    receiver: Head
    score: float
    excess: float


def composition_graph(
    scores: "CompositionScores | Sequence[CompositionScores]",
    *,
    n_std: float = 5.0,
    most: int = 24,
    roles: Mapping[Head, str] | None = None,
    whole_layers: Collection[int] = (),
    mode: str = "light",
    title: str | None = None,
) -> go.Figure:
    """What later heads read from earlier ones, as far as the weights say.

    Args:
        scores: Of `interp.composition.composition_scores`: one kind, or several kinds of one model.
        n_std: An edge is drawn when its score is above both nulls by this many standard deviations.
        most: At most this many edges, the strongest by score; a note says how many were left out.
        roles: Words below the name of a head, such as `induction`.
        whole_layers: Layers whose unit is the layer itself (Mamba-1), named `L0` instead of `L0H0`.
        mode: `light` or `dark`.
        title: Of the figure.

    Returns:
        One line trace an edge (`meta` is [kind, sender layer, sender head, receiver layer, receiver head],
        width by score, stroke and colour by kind), the numbers on the edges, the nodes with layer 0 at the
        bottom. Without an edge the figure says so.

    Raises:
        ValueError: no scores, scores of different models, or one kind twice.
    """
    tables = [scores] if hasattr(scores, "kind") else list(scores)
    _check(tables)
    heads, theme = tables[0].heads, theme_of(mode)
    found = sorted((e for table in tables for e in _above(table, n_std)), key=lambda edge: -edge.score)
    drawn, figure, places = found[:most], go.Figure(), _places(heads)
    for edge in drawn[::-1]:
        figure.add_trace(_line(edge, places, drawn[0].score, theme))
    figure.add_trace(_numbers(drawn, places, theme))
    figure.add_trace(_nodes(places, drawn, theme))
    _names(figure, places, roles or {}, set(whole_layers), theme)
    layers = sorted({layer for layer, _ in heads})
    style(
        figure,
        theme,
        title=title,
        height=min(max(ALL_PX // len(layers), LEAST_PX), MOST_PX) * len(layers) + 96,
    )
    _axes(figure, layers, places)
    add_note(figure, _note(tables, found, drawn, n_std), theme)
    return figure


def _check(tables: Sequence["CompositionScores"]) -> None:
    kinds = [table.kind for table in tables]
    if not tables or len(set(kinds)) != len(kinds):
        raise ValueError(f"kinds of composition: {kinds}; accepted: at least one, each once")
    if len({table.heads for table in tables}) > 1:
        raise ValueError("the composition scores are of models with different heads; accepted: one model's")


def _above(table: "CompositionScores", n_std: float) -> list[_Edge]:
    excess = np.asarray(table.excess)
    return [
        _Edge(
            kind=table.kind,
            sender=sender,
            receiver=receiver,
            score=score,
            excess=float(excess[table.heads.index(sender), table.heads.index(receiver)]),
        )
        for sender, receiver, score in table.above_null(n_std)
    ]


def _places(heads: Sequence[Head]) -> dict[Head, tuple[float, float]]:
    """Each layer's heads in a centred row; layer 0 at the bottom."""
    layers = sorted({layer for layer, _ in heads})
    widths = {layer: sum(head[0] == layer for head in heads) for layer in layers}
    return {(layer, n): (n - (widths[layer] - 1) / 2, float(layers.index(layer))) for layer, n in heads}


def _curve(edge: _Edge, places: Mapping[Head, tuple[float, float]], at: np.ndarray) -> np.ndarray:
    """Points [2 n] of a quadratic curve from sender to receiver, bowed aside by kind."""
    start, end = np.array(places[edge.sender]), np.array(places[edge.receiver])
    # Edges over several layers bow more, or they would run through the heads between.
    reach = end[1] - start[1]
    aside = BOW[edge.kind] * reach + (0.3 * (reach - 1) if start[0] == end[0] else 0.0)
    middle = (start + end) / 2 + [2 * aside, 0]
    at = at[:, None]
    return ((1 - at) ** 2 * start + 2 * at * (1 - at) * middle + at**2 * end).T


def _line(
    edge: _Edge, places: Mapping[Head, tuple[float, float]], largest: float, theme: Theme
) -> go.Scatter:
    x, y = _curve(edge, places, np.linspace(0, 1, N_CURVE))
    which = KINDS.index(edge.kind)
    text = (
        f"{edge.kind.upper()}: L{edge.sender[0]}H{edge.sender[1]} to L{edge.receiver[0]}H{edge.receiver[1]}"
        f"<br>score {edge.score:.3f}, {edge.excess:.1f} standard deviations above its null"
    )
    return go.Scatter(
        x=x,
        y=y,
        mode="lines",
        line={"color": theme.series[which], "dash": STROKES[which], "width": 1.2 + 3 * edge.score / largest},
        name=f"{edge.kind.upper()} {edge.score:.2f}",
        meta=[edge.kind, *edge.sender, *edge.receiver],
        text=text,
        hoverinfo="text",
    )


def _numbers(edges: Sequence[_Edge], places: Mapping[Head, tuple[float, float]], theme: Theme) -> go.Scatter:
    at = [_curve(edge, places, np.array([LABEL_AT[edge.kind]]))[:, 0] for edge in edges]
    return go.Scatter(
        x=[x for x, _ in at],
        y=[y for _, y in at],
        text=[f"{edge.kind.upper()} {edge.score:.2f}" for edge in edges],
        mode="markers+text",
        # A patch of background keeps numbers apart from the lines they stand on.
        marker={"symbol": "square", "size": 26, "color": theme.background},
        textfont={"size": 11, "color": [theme.series[KINDS.index(edge.kind)] for edge in edges]},
        name="scores",
        hoverinfo="skip",
    )


def _nodes(places: Mapping[Head, tuple[float, float]], edges: Sequence[_Edge], theme: Theme) -> go.Scatter:
    used = {head for edge in edges for head in (edge.sender, edge.receiver)}
    return go.Scatter(
        x=[x for x, _ in places.values()],
        y=[y for _, y in places.values()],
        mode="markers",
        marker={
            "size": 17,
            "symbol": ["circle" if head in used else "circle-open" for head in places],
            "color": [theme.ink if head in used else theme.muted for head in places],
        },
        customdata=[[*head] for head in places],
        name="heads",
        hoverinfo="skip",
    )


def _names(
    figure: go.Figure,
    places: Mapping[Head, tuple[float, float]],
    roles: Mapping[Head, str],
    whole: set[int],
    theme: Theme,
) -> None:
    """Each head's name, and below it its role, on a patch of background beside the node."""
    for (layer, n), (x, y) in places.items():
        name = f"L{layer}" if layer in whole else f"L{layer}H{n}"
        role = label(roles[layer, n], limit=28).replace("␣", " ") if (layer, n) in roles else None
        figure.add_annotation(
            text=f"<b>{name}</b>" + (f"<br>{role}" if role else ""),
            x=x,
            y=y,
            xanchor="left",
            yanchor="middle",
            xshift=13,
            align="left",
            showarrow=False,
            borderpad=1,
            bgcolor=transparent(theme.background, 0.82),
            font={"size": 12, "color": theme.ink},
        )


def _axes(figure: go.Figure, layers: Sequence[int], places: Mapping[Head, tuple[float, float]]) -> None:
    reach = max(1.0, *(abs(x) for x, _ in places.values())) + 0.6
    bare = {"showgrid": False, "showline": False, "ticks": ""}
    figure.update_xaxes(**bare, showticklabels=False, range=[-reach, reach])
    figure.update_yaxes(
        **bare,
        tickmode="array",
        tickvals=list(range(len(layers))),
        ticktext=[f"layer {layer}" for layer in layers],
        range=[-0.38, len(layers) - 0.62],
    )
    figure.update_layout(showlegend=False, margin={"l": 70, "r": 16, "t": 62, "b": 16})


def _note(
    tables: Sequence["CompositionScores"], found: Sequence[_Edge], drawn: Sequence[_Edge], n_std: float
) -> str:
    kinds = ", ".join(f"{kind.upper()}" for kind in KINDS if any(table.kind == kind for table in tables))
    if not found:
        return f"no {kinds} composition above its null by {n_std:g} standard deviations"
    least = f"{kinds} composition at least {n_std:g} standard deviations above its null"
    return least if len(drawn) == len(found) else f"{least}; the strongest {len(drawn)} of {len(found)} edges"
