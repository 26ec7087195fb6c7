"""SiLU(gate) times values that lie side by side on a GPU: one pass each way, gradients side by side too."""

import typing
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.launch import launch, power_of_two, rows
from kernels.triton.ops import differentiable, differentiable_once, operators, register


@triton.jit
@typing.no_type_check
def _packed_gated_silu_fwd_kernel(
    h_ptr, y_ptr, stride_h_row, n_row, width, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr
):  # fmt: skip
    """A tile of the output; gates are the first half of a row of h."""
    offs_r = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    offs_c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    mask = (offs_r < n_row)[:, None] & (offs_c < width)[None, :]
    h_ptrs = h_ptr + offs_r[:, None] * stride_h_row + offs_c[None, :]
    b_gate = tl.load(h_ptrs, mask=mask, other=0.0).to(tl.float32)
    b_x = tl.load(h_ptrs + width, mask=mask, other=0.0).to(tl.float32)
    b_y = b_x * b_gate / (1 + tl.exp(-b_gate))
    tl.store(y_ptr + offs_r[:, None] * width + offs_c[None, :], b_y, mask=mask)


@triton.jit
@typing.no_type_check
def _packed_gated_silu_bwd_kernel(
    dy_ptr, h_ptr, dh_ptr, stride_dy_row, stride_h_row, n_row, width, BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):  # fmt: skip
    """A tile of the gradients of gates and of values."""
    offs_r = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    offs_c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    mask = (offs_r < n_row)[:, None] & (offs_c < width)[None, :]
    h_ptrs = h_ptr + offs_r[:, None] * stride_h_row + offs_c[None, :]
    b_gate = tl.load(h_ptrs, mask=mask, other=0.0).to(tl.float32)
    b_x = tl.load(h_ptrs + width, mask=mask, other=0.0).to(tl.float32)
    b_dy = tl.load(dy_ptr + offs_r[:, None] * stride_dy_row + offs_c[None, :], mask=mask, other=0.0)
    b_dy = b_dy.to(tl.float32)
    b_sigmoid = 1 / (1 + tl.exp(-b_gate))
    dh_ptrs = dh_ptr + offs_r[:, None] * (2 * width) + offs_c[None, :]
    tl.store(dh_ptrs, b_dy * b_x * b_sigmoid * (1 + b_gate * (1 - b_sigmoid)), mask=mask)
    tl.store(dh_ptrs + width, b_dy * b_gate * b_sigmoid, mask=mask)


def packed_gated_silu(h: Tensor) -> Tensor:
    """[row width] SiLU of the first half of [row 2*width] times the second."""
    return operators.packed_gated_silu(h)


def _tiles(n_row: int, width: int) -> tuple[tuple[int, int], dict[str, int]]:
    block_c = min(power_of_two(width), 256)
    block_r = max(1, 1024 // block_c)
    grid = -(-n_row // block_r), -(-width // block_c)
    return grid, {"BLOCK_R": block_r, "BLOCK_C": block_c, "num_warps": 4}


def _forward(h: Tensor) -> Tensor:
    h = rows(h)
    n_row, width = h.shape[0], h.shape[1] // 2
    y = torch.empty(n_row, width, dtype=h.dtype, device=h.device)
    grid, block = _tiles(n_row, width)
    launch(_packed_gated_silu_fwd_kernel, grid, h, y, h.stride(0), n_row, width, **block)
    return y


def _backward(dy: Tensor, h: Tensor) -> Tensor:
    dy, h = rows(dy), rows(h)
    n_row, width = dy.shape
    dh = torch.empty(h.shape, dtype=h.dtype, device=h.device)
    grid, block = _tiles(n_row, width)
    launch(
        _packed_gated_silu_bwd_kernel, grid, dy, h, dh, dy.stride(0), h.stride(0), n_row, width, **block
    )
    return dh


def _setup(ctx: Any, inputs: tuple, output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _gradient(ctx: Any, dy: Tensor) -> Tensor:
    return operators.packed_gated_silu_backward(dy, *ctx.saved_tensors)


register(
    "packed_gated_silu(Tensor h) -> Tensor",
    _forward,
    lambda h: h.new_empty(h.shape[0], h.shape[1] // 2),
)
register(
    "packed_gated_silu_backward(Tensor dy, Tensor h) -> Tensor", _backward, lambda dy, h: h.new_empty(h.shape)
)
differentiable("packed_gated_silu", _setup, _gradient)
differentiable_once("packed_gated_silu_backward")
