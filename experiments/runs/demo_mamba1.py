from experiments.recipes import MAMBA1, PERIODIC_SMALL, toy

CONFIG = toy(
    "Demo: periodic tiling, two Mamba-1 layers",
    PERIODIC_SMALL,
    MAMBA1,
    MAMBA1,
    d_model=32,
    steps=575,
    every=25,
)
