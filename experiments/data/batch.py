"""A batch of sequences with the positions that count, and the task that makes one from a seed and a step."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Int

from experiments.data.config import DataConfig

# Streams of random numbers: one for training, one for the held-out windows.
TRAINING, HELD_OUT = 0, 1


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Sequences and two masks, both about the token *at* a position (predicted from those before it).

    `scored` marks the tokens that the training loss counts (None: all but the first).
    `repeated` marks the tokens that an earlier copy in the same sequence determines (None: unknown for this
    task).
    """

    tokens: Int[np.ndarray, "batch seq"]
    scored: Bool[np.ndarray, "batch seq"] | None = None
    repeated: Bool[np.ndarray, "batch seq"] | None = None

    def part(self, start: int, stop: int) -> "Batch":
        """Sequences start..stop-1."""

        def cut(mask):
            return None if mask is None else mask[start:stop]

        return Batch(tokens=self.tokens[start:stop], scored=cut(self.scored), repeated=cut(self.repeated))


Sampler = Callable[[DataConfig, int, np.random.Generator], Batch]


class Task:
    """A synthetic task: `batch(step)` and `held_out(n)`, each a function of seed and argument alone."""

    def __init__(self, config: DataConfig, sampler: Sampler, *, batch: int, data_seed: int, eval_seed: int):
        self.config, self.batch_size = config, batch
        self._sampler, self._data_seed, self._eval_seed = sampler, data_seed, eval_seed

    def batch(self, step: int) -> Batch:
        """The global training batch of the update that makes step `step` + 1."""
        return self._sampler(
            self.config, self.batch_size, np.random.default_rng([self._data_seed, TRAINING, step])
        )

    def held_out(self, n: int) -> Batch:
        """`n` sequences from a stream of their own."""
        return self._sampler(self.config, n, np.random.default_rng([self._eval_seed, HELD_OUT]))
