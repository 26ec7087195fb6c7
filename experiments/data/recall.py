"""Multi-query associative recall: pairs of key and value, later asked for in another order."""

import numpy as np

from experiments.data.batch import Batch
from experiments.data.config import RecallConfig


def sample_recall(config: RecallConfig, n: int, rng: np.random.Generator) -> Batch:
    """`n` sequences: `n_pairs` pairs, then each key once more with its value right after it; random filler
    between.

    Only the answers (values after a repeated key) are scored. Filler tokens are values, so no key but the
    asked ones occurs twice. Source: Zoology, arXiv:2312.04927, MQAR. Differs: filler is drawn from the
    values instead of zeros or all tokens, so a key has one value only.
    """
    n_keys = config.d_vocab // 2
    n_values = config.d_vocab - n_keys
    pairs = config.n_pairs
    keys = rng.permuted(np.broadcast_to(np.arange(n_keys), (n, n_keys)), axis=1)[:, :pairs]
    values = n_keys + rng.integers(0, n_values, (n, pairs))
    tokens = n_keys + rng.integers(0, n_values, (n, config.seq))
    tokens[:, 0 : 2 * pairs : 2] = keys
    tokens[:, 1 : 2 * pairs : 2] = values
    # Slots of two places after the pairs; a query takes one slot, early slots are likelier (power law).
    slots = (config.seq - 2 * pairs) // 2
    weight = config.gap_power * np.arange(1, slots + 1) ** (config.gap_power - 1)
    # Gumbel top-k: `pairs` slots without replacement, in proportion to their weight.
    noise = np.log(weight) - np.log(-np.log(rng.random((n, slots))))
    slot = np.argsort(-noise, axis=1)[:, :pairs]
    place = 2 * pairs + 2 * slot
    np.put_along_axis(tokens, place, keys, axis=1)
    np.put_along_axis(tokens, place + 1, values, axis=1)
    scored = np.zeros((n, config.seq), dtype=bool)
    np.put_along_axis(scored, place + 1, True, axis=1)
    return Batch(tokens=tokens, scored=scored, repeated=scored)
