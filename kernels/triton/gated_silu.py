"""SiLU(gate) times values on a GPU: one pass each way."""

import typing
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.launch import launch
from kernels.triton.ops import differentiable, differentiable_once, operators, register

BLOCK = 1024


@triton.jit
@typing.no_type_check
def _gated_silu_fwd_kernel(gate_ptr, x_ptr, y_ptr, size, BLOCK: tl.constexpr):
    """A block of numbers of the output."""
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < size
    b_gate = tl.load(gate_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    b_x = tl.load(x_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + offs, b_x * b_gate / (1 + tl.exp(-b_gate)), mask=mask)


@triton.jit
@typing.no_type_check
def _gated_silu_bwd_kernel(dy_ptr, gate_ptr, x_ptr, dgate_ptr, dx_ptr, size, BLOCK: tl.constexpr):
    """A block of numbers of both gradients."""
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < size
    b_dy = tl.load(dy_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    b_gate = tl.load(gate_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    b_x = tl.load(x_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    b_sigmoid = 1 / (1 + tl.exp(-b_gate))
    tl.store(dx_ptr + offs, b_dy * b_gate * b_sigmoid, mask=mask)
    tl.store(dgate_ptr + offs, b_dy * b_x * b_sigmoid * (1 + b_gate * (1 - b_sigmoid)), mask=mask)


def gated_silu(gate: Tensor, x: Tensor) -> Tensor:
    """SiLU(gate) x; two tensors of one shape and dtype."""
    return operators.gated_silu(gate, x)


def _forward(gate: Tensor, x: Tensor) -> Tensor:
    gate, x = gate.contiguous(), x.contiguous()
    y = torch.empty_like(x)
    grid = (-(-x.numel() // BLOCK),)
    launch(_gated_silu_fwd_kernel, grid, gate, x, y, x.numel(), BLOCK=BLOCK, num_warps=4)
    return y


def _backward(dy: Tensor, gate: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    dy, gate, x = dy.contiguous(), gate.contiguous(), x.contiguous()
    dgate, dx = torch.empty_like(gate), torch.empty_like(x)
    grid = (-(-x.numel() // BLOCK),)
    launch(_gated_silu_bwd_kernel, grid, dy, gate, x, dgate, dx, x.numel(), BLOCK=BLOCK, num_warps=4)
    return dgate, dx


def _setup(ctx: Any, inputs: tuple, output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _gradient(ctx: Any, dy: Tensor) -> tuple:
    return operators.gated_silu_backward(dy, *ctx.saved_tensors)


register("gated_silu(Tensor gate, Tensor x) -> Tensor", _forward, lambda gate, x: x.new_empty(x.shape))
register(
    "gated_silu_backward(Tensor dy, Tensor gate, Tensor x) -> (Tensor, Tensor)",
    _backward,
    lambda dy, gate, x: (gate.new_empty(gate.shape), x.new_empty(x.shape)),
)
differentiable("gated_silu", _setup, _gradient)
differentiable_once("gated_silu_backward")
