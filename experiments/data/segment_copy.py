"""Segment copy: one random segment occurs twice in uniform noise. Induction solves it, no shortcut does."""

import numpy as np

from experiments.data.batch import Batch
from experiments.data.config import SegmentCopyConfig


def sample_segment_copy(config: SegmentCopyConfig, n: int, rng: np.random.Generator) -> Batch:
    """`n` sequences; both places of the segment are random and do not overlap.

    `repeated` marks the second copy without its first token, which nothing announces.
    """
    tokens = rng.integers(0, config.d_vocab, (n, config.seq))
    length = rng.integers(config.segment_min, config.segment_max + 1, (n, 1))
    # Free places: before, between and after the copies. Two sorted cuts of what is left over are uniform.
    spare = config.seq - 2 * length
    cuts = np.sort(rng.integers(0, spare + 1, (n, 2)), axis=1)
    first = cuts[:, :1]
    second = cuts[:, 1:] + length
    places = np.arange(config.seq)[None, :]
    inside = (places >= second) & (places < second + length)
    source = np.where(inside, places - second + first, places)
    tokens = np.take_along_axis(tokens, source, axis=1)
    return Batch(tokens=tokens, repeated=inside & (places > second))
