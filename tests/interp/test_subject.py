"""The two faces of a model agree: TransformerLens's bridge and our own mixers on the same weights."""

import json
from pathlib import Path

import pytest
import torch
from language_models import build, tokens
from safetensors.torch import load_file

from interp import copying, detect
from interp.bridge_subject import open_bridge
from interp.errors import DetectionError
from interp.subject import LanguageModelSubject
from models.pretrained import from_pretrained

TINY = Path(__file__).parents[1] / "cases" / "real_models" / "tiny"


@pytest.fixture(autouse=True)
def _no_gradients():
    with torch.no_grad():
        yield


@pytest.fixture(scope="module", params=["gpt2", "llama"])
def pair(request):
    folder = TINY / request.param
    return open_bridge(folder), LanguageModelSubject(from_pretrained(folder)), request.param


def test_logits_directions_and_grams_agree(pair):
    bridge, ours, name = pair
    ids = load_file(TINY / f"{name}.case.safetensors")["input_ids"]
    assert torch.allclose(bridge.logits(ids), ours.logits(ids), atol=1e-4)
    assert torch.allclose(bridge.directions(ids), ours.directions(ids), atol=1e-6)
    for options in ({}, {"fold": False}, {"centre": True}):
        assert torch.allclose(bridge.gram(1, **options), ours.gram(1, **options), atol=1e-6)
    assert bridge.centred_norm == ours.centred_norm == (name == "gpt2")


def test_readings_and_copying_scores_agree(pair):
    bridge, ours, name = pair
    ids = load_file(TINY / f"{name}.case.safetensors")["input_ids"]
    views = ([], [])
    for subject, found in zip((bridge, ours), views, strict=True):
        subject.visit(ids, found.append)
    for left, right in zip(*views, strict=True):
        assert torch.allclose(left.readings[0].weights(), right.readings[0].weights(), atol=1e-5)
        outputs = [copying.unit_outputs(view.readings[0]) for view in (left, right)]
        written = [
            torch.einsum("btus,usd->btud", out, view.W_O)
            for out, view in zip(outputs, (left, right), strict=True)
        ]
        assert torch.allclose(*written, atol=1e-5)
        scores = [
            copying.eigenvalue_copying(view.W_V, view.W_O, subject.gram(view.layer))
            for view, subject in ((left, bridge), (right, ours))
        ]
        assert torch.allclose(*scores, atol=1e-5)


def test_detection_agrees(pair):
    folder = TINY / pair[2]
    left, right = (detect(folder, via=via, n_maps=0) for via in ("bridge", "mixers"))
    for a, b in zip(left.checkpoints[0].heads, right.checkpoints[0].heads, strict=True):
        for field in ("prefix_matching", "previous_token", "copying", "copying_edge", "copying_eigenvalue"):
            assert getattr(a, field) == pytest.approx(getattr(b, field), abs=1e-4), field
    assert left.checkpoints[0].order_gain_nats == pytest.approx(
        right.checkpoints[0].order_gain_nats, abs=1e-4
    )


@pytest.mark.parametrize("name", ["gpt2", "llama", "plain", "mamba2"])
def test_directions_give_the_logits(name):
    """A residual vector's product with a direction is its logit, up to the final norm's scale (and its
    bias).
    """
    subject = LanguageModelSubject(build(name))
    model, ids = subject.model, tokens(seq=9)
    resid = model(ids, stop_at_layer=subject.n_layers)
    centred = resid - resid.mean(-1, keepdim=True) if subject.centred_norm else resid
    norm = model.config.norm
    scale = (
        1.0 if norm == "none" else (centred.square().mean(-1, keepdim=True) + model.config.norm_eps).sqrt()
    )
    everything = torch.arange(subject.d_vocab)[None]
    logits = resid @ subject.directions(everything, centre=False)[0].T / scale
    zero = resid * 0
    constant = model.unembed(model.ln_final(zero)) if norm == "layer" else model.unembed(zero)
    assert torch.allclose(logits + constant, model(ids), atol=1e-9)
    mean_out = resid @ subject.directions(everything)[0].T / scale
    assert torch.allclose(mean_out, logits - logits.mean(-1, keepdim=True), atol=1e-9)


def test_losses_are_the_models_own():
    model, ids = build("hybrid"), tokens(batch=3, seq=9)
    expected = model(ids, return_type="loss", loss_per_token=True)
    assert torch.allclose(LanguageModelSubject(model).losses(ids), expected, atol=1e-10)


def test_known_losses_stand_for_the_first_batch_only_when_they_are_all_of_it(monkeypatch):
    subject, ids = LanguageModelSubject(build("hybrid")), tokens(batch=5, seq=9)
    monkeypatch.setattr(subject, "batches", lambda n, seq: iter([slice(0, 2), slice(2, 4), slice(4, 5)]))
    expected, logits, rows = subject.losses(ids), subject.logits, []
    monkeypatch.setattr(subject, "logits", lambda part: rows.append(len(part)) or logits(part))
    assert torch.equal(subject.losses(ids, known=expected[:2]), expected)
    assert rows == [2, 1]
    assert torch.equal(subject.losses(ids, known=expected[:1]), expected)
    assert rows == [2, 1, 2, 2, 1]


def test_a_mamba_folder_is_not_for_the_bridge():
    with pytest.raises(DetectionError, match="mamba"):
        open_bridge(TINY / "mamba")


def test_gpt2_bos_is_that_of_its_configuration(pair):
    assert pair[0].bos == json.loads((TINY / pair[2] / "config.json").read_text())["bos_token_id"]
