from experiments.data.config import MarkovConfig
from experiments.recipes import SOFTMAX, toy

CONFIG = toy(
    "In-context Markov chains, two softmax layers",
    MarkovConfig(seq=100, d_vocab=8),
    SOFTMAX,
    SOFTMAX,
    steps=600,
    init_std=0.1,
)
