from experiments.recipes import MAMBA1, PERIODIC_SMALL, toy

CONFIG = toy(
    "Periodic tiling, one Mamba-1 layer (width 32, vocabulary 32)",
    PERIODIC_SMALL,
    MAMBA1,
    d_model=32,
    steps=600,
)
