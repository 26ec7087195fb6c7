from experiments.recipes import LINEAR_CONV, SEGMENT_COPY, toy

CONFIG = toy(
    "Segment copy, two linear-attention layers with short convolution",
    SEGMENT_COPY,
    LINEAR_CONV,
    LINEAR_CONV,
    steps=1000,
    init_std=0.1,
)
