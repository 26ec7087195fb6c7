from experiments.recipes import SEGMENT_COPY, SOFTMAX, toy

CONFIG = toy(
    "Demo: segment copy, two softmax layers",
    SEGMENT_COPY,
    SOFTMAX,
    SOFTMAX,
    steps=850,
    init_std=0.1,
    windows=((50, 350, 100), (400, 850, 25)),
)
