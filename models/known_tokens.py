"""Tensors of token ids that were read and found in range."""

from collections import OrderedDict
from typing import Any

from torch import Tensor


class KnownTokens:
    """The tensors on a GPU that were last accepted: reading ids there waits for all the work before it.

    A tensor, or an equal view of its memory, is known until it is written to. Nothing is copied along with
    the model that holds this.
    """

    # Enough for all probes and windows of a detection.
    MOST = 32

    def __init__(self):
        # The tensors are kept, so that no others can take their places in memory.
        self._kept: OrderedDict[tuple, Tensor] = OrderedDict()

    def __contains__(self, tokens: Tensor) -> bool:
        return not (tokens.is_cpu or tokens.is_inference()) and _place(tokens) in self._kept

    def add(self, tokens: Tensor) -> None:
        """Remember a tensor that is not on the CPU; others are read too quickly for that to be worth it."""
        # Tensors of inference mode do not tell when they are written to.
        if tokens.is_cpu or tokens.is_inference():
            return
        self._kept[_place(tokens)] = tokens
        if len(self._kept) > self.MOST:
            self._kept.popitem(last=False)

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        return KnownTokens, ()


def _place(tokens: Tensor) -> tuple:
    return tokens.device, tokens.data_ptr(), tokens._version, tokens.dtype, tokens.shape, tokens.stride()
