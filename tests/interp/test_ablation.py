"""Ablations: identities by mixer, the constructed circuit's losses, nothing left attached."""

import pytest
import torch
from language_models import build, tokens

from interp.ablation import (
    idealised_pattern,
    mean_ablated,
    patterns_held,
    resample_ablated,
    zero_ablated,
)
from interp.errors import InterventionError
from interp.ideal_patterns import induction_pattern, previous_token_pattern
from interp.sequences import candidates, repeated_tokens
from models.constructed import constructed_model
from models.errors import HookNotFired
from models.form import Form
from models.language_model import next_token_loss

KINDS = ["softmax", "linear", "mamba1", "mamba2", "hybrid"]


@pytest.fixture(autouse=True)
def _no_gradients():
    with torch.no_grad():
        yield


def _repeat_loss(model, ids):
    return float(next_token_loss(model(ids)[:, :-1], ids, per_token=True)[:, 20:].mean())


@pytest.mark.parametrize("name", KINDS)
def test_pattern_preserving_zero_ablation_is_o_minus_A_v(name):
    model, ids = build(name), tokens()
    for layer in range(model.config.n_layers):
        # Sum over sources of the pattern times the values: what "mixing" takes out (Mamba's D is no part of
        # it).
        _, cache = model.run_with_cache(ids)
        Av = torch.einsum(
            "bij,bjd->bid", cache["pattern", layer][:, 1], _values(model, cache, layer)[:, :, 1]
        )
        o = cache["z", layer][:, :, 1]
        with patterns_held(model, ids), zero_ablated(model, [(layer, 1)], part="mixing"):
            _, held = model.run_with_cache(ids)
        assert torch.allclose(held["z", layer][:, :, 1], o - Av, atol=1e-10)
        assert torch.allclose(held["z", layer][:, :, 0], cache["z", layer][:, :, 0], atol=1e-10)
        for later in range(layer + 1, model.config.n_layers):
            assert torch.allclose(held["pattern", later], cache["pattern", later], atol=1e-12)


