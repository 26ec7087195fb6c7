"""Short causal depthwise convolution on a GPU, with bias, SiLU and state; forward and backward.

Forward: one tile of positions and channels, one shifted load a tap. Backward: a program walks through a
segment with the
last few inputs and pending input gradients of its channels in registers, so that x and dy are read once.
"""

import typing
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import KernelError
from kernels.triton.launch import check_dtype, launch, rows
from kernels.triton.ops import differentiable, differentiable_once, register

OPERATOR = "causal_conv"
LARGEST_WIDTH = 4


@triton.jit
@typing.no_type_check
def _conv_fwd_kernel(
    x_ptr, weight_ptr, bias_ptr, state_ptr, y_ptr, last_ptr, stride_x_b, stride_x_t, n_channel, seq,
    WIDTH: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_STATE: tl.constexpr,
    SILU: tl.constexpr,
):  # fmt: skip
    """Outputs of one tile; the programs of the first tile also write the last state."""
    batch = tl.program_id(2).to(tl.int64)
    start = batch * 0 + tl.program_id(1) * BLOCK_T
    offs_t = start + tl.arange(0, BLOCK_T)
    offs_c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    mask_c = offs_c < n_channel
    x_ptr += batch * stride_x_b
    b_y = tl.zeros([BLOCK_T, BLOCK_C], tl.float32)
    if HAS_BIAS:
        b_y += tl.load(bias_ptr + offs_c, mask=mask_c, other=0.0).to(tl.float32)[None, :]
    for tap in tl.static_range(WIDTH):
        source = offs_t - (WIDTH - 1 - tap)
        mask = ((source >= 0) & (offs_t < seq))[:, None] & mask_c[None, :]
        b_x = tl.load(x_ptr + source[:, None] * stride_x_t + offs_c[None, :], mask=mask,
            other=0.0).to(tl.float32)
        if HAS_STATE:
            row = batch * (WIDTH - 1) + source + WIDTH - 1
            old = ((source < 0) & (offs_t < seq))[:, None] & mask_c[None, :]
            b_x += tl.load(state_ptr + row[:, None] * n_channel + offs_c[None, :], mask=old,
                other=0.0).to(tl.float32)
        b_y += b_x * tl.load(weight_ptr + offs_c * WIDTH + tap, mask=mask_c, other=0.0).to(tl.float32)[None,
            :]
    if SILU:
        b_y = b_y / (1.0 + tl.exp2(-1.4426950408889634 * b_y))
    y_ptrs = y_ptr + (batch * seq + offs_t)[:, None] * n_channel + offs_c[None, :]
    tl.store(y_ptrs, b_y.to(y_ptr.dtype.element_ty), mask=(offs_t < seq)[:, None] & mask_c[None, :])
    if tl.program_id(1) == 0:
        for slot in tl.static_range(WIDTH - 1):
            place = batch * 0 + seq - (WIDTH - 1) + slot
            b_last = tl.load(x_ptr + place * stride_x_t + offs_c, mask=mask_c & (place >= 0), other=0.0)
            if HAS_STATE:
                before = batch * (WIDTH - 1) + place + WIDTH - 1
                b_old = tl.load(state_ptr + before * n_channel + offs_c, mask=mask_c & (place < 0), other=0.0)
                b_last += b_old.to(b_last.dtype)
            tl.store(last_ptr + (batch * (WIDTH - 1) + slot) * n_channel + offs_c, b_last, mask=mask_c)


@triton.jit
@typing.no_type_check
def _conv_input(x_ptr, state_ptr, position, stride_x_t, batch, n_channel, seq, offs_c, mask_c,
    WIDTH: tl.constexpr,
                HAS_STATE: tl.constexpr):  # fmt: skip
    """Input of one position, from the state before the sequence and zero after it."""
    b_x = tl.load(x_ptr + position * stride_x_t + offs_c, mask=mask_c & (position >= 0) & (position < seq),
        other=0.0)
    b_x = b_x.to(tl.float32)
    if HAS_STATE:
        old = mask_c & (position < 0) & (position >= 1 - WIDTH)
        row = batch * (WIDTH - 1) + position + WIDTH - 1
        b_x += tl.load(state_ptr + row * n_channel + offs_c, mask=old, other=0.0).to(tl.float32)
    return b_x


