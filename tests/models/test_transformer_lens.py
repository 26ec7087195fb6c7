"""TransformerLens's cache methods and patching sweeps on every kind of model, as numerical identities."""

import functools

import language_models
import pytest
import torch
from torch.testing import assert_close
from transformer_lens import ActivationCache, patching
from transformer_lens.utilities import get_act_name

NAMES = list(language_models.CONFIGS)
EXACT = {"rtol": 0, "atol": 1e-10}
TOKENS = language_models.tokens(2, 6)
CORRUPTED = language_models.tokens(2, 6, seed=9)
# What clean and corrupted tokens lead to stops here.
SWEEPS = {
    "resid_pre": patching.get_act_patch_resid_pre,
    "attn_out": patching.get_act_patch_attn_out,
    "z": patching.get_act_patch_attn_head_out_all_pos,
    "q": patching.get_act_patch_attn_head_q_all_pos,
    "k": patching.get_act_patch_attn_head_k_all_pos,
    "v": patching.get_act_patch_attn_head_v_all_pos,
    "pattern": patching.get_act_patch_attn_head_pattern_all_pos,
}


@functools.cache
def run(name: str):
    model = language_models.build(name)
    with torch.no_grad():
        logits, cache = model.run_with_cache(TOKENS)
    return model, logits, cache


def metric(logits: torch.Tensor) -> torch.Tensor:
    weights = torch.linspace(-1, 1, logits.numel(), dtype=logits.dtype)
    return (logits.flatten() * weights).sum()


@pytest.mark.parametrize("name", NAMES)
def test_the_cache_is_transformer_lens_and_holds_every_layer(name):
    model, logits, cache = run(name)
    assert isinstance(cache, ActivationCache)
    assert_close(logits, model(TOKENS), **EXACT)
    for layer, block in enumerate(model.blocks):
        heads = block.attn.n_heads
        assert cache["pattern", layer].shape == (2, heads, 6, 6)
        assert cache["z", layer].shape == (2, 6, heads, block.attn.d_head)
        assert cache["result", layer].shape == (2, 6, heads, 16)
        above = torch.ones(6, 6, dtype=torch.bool).triu(1)
        assert cache["pattern", layer][..., above].abs().max() == 0
    assert_close(cache["resid_post", -1], cache["resid_post", model.cfg.n_layers - 1], **EXACT)


@pytest.mark.parametrize("name", NAMES)
def test_decompose_resid_adds_up_to_the_residual_stream(name):
    model, _, cache = run(name)
    for layer in range(1, model.cfg.n_layers):
        assert_close(cache.decompose_resid(layer).sum(0), cache["resid_pre", layer], **EXACT)
    parts, labels = cache.decompose_resid(return_labels=True)
    assert_close(parts.sum(0), cache["resid_post", -1], **EXACT)
    assert len(labels) == len(parts) and labels[0] == "embed"
    assert ("pos_embed" in labels) == (name == "gpt2")
    if model.config.mlp and not model.config.parallel_residual:
        mid = cache.decompose_resid(1, mlp_input=True).sum(0)
        assert_close(mid, cache["resid_mid", 1], **EXACT)


@pytest.mark.parametrize("name", NAMES)
def test_head_results_and_biases_add_up(name):
    model, _, cache = run(name)
    stack, labels = cache.stack_head_results(return_labels=True)
    heads = [block.attn.n_heads for block in model.blocks]
    assert labels == [f"L{i}H{h}" for i, n in enumerate(heads) for h in range(n)] and len(stack) == sum(heads)
    start = 0
    for layer, n in enumerate(heads):
        written = stack[start : start + n].sum(0) + model.blocks[layer].attn.b_O
        assert_close(written, cache["attn_out", layer], **EXACT)
        start += n
    with_rest = cache.stack_head_results(incl_remainder=True)
    assert_close(with_rest.sum(0), cache["resid_post", -1], **EXACT)
    full, labels = cache.get_full_resid_decomposition(return_labels=True)
    assert_close(full.sum(0), cache["resid_post", -1], **EXACT)
    assert labels[-1] == "bias"


@pytest.mark.parametrize("name", NAMES)
def test_logit_attributions_add_up_to_the_logits(name):
    model, logits, cache = run(name)
    answers = language_models.tokens(2, 6, seed=4)
    picked = logits.gather(-1, answers[..., None])[..., 0] - model.logit_bias[answers]
    for stack in (
        cache.decompose_resid(),
        cache.stack_head_results(incl_remainder=True),
        cache.get_full_resid_decomposition(),
    ):
        assert_close(cache.logit_attrs(stack, answers).sum(0), picked, **EXACT)
    last = cache.logit_attrs(cache.decompose_resid(pos_slice=-1), answers[:, -1], pos_slice=-1)
    assert_close(last.sum(0), picked[:, -1], **EXACT)


@pytest.mark.parametrize("name", NAMES)
def test_norms_are_applied_as_the_model_applies_them(name):
    model, logits, cache = run(name)
    accumulated = cache.accumulated_resid(apply_ln=True)
    assert_close(model.unembed(accumulated[-1]), logits, **EXACT)
    ended = cache.apply_ln_to_stack(cache.decompose_resid(), layer=-1).sum(0)
    final = cache["resid_post", -1] if model.config.norm == "none" else cache["ln_final.hook_normalized"]
    assert_close(ended, final, **EXACT)
    if model.config.norm != "none" and model.cfg.n_layers > 1:
        entering = cache.apply_ln_to_stack(cache.decompose_resid(1), layer=1).sum(0)
        assert_close(entering, cache["blocks.1.ln1.hook_normalized"], **EXACT)
    lens = cache.accumulated_resid(incl_mid=bool(model.config.mlp) and not model.config.parallel_residual)
    assert_close(lens[-1], cache["resid_post", -1], **EXACT)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("sweep", SWEEPS)
