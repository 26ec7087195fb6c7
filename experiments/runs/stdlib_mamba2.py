from experiments.recipes import stdlib
from models.config import Mamba2Config

CONFIG = stdlib(
    "Python's standard library, two Mamba-2 layers with slow init",
    *[Mamba2Config(n_heads=4, d_state=64, init="slow")] * 2,
    steps=3000,
)
