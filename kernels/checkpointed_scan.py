"""Selective scan, chunk by chunk, with a backward that recomputes the states of a chunk from its first.

Kept for the backward: the inputs and one state per chunk of CHUNK steps. Within a chunk the states of all
steps are in a buffer that is used again; one fused multiply-add a step carries them on, everything else is
done for the whole chunk at once. A few sequences at a time go through a whole chunk, so that the buffers
stay in the processor's cache.
Inside, the axes are [step batch d_state channel]: broadcasts and sums then run along the long, contiguous
axis.
"""

import math

import torch
from torch import Tensor

from kernels.first_order import first_order_only

CHUNK = 16
# Elements of a state block that fit the second-level cache together with their neighbours (float32).
CPU_BLOCK = 32768
LOG2_E = 1 / math.log(2)


class CheckpointedScan(torch.autograd.Function):
    """(u, dt [batch seq channel], A [d_state channel] < 0, B, C [batch seq d_state], state [batch d_state
    channel]) to (y [batch seq channel], last state [batch d_state channel]). All in one floating dtype."""

    @staticmethod
    def forward(
        ctx, u: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, state: Tensor
    ) -> tuple[Tensor, Tensor]:
        y, last = torch.empty_like(u, memory_format=torch.contiguous_format), torch.empty_like(state)
        n_chunks = math.ceil(u.shape[1] / CHUNK)
        starts = state.new_empty(n_chunks, *state.shape)
        for rows in _row_blocks(state):
            _forward_rows(
                u[rows], dt[rows], A, B[rows], C[rows], state[rows], y[rows], starts[:, rows], last[rows]
            )
        ctx.save_for_backward(u, dt, A, B, C, starts)
        return y, last

    @staticmethod
    def backward(ctx, dy: Tensor, dlast: Tensor):
        u, dt, A, B, C, starts = ctx.saved_tensors
        with torch.no_grad():
            du, ddt, dB, dC = (
                torch.empty_like(t, memory_format=torch.contiguous_format) for t in (u, dt, B, C)
            )
            dA, dstate = torch.zeros_like(A), dlast.clone(memory_format=torch.contiguous_format)
            for r in _row_blocks(dstate):
                outputs = du[r], ddt[r], dA, dB[r], dC[r], dstate[r]
                _backward_rows(u[r], dt[r], A, B[r], C[r], starts[:, r], dy[r], outputs)
        gradients = du, ddt, dA, dB, dC, dstate
        return first_order_only("selective_scan", gradients, (dy, dlast, u, dt, A, B, C))


def _row_blocks(state: Tensor) -> list[slice]:
    """Sequences that are worked on together: all of them off the CPU, few enough for the cache on it."""
    batch = state.shape[0]
    size = max(1, CPU_BLOCK // state.shape[1:].numel()) if state.device.type == "cpu" else batch
    return [slice(start, min(start + size, batch)) for start in range(0, batch, max(size, 1))]


def _by_step(*tensors: Tensor) -> list[Tensor]:
    return [t.transpose(0, 1).contiguous() for t in tensors]


def _fill_states(decay: Tensor, states: Tensor, dt: Tensor, A: Tensor, B: Tensor, write: Tensor) -> None:
    """Decays [step batch d_state channel] of a chunk and its states; states[0] is given, states[1:] are
    filled.
    """
    torch.mul(dt[:, :, None, :], A * LOG2_E, out=decay).exp2_()
    torch.mul(B[:, :, :, None], write[:, :, None, :], out=states[1:])
    for t in range(len(decay)):
        states[t + 1].addcmul_(decay[t], states[t])


def _forward_rows(
    u: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    state: Tensor,
    y: Tensor,
    starts: Tensor,
    last: Tensor,
) -> None:
    """Fill y, the state before each chunk and the last state for a block of sequences."""
    dt, B, C, write = _by_step(dt, B, C, dt * u)
    decay, states = state.new_empty(CHUNK, *state.shape), state.new_empty(CHUNK + 1, *state.shape)
    states[0] = state
    for chunk, start in enumerate(range(0, len(dt), CHUNK)):
        t = slice(start, min(start + CHUNK, len(dt)))
        n = t.stop - t.start
        starts[chunk] = states[0]
        _fill_states(decay[:n], states[: n + 1], dt[t], A, B[t], write[t])
        y[:, t] = torch.matmul(C[t, :, None, :], states[1 : n + 1])[:, :, 0].transpose(0, 1)
        states[0] = states[n]
    last.copy_(states[0])


def _backward_rows(
    u: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    starts: Tensor,
    dy: Tensor,
    outputs: tuple[Tensor, ...],
) -> None:
    """Fill the gradients of a block of sequences; dA is added to, dstate comes in as the last state's
    gradient.
    """
    du, ddt, dA, dB, dC, dstate = outputs
    dt_t, B, C, dy, write = _by_step(dt, B, C, dy, dt * u)
    decay, states, grads = (dstate.new_empty(CHUNK + extra, *dstate.shape) for extra in (0, 1, 0))
    for chunk in reversed(range(len(starts))):
        t = slice(chunk * CHUNK, min((chunk + 1) * CHUNK, len(dt_t)))
        n = t.stop - t.start
        a, h, g = decay[:n], states[: n + 1], grads[:n]
        h[0] = starts[chunk]
        _fill_states(a, h, dt_t[t], A, B[t], write[t])
        torch.mul(C[t, :, :, None], dy[t, :, None, :], out=g)
        g[-1].add_(dstate)
        for i in range(n - 2, -1, -1):
            g[i].addcmul_(a[i + 1], g[i + 1])
        torch.mul(a[0], g[0], out=dstate)
        # A row vector times the transpose: the other way round is ten times slower on CPU.
        dC[:, t] = torch.matmul(dy[t, :, None, :], h[1:].transpose(2, 3))[:, :, 0].transpose(0, 1)
        dB[:, t] = torch.matmul(write[t, :, None, :], g.transpose(2, 3))[:, :, 0].transpose(0, 1)
        du[:, t] = torch.matmul(B[t, :, None, :], g)[:, :, 0].transpose(0, 1)
        dlog = g.mul_(a).mul_(h[:-1])
        dA.add_(torch.mul(dlog, dt_t[t, :, None, :], out=a).sum(dim=(0, 1)))
        ddt[:, t] = dlog.mul_(A).sum(dim=2).transpose(0, 1)
    # So far du holds the gradient of dt u.
    ddt.addcmul_(du, u)
    du.mul_(dt)
