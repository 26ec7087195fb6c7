"""Linear attention with no decay or a scalar decay, chunk by chunk, with a backward that recomputes each
chunk.

Within a chunk the quadratic form, between chunks the state; both as matrix products. Kept for the backward:
the inputs and one state per chunk. Decay factors are exponentials of directly added segments (never a
difference of two sums), at most 1, and their gradient is added up the same way. Some sequences at a time go
through a chunk, so that the [src dest] buffers stay in the processor's cache. A `row` is one sequence and
one group of heads that share q and k.
"""

import math

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from kernels.first_order import first_order_only
from kernels.segment_sum import segment_sum, suffix_sum

# Elements of a [row head src dest] buffer that stay in cache (float32).
CPU_BLOCK = 262144
LOG2_E = 1 / math.log(2)


class ChunkedLinear(torch.autograd.Function):
    """(q, k [row seq d_k], v [row head seq d_v], log_decay [row head seq] | None, state [row head d_k d_v]
    | None, chunk) to (output as v, last state). All in one floating dtype, contiguous."""

    @staticmethod
    def forward(
        ctx, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, state: Tensor | None, chunk: int
    ) -> tuple[Tensor, Tensor]:
        starts = v.new_empty(math.ceil(v.shape[2] / chunk), *v.shape[:2], q.shape[2], v.shape[3])
        output, last = torch.empty_like(v), torch.empty_like(starts[0])
        for r in _row_blocks(v, chunk):
            s = torch.zeros_like(last[r]) if state is None else state[r]
            for c, t in enumerate(_chunks(v.shape[2], chunk)):
                starts[c, r] = s
                decay = None if log_decay is None else _Decay(log_decay[r, :, t])
                skip = c == 0 and state is None
                output[r, :, t], s = _chunk_forward(q[r, None, t], k[r, None, t], v[r, :, t], decay, s, skip)
            last[r] = s
        ctx.save_for_backward(q, k, v, log_decay, starts)
        ctx.chunk, ctx.has_state = chunk, state is not None
        ctx.set_materialize_grads(False)
        return output, last

    @staticmethod
    def backward(ctx, doutput: Tensor | None, dlast: Tensor | None):
        q, k, v, log_decay, starts = ctx.saved_tensors
        with torch.no_grad():
            upstream = torch.zeros_like(v) if doutput is None else doutput
            dstate = torch.zeros_like(starts[0]) if dlast is None else dlast.contiguous().clone()
            used = dlast is not None
            dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
            dlog = None if log_decay is None else torch.empty_like(log_decay)
            chunks = _chunks(v.shape[2], ctx.chunk)
            for r in _row_blocks(v, ctx.chunk):
                for c in reversed(range(len(chunks))):
                    t = chunks[c]
                    decay = None if log_decay is None else _Decay(log_decay[r, :, t])
                    # None stands for zeros: before the first chunk, after the last.
                    state = starts[c, r] if c or ctx.has_state else None
                    dafter = dstate[r] if used or c + 1 < len(chunks) else None
                    inputs = q[r, None, t], k[r, None, t], v[r, :, t], decay, state
                    dq[r, t], dk[r, t], dv[r, :, t], dlog_t, dbefore = _chunk_backward(
                        *inputs, upstream[r, :, t], dafter
                    )
                    if dbefore is not None:
                        dstate[r] = dbefore
                    if dlog is not None:
                        dlog[r, :, t] = dlog_t
        gradients = dq, dk, dv, dlog, dstate if ctx.has_state else None
        tied = first_order_only("gated_linear_attention", gradients, (doutput, dlast, q, k, v, log_decay))
        return *tied, None


class _Decay:
    """Decay factors within one chunk, [row head ...]: between two steps, from the start, and to the end."""

    def __init__(self, log_decay: Tensor):
        length = log_decay.shape[-1]
        log2 = log_decay * LOG2_E
        later = torch.ones(length, length, dtype=torch.bool, device=log2.device).triu(1)
        segments = torch.where(later, log2[..., None, :], log2.new_zeros(())).cumsum_(dim=-1)
        self.from_start = torch.exp2(log2.cumsum(dim=-1))[..., None]
        self.to_end = torch.exp2(segments[..., -1:])
        self.whole = self.from_start[..., -1:, :]
        self.between = segments.exp2_().triu_()


def _chunks(seq: int, chunk: int) -> list[slice]:
    return [slice(start, min(start + chunk, seq)) for start in range(0, seq, chunk)]


