"""Sums of log decays (or step sizes) between two positions, added up directly.

A difference of two cumulative sums would be shorter, but loses digits where a large sum lies before the
segment.
"""

import torch
from jaxtyping import Float
from torch import Tensor


def segment_sum(x: Float[Tensor, "*lead seq"], rows: slice | None = None) -> Float[Tensor, "*lead dest src"]:
    """sum_{r=src+1..dest} x_r for src < dest, else 0.

    Args:
        x: One value per position.
        rows: Only these destinations, consecutive; memory is rows x seq.
    """
    seq = x.shape[-1]
    start, stop, _ = (rows or slice(None)).indices(seq)
    position = torch.arange(seq, device=x.device)
    added = x[..., start:stop, None].expand(*x.shape[:-1], stop - start, seq)
    inside = (position[start:stop, None] > position[None, :]) & (position[start:stop, None] > start)
    sums = added.masked_fill(~inside, 0).cumsum(dim=-2)
    if start == 0:
        return sums
    before = torch.zeros_like(x)
    before = torch.cat([suffix_sum(x[..., : start + 1], dim=-1), before[..., start + 1 :]], dim=-1)
    return sums + before[..., None, :]


def suffix_sum(x: Tensor, dim: int) -> Tensor:
    """Sum over all later positions of an axis: 0 at the last one."""
    later = x.narrow(dim, 1, x.shape[dim] - 1).flip(dim).cumsum(dim).flip(dim)
    return torch.cat([later, torch.zeros_like(x.narrow(dim, 0, 1))], dim=dim)
