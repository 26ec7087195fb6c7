from experiments.recipes import SEGMENT_COPY, SOFTMAX, toy

CONFIG = toy(
    "Control: segment copy, one softmax layer", SEGMENT_COPY, SOFTMAX, steps=1000, init_std=0.1, every=50
)
