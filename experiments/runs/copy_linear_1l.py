from experiments.recipes import LINEAR, SEGMENT_COPY, toy

CONFIG = toy(
    "Control: segment copy, one linear-attention layer without convolution",
    SEGMENT_COPY,
    LINEAR,
    steps=1000,
    init_std=0.1,
    every=50,
)
