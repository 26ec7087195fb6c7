from experiments.recipes import gpu_text
from models.config import LinearAttentionConfig

CONFIG = gpu_text(
    "Text on a GPU, two linear-attention layers, learned positions, no convolution",
    *[LinearAttentionConfig(n_heads=4)] * 2,
    steps=5000,
    positions="learned",
)
