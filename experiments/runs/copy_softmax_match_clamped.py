from experiments.recipes import SEGMENT_COPY, toy
from models.config import SoftmaxAttentionConfig

# copy-softmax with the match clamped: previous-token carry and match are no longer needed, copying alone is
# learned.
CONFIG = toy(
    "Segment copy, two softmax layers, the match clamped",
    SEGMENT_COPY,
    *[SoftmaxAttentionConfig(n_heads=1)] * 2,
    steps=300,
    init_std=0.1,
).replace(clamp={"part": "match"})
