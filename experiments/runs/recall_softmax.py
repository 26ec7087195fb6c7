from experiments.data.config import RecallConfig
from experiments.recipes import SOFTMAX, toy

CONFIG = toy(
    "Multi-query associative recall, two softmax layers",
    RecallConfig(seq=64, d_vocab=64),
    SOFTMAX,
    SOFTMAX,
    steps=800,
    init_std=0.1,
)
