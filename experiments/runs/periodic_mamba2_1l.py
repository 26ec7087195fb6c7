from experiments.recipes import MAMBA2_SLOW, PERIODIC, toy

CONFIG = toy("Periodic tiling, one Mamba-2 layer with slow init", PERIODIC, MAMBA2_SLOW, steps=600)
