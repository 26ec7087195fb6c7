"""Short causal depthwise convolution on a GPU, with bias, SiLU and state; forward and backward."""

from typing import Any

import torch
from torch import Tensor

from kernels import KernelError
from kernels.triton.causal_conv_kernels import _conv_bwd_kernel, _conv_bwd_sum_kernel, _conv_fwd_kernel
from kernels.triton.launch import check_dtype, launch, processors, rows
from kernels.triton.ops import differentiable, differentiable_once, operators, register

OPERATOR = "causal_conv"
LARGEST_WIDTH = 4
# Channels of a program, a warp; bytes of a channel that are read ahead; positions of a program, forward.
BLOCK_C, AHEAD, SEGMENT_FORWARD = 128, 8, 16


def causal_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, state: Tensor | None = None, silu: bool = False
) -> tuple[Tensor, Tensor]:
    """pre[t, c] = bias[c] + sum_l weight[c, width-1-l] x[t-l, c]; SiLU of it if `silu`.

    Args:
        x: [batch seq channel]; weight: [channel width], width 1 to 4; bias: [channel]; state: [batch width-1
        channel].

    Returns:
        (y [batch seq channel], last state [batch width-1 channel]), both differentiable.
    """
    check_dtype(OPERATOR, x)
    if not 1 <= weight.shape[1] <= LARGEST_WIDTH:
        raise KernelError(
            f"{OPERATOR}: width is {weight.shape[1]}, accepted by the Triton kernels is 1 to {LARGEST_WIDTH}"
        )
    return operators.causal_conv(x, weight, bias, state, silu)


def _forward(x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor | None,
    silu: bool) -> tuple[Tensor, Tensor]:
    x, weight = rows(x), weight.contiguous()
    state = None if state is None else state.contiguous()
    batch, seq, channels = x.shape
    width = weight.shape[1]
    y = torch.empty(batch, seq, channels, dtype=x.dtype, device=x.device)
    last = torch.empty(batch, width - 1, channels, dtype=x.dtype, device=x.device)
    launch(
        _conv_fwd_kernel, (-(-channels // BLOCK_C) * -(-seq // SEGMENT_FORWARD), batch), x, weight, bias,
        state, y, last, x.stride(0), seq, SEGMENT_FORWARD, STRIDE_X_T=x.stride(1), N_CHANNEL=channels,
        WIDTH=width, BLOCK_C=BLOCK_C, STEPS=AHEAD // x.element_size(), HAS_BIAS=bias is not None,
        HAS_STATE=state is not None and width > 1, SILU=silu, num_warps=1,
    )  # fmt: skip
    return y, last


def _segment(x: Tensor) -> int:
    """Positions of a program of the backward: 64, or as many as leave each multiprocessor 16 programs, at
    most 128; fewer where 64 leave less than 8. A multiple of 16, so that all lengths run the same kernel."""
    positions = x.shape[0] * x.shape[1] * -(-x.shape[2] // BLOCK_C) // processors(x.device)
    many, few = ((positions // programs + 8) // 16 * 16 for programs in (16, 8))
    return max(16, min(128, max(many, min(64, few))))


def _like(tensor: Tensor | None, x: Tensor) -> Tensor:
    """Room for the gradient of what may be absent, on the device of x; empty then."""
    if tensor is None:
        return torch.empty(0, dtype=torch.float32, device=x.device)
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=x.device)


def _backward(
    dy: Tensor, dlast: Tensor | None, x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor | None,
    silu: bool, *, into: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of (x, weight, bias, state); what does not apply is empty. That of x is written `into` a
    slice of a wider tensor, if that is given."""
    x, dy, weight = rows(x), rows(dy), weight.contiguous()
    state, dlast = (None if t is None else t.contiguous() for t in (state, dlast))
    batch, seq, channels = x.shape
    width = weight.shape[1]
    segment = _segment(x)
    parts = -(-seq // segment)
    dx = torch.empty(batch, seq, channels, dtype=x.dtype, device=x.device) if into is None else into
    part = torch.empty(batch, parts, 5, channels, dtype=torch.float32, device=x.device)
    dstate = _like(state, x)
    launch(
        _conv_bwd_kernel, (-(-channels // BLOCK_C) * parts, batch), x, weight, bias, state, dy, dlast, dx,
        part, dstate, x.stride(0), dy.stride(0), dx.stride(0), seq, segment, STRIDE_X_T=x.stride(1),
        STRIDE_DY_T=dy.stride(1), STRIDE_DX_T=dx.stride(1), N_CHANNEL=channels, WIDTH=width, BLOCK_C=BLOCK_C,
        STEPS=AHEAD // x.element_size(), HAS_BIAS=bias is not None, HAS_STATE=state is not None and width > 1,
        HAS_LAST=dlast is not None and width > 1, SILU=silu, num_warps=1,
    )  # fmt: skip
    dweight = torch.empty(channels, width, dtype=weight.dtype, device=x.device)
    dbias = _like(bias, x)
    launch(
        _conv_bwd_sum_kernel, (-(-channels // 32), 5), part, dweight, dbias, channels, batch * parts,
        WIDTH=width, BLOCK=32, ROWS=128, HAS_BIAS=bias is not None, num_warps=4,
    )  # fmt: skip
    return dx, dweight, dbias, dstate


def _fake(x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor | None, silu: bool) -> tuple[Tensor,
    Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape[0], weight.shape[1] - 1, x.shape[2])


def _fake_backward(
    dy: Tensor, dlast: Tensor | None, x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor | None,
    silu: bool
) -> tuple[Tensor, ...]:
    none = x.new_empty(0, dtype=torch.float32)
    optional = (none.new_empty(0) if t is None else t.new_empty(t.shape) for t in (bias, state))
    return x.new_empty(x.shape), weight.new_empty(weight.shape), *optional


def _setup(ctx: Any, inputs: tuple, output: tuple) -> None:
    ctx.set_materialize_grads(False)
    *tensors, ctx.silu = inputs
    ctx.save_for_backward(*tensors)


def _gradient(ctx: Any, dy: Tensor | None, dlast: Tensor | None) -> tuple:
    x, weight, bias, state = ctx.saved_tensors
    dy = x.new_zeros(x.shape) if dy is None else dy
    dx, dweight, dbias, dstate = operators.causal_conv_backward(dy, dlast, x, weight, bias,
        state, ctx.silu)
    return dx, dweight, None if bias is None else dbias, None if state is None else dstate, None


_INPUTS = "Tensor x, Tensor weight, Tensor? bias, Tensor? state, bool silu"
register(f"causal_conv({_INPUTS}) -> (Tensor, Tensor)", _forward, _fake)
register(
    f"causal_conv_backward(Tensor dy, Tensor? dlast, {_INPUTS}) -> (Tensor, Tensor, Tensor, Tensor)",
    _backward,
    _fake_backward,
)
differentiable("causal_conv", _setup, _gradient)
differentiable_once("causal_conv_backward")
