"""Figures hold the numbers they were given, state their limits, and let no token act."""

import dataclasses
import json

import numpy as np
import plotly.graph_objects as go
import pytest
from interp_reports import NASTY, attention, report

from interp import figures
from interp.figures.attention_map import induction_targets
from interp.figures.direct_label import spread
from interp.figures.score_matrix import score_frames
from interp.figures.step_axis import positions, ticks
from interp.figures.theme import DARK, LIGHT, theme_of
from interp.figures.token_text import label, visible


@pytest.fixture(scope="module")
def series():
    return report()


@pytest.fixture(scope="module")
def mamba():
    return report(mixer="mamba2")


def lightness(colour):
    """OKLab lightness of a hex colour."""
    rgb = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    rgb = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    lms = np.array(
        [
            [0.4122214708, 0.5363325363, 0.0514459929],
            [0.2119034982, 0.6806995451, 0.1073969566],
            [0.0883024619, 0.2817188376, 0.6299787005],
        ]
    )
    return np.cbrt(lms @ rgb) @ [0.2104542553, 0.7936177850, -0.0040720468]


@pytest.mark.parametrize("theme", [LIGHT, DARK])
def test_scales_are_even_in_lightness_and_diverging_ones_symmetric(theme):
    levels = np.array([lightness(colour) for colour in theme.sequential])
    steps = np.diff(levels)
    assert (np.sign(steps) == np.sign(steps[0])).all()
    assert np.abs(steps).max() < 1.5 * np.abs(steps).min()
    both = np.array([lightness(colour) for colour in theme.diverging])
    np.testing.assert_allclose(both, both[::-1], atol=0.03)


@pytest.mark.parametrize("theme", [LIGHT, DARK])
def test_lines_stand_out_from_the_background(theme):
    ground = lightness(theme.background)
    for colour in (
        *theme.series,
        theme.ink,
        theme.muted,
        *(c for r, c in theme.roles.items() if r != "other"),
    ):
        assert abs(lightness(colour) - ground) > 0.3, colour


def test_an_unknown_mode_is_refused():
    with pytest.raises(ValueError, match="mode 'sepia'; accepted: light, dark"):
        theme_of("sepia")


def test_phase_plot_holds_the_curves_and_shades_the_onsets(series):
    figure = figures.phase_plot(series.checkpoints, transition=series.phase_transition)
    traces = {trace.name: trace for trace in figure.data}
    best = traces["L1H0 pattern"]
    steps = [checkpoint.step for checkpoint in series.checkpoints]
    expected = [h.prefix_matching for c in series.checkpoints for h in c.heads if (h.layer, h.head) == (1, 0)]
    assert list(best.y) == expected
    assert list(best.customdata) == steps
    assert list(traces["order_gain"].y) == [c.order_gain_nats for c in series.checkpoints]
    assert list(traces["in_context_learning"].y) == [c.in_context_learning_nats for c in series.checkpoints]
    bands = [shape for shape in figure.layout.shapes if shape.type == "rect"]
    onsets = [
        series.phase_transition[name]["onset_interval"]
        for name in ("prefix_matching", "order_gain", "in_context_learning")
    ]
    for band, onset in zip(bands, onsets, strict=True):
        np.testing.assert_allclose([band.x0, band.x1], positions(steps, onset))
    # The shaded interval is that of the bootstrap, and its label says so.
    assert sum("(95%) · midpoint" in note.text for note in figure.layout.annotations) == 3
    plain = figures.phase_plot(series.checkpoints)
    assert not [shape for shape in plain.layout.shapes if shape.type == "rect"]


def test_the_learning_curve_is_the_one_its_transition_is_fitted_to(series):
    """Means around two places, as a report holds them; two single tokens date nothing."""
    windows = [(0.1 * n, 0.1 * n + 0.2) for n in range(len(series.checkpoints))]
    checkpoints = [
        dataclasses.replace(c, in_context_learning_by_window=pair)
        for c, pair in zip(series.checkpoints, windows, strict=True)
    ]
    drawn = figures.phase_plot(checkpoints, transition=series.phase_transition)
    curve = next(trace for trace in drawn.data if trace.name == "in_context_learning")
    np.testing.assert_allclose(curve.y, [0.1 * n + 0.1 for n in range(len(checkpoints))])


def test_phase_plot_of_one_checkpoint_is_refused(series):
    with pytest.raises(ValueError, match="at least 2 checkpoints; got 1"):
        figures.phase_plot(series.checkpoints[-1:])


def test_step_zero_has_a_place_left_of_the_first_step():
    steps = [0, 10, 100, 1000]
    places = positions(steps)
    assert np.isfinite(places).all() and (np.diff(places) > 0).all()
    values, labels = ticks(steps)
    assert labels[0] == "0" and values[0] == places[0]
    assert dict(zip(labels, values, strict=True))["1k"] == pytest.approx(np.log(1000))
    assert places[0] < positions(steps, [5])[0] < places[1]
    assert ticks([300, 400])[1] == ["300", "400"]


