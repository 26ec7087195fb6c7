from experiments.recipes import SEGMENT_COPY, toy
from models.config import SoftmaxAttentionConfig

# One head a layer: with more, copying is shared out and no single head copies clearly (LOG.md).
CONFIG = toy(
    "Demo: segment copy, two softmax layers of one head",
    SEGMENT_COPY,
    *[SoftmaxAttentionConfig(n_heads=1)] * 2,
    steps=750,
    init_std=0.1,
    windows=((50, 250, 100), (300, 750, 25)),
)
