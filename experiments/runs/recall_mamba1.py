from experiments.data.config import RecallConfig
from experiments.recipes import MAMBA1, toy

CONFIG = toy(
    "Multi-query associative recall, two Mamba-1 layers",
    RecallConfig(seq=64, d_vocab=64),
    MAMBA1,
    MAMBA1,
    steps=4000,
)