def test_score_matrix_holds_the_scores_in_their_places(series):
    figure = figures.score_matrix(series.checkpoints[-1:], score="copying_edge")
    cells = figure.data[0]
    for head in series.checkpoints[-1].heads:
        assert cells.z[head.layer][head.head] == head.copying_edge
    assert (cells.zmin, cells.zmax) == (-1, 1)
    assert not figure.frames and not figure.layout.sliders
    assert figure.data[1].text[4] == f"{cells.z[1][0]:.2f}"


def test_score_matrix_has_a_frame_and_a_slider_step_for_each_checkpoint(series):
    figure = figures.score_matrix(series.checkpoints)
    assert [frame.name for frame in figure.frames] == [str(c.step) for c in series.checkpoints]
    assert len(figure.layout.sliders[0].steps) == len(series.checkpoints)
    first = series.checkpoints[0]
    assert figure.frames[0].data[0].z[1][0] == next(
        h.prefix_matching for h in first.heads if (h.layer, h.head) == (1, 0)
    )
    frames = score_frames(series.checkpoints, score="prefix_matching", reading="pattern")
    assert list(frames) == [str(c.step) for c in series.checkpoints]
    json.dumps(frames, allow_nan=False)


def test_score_matrix_leaves_absent_units_blank_and_widens_a_range_that_is_left(series):
    heads = [h for h in series.checkpoints[-1].heads if (h.layer, h.head) != (0, 3)]
    heads[0] = dataclasses.replace(heads[0], prefix_matching=-1.5)
    one = dataclasses.replace(series.checkpoints[-1], heads=tuple(heads))
    cells = figures.score_matrix([one]).data[0]
    assert cells.z[0][3] is None
    assert (cells.zmin, cells.zmax) == (-1.5, 1.5)


def test_score_matrix_names_what_is_there(mamba):
    assert figures.score_matrix(mamba.checkpoints[-1:], reading="ssm").data[0].z
    with pytest.raises(ValueError, match="no unit has the reading 'pattern'; there are: block, ssm"):
        figures.score_matrix(mamba.checkpoints, reading="pattern")
    with pytest.raises(ValueError, match="score 'nope'; accepted: prefix_matching"):
        figures.score_matrix(mamba.checkpoints, score="nope", reading="ssm")


def test_attention_map_shows_destination_on_y_and_source_on_x():
    weights = np.array([[1.0, 0, 0], [0.25, 0.75, 0], [0.5, 0, 0.5]])
    figure = figures.attention_map(weights, ["a", "b", "a"])
    cells = figure.data[0]
    assert cells.z[1][0] == 0.25
    assert np.isnan(cells.z[0][1]) and cells.z[2][1] == 0
    assert (cells.zmin, cells.zmax) == (0, 1)
    assert figure.layout.yaxis.range[0] > figure.layout.yaxis.range[1]
    assert list(figure.layout.yaxis.ticktext) == ["‘a’ @0", "‘b’ @1", "‘a’ @2"]
    assert "destination %{y}" in cells.hovertemplate and "source %{x}" in cells.hovertemplate


def test_signed_weights_get_symmetric_stated_limits():
    weights = np.array([[0.2, 0], [-0.7, 0.1]])
    cells = figures.attention_map(weights, ["a", "b"]).data[0]
    assert (cells.zmin, cells.zmax) == (-0.7, 0.7)
    assert list(cells.colorbar.ticktext) == ["−0.7", "0", "0.7"]
    assert cells.colorscale[5][1] == LIGHT.diverging[5]
    fixed = figures.attention_map(weights, ["a", "b"], limit=2.0).data[0]
    assert (fixed.zmin, fixed.zmax) == (-2, 2)


def test_induction_targets_follow_earlier_copies_by_equality():
    assert induction_targets(["a", "b", "a", "c", "a"]) == [(2, 1), (4, 1), (4, 3)]
    outline = figures.attention_map(np.tril(np.ones((5, 5))), ["a", "b", "a", "c", "a"]).data[1]
    assert list(outline.x).count(None) == 4
    bare = figures.attention_map(np.eye(2), ["a", "b"]).data[1]
    assert [x for x in bare.x if x is not None] == []


def test_long_sequences_are_drawn_as_block_extremes():
    weights = np.zeros((600, 600))
    weights[599, 3] = -0.9
    cells = figures.attention_map(weights, ["a"] * 600).data[0]
    assert cells.z.shape[0] <= 256
    assert cells.z.min() == -0.9 or np.nanmin(cells.z) == -0.9


