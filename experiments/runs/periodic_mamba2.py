from experiments.recipes import MAMBA2_SLOW, PERIODIC, toy

CONFIG = toy(
    "Periodic tiling, two Mamba-2 layers with slow init", PERIODIC, MAMBA2_SLOW, MAMBA2_SLOW, steps=600
)
