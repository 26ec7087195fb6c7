"""Tables that say which stored tensors make which parameters, in both directions."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from models.config import LanguageModelConfig
from models.errors import CheckpointError
from models.pretrained.keys import Keys
from models.pretrained.weights import Weights

State = dict[str, Tensor]
Move = Callable[..., tuple[Tensor, ...]]


@dataclass(frozen=True, kw_only=True)
class Entry:
    """Some of our parameters and the tensors of the other format that hold the same numbers.

    Attributes:
        ours, theirs: Names.
        read: Their tensors -> ours. `write`: ours -> theirs. Only views, transposes, joins and splits, exact.
    """

    ours: tuple[str, ...]
    theirs: tuple[str, ...]
    read: Move
    write: Move


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """One family of Hugging Face models.

    Attributes:
        model_type, hf_class: `model_type` and `architectures[0]` of its config.json.
        prefix: What a checkpoint of the bare model (without its head) leaves out at the start of names.
        renamed: Other beginnings of names that files have, and those that the tables use.
        ignored: Endings of names that hold no weights (masks, frequencies).
        read_config: Its configuration -> ours. `entries`: Our configuration -> the name table.
        fitted: Our configuration -> the same model as this architecture has it: biases that it always has
            (they become zeros), an MLP of width 1 that writes zero. ConfigError names what it cannot express.
        write_config: A fitted configuration -> the keys of config.json that differ by model.
    """

    model_type: str
    hf_class: str
    prefix: str
    renamed: Mapping[str, str]
    ignored: tuple[str, ...]
    read_config: Callable[[Keys], LanguageModelConfig]
    entries: Callable[[LanguageModelConfig], list[Entry]]
    fitted: Callable[[LanguageModelConfig], LanguageModelConfig]
    write_config: Callable[[LanguageModelConfig], dict]


def same(ours: str, theirs: str) -> Entry:
    """The same tensor under two names."""
    return Entry(ours=(ours,), theirs=(theirs,), read=_identity, write=_identity)


def transposed(ours: str, theirs: str) -> Entry:
    """A matrix stored the other way round."""
    return Entry(ours=(ours,), theirs=(theirs,), read=_transposed, write=_transposed)


def joined(ours: str, theirs: tuple[str, ...], sizes: tuple[int, ...]) -> Entry:
    """Several tensors of theirs, one under the other in ours."""
    return Entry(
        ours=(ours,),
        theirs=theirs,
        read=lambda *parts: (torch.cat(parts),),
        write=lambda whole: tuple(part.contiguous() for part in whole.split(sizes)),
    )


def read_state(entries: list[Entry], weights: Weights, shapes: Mapping[str, Tensor], where: str):
    """Yields (our name, tensor), one entry at a time, after every name and shape was checked.

    Args:
        shapes: Our parameters, on any device (only their shapes are used).
        where: The file or folder, for messages.

    Raises:
        CheckpointError: a tensor is missing, has another shape than the configuration needs, or holds NaN.
    """
    for entry in entries:
        expected = entry.write(*(shapes[name].to("meta") for name in entry.ours))
        for name, wanted in zip(entry.theirs, expected, strict=True):
            if name not in weights:
                raise CheckpointError(f"{where}: tensor {name!r} is missing, which its configuration needs")
            if weights[name].shape != tuple(wanted.shape):
                raise CheckpointError(
                    f"{where}: tensor {name!r} has shape {list(weights[name].shape)}; its configuration "
                    f"needs "
                    f"{list(wanted.shape)}"
                )
    for entry in entries:
        stored = [weights[name].load() for name in entry.theirs]
        for name, tensor in zip(entry.theirs, stored, strict=True):
            if not tensor.is_floating_point():
                raise CheckpointError(
                    f"{where}: tensor {name!r} holds {weights[name].dtype}; accepted: floats"
                )
            if not bool(torch.isfinite(tensor.sum() if tensor.dtype.itemsize > 2 else tensor.float().sum())):
                _check_finite(tensor, name, where)
        yield from zip(entry.ours, entry.read(*stored), strict=True)


def write_state(entries: list[Entry], state: State) -> State:
    """Our parameters as the other format's tensors."""
    out: State = {}
    for entry in entries:
        tensors = entry.write(*(state[name] for name in entry.ours))
        out |= {name: tensor.contiguous() for name, tensor in zip(entry.theirs, tensors, strict=True)}
    return out


def _check_finite(tensor: Tensor, name: str, where: str) -> None:
    # A sum may overflow although every entry is finite.
    if not bool(torch.isfinite(tensor).all()):
        raise CheckpointError(f"{where}: tensor {name!r} holds NaN or infinite values")


def _identity(tensor: Tensor) -> tuple[Tensor]:
    return (tensor,)


def _transposed(tensor: Tensor) -> tuple[Tensor]:
    return (tensor.T,)
