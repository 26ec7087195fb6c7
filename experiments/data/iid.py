"""Independent tokens: the control on which no circuit can help."""

import numpy as np

from experiments.data.batch import Batch
from experiments.data.config import IIDConfig


def sample_iid(config: IIDConfig, n: int, rng: np.random.Generator) -> Batch:
    """`n` sequences of independent tokens, p(token) ~ (token + 1)^-exponent."""
    weight = np.arange(1, config.d_vocab + 1, dtype=np.float64) ** -config.exponent
    tokens = rng.choice(config.d_vocab, size=(n, config.seq), p=weight / weight.sum())
    return Batch(tokens=tokens)
