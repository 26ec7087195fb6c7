from experiments.recipes import gpu_text
from models.config import SoftmaxAttentionConfig

CONFIG = gpu_text(
    "Text on a GPU, two softmax layers with short convolution",
    *[SoftmaxAttentionConfig(n_heads=8, d_conv=4)] * 2,
    steps=4000,
    positions="rope",
    windows=((50, 1500, 50), (1600, 4000, 100)),
)
