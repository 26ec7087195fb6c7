"""Transitions: known steps are found where they are, drift and noise are not called transitions."""

import json
import time
from dataclasses import replace

import numpy as np
import pytest
from interp_reports import STEPS, report

from interp.phase_transition import (
    MIN_CHANGE,
    PhaseTransition,
    fit_transition,
    from_checkpoints,
    lead,
    phase_transition,
)
from interp.records import begins_below_chance, to_json
from interp.transition_fit import StepAxis, crossing

GRID = np.unique(np.round(np.geomspace(1, 4000, 30)).astype(int))
GRID0 = np.concatenate([[0], GRID])


def logistic(steps, midpoint, scale, low, high):
    position = np.log(np.maximum(np.asarray(steps, dtype=float), 0.5))
    return low + (high - low) / (1 + np.exp(-(position - np.log(midpoint)) / scale))


def samples(curve, rng, *, n=64, sd=0.1, common=0.01):
    """[n_steps n] sequences around a curve; `common` moves all sequences of a checkpoint together."""
    shape = (len(curve), n)
    return curve[:, None] + sd * rng.standard_normal(shape) + common * rng.standard_normal((len(curve), 1))


def holds(interval, step):
    return interval[0] <= step <= interval[1]


@pytest.mark.parametrize("midpoint", [40, 300, 1500])
@pytest.mark.parametrize("scale", [0.05, 0.2, 0.4])
def test_a_logistic_at_a_known_step_is_recovered(midpoint, scale):
    curve = logistic(GRID0, midpoint, scale, 0.05, 0.9)
    found = fit_transition(GRID0, samples(curve, np.random.default_rng(1), common=0.005), min_change=0.1)
    assert found.midpoint_step == pytest.approx(midpoint, rel=0.12)
    true_width = midpoint * (9**scale - 9**-scale)
    spacing = midpoint * 0.35
    assert abs(found.width_10_90_steps - true_width) < max(spacing, 0.25 * true_width)
    onset = midpoint * 9**-scale
    assert found.onset_interval[0] / 1.05 <= onset <= found.onset_interval[1] * 1.05
    assert set(found.onset_step) <= set(GRID0.tolist())
    assert found.change == pytest.approx(curve[-1] - curve[0], abs=0.03)
    assert found.support == 1.0
    assert found.complete or midpoint == 1500


def test_a_falling_curve_is_a_transition_only_where_falling_is_asked_for():
    values = samples(-logistic(GRID0, 300, 0.2, 0, 0.6), np.random.default_rng(0))
    assert fit_transition(GRID0, values, min_change=0.1) is None
    found = fit_transition(GRID0, values, min_change=0.1, rising=False)
    assert found.change == pytest.approx(-0.6, abs=0.03)
    assert found.midpoint_step == pytest.approx(300, rel=0.1)


@pytest.mark.parametrize("common", [0.0, 0.05, 0.3, 1.0])
@pytest.mark.parametrize("n_steps", [10, 31])
def test_noise_alone_is_none(common, n_steps):
    """At most 2% false positives over 200 series, whatever the size of the noise (10 and more
    checkpoints)."""
    rng, steps = np.random.default_rng(2), GRID0[np.linspace(0, len(GRID0) - 1, n_steps).round().astype(int)]
    steps = np.unique(steps)
    values = [samples(np.zeros(len(steps)), rng, common=common) for _ in range(200)]
    hits = sum(fit_transition(steps, v, min_change=0.1, n_bootstrap=0) is not None for v in values)
    assert hits <= 4


@pytest.mark.parametrize("n_steps", [4, 5, 6])
def test_noise_alone_is_none_with_few_checkpoints(n_steps):
    """Few checkpoints cannot show their noise: stated for noise up to a quarter of the smallest change."""
    rng, steps = np.random.default_rng(3), np.unique(np.geomspace(50, 4000, n_steps).astype(int))
    values = [samples(np.zeros(n_steps), rng, common=0.025) for _ in range(200)]
    assert sum(fit_transition(steps, v, min_change=0.1, n_bootstrap=0) is not None for v in values) <= 4


