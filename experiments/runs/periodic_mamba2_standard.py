from experiments.recipes import MAMBA2, PERIODIC, toy

CONFIG = toy(
    "Periodic tiling, two Mamba-2 layers with standard init", PERIODIC, MAMBA2, MAMBA2, steps=900, every=50
)
