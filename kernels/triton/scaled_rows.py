"""A table's rows, each times its own number, in another dtype, on a GPU: one pass."""

import typing

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.launch import launch, power_of_two


@triton.jit
@typing.no_type_check
def _scaled_rows_kernel(
    x_ptr, scale_ptr, y_ptr, stride_x_row, n_row, width, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr
):  # fmt: skip
    """A tile of rows and columns."""
    offs_r = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    offs_c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    mask = (offs_r < n_row)[:, None] & (offs_c < width)[None, :]
    b_x = tl.load(x_ptr + offs_r[:, None] * stride_x_row + offs_c[None, :], mask=mask, other=0.0)
    b_scale = tl.load(scale_ptr + offs_r, mask=offs_r < n_row, other=0.0)
    b_y = b_x.to(tl.float32) * b_scale[:, None]
    tl.store(y_ptr + offs_r[:, None] * width + offs_c[None, :], b_y, mask=mask)


def scaled_rows(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """x [row column], whose rows may stand apart, times scale [row] (float32), rounded once."""
    n_row, width = x.shape
    y = torch.empty(n_row, width, dtype=dtype, device=x.device)
    block_c = min(power_of_two(width), 256)
    block_r = 1024 // block_c
    launch(
        _scaled_rows_kernel, (-(-n_row // block_r), -(-width // block_c)), x, scale, y, x.stride(0), n_row,
        width, BLOCK_R=block_r, BLOCK_C=block_c, num_warps=4,
    )  # fmt: skip
    return y
