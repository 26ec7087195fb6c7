from experiments.recipes import SEGMENT_COPY, toy
from models.config import SoftmaxAttentionConfig

# One head a layer: with more, copying is shared out and no single head copies clearly (LOG.md).
CONFIG = toy(
    "Segment copy, two softmax layers of one head",
    SEGMENT_COPY,
    *[SoftmaxAttentionConfig(n_heads=1)] * 2,
    steps=1000,
    init_std=0.1,
)