def _row_blocks(v: Tensor, chunk: int) -> list[slice]:
    """Rows that are worked on together: all of them off the CPU, few enough for the cache on it."""
    length = min(chunk, v.shape[2])
    size = (
        max(1, CPU_BLOCK // (v.shape[1] * length * length)) if v.device.type == "cpu" else max(1, v.shape[0])
    )
    return [slice(start, min(start + size, v.shape[0])) for start in range(0, v.shape[0], size)]


def _chunk_forward(
    q: Tensor, k: Tensor, v: Tensor, decay: _Decay | None, state: Tensor, skip_state: bool
) -> tuple[Tensor, Tensor]:
    """Output of one chunk and the state after it. q, k [row 1 t d_k], v [row head t d_v]."""
    by_source = torch.matmul(k, q.transpose(-1, -2))
    by_source = by_source.triu_() if decay is None else by_source * decay.between
    output = torch.matmul(by_source.transpose(-1, -2), v)
    written = torch.matmul(k.transpose(-1, -2), v if decay is None else v * decay.to_end)
    if skip_state:
        return output, written
    carried = torch.matmul(q, state)
    if decay is None:
        return output.add_(carried), written.add_(state)
    return output.addcmul_(carried, decay.from_start), written.addcmul_(state, decay.whole)


def _chunk_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: _Decay | None,
    state: Tensor | None,
    dout: Tensor,
    dstate: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Gradients of q, k, v, log_decay and the state before the chunk (None where there is none).

    `dstate` is the gradient of the state after it; None is zero.
    """
    products = torch.matmul(k, q.transpose(-1, -2))
    dproducts = torch.matmul(v, dout.transpose(-1, -2))
    if decay is None:
        dv = torch.matmul(products.triu_(), dout)
        dproducts, dcarried, ended, dlog = dproducts.triu_(), dout, v, None
    else:
        dv = torch.matmul(products * decay.between, dout)
        dproducts.mul_(decay.between)
        dcarried = dout * decay.from_start if state is not None else None
        ended = v * decay.to_end if dstate is not None else None
        dlog = _pair_gradient(dproducts * products)
    dproducts = dproducts.sum(dim=1)
    dq = torch.matmul(dproducts.transpose(-1, -2), k[:, 0])
    dk = torch.matmul(dproducts, q[:, 0])
    if dstate is not None:
        written = torch.matmul(k, dstate)
        dv = dv.add_(written) if decay is None else dv.addcmul_(written, decay.to_end)
        dk.add_(torch.matmul(ended, dstate.transpose(-1, -2)).sum(dim=1))
        if decay is not None:
            # Every write to the end goes through the later steps.
            dlog[..., 1:].add_((ended * written).sum(-1)[..., :-1].cumsum(dim=-1))
    if state is None:
        return dq, dk, dv, dlog, None
    dq.add_(torch.matmul(dcarried, state.transpose(-1, -2)).sum(dim=1))
    dbefore = torch.matmul(q.transpose(-1, -2), dcarried)
    if decay is not None:
        # Every read of the start goes through the steps up to it.
        reads = (dcarried * torch.matmul(q, state)).sum(-1)
        dlog.add_(reads.flip(-1).cumsum(dim=-1).flip(-1))
    if dstate is not None:
        kept = dstate if decay is None else dstate * decay.whole
        dbefore = dbefore + kept
        if decay is not None:
            dlog.add_((kept * state).sum(dim=(-1, -2))[..., None])
    return dq, dk, dv, dlog, dbefore


def _pair_gradient(pairs: Tensor) -> Tensor:
    """Gradient of the log decays from the pairs [src dest]: a step's is in those with src < step <= dest."""
    up_to_source = pairs.cumsum_(dim=-2).triu_(1)
    gradient = torch.zeros_like(pairs[..., 0, :])
    gradient[..., 1:] = up_to_source[..., :-1, :].sum(dim=-1)
    return gradient


def chunked_by_channel(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, state: Tensor | None, chunk: int
) -> tuple[Tensor, Tensor]:
    """The same with a log decay per key channel; q, k, log_decay [row seq d_k], v [row seq d_v], state [row
    1 d_k d_v].

    Each chunk is recomputed in the backward. Within a chunk the decays stand in one [row d_k dest src]
    tensor: small chunks.
    """
    s = q.new_zeros(q.shape[0], q.shape[2], v.shape[2]) if state is None else state[:, 0]
    outputs = []
    for t in _chunks(q.shape[1], chunk):
        inputs = q[:, t], k[:, t], v[:, t], log_decay[:, t], s
        output, s = checkpoint(_chunk_by_channel, *inputs, use_reentrant=False, preserve_rng_state=False)
        outputs.append(output)
    return torch.cat(outputs, dim=1), s


def _chunk_by_channel(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    causal = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool, device=q.device).tril()
    segments = segment_sum(log_decay.transpose(1, 2)).masked_fill(~causal, -torch.inf)
    weights = torch.einsum("rid,rjd,rdij->rij", q, k, torch.exp(segments))
    from_start = torch.exp(log_decay.cumsum(dim=1))
    output = torch.matmul(weights, v) + torch.matmul(q * from_start, state)
    written = torch.matmul((k * torch.exp(suffix_sum(log_decay, dim=1))).transpose(1, 2), v)
    return output, from_start[:, -1, :, None] * state + written
