"""Sums of |A| over the rows of linear attention with a scalar decay: time quadratic, memory linear in length.

A block of rows that starts at m reads every earlier source through two factors that are both at most 1,

    |A_ij| = exp(sum of log decays m+1..i) |q_i . k_j| |w_j| exp(sum of log decays j+1..m),

so that a block is one product of queries and keys and one of their sizes with the weighted decays. A source
whose decay has underflowed to 0 in every head adds nothing and is left out from then on.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from kernels.checks import accumulation_dtype, check_axes, check_number, check_present, without_autocast
from kernels.segment_sum import segment_sum, suffix_sum

# Numbers in the largest temporary tensor of a block of rows; rows in a block at most.
BLOCK = {"cpu": 2**22, "cuda": 2**27}
ROWS = 256


@without_autocast
def linear_abs_row_sum(
    q: Float[Tensor, "batch seq group d_k"],
    k: Float[Tensor, "batch seq group d_k"],
    *,
    n_heads: int,
    log_decay: Float[Tensor, "batch seq head"] | None = None,
    k_weight: Float[Tensor, "batch seq head"] | None = None,
    scale: float = 1.0,
) -> Float[Tensor, "batch seq head"]:
    """sum_j |A_ij| of `gated_linear_attention.pattern` without `normalise`; see there for the options."""
    check_present("row_sums", q=q, k=k)
    check_axes("row_sums", {"q": (q, "batch seq group d_k"), "k": (k, "batch seq group d_k")})
    check_number("row_sums", "scale", scale)
    acc = accumulation_dtype(q, k, log_decay, k_weight)
    batch, seq, groups = q.shape[:3]
    q, k = (x.to(acc).transpose(1, 2) for x in (q * scale, k))
    per_group = n_heads // groups

    def by_group(x: Tensor | None, absent: float) -> Float[Tensor, "batch group head seq"]:
        x = q.new_full((1, 1, 1), absent).expand(batch, seq, n_heads) if x is None else x.to(acc)
        return x.transpose(1, 2).unflatten(1, (groups, per_group))

    logs, size = by_group(log_decay, 0.0), by_group(k_weight, 1.0).abs()
    gone = math.log(torch.finfo(acc).smallest_normal) - math.log(2**60)
    found = q.new_empty(batch, groups, per_group, seq)
    first, reach = 0, logs.new_zeros(batch, groups, per_group, 0)
    start = 0
    while start < seq:
        stop = min(seq, start + _n_rows(q, per_group, start - first))
        here, own = slice(start, stop), logs[..., start:stop]
        from_start = torch.cat([torch.zeros_like(own[..., :1]), own[..., 1:].cumsum(dim=-1)], dim=-1)
        reach = reach + own[..., :1]
        if log_decay is not None and reach.shape[-1]:
            alive = (reach > gone).flatten(0, 2).any(dim=0)
            n_gone = int(alive.to(torch.int8).argmax()) if bool(alive.any()) else reach.shape[-1]
            first, reach = first + n_gone, reach[..., n_gone:]
        products = torch.matmul(q[:, :, here], k[:, :, first:stop].transpose(2, 3)).abs_()
        n_before = start - first
        weights = (size[..., first:start] * torch.exp(reach)).transpose(2, 3)
        earlier = torch.matmul(products[..., :n_before], weights).transpose(2, 3)
        inside = torch.exp(segment_sum(own)).tril_() * size[..., None, here]
        inside = (inside * products[:, :, None, :, n_before:]).sum(dim=-1)
        found[..., here] = earlier * torch.exp(from_start) + inside
        # From the next block's first row: what remains of this block, then its own sources.
        reach = torch.cat([reach + from_start[..., -1:], suffix_sum(own, dim=-1)], dim=-1)
        start = stop
    return found.flatten(1, 2).transpose(1, 2)


def _n_rows(q: Tensor, per_group: int, n_before: int) -> int:
    """Rows of a block that sees `n_before` sources before it."""
    most = BLOCK.get(q.device.type, BLOCK["cpu"]) // (q.shape[0] * q.shape[1])
    n = int((math.sqrt(n_before**2 + 4 * most / per_group) - n_before) / 2)
    return max(1, min(ROWS, n))
