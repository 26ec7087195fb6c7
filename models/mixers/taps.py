"""What a short convolution puts of each source position into later values: the `taps` of a block reading."""

from jaxtyping import Float
from torch import Tensor


def conv_taps(
    x: Float[Tensor, "batch src channel"],
    weight: Float[Tensor, "channel width"],
    after: Float[Tensor, "batch dest channel"] | None = None,
) -> Float[Tensor, "tap batch src channel"]:
    """taps[l, b, j, c] = after[b, j + l, c] weight[c, width-1-l] x[b, j, c]; 0 past the end of the sequence.

    Args:
        x: The convolution's input.
        weight: Its taps; the last one meets the current input.
        after: Factor at the destination, such as sigmoid(pre) where SiLU follows; None is 1.
    """
    seq, width = x.shape[1], weight.shape[1]
    taps = x.new_zeros(min(width, seq), *x.shape)
    for lag in range(taps.shape[0]):
        term = x[:, : seq - lag] * weight[:, width - 1 - lag]
        taps[lag, :, : seq - lag] = term if after is None else term * after[:, lag:]
    return taps
