"""Hook points of every mixer: shapes, the forms in which they fire, and that what they return is used."""

import dataclasses

import pytest
import torch
from mixer_configs import D_MODEL, MIXER_CONFIGS, build, inputs

from models.form import Form

NAMES = list(MIXER_CONFIGS)
SEQ = 9


def record(mixer, x, form, *, edit=None, state=None):
    """Output, and everything that fired: name -> list of tensors. `edit`: (name, function)."""
    fired: dict[str, list[torch.Tensor]] = {}

    def listen(name):
        def hook(tensor, hook):
            fired.setdefault(name, []).append(tensor.detach().clone())
            return edit[1](tensor) if edit and edit[0] == name else None

        return hook

    mixer.use_attn_result = True
    for name in mixer.hook_forms:
        getattr(mixer, name).add_hook(listen(name))
    try:
        y, _ = mixer.prefill(x, state, form)
    finally:
        mixer.use_attn_result = False
        for name in mixer.hook_forms:
            getattr(mixer, name).remove_hooks()
    return y, fired


@pytest.mark.parametrize("form", list(Form))
@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_points_fire_in_the_forms_they_declare_and_change_nothing(name, form):
    mixer, x = build(name), inputs(SEQ)
    y, fired = record(mixer, x, form)
    assert set(fired) == {point for point, forms in mixer.hook_forms.items() if form in forms}
    assert (y - mixer(x, form)).abs().max() < 1e-12


@pytest.mark.parametrize("form", list(Form))
@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_every_point_is_used_in_every_form_in_which_it_fires(name, form):
    mixer, x = build(name), inputs(SEQ)
    plain = mixer(x, form)
    for point, forms in mixer.hook_forms.items():
        if form not in forms:
            continue
        scale = 0.5 if point in ("hook_dt", "hook_decay") else 1.5
        y, _ = record(mixer, x, form, edit=(point, lambda t, s=scale: t * s))
        assert (y - plain).abs().max() > 1e-4, point


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_the_same_intervention_has_the_same_effect_in_every_form(name):
    mixer, x = build(name), inputs(SEQ)
    noise = torch.Generator()

    def shake(tensor):
        return tensor * (0.2 + torch.rand(tensor.shape, generator=noise.manual_seed(4), dtype=tensor.dtype))

    for point, forms in mixer.hook_forms.items():
        if len(forms) < 3:
            continue
        outputs = [record(mixer, x, form, edit=(point, shake))[0] for form in Form]
        for y in outputs[1:]:
            assert (y - outputs[0]).abs().max() < 1e-10, point


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_interventions_agree_when_a_state_is_carried_in(name):
    mixer, x = build(name), inputs(SEQ)
    _, state = mixer.prefill(x[:, :4], None)
    outputs = [
        record(mixer, x[:, 4:], form, edit=("hook_v", lambda t: t.roll(1, 1)), state=state)[0]
        for form in Form
    ]
    for y in outputs[1:]:
        assert (y - outputs[0]).abs().max() < 1e-10


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_shapes_are_transformer_lens_shapes(name):
    mixer, x = build(name), inputs(SEQ)
    _, fired = record(mixer, x, Form.PARALLEL)
    shape = {point: tuple(tensors[0].shape) for point, tensors in fired.items()}
    heads, width = mixer.n_heads, mixer.d_head
    assert shape["hook_z"] == (2, SEQ, heads, width)
    assert shape["hook_pattern"] == (2, heads, SEQ, SEQ)
    assert shape["hook_result"] == (2, SEQ, heads, D_MODEL)
    if mixer.kind in ("softmax", "linear"):
        assert shape["hook_q"] == (2, SEQ, heads, width)
        assert shape["hook_k"] == shape["hook_v"] == (2, SEQ, mixer.n_kv_heads, width)
        assert mixer.W_Q.shape == mixer.W_K.shape == mixer.W_V.shape == (heads, D_MODEL, width)
    elif mixer.kind == "mamba1":
        assert shape["hook_q"] == shape["hook_k"] == (2, SEQ, 1, mixer.d_state)
        assert shape["hook_v"] == (2, SEQ, heads, 1)
        assert shape["hook_dt"] == shape["hook_gate"] == shape["hook_conv"] == (2, SEQ, mixer.d_inner)
    else:
        assert shape["hook_q"] == shape["hook_k"] == (2, SEQ, mixer.n_groups, mixer.d_state)
        assert shape["hook_v"] == (2, SEQ, heads, width)
        assert shape["hook_dt"] == shape["hook_decay"] == (2, SEQ, heads)
        assert shape["hook_gate"] == (2, SEQ, mixer.d_inner)
    assert mixer.W_O.shape == (heads, width, D_MODEL)
    if mixer.kind == "softmax":
        assert shape["hook_attn_scores"] == (2, heads, SEQ, SEQ)


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_pattern_is_the_implied_attention_and_results_sum_to_the_output(name):
    mixer, x = build(name), inputs(SEQ)
    y, fired = record(mixer, x, Form.PARALLEL)
    assert (fired["hook_pattern"][0] - mixer.implied_attention(x)).abs().max() < 1e-12
    assert (fired["hook_result"][0].sum(2) + mixer.b_O - y).abs().max() < 1e-12


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_zeroed_pattern_leaves_only_what_needs_no_other_position(name):
    """Without attention: the output bias, and for Mamba the skip path."""
    mixer, x = build(name), inputs(SEQ)
    y, fired = record(mixer, x, Form.PARALLEL, edit=("hook_pattern", torch.zeros_like))
    z = fired["hook_z"][0]
    if mixer.kind in ("softmax", "linear"):
        assert z.abs().max() == 0
        assert (y - mixer.b_O).abs().max() < 1e-12
    else:
        v = fired["hook_v"][0]
        assert (z - mixer.D.view(-1, 1) * v).abs().max() < 1e-12


