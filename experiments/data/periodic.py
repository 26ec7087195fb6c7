"""Periodic tiling: distinct random tokens, repeated with a random period."""

import numpy as np

from experiments.data.batch import Batch
from experiments.data.config import PeriodicConfig


def sample_periodic(config: PeriodicConfig, n: int, rng: np.random.Generator) -> Batch:
    """`n` sequences; from the second copy on, every token is determined by the one `period` places before.

    Because the tokens of a period are distinct, "the least recently used token" predicts as well as
    induction does: use segment copy for claims about induction.
    """
    order = rng.permuted(np.broadcast_to(np.arange(config.d_vocab), (n, config.d_vocab)), axis=1)
    period = rng.integers(config.period_min, config.period_max + 1, (n, 1))
    places = np.arange(config.seq)[None, :]
    tokens = np.take_along_axis(order, places % period, axis=1)
    # The first token of the second copy cannot be known: nothing says that the period has ended.
    return Batch(tokens=tokens, repeated=places > period)
