from experiments.recipes import LINEAR_CONV, SEGMENT_COPY, toy

CONFIG = toy(
    "Segment copy, one linear-attention layer with short convolution",
    SEGMENT_COPY,
    LINEAR_CONV,
    steps=1000,
    every=50,
)