@pytest.mark.parametrize("name", ["linear", "linear_conv", "mamba1", "mamba2"])
@torch.no_grad()
def test_a_state_intervention_reaches_later_tokens(name):
    """Zeroing the state after position 3 makes the rest equal to what a fresh state gives."""
    mixer, x = build(name), inputs(SEQ)
    positions = []

    def forget(state, hook):
        positions.append(hook.ctx["position"])
        return torch.zeros_like(state) if hook.ctx["position"] == 3 else None

    mixer.hook_state.add_hook(forget)
    y = mixer(x, Form.RECURRENT)
    mixer.hook_state.remove_hooks()
    assert positions == list(range(SEQ))
    plain = mixer(x, Form.RECURRENT)
    assert (y[:, :3] - plain[:, :3]).abs().max() < 1e-12
    _, state = mixer.prefill(x[:, :4], None)
    if mixer.kind == "linear":
        forgotten = dataclasses.replace(state.linear, s=torch.zeros_like(state.linear.s))
        state = dataclasses.replace(state, linear=forgotten)
    else:
        state = dataclasses.replace(state, ssm=torch.zeros_like(state.ssm))
    assert (y[:, 4:] - mixer.prefill(x[:, 4:], state)[0]).abs().max() < 1e-12
    assert (y[:, 4:] - plain[:, 4:]).abs().max() > 1e-4


@pytest.mark.parametrize("name", ["mamba1", "mamba2", "mamba2_groups"])
@torch.no_grad()
def test_writes_and_decays_rebuild_the_state(name):
    mixer, x = build(name), inputs(SEQ)
    _, fired = record(mixer, x, Form.RECURRENT)
    decays = fired["hook_decay"]
    if mixer.kind == "mamba2":
        decays = decays[0].unbind(1)
    state = torch.zeros(())
    for decay, write, seen in zip(decays, fired["hook_write"], fired["hook_state"], strict=True):
        state = (decay if mixer.kind == "mamba1" else decay[..., None, None]).exp() * state + write
        assert (state - seen).abs().max() < 1e-12
    _, end = mixer.prefill(x, None)
    assert (state - end.ssm).abs().max() < 1e-10


@pytest.mark.parametrize("name", ["mamba1", "mamba2"])
def test_transformer_lens_aliases_point_at_real_points(name):
    mixer = build(name)
    assert set(mixer.hook_aliases) == {f"hook_ssm_{n}" for n in ("B", "C", "dt", "decay", "write", "state")}
    assert set(mixer.hook_aliases.values()) <= set(mixer.hook_forms)


@torch.no_grad()
def test_parameter_views_multiply_to_the_hooks():
    for name in ("softmax", "softmax_gqa_rope_window", "linear"):
        mixer, x = build(name), inputs(SEQ)
        _, fired = record(mixer, x, Form.CHUNKED)
        repeat = mixer.n_heads // mixer.n_kv_heads
        for letter in "QKV":
            made = torch.einsum("btm,hmd->bthd", x, getattr(mixer, f"W_{letter}")) + getattr(
                mixer, f"b_{letter}"
            )
            seen = fired[f"hook_{letter.lower()}"][0]
            seen = seen if letter == "Q" else seen.repeat_interleave(repeat, 2)
            assert (made - seen).abs().max() < 1e-12


def test_views_share_memory_with_the_parameters():
    mixer = build("softmax")
    with torch.no_grad():
        mixer.W_V[1].zero_()
    assert mixer.in_proj.weight.view(3, 3, 4, D_MODEL)[2, 1].abs().max() == 0
