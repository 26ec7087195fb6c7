"""Causal offset profiles on wired circuits: the right layer, unit, offset and tap, and nothing else."""

import math
from functools import cache

import pytest
import torch
from constructed_cases import CASES, probe
from language_models import build

from interp.edge_cuts import EdgeCut, zeroed_tap
from interp.errors import DetectionError
from interp.head_scores import HeadScores
from interp.offset_cuts import mean, offset_profile
from interp.offset_edges import Matches, probe_matches, window_matches
from interp.sequences import RepeatedTokens
from interp.subject import LanguageModelSubject
from models.config import LanguageModelConfig, Mamba1Config
from models.constructed import PREVIOUS_HEAD, constructed_model
from models.language_model import LanguageModel

GAIN = math.log(32)


@cache
def profiled(kind, offset):
    model, circuit = constructed_model(kind, offset=offset)
    return circuit, offset_profile(model, probe_matches(probe()))


# The profile names the circuit.


@pytest.mark.parametrize("kind, offset", CASES)
def test_the_strongest_cut_names_layer_unit_and_offset(kind, offset):
    circuit, profile = profiled(kind, offset)
    layer = profile.layers[circuit.layer]
    row = layer.units.index(circuit.unit)
    assert profile.strongest()[0].layer == circuit.layer
    assert layer.best(row) == layer.best() == circuit.offset
    assert layer.effect(row)[0] == pytest.approx(GAIN, abs=0.05)
    assert layer.effect()[0] == pytest.approx(GAIN, abs=0.05)


@pytest.mark.parametrize("kind, offset", CASES)
def test_every_other_cut_costs_nothing(kind, offset):
    circuit, profile = profiled(kind, offset)
    for layer in profile.layers:
        cut = mean(layer.cut).clone()
        if layer.layer == circuit.layer:
            rows = [layer.units.index(circuit.unit), len(layer.units) - 1]
            cut[rows, layer.offsets.index(circuit.offset)] = 0
        assert cut.abs().max() < 1e-3
        assert mean(layer.random).abs().max() < 1e-3


@pytest.mark.parametrize("kind, offset", CASES)
def test_taps_are_those_of_the_circuit(kind, offset):
    circuit, profile = profiled(kind, offset)
    layer = profile.layers[circuit.layer]
    if not circuit.taps:
        assert layer.taps is None
        return
    needed = set(circuit.taps.values())
    for lag, effect in enumerate(mean(layer.taps).tolist()):
        assert effect == pytest.approx(GAIN, abs=0.05) if lag in needed else abs(effect) < 1e-3


def test_previous_token_edges_matter_in_the_head_that_carries_alone():
    _, profile = profiled("softmax", 1)
    first, second = profile.layers
    effects = mean(first.previous)
    assert effects[PREVIOUS_HEAD] > GAIN - 0.05 and effects[-1] > GAIN - 0.05
    assert effects[[n for n in range(4) if n != PREVIOUS_HEAD]].abs().max() < 1e-3
    assert mean(second.previous).abs().max() < 1e-3


def test_rescaling_the_rest_does_not_bring_the_answer_back():
    _, profile = profiled("softmax", 1)
    layer = profile.layers[1]
    assert mean(layer.renormalised[2, layer.offsets.index(1)]) > GAIN - 0.1
    assert profiled("mamba2", 1)[1].layers[0].renormalised is None


@pytest.mark.parametrize("kind", ["linear", "mamba1", "mamba2"])
def test_block_edges_are_at_offset_one_whatever_the_scan_reads(kind):
    model, circuit = constructed_model(kind, offset=3)
    profile = offset_profile(
        model, probe_matches(probe(2, 12, 2)), reading="block", by_unit=False, offsets=(0, 1, 3), controls=()
    )
    layer = profile.layers[0]
    assert layer.best() == 1 and layer.effect()[0] > GAIN - 0.05
    assert mean(layer.cut[-1, 2]).abs() < 1e-3


def test_mamba1_channels_that_remember_are_the_ones_that_matter():
    model, circuit = constructed_model("mamba1", offset=2)
    matches = probe_matches(probe(2))
    profile = offset_profile(model, matches, mamba_units="cluster:2", controls=("random",))
    layer = profile.layers[0]
    effects = [layer.effect(row)[0] for row in range(2)]
    # Clusters are ordered by how far they look: the last one holds the value channels.
    assert abs(effects[0]) < 1e-3 and effects[1] == pytest.approx(GAIN, abs=0.05)
    x = model.embed(matches.tokens)
    index = model.blocks[0].attn.read(x, units="cluster:2").z_index[1]
    assert index[index >= 0].tolist() == list(circuit.channels["v"])


