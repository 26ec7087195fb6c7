from experiments.recipes import MAMBA2_SLOW, SEGMENT_COPY, toy

CONFIG = toy(
    "Segment copy, two Mamba-2 layers with slow init",
    SEGMENT_COPY,
    MAMBA2_SLOW,
    MAMBA2_SLOW,
    steps=1500,
    init_std=0.1,
    lr=1e-3,
    every=50,
)
