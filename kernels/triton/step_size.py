"""softplus(raw + bias) in float32 on a GPU, one pass each way: the step sizes of both Mamba mixers.

Compared with float64 in Triton's interpreter and on an H200.
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

# Programs of the backward, each of which adds up the bias's gradient over its rows.
PROGRAMS = 132


@triton.jit
@typing.no_type_check
def _softplus(b_x):
    """log(1 + exp(x)), with the digits of small results."""
    # log(1 + u) = 2 artanh(u / (2 + u)) as a series: u = exp(-|x|) may be far below the rounding of 1 + u.
    b_u = tl.exp(-tl.abs(b_x))
    b_s = b_u / (2 + b_u)
    b_q = b_s * b_s
    b_series = 1 / 13 * b_q + 1 / 11
    b_series = (b_series * b_q + 1 / 9) * b_q + 1 / 7
    b_series = ((b_series * b_q + 1 / 5) * b_q + 1 / 3) * b_q + 1
    return tl.maximum(b_x, 0.0) + 2 * b_s * b_series


@triton.jit
@typing.no_type_check
def _step_size_fwd_kernel(
    raw_ptr, bias_ptr, dt_ptr, stride_raw_row, n_row, width, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr
):  # fmt: skip
    """A tile of rows and channels."""
    offs_r = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    offs_c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    mask = (offs_r < n_row)[:, None] & (offs_c < width)[None, :]
    b_x = tl.load(raw_ptr + offs_r[:, None] * stride_raw_row + offs_c[None, :], mask=mask, other=0.0)
    b_bias = tl.load(bias_ptr + offs_c, mask=offs_c < width, other=0.0).to(tl.float32)
    b_dt = _softplus(b_x.to(tl.float32) + b_bias[None, :])
    tl.store(dt_ptr + offs_r[:, None] * width + offs_c[None, :], b_dt, mask=mask)


@triton.jit
@typing.no_type_check
def _step_size_bwd_kernel(
    ddt_ptr, raw_ptr, bias_ptr, draw_ptr, dbias_ptr, stride_ddt_row, stride_raw_row, n_row, width, n_tile,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Every n_program-th tile of rows of a block of channels."""
    offs_c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    b_bias = tl.load(bias_ptr + offs_c, mask=offs_c < width, other=0.0).to(tl.float32)
    # A sum for each row of a tile: one reduction across threads, at the end.
    b_dbias = tl.zeros([BLOCK_R, BLOCK_C], tl.float32)
    for tile in tl.range(tl.program_id(0), n_tile, tl.num_programs(0)):
        offs_r = (tile * BLOCK_R + tl.arange(0, BLOCK_R)).to(tl.int64)
        mask = (offs_r < n_row)[:, None] & (offs_c < width)[None, :]
        b_ddt = tl.load(ddt_ptr + offs_r[:, None] * stride_ddt_row + offs_c[None, :], mask=mask, other=0.0)
        b_x = tl.load(raw_ptr + offs_r[:, None] * stride_raw_row + offs_c[None, :], mask=mask, other=0.0)
        b_x = b_x.to(tl.float32) + b_bias[None, :]
        b_draw = tl.where(mask, b_ddt.to(tl.float32) / (1 + tl.exp(-b_x)), 0.0)
        b_dbias += b_draw
        tl.store(draw_ptr + offs_r[:, None] * width + offs_c[None, :], b_draw, mask=mask)
    tl.store(dbias_ptr + tl.program_id(0) * width + offs_c, tl.sum(b_dbias, 0), mask=offs_c < width)


def step_size(raw: Tensor, bias: Tensor) -> Tensor:
    """softplus(raw + bias) of [row channel] numbers, float32."""
    return operators.step_size(raw, bias)


def _block(width: int, size: int, columns: int) -> dict[str, int]:
    """A tile of at most `size` numbers in at most so many columns."""
    block_c = min(power_of_two(width, 4), columns)
    return {"BLOCK_R": max(1, size // block_c), "BLOCK_C": block_c, "num_warps": 4}


def _forward(raw: Tensor, bias: Tensor) -> Tensor:
    raw = rows(raw)
    n_row, width = raw.shape
    dt = torch.empty(n_row, width, dtype=torch.float32, device=raw.device)
    block = _block(width, 1024, 256)
    grid = (-(-n_row // block["BLOCK_R"]), -(-width // block["BLOCK_C"]))
    launch(_step_size_fwd_kernel, grid, raw, bias.contiguous(), dt, raw.stride(0), n_row, width, **block)
    return dt


def _backward(ddt: Tensor, raw: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of (raw, bias)."""
    ddt, raw = rows(ddt), rows(raw)
    n_row, width = raw.shape
    block = _block(width, 2048, 64)
    n_tile = -(-n_row // block["BLOCK_R"])
    programs = min(n_tile, PROGRAMS)
    draw = torch.empty(n_row, width, dtype=raw.dtype, device=raw.device)
    dbias = torch.empty(programs, width, dtype=torch.float32, device=raw.device)
    grid = (programs, -(-width // block["BLOCK_C"]))
    sizes = (ddt.stride(0), raw.stride(0), n_row, width, n_tile)
    launch(_step_size_bwd_kernel, grid, ddt, raw, bias.contiguous(), draw, dbias, *sizes, **block)
    return draw, column_sums(dbias, bias.dtype)


def _setup(ctx: Any, inputs: tuple, output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _gradient(ctx: Any, ddt: Tensor) -> tuple:
    return operators.step_size_backward(ddt, *ctx.saved_tensors)


register(
    "step_size(Tensor raw, Tensor bias) -> Tensor",
    _forward,
    lambda raw, bias: raw.new_empty(raw.shape, dtype=torch.float32),
)
register(
    "step_size_backward(Tensor ddt, Tensor raw, Tensor bias) -> (Tensor, Tensor)",
    _backward,
    lambda ddt, raw, bias: (raw.new_empty(raw.shape), bias.new_empty(bias.shape)),
)
differentiable("step_size", _setup, _gradient)
differentiable_once("step_size_backward")
