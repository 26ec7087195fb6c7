from experiments.recipes import stdlib
from models.config import SoftmaxAttentionConfig

# Two taps give a head the token before each key: induction appears within two million tokens of real text, at
# offset +1. Without them (stdlib-softmax-plain) it takes more tokens than a CPU sees in ten minutes.
CONFIG = stdlib(
    "Python's standard library, two softmax layers with RoPE and a convolution of two taps",
    *[SoftmaxAttentionConfig(n_heads=2, d_conv=2)] * 2,
    steps=2600,
    positions="rope",
    windows=((100, 1600, 100), (1800, 2600, 200)),
)
