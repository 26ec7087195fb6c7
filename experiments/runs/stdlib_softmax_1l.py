from experiments.recipes import stdlib
from models.config import SoftmaxAttentionConfig

CONFIG = stdlib(
    "Control: Python's standard library, one softmax layer with RoPE",
    SoftmaxAttentionConfig(n_heads=8),
    steps=3000,
    positions="rope",
)
