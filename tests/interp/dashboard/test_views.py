"""Figures and text cells: pure functions with known answers."""

import json

import numpy as np
import pytest
from plotly.io.json import to_json_plotly

from interp.dashboard import views
from interp.dashboard.cache import BoundedCache
from interp.dashboard.captions import map_caption, number
from interp.dashboard.causal import CutProfile
from interp.dashboard.choices import kept, step_marks
from interp.dashboard.map_frame import filled_map
from interp.dashboard.prompt import Prompt
from interp.dashboard.sheet import Sheet
from interp.dashboard.states import StateNorms
from interp.dashboard.token_cells import colours_at, start_position, strongest, token_strip
from interp.figures.theme import LIGHT


def sheet(weights, tokens=None) -> Sheet:
    weights = np.asarray(weights, dtype=np.float32)
    n = weights.shape[-1]
    tokens = tuple(tokens or map(str, range(n)))
    ids = tuple(sorted(set(tokens), key=str).index(token) for token in tokens)
    return Sheet(
        prompt=Prompt(ids=ids, tokens=tokens),
        layer=0,
        mixer="softmax",
        reading="pattern",
        unit="head",
        values="scored",
        weights=weights,
        quantity="attention",
        signed_possible=False,
    )


def lower(n: int, seed: int = 0) -> np.ndarray:
    return np.tril(np.random.default_rng(seed).random((1, n, n)))


def test_map_shows_the_weights_and_outlines_the_targets():
    weights = lower(6)
    figure = views.attention_view(sheet(weights, "abcabc"), 0, side=300)
    z = np.asarray(figure.data[0].z)
    np.testing.assert_array_equal(np.tril(np.nan_to_num(z)), weights[0].astype(np.float32))
    assert np.isnan(z[0, 1:]).all()
    x, y = (np.asarray(figure.data[1][axis]).reshape(-1, 6)[:, :4].mean(1) for axis in "xy")
    # dest 3 (a) reads b at 1, 4 (b) reads c at 2, 5 (c) reads a at 3; token order of a square's corners.
    assert sorted(zip(np.round(y), np.round(x), strict=True)) == [(3, 1), (4, 2), (5, 3)]
    bare = views.attention_view(sheet(weights, "abcabc"), 0, targets=False)
    assert [value for value in bare.data[1].x if value is not None] == []


def test_signed_maps_have_symmetric_limits():
    weights = lower(4)
    weights[0, 3, 1] = -2.5
    drawn = views.attention_view(sheet(weights), 0).data[0]
    assert (drawn.zmin, drawn.zmax) == (-2.5, 2.5)
    assert "from −2.500 to 2.500" in map_caption(sheet(weights), 0, 2.5, False)


def test_long_maps_join_cells_and_zooming_shows_each():
    weights = np.zeros((1, 1100, 1100))
    weights[0, 900, 17] = 0.75
    weights[0, 1000, 500] = -0.5
    long = sheet(weights)
    whole = np.asarray(views.attention_view(long, 0).data[0].z)
    assert whole.shape == (367, 367) and np.nanmax(whole) == 0.75 and np.nanmin(whole) == -0.5
    window = views.zoomed(long, 0, (999.6, 880.2), (9.7, 30.2))
    assert window["block"] == 1
    np.testing.assert_array_equal(window["x"], np.arange(10, 31))
    np.testing.assert_array_equal(window["y"], np.arange(880, 1001))
    assert window["z"][20, 7] == 0.75 and np.count_nonzero(window["z"]) == 1
    assert window["x_names"][7] == "‘17’ @17" and window["y_names"][20] == "‘900’ @900"
    assert views.zoomed(long, 0, (-0.5, 1099.5), (-0.5, 1099.5))["block"] == 3
    corner = views.zoomed(long, 0, (0, 5), (0, 5))["z"]
    assert np.isnan(corner[0, 1]) and corner[5, 0] == 0


def test_a_weight_that_is_no_number_stays_blank_in_the_zoom():
    weights = lower(6)
    weights[0, 4, 2] = np.nan
    z = views.zoomed(sheet(weights), 0, (-0.5, 5.5), (-0.5, 5.5))["z"]
    assert np.isnan(z[4, 2]) and z[4, 1] == np.float32(weights[0, 4, 1])


