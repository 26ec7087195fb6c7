"""Rows of Mamba-1's implied attention by matrix products: `kernels.selective_scan.pattern`, quicker.

A[i,j,c] = sum_n C_i[n] exp(a_cn (S_i - S_j)) B_j[n] dt_jc, with S the running sum of dt and a = -exp(A_log) <
0. For a tile of rows that starts at m, every earlier source j < m splits at m into two factors that are both
at most 1,

    exp(a (S_i - S_m)) * exp(a (S_m - S_j)),

so that the sum over n is a product of a [row n] and an [n src] matrix, and the right one is carried from tile
to tile by one multiplication. Only within a tile are there exponentials of single (i, j) pairs.
"""

import math
from collections.abc import Iterable, Iterator

import torch
from jaxtyping import Float
from torch import Tensor

# Rows of a tile: fewer mean fewer exponentials, more mean larger products.
TILE = 8
# The same where one pass goes through the whole of a long sequence, and on a GPU: fewer updates of all
# earlier sources.
LONG_TILE = 32


def scan_rows(
    dt: Float[Tensor, "batch seq channel"],
    A_log: Float[Tensor, "channel d_state"],
    B: Float[Tensor, "batch seq d_state"],
    C: Float[Tensor, "batch seq d_state"],
    start: int,
    stop: int,
) -> Float[Tensor, "batch rows src=stop channel"]:
    """Destinations start .. stop-1, sources 0 .. stop-1; 0 above the diagonal.

    Differences of the running sum are taken in float64. Memory beside the result: batch x stop x channel x
    d_state.
    """
    rates = -torch.exp(A_log.double()).to(dt.dtype)
    total = dt.double().cumsum(1)
    out = dt.new_zeros(dt.shape[0], stop - start, stop, dt.shape[2])
    # exp(a (S_m - S_j)) B_j dt_j for the sources before the tile's first row m, [batch channel src d_state].
    before = dt.new_zeros(dt.shape[0], dt.shape[2], 0, A_log.shape[1])
    reference = total[:, 0]
    first = 0
    height = LONG_TILE if dt.is_cuda else TILE
    for tile in range(start, stop, height):
        last = min(tile + height, stop)
        before = _advanced(before, dt, B, rates, total, reference, first, tile)
        first, reference = tile, total[:, tile]
        elapsed = (total[:, tile:last] - reference[:, None]).to(dt.dtype)
        left = torch.exp(elapsed[..., None] * rates) * C[:, tile:last, None]
        rows = slice(tile - start, last - start)
        if tile:
            out[:, rows, :tile] = torch.matmul(left.transpose(1, 2), before.transpose(2, 3)).permute(
                0, 2, 3, 1
            )
        out[:, rows, tile:last] = _diagonal(dt, B, C, rates, total, tile, last)
    return out


def walk_scan_rows(
    dt: Float[Tensor, "batch seq channel"],
    A_log: Float[Tensor, "channel d_state"],
    B: Float[Tensor, "batch seq d_state"],
    C: Float[Tensor, "batch seq d_state"],
    blocks: Iterable[tuple[int, int]],
) -> Iterator[Float[Tensor, "batch rows src=stop channel"]]:
    """`scan_rows` of consecutive blocks (start, stop), carrying on what reaches the earlier sources.

    Without gradients. One buffer [batch channel seq d_state] is kept.
    """
    with torch.no_grad():
        rates = -torch.exp(A_log.double()).to(dt.dtype)
        total = dt.double().cumsum(1)
        writes = dt[..., None] * B[:, :, None]
        buffer = dt.new_empty(dt.shape[0], dt.shape[2], dt.shape[1], A_log.shape[1])
        first, reference = 0, total[:, 0]
        for start, stop in blocks:
            out = dt.new_zeros(dt.shape[0], stop - start, stop, dt.shape[2])
            for tile in range(start, stop, LONG_TILE):
                last = min(tile + LONG_TILE, stop)
                rows = slice(tile - start, last - start)
                decay = torch.exp((total[:, tile] - reference).to(dt.dtype)[..., None] * rates)
                buffer[:, :, :first].mul_(decay[:, :, None])
                between = (total[:, tile, None] - total[:, first:tile]).to(dt.dtype)[..., None]
                added = (between * rates).exp_().mul_(writes[:, first:tile])
                buffer[:, :, first:tile] = added.transpose(1, 2)
                first, reference = tile, total[:, tile]
                left = ((total[:, tile:last] - reference[:, None]).to(dt.dtype)[..., None] * rates).exp_()
                left.mul_(C[:, tile:last, None])
                if tile:
                    earlier = torch.matmul(left.transpose(1, 2), buffer[:, :, :tile].transpose(2, 3))
                    out[:, rows, :tile] = earlier.permute(0, 2, 3, 1)
                out[:, rows, tile:last] = _diagonal(dt, B, C, rates, total, tile, last)
            yield out


def _advanced(
    before: Tensor,
    dt: Tensor,
    B: Tensor,
    rates: Tensor,
    total: Tensor,
    reference: Tensor,
    first: int,
    tile: int,
) -> Tensor:
    """`before` moved from the reference row `first` to row `tile`, with the sources between them added."""
    if tile == first:
        return before
    decay = torch.exp((total[:, tile] - reference).to(dt.dtype)[..., None] * rates)
    between = (total[:, tile, None] - total[:, first:tile]).to(dt.dtype)
    added = torch.exp(between[..., None] * rates) * (dt[:, first:tile, :, None] * B[:, first:tile, None])
    return torch.cat([before * decay[:, :, None], added.transpose(1, 2)], dim=2)


def _diagonal(
    dt: Tensor, B: Tensor, C: Tensor, rates: Tensor, total: Tensor, tile: int, last: int
) -> Float[Tensor, "batch row src channel"]:
    at = torch.arange(last - tile, device=dt.device)
    elapsed = (total[:, tile:last, None] - total[:, None, tile:last]).to(dt.dtype)
    # Masked before exp: a source in the future would overflow.
    elapsed = elapsed.masked_fill((at > at[:, None])[:, :, None], math.inf)
    products = C[:, tile:last, None] * B[:, None, tile:last]
    decay = torch.exp(elapsed[..., None] * rates)
    return torch.einsum("bijcn,bijn->bijc", decay, products) * dt[:, None, tile:last]
