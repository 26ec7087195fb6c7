from experiments.recipes import SEGMENT_COPY, SOFTMAX, toy

CONFIG = toy(
    "Segment copy, two softmax layers of four heads", SEGMENT_COPY, SOFTMAX, SOFTMAX, steps=1000, init_std=0.1
)
