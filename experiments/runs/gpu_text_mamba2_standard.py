from experiments.recipes import gpu_text
from models.config import Mamba2Config

CONFIG = gpu_text(
    "Text on a GPU, two Mamba-2 layers with standard init",
    *[Mamba2Config(n_heads=8, d_state=128)] * 2,
    steps=5000,
)
