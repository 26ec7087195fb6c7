"""Attribution patching against activation patching; attributions that sum to the logits; the lens's last
layer.
"""

import pytest
import torch
from language_models import CONFIGS, build, tokens

from interp.attribution import attribution_patching, direct_logit_attribution, gradients, logit_lens
from interp.errors import InterventionError
from interp.patching import Recording, activation_patching, patched, record
from interp.sequences import candidates, repeated_tokens
from interp.sites import Site, head_sites
from models.constructed import constructed_model

KINDS = ["softmax", "linear", "mamba1", "mamba2", "hybrid"]


def _metric(logits):
    return logits[:, -1, 3].sum()


def _sites(model):
    found = []
    for layer, block in enumerate(model.blocks):
        kinds = ["resid_pre", "mixer_out", "z", "q", "k", "v", "pattern"]
        kinds += ["gate", "dt"] if block.attn.kind.startswith("mamba") else []
        found += [Site(kind=kind, layer=layer) for kind in kinds]
        found.append(Site(kind="z", layer=layer, head=1, positions=(3, 4)))
    return found


@pytest.mark.parametrize("name", KINDS)
def test_equals_activation_patching_in_the_linear_limit(name):
    model = build(name)
    sites = _sites(model)
    found = gradients(model, tokens(), sites, _metric)
    base = record(model, tokens(), sites)
    other = record(model, tokens(seed=1), sites)
    # A small step towards the other run: what activation patching then does is linear up to the square of the
    # step.
    step = 1e-5
    near = Recording({k: base.values[k] + step * (other.values[k] - base.values[k]) for k in base.values})
    with torch.no_grad():
        plain = _metric(model(tokens()))
        for site in sites:
            with patched(model, [site], near):
                exact = (_metric(model(tokens())) - plain) / step
            estimate = found.change(site, near) / step
            assert abs(float(exact - estimate)) < 1e-3 * max(1.0, abs(float(exact))), site


def test_equals_activation_patching_on_a_linear_path():
    model = build("plain")
    sites = [Site(kind="mixer_out", layer=0), Site(kind="z", layer=0, head=1), Site(kind="v", layer=0)]
    exact = activation_patching(model, tokens(), tokens(seed=1), sites, _metric)
    estimate = attribution_patching(model, tokens(), tokens(seed=1), sites, _metric)
    assert torch.allclose(estimate, exact.values - exact.base, atol=1e-10)
    assert estimate.abs().min() > 1e-3
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("kind", ["linear", "mamba1", "mamba2"])
def test_states_are_attributed_in_the_recurrent_form(kind):
    model = build(kind)
    site = Site(kind="state", layer=1, positions=(8,))
    exact = activation_patching(model, tokens(), tokens(seed=1), [site], _metric)
    estimate = attribution_patching(model, tokens(), tokens(seed=1), [site], _metric)
    change = exact.values - exact.base
    assert estimate.shape == (1,) and torch.sign(estimate) == torch.sign(change)


def test_frozen_parameters_have_gradients_below_them_too():
    model = build("softmax").requires_grad_(False)
    found = attribution_patching(model, tokens(), tokens(seed=1), [Site(kind="z", layer=0)], _metric)
    assert found.abs().min() > 0


@pytest.mark.parametrize("name", list(CONFIGS))
def test_direct_logit_attribution_sums_to_the_logits(name):
    model, ids = build(name), tokens()
    found = direct_logit_attribution(model, ids)
    targets = torch.cat((ids[:, 1:], ids[:, -1:]), 1)
    with torch.no_grad():
        logits = model(ids).gather(-1, targets[..., None])[..., 0]
    assert torch.allclose(found.values.sum(0), logits, atol=1e-9)
    assert found.labels[0] == "embed" and found.labels[-1] == "bias"
    assert found.of(found.labels[1]).shape == ids.shape


def test_direct_logit_attribution_names_the_induction_head():
    for kind in ("softmax", "linear", "mamba2"):
        model, circuit = constructed_model(kind)
        probe = repeated_tokens(2, 20, 2, ids=candidates(32))
        found = direct_logit_attribution(model, probe.tokens)
        by_part = found.values[..., 20:-1].mean((1, 2))
        assert found.labels[int(by_part.argmax())] == f"L{circuit.layer}H{circuit.unit}"
        assert by_part.max() > 10 and by_part.topk(2).values[1] < 1e-4


@pytest.mark.parametrize("name", list(CONFIGS))
def test_logit_lens_ends_at_the_logits(name):
    model, ids = build(name), tokens()
    lens = logit_lens(model, ids)
    assert lens.shape == (model.config.n_layers + 1, 2, 9, model.config.d_vocab)
    with torch.no_grad():
        assert torch.allclose(lens[-1], model(ids), atol=1e-10)
    assert (lens[0] - lens[-1]).abs().max() > 1e-3
    assert torch.equal(logit_lens(model, ids, reduce=lambda x: x.argmax(-1)), lens.argmax(-1))


def test_errors():
    model = build("hybrid")
    with pytest.raises(InterventionError, match="accepted: that of tokens"):
        attribution_patching(model, tokens(), tokens(seq=4), [Site(kind="z", layer=0)], _metric)
    with pytest.raises(InterventionError, match="no activation of its own"):
        attribution_patching(model, tokens(), tokens(), [Site(kind="tap", layer=0, lag=1)], _metric)
    with pytest.raises(InterventionError, match="target 999 is out of range; accepted: 0.."):
        direct_logit_attribution(build("softmax"), tokens(), tokens() * 0 + 999)
    with pytest.raises(InterventionError, match="targets have shape"):
        direct_logit_attribution(model, tokens(), tokens(seq=3))
    with pytest.raises(InterventionError, match="no component 'L9'"):
        direct_logit_attribution(model, tokens()).of("L9")
    assert len(head_sites(model, "z", [1])) == 2
