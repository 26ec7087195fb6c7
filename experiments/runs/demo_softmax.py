from experiments.recipes import SEGMENT_COPY, toy
from models.config import SoftmaxAttentionConfig

CONFIG = toy(
    "Demo: segment copy, two softmax layers of two heads",
    SEGMENT_COPY,
    *[SoftmaxAttentionConfig(n_heads=2)] * 2,
    steps=750,
    init_std=0.1,
    windows=((50, 250, 100), (300, 750, 25)),
)