def test_labels_are_thinned_where_they_would_touch():
    def labelled(n: int, side: int) -> list[int]:
        axis = views.attention_view(sheet(lower(n)), 0, side=side).layout.xaxis2
        assert list(axis.ticktext) == [str(place) for place in axis.tickvals]
        return list(axis.tickvals)

    assert labelled(30, 560) == list(range(30))
    assert labelled(60, 700) == list(range(60))
    assert labelled(60, 400) == list(range(0, 60, 2))
    assert labelled(100, 400) == list(range(0, 100, 10))


def test_strips_show_what_is_read_and_what_reads():
    weights = np.zeros((1, 6, 6))
    weights[0, 3, 1], weights[0, 5, 3] = 0.9, 0.4
    one = sheet(weights, "abcabc")
    reads = token_strip(one, 0, 3)
    assert [cell.weight for cell in reads.cells] == pytest.approx([0, 0.9, 0, 0, 0, 0])
    assert [cell.target for cell in reads.cells] == [False, True] + [False] * 4
    assert [cell.selected for cell in reads.cells].index(True) == 3
    assert reads.limits == pytest.approx((0, 0.9)) and reads.cells[1].background == LIGHT.sequential[-1]
    assert reads.cells[0].background == LIGHT.sequential[0]
    read_by = token_strip(one, 0, 3, direction="read_by")
    assert [cell.weight for cell in read_by.cells] == pytest.approx([0, 0, 0, 0, 0, 0.4])
    # The token before place 3 is c: induction of a later c, at 5, reads place 3.
    assert [cell.position for cell in read_by.cells if cell.target] == [5]
    assert strongest(one, 0, 3) == [(1, pytest.approx(0.9))]
    assert token_strip(one, 0, 0).limits == (0, 0)
    with pytest.raises(ValueError, match="0 to 5"):
        token_strip(one, 0, 6)
    with pytest.raises(ValueError, match="accepted: reads, read_by"):
        token_strip(one, 0, 1, direction="both")


def test_strips_of_signed_weights_have_a_neutral_middle():
    weights = np.zeros((1, 3, 3))
    weights[0, 2] = [-0.5, 0.25, 0]
    cells = token_strip(sheet(weights), 0, 2).cells
    assert cells[2].background == LIGHT.diverging[5] and cells[0].background == LIGHT.diverging[0]
    assert "−0.5000" in cells[0].title


def test_hostile_tokens_stay_plain_text():
    hostile = ("<script>", "\n", b"\xf0\x9f", "\u202eabc", "🙂", "שלום")
    cells = token_strip(sheet(np.zeros((1, 6, 6)), hostile), 0, 5).cells
    assert [cell.text for cell in cells] == ["<script>", "↵", "⟨F0 9F⟩", "⟨U+202E⟩abc", "🙂", "שלום"]
    figure = views.attention_view(sheet(np.zeros((1, 6, 6)), hostile), 0)
    assert figure.layout.xaxis2.ticktext[0] == "&lt;script&gt;"


def test_first_token_chosen():
    assert start_position("abcabcabc") == 4
    assert start_position("abcdef") == 5
    assert start_position("a") == 0


def test_colours_between_stops():
    assert colours_at(LIGHT, np.array([0.0, 0.05, 1.0]), signed=False) == [
        LIGHT.sequential[0],
        "#dcf0f6",
        LIGHT.sequential[-1],
    ]
    assert colours_at(LIGHT, np.array([7.0, -1.0, 0.5]), signed=True) == [
        LIGHT.diverging[-1],
        LIGHT.diverging[0],
        LIGHT.diverging[5],
    ]


@pytest.mark.parametrize(
    "n, sign, targets, mode",
    [(6, 1, True, "light"), (6, -1, True, "dark"), (100, -1, False, "light"), (600, 1, True, "light")],
)
def test_a_filled_map_is_the_figure(n, sign, targets, mode):
    for seed in range(2):
        # The second fill of the same frame has other weights and another limit.
        weights = lower(n, seed)
        weights[0, -1, 0] *= sign
        # Other tokens too, of the same number; the last time none comes again.
        one = sheet(weights, [f"{place % (40 + 1000 * seed)}<" for place in range(n)])
        options = {"targets": targets, "limit": 0.4 + seed, "side": 400, "mode": mode}
        filled = filled_map(one, 0, **options)
        figure = views.attention_view(one, 0, **options)
        assert json.loads(to_json_plotly(filled)) == json.loads(figure.to_json())


