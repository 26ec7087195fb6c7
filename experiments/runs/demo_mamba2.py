from experiments.recipes import MAMBA2_SLOW, PERIODIC_SMALL, toy

CONFIG = toy(
    "Demo: periodic tiling, two Mamba-2 layers with slow init",
    PERIODIC_SMALL,
    MAMBA2_SLOW,
    MAMBA2_SLOW,
    d_model=32,
    steps=480,
    every=20,
)
