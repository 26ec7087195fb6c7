from experiments.recipes import MAMBA1, PERIODIC_SMALL, toy

CONFIG = toy(
    "Demo: periodic tiling, one Mamba-1 layer", PERIODIC_SMALL, MAMBA1, d_model=32, steps=500, every=20
)