def test_patching_clean_into_clean_changes_nothing(name, sweep):
    model, logits, cache = run(name)
    table = {}
    if sweep not in ("resid_pre", "attn_out"):
        table = {"index_axis_names": None, "index_df": model.head_index(sweep)}
    with torch.no_grad():
        values = SWEEPS[sweep](model, TOKENS, cache, metric, **table)
        changed = SWEEPS[sweep](model, CORRUPTED, cache, metric, **table)
        corrupted = metric(model(CORRUPTED))
    assert_close(values, metric(logits).expand_as(values).float(), rtol=1e-5, atol=1e-4)
    # Clean into corrupted does change something.
    assert (changed - corrupted).abs().max() > 1e-3


@pytest.mark.parametrize("name", language_models.UNIFORM)
def test_sweeps_over_heads_need_no_table_where_layers_agree(name):
    model, _, cache = run(name)
    with torch.no_grad():
        plain = patching.get_act_patch_attn_head_out_all_pos(model, CORRUPTED, cache, metric)
        by_position = patching.get_act_patch_attn_head_out_by_pos(model, CORRUPTED, cache, metric)
        tabled = patching.get_act_patch_attn_head_out_all_pos(
            model, CORRUPTED, cache, metric, index_axis_names=None, index_df=model.head_index("z")
        )
    assert plain.shape == (model.cfg.n_layers, model.cfg.n_heads)
    assert by_position.shape == (model.cfg.n_layers, 6, model.cfg.n_heads)
    assert_close(plain.flatten(), tabled)


def test_a_sweep_that_meets_fewer_heads_says_what_to_do():
    model, _, cache = run("hybrid")
    with pytest.raises(IndexError) as error, torch.no_grad():
        patching.get_act_patch_attn_head_out_all_pos(model, TOKENS, cache, metric)
    assert "index_df=model.head_index(activation_name)" in error.value.__notes__[0]
    assert list(model.head_index("z").groupby("layer").size()) == [6, 2, 4, 2]
    assert len(model.head_index("z", seq=6)) == 6 * len(model.head_index("z"))


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_patching_everything_restores_the_clean_logits(name):
    model, logits, cache = run(name)

    def put(x, hook):
        x[:] = cache[hook.name]
        return x

    for short in ("resid_pre", "resid_post"):
        layers = range(model.cfg.n_layers)
        hooks = [(get_act_name(short, layer), put) for layer in layers]
        assert_close(model.run_with_hooks(CORRUPTED, fwd_hooks=hooks), logits, **EXACT)
    outputs = [n for n in model.hook_dict if n.endswith(("hook_embed", "attn_out", "mlp_out", "pos_embed"))]
    hooks = [(name, put) for name in outputs]
    assert_close(model.run_with_hooks(CORRUPTED, fwd_hooks=hooks), logits, **EXACT)
    assert (model(CORRUPTED) - logits).abs().max() > 1e-2


@pytest.mark.parametrize("name", NAMES)
def test_a_cache_without_results_computes_or_refuses_them(name):
    model, _, cache = run(name)
    _, partial = model.run_with_cache(TOKENS, names_filter=lambda n: not n.endswith("hook_result"))
    if any(block.attn.kind.startswith("mamba") for block in model.blocks):
        with pytest.raises(ValueError, match="record hook_result"):
            partial.stack_head_results()
    else:
        assert_close(partial.stack_head_results(), cache.stack_head_results(), **EXACT)


def test_stacked_weights_and_directions():
    model, logits, cache = run("gpt2")
    assert model.W_Q.shape == (2, 2, 16, 8) and model.W_O.shape == (2, 2, 8, 16)
    assert model.W_in.shape == (2, 16, 20) and model.W_pos.shape == (24, 16)
    direction = model.tokens_to_residual_directions(3)
    normalized = cache["ln_final.hook_normalized"]
    assert_close(normalized @ direction + model.logit_bias[3], logits[..., 3], **EXACT)
    with pytest.raises(AttributeError, match=r"W_Q: a layer of this model lacks it \(layer 0, a mamba1"):
        run("hybrid")[0].W_Q  # noqa: B018
    with pytest.raises(AttributeError, match="no attribute 'W_Z'"):
        model.W_Z  # noqa: B018


def test_text_goes_through_the_tokenizer():
    from models import ConfigError, LanguageModel

    class Letters:
        """A tokenizer: one letter, one token."""

        def encode(self, text):
            return [ord(c) - ord("a") for c in text]

        def decode(self, ids):
            return "".join(chr(i + ord("a")) for i in ids)

    model = LanguageModel(language_models.CONFIGS["llama"].replace(bos=12), tokenizer=Letters()).eval()
    assert model.to_tokens("cab").tolist() == [[12, 2, 0, 1]]
    assert model.to_tokens(["ca", "bb"], prepend_bos=False).tolist() == [[2, 0], [1, 1]]
    assert model.to_string(torch.tensor([2, 0, 1])) == "cab" and model.to_str_tokens("b") == ["m", "b"]
    assert_close(model("cab"), model(torch.tensor([[12, 2, 0, 1]])))
    _, cache = model.run_with_cache("cab")
    assert cache.logit_attrs(cache.decompose_resid(), "d").shape == (5, 1, 4)
    with pytest.raises(ConfigError, match="2 tokens; accepted: a text that is one"):
        model.to_single_token("ab")
    with pytest.raises(ConfigError, match="equal lengths"):
        model.to_tokens(["a", "bb"])
