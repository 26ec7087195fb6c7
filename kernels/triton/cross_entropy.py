"""Cross entropy on a GPU: one read of the logits forward, one read and one write backward, in their own
dtype."""

import typing
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.launch import check_dtype, launch, power_of_two, rows
from kernels.triton.ops import differentiable, differentiable_once, operators, register

OPERATOR = "cross_entropy"
# Classes of a row that a program holds at a time.
LARGEST_BLOCK = 4096


@triton.jit
@typing.no_type_check
def _cross_entropy_fwd_kernel(
    x_ptr, target_ptr, loss_ptr, lse_ptr, stride_x_row, n_class, BLOCK_V: tl.constexpr
):  # fmt: skip
    """Loss and logsumexp of one row."""
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * stride_x_row
    offs_v = tl.arange(0, BLOCK_V)
    top = -float("inf")
    total = 0.0
    for start in tl.range(0, n_class, BLOCK_V):
        mask_v = start + offs_v < n_class
        b_x = tl.load(x_ptr + start + offs_v, mask=mask_v, other=-float("inf")).to(tl.float32)
        new = tl.maximum(top, tl.max(b_x, 0))
        total = total * tl.exp(top - new) + tl.sum(tl.exp(b_x - new), 0)
        top = new
    lse = top + tl.log(total)
    target = tl.load(target_ptr + row)
    x = tl.load(x_ptr + target, mask=target >= 0, other=0.0).to(tl.float32)
    tl.store(lse_ptr + row, lse)
    tl.store(loss_ptr + row, tl.where(target >= 0, lse - x, 0.0))


@triton.jit
@typing.no_type_check
def _cross_entropy_bwd_kernel(
    dloss_ptr, x_ptr, target_ptr, lse_ptr, dx_ptr, stride_x_row, n_class, BLOCK_V: tl.constexpr
):  # fmt: skip
    """(softmax - one-hot) times the row's cotangent, for one row and block of classes."""
    row = tl.program_id(0).to(tl.int64)
    offs_v = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    mask_v = offs_v < n_class
    target = tl.load(target_ptr + row)
    dloss = tl.where(target >= 0, tl.load(dloss_ptr + row), 0.0)
    lse = tl.load(lse_ptr + row)
    b_x = tl.load(x_ptr + row * stride_x_row + offs_v, mask=mask_v, other=0.0).to(tl.float32)
    b_dx = (tl.exp(b_x - lse) - tl.where(offs_v == target, 1.0, 0.0)) * dloss
    tl.store(dx_ptr + row * n_class + offs_v, b_dx, mask=mask_v)


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """Loss of each row of [row class] logits, float32; a target of -1 gives 0. Arguments checked by the
    caller."""
    check_dtype(OPERATOR, logits)
    return operators.cross_entropy(logits, target)[0]


def _forward(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    logits, target = rows(logits), target.contiguous()
    n, n_class = logits.shape
    loss, lse = (torch.empty(n, dtype=torch.float32, device=logits.device) for _ in range(2))
    sizes = (logits.stride(0), n_class)
    launch(_cross_entropy_fwd_kernel, (n,), logits, target, loss, lse, *sizes, **_block(n_class))
    return loss, lse


def _backward(dloss: Tensor, logits: Tensor, target: Tensor, lse: Tensor) -> Tensor:
    logits, target, dloss = rows(logits), target.contiguous(), dloss.contiguous()
    n, n_class = logits.shape
    dx = torch.empty(n, n_class, dtype=logits.dtype, device=logits.device)
    block = _block(n_class)
    launch(
        _cross_entropy_bwd_kernel, (n, -(-n_class // block["BLOCK_V"])), dloss, logits, target, lse, dx,
        logits.stride(0), n_class, **block,
    )  # fmt: skip
    return dx


def _block(n_class: int) -> dict[str, int]:
    block = min(power_of_two(n_class), LARGEST_BLOCK)
    return {"BLOCK_V": block, "num_warps": max(1, min(8, block // 512))}


def _fake(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    return tuple(logits.new_empty(logits.shape[0], dtype=torch.float32) for _ in range(2))


def _fake_backward(dloss: Tensor, logits: Tensor, target: Tensor, lse: Tensor) -> Tensor:
    return logits.new_empty(logits.shape)


def _setup(ctx: Any, inputs: tuple, output: tuple) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs, output[1])


def _gradient(ctx: Any, dloss: Tensor | None, unused: Any) -> tuple:
    logits, target, lse = ctx.saved_tensors
    if dloss is None:
        return None, None
    return operators.cross_entropy_backward(dloss, logits, target, lse), None


register("cross_entropy(Tensor logits, Tensor target) -> (Tensor, Tensor)", _forward, _fake)
register(
    "cross_entropy_backward(Tensor dloss, Tensor logits, Tensor target, Tensor lse) -> Tensor",
    _backward,
    _fake_backward,
)
differentiable("cross_entropy", _setup, _gradient)
differentiable_once("cross_entropy_backward")
