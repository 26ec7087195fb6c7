"""The language model: three forms agree, state continues a sequence, inputs are checked, blocks add up."""

import copy

import language_models
import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from models import ConfigError, Form, LanguageModel
from models.lens import attached
from models.next_token import next_tokens

NAMES = list(language_models.CONFIGS)
EXACT = {"rtol": 0, "atol": 1e-10}


@pytest.mark.parametrize("name", NAMES)
def test_three_forms_give_the_same_logits_loss_and_gradients(name):
    model = language_models.build(name)
    tokens = language_models.tokens(2, 11)
    results = {}
    for form in Form:
        model.zero_grad()
        logits, loss = model(tokens, return_type="both", form=form)
        loss.backward()
        results[form] = (logits.detach(), loss.detach(), [p.grad.clone() for p in model.parameters()])
    logits, loss, gradients = results[Form.PARALLEL]
    assert logits.shape == (2, 11, language_models.D_VOCAB) and logits.std() > 0.1
    for form in (Form.CHUNKED, Form.RECURRENT):
        assert_close(results[form][0], logits, **EXACT)
        assert_close(results[form][1], loss, **EXACT)
        for ours, other in zip(results[form][2], gradients, strict=True):
            assert_close(ours, other, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("name", NAMES)
def test_causal(name):
    model = language_models.build(name)
    tokens = language_models.tokens(1, 8)
    changed = tokens.clone()
    changed[0, 5] = (changed[0, 5] + 1) % language_models.D_VOCAB
    a, b = model(tokens), model(changed)
    assert_close(a[:, :5], b[:, :5], **EXACT)
    assert (a[:, 5:] - b[:, 5:]).abs().amax(-1).min() > 1e-6


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("prefill_form", [Form.CHUNKED, Form.RECURRENT, Form.PARALLEL])
@torch.no_grad()
def test_prefill_and_steps_continue_a_sequence(name, prefill_form):
    model = language_models.build(name)
    tokens = language_models.tokens(2, 12)
    whole = model(tokens)
    first, state = model.prefill(tokens[:, :5], form=prefill_form)
    assert_close(first, whole[:, :5], **EXACT)
    second, state = model.prefill(tokens[:, 5:8], state, form=prefill_form, logits="last")
    assert_close(second, whole[:, 7], **EXACT)
    for i in range(8, 12):
        logits, state = model.step(tokens[:, i], state)
        assert_close(logits, whole[:, i], **EXACT)
    assert state.position == 12


def test_loss_is_the_cross_entropy_of_the_next_token():
    model = language_models.build("gpt2")
    tokens = language_models.tokens(3, 7)
    logits = model(tokens)
    expected = F.cross_entropy(logits[:, :-1].transpose(1, 2), tokens[:, 1:], reduction="none")
    assert_close(model(tokens, return_type="loss"), expected.mean(), **EXACT)
    assert_close(model(tokens, return_type="loss", loss_per_token=True), expected, **EXACT)
    assert model(tokens, return_type=None) is None


@pytest.mark.parametrize("name", ["gpt2", "plain", "softmax"])
def test_the_unembedding_gives_the_losses_of_its_logits(name):
    """Tied, with a bias and without; the last place has no target."""
    model = language_models.build(name)
    tokens = language_models.tokens(3, 7)
    final = model(tokens, stop_at_layer=model.config.n_layers)
    losses = model.unembed.losses(model.ln_final(final), next_tokens(tokens))
    assert losses.shape == (3, 7) and not losses[:, -1].any()
    assert_close(losses[:, :-1], model(tokens, return_type="loss", loss_per_token=True), **EXACT)


@pytest.mark.parametrize("kind", ["forward", "forward_pre", "full_backward", "full_backward_pre"])
def test_a_module_with_any_of_pytorchs_hooks_is_looked_at(kind):
    unembed = language_models.build("plain").unembed
    assert not attached(unembed)
    handle = getattr(unembed, f"register_{kind}_hook")(lambda *args: None)
    assert attached(unembed)
    handle.remove()
    assert not attached(unembed)


@pytest.mark.parametrize("name", ["gpt2", "gpt_neox", "hybrid", "plain"])
def test_running_blocks_by_hand_gives_the_same_logits(name):
    model = language_models.build(name)
    tokens = language_models.tokens()
    middle = model(tokens, stop_at_layer=1)
    assert middle.shape == (2, 9, 16)
    assert_close(model(middle, start_at_layer=1), model(tokens), **EXACT)
    assert_close(model(tokens, stop_at_layer=-model.config.n_layers), model(tokens, stop_at_layer=0), **EXACT)


def test_parallel_and_serial_residual_by_hand():
    for name in ("gpt_neox", "gpt2"):
        model = language_models.build(name)
        block = model.blocks[0]
        x = model(language_models.tokens(), stop_at_layer=0)
        attn = block.attn(block.ln1(x))
        between = x if name == "gpt_neox" else x + attn
        expected = x + attn + block.mlp(block.ln2(between))
        assert_close(model(language_models.tokens(), stop_at_layer=1), expected, **EXACT)


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_norm_is_the_same_with_and_without_hooks(kind):
    from models.blocks import Norm

    norm = Norm(kind, 6, 1e-3, bias=kind == "layer").double()
    torch.nn.init.normal_(norm.w)
    x = torch.randn(2, 3, 6, dtype=torch.float64)
    centred = x - x.mean(-1, keepdim=True) if kind == "layer" else x
    expected = centred / (centred.square().mean(-1, keepdim=True) + 1e-3).sqrt() * norm.w
    assert_close(norm(x), expected, **EXACT)
    norm.hook_scale.register_forward_hook(lambda module, args, output: None)
    assert_close(norm(x), expected, **EXACT)


def test_gradients_of_rms_norm_on_cpu():
    from models.blocks import Norm

    norm = Norm("rms", 7, 1e-3).double()
    torch.nn.init.normal_(norm.w)
    x = torch.randn(3, 5, 7, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, w: norm(x), (x, norm.w))
    with torch.no_grad():
        assert_close(norm(x), F.rms_norm(x, (7,), norm.w, 1e-3), **EXACT)
    assert norm(x).grad_fn.name() == "_RMSNormBackward"


def test_tied_embedding_is_one_parameter():
    tied, untied = language_models.build("gpt2"), language_models.build("llama")
    assert tied.W_U.data_ptr() == tied.W_E.data_ptr() and "unembed.weight" not in dict(
        tied.named_parameters()
    )
    assert untied.W_U.data_ptr() != untied.W_E.data_ptr()
    copied = copy.deepcopy(tied)
    assert copied.W_U.data_ptr() == copied.W_E.data_ptr() != tied.W_E.data_ptr()


def test_weights_follow_the_seed_and_leave_the_global_random_state():
    config = language_models.CONFIGS["hybrid"]
    torch.manual_seed(3)
    before = torch.random.get_rng_state()
    a, b = LanguageModel(config), LanguageModel(config)
    assert torch.equal(torch.random.get_rng_state(), before)
    for x, y in zip(a.parameters(), b.parameters(), strict=True):
        assert torch.equal(x, y) and torch.isfinite(x).all()
    other = LanguageModel(config.replace(seed=6))
    assert not torch.equal(a.W_E, other.W_E)


def test_init_scales():
    config = language_models.CONFIGS["llama"].replace(init_std=0.02, out_init_scale=None, d_vocab=4000)
    model = LanguageModel(config)
    assert abs(model.W_E.std().item() / 0.02 - 1) < 0.02
    assert abs(model.blocks[0].mlp.W_out.std().item() / (0.02 * 4**-0.5) - 1) < 0.15


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (torch.tensor([[1, 13]]), "token id 13 is out of range; accepted: 0..12"),
        (torch.tensor([[1, -1]]), "token id -1 is out of range"),
        (torch.tensor([1, 2]), "shape [2]; accepted: [batch seq]"),
        (torch.zeros(2, 0, dtype=torch.long), "shape [2, 0]"),
        (torch.zeros(2, 3), "dtype torch.float32; accepted: an integer tensor"),
        ([[1, 2]], "integer tensor [batch seq]"),
        ("text", "no tokenizer"),
    ],
)
def test_tokens_are_checked(tokens, message):
    with pytest.raises(ConfigError) as error:
        language_models.build("softmax")(tokens)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_options_are_checked():
    model = language_models.build("softmax")
    tokens = language_models.tokens()
    for call, message in [
        (lambda: model(tokens, form="fast"), "accepted: parallel, chunked, recurrent"),
        (lambda: model(tokens, return_type="logit"), "'logit'; accepted: 'logits'"),
        (lambda: model(tokens[:, :1], return_type="loss"), "at least 2 tokens"),
        (lambda: model.step(tokens, model.init_state(2)), "shape [2, 9]; accepted: [batch]"),
        (lambda: model.prefill(tokens, logits="first"), "'first'; accepted: 'all'"),
    ]:
        with pytest.raises(ConfigError) as error:
            call()
        assert message in str(error.value)


