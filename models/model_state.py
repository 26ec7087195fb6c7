"""What a language model carries from one position to the next."""

from dataclasses import dataclass
from typing import Any

from torch import nn

from models.errors import ConfigError


@dataclass(frozen=True)
class ModelState:
    """What a model carries between positions: each mixer's state, and how many positions were seen."""

    mixers: tuple[Any, ...]
    position: int


def check_state(state: ModelState, blocks: nn.ModuleList) -> ModelState:
    """The state, if it can be one of a model with these blocks.

    Raises:
        ConfigError: no ModelState, or one with another number of layers. (A layer's mixer refuses the state
            of another kind itself.)
    """
    if not isinstance(state, ModelState):
        raise ConfigError(
            f"state is a {type(state).__name__}; accepted: a ModelState, from init_state, prefill or step"
        )
    if len(state.mixers) != len(blocks):
        raise ConfigError(f"state has {len(state.mixers)} layers; accepted: {len(blocks)}, as the model")
    return state
