"""Hooks are strict: unknown and unfired names are refused, what fires is used, and nothing stays attached."""

import functools

import language_models
import pytest
import torch
from torch.testing import assert_close

from models import ConfigError, Form
from models.errors import HookNotFired, UnknownHook
from models.lens import attached

EXACT = {"rtol": 0, "atol": 1e-10}
TOKENS = language_models.tokens()
NAMES = list(language_models.CONFIGS)


def hooked(model) -> list[str]:
    return [name for name, point in model.hook_dict.items() if attached(point)]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("form", Form)
def test_every_declared_point_fires_and_no_other(name, form):
    model = language_models.build(name)
    fired = set()
    for point in model.hook_dict.values():
        point.register_forward_hook(lambda module, args, output: fired.add(module.name))
    for block in model.blocks:
        block.attn.use_attn_result = True
    model(TOKENS, form=form)
    assert fired == {n for n in model.hook_dict if form in model.hook_forms[n]}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("form", Form)
@torch.no_grad()
def test_what_fires_is_used(name, form):
    """Any point, changed, changes the logits; looked at only, it does not."""
    model = language_models.build(name)
    tokens = TOKENS[:1, :5]
    plain = model(tokens)
    points = model.select_hooks(None, form)
    looking = [(point, lambda x, hook: None) for point in points]
    assert_close(model.run_with_hooks(tokens, fwd_hooks=looking, form=form), plain, **EXACT)
    for point in points:
        noise = torch.Generator().manual_seed(0)

        def change(x, hook, noise=noise):
            return x * (1 + torch.rand(x.shape, generator=noise, dtype=x.dtype))

        changed = model.run_with_hooks(tokens, fwd_hooks=[(point, change)], form=form)
        assert (changed - plain).abs().max() > 1e-6, point
        assert torch.isfinite(changed).all(), point
    assert hooked(model) == []
    assert_close(model(tokens, form=form), plain, **EXACT)


def test_unknown_names_are_refused_with_the_closest():
    model = language_models.build("softmax")
    for call in (
        lambda: model.run_with_hooks(TOKENS, fwd_hooks=[("blocks.0.attn.hook_patern", lambda x, hook: x)]),
        lambda: model.run_with_cache(TOKENS, names_filter="blocks.0.attn.hook_patern"),
        lambda: model.run_with_cache(TOKENS, names_filter=["hook_embed", "blocks.0.attn.hook_patern"]),
        lambda: model.add_hook("blocks.0.attn.hook_patern", lambda x, hook: x),
        lambda: model.run_with_cache(TOKENS)[1]["blocks.0.attn.hook_patern"],
    ):
        with pytest.raises(UnknownHook) as error:
            call()
        assert "did you mean blocks.0.attn.hook_pattern" in str(error.value)
    with pytest.raises(UnknownHook, match="selects no hook point"):
        model.run_with_cache(TOKENS, names_filter=lambda name: "patern" in name)
    assert isinstance(error.value, KeyError)
    assert hooked(model) == []


def test_points_that_do_not_fire_are_refused_with_the_forms_that_do():
    model = language_models.build("linear")
    pattern, state = "blocks.1.attn.hook_pattern", "blocks.1.attn.hook_state"
    for name, form, fires in [(pattern, "chunked", "parallel"), (state, "parallel", "recurrent")]:
        hooks = [(name, lambda x, hook: x)]
        attempts = (
            functools.partial(model.run_with_hooks, TOKENS, fwd_hooks=hooks, form=form),
            functools.partial(model.run_with_cache, TOKENS, names_filter=name, form=form),
            functools.partial(model.run_with_cache, TOKENS, names_filter=name.__eq__, form=form),
            functools.partial(model.run_with_cache(TOKENS, form=form)[1].__getitem__, name),
        )
        for attempt in attempts:
            with pytest.raises(HookNotFired) as error:
                attempt()
            assert str(error.value) == f"'{name}' does not fire in form '{form}'; it fires in: {fires}"
    assert isinstance(error.value, RuntimeError)


