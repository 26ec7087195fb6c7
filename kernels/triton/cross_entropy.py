"""Cross entropy on a GPU: one read of the logits forward, one read and one write backward, in their own
dtype; or the gradient put in the logits' place by the forward itself."""

import typing
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.launch import check_dtype, launch, power_of_two, rows
from kernels.triton.ops import differentiable, differentiable_once, operators, register

OPERATOR = "cross_entropy"
# Classes of a row that a program takes at a time where it cannot hold the row, and that it can hold.
LARGEST_BLOCK = 4096
LARGEST_HELD = 16_384


@triton.jit
@typing.no_type_check
def _cross_entropy_fwd_kernel(
    x_ptr, target_ptr, loss_ptr, lse_ptr, stride_x_row, n_class, n_readable,
    OVERWRITE: tl.constexpr, HELD: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Loss and logsumexp of one row; softmax - one-hot in place of its logits where they are overwritten."""
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * stride_x_row
    offs_v = tl.arange(0, BLOCK_V)
    # Read before the reductions: after them other threads may have overwritten it.
    target = tl.load(target_ptr + row)
    x = tl.load(x_ptr + target, mask=target >= 0, other=0.0).to(tl.float32)
    top = -float("inf")
    total = 0.0
    if HELD:
        b_x = _logits(x_ptr, offs_v, n_class, n_readable)
        top = tl.max(b_x, 0)
        b_exp = tl.exp(b_x - top)
        total = tl.sum(b_exp, 0)
    else:
        for start in tl.range(0, n_class, BLOCK_V):
            b_x = _logits(x_ptr, start + offs_v, n_class, n_readable)
            new = tl.maximum(top, tl.max(b_x, 0))
            # Blocks of nothing but -inf so far add nothing.
            base = tl.where(new == -float("inf"), 0.0, new)
            total = total * tl.exp(top - base) + tl.sum(tl.exp(b_x - base), 0)
            top = new
    tl.store(lse_ptr + row, top + tl.log(total))
    tl.store(loss_ptr + row, tl.where(target >= 0, (top - x) + tl.log(total), 0.0))
    if OVERWRITE:
        scale = 1 / total
        # A row without a target counts for nothing, whatever its logits are.
        counts = target >= 0
        if HELD:
            b_softmax = tl.where(counts, b_exp * scale, 0.0)
            tl.store(x_ptr + offs_v, b_softmax, mask=offs_v < n_readable)
        else:
            for start in tl.range(0, n_class, BLOCK_V):
                b_x = _logits(x_ptr, start + offs_v, n_class, n_readable)
                b_softmax = tl.where(counts, tl.exp(b_x - top) * scale, 0.0)
                tl.store(x_ptr + start + offs_v, b_softmax, mask=start + offs_v < n_readable)
        # The target's own number, once all of the row is written.
        tl.debug_barrier()
        tl.store(x_ptr + target, tl.exp(x - top) * scale - 1, mask=counts)


@triton.jit
@typing.no_type_check
def _cross_entropy_bwd_kernel(
    dloss_ptr, x_ptr, target_ptr, lse_ptr, dx_ptr, stride_x_row, n_class, BLOCK_V: tl.constexpr
):  # fmt: skip
    """(softmax - one-hot) times the row's cotangent, for one row and block of classes."""
    row = tl.program_id(0).to(tl.int64)
    offs_v = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    dloss, lse = tl.load(dloss_ptr + row), tl.load(lse_ptr + row)
    b_x = _logits(x_ptr + row * stride_x_row, offs_v, n_class, n_class)
    b_dx = _pull(tl.exp(b_x - lse), offs_v, tl.load(target_ptr + row)) * dloss
    tl.store(dx_ptr + row * n_class + offs_v, b_dx, mask=offs_v < n_class)


@triton.jit
@typing.no_type_check
def _logits(x_ptr, offs_v, n_class, n_readable):
    """Logits of a row in float32, -inf beyond its classes; the row's memory goes on to n_readable."""
    b_x = tl.load(x_ptr + offs_v, mask=offs_v < n_readable, other=-float("inf")).to(tl.float32)
    return tl.where(offs_v < n_class, b_x, -float("inf"))


@triton.jit
@typing.no_type_check
def _pull(b_softmax, offs_v, target):
    """Derivative of a row's loss in its logits; 0 without a target."""
    return tl.where(target >= 0, b_softmax - tl.where(offs_v == target, 1.0, 0.0), 0.0)


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """Loss of each row of [row class] logits, float32; a target of -1 gives 0. Arguments checked by the
    caller."""
    check_dtype(OPERATOR, logits)
    return operators.cross_entropy(logits, target)[0]


def losses_of_rows(
    logits: Tensor, target: Tensor, *, overwrite: bool = False, n_readable: int | None = None
) -> tuple[Tensor, Tensor]:
    """Loss and logsumexp of each row, float32.

    Args:
        logits: [row class], the last axis of stride 1.
        overwrite: Leave d loss / d logits in the logits' place.
        n_readable: Numbers of each row that may be read and overwritten, where its memory goes on behind the
            classes; default the classes.
    """
    n, n_class = logits.shape
    loss, lse = (torch.empty(n, dtype=torch.float32, device=logits.device) for _ in range(2))
    held = n_class <= LARGEST_HELD
    block = power_of_two(n_class) if held else LARGEST_BLOCK
    # 16 numbers to a thread, 32 in the longest rows; with and without a gradient: losses are the same.
    warps = max(1, min(16, block // 512)) if held else 8
    launch(
        _cross_entropy_fwd_kernel, (n,), logits, target, loss, lse, logits.stride(0), n_class,
        n_readable or n_class, OVERWRITE=overwrite, HELD=held, BLOCK_V=block, num_warps=warps,
    )  # fmt: skip
    return loss, lse


def _forward(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    return losses_of_rows(rows(logits), target.contiguous())


def _backward(dloss: Tensor, logits: Tensor, target: Tensor, lse: Tensor) -> Tensor:
    logits, target, dloss = rows(logits), target.contiguous(), dloss.contiguous()
    n, n_class = logits.shape
    dx = torch.empty(n, n_class, dtype=logits.dtype, device=logits.device)
    block = min(power_of_two(n_class), LARGEST_BLOCK)
    launch(
        _cross_entropy_bwd_kernel, (n, -(-n_class // block)), dloss, logits, target, lse, dx,
        logits.stride(0), n_class, BLOCK_V=block, num_warps=max(1, min(8, block // 512)),
    )  # fmt: skip
    return dx


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
