"""RMSNorm on a GPU, of x, of x SiLU(gate) or of x + delta, written in the dtype that is wanted: one pass
each way.

Compared with float64 in Triton's interpreter and on an H200: plain, with a gate and after an addition.
"""

import typing
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.column_sums import column_sums
from kernels.triton.launch import launch, power_of_two, rows
from kernels.triton.ops import differentiable, differentiable_once, operators, register

# Programs of the backward, twice as many with a gate; each adds up the gain's gradient over its rows.
PROGRAMS = 528


@triton.jit
@typing.no_type_check
def _rms_norm_fwd_kernel(
    x_ptr, gate_ptr, delta_ptr, w_ptr, total_ptr, y_ptr, scale_ptr, stride_x_row, stride_gate_row,
    stride_delta_row, n_row, width, eps,
    HAS_GATE: tl.constexpr, HAS_DELTA: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """A tile of rows: output, 1 / root mean square, and the sum of x and delta where there is one."""
    offs_r = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    offs_d = tl.arange(0, BLOCK_D)
    mask = (offs_r < n_row)[:, None] & (offs_d < width)[None, :]
    at = offs_r[:, None] * width + offs_d[None, :]
    b_x = tl.load(x_ptr + offs_r[:, None] * stride_x_row + offs_d[None, :], mask=mask, other=0.0)
    b_x = b_x.to(tl.float32)
    if HAS_GATE:
        b_gate = tl.load(gate_ptr + offs_r[:, None] * stride_gate_row + offs_d[None, :], mask=mask, other=0.0)
        b_gate = b_gate.to(tl.float32)
        b_x = b_x * b_gate / (1 + tl.exp(-b_gate))
    if HAS_DELTA:
        delta_ptrs = delta_ptr + offs_r[:, None] * stride_delta_row + offs_d[None, :]
        b_total = (b_x + tl.load(delta_ptrs, mask=mask, other=0.0)).to(total_ptr.dtype.element_ty)
        tl.store(total_ptr + at, b_total, mask=mask)
        b_x = b_total.to(tl.float32)
    b_scale = 1 / tl.sqrt(tl.sum(b_x * b_x, 1) / width + eps)
    b_w = tl.load(w_ptr + offs_d, mask=offs_d < width, other=0.0).to(tl.float32)
    b_y = b_x * b_scale[:, None] * b_w[None, :]
    tl.store(y_ptr + at, b_y, mask=mask)
    tl.store(scale_ptr + offs_r, b_scale, mask=offs_r < n_row)


@triton.jit
@typing.no_type_check
def _rms_norm_bwd_kernel(
    dy_ptr, dtotal_ptr, x_ptr, gate_ptr, w_ptr, scale_ptr, dx_ptr, dgate_ptr, ddelta_ptr, dw_ptr,
    stride_dy_row, stride_dtotal_row, stride_x_row, stride_gate_row, stride_dgate_row, n_row, width, n_tile,
    HAS_GATE: tl.constexpr, HAS_DTOTAL: tl.constexpr, HAS_DDELTA: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Every n_program-th tile of rows: gradients of x (also as delta's, in its dtype) and gate, with what
    comes from the sum itself added, and this program's share of the gain's."""
    offs_d = tl.arange(0, BLOCK_D)
    b_w = tl.load(w_ptr + offs_d, mask=offs_d < width, other=0.0).to(tl.float32)
    # A sum for each row of a tile: one reduction across threads, at the end.
    b_dw = tl.zeros([BLOCK_R, BLOCK_D], tl.float32)
    for tile in tl.range(tl.program_id(0), n_tile, tl.num_programs(0)):
        offs_r = (tile * BLOCK_R + tl.arange(0, BLOCK_R)).to(tl.int64)
        mask = (offs_r < n_row)[:, None] & (offs_d < width)[None, :]
        b_dy = tl.load(dy_ptr + offs_r[:, None] * stride_dy_row + offs_d[None, :], mask=mask, other=0.0)
        b_x = tl.load(x_ptr + offs_r[:, None] * stride_x_row + offs_d[None, :], mask=mask, other=0.0)
        if HAS_DTOTAL:
            dtotal_ptrs = dtotal_ptr + offs_r[:, None] * stride_dtotal_row + offs_d[None, :]
            b_dtotal = tl.load(dtotal_ptrs, mask=mask, other=0.0)
        b_dy, b_x = b_dy.to(tl.float32), b_x.to(tl.float32)
        b_normed = b_x
        if HAS_GATE:
            b_gate = tl.load(
                gate_ptr + offs_r[:, None] * stride_gate_row + offs_d[None, :], mask=mask, other=0.0
            ).to(tl.float32)
            b_sigmoid = 1 / (1 + tl.exp(-b_gate))
            b_normed = b_x * b_gate * b_sigmoid
        b_scale = tl.load(scale_ptr + offs_r, mask=offs_r < n_row, other=0.0)
        b_normed = b_normed * b_scale[:, None]
        b_dw += b_dy * b_normed
        b_pull = b_dy * b_w[None, :]
        b_along = tl.sum(b_pull * b_normed, 1) / width
        b_dx = (b_pull - b_normed * b_along[:, None]) * b_scale[:, None]
        at = offs_r[:, None] * width + offs_d[None, :]
        if HAS_GATE:
            b_dgate = b_dx * b_x * b_sigmoid * (1 + b_gate * (1 - b_sigmoid))
            dgate_ptrs = dgate_ptr + offs_r[:, None] * stride_dgate_row + offs_d[None, :]
            tl.store(dgate_ptrs, b_dgate, mask=mask)
            b_dx = b_dx * b_gate * b_sigmoid
        if HAS_DTOTAL:
            b_dx += b_dtotal
        tl.store(dx_ptr + at, b_dx, mask=mask)
        if HAS_DDELTA:
            tl.store(ddelta_ptr + at, b_dx, mask=mask)
    tl.store(dw_ptr + tl.program_id(0) * width + offs_d, tl.sum(b_dw, 0), mask=offs_d < width)


def rms_norm(x: Tensor, w: Tensor, eps: float, *, gate: Tensor | None = None, dtype: torch.dtype) -> Tensor:
    """[row width] x or x SiLU(gate) over its root mean square, times the gain w, as `dtype`."""
    return operators.rms_norm(x, gate, w, eps, dtype)[0]


def add_rms_norm(
    x: Tensor, delta: Tensor, w: Tensor, eps: float, *, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """[row width] x + delta, and that over its root mean square, times the gain w, as `dtype`."""
    return operators.add_rms_norm(x, delta, w, eps, dtype)[:2]


def _block(width: int) -> dict[str, int]:
    block_d = power_of_two(width)
    return {"BLOCK_R": max(1, 2048 // block_d), "BLOCK_D": block_d, "num_warps": 4 if block_d < 2048 else 8}


def _stride(x: Tensor | None) -> int:
    return 0 if x is None else x.stride(0)


def _forward(
    x: Tensor, gate: Tensor | None, w: Tensor, eps: float, dtype: torch.dtype, delta: Tensor | None = None
) -> tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]:
    x, gate, delta = rows(x), None if gate is None else rows(gate), None if delta is None else rows(delta)
    n_row, width = x.shape
    y = torch.empty(n_row, width, dtype=dtype, device=x.device)
    scale = torch.empty(n_row, dtype=torch.float32, device=x.device)
    total = None
    if delta is not None:
        total = torch.empty(n_row, width, dtype=torch.promote_types(x.dtype, delta.dtype), device=x.device)
    block = _block(width)
    launch(
        _rms_norm_fwd_kernel, (-(-n_row // block["BLOCK_R"]),), x, gate, delta, w, total, y, scale,
        x.stride(0), _stride(gate), _stride(delta), n_row, width, eps, HAS_GATE=gate is not None,
        HAS_DELTA=delta is not None, **block,
    )  # fmt: skip
    return (y, scale) if total is None else (total, y, scale)


def _backward(
    dy: Tensor, x: Tensor, gate: Tensor | None, w: Tensor, scale: Tensor, *, dtotal: Tensor | None = None,
    dtypes: tuple[torch.dtype, torch.dtype] | None = None, into: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of (x, gate, w); the gate's is empty where there is none, and written `into` a slice of a
    wider tensor if that is given.

    With `dtypes`, those of x and of what was added to it, x is their sum, dtotal its own gradient, and the
    gradients are of (x, delta, w); delta's is empty where it is that of x.
    """
    dy, x, gate = rows(dy), rows(x), None if gate is None else rows(gate)
    dtotal = None if dtotal is None else rows(dtotal)
    n_row, width = x.shape
    block = _block(width)
    n_tile = -(-n_row // block["BLOCK_R"])
    programs = min(n_tile, PROGRAMS if gate is None else 2 * PROGRAMS)
    wanted, other = dtypes or (x.dtype, x.dtype)
    dx = torch.empty(n_row, width, dtype=wanted, device=x.device)
    second = into
    if into is None and gate is not None:
        second = torch.empty(n_row, width, dtype=gate.dtype, device=x.device)
    if wanted != other:
        second = torch.empty(n_row, width, dtype=other, device=x.device)
    dw = torch.empty(programs, width, dtype=torch.float32, device=x.device)
    launch(
        _rms_norm_bwd_kernel, (programs,), dy, dtotal, x, gate, w, scale, dx, second, second, dw,
        dy.stride(0), _stride(dtotal), x.stride(0), _stride(gate), _stride(second), n_row, width, n_tile,
        HAS_GATE=gate is not None, HAS_DTOTAL=dtotal is not None, HAS_DDELTA=wanted != other, **block,
    )  # fmt: skip
    return dx, x.new_empty(0) if second is None else second, column_sums(dw, w.dtype)


def _add_forward(
    x: Tensor, delta: Tensor, w: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    return _forward(x, None, w, eps, dtype, delta)


def _add_backward(
    dy: Tensor, dtotal: Tensor | None, total: Tensor, w: Tensor, scale: Tensor, x_dtype: torch.dtype,
    delta_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return _backward(dy, total, None, w, scale, dtotal=dtotal, dtypes=(x_dtype, delta_dtype))


def _fake(
    x: Tensor, gate: Tensor | None, w: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape, dtype=dtype), x.new_empty(x.shape[0], dtype=torch.float32)


def _fake_backward(
    dy: Tensor, x: Tensor, gate: Tensor | None, w: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    dgate = x.new_empty(0) if gate is None else gate.new_empty(gate.shape)
    return x.new_empty(x.shape), dgate, w.new_empty(w.shape)


def _setup(ctx: Any, inputs: tuple, output: tuple) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:3], output[1])


def _gradient(ctx: Any, dy: Tensor | None, unused: Any) -> tuple:
    x, gate, w, scale = ctx.saved_tensors
    if dy is None:
        return None, None, None, None, None
    dx, dgate, dw = operators.rms_norm_backward(dy, x, gate, w, scale)
    return dx, None if gate is None else dgate, dw, None, None


def _fake_add(
    x: Tensor, delta: Tensor, w: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    total = x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, delta.dtype))
    return total, *_fake(x, None, w, eps, dtype)


def _fake_add_backward(
    dy: Tensor, dtotal: Tensor | None, total: Tensor, w: Tensor, scale: Tensor, x_dtype: torch.dtype,
    delta_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    ddelta = total.new_empty(0 if x_dtype == delta_dtype else total.shape, dtype=delta_dtype)
    return total.new_empty(total.shape, dtype=x_dtype), ddelta, w.new_empty(w.shape)


def _setup_add(ctx: Any, inputs: tuple, output: tuple) -> None:
    ctx.set_materialize_grads(False)
    x, delta, w, *_ = inputs
    ctx.dtypes = x.dtype, delta.dtype
    total, _, scale = output
    ctx.save_for_backward(total, w, scale)


def _gradient_add(ctx: Any, dtotal: Tensor | None, dy: Tensor | None, unused: Any) -> tuple:
    total, w, scale = ctx.saved_tensors
    x_dtype, delta_dtype = ctx.dtypes
    if dy is None:
        both = (None, None) if dtotal is None else (dtotal.to(x_dtype), dtotal.to(delta_dtype))
        return *both, None, None, None
    dx, ddelta, dw = operators.add_rms_norm_backward(dy, dtotal, total, w, scale, x_dtype, delta_dtype)
    return dx, dx if x_dtype == delta_dtype else ddelta, dw, None, None


register(
    "rms_norm(Tensor x, Tensor? gate, Tensor w, float eps, ScalarType dtype) -> (Tensor, Tensor)",
    _forward,
    _fake,
)
register(
    "rms_norm_backward(Tensor dy, Tensor x, Tensor? gate, Tensor w, Tensor scale) "
    "-> (Tensor, Tensor, Tensor)",
    _backward,
    _fake_backward,
)
differentiable("rms_norm", _setup, _gradient)
differentiable_once("rms_norm_backward")
register(
    "add_rms_norm(Tensor x, Tensor delta, Tensor w, float eps, ScalarType dtype) -> (Tensor, Tensor, Tensor)",
    _add_forward,
    _fake_add,
)
register(
    "add_rms_norm_backward(Tensor dy, Tensor? dtotal, Tensor total, Tensor w, Tensor scale, "
    "ScalarType x_dtype, ScalarType delta_dtype) -> (Tensor, Tensor, Tensor)",
    _add_backward,
    _fake_add_backward,
)
differentiable("add_rms_norm", _setup_add, _gradient_add)
differentiable_once("add_rms_norm_backward")