def test_a_run_in_a_form_that_would_silence_a_hook_is_refused():
    model = language_models.build("softmax")
    hooks = [("blocks.0.attn.hook_pattern", lambda x, hook: x * 0)]
    with model.hooks(fwd_hooks=hooks):
        by_context = model(TOKENS)
        with pytest.raises(HookNotFired):
            model(TOKENS, form="chunked")
        with pytest.raises(HookNotFired):
            model.step(TOKENS[:, 0], model.init_state(2))
        with model.hooks():
            assert_close(model(TOKENS), by_context, **EXACT)
    assert_close(by_context, model.run_with_hooks(TOKENS, fwd_hooks=hooks), **EXACT)
    assert (by_context - model(TOKENS)).abs().max() > 1e-3
    model.add_hook(*hooks[0])
    with pytest.raises(HookNotFired):
        model(TOKENS)
    assert_close(model(TOKENS, form="parallel"), by_context, **EXACT)
    model.reset_hooks()
    model(TOKENS)


def test_nothing_stays_attached_after_an_exception():
    model = language_models.build("mamba2")
    plain = model(TOKENS)

    def fail(x, hook):
        raise RuntimeError("from a hook")

    result = ("blocks.0.attn.hook_result", lambda x, hook: x)
    with pytest.raises(RuntimeError, match="from a hook"):
        model.run_with_hooks(TOKENS, fwd_hooks=[result, ("blocks.1.hook_resid_pre", fail)])
    with pytest.raises(UnknownHook):
        model.run_with_hooks(TOKENS, fwd_hooks=[result, ("nothing", fail)])
    with pytest.raises(ConfigError):
        model.run_with_cache(TOKENS + 99)
    with pytest.raises(RuntimeError, match="from a hook"), model.hooks(fwd_hooks=[("hook_embed", fail)]):
        model(TOKENS)
    assert hooked(model) == [] and not any(block.attn.use_attn_result for block in model.blocks)
    assert_close(model(TOKENS), plain, **EXACT)
    assert model._open_forms == [] and model.context_level == 0


def test_backward_hooks_see_gradients():
    model = language_models.build("softmax")
    seen = {}
    name = "blocks.0.hook_resid_post"
    with model.hooks(bwd_hooks=[(name, lambda grad, hook: seen.update(grad=grad))]):
        model(TOKENS, return_type="loss").backward()
    _, cache = model.run_with_cache(TOKENS, return_type="loss", incl_bwd=True)
    assert_close(seen["grad"], cache[name + "_grad"], **EXACT)
    resid = model(TOKENS, stop_at_layer=1, form="parallel").detach().requires_grad_()
    logits = model(resid, start_at_layer=1)
    from models.language_model import next_token_loss

    (expected,) = torch.autograd.grad(next_token_loss(logits[:, :-1], TOKENS), resid)
    assert_close(cache["resid_post", 0].shape, expected.shape)
    assert_close(seen["grad"], expected, **EXACT)
    with pytest.raises(ConfigError, match="removes its hooks before a backward pass"):
        model.run_with_hooks(TOKENS, bwd_hooks=[(name, lambda grad, hook: None)])


