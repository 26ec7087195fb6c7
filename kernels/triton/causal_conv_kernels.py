"""Kernels of the short causal convolution: outputs, gradients of inputs, sums of the weights' gradients.

A program is one warp, which walks through a segment of the sequence with the last few inputs of its channels
in registers, so that every tensor is read once; the next block of steps is on its way while one is worked on.
Taps are named by their distance 0..3 from the output. Strides and channels are constants: the rows of a block
are then reached by one pointer.
"""

import typing

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
@typing.no_type_check
def _conv_place(BLOCK_C: tl.constexpr, N_CHANNEL: tl.constexpr):
    """Number of a program along the sequence, its channels, and which of them there are. Programs of the same
    positions come one after the other."""
    n_block: tl.constexpr = (N_CHANNEL + BLOCK_C - 1) // BLOCK_C
    program = tl.program_id(0)
    offs_c = program % n_block * BLOCK_C + tl.arange(0, BLOCK_C)
    mask_c = offs_c < N_CHANNEL
    if N_CHANNEL % BLOCK_C == 0:
        mask_c = tl.full([BLOCK_C], True, tl.int1)
    return program // n_block, offs_c, mask_c


@triton.jit
@typing.no_type_check
def _conv_input(x_ptr, state_ptr, position, batch, seq, offs_c, mask, STRIDE_X_T: tl.constexpr,
    N_CHANNEL: tl.constexpr, WIDTH: tl.constexpr, HAS_STATE: tl.constexpr):  # fmt: skip
    """Inputs at positions that may be before the sequence, where they come from the state."""
    inside = mask & (position >= 0) & (position < seq)
    b_x = tl.load(x_ptr + position.to(tl.int64) * STRIDE_X_T + offs_c, mask=inside, other=0.0).to(tl.float32)
    if HAS_STATE:
        old = mask & (position < 0) & (position >= 1 - WIDTH)
        row = batch * (WIDTH - 1) + position + WIDTH - 1
        b_x += tl.load(state_ptr + row * N_CHANNEL + offs_c, mask=old, other=0.0).to(tl.float32)
    return b_x


@triton.jit
@typing.no_type_check
def _conv_weights(weight_ptr, bias_ptr, offs_c, mask_c, WIDTH: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK_C: tl.constexpr):  # fmt: skip
    """Weights by distance, 0 beyond the width, and the bias."""
    # [BLOCK_C, 4] in the order of memory, then one column after the other.
    tap = tl.arange(0, 4)[None, :]
    mask = mask_c[:, None] & (tap < WIDTH)
    b_w = tl.load(weight_ptr + offs_c[:, None] * WIDTH + tap, mask=mask, other=0.0).to(tl.float32)
    even, odd = tl.split(tl.reshape(b_w, [BLOCK_C, 2, 2]))
    column0, column2 = tl.split(even)
    column1, column3 = tl.split(odd)
    if WIDTH == 4:
        weights = (column3, column2, column1, column0)
    elif WIDTH == 3:
        weights = (column2, column1, column0, column3)
    elif WIDTH == 2:
        weights = (column1, column0, column2, column3)
    else:
        weights = (column0, column1, column2, column3)
    b_bias = tl.zeros([BLOCK_C], tl.float32)
    if HAS_BIAS:
        b_bias = tl.load(bias_ptr + offs_c, mask=mask_c, other=0.0).to(tl.float32)
    return weights, b_bias


@triton.jit
@typing.no_type_check
def _conv_sigmoid(b_pre):
    """The square of a reciprocal root: a division scales its operands, which costs more than both."""
    b_root = tl.rsqrt(1.0 + tl.exp2(b_pre * -LOG2E))
    return b_root * b_root


@triton.jit
@typing.no_type_check
def _conv_load(ptrs, left, mask_c, STRIDE_T: tl.constexpr, COUNT: tl.constexpr):
    """COUNT rows, of which `left` are there, as they are; the others are 0."""
    found = ()
    for step in tl.static_range(COUNT):
        found = found + (tl.load(ptrs + step * STRIDE_T, mask=mask_c & (step < left), other=0.0),)
    return found