@pytest.mark.parametrize(
    ("matrix", "tokens", "message"),
    [
        (np.eye(3), ["a"], r"shape \(3, 3\) for 1 tokens"),
        (np.ones((2, 3)), ["a", "b"], "accepted"),
        (np.array([[1, 0], [np.nan, 1]]), ["a", "b"], "nan at destination 1, source 0"),
    ],
)
def test_attention_map_refuses_by_name(matrix, tokens, message):
    with pytest.raises(ValueError, match=message):
        figures.attention_map(matrix, tokens)


@pytest.mark.parametrize(
    ("token", "text"),
    [
        (" the", "␣the"),
        ("\n", "↵"),
        ("\t\r", "⇥␍"),
        ("\x00", "⟨U+0000⟩"),
        ("\u202eabc", "⟨U+202E⟩abc"),
        ("\ud83d", "⟨U+D83D⟩"),
        ("", "∅"),
        (b"\xe2\x82", "⟨E2 82⟩"),
        ("é".encode(), "é"),
        ("👩‍🔬", "👩‍🔬"),
    ],
)
def test_tokens_are_made_visible(token, text):
    assert visible(token) == text


def test_labels_are_escaped_isolated_and_cut():
    assert label("<b>", limit=None) == "&lt;b&gt;"
    assert label("&lt;") == "&amp;lt;"
    assert label("שלום") == "\u2068שלום\u2069"
    assert len(label("a" * 60, limit=12)) == 12


@pytest.mark.parametrize("mode", figures.MODES)
def test_every_figure_survives_nasty_tokens_in_both_modes(mode, series):
    n = len(NASTY)
    weights = np.array(attention(NASTY, np.random.default_rng(0)))
    drawn = [
        figures.attention_map(weights, NASTY, mode=mode),
        figures.token_view(weights[-1], NASTY, selected=n - 1, mode=mode),
        figures.head_grid({(0, 0): weights, (1, 1): -weights}, mode=mode),
        figures.phase_plot(series.checkpoints, mode=mode),
        figures.loss_by_position([np.arange(5.0)], [100], positions=(4, 1), mode=mode),
        figures.offset_profile({"L0H0": [0.1, 0.5]}, controls={"chance": 0.05}, mode=mode),
        figures.run_comparison(
            {"<script>": ([0, 10], [0.0, 1.0])}, quantity="score", midpoints={"<script>": 5}, mode=mode
        ),
    ]
    for figure in drawn:
        assert isinstance(figure, go.Figure)
        text = figure.to_json()
        text.encode("utf-8")
        assert "<script" not in text and "\\u003cscript" not in text
        assert figure.layout.paper_bgcolor == theme_of(mode).background


def test_token_view_keeps_reading_order_and_limits():
    figure = figures.token_view([0.1, -0.4, 0.2], ["a", "b", "c"], n_columns=2)
    cells = figure.data[0]
    assert cells.z[1][0] == 0.2 and np.isnan(cells.z[1][1])
    assert (cells.zmin, cells.zmax) == (-0.4, 0.4)
    with pytest.raises(ValueError, match="selected 3; accepted: 0 to 2"):
        figures.token_view([0.1, 0.4, 0.2], ["a", "b", "c"], selected=3)


def test_head_grid_shares_one_scale():
    figure = figures.head_grid({(0, 0): np.eye(3), (2, 5): -2 * np.eye(3)})
    assert (figure.layout.coloraxis.cmin, figure.layout.coloraxis.cmax) == (-2, 2)
    assert figure.data[1].z[0][0] == -2
    with pytest.raises(ValueError, match=r"\(0, 1\) has shape \(2, 3\)"):
        figures.head_grid({(0, 1): np.ones((2, 3))})


def test_curves_hold_their_input():
    losses = np.random.default_rng(0).random((30, 12))
    figure = figures.loss_by_position(losses, list(range(30)), n_lines=5)
    assert len(figure.data) == 5
    np.testing.assert_array_equal(figure.data[-1].y, losses[-1])
    bars = figures.offset_profile({"a": [0.3, 0.2]}, first_offset=-1).data[0]
    assert list(bars.x) == [-1, 0] and list(bars.y) == [0.3, 0.2]
    lines = figures.run_comparison({"a": ([0, 10], [0.0, 1.0])}, quantity="q")
    assert list(lines.data[0].y) == [0, 1] and list(lines.data[0].customdata) == [0, 10]
    with pytest.raises(ValueError, match="run 'b' has 1 steps"):
        figures.run_comparison({"b": ([0], [1.0])}, quantity="q")


def test_labels_spread_without_overlap_and_stay_inside():
    places = spread([0.5, 0.5, 0.5, 0.0, 1.0], gap=0.1, low=0.0, high=1.0)
    ordered = sorted(places)
    assert min(np.diff(ordered)) >= 0.1 - 1e-9
    assert ordered[0] >= 0 and ordered[-1] <= 1
    assert spread([0.2, 0.8], gap=0.1, low=0, high=1) == [0.2, 0.8]
