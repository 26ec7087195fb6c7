from experiments.recipes import MAMBA2_SLOW, SEGMENT_COPY, toy

CONFIG = toy(
    "Segment copy, one Mamba-2 layer with slow init", SEGMENT_COPY, MAMBA2_SLOW, steps=1500, every=50
)
