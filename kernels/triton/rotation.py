"""Rotation of pairs of entries of queries or keys on a GPU, one pass; its gradient is the opposite turn."""

import typing
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.launch import launch, power_of_two, rows
from kernels.triton.ops import differentiable, operators, register


@triton.jit
@typing.no_type_check
def _rotation_kernel(
    x_ptr, cos_ptr, sin_ptr, y_ptr, stride_x_b, stride_x_t, stride_x_h, seq, n_head, n_row, sign,
    N_PAIR: tl.constexpr, WIDTH: tl.constexpr, ADJACENT: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_REST: tl.constexpr,
):  # fmt: skip
    """A tile of rows (batch, position, head): pairs turned, what is beyond them copied."""
    offs_r = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    offs_p = tl.arange(0, BLOCK_P)
    head = offs_r % n_head
    position = offs_r // n_head % seq
    batch = offs_r // n_head // seq
    mask_r = offs_r < n_row
    mask = mask_r[:, None] & (offs_p < N_PAIR)[None, :]
    first = offs_p * 2 if ADJACENT else offs_p
    other = first + 1 if ADJACENT else first + N_PAIR
    x_row = x_ptr + (batch * stride_x_b + position * stride_x_t + head * stride_x_h)[:, None]
    y_row = y_ptr + (offs_r * WIDTH)[:, None]
    b_a = tl.load(x_row + first[None, :], mask=mask, other=0.0).to(tl.float32)
    b_b = tl.load(x_row + other[None, :], mask=mask, other=0.0).to(tl.float32)
    table = position[:, None] * N_PAIR + offs_p[None, :]
    b_cos = tl.load(cos_ptr + table, mask=mask, other=0.0).to(tl.float32)
    b_sin = tl.load(sin_ptr + table, mask=mask, other=0.0).to(tl.float32) * sign
    tl.store(y_row + first[None, :], b_a * b_cos - b_b * b_sin, mask=mask)
    tl.store(y_row + other[None, :], b_b * b_cos + b_a * b_sin, mask=mask)
    if 2 * N_PAIR < WIDTH:
        offs_rest = 2 * N_PAIR + tl.arange(0, BLOCK_REST)
        mask_rest = mask_r[:, None] & (offs_rest < WIDTH)[None, :]
        b_rest = tl.load(x_row + offs_rest[None, :], mask=mask_rest, other=0.0)
        tl.store(y_row + offs_rest[None, :], b_rest, mask=mask_rest)


def rotation(x: Tensor, cos: Tensor, sin: Tensor, *, adjacent: bool) -> Tensor:
    """Turn the pairs of [batch seq head width] by the angles of [seq pair] tables."""
    return operators.rotation(x, cos, sin, adjacent, 1.0)


def _forward(x: Tensor, cos: Tensor, sin: Tensor, adjacent: bool, sign: float) -> Tensor:
    x, cos, sin = rows(x), cos.contiguous(), sin.contiguous()
    batch, seq, heads, width = x.shape
    y = torch.empty(batch, seq, heads, width, dtype=x.dtype, device=x.device)
    n_pair = cos.shape[1]
    block_p = power_of_two(n_pair)
    block_r = max(1, 1024 // block_p)
    n_row = batch * seq * heads
    launch(
        _rotation_kernel, (-(-n_row // block_r),), x, cos, sin, y, *x.stride()[:3], seq, heads, n_row,
        float(sign), N_PAIR=n_pair, WIDTH=width, ADJACENT=adjacent, BLOCK_R=block_r, BLOCK_P=block_p,
        BLOCK_REST=power_of_two(max(1, width - 2 * n_pair)), num_warps=4,
    )  # fmt: skip
    return y


def _fake(x: Tensor, cos: Tensor, sin: Tensor, adjacent: bool, sign: float) -> Tensor:
    return x.new_empty(x.shape)


def _setup(ctx: Any, inputs: tuple, output: Tensor) -> None:
    _, cos, sin, ctx.adjacent, ctx.sign = inputs
    ctx.save_for_backward(cos, sin)


def _gradient(ctx: Any, dy: Tensor) -> tuple:
    cos, sin = ctx.saved_tensors
    dx = operators.rotation(dy, cos, sin, ctx.adjacent, -ctx.sign)
    return dx, None, None, None, None


register(
    "rotation(Tensor x, Tensor cos, Tensor sin, bool adjacent, float sign) -> Tensor", _forward, _fake
)
differentiable("rotation", _setup, _gradient)
