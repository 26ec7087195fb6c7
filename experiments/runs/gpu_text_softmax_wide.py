from experiments.recipes import gpu_text
from models.config import SoftmaxAttentionConfig

CONFIG = gpu_text(
    "Text on a GPU, two softmax layers of width 512: the sharpest transition",
    *[SoftmaxAttentionConfig(n_heads=8)] * 2,
    steps=5000,
    positions="rope",
    d_model=512,
    lr=2e-3,
)
