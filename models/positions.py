"""Rotary positions (RoPE): both pair layouts, partial rotation, offsets, scaling to longer contexts.

    theta_n   angular frequency of pair n, radians per token, n = 0 .. rotary_dim/2 - 1
    factor    what cos and sin are multiplied with (1 except for YaRN)

Sources: RoFormer arXiv:2104.09864, position interpolation 2306.15595, YaRN 2309.00071, Llama 3 2407.21783.
"""

import math
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from kernels import rotation
from models.config import RopeConfig
from models.errors import ConfigError


class RopeFrequencies(NamedTuple):
    """Frequencies in float64 on the CPU, and the factor on cos and sin."""

    theta: Float[Tensor, " pair"]
    factor: float


def rope_frequencies(config: RopeConfig, d_head: int, *, n_ctx: int | None = None) -> RopeFrequencies:
    """Frequencies of a rotary configuration.

    Args:
        d_head: Width of a head, used where `config.rotary_dim` is None.
        n_ctx: Longest sequence of the model; only "dynamic" scaling depends on it. Its base follows from this
        one
            number and not from the current length, so that rotated keys in a cache stay valid.

    Raises:
        ConfigError: rotary_dim is odd or larger than d_head, or the scaling lacks what it needs.
    """
    dim = d_head if config.rotary_dim is None else config.rotary_dim
    if dim % 2 or not 0 < dim <= d_head:
        raise ConfigError(f"rotary_dim is {dim}; accepted: an even number from 2 to d_head = {d_head}")
    theta = _plain(config.base, dim)
    if config.scaling is None:
        return RopeFrequencies(theta, 1.0)
    scaling = dict(config.scaling)
    kind = scaling.pop("type")
    if kind == "linear":
        return RopeFrequencies(theta / scaling["factor"], 1.0)
    if kind == "dynamic":
        return RopeFrequencies(_dynamic(config.base, dim, n_ctx=n_ctx, **scaling), 1.0)
    if kind == "llama3":
        return RopeFrequencies(_llama3(theta, **scaling), 1.0)
    if kind == "yarn":
        return _yarn(theta, config.base, **scaling)
    raise ConfigError(f"RoPE scaling type is {kind!r}; accepted: linear, dynamic, llama3, yarn")


def _plain(base: float, dim: int) -> Tensor:
    return base ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)


def _dynamic(base: float, dim: int, *, n_ctx: int | None, factor: float, original_length: int) -> Tensor:
    """Base raised so that a context of n_ctx fits ("NTK-aware"); unchanged up to the original length."""
    if n_ctx is None:
        raise ConfigError("dynamic RoPE scaling needs n_ctx")
    if n_ctx <= original_length or dim == 2:
        return _plain(base, dim)
    stretch = factor * n_ctx / original_length - (factor - 1)
    return _plain(base * stretch ** (dim / (dim - 2)), dim)


def _llama3(
    theta: Tensor, *, factor: float, low_freq_factor: float, high_freq_factor: float, original_length: int
) -> Tensor:
    """Slow pairs divided by `factor`, fast ones kept, a linear blend in the number of turns between."""
    turns = original_length * theta / (2 * math.pi)
    keep = ((turns - low_freq_factor) / (high_freq_factor - low_freq_factor)).clamp(0, 1)
    return keep * theta + (1 - keep) * theta / factor


def _yarn(
    theta: Tensor,
    base: float,
    *,
    factor: float,
    original_length: int,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    ramp: str = "index",
    truncate: bool = True,
    attention_factor: float | None = None,
) -> RopeFrequencies:
    """YaRN: slow pairs interpolated, fast ones kept.

    `ramp` "rotations" blends linearly in the number of turns within the original length (the paper's),
    "index" in the pair's index between the two bounds (the usual code's), rounded outwards where `truncate`.
    """
    if ramp == "rotations":
        turns = original_length * theta / (2 * math.pi)
        keep = ((turns - beta_slow) / (beta_fast - beta_slow)).clamp(0, 1)
    elif ramp == "index":
        keep = _index_ramp(theta.shape[0], base, original_length, beta_fast, beta_slow, truncate)
    else:
        raise ConfigError(f"YaRN ramp is {ramp!r}; accepted: 'index', 'rotations'")
    if attention_factor is None:
        attention_factor = 0.1 * math.log(factor) + 1 if factor > 1 else 1.0
    return RopeFrequencies(keep * theta + (1 - keep) * theta / factor, attention_factor)


def _index_ramp(
    n_pairs: int, base: float, original_length: int, beta_fast: float, beta_slow: float, truncate: bool
) -> Tensor:
    dim = 2 * n_pairs

    def index(turns: float) -> float:
        return dim * math.log(original_length / (2 * math.pi * turns)) / (2 * math.log(base))

    low, high = index(beta_fast), index(beta_slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    # A ramp of no width would divide by zero.
    width = high - low if high != low else 1e-3
    return 1 - ((torch.arange(n_pairs, dtype=torch.float64) - low) / width).clamp(0, 1)


def rotate(
    x: Float[Tensor, "batch seq head d_head"],
    cos: Float[Tensor, "seq pair"],
    sin: Float[Tensor, "seq pair"],
    layout: str,
) -> Float[Tensor, "batch seq head d_head"]:
    """Turn the first 2 x pair entries of each head; the others pass unchanged.

    Pairs are (n, n + pairs) in layout "half" and (2n, 2n + 1) in layout "adjacent".
    """
    if layout not in rotation.LAYOUTS:
        raise ConfigError(f"RoPE layout is {layout!r}; accepted: 'half', 'adjacent'")
    return rotation.rotate(x, cos, sin, layout)


class Rope:
    """Rotation of queries and keys of one model, with its cos and sin kept for reuse.

    Angles are computed in float64 and cast to the dtype of the rotated tensor. Not a module and no buffer:
    casting a model must not round the frequencies.
    """

    def __init__(self, config: RopeConfig, d_head: int, *, n_ctx: int | None = None):
        self.config = config
        self.frequencies = rope_frequencies(config, d_head, n_ctx=n_ctx)
        self._tables: dict[tuple[torch.device, torch.dtype], tuple[Tensor, Tensor]] = {}

    def __call__(
        self, x: Float[Tensor, "batch seq head d_head"], offset: int = 0
    ) -> Float[Tensor, "batch seq head d_head"]:
        """Rotate the vectors of positions offset, offset + 1, ..."""
        cos, sin = self._table(offset + x.shape[1], x.device, x.dtype)
        stop = offset + x.shape[1]
        return rotate(x, cos[offset:stop], sin[offset:stop], self.config.layout)

    def _table(self, length: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        cos, sin = self._tables.get((device, dtype), (None, None))
        if cos is None or cos.shape[0] < length:
            # Doubling keeps step-by-step generation from rebuilding the table at every token.
            rows = torch.arange(max(64, 1 << (length - 1).bit_length()), dtype=torch.float64)
            angle = rows[:, None] * self.frequencies.theta
            factor = self.frequencies.factor
            cos = (factor * angle.cos()).to(device=device, dtype=dtype)
            sin = (factor * angle.sin()).to(device=device, dtype=dtype)
            self._tables[device, dtype] = (cos, sin)
        return cos, sin