def test_learned_positions_end_and_others_go_on():
    long = language_models.tokens(1, language_models.N_CTX + 5)
    with pytest.raises(ConfigError, match="position 28 is beyond the 24 learned positions"):
        language_models.build("gpt2")(long)
    state = language_models.build("gpt2").prefill(long[:, :24])[1]
    with pytest.raises(ConfigError, match="position 24 is beyond"):
        language_models.build("gpt2").step(long[:, 24], state)
    for name in ("softmax", "linear", "mamba1", "mamba2", "hybrid"):
        model = language_models.build(name)
        assert_close(model(long), model(long, form="recurrent"), **EXACT)


def test_lower_precision_and_residual_in_fp32():
    tokens = language_models.tokens()
    for name in ("hybrid", "gpt2"):
        exact = language_models.build(name)(tokens)
        model = language_models.build(name, dtype=torch.bfloat16)
        assert model(tokens).dtype == torch.bfloat16
        assert (model(tokens) - exact).abs().max() < 0.3 * exact.abs().max()
    config = language_models.CONFIGS["hybrid"].replace(residual_in_fp32=True)
    model = LanguageModel(config).bfloat16()
    assert model(tokens, stop_at_layer=2).dtype == torch.float32
    assert model(tokens).dtype == torch.bfloat16


