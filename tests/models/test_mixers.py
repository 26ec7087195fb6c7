"""Every mixer: three forms that agree on outputs, states and gradients, also across a cut sequence."""

import dataclasses

import pytest
import torch
from mixer_configs import D_MODEL, MIXER_CONFIGS, build, inputs

from models.config import LanguageModelConfig, Mamba1Config, SoftmaxAttentionConfig
from models.errors import ConfigError
from models.form import Form
from models.mixers import MIXERS, make_mixer

TOLERANCE = 1e-10
NAMES = list(MIXER_CONFIGS)


def leaves(state) -> list[torch.Tensor]:
    """The tensors of a state, in order."""
    if isinstance(state, torch.Tensor):
        return [state]
    if dataclasses.is_dataclass(state):
        return [leaf for f in dataclasses.fields(state) for leaf in leaves(getattr(state, f.name))]
    return []


def assert_close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float = TOLERANCE) -> None:
    assert actual.shape == expected.shape
    scale = max(1.0, float(expected.abs().max())) if expected.numel() else 1.0
    error = float((actual - expected).abs().max()) / scale if expected.numel() else 0.0
    assert error <= tolerance, error


def evaluate(name: str, form: Form, x: torch.Tensor, state=None):
    """Output, state tensors, and gradients of a fixed random function of the output."""
    mixer = build(name)
    x = x.clone().requires_grad_()
    y, after = mixer.prefill(x, state, form)
    cotangent = torch.randn(y.shape, dtype=y.dtype, generator=torch.Generator().manual_seed(9))
    total = (y * cotangent).sum() + sum(leaf.square().sum() for leaf in leaves(after))
    total.backward()
    gradients = {n: p.grad for n, p in mixer.named_parameters()} | {"x": x.grad}
    return y.detach(), [leaf.detach() for leaf in leaves(after)], gradients


@pytest.mark.parametrize("seq", [1, 7, 33, 65])
@pytest.mark.parametrize("name", NAMES)
def test_three_forms_agree_on_outputs_states_and_gradients(name, seq):
    x = inputs(seq)
    y, states, gradients = evaluate(name, Form.RECURRENT, x)
    assert y.abs().max() > 0.05
    for form in (Form.PARALLEL, Form.CHUNKED):
        other_y, other_states, other_gradients = evaluate(name, form, x)
        assert_close(other_y, y)
        assert len(other_states) == len(states)
        for a, b in zip(other_states, states, strict=True):
            assert_close(a, b)
        assert other_gradients.keys() == gradients.keys()
        for key in gradients:
            # At the first position nothing has decayed: no gradient and a gradient of zero mean the same.
            a, b = (torch.zeros(()) if g is None else g for g in (other_gradients[key], gradients[key]))
            assert_close(*torch.broadcast_tensors(a, b))


@pytest.mark.parametrize("name", NAMES)
def test_every_parameter_gets_a_gradient(name):
    _, _, gradients = evaluate(name, Form.CHUNKED, inputs(9))
    for key, gradient in gradients.items():
        assert gradient is not None and gradient.abs().max() > 0, key


@pytest.mark.parametrize("cut", [1, 2, 20])
@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_a_sequence_cut_across_two_forms_is_the_whole(name, cut):
    x = inputs(33)
    mixer = build(name)
    whole, end = mixer.prefill(x, mixer.init_state(2), Form.CHUNKED)
    assert_close(mixer(x), whole)
    for first in Form:
        for second in Form:
            y1, state = mixer.prefill(x[:, :cut], None, first)
            y2, state = mixer.prefill(x[:, cut:], state, second)
            assert_close(torch.cat((y1, y2), 1), whole)
            for a, b in zip(leaves(state), leaves(end), strict=True):
                assert_close(a, b)


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_steps_continue_a_prefix(name):
    x = inputs(12)
    mixer = build(name)
    whole = mixer(x, Form.PARALLEL)
    _, state = mixer.prefill(x[:, :5], mixer.init_state(2))
    for t in range(5, 12):
        y, state = mixer.step(x[:, t], state)
        assert_close(y, whole[:, t])


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_outputs_are_causal(name):
    mixer, x = build(name), inputs(20)
    changed = x.clone()
    changed[:, 11:] += 1
    for form in Form:
        before, after = mixer(x, form), mixer(changed, form)
        assert torch.equal(before[:, :11], after[:, :11]) or (before - after)[:, :11].abs().max() < 1e-12
        assert (before - after)[:, 11:].abs().max() > 1e-3


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_state_size_counts_the_state(name):
    mixer = build(name)
    state = mixer.init_state(1)
    if mixer.kind == "softmax":
        _, state = mixer.prefill(inputs(128, batch=1), state)
    assert mixer.state_size() == sum(leaf.numel() for leaf in leaves(state))


