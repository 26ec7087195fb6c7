from experiments.recipes import MAMBA1, SEGMENT_COPY, toy

CONFIG = toy("Segment copy, one Mamba-1 layer", SEGMENT_COPY, MAMBA1, steps=1500, every=50)
