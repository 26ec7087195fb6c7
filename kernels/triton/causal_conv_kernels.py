"""Kernels of the short causal convolution: outputs, gradients of inputs, sums of the weights' gradients.

A program walks through a segment of the sequence with the last few inputs of its channels in registers, so
that every tensor is read once; loads of a block of steps are started together. Taps are named by their
distance 0..3 from the output.
"""

import typing

import triton
import triton.language as tl


@triton.jit
@typing.no_type_check
def _conv_input(x_ptr, state_ptr, position, stride_x_t, batch, n_channel, seq, offs_c, mask_c,
    WIDTH: tl.constexpr, HAS_STATE: tl.constexpr):  # fmt: skip
    """Input of one position before a segment, from the state before the sequence."""
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
def _conv_weights(weight_ptr, bias_ptr, offs_c, mask_c, WIDTH: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK_C: tl.constexpr):  # fmt: skip
    """Weights by distance, 0 beyond the width, and the bias."""
    base = weight_ptr + offs_c * WIDTH + WIDTH - 1
    weights = ()
    for lag in tl.static_range(4):
        weights = weights + (tl.load(base - lag, mask=mask_c & (WIDTH > lag), other=0.0).to(tl.float32),)
    b_bias = tl.zeros([BLOCK_C], tl.float32)
    if HAS_BIAS:
        b_bias = tl.load(bias_ptr + offs_c, mask=mask_c, other=0.0).to(tl.float32)
    return weights, b_bias