@pytest.mark.parametrize("name", [n for n in NAMES if "softmax" not in n])
@torch.no_grad()
def test_recurrent_state_does_not_grow(name):
    mixer = build(name)
    _, early = mixer.prefill(inputs(3), None)
    _, late = mixer.prefill(inputs(65), None)
    assert [leaf.shape for leaf in leaves(early)] == [leaf.shape for leaf in leaves(late)]


@torch.no_grad()
def test_constant_bcdt_has_a_toeplitz_pattern_and_ordinary_mamba_has_not():
    for name, toeplitz in (("mamba1_constant", True), ("mamba1", False)):
        pattern = build(name).implied_attention(inputs(12))
        shifted = (pattern[..., 1:, 1:] - pattern[..., :-1, :-1]).abs().max()
        assert (shifted < 1e-14) == toeplitz
        assert pattern.abs().max() > 1e-3


@pytest.mark.parametrize("form", list(Form))
@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_bfloat16_stays_near_float64(name, form):
    x = inputs(33)
    mixer, exact = build(name, dtype=torch.bfloat16), build(name)(x)
    for hooked in (False, True):
        if hooked:
            for point in mixer.hook_forms:
                getattr(mixer, point).add_hook(lambda tensor, hook: tensor.clone())
        low = mixer(x.bfloat16(), form)
        assert low.dtype == torch.bfloat16
        assert (low.double() - exact).abs().max() < 0.05 * exact.abs().max() + 0.05


def test_initial_rates_and_steps():
    """Standard: dt .001-.1, A = 1..n (Mamba-1), 1..16 (Mamba-2). Slow: dt .1, times 8-512 tokens."""
    from torch.nn.functional import softplus

    for name, kind in (
        ("mamba1", "standard"),
        ("mamba1_bias", "slow"),
        ("mamba2", "standard"),
        ("mamba2_groups", "slow"),
    ):
        config, _ = MIXER_CONFIGS[name]
        mixer = MIXERS[config.kind](config, D_MODEL)
        mixer.reset_parameters(std=0.02, out_std=0.01, generator=torch.Generator().manual_seed(3))
        bias = mixer.dt_proj.bias if mixer.kind == "mamba1" else mixer.dt_bias
        dt, rates = softplus(bias), mixer.A_log.exp()
        if kind == "slow":
            assert torch.allclose(dt, torch.full_like(dt, 0.1))
            tokens = 1 / (rates * 0.1)
            assert torch.allclose(
                torch.stack([tokens.min(), tokens.max()]), torch.tensor([8.0, 512.0]), rtol=1e-4
            )
        else:
            assert 1e-3 * 0.999 <= dt.min() and dt.max() <= 0.1 * 1.001
            assert rates.min() >= 1 and rates.max() <= 16.001
        assert abs(mixer.out_proj.weight.std().item() - 0.01) < 0.003


def test_initialisation_follows_its_generator_alone():
    config, _ = MIXER_CONFIGS["mamba1"]
    weights = []
    for seed in (0, 0, 1):
        torch.manual_seed(len(weights))
        mixer = MIXERS["mamba1"](config, D_MODEL)
        mixer.reset_parameters(std=0.02, out_std=0.02, generator=torch.Generator().manual_seed(seed))
        weights.append(mixer.x_proj.weight.detach().clone())
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_registry_builds_what_the_configuration_names():
    softmax = SoftmaxAttentionConfig(n_heads=2)
    model = LanguageModelConfig(d_model=8, n_layers=2, d_vocab=5, n_ctx=16, mixers=(softmax, Mamba1Config()))
    assert [make_mixer(m, model).kind for m in model.mixers] == ["softmax", "mamba1"]


def test_refusals_name_what_is_accepted():
    mixer = build("mamba1")
    with pytest.raises(ConfigError, match="no reading 'patern'.*ssm, block"):
        mixer.read(inputs(4), "patern")
    with pytest.raises(ConfigError, match="no units 'head'; accepted: layer, state, cluster:K"):
        mixer.read(inputs(4), "ssm", units="head")
    with pytest.raises(ConfigError, match="cluster:99 asks for 99 clusters; accepted: 1..10"):
        mixer.read(inputs(4), "ssm", units="cluster:99")
    with pytest.raises(ConfigError, match="form is 'serial'; accepted: parallel, chunked, recurrent"):
        mixer(inputs(4), "serial")