DRIFTS = {
    "log-linear": 0.3 * np.log1p(GRID0) / np.log1p(4000),
    "linear": 0.4 * GRID0 / 4000,
    "root": 0.4 * (GRID0 / 4000) ** 0.5,
    "relaxation, early": 0.55 * (1 - np.exp(-GRID0 / 75)),
    "relaxation, late": 0.3 * (1 - np.exp(-GRID0 / 400)),
}


@pytest.mark.parametrize("name", DRIFTS)
def test_slow_drift_is_none(name):
    """A one-layer control's curves drift or relax, by more than the smallest change, without a threshold."""
    rng = np.random.default_rng(4)
    values = [samples(DRIFTS[name], rng, common=0.01) for _ in range(200)]
    assert sum(fit_transition(GRID0, v, min_change=0.1, n_bootstrap=0) is not None for v in values) <= 4


def test_a_change_below_the_smallest_is_none():
    values = samples(logistic(GRID0, 300, 0.2, 0, 0.08), np.random.default_rng(5), sd=0.02, common=0.001)
    assert fit_transition(GRID0, values, min_change=0.1) is None
    assert fit_transition(GRID0, values, min_change=0.05) is not None


def test_a_curve_that_still_rises_at_the_end_is_incomplete():
    values = samples(logistic(GRID0, 4000, 0.3, 0, 1.6), np.random.default_rng(6))
    found = fit_transition(GRID0, values, min_change=0.1)
    assert not found.complete
    assert found.midpoint_step < 4000
    assert found.onset_step[0] > 500


@pytest.mark.parametrize("place", [1, len(GRID0) - 1])
def test_a_jump_at_the_first_or_last_checkpoint_lies_between_its_two_checkpoints(place):
    curve = np.where(np.arange(len(GRID0)) >= place, 0.9, 0.05)
    found = fit_transition(GRID0, samples(curve, np.random.default_rng(7)), min_change=0.1)
    assert found.onset_step == (GRID0[place - 1], GRID0[place])
    assert holds(found.onset_step, found.midpoint_step)
    assert found.width_10_90_steps <= GRID0[place] - GRID0[place - 1]
    assert found.complete is (place == 1)


@pytest.mark.parametrize("steps", [[0, 100, 200, 400], [10, 100, 200, 400, 800], [0, 50, 100, 200, 400, 800]])
def test_few_checkpoints_suffice_for_a_large_jump(steps):
    curve = np.where(np.asarray(steps) >= 200, 0.9, 0.05)
    found = fit_transition(steps, samples(curve, np.random.default_rng(8), common=0.005), min_change=0.1)
    assert found.onset_step == (100, 200)


def test_three_checkpoints_are_none():
    assert fit_transition([1, 10, 100], np.array([0.0, 1.0, 1.0]), min_change=0.1) is None
    assert phase_transition([1, 10, 100], prefix_matching=np.array([0.0, 1.0, 1.0])) is None


def test_order_gain_onset_is_absolute_and_does_not_depend_on_the_length_of_the_run():
    curve = logistic(GRID0, 300, 0.3, 0, 3) + 2e-4 * np.maximum(GRID0 - 300, 0)
    values = samples(curve, np.random.default_rng(9), common=0.005)
    options = {"min_change": 0.2, "onset_thresholds": (0.1, 1.0)}
    whole, half = fit_transition(GRID0, values, **options), fit_transition(GRID0[:-4], values[:-4], **options)
    assert whole.onset_step == half.onset_step
    assert holds(whole.onset_step, np.interp(0.1, curve, GRID0))
    assert holds(whole.later_onset_step, np.interp(1.0, curve, GRID0))
    assert (whole.onset_definition, whole.later_onset_definition) == ("crossing of 0.1", "crossing of 1")


def test_crossing_reads_the_monotone_regression():
    curves = np.array(
        [[0, 0.5, 0, 0, 0.9, 1], [0, 0, 0, 0, 0, 0.0], [1, 1, 1, 1, 1, 1.0], [0, 1, 0.8, 1, 1, 1]]
    )
    assert crossing(curves, 0.4).tolist() == [4, 6, 0, 1]


