"""Models made here, written for Hugging Face: loaded there, they give the same logits."""

import dataclasses
import json

import pytest
import torch

from models.config import (
    LanguageModelConfig,
    Mamba1Config,
    Mamba2Config,
    MLPConfig,
    RopeConfig,
    SoftmaxAttentionConfig,
)
from models.language_model import LanguageModel
from models.pretrained import from_pretrained, to_pretrained

SIZES = {"d_model": 24, "n_layers": 2, "d_vocab": 31, "n_ctx": 32}
ROPE = {"positions": "rope", "rope": RopeConfig(base=300.0)}
SOFTMAX = SoftmaxAttentionConfig(n_heads=3)
MODELS = {
    # What the training runs here are made of: RMSNorm, rotary, no MLP, no biases.
    "llama without MLP": (SOFTMAX, "LlamaForCausalLM", ROPE),
    "llama, gated MLP, tied": (
        SoftmaxAttentionConfig(n_heads=4, n_kv_heads=2, d_head=8),
        "LlamaForCausalLM",
        {**ROPE, "mlp": MLPConfig(d_mlp=20, act="silu", gated=True, bias=False), "tied": True},
    ),
    "llama, adjacent pairs": (
        SoftmaxAttentionConfig(n_heads=4, n_kv_heads=2, d_head=6, qkv_bias=True),
        "LlamaForCausalLM",
        {"positions": "rope", "rope": RopeConfig(base=300.0, layout="adjacent")},
    ),
    "gpt_neox": (
        SOFTMAX,
        "GPTNeoXForCausalLM",
        {
            "norm": "layer",
            "positions": "rope",
            "rope": RopeConfig(base=300.0, rotary_dim=4, layout="adjacent"),
            "mlp": MLPConfig(d_mlp=20),
            "parallel_residual": True,
        },
    ),
    "gpt2": (
        SoftmaxAttentionConfig(n_heads=3, qkv_bias=True, out_bias=True),
        "GPT2LMHeadModel",
        {
            "norm": "layer",
            "norm_bias": True,
            "positions": "learned",
            "mlp": MLPConfig(d_mlp=20),
            "tied": True,
        },
    ),
    "gpt2 without positions, biases and MLP": (SOFTMAX, "GPT2LMHeadModel", {"norm": "layer"}),
    "mamba": (Mamba1Config(d_state=6, init="slow"), "MambaForCausalLM", {}),
    "mamba2": (Mamba2Config(d_head=8, d_state=6, n_groups=2), "Mamba2ForCausalLM", {"norm_eps": 1e-5}),
    "mamba2 limits": (
        Mamba2Config(d_head=8, dt_limits=(0.01, 0.05), proj_bias=True),
        "Mamba2ForCausalLM",
        {"tied": True},
    ),
}


def _random(name: str, tokenizer=None, **more) -> LanguageModel:
    mixer, _, changes = MODELS[name]
    model = LanguageModel(LanguageModelConfig(mixers=(mixer,) * 2, **(SIZES | changes | more)), tokenizer)
    draw = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            # Biases and gains too: what is ignored must show.
            parameter += 0.1 * torch.randn(parameter.shape, generator=draw)
    return model.eval()


def _tokens(d_vocab: int = SIZES["d_vocab"]) -> torch.Tensor:
    return torch.randint(0, d_vocab, (2, 23), generator=torch.Generator().manual_seed(4))


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_hugging_face_gives_the_same_logits(name, tmp_path):
    from transformers import AutoModelForCausalLM

    model = _random(name)
    to_pretrained(tmp_path / "out", model)
    theirs, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert type(theirs).__name__ == MODELS[name][1]
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    expected = model(_tokens())
    scale = expected.abs().max()
    assert (theirs.eval()(_tokens()).logits - expected).abs().max() < 1e-5 * scale
    assert (from_pretrained(tmp_path / "out")(_tokens()) - expected).abs().max() < 1e-5 * scale


@torch.no_grad()
def test_export_of_a_changed_model_differs(tmp_path):
    """The control: equality above is not that of two models that ignore their weights."""
    model = _random("mamba")
    before = model(_tokens())
    model.blocks[0].attn.A_log += 0.5
    to_pretrained(tmp_path / "out", model)
    assert (from_pretrained(tmp_path / "out")(_tokens()) - before).abs().max() > 1e-3 * before.abs().max()


@torch.no_grad()
def test_reimport_keeps_the_configuration(tmp_path):
    model = _random("llama, gated MLP, tied")
    to_pretrained(tmp_path / "out", model)
    again = from_pretrained(tmp_path / "out").config
    expected = model.config.replace(mixers=tuple(m.resolved(24) for m in model.config.mixers))
    changed = {
        f.name for f in dataclasses.fields(again) if getattr(again, f.name) != getattr(expected, f.name)
    }
    assert changed == set()


def test_tokenizer_goes_along(tmp_path):
    from tokenizers import Tokenizer
    from tokenizers import models as kinds
    from transformers import AutoTokenizer

    vocabulary = {"<|endoftext|>": 0, **{chr(97 + n): n + 1 for n in range(20)}}
    tokenizer = Tokenizer(kinds.BPE(vocabulary, []))
    tokenizer.add_special_tokens(["<|endoftext|>"])
    model = _random("llama without MLP", tokenizer, bos=0)
    to_pretrained(tmp_path / "out", model)
    theirs = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert theirs.encode("cab", add_special_tokens=False) == tokenizer.encode("cab").ids == [3, 1, 2]
    assert (theirs.bos_token_id, theirs.eos_token_id) == (0, 0)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["bos_token_id"], config["eos_token_id"]) == (0, 0)
    again = from_pretrained(tmp_path / "out")
    assert again.to_tokens("cab").tolist() == [[0, 3, 1, 2]]
    assert again.source.special == (0,)


@torch.no_grad()
def test_half_precision_export(tmp_path):
    model = _random("mamba").to(torch.bfloat16)
    to_pretrained(tmp_path / "out", model)
    again = from_pretrained(tmp_path / "out")
    assert again.source.stored_dtype == "bfloat16"
    for name, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor.float())
