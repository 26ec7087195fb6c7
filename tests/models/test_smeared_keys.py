"""Smeared keys: both ends of the scale, the state that carries them, a head that one layer could not have."""

import pytest
import torch
from mixer_configs import D_MODEL, inputs

from kernels import softmax_attention
from models import ConfigError, LanguageModel, LanguageModelConfig, SoftmaxAttentionConfig
from models.config import mixer_config
from models.form import Form
from models.mixers.softmax_attention import SoftmaxAttention
from models.pretrained import to_pretrained

CONFIG = SoftmaxAttentionConfig(n_heads=4, n_kv_heads=2, d_head=6, smeared_keys=True)


def _mixer(smear: float) -> SoftmaxAttention:
    mixer = SoftmaxAttention(CONFIG, D_MODEL, n_ctx=32)
    mixer.reset_parameters(std=0.4, out_std=0.4, generator=torch.Generator().manual_seed(0))
    mixer = mixer.double()
    with torch.no_grad():
        mixer.smear.fill_(smear)
    return mixer


@torch.no_grad()
def test_own_keys_at_one_end_and_the_previous_ones_at_the_other():
    x = inputs(9)
    plain = SoftmaxAttention(CONFIG.replace(smeared_keys=False), D_MODEL, n_ctx=32).double()
    plain.load_state_dict({k: v for k, v in _mixer(0).state_dict().items() if k != "smear"})
    assert (_mixer(60.0)(x) - plain(x)).abs().max() < 1e-12
    q, k, _ = plain._inputs(x)
    shifted = torch.cat((torch.zeros_like(k[:, :1]), k[:, :-1]), 1)
    want = softmax_attention.pattern(q, shifted, scale=plain.scale)
    assert (_mixer(-60.0).implied_attention(x) - want).abs().max() < 1e-12
    half = softmax_attention.pattern(q, (k + shifted) / 2, scale=plain.scale)
    assert (_mixer(0.0).implied_attention(x) - half).abs().max() < 1e-12


@torch.no_grad()
@pytest.mark.parametrize("split", [1, 4, 8])
def test_the_last_key_is_carried_over_a_split(split):
    mixer, x = _mixer(-0.5), inputs(9)
    whole = mixer(x)
    for first in Form:
        for second in Form:
            y, state = mixer.prefill(x[:, :split], None, first)
            rest, _ = mixer.prefill(x[:, split:], state, second)
            assert (torch.cat((y, rest), 1) - whole).abs().max() < 1e-10
    assert mixer.state_size() == 2 * 32 * 2 * 6 + 2 * 6


def test_the_share_is_learned():
    mixer = _mixer(0.0)
    mixer(inputs(9)).square().sum().backward()
    assert mixer.smear.shape == (2,) and mixer.smear.grad.abs().min() > 1e-6


def test_round_trip_and_what_other_formats_cannot_hold(tmp_path):
    assert mixer_config(CONFIG.to_dict()) == CONFIG
    old = {key: value for key, value in CONFIG.to_dict().items() if key != "smeared_keys"}
    assert mixer_config(old) == CONFIG.replace(smeared_keys=False)
    model = LanguageModel(
        LanguageModelConfig(d_model=12, n_layers=1, d_vocab=7, n_ctx=8, mixers=(CONFIG,), norm="layer")
    )
    with pytest.raises(ConfigError, match="smeared_keys"):
        to_pretrained(tmp_path / "hf", model)


@torch.no_grad()
def test_one_layer_matches_by_the_previous_token():
    """Queries ask for the token before: with the previous keys, induction's match in one layer."""
    d_vocab = 12
    mixer = SoftmaxAttentionConfig(n_heads=1, d_head=d_vocab, smeared_keys=True, scale=1.0)
    config = LanguageModelConfig(
        d_model=2 * d_vocab, n_layers=1, d_vocab=d_vocab, n_ctx=32, mixers=(mixer,), norm="none"
    )
    model = LanguageModel(config).eval()
    for parameter in model.parameters():
        parameter.zero_()
    one = torch.eye(d_vocab)
    model.embed.W_E[:, :d_vocab] = one
    model.unembed.weight[:, d_vocab:] = 16 * one
    attn = model.blocks[0].attn
    q, k, v = attn.in_proj.weight.view(3, d_vocab, -1)
    q[:, :d_vocab], k[:, :d_vocab], v[:, :d_vocab] = 40 * one, one, one
    attn.out_proj.weight[d_vocab:] = one
    draws = [torch.Generator().manual_seed(n) for n in (0, 1)]
    tokens = torch.stack([torch.randperm(d_vocab, generator=draw) for draw in draws])
    tokens = tokens.repeat(1, 2)
    found = {}
    for smear in (-60.0, 60.0):
        attn.smear.fill_(smear)
        found[smear] = float(model(tokens, return_type="loss", loss_per_token=True)[:, d_vocab:].mean())
    # With its own key a position attends to copies of itself and repeats them.
    assert found[-60.0] < 0.01 and found[60.0] > 5