def test_the_step_axis_places_zero_and_comes_back():
    axis = StepAxis(steps=(0, 10, 100, 1000))
    assert np.all(np.diff(axis.positions) > 0)
    np.testing.assert_allclose(axis.to_step(axis.positions), [0, 10, 100, 1000], atol=1e-9)
    assert axis.positions[1] - axis.positions[0] == pytest.approx(np.log(10))


def test_lead_has_its_sign_and_covers_the_truth():
    rng = np.random.default_rng(10)
    early = fit_transition(GRID0, samples(logistic(GRID0, 200, 0.1, 0, 0.9), rng), min_change=0.1)
    late = fit_transition(GRID0, samples(logistic(GRID0, 800, 0.1, 0, 0.9), rng), min_change=0.1)
    truth = 600 * 9**-0.1
    low, high = lead(early, late)
    assert 0 < low <= truth <= high
    assert lead(late, early) == (-high, -low)
    low, high = lead(early, early)
    assert low < 0 < high


def test_phase_transition_has_the_keys_of_the_json_and_is_quick():
    rng, steps = np.random.default_rng(11), GRID0[:30]
    curves = {
        "prefix_matching": samples(logistic(steps, 300, 0.2, 0.05, 0.9), rng),
        "order_gain": samples(logistic(steps, 320, 0.2, 0, 3), rng, sd=0.5),
        "in_context_learning": samples(-logistic(steps, 600, 0.2, 0, 0.6), rng, sd=0.3),
    }
    start = time.process_time()
    found = phase_transition(steps, n_bootstrap=200, **curves)
    assert time.process_time() - start < 3
    record = found.to_dict()
    assert json.loads(json.dumps(record, allow_nan=False)) == record
    assert {"prefix_matching", "order_gain", "in_context_learning", "lead_steps", "method"} <= set(record)
    for name in curves:
        assert {"onset_step", "midpoint_step", "width_10_90_steps"} <= set(record[name])
        assert record[name]["onset_step"][0] < record[name]["onset_step"][1]
    assert found.lead_of == ("prefix_matching", "in_context_learning")
    assert found.lead_steps[1] > 0
    assert phase_transition(steps, n_bootstrap=200, **curves).to_dict() == record


def test_a_reports_transition_is_a_record_that_reads_as_its_json():
    series = report()
    found = series.phase_transition
    assert isinstance(found, PhaseTransition) and dict(found) == found.to_dict()
    assert found["order_gain"]["onset_step"] == list(found.order_gain.onset_step)
    assert found.get("order_gain") == found.order_gain.to_dict() and found.get("no such curve") is None
    as_json = json.loads(to_json(series))["phase_transition"]
    assert as_json == found.to_dict()
    # As it was when the field held the JSON itself.
    assert to_json(replace(series, phase_transition=found.to_dict())) == to_json(series)


def test_without_a_change_of_behaviour_there_is_no_phase_transition():
    """A one-layer model's score falls too: it learns which tokens occur."""
    rng = np.random.default_rng(12)
    falling = samples(-logistic(GRID0, 300, 0.1, 0, 0.6), rng)
    flat = samples(np.full(len(GRID0), 0.05), rng)
    options = {"in_context_learning": falling, "order_gain": flat}
    assert phase_transition(GRID0, prefix_matching=flat, **options) is None
    rising = samples(logistic(GRID0, 300, 0.1, 0, 0.9), rng)
    # A head's weights that drift while behaviour stays: as on i.i.d. data.
    assert phase_transition(GRID0, prefix_matching=rising, **options) is None
    del options["order_gain"]
    assert phase_transition(GRID0, prefix_matching=rising, **options).prefix_matching is not None


