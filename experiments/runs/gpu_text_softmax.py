from experiments.recipes import gpu_text
from models.config import SoftmaxAttentionConfig

CONFIG = gpu_text(
    "Text on a GPU, two softmax layers with RoPE",
    *[SoftmaxAttentionConfig(n_heads=8)] * 2,
    steps=6000,
    positions="rope",
)