@pytest.mark.parametrize("name", ["softmax", "mamba1", "mamba2", "hybrid"])
def test_cached_activations_are_copies(name):
    model = language_models.build(name)
    _, clean = model.run_with_cache(TOKENS)
    before = {key: value.clone() for key, value in clean.items()}

    def spoil(x, hook):
        x[:] = 0.5
        return x

    points = [n for n in model.select_hooks(None, "parallel") if not n.endswith("attn_scores")]
    weights = [p.clone() for p in model.parameters()]
    with torch.no_grad(), model.hooks():
        # The hook that edits in place comes after the one that records.
        _, cache = model.run_with_cache(TOKENS, reset_hooks_end=False)
        first = {key: value.clone() for key, value in cache.items()}
        for point in points:
            model.run_with_hooks(TOKENS, fwd_hooks=[(point, spoil)])
    for key, value in first.items():
        assert_close(cache[key], value, **EXACT)
        assert_close(clean[key], before[key], **EXACT)
        cache[key][:] = -1
    for old, new in zip(weights, model.parameters(), strict=True):
        assert torch.equal(old, new)
    model.reset_hooks()
    assert_close(model(TOKENS), model.run_with_hooks(TOKENS), **EXACT)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("form", [Form.PARALLEL, Form.RECURRENT])
@torch.no_grad()
def test_pos_slice_keeps_these_positions(name, form):
    model = language_models.build(name)
    _, whole = model.run_with_cache(TOKENS, form=form)
    _, cut = model.run_with_cache(TOKENS, form=form, pos_slice=slice(2, 5))
    _, last = model.run_with_cache(TOKENS, form=form, pos_slice=-1)
    for key, value in whole.items():
        dim = 2 if key.endswith(("hook_pattern", "hook_attn_scores")) else 1
        assert value.shape[dim] == TOKENS.shape[1], key
        assert_close(cut[key], value.narrow(dim, 2, 3), **EXACT)
        assert_close(last[key], value.select(dim, -1), **EXACT)


def test_remove_batch_dim():
    model = language_models.build("hybrid")
    _, cache = model.run_with_cache(TOKENS[:1], remove_batch_dim=True, pos_slice=[1, 3])
    assert cache["resid_pre", 0].shape == (2, 16) and cache["pattern", 1].shape == (2, 2, 9)
    assert not cache.has_batch_dim
    with pytest.raises(ConfigError, match="batch of 1; this one has 2"):
        model.run_with_cache(TOKENS, remove_batch_dim=True)


def test_aliases_resolve_to_the_same_points():
    model = language_models.build("mamba1")
    _, cache = model.run_with_cache(TOKENS)
    assert_close(cache["blocks.0.attn.hook_ssm_B"], cache["k", 0], **EXACT)
    assert_close(cache["ssm_C", 1], cache["q", 1], **EXACT)
    assert_close(cache["ssm_out", -1], cache["attn_out", 1], **EXACT)
    assert_close(cache["dt", 0], cache["blocks.0.attn.hook_dt"], **EXACT)
    zero = model.run_with_hooks(TOKENS, fwd_hooks=[("blocks.0.hook_ssm_out", lambda x, hook: x * 0)])
    assert_close(
        zero, model.run_with_hooks(TOKENS, fwd_hooks=[("blocks.0.hook_attn_out", lambda x, hook: x * 0)])
    )
    _, cache = model.run_with_cache(TOKENS, form="recurrent")
    assert cache["ssm_state", 0].shape == (2, 9, 6, 4)
    for name in ("mamba1", "mamba2"):
        model = language_models.build(name)
        for part in ("B", "C", "dt", "decay", "write", "state", "out"):
            model.resolve_hook(f"blocks.0.attn.hook_ssm_{part}")
            model.resolve_hook(f"blocks.0.hook_ssm_{part}")


@pytest.mark.parametrize("name", ["linear", "mamba1", "mamba2"])
@torch.no_grad()
def test_a_changed_recurrent_state_reaches_later_tokens(name):
    model = language_models.build(name)
    point = "blocks.0.attn.hook_state"
    plain = model(TOKENS)

    def forget_at_four(state, hook):
        return state * 0 if hook.ctx["position"] == 4 else None

    changed = model.run_with_hooks(TOKENS, fwd_hooks=[(point, forget_at_four)], form="recurrent")
    assert_close(changed[:, :4], plain[:, :4], **EXACT)
    assert (changed[:, 4:] - plain[:, 4:]).abs().amax((0, 2)).min() > 1e-6
    with model.hooks(fwd_hooks=[(point, forget_at_four)], form=Form.RECURRENT):
        logits, state = model.prefill(TOKENS[:, :2])
        for i in range(2, 9):
            logits, state = model.step(TOKENS[:, i], state)
            assert_close(logits, changed[:, i], **EXACT)


