"""Initial step sizes and decay rates of the two Mamba mixers."""

import math

import torch
from jaxtyping import Float
from torch import Tensor, nn

# "slow": one step size for all, and time constants spread evenly in log over this range of tokens.
SLOW_DT = 0.1
SLOW_TOKENS = (8.0, 512.0)


def inverse_softplus(y: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """x with softplus(x) = y, for y > 0."""
    return y + torch.log(-torch.expm1(-y))


def dt_bias(
    n: int, *, init: str, dt_min: float, dt_max: float, generator: torch.Generator | None
) -> Float[Tensor, " n"]:
    """Biases before the softplus: steps log-uniform in dt_min .. dt_max ("standard"), or 0.1 ("slow")."""
    if init == "slow":
        return inverse_softplus(torch.full((n,), SLOW_DT))
    low, high = math.log(dt_min), math.log(dt_max)
    return inverse_softplus(torch.exp(low + (high - low) * torch.rand(n, generator=generator)))


def slow_A_log(n: int) -> Float[Tensor, " n"]:
    """log A for time constants 1 / (A dt) of 8 .. 512 tokens, evenly spaced in log, at dt = 0.1."""
    low, high = (math.log(x) for x in SLOW_TOKENS)
    tokens = torch.linspace(low, high, n) if n > 1 else torch.tensor([(low + high) / 2])
    return -tokens - math.log(SLOW_DT)


@torch.no_grad()
def fan_in_uniform(weight: Tensor, *, generator: torch.Generator | None) -> None:
    """Uniform within 1 / sqrt(inputs of one output): torch's default for linear layers and convolutions."""
    bound = weight[0].numel() ** -0.5
    nn.init.uniform_(weight, -bound, bound, generator=generator)
