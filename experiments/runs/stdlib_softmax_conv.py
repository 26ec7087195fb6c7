from experiments.recipes import stdlib
from models.config import SoftmaxAttentionConfig

CONFIG = stdlib(
    "Python's standard library, one softmax layer with short convolution",
    SoftmaxAttentionConfig(n_heads=8, d_conv=4),
    steps=3000,
    positions="rope",
)
