"""How much a layer's recurrent state holds after each token: its Euclidean norm, unit by unit.

Softmax attention's state is its cache of keys and values, which grows with every token; the others' is of a
fixed size.
"""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from interp.dashboard.mixer_inputs import MixerInputs
from interp.dashboard.prompt import Prompt
from interp.edge_cuts import listening
from interp.errors import DetectionError
from interp.subject import LanguageModelSubject, Subject
from models.form import Form


@dataclass(frozen=True, kw_only=True)
class StateNorms:
    """Norms [unit position], and in words what a unit is and what its state is made of."""

    norms: Float[np.ndarray, "unit position"]
    unit: str
    what: str


@torch.no_grad()
def state_norms(
    subject: Subject, prompt: Prompt, *, layer: int, units: str, inputs: MixerInputs | None = None
) -> StateNorms:
    """Run the layer token by token (RECURRENT) and measure the state after each.

    Args:
        units: Of Mamba-1 layers: `layer`, `state` or `cluster:K`.
        inputs: Of this subject on this prompt, where some are there already.

    Raises:
        DetectionError: a model outside our own mixers.
    """
    if not isinstance(subject, LanguageModelSubject):
        raise DetectionError(
            "States need a model in our own mixers; this one is read through TransformerBridge."
        )
    x = (MixerInputs(prompt.ids) if inputs is None else inputs).at(subject, layer)
    mixer = subject.model.blocks[layer].attn
    if mixer.kind == "softmax":
        return StateNorms(
            norms=_cached(mixer, x).cpu().numpy(),
            unit="key/value head",
            what="all keys and values kept so far",
        )
    squares = torch.stack(_states(mixer, x)).square()
    if mixer.kind == "mamba1":
        return StateNorms(
            norms=_by_channel(mixer, x, squares, units).sqrt().cpu().numpy(),
            unit={"layer": "whole layer", "state": "state index"}.get(units, "group of channels"),
            what="the scan's state, channels by state indices",
        )
    return StateNorms(
        norms=squares.sum((-1, -2)).T.sqrt().cpu().numpy(),
        unit="head",
        what="the head's state matrix",
    )


def _states(mixer: torch.nn.Module, x: Tensor) -> list[Tensor]:
    """The state after every position, without the batch axis."""
    kept: list[Tensor] = []
    with listening(mixer.hook_state, lambda _, args, out: kept.append(out[0].float())):
        mixer(x, Form.RECURRENT)
    return kept


def _by_channel(
    mixer: torch.nn.Module, x: Tensor, squares: Float[Tensor, "position channel d_state"], units: str
) -> Float[Tensor, "unit position"]:
    if units == "state":
        return squares.sum(1).T
    by_channel = squares.sum(-1)
    if units == "layer":
        return by_channel.sum(-1)[None]
    index = mixer.read(x, units=units).z_index
    return torch.stack([by_channel[:, row[row >= 0]].sum(-1) for row in index])


def _cached(mixer: torch.nn.Module, x: Tensor) -> Float[Tensor, "kv_head position"]:
    """Norm of what the cache holds; a sliding window forgets what lies behind it."""
    kept: dict[str, Tensor] = {}

    def keep(name: str):
        return lambda _, args, out: kept.__setitem__(name, out[0].float())

    with listening(mixer.hook_k, keep("k")), listening(mixer.hook_v, keep("v")):
        mixer(x)
    total = sum(part.square().sum(-1) for part in kept.values()).cumsum(0)
    window = getattr(mixer.config, "window", None)
    if window is not None and window < len(total):
        total = torch.cat([total[:window], total[window:] - total[:-window]])
    return total.T.sqrt()
