"""Mamba-1's selective scan on a GPU, forward and backward, with the skip D and the gate z inside.

Source: Gu and Dao 2023, arXiv:2312.00752. Differs: segments of the sequence run in parallel, initial and last
states have
gradients, and sums over channels are added up in a fixed order.
"""

import functools
from typing import Any

import torch
from torch import Tensor

from kernels.triton.launch import LOG2E, check_dtype, check_width, launch, power_of_two, rows
from kernels.triton.ops import differentiable, differentiable_once, register
from kernels.triton.selective_scan_backward import _scan_bwd_kernel, _scan_bwd_state_kernel
from kernels.triton.selective_scan_forward import (
    _scan_carry_kernel,
    _scan_fwd_output_kernel,
    _scan_fwd_state_kernel,
)

OPERATOR = "selective_scan"
# Steps between two kept states (in the dtype of u); the backward holds that many states in registers.
STEPS = 4


def selective_scan(
    u: Tensor,
    dt: Tensor,
    A_log: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    D: Tensor | None = None,
    z: Tensor | None = None,
    state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """h_t = exp(dt_t A) h_{t-1} + dt_t B_t u_t, y_t = (<C_t, h_t> + D u_t) SiLU(z_t), A = -exp(A_log).

    Args:
        u, dt, z: [batch seq channel], dt after softplus; A_log: [channel d_state]; B, C: [batch seq d_state].
        D: [channel]; state: [batch channel d_state] float32.

    Returns:
        (y [batch seq channel], state after the last step, float32), both differentiable.
    """
    check_dtype(OPERATOR, u)
    check_width(OPERATOR, "d_state", A_log.shape[1])
    state = None if state is None else state.float()
    tensors = (u, dt, A_log, B, C, D, z, state)
    keep = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
    y, last, *_ = torch.ops.beyond_softmax.selective_scan(*tensors, keep)
    return y, last


@functools.cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _block(d_state: int) -> dict[str, int]:
    """Channels and warps of a program: 8 or 16 states a thread."""
    block_n = power_of_two(d_state, 4)
    block_c = {4: 64, 8: 64, 16: 32, 32: 16, 64: 16, 128: 16, 256: 8}[block_n]
    warps = 1 if block_n <= 32 else min(8, block_c * block_n // 256)
    return {"BLOCK_C": block_c, "BLOCK_N": block_n, "num_warps": warps}


def _plan(u: Tensor, d_state: int) -> tuple[int, int, int]:
    """(blocks of channels, number of segments, their length): about 16 warps for every multiprocessor."""
    batch, seq, channels = u.shape
    block = _block(d_state)
    blocks = -(-channels // block["BLOCK_C"])
    wanted = max(1, 16 * _processors(u.device) // max(1, batch * blocks * block["num_warps"]))
    if wanted < 2 or seq < 64:
        return blocks, 1, max(1, -(-seq // STEPS)) * STEPS
    segment = max(32, -(-seq // (wanted * STEPS)) * STEPS)
    return blocks, -(-seq // segment), segment


def _forward(
    u: Tensor, dt: Tensor, a_log: Tensor, b: Tensor, c: Tensor, d: Tensor | None, z: Tensor | None,
    state: Tensor | None,
    keep: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """(y, last state, kept states, sums of dt of the segments); what does not apply is empty."""
    u, dt, b, c, z = (None if x is None else rows(x) for x in (u, dt, b, c, z))
    batch, seq, channels = u.shape
    d_state = a_log.shape[1]
    blocks, n_segment, segment = _plan(u, d_state)
    block = _block(d_state)
    rate = torch.exp(a_log.float()).mul_(-LOG2E)
    options = {"dtype": torch.float32, "device": u.device}
    last = torch.empty(batch, channels, d_state, **options)
    first = None if state is None else state.contiguous()
    total = torch.empty(0, **options)
    if n_segment > 1:
        entries = torch.empty(batch, n_segment, channels, d_state, **options)
        total = torch.empty(batch, n_segment, channels, **options)
        launch(
            _scan_fwd_state_kernel, (blocks, n_segment, batch), u, dt, rate, b, entries, total,
            *u.stride()[:2],
            *dt.stride()[:2], *b.stride()[:2], channels, seq, n_segment, segment, D_STATE=d_state, **block,
        )  # fmt: skip
        _carry(entries, total, rate, first, last, False)
        first = entries
    n_kept = -(-seq // STEPS)
    kept = torch.empty(batch, n_kept if keep else 0, channels, d_state, dtype=u.dtype, device=u.device)
    y = torch.empty(batch, seq, channels, dtype=u.dtype, device=u.device)
    launch(
        _scan_fwd_output_kernel, (blocks, n_segment, batch), u, dt, rate, b, c, d, z, first, y, kept, last,
        *u.stride()[:2],
        *dt.stride()[:2], *b.stride()[:2], *c.stride()[:2], *((0, 0) if z is None else z.stride()[:2]),
        channels, seq,
        n_segment, segment, n_kept, D_STATE=d_state, STEPS=STEPS, HAS_D=d is not None, HAS_Z=z is not None,
        HAS_FIRST=first is not None, KEEP=keep, SAVE_LAST=n_segment == 1, **block,
    )  # fmt: skip
    return y, last, kept, total


def _carry(h: Tensor, total: Tensor, rate: Tensor, first: Tensor | None, last: Tensor, reverse: bool) -> None:
    size = rate.numel()
    launch(
        _scan_carry_kernel, (-(-size // 128), h.shape[0]), h, total, rate, first, last, size, rate.shape[0],
        h.shape[1],
        D_STATE=rate.shape[1], BLOCK=128, REVERSE=reverse, HAS_FIRST=first is not None, num_warps=1,
    )  # fmt: skip


def _backward(
    dy: Tensor, dlast: Tensor | None, u: Tensor, dt: Tensor, a_log: Tensor, b: Tensor, c: Tensor,
    d: Tensor | None,
    z: Tensor | None, kept: Tensor, total: Tensor,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Gradients of (u, dt, A_log, B, C, D, z, state); what does not apply is empty."""
    u, dt, b, c, z, dy = (None if x is None else rows(x) for x in (u, dt, b, c, z, dy))
    batch, seq, channels = u.shape
    d_state = a_log.shape[1]
    blocks, n_segment, segment = _plan(u, d_state)
    block = _block(d_state)
    scale = torch.exp(a_log.float())
    rate = scale * -LOG2E
    options = {"dtype": torch.float32, "device": u.device}
    entry = None if dlast is None else dlast.contiguous()
    dstate = torch.empty(batch, channels, d_state, **options)
    z_strides = (0, 0) if z is None else z.stride()[:2]
    if n_segment > 1:
        sent = torch.empty(batch, n_segment, channels, d_state, **options)
        launch(
            _scan_bwd_state_kernel, (blocks, n_segment, batch), dt, rate, c, z, dy, sent, *dt.stride()[:2],
            *c.stride()[:2],
            *z_strides, *dy.stride()[:2], channels, seq, n_segment, segment, D_STATE=d_state,
            HAS_Z=z is not None, **block,
        )  # fmt: skip
        _carry(sent, total, rate, entry, dstate, True)
        entry = sent
    du, ddt = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (u, dt))
    dz = None if z is None else torch.empty(z.shape, dtype=z.dtype, device=z.device)
    drate = torch.empty(batch, n_segment, channels, d_state, **options)
    db, dc = torch.empty(2, blocks, batch, seq, d_state, **options)
    dd = None if d is None else torch.empty(batch, n_segment, channels, **options)
    launch(
        _scan_bwd_kernel, (blocks, n_segment, batch), u, dt, rate, b, c, d, z, dy, kept, entry, du, ddt,
        drate, db, dc, dd, dz,
        dstate, *u.stride()[:2], *dt.stride()[:2], *b.stride()[:2], *c.stride()[:2], *z_strides,
        *dy.stride()[:2], channels,
        seq, n_segment, segment, kept.shape[1], D_STATE=d_state, STEPS=STEPS, HAS_D=d is not None,
        HAS_Z=z is not None,
        HAS_LAST=entry is not None, SAVE_FIRST=n_segment == 1, **block,
    )  # fmt: skip
    da_log = (-scale * drate.sum((0, 1))).to(a_log.dtype)
    db, dc = db.sum(0).to(b.dtype), dc.sum(0).to(c.dtype)
    none = torch.empty(0, **options)
    dd = none if dd is None else dd.sum((0, 1)).to(d.dtype)
    return du, ddt, da_log, db, dc, dd, none.clone() if dz is None else dz, dstate


def _fake(
    u: Tensor, dt: Tensor, a_log: Tensor, b: Tensor, c: Tensor, d: Tensor | None, z: Tensor | None,
    state: Tensor | None,
    keep: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    batch, seq, channels = u.shape
    n_segment = _plan(u, a_log.shape[1])[1]
    new = functools.partial(u.new_empty, dtype=torch.float32)
    kept = u.new_empty(batch, -(-seq // STEPS) if keep else 0, channels, a_log.shape[1])
    total = new((batch, n_segment, channels)) if n_segment > 1 else new((0,))
    return u.new_empty(u.shape), new((batch, channels, a_log.shape[1])), kept, total


def _fake_backward(
    dy: Tensor, dlast: Tensor | None, u: Tensor, dt: Tensor, a_log: Tensor, b: Tensor, c: Tensor,
    d: Tensor | None,
    z: Tensor | None, kept: Tensor, total: Tensor,
) -> tuple[Tensor, ...]:  # fmt: skip
    none = total.new_empty(0)
    always = (x.new_empty(x.shape) for x in (u, dt, a_log, b, c))
    optional = (none.new_empty(0) if x is None else x.new_empty(x.shape) for x in (d, z))
    return *always, *optional, none.new_empty(u.shape[0], u.shape[2], a_log.shape[1])


def _setup(ctx: Any, inputs: tuple, output: tuple) -> None:
    ctx.set_materialize_grads(False)
    ctx.has_state = inputs[7] is not None
    ctx.save_for_backward(*inputs[:7], *output[2:])


def _gradient(ctx: Any, dy: Tensor | None, dlast: Tensor | None, *unused: Any) -> tuple:
    inputs, kept = ctx.saved_tensors[:7], ctx.saved_tensors[7:]
    dy = inputs[0].new_zeros(inputs[0].shape) if dy is None else dy
    found = torch.ops.beyond_softmax.selective_scan_backward(dy, dlast, *inputs, *kept)
    present = [*(x is not None for x in inputs), ctx.has_state]
    return *(dx if there else None for there, dx in zip(present, found, strict=True)), None


_INPUTS = "Tensor u, Tensor dt, Tensor a_log, Tensor b, Tensor c, Tensor? d, Tensor? z"
register(
    f"selective_scan({_INPUTS}, Tensor? state, bool keep) -> (Tensor, Tensor, Tensor, Tensor)", _forward,
    _fake
)
register(
    f"selective_scan_backward(Tensor dy, Tensor? dlast, {_INPUTS}, Tensor kept, Tensor total) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _backward,
    _fake_backward,
)
differentiable("selective_scan", _setup, _gradient)
differentiable_once("selective_scan_backward")
