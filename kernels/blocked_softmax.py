"""Softmax attention in blocks of queries, with a backward that recomputes each block from the log of its
denominator.

Memory is linear in sequence length: one [rows src] block of probabilities at a time, and only the keys a
window reaches.
"""

import math

import torch
from torch import Tensor

from kernels.first_order import first_order_only

ROWS = 128


class BlockedSoftmax(torch.autograd.Function):
    """(q [batch head dest d], k [batch kv_head src d], v [batch kv_head src d_v], sink [head] | None,
    scale, window | None) to (output [batch head dest d_v], log of the denominator [batch head dest]). All
    in one floating dtype."""

    @staticmethod
    def forward(
        ctx, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, scale: float, window: int | None
    ) -> tuple[Tensor, Tensor]:
        output, lse = q.new_empty(*q.shape[:3], v.shape[3]), q.new_empty(q.shape[:3])
        for rows, keys in _blocks(q.shape[2], k.shape[2], window):
            scores = _scores(q, k, rows, keys, scale, window)
            log_sum = torch.logsumexp(scores, dim=-1)
            if sink is not None:
                log_sum = torch.logaddexp(log_sum, sink.view(1, k.shape[1], -1, 1).expand_as(log_sum))
            weights = scores.sub_(log_sum[..., None]).exp_()
            output[:, :, rows] = _merge(torch.matmul(weights.flatten(2, 3), v[:, :, keys]), q.shape[1])
            lse[:, :, rows] = log_sum.flatten(1, 2)
        ctx.save_for_backward(q, k, v, sink, output, lse)
        ctx.scale, ctx.window = scale, window
        return output, lse

    @staticmethod
    def backward(ctx, doutput: Tensor, dlse: Tensor):
        q, k, v, sink, output, lse = ctx.saved_tensors
        with torch.no_grad():
            dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
            # What the softmax's own normalisation takes from every weight's gradient.
            shared = (doutput * output).sum(dim=-1) - dlse
            for rows, keys in _blocks(q.shape[2], k.shape[2], ctx.window):
                scores = _scores(q, k, rows, keys, ctx.scale, ctx.window)
                weights = scores.sub_(_split(lse[:, :, rows, None], k.shape[1])).exp_().flatten(2, 3)
                upstream = _split(doutput[:, :, rows], k.shape[1]).flatten(2, 3)
                dv[:, :, keys].add_(torch.matmul(weights.transpose(-1, -2), upstream))
                dscores = torch.matmul(upstream, v[:, :, keys].transpose(-1, -2))
                dscores.sub_(_split(shared[:, :, rows, None], k.shape[1]).flatten(2, 3)).mul_(weights).mul_(
                    ctx.scale
                )
                dq[:, :, rows] = _merge(torch.matmul(dscores, k[:, :, keys]), q.shape[1])
                queries = _split(q[:, :, rows], k.shape[1]).flatten(2, 3)
                dk[:, :, keys].add_(torch.matmul(dscores.transpose(-1, -2), queries))
            dsink = None if sink is None else -(torch.exp(sink[:, None] - lse) * shared).sum(dim=(0, 2))
        tied = first_order_only("softmax_attention", (dq, dk, dv, dsink), (doutput, dlse, q, k, v, sink))
        return *tied, None, None


def _blocks(n_dest: int, n_src: int, window: int | None) -> list[tuple[slice, slice]]:
    """Blocks of queries and the keys that each can see; queries are the last of the positions."""
    offset = n_src - n_dest
    blocks = []
    for start in range(0, n_dest, ROWS):
        stop = min(start + ROWS, n_dest)
        first = 0 if window is None else max(0, offset + start - window + 1)
        blocks.append((slice(start, stop), slice(first, offset + stop)))
    return blocks


def _scores(q: Tensor, k: Tensor, rows: slice, keys: slice, scale: float, window: int | None) -> Tensor:
    """Logits of a block [batch kv_head group rows src], -inf where a query may not look."""
    offset = k.shape[2] - q.shape[2]
    queries = _split(q[:, :, rows], k.shape[1])
    scores = torch.matmul(queries.flatten(2, 3), k[:, :, keys].transpose(-1, -2)).unflatten(
        2, queries.shape[2:4]
    )
    dest = torch.arange(offset + rows.start, offset + rows.stop, device=q.device)[:, None]
    src = torch.arange(keys.start, keys.stop, device=q.device)[None, :]
    hidden = (src > dest) if window is None else (src > dest) | (src <= dest - window)
    return scores.mul_(scale).masked_fill_(hidden, -math.inf)


def _split(x: Tensor, kv_heads: int) -> Tensor:
    """[batch head ...] as [batch kv_head group ...]."""
    return x.unflatten(1, (kv_heads, -1))


def _merge(x: Tensor, heads: int) -> Tensor:
    """[batch kv_head group*rows d] as [batch head rows d]."""
    return x.reshape(x.shape[0], heads, x.shape[1] * x.shape[2] // heads, x.shape[3])
