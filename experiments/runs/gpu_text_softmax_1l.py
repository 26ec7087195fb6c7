from experiments.recipes import gpu_text
from models.config import SoftmaxAttentionConfig

CONFIG = gpu_text(
    "Control: text on a GPU, one softmax layer",
    SoftmaxAttentionConfig(n_heads=8),
    steps=6000,
    positions="rope",
)
