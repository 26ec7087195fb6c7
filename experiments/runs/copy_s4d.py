from experiments.recipes import SEGMENT_COPY, toy
from models.config import Mamba1Config

CONFIG = toy(
    "Control: segment copy, two S4D layers (Mamba-1 with constant B, C and dt)",
    SEGMENT_COPY,
    *[Mamba1Config(constant_bcdt=True)] * 2,
    steps=1000,
    every=50,
)
