"""What the mixers of one checkpoint are given on one prompt: computed once, as far up as was asked for."""

import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
from jaxtyping import Float
from torch import Tensor

from interp.subject import LanguageModelSubject


class MixerInputs:
    """Inputs of the mixers, layer by layer. A higher layer goes on from the highest that is there.

    Args:
        ids: The prompt's tokens.
        lock: Held while the model runs: hooks of two requests must not meet.
    """

    def __init__(self, ids: Sequence[int], lock: AbstractContextManager | None = None):
        self._ids = tuple(ids)
        self._lock = threading.RLock() if lock is None else lock
        self._inputs: list[Tensor] = []
        self._resid: Tensor | None = None

    @torch.no_grad()
    def at(self, subject: LanguageModelSubject, layer: int) -> Float[Tensor, "1 seq d_model"]:
        """The input of one layer's mixer. The subject is the same at every call."""
        if layer >= len(self._inputs):
            with self._lock:
                if layer >= len(self._inputs):
                    self._run(subject, layer)
        return self._inputs[layer]

    @property
    def n_bytes(self) -> int:
        return sum(x.nbytes for x in self._inputs)

    def _run(self, subject: LanguageModelSubject, layer: int) -> None:
        first = len(self._inputs)
        found: list[Tensor] = []
        blocks = subject.model.blocks[first : layer + 1]
        handles = [
            block.attn.register_forward_pre_hook(lambda _, args: found.append(args[0])) for block in blocks
        ]
        start = torch.tensor([self._ids], device=subject.device) if self._resid is None else self._resid
        try:
            self._resid = subject.model(start, start_at_layer=first or None, stop_at_layer=layer + 1)
        finally:
            for handle in handles:
                handle.remove()
        # In one step: a thread that does not wait sees all of them or none.
        self._inputs = self._inputs + found