def test_a_tap_belongs_to_its_channels():
    model, circuit = constructed_model("mamba1", offset=2)
    tokens = probe(2).tokens
    weight = model.blocks[0].attn.conv1d.weight
    before = weight.clone()
    for part, lag in circuit.taps.items():
        with zeroed_tap(weight, lag, circuit.channels[part]):
            assert model(tokens, return_type="loss", loss_per_token=True)[:, 25:].mean() > GAIN - 0.1
        with zeroed_tap(weight, lag, circuit.channels["idle"]):
            assert model(tokens, return_type="loss", loss_per_token=True)[:, 25:].mean() < 1e-3
    assert torch.equal(weight, before)
    with pytest.raises(DetectionError, match="tap at lag 4; accepted: 0..3"), zeroed_tap(weight, 4):
        pass


@pytest.mark.parametrize(
    "kind, units",
    [("softmax", None), ("linear", None), ("mamba2", None)]
    + [("mamba1", units) for units in (None, "state", "cluster:2")],
)
def test_only_units_by_state_share_channels(kind, units):
    model, _ = constructed_model(kind)
    x = model.embed(probe(2).tokens)
    for name in model.blocks[0].attn.readings:
        reading = model.blocks[0].attn.read(x, name, units=units)
        index = reading.z_index[reading.z_index >= 0]
        assert (len(index.unique()) == len(index)) == (units != "state")
        assert EdgeCut(reading, x, [None])._apart == (units != "state")


# Against other ways to compute the same.


@pytest.mark.parametrize("name", ["softmax", "mamba1", "mamba2", "linear"])
def test_a_cut_equals_a_pattern_with_zeros(name):
    model = build(name)
    model = (model[0] if isinstance(model, tuple) else model).eval()
    tokens = torch.randint(0, 6, (2, 14), generator=torch.Generator().manual_seed(0))
    matches = window_matches(tokens)
    profile = offset_profile(model, matches, offsets=(1,), layers=(0,), by_unit=False, controls=())
    b, i, j = matches.at(1)

    def zero(pattern, hook):
        pattern[b, :, i, j] = 0
        return pattern

    cut = model.run_with_hooks(
        tokens, return_type="loss", loss_per_token=True, fwd_hooks=[("blocks.0.attn.hook_pattern", zero)]
    )
    plain = model(tokens, return_type="loss", loss_per_token=True)
    scored = matches.scored
    expected = torch.stack([(cut - plain)[n][scored[n]].double().mean() for n in range(2)])
    torch.testing.assert_close(profile.layers[0].cut[-1, 0], expected.detach(), atol=1e-5, rtol=1e-4)


