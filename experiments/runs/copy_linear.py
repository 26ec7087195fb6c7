from experiments.recipes import LINEAR, SEGMENT_COPY, toy

CONFIG = toy(
    "Segment copy, two linear-attention layers without convolution",
    SEGMENT_COPY,
    LINEAR,
    LINEAR,
    steps=1000,
    init_std=0.1,
)
