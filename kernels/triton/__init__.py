"""Triton kernels of the operators, forward and backward, registered as `torch.ops.beyond_softmax.*`.

One file holds the kernels of a part, one the launchers and the registration of an operator. Needs torch and
triton only.
Block sizes come from `config_table`; nothing is tuned at run time. Sums are in a fixed order: results are
deterministic.
"""
