"""RMSNorm on a GPU, of x or of x SiLU(gate), written in the dtype that is wanted: one pass each way.

Compared with float64 in Triton's interpreter and on an H200, with a gate and without.
"""

import typing
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.launch import launch, power_of_two, rows
from kernels.triton.ops import differentiable, differentiable_once, operators, register

# Programs of the backward, each of which adds up the gain's gradient over its rows.
PROGRAMS = 528


@triton.jit
@typing.no_type_check
def _rms_norm_fwd_kernel(
    x_ptr, gate_ptr, w_ptr, y_ptr, scale_ptr, stride_x_row, stride_gate_row, n_row, width, eps,
    HAS_GATE: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """A tile of rows: output, and 1 / root mean square."""
    offs_r = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    offs_d = tl.arange(0, BLOCK_D)
    mask = (offs_r < n_row)[:, None] & (offs_d < width)[None, :]
    b_x = tl.load(x_ptr + offs_r[:, None] * stride_x_row + offs_d[None, :], mask=mask, other=0.0)
    b_x = b_x.to(tl.float32)
    if HAS_GATE:
        b_gate = tl.load(gate_ptr + offs_r[:, None] * stride_gate_row + offs_d[None, :], mask=mask, other=0.0)
        b_gate = b_gate.to(tl.float32)
        b_x = b_x * b_gate / (1 + tl.exp(-b_gate))
    b_scale = 1 / tl.sqrt(tl.sum(b_x * b_x, 1) / width + eps)
    b_w = tl.load(w_ptr + offs_d, mask=offs_d < width, other=0.0).to(tl.float32)
    b_y = b_x * b_scale[:, None] * b_w[None, :]
    tl.store(y_ptr + offs_r[:, None] * width + offs_d[None, :], b_y, mask=mask)
    tl.store(scale_ptr + offs_r, b_scale, mask=offs_r < n_row)


@triton.jit
@typing.no_type_check
def _rms_norm_bwd_kernel(
    dy_ptr, x_ptr, gate_ptr, w_ptr, scale_ptr, dx_ptr, dgate_ptr, dw_ptr, stride_dy_row, stride_x_row,
    stride_gate_row, n_row, width, n_tile,
    HAS_GATE: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Every n_program-th tile of rows: gradients of x and gate, and this program's share of the gain's."""
    offs_d = tl.arange(0, BLOCK_D)
    b_w = tl.load(w_ptr + offs_d, mask=offs_d < width, other=0.0).to(tl.float32)
    b_dw = tl.zeros([BLOCK_D], tl.float32)
    for tile in tl.range(tl.program_id(0), n_tile, tl.num_programs(0)):
        offs_r = (tile * BLOCK_R + tl.arange(0, BLOCK_R)).to(tl.int64)
        mask = (offs_r < n_row)[:, None] & (offs_d < width)[None, :]
        b_dy = tl.load(dy_ptr + offs_r[:, None] * stride_dy_row + offs_d[None, :], mask=mask, other=0.0)
        b_x = tl.load(x_ptr + offs_r[:, None] * stride_x_row + offs_d[None, :], mask=mask, other=0.0)
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
        b_dw += tl.sum(b_dy * b_normed, 0)
        b_pull = b_dy * b_w[None, :]
        b_along = tl.sum(b_pull * b_normed, 1) / width
        b_dx = (b_pull - b_normed * b_along[:, None]) * b_scale[:, None]
        at = offs_r[:, None] * width + offs_d[None, :]
        if HAS_GATE:
            b_dgate = b_dx * b_x * b_sigmoid * (1 + b_gate * (1 - b_sigmoid))
            tl.store(dgate_ptr + at, b_dgate, mask=mask)
            b_dx = b_dx * b_gate * b_sigmoid
        tl.store(dx_ptr + at, b_dx, mask=mask)
    tl.store(dw_ptr + tl.program_id(0) * width + offs_d, b_dw, mask=offs_d < width)


def rms_norm(x: Tensor, w: Tensor, eps: float, *, gate: Tensor | None = None, dtype: torch.dtype) -> Tensor:
    """[row width] x or x SiLU(gate) over its root mean square, times the gain w, as `dtype`."""
    return operators.rms_norm(x, gate, w, eps, dtype)[0]


def _block(width: int) -> dict[str, int]:
    block_d = power_of_two(width)
    return {"BLOCK_R": max(1, 2048 // block_d), "BLOCK_D": block_d, "num_warps": 4 if block_d <= 4096 else 8}


def _forward(
    x: Tensor, gate: Tensor | None, w: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    x, gate = rows(x), None if gate is None else rows(gate)
    n_row, width = x.shape
    y = torch.empty(n_row, width, dtype=dtype, device=x.device)
    scale = torch.empty(n_row, dtype=torch.float32, device=x.device)
    block = _block(width)
    launch(
        _rms_norm_fwd_kernel, (-(-n_row // block["BLOCK_R"]),), x, gate, w, y, scale, x.stride(0),
        0 if gate is None else gate.stride(0), n_row, width, eps, HAS_GATE=gate is not None, **block,
    )  # fmt: skip
    return y, scale


def _backward(
    dy: Tensor, x: Tensor, gate: Tensor | None, w: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of (x, gate, w); the gate's is empty where there is none."""
    dy, x, gate = rows(dy), rows(x), None if gate is None else rows(gate)
    n_row, width = x.shape
    block = _block(width)
    n_tile = -(-n_row // block["BLOCK_R"])
    programs = min(n_tile, PROGRAMS)
    dx = torch.empty(n_row, width, dtype=x.dtype, device=x.device)
    dgate = x.new_empty(0) if gate is None else torch.empty(n_row, width, dtype=gate.dtype, device=x.device)
    dw = torch.empty(programs, width, dtype=torch.float32, device=x.device)
    launch(
        _rms_norm_bwd_kernel, (programs,), dy, x, gate, w, scale, dx, dgate, dw, dy.stride(0), x.stride(0),
        0 if gate is None else gate.stride(0), n_row, width, n_tile, HAS_GATE=gate is not None, **block,
    )  # fmt: skip
    return dx, dgate, dw.sum(0).to(w.dtype)


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
