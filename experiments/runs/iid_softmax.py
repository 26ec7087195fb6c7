from experiments.data.config import IIDConfig
from experiments.recipes import SOFTMAX, toy

CONFIG = toy(
    "Control: independent tokens, two softmax layers",
    IIDConfig(seq=64, d_vocab=64),
    SOFTMAX,
    SOFTMAX,
    steps=600,
    init_std=0.1,
    every=50,
)