def _values(model, cache, layer):
    mixer = model.blocks[layer].attn
    v = cache["v", layer]
    return v.repeat_interleave(mixer.n_heads // v.shape[2], 2)


def test_without_held_patterns_later_ones_move():
    model, ids = build("softmax"), tokens()
    _, cache = model.run_with_cache(ids)
    with zero_ablated(model, [(0, 1)]):
        _, free = model.run_with_cache(ids)
    assert (free["pattern", 1] - cache["pattern", 1]).abs().max() > 1e-3


@pytest.mark.parametrize("name", KINDS)
def test_zero_mean_and_resample_put_what_they_say(name):
    model, ids, other = build(name), tokens(), tokens(seed=1)
    _, plain = model.run_with_cache(ids)
    _, reference = model.run_with_cache(other)
    for context, wanted in (
        (zero_ablated(model, [(1, 1)]), torch.zeros(1, 1, 1)),
        (mean_ablated(model, [(1, 1)], other), reference["z", 1][:, :, 1].mean((0, 1), keepdim=True)),
        (
            mean_ablated(model, [(1, 1)], other, by_position=True),
            reference["z", 1][:, :, 1].mean(0, keepdim=True),
        ),
        (resample_ablated(model, [(1, 1)], other), reference["z", 1][:, :, 1]),
    ):
        with context:
            _, cache = model.run_with_cache(ids)
        assert torch.allclose(
            cache["z", 1][:, :, 1], wanted.to(cache["z", 1].dtype).expand(2, 9, -1), atol=1e-10
        )
        assert torch.allclose(cache["z", 1][:, :, 0], plain["z", 1][:, :, 0], atol=1e-10)
    with resample_ablated(model, [(1, None)], ids):
        assert torch.allclose(model(ids), model(ids, form=Form.PARALLEL), atol=1e-10)
    assert not any(m._forward_hooks for m in model.modules())


@pytest.mark.parametrize("name", KINDS)
def test_token_by_token_the_effect_is_the_same(name):
    model, ids, other = build(name), tokens(), tokens(seed=1)
    with resample_ablated(model, [(0, 1), (1, 0)], other):
        whole = model(ids)
        state, steps = model.init_state(2), []
        for t in range(9):
            logits, state = model.step(ids[:, t], state)
            steps.append(logits)
    assert torch.allclose(torch.stack(steps, 1), whole, atol=1e-9)


def test_ideal_patterns_in_the_constructed_model():
    model, circuit = constructed_model("softmax")
    ids = repeated_tokens(4, 20, 2, ids=candidates(32)).tokens
    plain = _repeat_loss(model, ids)
    layer, head = circuit.previous_token
    with idealised_pattern(model, layer, head, previous_token_pattern(40)):
        assert abs(_repeat_loss(model, ids) - plain) < 1e-4
    with idealised_pattern(model, layer, head, torch.ones(40, 40).tril() / torch.arange(1, 41)[:, None]):
        assert _repeat_loss(model, ids) > plain + 2
    with zero_ablated(model, [(layer, head)]):
        broken = _repeat_loss(model, ids)
        with idealised_pattern(model, circuit.layer, circuit.unit, induction_pattern(ids)):
            assert _repeat_loss(model, ids) < 0.01 < broken


@pytest.mark.parametrize("kind", ["linear", "mamba2"])
def test_ideal_patterns_at_the_mixers_own_offset(kind):
    model, circuit = constructed_model(kind, offset=2)
    ids = repeated_tokens(4, 20, 2, ids=candidates(32)).tokens
    right, wrong = (induction_pattern(ids, offset=n) for n in (2, 1))
    with idealised_pattern(model, 0, circuit.unit, right, keep_mass=True):
        assert _repeat_loss(model, ids) < 0.1
    with idealised_pattern(model, 0, circuit.unit, wrong, keep_mass=True):
        assert _repeat_loss(model, ids) > 2


def test_errors_and_nothing_stays():
    model = build("hybrid")
    with (
        pytest.raises(InterventionError, match=r"head index 9 is out of range"),
        zero_ablated(model, [(1, 9)]),
    ):
        pass
    with (
        pytest.raises(InterventionError, match=r"layer index 4 is out of range"),
        zero_ablated(model, [(4, 0)]),
    ):
        pass
    with pytest.raises(InterventionError, match="no heads are given"), zero_ablated(model, []):
        pass
    with pytest.raises(InterventionError, match="part is 'all'"), zero_ablated(model, [(0, 0)], part="all"):
        pass
    with (
        pytest.raises(HookNotFired, match="it fires in: parallel"),
        zero_ablated(model, [(1, 0)], part="mixing", form="recurrent"),
    ):
        pass
    with (
        pytest.raises(InterventionError, match=r"accepted: \[.. 9 9\]"),
        idealised_pattern(model, 1, 0, previous_token_pattern(5)),
    ):
        model(tokens())
    with (
        pytest.raises(InterventionError, match="at least as many positions"),
        resample_ablated(model, [(1, 0)], tokens(seq=4)),
    ):
        model(tokens())
    assert not any(m._forward_hooks for m in model.modules())


def _ideal(pattern):
    return lambda model: idealised_pattern(model, 1, 0, pattern)


@pytest.mark.parametrize(
    "context, said",
    [
        (lambda m: resample_ablated(m, [(0, 0)], tokens()[:, :1]), r"shape \[2, 1, .*this run \[2, 9"),
        (lambda m: resample_ablated(m, [(0, 0)], tokens()[:1]), r"shape \[1, 9, .*equal batches"),
        (lambda m: mean_ablated(m, [(0, 0)], tokens()[:, :1], by_position=True), r"shape \[1, 1, .* run"),
        (lambda m: patterns_held(m, tokens()[:1]), r"on tokens of shape \[1, 9\], this run has \[2, 9\]"),
        (lambda m: patterns_held(m, tokens(seq=5)), r"on tokens of shape \[2, 5\], this run has \[2, 9\]"),
        (_ideal(torch.ones(3, 9, 9)), r"shape \[3, 9, 9\]; accepted: \[.. 9 9\], the first axis 2"),
        (_ideal(torch.ones(1, 9, 9)), r"shape \[1, 9, 9\]; accepted"),
        (_ideal(torch.ones(2, 2, 9, 9)), r"shape \[2, 2, 9, 9\]; accepted"),
    ],
)
def test_a_reference_of_another_shape_is_refused(context, said):
    model = build("softmax")
    with pytest.raises(InterventionError, match=said) as caught, context(model):
        model(tokens())
    assert "\n" not in str(caught.value)
    assert not any(m._forward_hooks for m in model.modules())


@pytest.mark.parametrize("by_position", [True, False])
def test_a_mean_is_one_for_all_sequences_of_a_run(by_position):
    model, ids = build("softmax"), tokens()
    with mean_ablated(model, [(1, 1)], tokens(batch=5, seed=1), by_position=by_position):
        assert model(ids).shape[:2] == ids.shape
        # Token by token, each position has its own.
        _, state = model.prefill(ids[:, :4])
        model.step(ids[:, 4], state)


def test_heads_are_pairs():
    model = build("softmax")
    for heads, named in (((1, 2), "1"), (["L1H2"], "'L1H2'")):
        with pytest.raises(InterventionError, match=f"heads holds {named}; accepted: pairs"):
            with zero_ablated(model, heads):
                pass
