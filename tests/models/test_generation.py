"""Generation runs on the recurrent state and gives what the full forward pass gives."""

import language_models
import numpy as np
import pytest
import torch
from torch.testing import assert_close

from models import ConfigError, Form
from models.errors import HookNotFired
from models.generation import sample, stream

NAMES = list(language_models.CONFIGS)
TOKENS = language_models.tokens(2, 5)


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_greedy_generation_equals_full_passes(name):
    model = language_models.build(name)
    expected = TOKENS
    for _ in range(8):
        expected = torch.cat((expected, model(expected)[:, -1:].argmax(-1)), 1)
    for form in (None, "recurrent", "parallel"):
        assert torch.equal(model.generate(TOKENS, 8, temperature=0, form=form), expected)
    assert torch.equal(model.generate(TOKENS, 0), TOKENS)
    assert list(stream(model, TOKENS, 3, temperature=0))[2].tolist() == expected[:, 7].tolist()


@torch.no_grad()
def test_draws_follow_the_distribution_and_the_seed():
    model = language_models.build("hybrid")
    many = TOKENS[:1].expand(4000, -1)
    drawn = model.generate(many, 1, seed=0, temperature=0.7)[:, -1]
    expected = (model(TOKENS[:1])[0, -1] / 0.7).softmax(-1)
    counts = torch.bincount(drawn, minlength=language_models.D_VOCAB) / 4000
    # Four standard errors of the largest share.
    assert_close(counts.double(), expected, rtol=0, atol=4 * 0.5 / 4000**0.5)
    assert torch.equal(model.generate(TOKENS, 6, seed=3), model.generate(TOKENS, 6, seed=3))
    assert not torch.equal(model.generate(TOKENS, 6, seed=3), model.generate(TOKENS, 6, seed=4))
    torch.manual_seed(0)
    before = torch.random.get_rng_state()
    model.generate(TOKENS, 6, seed=3)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_top_k_draws_from_the_likeliest_only():
    logits = torch.tensor([[0.0, 3.0, 2.0, 1.0]]).expand(500, -1)
    assert sample(logits, top_k=2).unique().tolist() == [1, 2]
    assert sample(logits, top_k=1).unique().tolist() == [1]
    assert sample(logits, temperature=0).unique().tolist() == [1]
    assert sample(logits, temperature=20.0).unique().tolist() == [0, 1, 2, 3]


@torch.no_grad()
def test_stop_ends_sequences_one_by_one():
    model = language_models.build("linear")
    free = model.generate(TOKENS, 12, seed=1)
    end = int(free[0, 7])
    stopped = model.generate(TOKENS, 12, seed=1, stop=end)
    for row, whole in zip(stopped.tolist(), free.tolist(), strict=True):
        ends = [i for i in range(5, 17) if whole[i] == end]
        last = min(ends[0] if ends else 16, len(row) - 1)
        assert row[: last + 1] == whole[: last + 1] and set(row[last + 1 :]) <= {end}
    assert stopped[0, 7:].tolist() == [end] * (stopped.shape[1] - 7)
    everything = range(language_models.D_VOCAB)
    assert model.generate(TOKENS, 12, seed=1, stop=everything).shape == (2, 6)


def test_no_gradients_are_kept():
    model = language_models.build("mamba2")
    assert not model.generate(TOKENS, 2, seed=0).requires_grad
    assert torch.is_grad_enabled()


@torch.no_grad()
def test_hooks_act_on_the_prompt_and_on_every_new_token():
    model = language_models.build("mamba1")
    positions = []

    def erase(state, hook):
        positions.append(hook.ctx["position"])
        return state * 0

    hooks = [("blocks.0.attn.hook_state", erase)]
    with model.hooks(fwd_hooks=hooks, form=Form.RECURRENT):
        changed = model.generate(TOKENS, 4, temperature=0)
    assert positions == list(range(8))
    expected = TOKENS
    for _ in range(4):
        logits = model.run_with_hooks(expected, fwd_hooks=hooks, form="recurrent")
        expected = torch.cat((expected, logits[:, -1:].argmax(-1)), 1)
    assert torch.equal(changed, expected)
    with model.hooks(fwd_hooks=[("blocks.0.attn.hook_pattern", lambda x, hook: x)]):
        with pytest.raises(HookNotFired):
            model.generate(TOKENS, 4)


def test_options_are_checked():
    model = language_models.build("gpt2")
    for options, message in [
        ({"max_new_tokens": -1}, "max_new_tokens is -1"),
        ({"max_new_tokens": 1, "temperature": -1.0}, "temperature is -1.0"),
        ({"max_new_tokens": 1, "temperature": float("nan")}, "temperature is nan"),
        ({"max_new_tokens": 1, "top_k": 0}, "top_k is 0"),
        ({"max_new_tokens": 1.5}, "max_new_tokens is 1.5"),
        ({"max_new_tokens": "3"}, "max_new_tokens is '3'"),
        ({"max_new_tokens": 1, "temperature": 1e-45}, "temperature is 1e-45; accepted: 0 or a finite number"),
        ({"max_new_tokens": 1, "temperature": "1"}, "temperature is '1'"),
        ({"max_new_tokens": 1, "temperature": None}, "temperature is None"),
        ({"max_new_tokens": 1, "top_k": 1.5}, "top_k is 1.5"),
        ({"max_new_tokens": 1, "top_k": True}, "top_k is True"),
        ({"max_new_tokens": 1, "seed": 1.5}, "seed is 1.5"),
        ({"max_new_tokens": 1, "seed": 2**64}, "seed is 18446744073709551616"),
        ({"max_new_tokens": 1, "stop": 2.5}, "stop is 2.5"),
        ({"max_new_tokens": 1, "stop": ["a"]}, "stop is ['a']"),
        ({"max_new_tokens": 1, "form": "fast"}, "form is 'fast'"),
        ({"max_new_tokens": 21}, "take 25 positions; this model has learned 24"),
    ]:
        with pytest.raises(ConfigError) as error:
            model.generate(TOKENS, **options)
        assert message in str(error.value)
    assert model.generate(TOKENS, 20, seed=0).shape == (2, 25)
    assert torch.equal(model.generate(TOKENS, 3, temperature=1e-30), model.generate(TOKENS, 3, temperature=0))
    with pytest.raises(ConfigError, match="out of range"):
        model.generate(TOKENS + 20, 1)


def test_numpy_numbers_are_numbers():
    model = language_models.build("softmax")
    options = {"temperature": 0.5, "top_k": 5, "seed": 3}
    expected = model.generate(TOKENS, 3, **options)
    wide = {"temperature": np.float32(0.5), "top_k": np.int64(5), "seed": np.int64(3)}
    assert torch.equal(model.generate(TOKENS, np.int64(3), **wide), expected)
    assert model(TOKENS, stop_at_layer=np.int64(1)).shape[:2] == TOKENS.shape
    assert model.init_state(np.int64(2)).position == 0
