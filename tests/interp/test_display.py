"""Records in a notebook: their numbers are there, nothing runs, nothing is fetched, no text acts."""

import base64
import dataclasses
import math
import re
import struct
import sys
import zlib
from html.parser import HTMLParser
from xml.etree import ElementTree

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import pytest
import torch
from interp_reports import NASTY, report
from language_models import build, tokens

from interp import figures
from interp.circuits import unit_weights
from interp.composition import composition_scores
from interp.figures.still import svg
from interp.offset_cuts import mean, offset_profile
from interp.offset_edges import probe_matches
from interp.patching import activation_patching
from interp.phase_transition import from_checkpoints
from interp.records import rows
from interp.sequences import repeated_tokens
from interp.sites import Site, head_sites
from interp.steering import Steering, steering_effect
from models.constructed import constructed_model

SVG = "{http://www.w3.org/2000/svg}"


class Page(HTMLParser):
    """Tags, addresses, cells and the text of a display."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.sources, self.cells, self.words, self.hidden = [], [], [], "", []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        found = dict(attributes)
        self.sources += [value for name, value in attributes if name in ("src", "href")]
        self.hidden += [found.get("class")] if "display:none" in (found.get("style") or "") else []
        if tag == "td":
            self.cells.append("")

    def handle_data(self, data):
        self.words += data
        if self.cells:
            self.cells[-1] += data


def shown(record):
    return Page(record._repr_mimebundle_()["text/html"])


def picture(page, k=0):
    """The k-th picture of a display as XML."""
    return ElementTree.fromstring(base64.b64decode(page.sources[k].split(",")[1]))


def texts(xml):
    return ["".join(text.itertext()) for text in xml.iter(f"{SVG}text")]


@pytest.fixture(scope="module")
def records():
    """One record of every kind that displays itself."""
    series, model, ids = report(), build("hybrid"), tokens()
    probe = repeated_tokens(4, 6, 2, ids=torch.arange(model.config.d_vocab), seed=0)
    with torch.no_grad():
        patched = activation_patching(
            model, ids, ids.flip(1), head_sites(model), lambda logits: logits[:, -1, 0]
        )
        return {
            "report": series,
            "checkpoint": series.checkpoints[-1],
            "head": series.checkpoints[-1].heads[4],
            "map": series.attention_maps[0],
            "transition": from_checkpoints(series.checkpoints),
            "composition": composition_scores(model, "k"),
            "patching": patched,
            "steering": steering_effect(model, Steering(layer=0, scale=0.0), probe),
            "offsets": offset_profile(model, probe_matches(probe)),
            "units": unit_weights(model, 2),
        }


NAMES = (
    "report",
    "checkpoint",
    "head",
    "map",
    "transition",
    "composition",
    "patching",
    "steering",
    "offsets",
    "units",
)


@pytest.mark.parametrize("name", NAMES)
def test_a_display_runs_nothing_and_fetches_nothing(records, name):
    bundle = records[name]._repr_mimebundle_()
    assert set(bundle) == {"text/html", "text/plain"}
    page = Page(bundle["text/html"])
    assert set(page.tags) <= {"div", "style", "p", "img", "table", "thead", "tbody", "tr", "th", "td"}
    assert all(source.startswith("data:image/svg+xml;base64,") for source in page.sources)
    for k in range(len(page.sources)):
        drawn = base64.b64decode(page.sources[k].split(",")[1]).decode()
        addresses = re.findall(r"https?://[^\"' )]+", drawn)
        assert set(addresses) <= {"http://www.w3.org/2000/svg"}
        assert "<script" not in drawn and "onload" not in drawn
    assert len(bundle["text/html"]) < 150_000 and len(bundle["text/plain"]) < 6_000
    assert page.cells and records[name]._repr_html_() == bundle["text/html"]


def test_a_report_shows_its_finding_its_units_and_its_curves(records):
    series = records["report"]
    page = shown(series)
    assert "2 induction heads among 8 scored units at step 2,000" in page.words
    best = series.induction_heads()[0]
    assert page.cells[:2] == ["L1H0", f"{best.prefix_matching:.3f}"]
    light, dark = picture(page, 0), picture(page, 1)
    assert page.hidden == ["bsx-dark"]
    assert "L1H0 ●" in texts(light) and "order gain" in texts(light)
    grounds = [next(xml.iter(f"{SVG}rect")).get("fill") for xml in (light, dark)]
    assert grounds == [figures.LIGHT.background, figures.DARK.background]


def test_one_checkpoint_shows_a_map_and_without_maps_its_scores():
    one = report(steps=(100,))
    assert "source token" in texts(picture(shown(one)))
    bare = dataclasses.replace(one, attention_maps=())
    assert "prefix matching" in texts(picture(shown(bare)))


def test_tables_hold_every_row(records):
    series = records["report"]
    table = series.to_pandas()
    assert len(table) == len(rows(series)) == 22 * 8
    last = table[(table.step == 2000) & (table.layer == 1) & (table["head"] == 0)]
    assert last.prefix_matching.item() == series.induction_heads()[0].prefix_matching
    assert table.offset_effect_nats.isna().all() and table.order_gain_nats.dtype == float
    assert len(records["checkpoint"].to_pandas()) == 8
    assert records["head"].to_pandas().prefix_matching.item() == records["head"].prefix_matching


def test_an_attention_map_is_edges(records):
    drawn = records["map"]
    table, n = drawn.to_pandas(), len(drawn.tokens)
    assert len(table) == n * (n + 1) // 2
    edge = table[(table.dest == 5) & (table.src == 2)].iloc[0]
    assert (edge.weight, edge.dest_token, edge.src_token) == (
        drawn.matrix[5][2],
        drawn.tokens[5],
        drawn.tokens[2],
    )


def test_an_offset_profile_is_means_over_sequences(records):
    profile = records["offsets"]
    table = profile.to_pandas()
    layer = profile.layers[1]
    row = table[(table.layer == 1) & table.unit.isna() & (table.offset == layer.offsets[3])].iloc[0]
    assert row.cut_nats == pytest.approx(float(mean(layer.cut[-1, 3])))
    assert row.random_nats == pytest.approx(float(mean(layer.random[-1])))
    assert len(table) == sum(len(one.units) * len(one.offsets) for one in profile.layers)
    assert len(layer.to_pandas()) == len(layer.units) * len(layer.offsets)
    best = max(one.effect(r)[0] for one in profile.layers for r in range(len(one.units)))
    assert f"{best:.3f}" in shown(profile).words


def test_patching_is_recovered_shares_by_site(records):
    result = records["patching"]
    table = result.to_pandas()
    shares = result.recovered.double().flatten(1).mean(1)
    np.testing.assert_allclose(table.recovered, shares)
    assert list(zip(table.layer, table["head"], strict=True)) == [(s.layer, s.head) for s in result.sites]
    best = result.sites[int(shares.argmax())].label
    assert f"{best} recovers most: {float(shares.max()):.3f}" in shown(result).words
    grid = result.figure().data[0].z
    assert grid[0][2] == pytest.approx(float(shares[2])) and math.isnan(grid[1][5])


def test_patching_of_mixed_sites_is_bars_and_of_positions_a_grid():
    model, ids = build("hybrid"), tokens()
    at = [Site(kind="resid_pre", layer=layer, positions=(p,)) for layer in (0, 1) for p in (1, 4)]
    mixed = [Site(kind="resid_pre", layer=0), Site(kind="mixer_out", layer=1)]
    with torch.no_grad():
        by_place, bars = (
            activation_patching(model, ids, ids.flip(1), s, lambda x: x.mean()) for s in (at, mixed)
        )
    assert by_place.figure().layout.xaxis.title.text == "position"
    assert list(by_place.figure().layout.xaxis.ticktext) == ["1", "4"]
    assert [*bars.figure().data[0].y] == pytest.approx(bars.recovered.tolist())


def test_composition_is_pairs_and_its_picture_the_graph():
    model, circuit = constructed_model("softmax", n_ctx=48)
    with torch.no_grad():
        model.blocks[1].attn.W_K[circuit.unit][4 * 32, 32] = 0
    found = composition_scores(model, "k")
    table = found.to_pandas()
    (pair,) = table[table.above_null].to_dict("records")
    assert (pair["sender_layer"], pair["sender_head"]) == circuit.previous_token
    assert (pair["receiver_layer"], pair["receiver_head"]) == (circuit.layer, circuit.unit)
    assert f"K {pair['score']:.2f}" in texts(picture(shown(found)))
    assert len(table) == int((~found.scores.isnan()).sum())


def test_without_composition_there_is_no_picture():
    found = composition_scores(build("llama"), "q", n_draws=64)
    assert found.figure() is None and shown(found).sources == []
    assert "Q-composition: 0 of 16 pairs" in shown(found).words


def test_transitions_and_steering_say_their_numbers(records):
    transition, effect = records["transition"], records["steering"]
    assert "Prefix matching sets in between steps 150 and 175" in shown(transition).words
    table = transition.to_pandas().set_index("curve")
    assert table.loc["prefix_matching", "onset_step_low"] == 150 and table.is_transition.all()
    none = dataclasses.replace(transition, prefix_matching=None, lead_steps=None)
    assert not none.to_pandas().set_index("curve").loc["prefix_matching", "is_transition"]
    assert "Prefix matching has no transition." in shown(none).words
    one = transition.order_gain.to_pandas()
    assert one.midpoint_step.item() == transition.order_gain.midpoint_step
    change, error = effect.change("repeat")
    row = effect.to_pandas().set_index("positions").loc["repeat"]
    assert (row.change_nats, row.change_se_nats) == (pytest.approx(change), pytest.approx(error))
    assert list(effect.figure().data[0].y)[:2] == pytest.approx([row.loss_nats, row.steered_nats])


def test_circuits_have_norms(records):
    unit = records["units"]
    table = unit.to_pandas()
    assert table.ov_norm[1] == pytest.approx(float((unit.W_V[1] @ unit.W_O[1]).detach().norm()))
    assert "SiLU and gate left out" in shown(unit).words


def test_no_text_of_a_model_acts():
    nasty = report(nasty=True, path="<script>alert(1)</script>\u202e")
    page = shown(dataclasses.replace(nasty, notes=("<b>bold</b> & 'quoted'",)))
    assert not {"script", "b"} & set(page.tags)
    assert "<script>alert(1)</script>⟨U+202E⟩" in page.words and "<b>bold</b> & 'quoted'" in page.words
    drawn = shown(nasty.attention_maps[0])
    assert any("<script>" in cell for cell in drawn.cells)
    labels = texts(picture(drawn))
    assert any(text.startswith("<script") for text in labels) and "script" not in drawn.tags
    assert len(nasty.attention_maps[0].to_pandas()) == 28 * 29 // 2


def test_wide_tables_wrap_their_heads_and_scroll():
    page = report()._repr_html_()
    assert re.search(r"\.bsx th\{[^}]*white-space:normal\}", page)
    # Also where a viewer leaves the style sheet out.
    bare = re.sub(r"<style>.*?</style>", "", page, flags=re.S)
    assert re.search(r'<div [^>]*style="overflow-x:auto"><table>', bare)


def test_long_tables_say_what_they_leave_out():
    page = shown(report(n_heads=12))
    assert "and 12 more rows: to_pandas()" in page.words
    plain = report(n_heads=12)._repr_mimebundle_()["text/plain"]
    assert plain.endswith("and 12 more rows: to_pandas()")
    assert "more rows" not in shown(report(n_heads=4)).words


def test_plain_text_and_lists_stay_short(records):
    bundle = records["report"]._repr_mimebundle_()
    assert bundle["text/plain"].startswith("DetectionReport: runs/segment-copy-softmax: 2 layers (softmax)")
    printed = []
    printer = type("Printer", (), {"text": lambda self, text: printed.append(text)})()
    records["head"]._repr_pretty_(printer, False)
    assert printed[0].startswith("HeadScore: L1H0 pattern: an induction head") and len(printed[0]) < 200
    for name in NAMES:
        # `print` says what a notebook says; a report is its table.
        own = repr(records[name])
        assert own.startswith(type(records[name]).__name__) and len(own) < (5000 if name == "report" else 600)
    assert repr([records["head"]]) == f"[{printed[0]}]"


def test_what_is_printed_where_pandas_is_not_installed(records, monkeypatch):
    monkeypatch.setitem(sys.modules, "interp.display.head", None)
    assert repr(records["head"]).startswith("HeadScore(layer=1, head=0, unit='head', reading='pattern'")


def test_displays_need_no_plotly_script(records):
    """Eight displays of one notebook together are smaller than a tenth of plotly.js."""
    total = sum(len(records[name]._repr_html_()) for name in NAMES)
    assert total < 400_000


def test_a_still_picture_has_the_figures_marks():
    bars = ElementTree.fromstring(svg(figures.offset_profile({"a": [0.5, 1.0], "b": [0.25, 0.75]})))
    heights = [
        float(r.get("height")) for r in bars.iter(f"{SVG}rect") if r.get("fill") in ("#0072b2", "url(#fill1)")
    ]
    # Legend keys are 12 high; bars of 0.5, 1, 0.25 and 0.75 follow their values.
    drawn = [h for h in heights if h != 12]
    np.testing.assert_allclose(np.array(drawn) / max(drawn), [0.5, 1, 0.25, 0.75], atol=0.01)
    assert {"a", "b", "+1", "+2"} <= set(texts(bars))
    cells = ElementTree.fromstring(svg(figures.attention_map(np.eye(3), ["<a>", "&", "c"])))
    assert "<a>" in texts(cells) and len(list(cells.iter(f"{SVG}image"))) == 1
    table = ElementTree.fromstring(svg(figures.score_matrix(report().checkpoints[-1:])))
    assert "0.95" in texts(table)
    assert sum(r.get("fill") == figures.LIGHT.missing for r in table.iter(f"{SVG}rect")) == 1


def test_a_still_picture_puts_cells_where_the_figure_has_them():
    weights = np.zeros((3, 3))
    weights[2, 0] = 1.0
    xml = ElementTree.fromstring(svg(figures.attention_map(weights, ["a", "b", "c"])))
    png = base64.b64decode(next(xml.iter(f"{SVG}image")).get("href").split(",")[1])
    assert png[16:24] == (3).to_bytes(4, "big") * 2
    length = struct.unpack(">I", png[33:37])[0]
    lines = zlib.decompress(png[41 : 41 + length])
    pixels = np.array(
        [np.frombuffer(lines[k * 13 + 1 : k * 13 + 13], np.uint8).reshape(3, 4) for k in range(3)]
    )
    darkest = tuple(int(figures.LIGHT.sequential[-1][i : i + 2], 16) for i in (1, 3, 5))
    assert tuple(pixels[2, 0][:3]) == darkest
    # Blank above the diagonal, opaque below.
    assert pixels[0, 2, 3] == 0 and pixels[1, 0, 3] == 255


def test_a_still_picture_refuses_what_it_cannot_draw():
    with pytest.raises(ValueError, match="a trace of type 'pie'; accepted: heatmap, scatter, bar"):
        svg(go.Figure(go.Pie(values=[1])))


def test_to_pandas_gives_frames(records):
    for name in NAMES:
        assert isinstance(records[name].to_pandas(), pd.DataFrame) and len(records[name].to_pandas())


def test_effects_refuse_nothing_to_draw():
    with pytest.raises(ValueError, match="bars take 1 to 40 values; got 0"):
        figures.effect_bars({})
    with pytest.raises(ValueError, match="no effect to draw"):
        figures.effect_matrix({})
    assert "<script" not in figures.effect_bars({NASTY[0]: 1.0}).to_json()
