"""The gradient of rows that were looked up, on a GPU: rows are sorted by the number they were looked up
under, added up in pieces of the sorted list, and what goes on from piece to piece in a second pass.

No atomic addition: the order of every sum is that of the list. Compared with float64 in Triton's interpreter.
"""

import typing
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from kernels.triton.launch import launch, power_of_two, rows
from kernels.triton.ops import differentiable, operators, register

# Sorted rows that a program adds up, and pieces that a program of the second pass reads at a time.
PIECE = 32
PIECES_AT_ONCE = 8
# What marks many cotangents that look like one (`is_grads_batched`).
_BATCHED = torch._C._dispatch_key_parse("Batched")


@triton.jit
@typing.no_type_check
def _embedding_pieces_kernel(
    dy_ptr, token_ptr, order_ptr, dweight_ptr, first_ptr, last_ptr, stride_dy_row, n_row, width,
    PIECE: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One piece: sums of the tokens that begin and end in it; of one that began before it (`first`), and of
    one that begins in it and goes on (`last`)."""
    piece = tl.program_id(0).to(tl.int64)
    offs_d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    mask = offs_d < width
    place = piece * PIECE
    before = tl.load(token_ptr + place - 1, mask=place > 0, other=-1).to(tl.int64)
    token = tl.load(token_ptr + place).to(tl.int64)
    began_here = False
    b_sum = tl.zeros([BLOCK_D], tl.float32)
    for n in tl.static_range(PIECE):
        there = place + n < n_row
        after = tl.load(token_ptr + place + n + 1, mask=place + n + 1 < n_row, other=-1).to(tl.int64)
        row = tl.load(order_ptr + place + n, mask=there, other=0)
        b_dy = tl.load(dy_ptr + row * stride_dy_row + offs_d, mask=mask & there, other=0.0).to(tl.float32)
        begins = token != before
        began_here = began_here | begins
        b_sum = tl.where(begins, 0.0, b_sum) + b_dy
        ends = there & (token != after)
        tl.store(dweight_ptr + token * width + offs_d, b_sum, mask=mask & ends & began_here)
        goes_on = there & (token == after) & (n == PIECE - 1)
        came = (ends | goes_on) & (began_here == 0)
        tl.store(first_ptr + piece * width + offs_d, b_sum, mask=mask & came)
        if n == PIECE - 1:
            tl.store(last_ptr + piece * width + offs_d, b_sum, mask=mask & goes_on & began_here)
        before = token
        token = after


@triton.jit
@typing.no_type_check
def _embedding_spans_kernel(
    token_ptr, dweight_ptr, first_ptr, last_ptr, n_row, width,
    PIECE: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The sum of a token that begins in this piece and goes on beyond it."""
    piece = tl.program_id(0).to(tl.int64)
    end = (piece + 1) * PIECE
    token = tl.load(token_ptr + end - 1, mask=end < n_row, other=-1).to(tl.int64)
    after = tl.load(token_ptr + end, mask=end < n_row, other=-2).to(tl.int64)
    before = tl.load(token_ptr + piece * PIECE - 1, mask=piece > 0, other=-1).to(tl.int64)
    if (token == after) & (token != before):
        offs_d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
        mask = offs_d < width
        b_sum = tl.load(last_ptr + piece * width + offs_d, mask=mask, other=0.0)
        offs_p = piece + 1 + tl.arange(0, BLOCK_P)
        n_found = BLOCK_P
        while n_found == BLOCK_P:
            begin = tl.load(token_ptr + offs_p * PIECE, mask=offs_p * PIECE < n_row, other=-1).to(tl.int64)
            goes_on = begin == token
            parts = first_ptr + offs_p[:, None] * width + offs_d[None, :]
            b_sum += tl.sum(tl.load(parts, mask=goes_on[:, None] & mask[None, :], other=0.0), 0)
            n_found = tl.sum(goes_on.to(tl.int32), 0)
            offs_p += BLOCK_P
        tl.store(dweight_ptr + token * width + offs_d, b_sum, mask=mask)


def embedding(tokens: Tensor, weight: Tensor) -> Tensor:
    """[row d_model] weight[tokens]."""
    if torch.is_grad_enabled() and weight.requires_grad:
        return operators.embedding(tokens, weight)
    return F.embedding(tokens, weight)


def _forward(tokens: Tensor, weight: Tensor) -> Tensor:
    return F.embedding(tokens, weight)


def _backward(dy: Tensor, tokens: Tensor, n_token: int) -> Tensor:
    """[token width] sums of dy's rows, in their dtype."""
    dy = rows(dy)
    n_row, width = dy.shape
    dweight = torch.zeros(n_token, width, dtype=torch.float32, device=dy.device)
    if n_row == 0:
        return dweight.to(dy.dtype)
    # Few bytes are few passes of a radix sort.
    narrow = torch.int16 if n_token <= 0x7FFF else torch.int32
    found, order = torch.sort(tokens.to(narrow), stable=True)
    n_piece = -(-n_row // PIECE)
    first, last = (torch.empty(n_piece, width, dtype=torch.float32, device=dy.device) for _ in range(2))
    block_d = min(power_of_two(width), 256)
    grid = (n_piece, -(-width // block_d))
    launch(
        _embedding_pieces_kernel, grid, dy, found, order, dweight, first, last, dy.stride(0), n_row, width,
        PIECE=PIECE, BLOCK_D=block_d, num_warps=2,
    )  # fmt: skip
    launch(
        _embedding_spans_kernel, grid, found, dweight, first, last, n_row, width, PIECE=PIECE,
        BLOCK_P=PIECES_AT_ONCE, BLOCK_D=block_d, num_warps=4,
    )  # fmt: skip
    return dweight.to(dy.dtype)


def _fake(tokens: Tensor, weight: Tensor) -> Tensor:
    return weight.new_empty(tokens.shape[0], weight.shape[1])


def _fake_backward(dy: Tensor, tokens: Tensor, n_token: int) -> Tensor:
    return dy.new_empty(n_token, dy.shape[1])


def _setup(ctx: Any, inputs: tuple, output: Tensor) -> None:
    tokens, weight = inputs
    ctx.n_token = weight.shape[0]
    ctx.save_for_backward(tokens)


def _gradient(ctx: Any, dy: Tensor) -> tuple:
    if not torch.compiler.is_compiling() and torch._C._dispatch_keys(dy).has(_BATCHED):
        # Kernels do not see that there are many.
        return None, dy.new_zeros(ctx.n_token, dy.shape[1]).index_add(0, *ctx.saved_tensors, dy)
    return None, operators.embedding_backward(dy, *ctx.saved_tensors, ctx.n_token)


def _setup_backward(ctx: Any, inputs: tuple, output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])


def _gradient_backward(ctx: Any, ddweight: Tensor) -> tuple:
    # A sum's derivative is the look-up itself.
    return operators.embedding(*ctx.saved_tensors, ddweight), None, None


register("embedding(Tensor tokens, Tensor weight) -> Tensor", _forward, _fake)
register("embedding_backward(Tensor dy, Tensor tokens, int n_token) -> Tensor", _backward, _fake_backward)
differentiable("embedding", _setup, _gradient)
differentiable("embedding_backward", _setup_backward, _gradient_backward)