def test_batches_and_passes_change_nothing():
    model, _ = constructed_model("mamba2", offset=2)
    matches = probe_matches(probe(5, 12, 2))
    whole = offset_profile(model, matches, controls=("previous", "taps"))
    parts = offset_profile(model, matches, controls=("previous", "taps"), tokens_per_pass=50)
    torch.testing.assert_close(whole.layers[0].cut, parts.layers[0].cut, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(whole.layers[0].previous, parts.layers[0].previous, atol=1e-5, rtol=1e-5)
    assert whole.n_edges == parts.n_edges and whole.n_scored == parts.n_scored


# The content-independent control.


def test_constant_selection_is_toeplitz_and_its_profile_is_flat():
    config = LanguageModelConfig(
        d_model=32,
        n_layers=2,
        d_vocab=64,
        n_ctx=128,
        mixers=(Mamba1Config(constant_bcdt=True),) * 2,
        init_std=0.1,
    )
    model = LanguageModel(config).eval()
    matches = probe_matches(probe())
    x = model.embed(matches.tokens)
    pattern = model.blocks[0].attn.implied_attention(x)
    by_lag = torch.stack([pattern[..., lag + 5, 5] for lag in range(20)], -1)
    torch.testing.assert_close(by_lag, torch.stack([pattern[..., lag + 40, 40] for lag in range(20)], -1))
    torch.testing.assert_close(pattern[0], pattern[1])
    profile = offset_profile(model, matches)
    for layer in profile.layers:
        assert mean(layer.cut).abs().max() < 0.02
        assert layer.effect()[0] < 0.02
    scores = HeadScores(LanguageModelSubject(model), probe())
    scores.visit()
    for record in scores.records():
        assert record.prefix_matching < 2 * record.prefix_matching_chance


# Edges.


def test_edges_of_a_text():
    tokens = torch.tensor([[7, 1, 7, 2, 7, 1, 0, 0]])
    matches = window_matches(tokens, ignored=frozenset({0}))
    pairs = sorted(zip(matches.pairs.dest.tolist(), matches.pairs.src.tolist(), strict=True))
    assert pairs == [(2, 0), (4, 0), (4, 2), (5, 1)]
    assert matches.scored[0].nonzero()[:, 0].tolist() == [4]
    at_one = sorted(zip(matches.at(1).dest.tolist(), matches.at(1).src.tolist(), strict=True))
    assert at_one == [(2, 1), (4, 1), (4, 3), (5, 2)]
    # (2, 2) is a self-edge, (4, 4) too.
    assert sorted(matches.at(2).src.tolist()) == [2, 3]


def test_random_edges_are_as_many_and_avoid_the_profile():
    matches = probe_matches(probe(4))
    random = matches.random(range(-2, 6), seed=1)
    wanted = matches.at(1)
    assert torch.equal(
        torch.bincount(random.batch * 75 + random.dest, minlength=300),
        torch.bincount(wanted.batch * 75 + wanted.dest, minlength=300),
    )
    taken = {edge for o in range(-2, 6) for edge in zip(*(p.tolist() for p in matches.at(o)), strict=True)}
    drawn = list(zip(*(p.tolist() for p in random), strict=True))
    assert len(set(drawn)) == len(drawn) and not taken & set(drawn)
    assert all(0 <= src < dest - 1 for _, dest, src in drawn)


def test_a_short_period_leaves_few_random_edges():
    matches = probe_matches(probe(2, 6, 3))
    random = matches.random(range(-2, 6))
    assert len(random.dest) < len(matches.at(1).dest) / 2
    # What is left lies before the window of the earliest copy.
    assert bool((random.src < random.dest % 6).all())


# Odd inputs.


def test_duplicates_in_the_probe_are_refused():
    tokens = torch.tensor([[1, 2, 1, 3, 1, 2, 1, 3]])
    doubled = RepeatedTokens(tokens=tokens, period=4, repeats=2)
    with pytest.raises(DetectionError, match="duplicates in the probe: sequence 0 has token 1 twice"):
        probe_matches(doubled)


def test_nothing_to_cut_is_refused():
    model, _ = constructed_model("linear")
    with pytest.raises(DetectionError, match="empty pair set: no token comes again in 1 sequences of 8"):
        offset_profile(model, window_matches(torch.arange(8)[None]))
    with pytest.raises(DetectionError, match="no bigram comes again"):
        offset_profile(model, window_matches(torch.tensor([[1, 2, 3, 1, 4, 2]])))
    with pytest.raises(DetectionError, match="empty pair set"):
        Matches(tokens=torch.zeros(2, 5, dtype=torch.int64), ignored=frozenset({0})).check()


def test_offsets_layers_and_heads_out_of_range_are_refused():
    model, _ = constructed_model("linear")
    matches = probe_matches(probe(1, 6, 2))
    with pytest.raises(
        DetectionError, match="offset 12 lies outside windows of 12 tokens; accepted: -11..11"
    ):
        offset_profile(model, matches, offsets=(12,))
    with pytest.raises(DetectionError, match="layer index 1 is out of range; accepted: 0..0"):
        offset_profile(model, matches, layers=(1,))
    with pytest.raises(DetectionError, match="head index 4 is out of range; accepted: 0..3"):
        offset_profile(model, matches, units=(4,))
    with pytest.raises(DetectionError, match="hold none of at least 1"):
        offset_profile(model, matches, offsets=(0,)).layers[0].best()
    with pytest.raises(DetectionError, match="unknown controls tap; accepted: random"):
        offset_profile(model, matches, controls=("tap",))


def test_offsets_with_gaps_are_drawn_where_they_are():
    model = constructed_model("softmax")[0]
    profile = offset_profile(model, probe_matches(probe()), offsets=[3, 1, -1], controls=())
    drawn = profile.figure().data
    assert all(list(bars.x) == [3, 1, -1] for bars in drawn)
    peak = max(drawn, key=lambda bars: max(bars.y))
    assert peak.x[int(peak.y.argmax())] == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layers": []}, "no layer is given"),
        ({"units": []}, "no head is given"),
        ({"layers": [1.0]}, "layer 1.0 is no whole number"),
    ],
)
def test_layers_and_units_that_are_none(options, message):
    model = constructed_model("softmax")[0]
    with pytest.raises(DetectionError, match=message):
        offset_profile(model, probe_matches(probe()), **options)


@pytest.mark.parametrize("kind, offset", CASES[:1])
def test_a_hook_on_the_mixer_is_part_of_what_is_cut(kind, offset):
    model, circuit = constructed_model(kind, offset=offset)
    model.blocks[circuit.layer].attn.register_forward_hook(lambda module, args, output: 0.5 * output)
    layer = offset_profile(model, probe_matches(probe())).layers[circuit.layer]
    cut = mean(layer.cut).clone()
    rows = [layer.units.index(circuit.unit), len(layer.units) - 1]
    at = layer.offsets.index(circuit.offset)
    assert (cut[rows, at] > 0.5).all()
    cut[rows, at] = 0
    assert cut.abs().max() < 1e-3 and mean(layer.random).abs().max() < 1e-3
