"""Attention summed over matching sources, without the pattern: what prefix matching needs, for every mixer.

A destination i and a source j <= i match where label_dest[i] == label_src[j] (for prefix matching: the token
at i, and the token before j). Softmax: see `softmax_matches`. Linear attention: see `linear_matches`.
Selective scan: the positions are put in order of label, then time, and the
operator itself runs over them with a value of 1 and a reset where the label changes, so the cost is linear in
the length.
"""

import torch
from torch import Tensor

from kernels.triton.linear_matches import events, linear_matches
from kernels.triton.selective_scan import selective_scan
from kernels.triton.softmax_matches import softmax_matches

__all__ = ["linear_matches", "scan_matches", "softmax_matches"]

# Bytes that one group of channels may take at a time, at about 80 for each of its steps.
BUDGET = 350_000_000


def _events(label_dest: Tensor, label_src: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As `events`, and the event of each destination [seq]."""
    position, is_dest, starts = events(label_dest, label_src)
    order = 2 * position + is_dest
    event = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    return position, is_dest, starts, event[1::2]


def scan_matches(
    dt: Tensor, A_log: Tensor, B: Tensor, C: Tensor, label_dest: Tensor, label_src: Tensor
) -> Tensor:
    """Signed sum of the selective scan's A_ij over the matching j, [batch channel seq] float32, a few
    channels at a time.

    Args:
        dt: [batch seq channel]; A_log: [channel d_state]; B, C: [batch seq d_state].
        label_dest, label_src: [batch seq] integers >= 0; a negative source label never matches.
    """
    batch, seq, channels = dt.shape
    found = torch.empty(batch, channels, seq, dtype=torch.float32, device=dt.device)
    at_once = min(channels, max(32, 1 << (BUDGET // (80 * seq)).bit_length() >> 1))
    for b in range(batch):
        position, is_dest, starts, event = _events(label_dest[b], label_src[b])
        writes = (B.detach()[b].float()[position] * ~is_dest[:, None])[None]
        reads = (C.detach()[b].float()[position] * is_dest[:, None])[None]
        for channel in range(0, channels, at_once):
            # One channel after the other in memory: sums over time are many times quicker.
            own = dt.detach()[b, :, channel : channel + at_once].T.double().contiguous()
            at = own.cumsum(1)[:, position]
            gap = torch.empty_like(at, dtype=torch.float32)
            gap[:, 1:] = at[:, 1:] - at[:, :-1]
            # A step this long forgets everything; u dt gives the write its own step.
            gap.masked_fill_(starts, 1e30).clamp_(min=1e-30)
            u = (own.float()[:, position] / gap).T.contiguous()
            gap = gap.T.contiguous()
            y, _ = selective_scan(u[None], gap[None], A_log.detach()[channel : channel + at_once], writes,
                reads)
            found[b, channel : channel + at_once] = y[0, event].T
    return found
