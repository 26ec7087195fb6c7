"""What the layers of a model start from, found in one pass; works without transformer_lens."""

from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from models.language_model import LanguageModel
from models.mixers.reading import Reading


class LayerInput(NamedTuple):
    """What a layer starts from: the residual stream before it, its mixer's input, and its `hook_z`."""

    resid: Tensor | None
    x: Tensor | None = None
    z: Tensor | None = None


def mixer_inputs(model: LanguageModel, tokens: Tensor) -> list[LayerInput]:
    """Each mixer's input alone, from one pass."""
    found: list[LayerInput] = []
    handles = [
        block.attn.register_forward_pre_hook(lambda _, args: found.append(LayerInput(None, args[0])))
        for block in model.blocks
    ]
    try:
        model(tokens, stop_at_layer=model.config.n_layers)
    finally:
        for handle in handles:
            handle.remove()
    return found


def layer_inputs(model: LanguageModel, tokens: Tensor) -> list[LayerInput]:
    """What each layer starts from, from one pass; last, with nothing else, the final residual stream."""
    found: list[list[Tensor]] = []
    handles = []
    for block in model.blocks:
        handles.append(block.register_forward_pre_hook(lambda _, args: found.append([args[0]])))
        handles.append(block.attn.register_forward_pre_hook(lambda _, args: found[-1].append(args[0])))
        hook = block.attn.hook_z
        handles.append(hook.register_forward_hook(lambda _, args, out: found[-1].append(out)))
    try:
        last = model(tokens, stop_at_layer=model.config.n_layers)
    finally:
        for handle in handles:
            handle.remove()
    return [*(LayerInput(*parts) for parts in found), LayerInput(last)]


@dataclass
class Visited:
    """What a visit of a model found that cuts of edges can start from, of some sequences.

    `readings`: of each layer under its mixer's first reading.
    """

    inputs: list[LayerInput] = field(default_factory=list)
    readings: dict[int, Reading] = field(default_factory=dict)

    def first(self, n: int) -> list[LayerInput]:
        """The inputs of the first n sequences."""
        return [LayerInput(*(x if x is None else x[:n] for x in parts)) for parts in self.inputs]
