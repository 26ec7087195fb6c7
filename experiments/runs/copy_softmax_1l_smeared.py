from experiments.recipes import SEGMENT_COPY, toy
from models.config import SoftmaxAttentionConfig

# The control copy-softmax-1l with smeared keys: what one layer lacks is the previous token in its keys.
CONFIG = toy(
    "Segment copy, one softmax layer with smeared keys",
    SEGMENT_COPY,
    SoftmaxAttentionConfig(n_heads=4, smeared_keys=True),
    steps=800,
    init_std=0.1,
    every=50,
)