def test_weights_by_offset():
    weights = np.zeros((1, 8, 8))
    for dest in range(4, 8):
        weights[0, dest, dest - 3] = 0.6
    figure = views.weight_by_offset(sheet(weights, "abcdabcd"), 0)
    found = dict(zip(figure.data[0].x.tolist(), figure.data[0].y.tolist(), strict=True))
    assert found[1] == pytest.approx(0.6) and found[2] == found[0] == 0
    assert views.weight_by_offset(sheet(weights, "abcdefgh"), 0) is None


def test_colour_limits():
    weights = np.zeros((2, 10, 10))
    weights[0, 9, :9] = np.arange(1, 10)
    weights[1, 9, 0] = -20
    one = sheet(weights)
    assert views.colour_limit([(one, 0)]) == 9
    assert views.colour_limit([(one, 0), (one, 1)]) == 20
    assert views.colour_limit([(one, 0)], percentile=50) == 5
    assert views.colour_limit([(sheet(np.zeros((1, 2, 2))), 0)]) == 1


def test_cut_view_has_the_chosen_unit_and_its_layer():
    profile = CutProfile(
        offsets=(-1, 0, 1, 2),
        cut={"this head": (0.1, 0.0, 2.0, 0.1), "whole layer": (0.2, 0.1, 2.5, 0.0)},
        cut_se=(0.01, 0.01, 0.2, 0.01),
        random=0.05,
        previous=0.0,
        taps=(),
        best=1,
        effect=1.95,
        effect_se=0.2,
        n_sequences=8,
        n_scored=100,
        measured_on="probe",
    )
    figure = views.cut_view(profile)
    assert [bar.name for bar in figure.data] == ["this head", "whole layer"]
    assert figure.data[0].x.tolist() == [-1, 0, 1, 2] and figure.data[0].error_y.array[2] == 0.2


def test_state_view_draws_the_chosen_unit_last():
    norms = StateNorms(norms=np.arange(12.0).reshape(3, 4), unit="head", what="state")
    figure = views.state_view(norms, ["a", "b", "<", "d"], unit=0)
    assert [line.name for line in figure.data] == ["head 1", "head 2", "head 0"]
    assert figure.data[-1].line.width > figure.data[0].line.width
    assert figure.data[0].customdata[2] == "after ‘&lt;’ @2"


def test_numbers():
    assert [number(x) for x in (0, 0.5, -1.25, 0.00123, 1e-9)] == ["0", "0.500", "−1.250", "0.00123", "1e−09"]


def test_marks_of_the_slider():
    steps = [0, 1, 10, 100, 500, 1000, 1500, 2000, 2500, 3000, 12_000]
    marks = step_marks(steps)
    assert marks[0] == "0" and marks[10] == "12k" and 3 <= len(marks) <= 6
    assert step_marks([7]) == {0: "7"}
    assert kept("x", [{"value": "y"}, {"value": "x"}]) == "x" and kept(3, [{"value": 0}]) == 0


def test_a_cache_is_bounded_and_forgets_failures():
    made = []

    def make(value):
        made.append(value)
        return value

    cache = BoundedCache(10, size_of=lambda value: value)
    assert [cache.get(n, lambda n=n: make(n)) for n in (4, 5, 4, 6)] == [4, 5, 4, 6]
    assert made == [4, 5, 6] and 4 in cache and 6 in cache and 5 not in cache and cache.size() == 10
    assert cache.get(99, lambda: make(99)) == 99 and cache.size() == 99
    with pytest.raises(ZeroDivisionError):
        cache.get("bad", lambda: 1 / 0)
    assert cache.get("bad", lambda: make(1)) == 1


def test_a_cache_knows_what_is_being_made():
    cache, seen = BoundedCache(3), []

    def make():
        seen.append(cache.begun("x"))
        return 1

    assert not cache.begun("x") and cache.get("x", make) == 1
    assert seen == [True] and cache.begun("x") and not cache.begun("y")
