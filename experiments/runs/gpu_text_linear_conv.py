from experiments.recipes import gpu_text
from models.config import LinearAttentionConfig

CONFIG = gpu_text(
    "Text on a GPU, two linear-attention layers with short convolution",
    *[LinearAttentionConfig(n_heads=4, d_conv=4)] * 2,
    steps=5000,
)
