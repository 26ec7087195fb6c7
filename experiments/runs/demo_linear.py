from experiments.recipes import LINEAR_CONV, PERIODIC_SMALL, toy

CONFIG = toy(
    "Demo: periodic tiling, two linear-attention layers with short convolution",
    PERIODIC_SMALL,
    LINEAR_CONV,
    LINEAR_CONV,
    d_model=32,
    steps=575,
    every=25,
)
