from experiments.recipes import PERIODIC, SOFTMAX, toy

CONFIG = toy("Control: periodic tiling, one softmax layer", PERIODIC, SOFTMAX, steps=600)
