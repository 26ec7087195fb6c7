from experiments.recipes import gpu_text
from models.config import SoftmaxAttentionConfig

CONFIG = gpu_text(
    "Text on a GPU, one softmax layer with short convolution",
    SoftmaxAttentionConfig(n_heads=8, d_conv=4),
    steps=3000,
    positions="rope",
    windows=((50, 1500, 50), (1600, 3000, 100)),
)
