"""Mamba-1's selective scan on a GPU, forward and backward, with the skip D and the gate z inside.

Source: Gu and Dao 2023, arXiv:2312.00752. Differs: segments of the sequence run in parallel,
initial and last
states have
gradients, and sums over channels are added up in a fixed order.
"""

import functools
from typing import Any

import torch
from torch import Tensor

from kernels.triton.launch import check_dtype, check_width, launch, power_of_two, processors, rows
from kernels.triton.ops import differentiable, differentiable_once, operators, register
from kernels.triton.selective_scan_backward import _scan_bwd_kernel
from kernels.triton.selective_scan_forward import _scan_fwd_output_kernel
from kernels.triton.selective_scan_segments import (
    _scan_bwd_state_kernel,
    _scan_carry_kernel,
    _scan_fwd_state_kernel,
)
from kernels.triton.selective_scan_sums import (
    _scan_bwd_parameter_kernel,
    _scan_bwd_shared_kernel,
    _scan_shared_kernel,
)

OPERATOR = "selective_scan"

# Steps of a block, also between two kept states (float32: rounded ones show in dA and dC); lanes of a warp
# along states and channels in the main backward kernel, whose rows of lanes are those steps.
STEPS = N_LANES = 4
C_LANES = 8
# Most states of a thread in the other kernels.
STATES = 32
# Groups of channels and most states at a time of the main backward kernel.
C_REPEAT = 4
CHUNK = 16
# Warps that are wanted for every multiprocessor: segments are made until there are as many.
WARPS = 16


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
        u, dt, z: [batch seq channel], dt after softplus; A_log: [channel d_state]; B,
        C: [batch seq d_state].
        D: [channel]; state: [batch channel d_state] float32.

    Returns:
        (y [batch seq channel], state after the last step, float32), both differentiable.
    """
    check_dtype(OPERATOR, u)
    check_width(OPERATOR, "d_state", A_log.shape[1])
    state = None if state is None else state.float()
    tensors = (u, dt, A_log, B, C, D, z, state)
    keep = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
    y, last, *_ = operators.selective_scan(*tensors, keep)
    return y, last


def _width(d_state: int) -> int:
    """States that a tile holds."""
    return power_of_two(d_state, N_LANES)


def _tiles(d_state: int) -> dict[str, int]:
    """Tiles of a one-warp program: a thread holds all states of a channel, up to STATES."""
    lanes = max(1, _width(d_state) // STATES)
    return {"GROUPS": _width(d_state) // (4 * lanes), "WIDTH": 4 * lanes, "BLOCK_C": 32 // lanes,
        "STEPS": STEPS}  # fmt: skip


def _backward_tiles(d_state: int) -> dict[str, int]:
    """Tiles of the main backward kernel, 4 x 8 lanes of states and channels."""
    width = _width(d_state)
    groups = C_REPEAT if width <= CHUNK else min(2, C_REPEAT)
    return {"C_REPEAT": groups, "N_REPEAT": min(width, CHUNK) // N_LANES, "CHUNKS": max(1, width // CHUNK),
        "C_LANES": C_LANES, "N_LANES": N_LANES}  # fmt: skip


def _plan(u: Tensor, d_state: int) -> tuple[int, int, int]:
    """(blocks of channels, number of segments, their length): about WARPS warps for every multiprocessor."""
    batch, seq, channels = u.shape
    blocks = -(-channels // _tiles(d_state)["BLOCK_C"])
    wanted = max(1, WARPS * processors(u.device) // max(1, batch * -(-channels // 32)))
    if wanted < 2 or seq < 64:
        return blocks, 1, max(1, -(-seq // STEPS)) * STEPS
    segment = max(32, -(-seq // (wanted * STEPS)) * STEPS)
    return blocks, -(-seq // segment), segment


def _padded(seq: int) -> int:
    """Whole blocks of steps."""
    return -(-seq // STEPS) * STEPS


def _kept_shape(u: Tensor, d_state: int) -> tuple[int, ...]:
    return u.shape[0], _padded(u.shape[1]) // STEPS, _width(d_state) // 4, u.shape[2], 4


def _shared(b: Tensor, c: Tensor) -> Tensor:
    """B and C side by side in float32, with a row before the first and one after the last to load ahead."""
    batch, seq, d_state = b.shape
    padded, width = _padded(seq), _width(d_state)
    whole = torch.empty(batch * padded + 2, 2, width, dtype=torch.float32, device=b.device)
    found = whole[1:-1].view(batch, padded, 2, width)
    block = max(1, 1024 // width)
    launch(
        _scan_shared_kernel, (-(-padded // block), batch), b, c, found, b.stride(0), b.stride(1), c.stride(0),
        c.stride(1), seq, padded, D_STATE=d_state, BLOCK_N=width, BLOCK=block, num_warps=4,
    )  # fmt: skip
    return found


def _forward(
    u: Tensor, dt: Tensor, a_log: Tensor, b: Tensor, c: Tensor, d: Tensor | None, z: Tensor | None,
    state: Tensor | None, keep: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """(y, last state, kept states, sums of dt of the segments); what does not apply is empty."""
    u, dt, b, c, z = (None if x is None else rows(x) for x in (u, dt, b, c, z))
    a_log = a_log.contiguous()
    batch, seq, channels = u.shape
    d_state = a_log.shape[1]
    blocks, n_segment, segment = _plan(u, d_state)
    shared = _shared(b, c)
    options = {"dtype": torch.float32, "device": u.device}
    last = torch.empty(batch, channels, d_state, **options)
    first = None if state is None else state.contiguous()
    z_strides = (0, 0) if z is None else z.stride()[:2]
    total = torch.empty(0, **options)
    if n_segment > 1:
        entries = torch.empty(batch, n_segment, channels, d_state, **options)
        total = torch.empty(batch, n_segment, channels, **options)
        launch(
            _scan_fwd_state_kernel, (blocks, n_segment, batch), u, dt, a_log, shared, entries, total,
            u.stride(0), dt.stride(0), seq, n_segment, segment, STRIDE_U_T=u.stride(1),
            STRIDE_DT_T=dt.stride(1), N_CHANNEL=channels, D_STATE=d_state, **_tiles(d_state), num_warps=1,
        )  # fmt: skip
        _carry(entries, total, a_log, first, last, False)
        first = entries
    kept = torch.empty(_kept_shape(u, d_state) if keep else (0,), **options)
    y = torch.empty(batch, seq, channels, dtype=u.dtype, device=u.device)
    launch(
        _scan_fwd_output_kernel, (blocks, n_segment, batch), u, dt, a_log, shared, d, z, first, y, kept, last,
        u.stride(0), dt.stride(0), z_strides[0], seq, n_segment, segment, STRIDE_U_T=u.stride(1),
        STRIDE_DT_T=dt.stride(1), STRIDE_Z_T=z_strides[1], N_CHANNEL=channels, D_STATE=d_state,
        **_tiles(d_state), HAS_D=d is not None, HAS_Z=z is not None, HAS_FIRST=first is not None, KEEP=keep,
        SAVE_LAST=n_segment == 1, num_warps=1,
    )  # fmt: skip
    return y, last, kept, total


def _carry(
    h: Tensor, total: Tensor, a_log: Tensor, first: Tensor | None, last: Tensor, reverse: bool
) -> None:
    size = a_log.numel()
    launch(
        _scan_carry_kernel, (-(-size // 128), h.shape[0]), h, total, a_log, first, last, size,
        a_log.shape[0], h.shape[1], D_STATE=a_log.shape[1], BLOCK=128, REVERSE=reverse,
        HAS_FIRST=first is not None, num_warps=1,
    )  # fmt: skip


def _backward(
    dy: Tensor, dlast: Tensor | None, u: Tensor, dt: Tensor, a_log: Tensor, b: Tensor, c: Tensor,
    d: Tensor | None, z: Tensor | None, kept: Tensor, total: Tensor,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Gradients of (u, dt, A_log, B, C, D, z, state); what does not apply is empty."""
    u, dt, b, c, z, dy = (None if x is None else rows(x) for x in (u, dt, b, c, z, dy))
    a_log = a_log.contiguous()
    batch, seq, channels = u.shape
    d_state = a_log.shape[1]
    blocks, n_segment, segment = _plan(u, d_state)
    options = {"dtype": torch.float32, "device": u.device}
    shared = _shared(b, c)
    entry = None if dlast is None else dlast.contiguous()
    dstate = torch.empty(batch, channels, d_state, **options)
    z_strides = (0, 0) if z is None else z.stride()[:2]
    if n_segment > 1:
        sent = torch.empty(batch, n_segment, channels, d_state, **options)
        launch(
            _scan_bwd_state_kernel, (blocks, n_segment, batch), dt, a_log, shared, z, dy, sent, dt.stride(0),
            z_strides[0], dy.stride(0), seq, n_segment, segment, STRIDE_DT_T=dt.stride(1),
            STRIDE_Z_T=z_strides[1], STRIDE_DY_T=dy.stride(1), N_CHANNEL=channels, D_STATE=d_state,
            **_tiles(d_state), HAS_Z=z is not None, num_warps=1,
        )  # fmt: skip
        _carry(sent, total, a_log, entry, dstate, True)
        entry = sent
    du, ddt = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (u, dt))
    dz = torch.empty(0, **options) if z is None else torch.empty(z.shape, dtype=z.dtype, device=z.device)
    drate = torch.empty(batch, n_segment, channels, d_state, **options)
    tiles = _backward_tiles(d_state)
    blocks = -(-channels // (tiles["C_REPEAT"] * C_LANES))
    parts = torch.empty(blocks, *shared.shape, **options)
    sums = torch.empty(3, *u.shape, **options) if tiles["CHUNKS"] > 1 else None
    dd = None if d is None else torch.empty(batch, n_segment, channels, **options)
    launch(
        _scan_bwd_kernel, (blocks, n_segment, batch), u, dt, a_log, shared, d, z, dy, kept, entry, du, ddt,
        drate, parts, dd, dz, dstate, sums, u.stride(0), dt.stride(0), z_strides[0], dy.stride(0), seq,
        n_segment, segment, STRIDE_U_T=u.stride(1), STRIDE_DT_T=dt.stride(1), STRIDE_Z_T=z_strides[1],
        STRIDE_DY_T=dy.stride(1), N_CHANNEL=channels, D_STATE=d_state, HAS_D=d is not None,
        HAS_Z=z is not None, HAS_LAST=entry is not None, SAVE_FIRST=n_segment == 1, **tiles, num_warps=1,
    )  # fmt: skip
    da_log, dd = _parameter_gradients(drate, dd, a_log, d)
    db, dc = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (b, c))
    padded, width = shared.shape[1], shared.shape[3]
    block = max(1, 256 // width)
    launch(
        _scan_bwd_shared_kernel, (-(-padded // block), batch), parts, db, dc, seq, padded, shared.numel(),
        blocks, D_STATE=d_state, BLOCK_N=width, BLOCK=block, num_warps=4,
    )  # fmt: skip
    return du, ddt, da_log, db, dc, dd, dz, dstate


def _parameter_gradients(
    drate: Tensor, dd_parts: Tensor | None, a_log: Tensor, d: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Gradients of A_log and D (empty without one) from those of sequences and segments."""
    da_log = torch.empty(a_log.shape, dtype=a_log.dtype, device=a_log.device)
    like = a_log.new_empty(0, dtype=torch.float32) if d is None else d
    dd = torch.empty(like.shape, dtype=like.dtype, device=like.device)
    launch(
        _scan_bwd_parameter_kernel, (-(-a_log.numel() // 32),), drate, dd_parts, a_log, da_log, dd,
        a_log.numel(), a_log.shape[0], drate.shape[0] * drate.shape[1], BLOCK=32, ROWS=64,
        HAS_D=d is not None, num_warps=4,
    )  # fmt: skip
    return da_log, dd


def _fake(
    u: Tensor, dt: Tensor, a_log: Tensor, b: Tensor, c: Tensor, d: Tensor | None, z: Tensor | None,
    state: Tensor | None, keep: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    batch, seq, channels = u.shape
    _, n_segment, _ = _plan(u, a_log.shape[1])
    new = functools.partial(u.new_empty, dtype=torch.float32)
    kept = new(_kept_shape(u, a_log.shape[1]) if keep else (0,))
    total = new((batch, n_segment, channels)) if n_segment > 1 else new((0,))
    return u.new_empty(u.shape), new((batch, channels, a_log.shape[1])), kept, total


def _fake_backward(
    dy: Tensor, dlast: Tensor | None, u: Tensor, dt: Tensor, a_log: Tensor, b: Tensor, c: Tensor,
    d: Tensor | None, z: Tensor | None, kept: Tensor, total: Tensor,
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
    # Read once: activation checkpointing unpacks what is saved only once.
    saved = ctx.saved_tensors
    inputs, kept = saved[:7], saved[7:]
    dy = inputs[0].new_zeros(inputs[0].shape) if dy is None else dy
    found = operators.selective_scan_backward(dy, dlast, *inputs, *kept)
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
