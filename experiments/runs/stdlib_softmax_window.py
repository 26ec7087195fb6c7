from experiments.recipes import stdlib
from models.config import SoftmaxAttentionConfig

CONFIG = stdlib(
    "Python's standard library, a softmax layer with a window of four tokens, then a softmax layer",
    SoftmaxAttentionConfig(n_heads=8, window=4),
    SoftmaxAttentionConfig(n_heads=8),
    steps=8000,
    positions="rope",
)
