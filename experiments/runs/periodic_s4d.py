from experiments.recipes import PERIODIC, toy
from models.config import Mamba1Config

CONFIG = toy(
    "Control: periodic tiling, two S4D layers (Mamba-1 with constant B, C and dt)",
    PERIODIC,
    *[Mamba1Config(constant_bcdt=True)] * 2,
    steps=800,
    every=50,
)
