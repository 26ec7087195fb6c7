from experiments.data.config import RecallConfig
from experiments.recipes import MAMBA1, toy

CONFIG = toy(
    "Multi-query associative recall, one Mamba-1 layer",
    RecallConfig(seq=64, d_vocab=64),
    MAMBA1,
    steps=4000,
)
