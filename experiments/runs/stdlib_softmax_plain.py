from experiments.recipes import stdlib
from models.config import SoftmaxAttentionConfig

CONFIG = stdlib(
    "Control: Python's standard library, two softmax layers with RoPE, no convolution",
    *[SoftmaxAttentionConfig(n_heads=8)] * 2,
    steps=3000,
    positions="rope",
)
