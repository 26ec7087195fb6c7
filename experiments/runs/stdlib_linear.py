from experiments.recipes import stdlib
from models.config import LinearAttentionConfig

CONFIG = stdlib(
    "Python's standard library, two linear-attention layers with short convolution",
    *[LinearAttentionConfig(n_heads=4, d_conv=4)] * 2,
    steps=5000,
)
