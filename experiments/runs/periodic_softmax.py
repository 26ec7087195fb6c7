from experiments.recipes import PERIODIC, SOFTMAX, toy

CONFIG = toy("Periodic tiling, two softmax layers", PERIODIC, SOFTMAX, SOFTMAX, steps=600)
