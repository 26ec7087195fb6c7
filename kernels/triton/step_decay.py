"""Mamba-2's step sizes and log decays from raw steps on a GPU, one pass each way.

dt = softplus(raw + bias), g = -exp(A_log) dt, both float32.
"""

import typing

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.column_sums import column_sums
from kernels.triton.launch import launch, power_of_two
from kernels.triton.step_size import _softplus

# Programs of the backward, each of which adds up the gradients of bias and A_log over its rows.
PROGRAMS = 132
# Heads of a program.
WIDEST = 64


@triton.jit
@typing.no_type_check
def _step_decay_fwd_kernel(
    raw_ptr, bias_ptr, a_ptr, dt_ptr, g_ptr, stride_raw_row, n_row, width,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """A tile of rows and heads."""
    offs_r = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    offs_c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    mask_c = offs_c < width
    mask = (offs_r < n_row)[:, None] & mask_c[None, :]
    b_x = tl.load(raw_ptr + offs_r[:, None] * stride_raw_row + offs_c[None, :], mask=mask, other=0.0)
    b_bias = tl.load(bias_ptr + offs_c, mask=mask_c, other=0.0).to(tl.float32)
    b_rate = -tl.exp(tl.load(a_ptr + offs_c, mask=mask_c, other=0.0).to(tl.float32))
    b_dt = _softplus(b_x.to(tl.float32) + b_bias[None, :])
    at = offs_r[:, None] * width + offs_c[None, :]
    tl.store(dt_ptr + at, b_dt, mask=mask)
    tl.store(g_ptr + at, b_dt * b_rate[None, :], mask=mask)


@triton.jit
@typing.no_type_check
def _step_decay_bwd_kernel(
    ddt_ptr, dg_ptr, raw_ptr, bias_ptr, a_ptr, g_ptr, draw_ptr, dbias_ptr, da_ptr, stride_raw_row,
    stride_draw_row, n_row, width, n_tile,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Every n_program-th tile of rows of a block of heads; this program's share of the gradients of bias and
    A_log."""
    offs_c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    mask_c = offs_c < width
    b_bias = tl.load(bias_ptr + offs_c, mask=mask_c, other=0.0).to(tl.float32)
    b_rate = -tl.exp(tl.load(a_ptr + offs_c, mask=mask_c, other=0.0).to(tl.float32))
    # A sum for each row of a tile: one reduction across threads, at the end.
    b_dbias = tl.zeros([BLOCK_R, BLOCK_C], tl.float32)
    b_da = tl.zeros([BLOCK_R, BLOCK_C], tl.float32)
    for tile in tl.range(tl.program_id(0), n_tile, tl.num_programs(0)):
        offs_r = (tile * BLOCK_R + tl.arange(0, BLOCK_R)).to(tl.int64)
        mask = (offs_r < n_row)[:, None] & mask_c[None, :]
        at = offs_r[:, None] * width + offs_c[None, :]
        b_x = tl.load(raw_ptr + offs_r[:, None] * stride_raw_row + offs_c[None, :], mask=mask, other=0.0)
        b_x = b_x.to(tl.float32) + b_bias[None, :]
        b_ddt = tl.load(ddt_ptr + at, mask=mask, other=0.0)
        b_dg = tl.load(dg_ptr + at, mask=mask, other=0.0)
        b_g = tl.load(g_ptr + at, mask=mask, other=0.0)
        b_draw = tl.where(mask, (b_ddt + b_dg * b_rate[None, :]) / (1 + tl.exp(-b_x)), 0.0)
        b_dbias += b_draw
        b_da += b_dg * b_g
        tl.store(draw_ptr + offs_r[:, None] * stride_draw_row + offs_c[None, :], b_draw, mask=mask)
    at_part = tl.program_id(0) * width + offs_c
    tl.store(dbias_ptr + at_part, tl.sum(b_dbias, 0), mask=mask_c)
    tl.store(da_ptr + at_part, tl.sum(b_da, 0), mask=mask_c)


def _block(width: int, size: int) -> dict[str, int]:
    """A tile of `size` numbers."""
    block_c = min(power_of_two(width, 4), WIDEST)
    return {"BLOCK_R": size // block_c, "BLOCK_C": block_c, "num_warps": 4}


def _forward(raw: Tensor, bias: Tensor, a_log: Tensor) -> tuple[Tensor, Tensor]:
    """(dt, g) [row head] of raw steps [row head], whose rows may stand apart."""
    n_row, width = raw.shape
    dt, g = (torch.empty(n_row, width, dtype=torch.float32, device=raw.device) for _ in range(2))
    block = _block(width, 1024)
    grid = (-(-n_row // block["BLOCK_R"]), -(-width // block["BLOCK_C"]))
    launch(_step_decay_fwd_kernel, grid, raw, bias, a_log, dt, g, raw.stride(0), n_row, width, **block)
    return dt, g


def _backward(
    ddt: Tensor, dg: Tensor, raw: Tensor, bias: Tensor, a_log: Tensor, g: Tensor, draw: Tensor
) -> tuple[Tensor, Tensor]:
    """Fill draw, whose rows may stand apart; gradients of (bias, a_log)."""
    n_row, width = raw.shape
    block = _block(width, 2048)
    n_tile = -(-n_row // block["BLOCK_R"])
    programs = min(n_tile, PROGRAMS)
    parts = [torch.empty(programs, width, dtype=torch.float32, device=raw.device) for _ in range(2)]
    grid = (programs, -(-width // block["BLOCK_C"]))
    sizes = (raw.stride(0), draw.stride(0), n_row, width, n_tile)
    launch(_step_decay_bwd_kernel, grid, ddt, dg, raw, bias, a_log, g, draw, *parts, *sizes, **block)
    return column_sums(parts[0], bias.dtype), column_sums(parts[1], a_log.dtype)
