from experiments.recipes import MAMBA1, SEGMENT_COPY, toy

CONFIG = toy("Segment copy, two Mamba-1 layers", SEGMENT_COPY, MAMBA1, MAMBA1, steps=1500, every=50)
