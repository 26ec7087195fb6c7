from experiments.recipes import LINEAR, PERIODIC, toy

CONFIG = toy(
    "Periodic tiling, two linear-attention layers, learned positions, no convolution",
    PERIODIC,
    LINEAR,
    LINEAR,
    steps=800,
    positions="learned",
)
