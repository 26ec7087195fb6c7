"""elu(x) + 1 on a GPU, one pass each way."""

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
def _elu_plus_one(b_x):
    """exp(x) for x <= 0, else x + 1; its derivative is min(y, 1)."""
    return tl.exp(tl.minimum(b_x, 0.0)) + tl.maximum(b_x, 0.0)


@triton.jit
@typing.no_type_check
def _elu_plus_one_fwd_kernel(
    x_ptr, y_ptr, stride_x_row, n_row, width, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr
):  # fmt: skip
    """A tile of rows and columns."""
    offs_r = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    offs_c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    mask = (offs_r < n_row)[:, None] & (offs_c < width)[None, :]
    b_x = tl.load(x_ptr + offs_r[:, None] * stride_x_row + offs_c[None, :], mask=mask, other=0.0)
    b_y = _elu_plus_one(b_x.to(tl.float32))
    tl.store(y_ptr + offs_r[:, None] * width + offs_c[None, :], b_y, mask=mask)


@triton.jit
@typing.no_type_check
def _elu_plus_one_bwd_kernel(
    dy_ptr, y_ptr, dx_ptr, stride_dy_row, n_row, width, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr
):  # fmt: skip
    """The derivative is min(y, 1)."""
    offs_r = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    offs_c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    mask = (offs_r < n_row)[:, None] & (offs_c < width)[None, :]
    at = offs_r[:, None] * width + offs_c[None, :]
    b_dy = tl.load(dy_ptr + offs_r[:, None] * stride_dy_row + offs_c[None, :], mask=mask, other=0.0)
    b_y = tl.load(y_ptr + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(dx_ptr + at, b_dy.to(tl.float32) * tl.minimum(b_y, 1.0), mask=mask)


def elu_plus_one(x: Tensor) -> Tensor:
    """elu(x) + 1 of [row channel] numbers."""
    return operators.elu_plus_one(x)


def _start(kernel: Any, x: Tensor, *rest: Tensor) -> None:
    n_row, width = x.shape
    block_c = min(power_of_two(width), 256)
    block_r = max(1, 1024 // block_c)
    grid = (-(-n_row // block_r), -(-width // block_c))
    launch(kernel, grid, x, *rest, x.stride(0), n_row, width, BLOCK_R=block_r, BLOCK_C=block_c, num_warps=4)


def _forward(x: Tensor) -> Tensor:
    x = rows(x)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _start(_elu_plus_one_fwd_kernel, x, y)
    return y


def _backward(dy: Tensor, y: Tensor) -> Tensor:
    dx = torch.empty(y.shape, dtype=y.dtype, device=y.device)
    _start(_elu_plus_one_bwd_kernel, rows(dy), y, dx)
    return dx


def _setup(ctx: Any, inputs: tuple, output: Tensor) -> None:
    ctx.save_for_backward(output)


def _gradient(ctx: Any, dy: Tensor) -> Tensor:
    return operators.elu_plus_one_backward(dy, *ctx.saved_tensors)


register("elu_plus_one(Tensor x) -> Tensor", _forward, lambda x: x.new_empty(x.shape))
register(
    "elu_plus_one_backward(Tensor dy, Tensor y) -> Tensor", _backward, lambda dy, y: y.new_empty(y.shape)
)
differentiable("elu_plus_one", _setup, _gradient)
differentiable_once("elu_plus_one_backward")
