"""In-context Markov chains: every sequence has its own transition matrix, which only its context reveals."""

import numpy as np

from experiments.data.batch import Batch
from experiments.data.config import MarkovConfig


def sample_markov(config: MarkovConfig, n: int, rng: np.random.Generator) -> Batch:
    """`n` chains of `d_vocab` states; rows of each transition matrix are Dirichlet(alpha), the first state
    is uniform.

    Source: Edelman et al. 2024, arXiv:2402.11004. Differs: the first state is not drawn from the stationary
    law.
    """
    rows = rng.gamma(config.alpha, size=(n, config.d_vocab, config.d_vocab))
    rows = np.maximum(rows, np.finfo(np.float64).tiny)
    cumulative = np.cumsum(rows / rows.sum(-1, keepdims=True), axis=-1)
    cumulative[..., -1] = 1.0
    uniform = rng.random((n, config.seq))
    tokens = np.empty((n, config.seq), dtype=np.int64)
    tokens[:, 0] = rng.integers(0, config.d_vocab, n)
    chain = np.arange(n)
    for place in range(1, config.seq):
        threshold = cumulative[chain, tokens[:, place - 1]]
        tokens[:, place] = (threshold <= uniform[:, place, None]).sum(-1)
    return Batch(tokens=tokens)