@torch.no_grad()
def test_a_filter_can_be_a_function_names_or_nothing():
    model = language_models.build("llama")
    _, cache = model.run_with_cache(TOKENS, names_filter=lambda n: n.endswith("pattern"))
    assert list(cache) == ["blocks.0.attn.hook_pattern", "blocks.1.attn.hook_pattern"]
    with pytest.raises(HookNotFired, match="not among the names"):
        cache["z", 0]
    _, plain = model.run_with_cache(TOKENS, names_filter="hook_embed", return_cache_object=False)
    assert type(plain) is dict and list(plain) == ["hook_embed"]


@pytest.mark.parametrize(
    ("result", "described"),
    [
        (lambda t: t[:, :1], "[2, 1, 2, 8] torch.float64"),
        (lambda t: t[:1], "[1, 9, 2, 8] torch.float64"),
        (lambda t: t.long(), "[2, 9, 2, 8] torch.int64"),
        (lambda t: 0.0, "0.0"),
    ],
)
@torch.no_grad()
def test_a_hook_that_returns_another_shape_or_no_numbers_is_refused(result, described):
    model = language_models.build("softmax")
    name = "blocks.0.attn.hook_z"
    hooks = [(name, lambda t, hook: result(t))]
    message = f"at '{name}' returned {described}; accepted: None or a tensor [2, 9, 2, 8] torch.float64"
    with pytest.raises(ConfigError) as error:
        model.run_with_hooks(TOKENS, fwd_hooks=hooks)
    assert message in str(error.value) and hooked(model) == []
    model.add_hook(*hooks[0])
    with pytest.raises(ConfigError, match="a hook at 'blocks.0.attn.hook_z' returned"):
        model(TOKENS)
    model.reset_hooks()
    assert hooked(model) == []


@torch.no_grad()
def test_what_a_hook_returns_is_cast():
    """Probes in float32 on a bfloat16 model, and autocast inside a hook."""
    model = language_models.build("softmax").bfloat16()
    point = ("blocks.0.hook_resid_post", lambda t, hook: t + torch.ones(t.shape[-1]))
    changed = model.run_with_hooks(TOKENS, fwd_hooks=[point])
    assert changed.dtype == torch.bfloat16 and not torch.equal(changed, model(TOKENS))
    model = model.float()
    with torch.autocast("cpu", torch.bfloat16):
        product = ("blocks.0.hook_resid_post", lambda t, hook: t @ torch.eye(t.shape[-1]))
        assert torch.isfinite(model.run_with_hooks(TOKENS, fwd_hooks=[product])).all()


@pytest.mark.parametrize("name", ["llama", "mamba2"])
def test_pytorchs_own_hooks_see_the_residual_stream_of_a_block(name):
    """Forward: one tensor in, one out; backward: what is edited there is all that goes on."""
    model = language_models.build(name)
    seen = []

    def forward(module, args, output):
        seen.append((len([x for x in args if isinstance(x, torch.Tensor)]), output.shape))

    handle = model.blocks[1].register_forward_hook(forward)
    expected = model(TOKENS)
    handle.remove()
    assert seen == [(1, (*TOKENS.shape, model.config.d_model))]
    assert_close(model(TOKENS), expected, **EXACT)
    handle = model.blocks[1].register_full_backward_hook(
        lambda module, grads, upstream: (0 * grads[0], *grads[1:]) if len(upstream) == 1 else None
    )
    model(TOKENS, return_type="loss").backward()
    handle.remove()
    assert not model.embed.W_E.grad.any()
