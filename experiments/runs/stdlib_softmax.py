from experiments.recipes import stdlib
from models.config import SoftmaxAttentionConfig

CONFIG = stdlib(
    "Python's standard library, two softmax layers with RoPE",
    *[SoftmaxAttentionConfig(n_heads=8)] * 2,
    steps=6000,
    positions="rope",
)
