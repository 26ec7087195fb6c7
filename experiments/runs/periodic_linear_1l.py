from experiments.recipes import LINEAR, PERIODIC, toy

CONFIG = toy(
    "Control: periodic tiling, one linear-attention layer, learned positions, no convolution",
    PERIODIC,
    LINEAR,
    steps=800,
    positions="learned",
    every=50,
)
