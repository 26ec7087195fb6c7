from experiments.data.config import RecallConfig
from experiments.recipes import MAMBA2_SLOW, toy

CONFIG = toy(
    "Multi-query associative recall, two Mamba-2 layers",
    RecallConfig(seq=64, d_vocab=64),
    MAMBA2_SLOW,
    MAMBA2_SLOW,
    steps=2000,
)