@triton.jit
@typing.no_type_check
def _conv_fwd_kernel(
    x_ptr, weight_ptr, bias_ptr, state_ptr, y_ptr, last_ptr, stride_x_b, seq, segment,
    STRIDE_X_T: tl.constexpr, N_CHANNEL: tl.constexpr, WIDTH: tl.constexpr, BLOCK_C: tl.constexpr,
    STEPS: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_STATE: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """Outputs of one segment; the programs of the first segment also write the last state."""
    batch = tl.program_id(1).to(tl.int64)
    part, offs_c, mask_c = _conv_place(BLOCK_C, N_CHANNEL)
    first = part * segment
    x_ptr += batch * stride_x_b
    b_x1 = _conv_input(x_ptr, state_ptr, first - 1, batch, seq, offs_c, mask_c, STRIDE_X_T, N_CHANNEL, WIDTH,
        HAS_STATE)
    b_x2 = _conv_input(x_ptr, state_ptr, first - 2, batch, seq, offs_c, mask_c, STRIDE_X_T, N_CHANNEL, WIDTH,
        HAS_STATE)
    b_x3 = _conv_input(x_ptr, state_ptr, first - 3, batch, seq, offs_c, mask_c, STRIDE_X_T, N_CHANNEL, WIDTH,
        HAS_STATE)
    w, b_bias = _conv_weights(weight_ptr, bias_ptr, offs_c, mask_c, WIDTH, HAS_BIAS, BLOCK_C)
    if SILU:
        # Outputs come scaled by -log2(e), as the exponential takes them.
        w = (w[0] * -LOG2E, w[1] * -LOG2E, w[2] * -LOG2E, w[3] * -LOG2E)
        b_bias *= -LOG2E
    x_ptrs = x_ptr + first.to(tl.int64) * STRIDE_X_T + offs_c
    y_ptrs = y_ptr + (batch * seq + first) * N_CHANNEL + offs_c
    left = tl.minimum(segment, seq - first)
    xs = _conv_load(x_ptrs, left, mask_c, STRIDE_X_T, STEPS)
    for _ in tl.range(tl.cdiv(left, STEPS)):
        x_ptrs += STEPS * STRIDE_X_T
        next_xs = _conv_load(x_ptrs, left - STEPS, mask_c, STRIDE_X_T, STEPS)
        for step in tl.static_range(STEPS):
            b_x0 = xs[step].to(tl.float32)
            b_y = b_bias + w[0] * b_x0 + w[1] * b_x1 + w[2] * b_x2 + w[3] * b_x3
            b_x3, b_x2, b_x1 = b_x2, b_x1, b_x0
            if SILU:
                b_root = tl.rsqrt(tl.exp2(b_y) * LOG2E + LOG2E)
                b_y = (b_y * -1.0) * (b_root * b_root)
            tl.store(y_ptrs + step * N_CHANNEL, b_y.to(y_ptr.dtype.element_ty), mask=mask_c & (step < left))
        xs = next_xs
        y_ptrs += STEPS * N_CHANNEL
        left -= STEPS
    if part == 0:
        for slot in tl.static_range(WIDTH - 1):
            # A tensor also where seq is the constant 1.
            place = batch * 0 + seq - (WIDTH - 1) + slot
            b_last = _conv_input(x_ptr, state_ptr, place, batch, seq, offs_c, mask_c, STRIDE_X_T, N_CHANNEL,
                WIDTH, HAS_STATE)
            last_ptrs = last_ptr + (batch * (WIDTH - 1) + slot) * N_CHANNEL + offs_c
            tl.store(last_ptrs, b_last.to(last_ptr.dtype.element_ty), mask=mask_c)


@triton.jit
@typing.no_type_check
def _conv_state(state_ptr, first, LAG: tl.constexpr, batch, offs_c, mask_c, N_CHANNEL: tl.constexpr,
    WIDTH: tl.constexpr):  # fmt: skip
    """Inputs LAG positions before a segment that starts the sequence; 0 for others."""
    row = batch * (WIDTH - 1) + WIDTH - 1 - LAG
    mask = mask_c & (first == 0) & (LAG < WIDTH)
    return tl.load(state_ptr + row * N_CHANNEL + offs_c, mask=mask, other=0.0).to(tl.float32)


@triton.jit
@typing.no_type_check
def _conv_store_dx(
    b_dx, t, dx_ptrs, dlast_ptr, dstate_ptr, batch, seq, offs_c, mask_c,
    N_CHANNEL: tl.constexpr, WIDTH: tl.constexpr, HAS_STATE: tl.constexpr, HAS_LAST: tl.constexpr,
):  # fmt: skip
    """Write the gradients of the inputs at t, or of the state where t < 0."""
    if HAS_LAST:
        slot = t - (seq - (WIDTH - 1))
        kept = mask_c & (slot >= 0) & (slot < WIDTH - 1)
        dlast_ptrs = dlast_ptr + (batch * (WIDTH - 1) + slot) * N_CHANNEL + offs_c
        b_dx += tl.load(dlast_ptrs, mask=kept, other=0.0).to(tl.float32)
    tl.store(dx_ptrs, b_dx.to(dx_ptrs.dtype.element_ty), mask=mask_c & (t >= 0) & (t < seq))
    if HAS_STATE:
        dstate_ptrs = dstate_ptr + (batch * (WIDTH - 1) + t + WIDTH - 1) * N_CHANNEL + offs_c
        tl.store(dstate_ptrs, b_dx.to(dstate_ptr.dtype.element_ty), mask=mask_c & (t < 0))


@triton.jit
@typing.no_type_check
def _conv_bwd_steps(
    xs, dys, inputs, pending, sums, w, b_bias, dx_ptrs, dlast_ptr, dstate_ptr, start, batch, seq, offs_c,
    mask_c,
    STRIDE_DX_T: tl.constexpr, N_CHANNEL: tl.constexpr, WIDTH: tl.constexpr, COUNT: tl.constexpr,
    OWN: tl.constexpr, HAS_STATE: tl.constexpr, HAS_LAST: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """COUNT steps from `start`: the inputs 1, 2 and 3 positions back, the gradients of these inputs that are
    still being added up, and (of OWN steps) the sums for the weights are carried on."""
    b_x1, b_x2, b_x3 = inputs[0], inputs[1], inputs[2]
    b_p1, b_p2, b_p3 = pending[0], pending[1], pending[2]
    b_dw0, b_dw1, b_dw2, b_dw3, b_db = sums[0], sums[1], sums[2], sums[3], sums[4]
    for step in tl.static_range(COUNT):
        b_x0 = xs[step].to(tl.float32)
        b_dpre = dys[step].to(tl.float32)
        if SILU:
            b_pre = b_bias + w[0] * b_x0 + w[1] * b_x1 + w[2] * b_x2 + w[3] * b_x3
            b_sigmoid = _conv_sigmoid(b_pre)
            b_dpre = b_dpre * (b_sigmoid + b_sigmoid * (b_pre - b_pre * b_sigmoid))
        b_dx = b_dpre * w[WIDTH - 1]
        if WIDTH == 4:
            b_dx += b_p3
        elif WIDTH == 3:
            b_dx += b_p2
        elif WIDTH == 2:
            b_dx += b_p1
        b_p3, b_p2, b_p1 = b_p2 + b_dpre * w[2], b_p1 + b_dpre * w[1], b_dpre * w[0]
        if OWN:
            b_dw0 += b_dpre * b_x0
            b_dw1 += b_dpre * b_x1
            b_dw2 += b_dpre * b_x2
            b_dw3 += b_dpre * b_x3
            b_db += b_dpre
            _conv_store_dx(
                b_dx, start + step - (WIDTH - 1), dx_ptrs + (step - (WIDTH - 1)) * STRIDE_DX_T, dlast_ptr,
                dstate_ptr, batch, seq, offs_c, mask_c, N_CHANNEL, WIDTH, HAS_STATE, HAS_LAST,
            )  # fmt: skip
        b_x3, b_x2, b_x1 = b_x2, b_x1, b_x0
    return (b_x1, b_x2, b_x3), (b_p1, b_p2, b_p3), (b_dw0, b_dw1, b_dw2, b_dw3, b_db)


@triton.jit
@typing.no_type_check
def _conv_bwd_kernel(
    x_ptr, weight_ptr, bias_ptr, state_ptr, dy_ptr, dlast_ptr, dx_ptr, part_ptr, dstate_ptr, stride_x_b,
    stride_dy_b, stride_dx_b, seq, segment,
    STRIDE_X_T: tl.constexpr, STRIDE_DY_T: tl.constexpr, STRIDE_DX_T: tl.constexpr,
    N_CHANNEL: tl.constexpr, WIDTH: tl.constexpr, BLOCK_C: tl.constexpr, STEPS: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_STATE: tl.constexpr,
    HAS_LAST: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """Gradients of the inputs that the outputs of one segment are the last to read, and the segment's part of
    the gradients of the weights and the bias. Walks the few steps before the segment, then the segment, a
    multiple of STEPS."""
    batch = tl.program_id(1).to(tl.int64)
    part, offs_c, mask_c = _conv_place(BLOCK_C, N_CHANNEL)
    first = part * segment
    x_ptr += batch * stride_x_b
    x_ptrs = x_ptr + first.to(tl.int64) * STRIDE_X_T + offs_c
    dy_ptrs = dy_ptr + batch * stride_dy_b + first.to(tl.int64) * STRIDE_DY_T + offs_c
    dx_ptrs = dx_ptr + batch * stride_dx_b + first.to(tl.int64) * STRIDE_DX_T + offs_c
    # Steps before the segment, and what their outputs read.
    head = first - (WIDTH - 1)
    mask = mask_c & (first > 0)
    head_xs = _conv_load(x_ptrs - (WIDTH - 1) * STRIDE_X_T, WIDTH - 1, mask, STRIDE_X_T, WIDTH - 1)
    head_dys = _conv_load(dy_ptrs - (WIDTH - 1) * STRIDE_DY_T, WIDTH - 1, mask, STRIDE_DY_T, WIDTH - 1)
    before = _conv_load(x_ptrs - (WIDTH + 2) * STRIDE_X_T, 3, mask, STRIDE_X_T, 3)
    left = tl.minimum(segment, seq - first)
    xs = _conv_load(x_ptrs, left, mask_c, STRIDE_X_T, STEPS)
    dys = _conv_load(dy_ptrs, left, mask_c, STRIDE_DY_T, STEPS)
    w, b_bias = _conv_weights(weight_ptr, bias_ptr, offs_c, mask_c, WIDTH, HAS_BIAS, BLOCK_C)
    zero = tl.zeros([BLOCK_C], tl.float32)
    sums = (zero, zero, zero, zero, zero)
    inputs = (before[2].to(tl.float32), before[1].to(tl.float32), before[0].to(tl.float32))
    inputs, pending, sums = _conv_bwd_steps(
        head_xs, head_dys, inputs, (zero, zero, zero), sums, w, b_bias, dx_ptrs, dlast_ptr, dstate_ptr, head,
        batch, seq, offs_c, mask_c, STRIDE_DX_T, N_CHANNEL, WIDTH, WIDTH - 1, False, HAS_STATE, HAS_LAST,
        SILU,
    )  # fmt: skip
    if HAS_STATE:
        # Before the sequence there are no outputs, and the inputs are the state's.
        b_x1 = inputs[0] + _conv_state(state_ptr, first, 1, batch, offs_c, mask_c, N_CHANNEL, WIDTH)
        b_x2 = inputs[1] + _conv_state(state_ptr, first, 2, batch, offs_c, mask_c, N_CHANNEL, WIDTH)
        b_x3 = inputs[2] + _conv_state(state_ptr, first, 3, batch, offs_c, mask_c, N_CHANNEL, WIDTH)
        inputs = (b_x1, b_x2, b_x3)
    start = first
    for _ in tl.range(tl.cdiv(left, STEPS)):
        x_ptrs += STEPS * STRIDE_X_T
        dy_ptrs += STEPS * STRIDE_DY_T
        left -= STEPS
        next_xs = _conv_load(x_ptrs, left, mask_c, STRIDE_X_T, STEPS)
        next_dys = _conv_load(dy_ptrs, left, mask_c, STRIDE_DY_T, STEPS)
        inputs, pending, sums = _conv_bwd_steps(
            xs, dys, inputs, pending, sums, w, b_bias, dx_ptrs, dlast_ptr, dstate_ptr, start, batch, seq,
            offs_c, mask_c, STRIDE_DX_T, N_CHANNEL, WIDTH, STEPS, True, HAS_STATE, HAS_LAST, SILU,
        )  # fmt: skip
        xs, dys = next_xs, next_dys
        dx_ptrs += STEPS * STRIDE_DX_T
        start += STEPS
    # Behind the last output nothing is added.
    mask = mask_c & (start >= seq)
    for lag in tl.static_range(1, WIDTH):
        _conv_store_dx(
            pending[lag - 1], start - lag, dx_ptrs - lag * STRIDE_DX_T, dlast_ptr, dstate_ptr, batch, seq,
            offs_c, mask, N_CHANNEL, WIDTH, HAS_STATE, HAS_LAST,
        )  # fmt: skip
    # [batch and part, tap (by distance) or bias, channel]
    part_ptr += (batch * tl.cdiv(seq, segment) + part) * 5 * N_CHANNEL + offs_c
    for number in tl.static_range(5):
        tl.store(part_ptr + number * N_CHANNEL, sums[number], mask=mask_c)


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
