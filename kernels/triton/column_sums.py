"""Sums over the rows of a short table on a GPU: what programs added up each for itself, put together."""

import typing

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.launch import launch


@triton.jit
@typing.no_type_check
def _column_sum_kernel(part_ptr, sum_ptr, n_row, width, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):
    """A block of columns."""
    offs_r = tl.arange(0, BLOCK_R)
    offs_c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    b_sum = tl.zeros([BLOCK_R, BLOCK_C], tl.float32)
    for start in tl.range(0, n_row, BLOCK_R):
        mask = (start + offs_r < n_row)[:, None] & (offs_c < width)[None, :]
        part_ptrs = part_ptr + (start + offs_r)[:, None] * width + offs_c[None, :]
        b_sum += tl.load(part_ptrs, mask=mask, other=0.0)
    tl.store(sum_ptr + offs_c, tl.sum(b_sum, 0), mask=offs_c < width)


def column_sums(parts: Tensor, dtype: torch.dtype) -> Tensor:
    """[width] sums of a float32 table [row width], always in the same order."""
    n_row, width = parts.shape
    sums = torch.empty(width, dtype=dtype, device=parts.device)
    launch(
        _column_sum_kernel, (-(-width // 16),), parts, sums, n_row, width, BLOCK_R=256, BLOCK_C=16,
        num_warps=8,
    )  # fmt: skip
    return sums