def test_seeds_widen_the_interval_and_a_minority_is_none():
    rng = np.random.default_rng(13)
    runs = np.stack([samples(logistic(GRID0, m, 0.15, 0, 0.9), rng) for m in (150, 300, 600)])
    found = fit_transition(GRID0, runs, min_change=0.1)
    assert (found.n_seeds, found.n_seeds_with_transition) == (3, 3)
    assert found.midpoint_step == pytest.approx(300, rel=0.1)
    low, high = found.midpoint_interval
    alone = fit_transition(GRID0, runs[1], min_change=0.1).midpoint_interval
    assert high - low > 5 * (alone[1] - alone[0])
    assert holds((low, high), 300)
    flat = np.stack([runs[0], *(samples(np.zeros(len(GRID0)), rng) for _ in range(2))])
    assert fit_transition(GRID0, flat, min_change=0.1) is None


def test_a_single_sequence_has_no_intervals():
    found = fit_transition(GRID0, logistic(GRID0, 300, 0.2, 0, 1), min_change=0.1)
    assert found.onset_interval is found.midpoint_interval is found.support is None
    assert holds(lead(found, found), 0)


@pytest.mark.parametrize(
    "low, above, begins_below", [(0.01, 200, True), (0.064, 80, False), (0.2, GRID0[0], False)]
)
def test_a_rise_from_below_chance_is_told_from_one_above_it(low, above, begins_below):
    """The onset is the 10% point of the fitted rise, wherever chance lies; the record says where it does."""
    curve = logistic(GRID0, 400, 0.35, low, low + 0.2)
    options = {"min_change": {**MIN_CHANGE, "prefix_matching": 0.1}}
    values = samples(curve, np.random.default_rng(4), sd=0.002, common=0)
    found = phase_transition(GRID0, prefix_matching=values, chance=0.065, **options).prefix_matching
    assert found == phase_transition(GRID0, prefix_matching=values, **options).prefix_matching
    first = next(int(step) for step in GRID0 if step >= above)
    places = GRID0.tolist()
    assert abs(places.index(found.above_chance_from_step) - places.index(first)) <= 1
    plain = found.to_dict()
    assert begins_below_chance(plain) is begins_below
    assert plain["chance"] == 0.065
    assert begins_below_chance(plain | {"above_chance_from_step": None})
    assert not begins_below_chance(plain | {"chance": None}) and not begins_below_chance(None)


def test_steps_of_intervals_are_steps():
    """Censored onsets are checkpoints: no rounding of logarithms is left in them."""
    curve = logistic(GRID0, 300, 0.05, 0.0, 3.0)
    values = samples(curve, np.random.default_rng(1), sd=0.02)
    found = fit_transition(GRID0, values, min_change=0.2, onset_thresholds=(0.1, 1.0))
    assert set(found.onset_interval) <= set(GRID0.tolist())
    assert all(end == round(end, 6) for end in lead(found, found))


def test_checkpoints_are_read_at_the_unit_that_is_strongest_at_the_end():
    checkpoints = report(steps=STEPS).checkpoints
    found = from_checkpoints(checkpoints)
    best = [
        h.prefix_matching_by_sequence for c in checkpoints for h in c.heads if (h.layer, h.head) == (1, 0)
    ]
    alone = fit_transition(STEPS, np.array(best), min_change=0.1)
    assert found.prefix_matching == alone
    assert from_checkpoints(report(steps=STEPS, transition=False).checkpoints) is None
    assert from_checkpoints(checkpoints[:3]) is None


@pytest.mark.parametrize(
    ("steps", "values", "message"),
    [
        ([1, 2, 3, 4], [0, 1, np.nan, 1], r"prefix holds nan at step 3, sequence 0; values must be finite"),
        ([1, 2, 3, 4], [0, 1, np.inf, 1], "holds inf"),
        ([1, 2, 2, 4], [0, 1, 1, 1], "each above the one before"),
        ([-1, 2, 3, 4], [0, 1, 1, 1], "whole numbers from 0 up"),
        ([1, 2, 3.5, 4], [0, 1, 1, 1], "whole numbers"),
        ([1, 2, 3, 4], [0, 1, 1], r"shape \(3,\).*n = 4"),
        ([1, 2, 3, 4], np.zeros((4, 0)), "shape"),
    ],
)
def test_bad_input_is_refused_by_name(steps, values, message):
    with pytest.raises(ValueError, match=message):
        fit_transition(steps, np.asarray(values), min_change=0.1, name="prefix")
