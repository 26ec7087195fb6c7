from experiments.recipes import LINEAR_CONV, PERIODIC, toy

CONFIG = toy(
    "Periodic tiling, two linear-attention layers with short convolution",
    PERIODIC,
    LINEAR_CONV,
    LINEAR_CONV,
    steps=600,
)
