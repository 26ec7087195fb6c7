"""States and layers that a model is given to go on from: those of another model are refused by name."""

import language_models
import pytest
import torch

from models import ConfigError
from models.language_model import ModelState

TOKENS = language_models.tokens()


STATES = [
    (lambda m: None, "state is a NoneType; accepted: a ModelState"),
    (lambda m: m.init_state(2).mixers, "state is a tuple; accepted: a ModelState"),
    (lambda m: ModelState(m.init_state(2).mixers[:1], 0), "state has 1 layers; accepted: 4"),
    (
        lambda m: ModelState(m.init_state(2).mixers[::-1], 0),
        "a mamba1 mixer's state is a LinearAttentionState",
    ),
]


@pytest.mark.parametrize(("state", "message"), STATES)
@torch.no_grad()
def test_a_state_of_another_model_is_refused(state, message):
    model = language_models.build("hybrid")
    given = state(model)
    with pytest.raises(ConfigError) as error:
        model.step(TOKENS[:, 0], given)
    assert message in str(error.value)
    # To a prefill None is the start of a sequence.
    if given is not None:
        with pytest.raises(ConfigError) as error:
            model.prefill(TOKENS, given)
        assert message in str(error.value)


@torch.no_grad()
def test_a_cache_of_another_width_or_batch_is_refused():
    model, narrow = (language_models.build(name) for name in ("softmax", "llama"))
    for other in (narrow.init_state(2), model.init_state(3)):
        with pytest.raises(ConfigError, match="the cache holds keys"):
            model.prefill(TOKENS, other)


@pytest.mark.parametrize("batch", [-1, 0, 1.5, True, None])
def test_a_state_needs_sequences(batch):
    model = language_models.build("hybrid")
    for part in (model, *(block.attn for block in model.blocks)):
        with pytest.raises(ConfigError, match=f"batch is {batch!r}; accepted: a positive"):
            part.init_state(batch)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stop_at_layer": 1.5}, "stop_at_layer is 1.5; accepted: None or a whole number from -2 to 2"),
        ({"stop_at_layer": 3}, "stop_at_layer is 3"),
        ({"start_at_layer": 1.5}, "start_at_layer is 1.5"),
        ({"start_at_layer": True}, "start_at_layer is True"),
        ({"start_at_layer": 1}, "the residual stream has shape [2, 9] and dtype torch.int64"),
    ],
)
def test_layers_to_run_are_checked(options, message):
    model = language_models.build("softmax")
    with pytest.raises(ConfigError) as error:
        model(TOKENS, **options)
    assert message in str(error.value)
    with pytest.raises(ConfigError, match=r"shape \[2, 9, 15\].*accepted: a floating.*\[batch seq 16\]"):
        model(torch.zeros(2, 9, 15), start_at_layer=1)
