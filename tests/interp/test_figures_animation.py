"""Maps over training keep one scale and stay small; long sequences are joined into stated blocks."""

import numpy as np
import pytest
from interp_reports import report

from interp import figures
from interp.figures.checkpoint_animation import MOST_CELLS, MOST_FRAMES
from interp.figures.downsample import block_extremes

TOKENS = ["a", "b", "c", "a", "b", "c"]


def maps(steps, n=6, scale=1.0):
    return {step: scale * (k + 1) * np.tril(np.ones((n, n))) for k, step in enumerate(steps)}


def notes(figure):
    return [note.text for note in figure.layout.annotations]


def test_a_frame_a_step_in_step_order_with_one_scale():
    figure = figures.checkpoint_animation(maps([200, 0, 50]), TOKENS)
    assert [frame.name for frame in figure.frames] == ["0", "50", "200"]
    # Values were given in the order 200, 0, 50.
    assert [float(frame.data[0].z[5][0]) for frame in figure.frames] == [2, 3, 1]
    assert float(figure.data[0].z[5][0]) == 1
    assert (figure.data[0].zmin, figure.data[0].zmax) == (0, 3)
    assert np.isnan(figure.frames[0].data[0].z[0][5])
    slider, (menu,) = figure.layout.sliders[0], figure.layout.updatemenus
    assert [step.args[0][0] for step in slider.steps] == ["0", "50", "200"] and slider.active == 2
    assert [button.label for button in menu.buttons] == ["Play", "Pause"]
    assert menu.buttons[0].args[0] is None


def test_a_single_step_has_no_controls():
    figure = figures.checkpoint_animation(maps([7]), TOKENS)
    assert not figure.frames and not figure.layout.sliders and not figure.layout.updatemenus


def test_a_negative_weight_at_any_step_makes_all_frames_signed():
    given = maps([0, 10])
    given[0][3, 1] = -2
    figure = figures.checkpoint_animation(given, TOKENS)
    assert (figure.data[0].zmin, figure.data[0].zmax) == (-2, 2)
    assert [[row.count("−") for row in frame.data[0].text] for frame in figure.frames] == [
        [0, 0, 0, 1, 0, 0],
        [0] * 6,
    ]
    assert figure.frames[0].data[0].text[3][1] == "−"
    plain = figures.checkpoint_animation(maps([0, 10]), TOKENS)
    assert plain.frames[0].data[0].text is None


def test_long_series_of_long_sequences_stay_small_and_say_what_was_joined():
    rng, n = np.random.default_rng(0), 300
    given = {step: np.tril(rng.random((n, n))) for step in range(0, 600, 10)}
    given[590][299, 4] = 7
    figure = figures.checkpoint_animation(given, ["a"] * n)
    assert len(figure.frames) == MOST_FRAMES
    assert [figure.frames[0].name, figure.frames[-1].name] == ["0", "590"]
    assert figure.data[0].z.shape == (75, 75) and 75 <= MOST_CELLS
    assert np.nanmax(figure.data[0].z) == 7
    (note,) = notes(figure)
    assert "4 × 4 positions" in note and "40 of 60 checkpoints" in note
    assert len(figure.to_json()) < 2_000_000


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, r"steps \[\]; accepted: at least one"),
        ({-1: np.eye(6)}, r"steps \[-1\]"),
        ({0: np.eye(6), 5: np.eye(5)}, r"the map of step 5 has shape \(5, 5\) for 6 tokens"),
        ({3: np.full((6, 6), np.nan)}, "the map of step 3"),
    ],
)
def test_wrong_maps_are_refused_by_step(given, message):
    with pytest.raises(ValueError, match=message):
        figures.checkpoint_animation(given, TOKENS)


def test_score_matrix_of_a_series_plays():
    series = report()
    figure = figures.score_matrix(series.checkpoints)
    assert [b.label for b in figure.layout.updatemenus[0].buttons] == ["Play", "Pause"]
    assert not figures.score_matrix(series.checkpoints[-1:]).layout.updatemenus


def test_blocks_keep_the_largest_size_with_its_sign():
    weights = np.zeros((10, 10))
    weights[9, 0], weights[8, 1], weights[4, 4] = -3, 2, 1
    shown, block = block_extremes(weights, most=5)
    assert block == 2 and shown.shape == (5, 5)
    assert shown[4, 0] == -3 and shown[2, 2] == 1 and np.count_nonzero(shown) == 2
    same, one = block_extremes(weights, most=10)
    assert one == 1 and same is weights


def test_maps_above_256_cells_say_so_and_smaller_ones_do_not():
    assert notes(figures.attention_map(np.eye(256), ["a"] * 256)) == []
    (note,) = notes(figures.attention_map(np.eye(257), ["a"] * 257))
    assert note == "each cell: the weight of largest size among 2 × 2 positions"
    (note,) = notes(figures.head_grid({(0, 0): np.eye(401)}))
    assert "3 × 3 positions" in note
    assert notes(figures.head_grid({(0, 0): np.eye(100)})) == []


def test_negative_weights_are_marked_without_colour():
    weights = np.array([[0.2, 0], [-0.7, 0.1]])
    assert list(figures.attention_map(weights, ["a", "b"]).data[0].text) == [["", ""], ["−", ""]]
    assert figures.attention_map(np.abs(weights), ["a", "b"]).data[0].text is None
    marks = figures.token_view([0.1, -0.4, -0.01, 0.2], ["a", "b", "c", "d"]).data[2]
    assert list(marks.text) == ["−"] and round(marks.x[0]) == 1
    assert not figures.token_view([0.1, 0.4], ["a", "b"]).data[2].text


def test_series_differ_without_colour():
    bars = figures.offset_profile({"a": [0.1], "b": [0.2], "c": [0.3]}).data
    assert len({bar.marker.pattern.shape for bar in bars}) == 3
    curves = {name: ([0, 10], [0.0, 1.0]) for name in "abc"}
    lines = figures.run_comparison(curves, quantity="q").data
    assert len({line.marker.symbol for line in lines}) == 3
    named = [t for t in figures.phase_plot(report().checkpoints).data if t.name.endswith("pattern")]
    assert len({line.marker.symbol for line in named if "markers" in line.mode}) == 5