def test_recurrent_state_of_linear_mixers_does_not_grow():
    for name, grows in [("softmax", True), ("linear", False), ("mamba1", False), ("mamba2", False)]:
        model = language_models.build(name)
        longer = LanguageModel(model.config.replace(n_ctx=2 * language_models.N_CTX))
        assert (longer.state_size() > model.state_size()) is grows


def test_compiled_model_gives_the_same_logits():
    model = language_models.build("llama", dtype=torch.float32)
    tokens = language_models.tokens()
    compiled = torch.compile(model, backend="eager")
    plain = model(tokens)
    assert_close(compiled(tokens), plain)
    hooks = [("blocks.0.attn.hook_pattern", lambda x, hook: x * 0)]
    with model.hooks(fwd_hooks=hooks):
        changed = compiled(tokens)
    assert_close(changed, model.run_with_hooks(tokens, fwd_hooks=hooks))
    assert (changed - plain).abs().max() > 0.1
    assert_close(compiled(tokens), plain)


@pytest.mark.parametrize("name", ["softmax", "plain"])
def test_pytorchs_own_hooks_on_every_norm_are_called(name):
    """Also on the identity that stands where there is no norm, before the first block and after the last."""
    model = language_models.build(name)
    norms = [part for block in model.blocks for part in (block.ln1, getattr(block, "ln2", None)) if part]
    norms.append(model.ln_final)
    fired = []
    for n, norm in enumerate(norms):
        norm.register_forward_hook(lambda module, args, output, n=n: fired.append(n))
    model(language_models.tokens())
    assert fired == list(range(len(norms)))
    norms[0].register_forward_hook(lambda module, args, output: 0 * output)
    changed = model(language_models.tokens())
    assert not torch.allclose(changed, language_models.build(name)(language_models.tokens()))
