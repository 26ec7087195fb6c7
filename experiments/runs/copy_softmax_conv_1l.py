from experiments.recipes import SEGMENT_COPY, SOFTMAX_CONV, toy

CONFIG = toy("Segment copy, one softmax layer with short convolution", SEGMENT_COPY, SOFTMAX_CONV, steps=500)