@triton.jit
@typing.no_type_check
def _conv_bwd_kernel(
    x_ptr, weight_ptr, bias_ptr, state_ptr, dy_ptr, dlast_ptr, dx_ptr, dweight_ptr, dbias_ptr, dstate_ptr,
    stride_x_b, stride_x_t, stride_dy_b, stride_dy_t, n_channel, seq, segment,
    WIDTH: tl.constexpr, BLOCK_C: tl.constexpr, STEPS: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_STATE: tl.constexpr,
    HAS_LAST: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """Input gradients of one segment of positions, partial weight gradients. Taps are named by their distance
    0..3."""
    batch = tl.program_id(2).to(tl.int64)
    part = tl.program_id(1)
    first = batch * 0 + part * segment
    offs_c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    mask_c = offs_c < n_channel
    x_ptr += batch * stride_x_b
    dy_ptr += batch * stride_dy_b
    b_bias = tl.zeros([BLOCK_C], tl.float32)
    if HAS_BIAS:
        b_bias = tl.load(bias_ptr + offs_c, mask=mask_c, other=0.0).to(tl.float32)
    w_base = weight_ptr + offs_c * WIDTH + WIDTH - 1
    b_w0 = tl.load(w_base, mask=mask_c, other=0.0).to(tl.float32)
    b_w1 = tl.load(w_base - 1, mask=mask_c & (WIDTH > 1), other=0.0).to(tl.float32)
    b_w2 = tl.load(w_base - 2, mask=mask_c & (WIDTH > 2), other=0.0).to(tl.float32)
    b_w3 = tl.load(w_base - 3, mask=mask_c & (WIDTH > 3), other=0.0).to(tl.float32)
    b_x1 = _conv_input(x_ptr, state_ptr, first - 1, stride_x_t, batch, n_channel, seq, offs_c, mask_c, WIDTH,
        HAS_STATE)
    b_x2 = _conv_input(x_ptr, state_ptr, first - 2, stride_x_t, batch, n_channel, seq, offs_c, mask_c, WIDTH,
        HAS_STATE)
    b_x3 = _conv_input(x_ptr, state_ptr, first - 3, stride_x_t, batch, n_channel, seq, offs_c, mask_c, WIDTH,
        HAS_STATE)
    zero = tl.zeros([BLOCK_C], tl.float32)
    # Gradients of the inputs 1, 2 and 3 positions back that are still being added up.
    b_p1, b_p2, b_p3 = zero, zero, zero
    b_dw0, b_dw1, b_dw2, b_dw3, b_db = zero, zero, zero, zero, zero
    stop = tl.minimum(first + segment, seq)
    # The outputs just after the segment also read its inputs.
    for block in tl.range(tl.cdiv(stop - first + WIDTH - 1, STEPS)):
        outs = ()
        for step in tl.static_range(STEPS):
            t = first + block * STEPS + step
            b_x0 = _conv_input(x_ptr, state_ptr, t, stride_x_t, batch, n_channel, seq, offs_c, mask_c, WIDTH,
                False)
            inside = (t < seq) & (t < stop + WIDTH - 1)
            b_dpre = tl.load(dy_ptr + t * stride_dy_t + offs_c, mask=mask_c & inside,
                other=0.0).to(tl.float32)
            if SILU:
                b_pre = b_bias + b_w0 * b_x0 + b_w1 * b_x1 + b_w2 * b_x2 + b_w3 * b_x3
                b_sigmoid = 1.0 / (1.0 + tl.exp2(-1.4426950408889634 * b_pre))
                b_dpre = b_dpre * b_sigmoid * (1.0 + b_pre * (1.0 - b_sigmoid))
            own = tl.where(t < stop, b_dpre, 0.0)
            b_dw0 += own * b_x0
            b_dw1 += own * b_x1
            b_dw2 += own * b_x2
            b_dw3 += own * b_x3
            b_db += own
            b_p0 = b_dpre * b_w0
            b_p1 += b_dpre * b_w1
            b_p2 += b_dpre * b_w2
            b_p3 += b_dpre * b_w3
            b_x3, b_x2, b_x1 = b_x2, b_x1, b_x0
            if WIDTH == 4:
                outs = outs + (b_p3,)
            elif WIDTH == 3:
                outs = outs + (b_p2,)
            elif WIDTH == 2:
                outs = outs + (b_p1,)
            else:
                outs = outs + (b_p0,)
            b_p3, b_p2, b_p1 = b_p2, b_p1, b_p0
        for step in tl.static_range(STEPS):
            t = first + block * STEPS + step - (WIDTH - 1)
            b_dx = outs[step]
            if HAS_LAST:
                slot = t - (seq - (WIDTH - 1))
                kept = mask_c & (slot >= 0) & (slot < WIDTH - 1)
                row = batch * (WIDTH - 1) + slot
                b_dx += tl.load(dlast_ptr + row * n_channel + offs_c, mask=kept, other=0.0).to(tl.float32)
            dx_ptrs = dx_ptr + (batch * seq + t) * n_channel + offs_c
            tl.store(dx_ptrs, b_dx.to(dx_ptr.dtype.element_ty), mask=mask_c & (t >= first) & (t < stop))
            if HAS_STATE:
                row = batch * (WIDTH - 1) + t + WIDTH - 1
                before = mask_c & (t < 0) & (part == 0)
                tl.store(dstate_ptr + row * n_channel + offs_c, b_dx.to(dstate_ptr.dtype.element_ty),
                    mask=before)
    place = (batch * tl.num_programs(1) + part) * n_channel
    w_base = dweight_ptr + (place + offs_c) * WIDTH + WIDTH - 1
    tl.store(w_base, b_dw0, mask=mask_c)
    tl.store(w_base - 1, b_dw1, mask=mask_c & (WIDTH > 1))
    tl.store(w_base - 2, b_dw2, mask=mask_c & (WIDTH > 2))
    tl.store(w_base - 3, b_dw3, mask=mask_c & (WIDTH > 3))
    if HAS_BIAS:
        tl.store(dbias_ptr + place + offs_c, b_db, mask=mask_c)


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
    return torch.ops.beyond_softmax.causal_conv(x, weight, bias, state, silu)


def _forward(x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor | None,
    silu: bool) -> tuple[Tensor, Tensor]:
    x, weight = rows(x), weight.contiguous()
    state = None if state is None else state.contiguous()
    batch, seq, channels = x.shape
    width = weight.shape[1]
    y = torch.empty(batch, seq, channels, dtype=x.dtype, device=x.device)
    last = torch.empty(batch, width - 1, channels, dtype=x.dtype, device=x.device)
    block_t, block_c = 16, 128
    launch(
        _conv_fwd_kernel, (-(-channels // block_c), -(-seq // block_t), batch), x, weight, bias, state, y,
        last,
        *x.stride()[:2], channels, seq, WIDTH=width, BLOCK_T=block_t, BLOCK_C=block_c,
        HAS_BIAS=bias is not None,
        HAS_STATE=state is not None and width > 1, SILU=silu, num_warps=4,
    )  # fmt: skip
    return y, last


def _backward(
    dy: Tensor, dlast: Tensor | None, x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor | None,
    silu: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of (x, weight, bias, state); what does not apply is empty."""
    x, dy, weight = rows(x), rows(dy), weight.contiguous()
    state, dlast = (None if t is None else t.contiguous() for t in (state, dlast))
    batch, seq, channels = x.shape
    width = weight.shape[1]
    options = {"dtype": torch.float32, "device": x.device}
    block_c, segment = 128, 64
    parts = -(-seq // segment)
    dx = torch.empty(batch, seq, channels, dtype=x.dtype, device=x.device)
    dweight = torch.empty(batch, parts, channels, width, **options)
    dbias = None if bias is None else torch.empty(batch, parts, channels, **options)
    dstate = None if state is None else torch.empty(batch, width - 1, channels, dtype=state.dtype,
        device=x.device)
    launch(
        _conv_bwd_kernel, (-(-channels // block_c), parts, batch), x, weight, bias, state, dy, dlast, dx,
        dweight, dbias,
        dstate, *x.stride()[:2], *dy.stride()[:2], channels, seq, segment, WIDTH=width, BLOCK_C=block_c,
        STEPS=8,
        HAS_BIAS=bias is not None, HAS_STATE=state is not None and width > 1,
        HAS_LAST=dlast is not None and width > 1,
        SILU=silu, num_warps=1,
    )  # fmt: skip
    none = torch.empty(0, **options)
    dbias = none if dbias is None else dbias.sum((0, 1)).to(bias.dtype)
    return dx, dweight.sum((0, 1)).to(weight.dtype), dbias, none.clone() if dstate is None else dstate


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
    dx, dweight, dbias, dstate = torch.ops.beyond_softmax.causal_conv_backward(dy, dlast, x, weight, bias,
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