@triton.jit
@typing.no_type_check
def _conv_fwd_kernel(
    x_ptr, weight_ptr, bias_ptr, state_ptr, y_ptr, last_ptr, stride_x_b, stride_x_t, n_channel, seq, segment,
    WIDTH: tl.constexpr, BLOCK_C: tl.constexpr, STEPS: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_STATE: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """Outputs of one segment; the programs of the first segment also write the last state."""
    batch = tl.program_id(2).to(tl.int64)
    first = batch * 0 + tl.program_id(1) * segment
    offs_c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    mask_c = offs_c < n_channel
    x_ptr += batch * stride_x_b
    y_ptr += batch * seq * n_channel
    w, b_bias = _conv_weights(weight_ptr, bias_ptr, offs_c, mask_c, WIDTH, HAS_BIAS, BLOCK_C)
    b_x1 = _conv_input(x_ptr, state_ptr, first - 1, stride_x_t, batch, n_channel, seq, offs_c, mask_c, WIDTH,
        HAS_STATE)
    b_x2 = _conv_input(x_ptr, state_ptr, first - 2, stride_x_t, batch, n_channel, seq, offs_c, mask_c, WIDTH,
        HAS_STATE)
    b_x3 = _conv_input(x_ptr, state_ptr, first - 3, stride_x_t, batch, n_channel, seq, offs_c, mask_c, WIDTH,
        HAS_STATE)
    stop = tl.minimum(first + segment, seq)
    for block in tl.range(tl.cdiv(stop - first, STEPS)):
        start = first + block * STEPS
        xs = ()
        for step in tl.static_range(STEPS):
            mask = mask_c & (start + step < stop)
            xs = xs + (tl.load(x_ptr + (start + step) * stride_x_t + offs_c, mask=mask, other=0.0),)
        for step in tl.static_range(STEPS):
            b_x0 = xs[step].to(tl.float32)
            b_y = b_bias + w[0] * b_x0 + w[1] * b_x1 + w[2] * b_x2 + w[3] * b_x3
            b_x3, b_x2, b_x1 = b_x2, b_x1, b_x0
            if SILU:
                b_y = b_y / (1.0 + tl.exp2(-1.4426950408889634 * b_y))
            y_ptrs = y_ptr + (start + step) * n_channel + offs_c
            tl.store(y_ptrs, b_y.to(y_ptr.dtype.element_ty), mask=mask_c & (start + step < stop))
    if tl.program_id(1) == 0:
        for slot in tl.static_range(WIDTH - 1):
            place = batch * 0 + seq - (WIDTH - 1) + slot
            b_last = _conv_input(x_ptr, state_ptr, place, stride_x_t, batch, n_channel, seq, offs_c, mask_c,
                WIDTH, HAS_STATE)
            last_ptrs = last_ptr + (batch * (WIDTH - 1) + slot) * n_channel + offs_c
            tl.store(last_ptrs, b_last.to(last_ptr.dtype.element_ty), mask=mask_c)


@triton.jit
@typing.no_type_check
def _conv_store_dx(
    b_dx, t, dlast_ptr, dx_ptr, dstate_ptr, batch, n_channel, seq, first, stop, offs_c, mask_c,
    WIDTH: tl.constexpr, HAS_STATE: tl.constexpr, HAS_LAST: tl.constexpr,
):  # fmt: skip
    """Write the gradient of the input at t, or of the state where t < 0."""
    if HAS_LAST:
        slot = t - (seq - (WIDTH - 1))
        kept = mask_c & (slot >= 0) & (slot < WIDTH - 1)
        dlast_ptrs = dlast_ptr + (batch * (WIDTH - 1) + slot) * n_channel + offs_c
        b_dx += tl.load(dlast_ptrs, mask=kept, other=0.0).to(tl.float32)
    dx_ptrs = dx_ptr + (batch * seq + t) * n_channel + offs_c
    tl.store(dx_ptrs, b_dx.to(dx_ptr.dtype.element_ty), mask=mask_c & (t >= first) & (t < stop))
    if HAS_STATE:
        dstate_ptrs = dstate_ptr + (batch * (WIDTH - 1) + t + WIDTH - 1) * n_channel + offs_c
        tl.store(dstate_ptrs, b_dx.to(dstate_ptr.dtype.element_ty), mask=mask_c & (t < 0) & (first == 0))


@triton.jit
@typing.no_type_check
def _conv_bwd_steps(
    inputs, pending, sums, w, b_bias, x_ptr, dy_ptr, dlast_ptr, dx_ptr, dstate_ptr, stride_x_t, stride_dy_t,
    batch, n_channel, seq, first, stop, start, limit, offs_c, mask_c,
    WIDTH: tl.constexpr, COUNT: tl.constexpr, OWN: tl.constexpr, HAS_STATE: tl.constexpr,
    HAS_LAST: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """COUNT steps from `start`: the inputs 1, 2 and 3 positions back, the gradients of these inputs that are
    still being added up, and the sums for the weights (of OWN steps) are carried on."""
    b_x1, b_x2, b_x3 = inputs[0], inputs[1], inputs[2]
    b_p1, b_p2, b_p3 = pending[0], pending[1], pending[2]
    b_dw0, b_dw1, b_dw2, b_dw3, b_db = sums[0], sums[1], sums[2], sums[3], sums[4]
    xs, dys = (), ()
    for step in tl.static_range(COUNT):
        mask = mask_c & (start + step < limit)
        xs = xs + (tl.load(x_ptr + (start + step) * stride_x_t + offs_c, mask=mask, other=0.0),)
        dys = dys + (tl.load(dy_ptr + (start + step) * stride_dy_t + offs_c, mask=mask, other=0.0),)
    for step in tl.static_range(COUNT):
        b_x0 = xs[step].to(tl.float32)
        b_dpre = dys[step].to(tl.float32)
        if SILU:
            b_pre = b_bias + w[0] * b_x0 + w[1] * b_x1 + w[2] * b_x2 + w[3] * b_x3
            b_sigmoid = 1.0 / (1.0 + tl.exp2(-1.4426950408889634 * b_pre))
            b_dpre = b_dpre * b_sigmoid * (1.0 + b_pre * (1.0 - b_sigmoid))
        if OWN:
            b_dw0 += b_dpre * b_x0
            b_dw1 += b_dpre * b_x1
            b_dw2 += b_dpre * b_x2
            b_dw3 += b_dpre * b_x3
            b_db += b_dpre
        b_dx = b_dpre * w[WIDTH - 1]
        if WIDTH == 4:
            b_dx += b_p3
        elif WIDTH == 3:
            b_dx += b_p2
        elif WIDTH == 2:
            b_dx += b_p1
        b_p3, b_p2, b_p1 = b_p2 + b_dpre * w[2], b_p1 + b_dpre * w[1], b_dpre * w[0]
        b_x3, b_x2, b_x1 = b_x2, b_x1, b_x0
        _conv_store_dx(
            b_dx, start + step - (WIDTH - 1), dlast_ptr, dx_ptr, dstate_ptr, batch, n_channel, seq, first,
            stop, offs_c, mask_c, WIDTH, HAS_STATE, HAS_LAST,
        )  # fmt: skip
    return (b_x1, b_x2, b_x3), (b_p1, b_p2, b_p3), (b_dw0, b_dw1, b_dw2, b_dw3, b_db)


@triton.jit
@typing.no_type_check
def _conv_bwd_kernel(
    x_ptr, weight_ptr, bias_ptr, state_ptr, dy_ptr, dlast_ptr, dx_ptr, part_ptr, dstate_ptr,
    stride_x_b, stride_x_t, stride_dy_b, stride_dy_t, n_channel, seq, segment,
    WIDTH: tl.constexpr, BLOCK_C: tl.constexpr, STEPS: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_STATE: tl.constexpr, HAS_LAST: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """Input gradients of one segment, and its part of the gradients of the weights and the bias."""
    batch = tl.program_id(2).to(tl.int64)
    part = tl.program_id(1)
    first = batch * 0 + part * segment
    offs_c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    mask_c = offs_c < n_channel
    x_ptr += batch * stride_x_b
    dy_ptr += batch * stride_dy_b
    w, b_bias = _conv_weights(weight_ptr, bias_ptr, offs_c, mask_c, WIDTH, HAS_BIAS, BLOCK_C)
    b_x1 = _conv_input(x_ptr, state_ptr, first - 1, stride_x_t, batch, n_channel, seq, offs_c, mask_c, WIDTH,
        HAS_STATE)
    b_x2 = _conv_input(x_ptr, state_ptr, first - 2, stride_x_t, batch, n_channel, seq, offs_c, mask_c, WIDTH,
        HAS_STATE)
    b_x3 = _conv_input(x_ptr, state_ptr, first - 3, stride_x_t, batch, n_channel, seq, offs_c, mask_c, WIDTH,
        HAS_STATE)
    zero = tl.zeros([BLOCK_C], tl.float32)
    inputs = (b_x1, b_x2, b_x3)
    pending = (zero, zero, zero)
    sums = (zero, zero, zero, zero, zero)
    stop = tl.minimum(first + segment, seq)
    n_block = tl.cdiv(stop - first, STEPS)
    for block in tl.range(n_block):
        inputs, pending, sums = _conv_bwd_steps(
            inputs, pending, sums, w, b_bias, x_ptr, dy_ptr, dlast_ptr, dx_ptr, dstate_ptr, stride_x_t,
            stride_dy_t, batch, n_channel, seq, first, stop, first + block * STEPS, stop, offs_c, mask_c,
            WIDTH, STEPS, True, HAS_STATE, HAS_LAST, SILU,
        )  # fmt: skip
    # The outputs just after the segment also read its inputs.
    inputs, pending, unused = _conv_bwd_steps(
        inputs, pending, sums, w, b_bias, x_ptr, dy_ptr, dlast_ptr, dx_ptr, dstate_ptr, stride_x_t,
        stride_dy_t, batch, n_channel, seq, first, stop, first + n_block * STEPS, seq, offs_c, mask_c, WIDTH,
        WIDTH - 1, False, HAS_STATE, HAS_LAST, SILU,
    )  # fmt: skip
    # [batch and segment, tap (by distance) or bias, channel]
    part_ptr += (batch * tl.num_programs(1) + part) * 5 * n_channel + offs_c
    tl.store(part_ptr, sums[0], mask=mask_c)
    tl.store(part_ptr + n_channel, sums[1], mask=mask_c)
    tl.store(part_ptr + 2 * n_channel, sums[2], mask=mask_c)
    tl.store(part_ptr + 3 * n_channel, sums[3], mask=mask_c)
    tl.store(part_ptr + 4 * n_channel, sums[4], mask=mask_c)


@triton.jit
@typing.no_type_check
def _conv_bwd_sum_kernel(
    part_ptr, dweight_ptr, dbias_ptr, n_channel, n_part,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Gradients of the weights and the bias: parts added up in their order."""
    lag = tl.program_id(1)
    offs_c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    offs_r = tl.arange(0, ROWS)
    mask_c = offs_c < n_channel
    b_sum = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, n_part, ROWS):
        row = (start + offs_r).to(tl.int64)[:, None]
        part_ptrs = part_ptr + (row * 5 + lag) * n_channel + offs_c[None, :]
        b_sum += tl.sum(tl.load(part_ptrs, mask=(row < n_part) & mask_c[None, :], other=0.0), 0)
    if lag < WIDTH:
        dweight_ptrs = dweight_ptr + offs_c * WIDTH + WIDTH - 1 - lag
        tl.store(dweight_ptrs, b_sum.to(dweight_ptr.dtype.element_ty), mask=mask_c)
    if HAS_BIAS:
        if lag == 4:
            tl.store(dbias_ptr + offs_c, b_sum.to(dbias_ptr.dtype.element_ty), mask=mask_c)
