"""The composition graph draws what is above its null, all of it and nothing else."""

import dataclasses

import numpy as np
import pytest
import torch
from language_models import build

from interp import figures
from interp.composition import KINDS, composition_scores
from interp.figures.theme import LIGHT, STROKES
from models.constructed import constructed_model


@pytest.fixture(scope="module")
def wired():
    """K-, Q- and V-composition of the hand-wired induction pair: K alone is above its null."""
    model, circuit = constructed_model("softmax", n_ctx=48)
    with torch.no_grad():
        # Only the match itself stays in the head's QK map (see test_circuits).
        model.blocks[1].attn.W_K[circuit.unit][4 * 32, 32] = 0
    scores = [composition_scores(model, kind) for kind in KINDS]
    return scores, circuit.previous_token, (circuit.layer, circuit.unit)


def edges(figure):
    return [trace for trace in figure.data if trace.mode == "lines"]


def named(figure, name):
    return next(trace for trace in figure.data if trace.name == name)


def test_the_wired_pair_is_the_one_edge(wired):
    scores, sender, receiver = wired
    figure = figures.composition_graph(scores)
    (edge,) = edges(figure)
    assert tuple(edge.meta) == ("k", *sender, *receiver)
    table = scores[KINDS.index("k")]
    score = float(table.scores[table.heads.index(sender), table.heads.index(receiver)])
    assert edge.name == f"K {score:.2f}" and list(named(figure, "scores").text) == [f"K {score:.2f}"]
    assert f"score {score:.3f}" in edge.text and "above its null" in edge.text
    assert (edge.line.color, edge.line.dash) == (LIGHT.series[1], STROKES[1])


def test_an_edge_runs_from_its_sender_to_its_receiver(wired):
    scores, sender, receiver = wired
    figure = figures.composition_graph(scores[1])
    nodes = named(figure, "heads")
    at = {tuple(head): (x, y) for head, x, y in zip(nodes.customdata, nodes.x, nodes.y, strict=True)}
    assert set(at) == set(scores[1].heads)
    (edge,) = edges(figure)
    np.testing.assert_allclose([edge.x[0], edge.y[0]], at[sender])
    np.testing.assert_allclose([edge.x[-1], edge.y[-1]], at[receiver])
    assert at[sender][1] < at[receiver][1]
    filled = [symbol == "circle" for symbol in nodes.marker.symbol]
    assert [tuple(h) for h, used in zip(nodes.customdata, filled, strict=True) if used] == [sender, receiver]


def test_a_random_model_has_no_edge_and_the_figure_says_so():
    model = build("llama")
    figure = figures.composition_graph([composition_scores(model, kind, n_draws=64) for kind in KINDS])
    assert edges(figure) == [] and not named(figure, "scores").text
    texts = [note.text for note in figure.layout.annotations]
    assert "no Q, K, V composition above its null by 5 standard deviations" in texts
    assert {s for s in named(figure, "heads").marker.symbol} == {"circle-open"}


def test_scores_at_the_null_lose_their_edge(wired):
    table, sender, receiver = wired[0][1], *wired[1:]
    scores = table.scores.clone()
    place = table.heads.index(sender), table.heads.index(receiver)
    scores[place] = table.gaussian_mean[place]
    assert edges(figures.composition_graph(dataclasses.replace(table, scores=scores))) == []


def raised(table, values):
    """The scores with the first earlier-later pairs at the given values."""
    scores, places = table.scores.clone(), (~table.scores.isnan()).nonzero()
    for (a, b), value in zip(places.tolist(), values, strict=False):
        scores[a, b] = value
    return dataclasses.replace(table, scores=scores)


def test_only_the_strongest_are_drawn_and_the_note_says_how_many():
    table = raised(composition_scores(build("llama"), "v"), [0.9, 0.8, 0.95, 0.85])
    figure = figures.composition_graph(table, most=3)
    assert sorted(edge.name for edge in edges(figure)) == ["V 0.85", "V 0.90", "V 0.95"]
    widths = {edge.name: edge.line.width for edge in edges(figure)}
    assert widths["V 0.85"] < widths["V 0.90"] < widths["V 0.95"]
    assert any("the strongest 3 of 4 edges" in note.text for note in figure.layout.annotations)


def test_kinds_differ_in_stroke_as_well_as_colour_and_lie_apart():
    model = build("llama")
    tables = [raised(composition_scores(model, kind), [0.9]) for kind in KINDS]
    drawn = edges(figures.composition_graph(tables))
    assert {edge.line.dash for edge in drawn} == set(STROKES)
    assert len({edge.line.color for edge in drawn}) == 3
    middles = sorted(edge.x[len(edge.x) // 2] for edge in drawn)
    assert np.diff(middles).min() > 0.1


@pytest.mark.parametrize("mode", figures.MODES)
def test_roles_are_written_escaped_and_layers_without_heads_have_no_head(wired, mode):
    scores, sender, receiver = wired
    roles = {receiver: "<script>alert(1)</script>", sender: "previous token"}
    figure = figures.composition_graph(scores, roles=roles, whole_layers=(0,), mode=mode)
    texts = [note.text for note in figure.layout.annotations]
    assert "<b>L0</b><br>previous token" in texts
    assert not any("<script" in text for text in texts) and any("&lt;script&gt;" in text for text in texts)
    assert figure.layout.paper_bgcolor == figures.theme_of(mode).background


def test_wrong_scores_are_refused(wired):
    scores = wired[0]
    with pytest.raises(ValueError, match=r"kinds of composition: \['k', 'k'\]"):
        figures.composition_graph([scores[1], scores[1]])
    with pytest.raises(ValueError, match=r"kinds of composition: \[\]"):
        figures.composition_graph([])
    with pytest.raises(ValueError, match="models with different heads"):
        figures.composition_graph([scores[0], composition_scores(build("hybrid"), "k")])
