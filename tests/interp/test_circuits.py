"""Weight-space circuits and composition: exact maps, and the hand-wired pair, taps and heads."""

import pytest
import torch
from language_models import CONFIGS, build, tokens

from interp import copying
from interp.circuits import (
    eigenvalue_score,
    ov_circuit,
    qk_circuit,
    tap_alignment,
    unit_weights,
    value_alignment,
)
from interp.composition import KINDS, composition_scores
from interp.errors import InterventionError
from interp.subject import LanguageModelSubject
from models.config import Mamba1Config
from models.constructed import constructed_model
from models.language_model import LanguageModel


@pytest.fixture(autouse=True)
def _no_gradients():
    with torch.no_grad():
        yield


@pytest.mark.parametrize("name", ["softmax", "gpt2", "llama"])
def test_ov_and_qk_are_what_the_head_computes(name):
    model, ids = build(name), tokens()
    names = [f"blocks.0.{n}" for n in ("hook_resid_pre", "ln1.hook_scale", "attn.hook_q", "attn.hook_k")]
    _, cache = model.run_with_cache(ids, names_filter=names)
    x = model.blocks[0].ln1(cache["resid_pre", 0])
    mixer = model.blocks[0].attn
    ov, qk = ov_circuit(model, 0, 1, fold=False), qk_circuit(model, 0, 1, fold=False)
    assert torch.allclose(ov.AB, mixer.W_V[1] @ mixer.W_O[1])
    bias = mixer.b_Q[1], mixer.b_K[1]
    q, k = x @ qk.A / mixer.scale + bias[0], x @ qk.B.mT + bias[1]
    assert torch.allclose(q, cache["q", 0][:, :, 1], atol=1e-10)
    assert torch.allclose(k, cache["k", 0][:, :, 1 // (mixer.n_heads // mixer.n_kv_heads)], atol=1e-10)
    folded = qk_circuit(model, 0, 1)
    resid = cache["resid_pre", 0]
    resid = resid - resid.mean(-1, keepdim=True) if name == "gpt2" else resid
    want = (resid / cache["blocks.0.ln1.hook_scale"] * model.blocks[0].ln1.w) @ qk.AB
    assert torch.allclose(resid / cache["blocks.0.ln1.hook_scale"] @ folded.A @ qk.B, want, atol=1e-9)


@pytest.mark.parametrize("name", list(CONFIGS))
def test_eigenvalue_copying_is_that_of_the_copying_module(name):
    model = build(name)
    subject = LanguageModelSubject(model)
    for layer in range(model.config.n_layers):
        unit = unit_weights(model, layer, fold=False)
        scores = copying.eigenvalue_copying(unit.W_V, unit.W_O, subject.gram(layer))
        for head in range(unit.W_V.shape[0]):
            full = ov_circuit(model, layer, head, full=True)
            assert abs(eigenvalue_score(full) - float(scores[head])) < 1e-6


@pytest.mark.parametrize("kind", ["mamba1", "mamba2"])
def test_ov_through_the_mean_gate_is_ov_factors(kind):
    model, ids = build(kind), tokens()
    block = model.blocks[1]
    x = block.ln1(model(ids, stop_at_layer=1))
    factors = block.attn.ov_factors(x)
    unit = unit_weights(model, 1, fold=False, tokens=ids)
    assert torch.allclose(unit.W_V @ unit.W_O, factors.W_V @ factors.W_O, atol=1e-10)
    assert "mean sigmoid" in unit.approximation and "left out" in unit_weights(model, 1).approximation
    plain = unit_weights(model, 1, fold=False)
    assert (plain.W_V @ plain.W_O - factors.W_V @ factors.W_O).abs().max() > 1e-3


@pytest.mark.parametrize("kind", ["linear", "mamba2"])
@pytest.mark.parametrize("offset", [1, 2, 3])
def test_taps_of_the_constructed_circuit(kind, offset):
    model, circuit = constructed_model(kind, offset=offset)
    match = tap_alignment(model, 0, circuit.unit)
    a, b = divmod(int(match.argmax()), match.shape[1])
    assert (a, b) == (circuit.taps["q"], circuit.taps["k"]) and b - a == offset
    assert abs(float(match.max()) - 1) < 1e-3
    rest = match.clone()
    rest[a, b] = 0
    assert rest.abs().max() < 1e-6
    values = value_alignment(model, 0, circuit.unit)
    assert int(values.argmax()) == circuit.taps["v"] and values.max() > 0.9
    idle = 0 if circuit.unit else 1
    assert (
        tap_alignment(model, 0, idle).abs().max() < 0.2 and value_alignment(model, 0, idle).abs().max() < 0.3
    )


@pytest.mark.parametrize("offset", [1, 3])
def test_taps_of_the_constructed_mamba1(offset):
    model, circuit = constructed_model("mamba1", offset=offset)
    match = tap_alignment(model, 0)
    a, b = divmod(int(match.argmax()), match.shape[1])
    assert (a, b) == (0, offset) and match.max() > 0.9
    assert int(value_alignment(model, 0).argmax()) == offset - 1
    control = LanguageModel(model.config.replace(mixers=(Mamba1Config(constant_bcdt=True),)))
    assert tap_alignment(control, 0).abs().max() == 0


def test_copying_and_matching_of_the_constructed_heads():
    model, circuit = constructed_model("softmax")
    assert eigenvalue_score(ov_circuit(model, 1, circuit.unit, full=True)) > 0.99
    assert abs(eigenvalue_score(ov_circuit(model, 1, 0, full=True))) < 0.2
    linear, found = constructed_model("linear", offset=2)
    assert eigenvalue_score(qk_circuit(linear, 0, found.unit, full=True, lags=(0, 2))) > 0.99
    assert eigenvalue_score(qk_circuit(linear, 0, found.unit, full=True, lags=(0, 1))) == 0


def test_composition_points_to_the_wired_pair_alone():
    model, circuit = constructed_model("softmax", n_ctx=48)
    # What keeps queries off position 0 is a large part of the head's QK map and no composition: without it.
    model.blocks[1].attn.W_K[circuit.unit][4 * 32, 32] = 0
    right = (circuit.previous_token, (circuit.layer, circuit.unit))
    found = composition_scores(model, "k")
    assert [pair[:2] for pair in found.above_null()] == [right]
    for kind in ("q", "v"):
        other = composition_scores(model, kind)
        assert other.above_null() == []
        assert not (other.excess > 3).any()


def test_composition_is_the_formula_and_random_models_lie_within_the_null():
    model = build("llama")
    for kind in KINDS:
        found = composition_scores(model, kind, n_draws=64)
        first, second = unit_weights(model, 0), unit_weights(model, 1)
        ov = first.W_V[1] @ first.W_O[1]
        x = {
            "q": second.W_Q[2] @ second.W_K[2].T,
            "k": second.W_K[2] @ second.W_Q[2].T,
            "v": second.W_V[2] @ second.W_O[2],
        }[kind]
        want = (ov @ x).norm() / (ov.norm() * x.norm())
        got = found.scores[found.heads.index((0, 1)), found.heads.index((1, 2))]
        assert abs(float(want - got)) < 1e-10
        assert found.above_null() == []
        assert found.scores.isnan()[4:, :].all() and found.scores.isnan()[:, :4].all()


def test_composition_runs_in_every_mixer():
    found = composition_scores(build("hybrid"), "k", lags={"k": 1})
    earlier = [
        (a, b) for a, (i, _) in enumerate(found.heads) for b, (j, _) in enumerate(found.heads) if i < j
    ]
    assert all(0 < float(found.scores[a, b]) < 1 for a, b in earlier)


def test_errors():
    model = build("hybrid")
    with pytest.raises(InterventionError, match=r"head index 3 is out of range in layer 1; accepted: 0..1"):
        ov_circuit(model, 1, 3)
    with pytest.raises(InterventionError, match="layer index 9"):
        qk_circuit(model, 9)
    with pytest.raises(InterventionError, match="lag 4 of v is out of range; accepted: 0..3"):
        ov_circuit(model, 0, 0, lag=4)
    with pytest.raises(InterventionError, match="no convolution, so no taps"):
        tap_alignment(model, 1)
    with pytest.raises(InterventionError, match="kind is 'o'"):
        composition_scores(model, "o")
    with pytest.raises(InterventionError, match="has 1 layer"):
        composition_scores(build("plain"), "k")
