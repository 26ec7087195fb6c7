from experiments.recipes import LINEAR_CONV, PERIODIC, toy

CONFIG = toy(
    "Periodic tiling, one linear-attention layer with short convolution", PERIODIC, LINEAR_CONV, steps=600
)
