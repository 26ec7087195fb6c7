"""Kernels of linear attention summed over matching sources; see `linear_matches`.

An event is a position as a source or as a destination; events are in order of label, time, and source before
destination. Decays are base-2 logarithms summed from the start, kept as two float32 numbers, so that their
differences keep their digits however long the sequence is.
"""

import typing

import triton
import triton.language as tl


@triton.jit
@typing.no_type_check
def _elapsed_kernel(
    g_ptr, sum_ptr, high_ptr, low_ptr, stride_g_b, stride_g_t, stride_g_h, n_head, seq, n_block,
    BLOCK: tl.constexpr, BLOCK_N: tl.constexpr, OUTPUT: tl.constexpr,
):  # fmt: skip
    """Sum of the log decays of one block of steps, or their sums from the start as high and low part."""
    block = tl.program_id(0)
    head = tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
    lane = batch * n_head + head
    offs = lane * 0 + block * BLOCK + tl.arange(0, BLOCK)
    g_ptrs = g_ptr + batch * stride_g_b + head * stride_g_h + offs * stride_g_t
    b_g = tl.maximum(tl.load(g_ptrs, mask=offs < seq, other=0.0).to(tl.float64), -1e5) * 1.4426950408889634
    if OUTPUT:
        b_before = tl.zeros([BLOCK_N], tl.float64)
        for start in tl.range(0, block, BLOCK_N):
            offs_n = start + tl.arange(0, BLOCK_N)
            b_before += tl.load(sum_ptr + lane * n_block + offs_n, mask=offs_n < block, other=0.0)
        b_sum = tl.cumsum(b_g, 0) + tl.sum(b_before, 0)
        b_high = b_sum.to(tl.float32)
        tl.store(high_ptr + lane * seq + offs, b_high, mask=offs < seq)
        tl.store(low_ptr + lane * seq + offs, (b_sum - b_high.to(tl.float64)).to(tl.float32), mask=offs < seq)
    else:
        tl.store(sum_ptr + lane * n_block + block, tl.sum(b_g, 0))


@triton.jit
@typing.no_type_check
def _elapsed_at(high_ptr, low_ptr, position, mask):
    """Both parts of the decay up to a position."""
    high = tl.load(high_ptr + position, mask=mask, other=0.0)
    return high, tl.load(low_ptr + position, mask=mask, other=0.0)


@triton.jit
@typing.no_type_check
def _decay_from(high, low, high_from, low_from):
    """Decay from one position, or several, to another."""
    return tl.exp2(tl.minimum((high - high_from) + (low - low_from), 0.0))


@triton.jit
@typing.no_type_check
def _match_state_kernel(
    k_ptr, w_ptr, high_ptr, low_ptr, order_ptr, label_ptr, z_ptr, kept_ptr,
    stride_k_b, stride_k_t, stride_k_h, stride_w_b, stride_w_t, stride_w_h, n_head, seq, n_segment, segment,
    GROUP_K: tl.constexpr, D: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_D: tl.constexpr,
    HAS_G: tl.constexpr, HAS_W: tl.constexpr,
):  # fmt: skip
    """Decayed keys of the last label of one segment of events, and how much of what enters is left."""
    part = tl.program_id(0)
    head = tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
    lane = batch * n_head + head
    n_event = 2 * seq
    order_ptr += batch * n_event
    label_ptr += batch * n_event
    k_ptr += batch * stride_k_b + head // GROUP_K * stride_k_h
    if HAS_G:
        high_ptr += lane * seq
        low_ptr += lane * seq
    offs_e = tl.arange(0, BLOCK_E)
    offs_d = tl.arange(0, BLOCK_D)
    first = part * segment
    stop = tl.minimum(first + segment, n_event)
    label_end = tl.load(label_ptr + stop - 1)
    if HAS_G:
        high, low = _elapsed_at(high_ptr, low_ptr, tl.load(order_ptr + stop - 1) // 2, True)
    b_z = tl.zeros([BLOCK_D], tl.float32)
    at = stop
    while at > first:
        start = tl.maximum(at - BLOCK_E, first)
        e = start + offs_e
        b_label = tl.load(label_ptr + e, mask=e < at, other=0)
        b_order = tl.load(order_ptr + e, mask=e < at, other=0)
        b_position = b_order // 2
        mask = (e < at) & (b_label == label_end) & (b_order % 2 == 0)
        b_f = tl.full([BLOCK_E], 1.0, tl.float32)
        if HAS_G:
            b_high, b_low = _elapsed_at(high_ptr, low_ptr, b_position, mask)
            b_f = _decay_from(high, low, b_high, b_low)
        if HAS_W:
            w_ptrs = w_ptr + batch * stride_w_b + b_position * stride_w_t + head * stride_w_h
            b_f *= tl.load(w_ptrs, mask=mask, other=0.0).to(tl.float32)
        b_k = tl.load(k_ptr + b_position[:, None] * stride_k_t + offs_d[None, :],
            mask=mask[:, None] & (offs_d[None, :] < D), other=0.0)
        b_z += tl.sum(b_k.to(tl.float32) * b_f[:, None], 0)
        # Labels are in order: none of an earlier block is the last if the first here is not.
        at = tl.where(tl.load(label_ptr + start) == label_end, start, first)
    place = lane * n_segment + part
    tl.store(z_ptr + place * D + offs_d, b_z, mask=offs_d < D)
    kept = 0.0
    if part > 0:
        if tl.load(label_ptr + first - 1) == label_end:
            kept = 1.0
            if HAS_G:
                high_in, low_in = _elapsed_at(high_ptr, low_ptr, tl.load(order_ptr + first - 1) // 2, True)
                kept = _decay_from(high, low, high_in, low_in)
    tl.store(kept_ptr + place, kept)


@triton.jit
@typing.no_type_check
def _match_output_kernel(
    q_ptr, k_ptr, w_ptr, high_ptr, low_ptr, order_ptr, label_ptr, z_ptr, kept_ptr, out_ptr,
    stride_q_b, stride_q_t, stride_q_h, stride_k_b, stride_k_t, stride_k_h, stride_w_b, stride_w_t,
    stride_w_h, n_head, seq, n_segment, segment, scale,
    GROUP_Q: tl.constexpr, GROUP_K: tl.constexpr, D: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_D: tl.constexpr, HAS_G: tl.constexpr, HAS_W: tl.constexpr, BLOCK_P: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Destinations of one segment of the events of one head, block after block."""
    part = tl.program_id(0)
    head = tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
    lane = batch * n_head + head
    n_event = 2 * seq
    order_ptr += batch * n_event
    label_ptr += batch * n_event
    q_ptr += batch * stride_q_b + head // GROUP_Q * stride_q_h
    k_ptr += batch * stride_k_b + head // GROUP_K * stride_k_h
    if HAS_G:
        high_ptr += lane * seq
        low_ptr += lane * seq
    offs_e = tl.arange(0, BLOCK_E)
    offs_d = tl.arange(0, BLOCK_D)
    # What enters: the sums of earlier segments, as far back as their last label goes.
    b_z = tl.zeros([BLOCK_D], tl.float32)
    kept = 1.0
    before = part - 1
    while (before >= 0) & (kept > 0.0):
        place = lane * n_segment + before
        b_z += tl.load(z_ptr + place * D + offs_d, mask=offs_d < D, other=0.0) * kept
        kept *= tl.load(kept_ptr + place)
        before -= 1
    first = part * segment
    stop = tl.minimum(first + segment, n_event)
    label_in = tl.load(label_ptr + tl.maximum(first - 1, 0))
    high_in, low_in = 0.0, 0.0
    if HAS_G:
        entered = tl.load(order_ptr + tl.maximum(first - 1, 0)) // 2
        high_in, low_in = _elapsed_at(high_ptr, low_ptr, entered, True)
    b_label_next = tl.load(label_ptr + first + offs_e, mask=first + offs_e < stop, other=0)
    b_order_next = tl.load(order_ptr + first + offs_e, mask=first + offs_e < stop, other=0)
    for start in tl.range(first, stop, BLOCK_E):
        e = start + offs_e
        b_label, b_order = b_label_next, b_order_next
        # One block ahead: where the rows are is known when they are asked for.
        b_label_next = tl.load(label_ptr + e + BLOCK_E, mask=e + BLOCK_E < stop, other=0)
        b_order_next = tl.load(order_ptr + e + BLOCK_E, mask=e + BLOCK_E < stop, other=0)
        b_position = b_order // 2
        is_source = (e < stop) & (b_order % 2 == 0)
        is_dest = (e < stop) & (b_order % 2 == 1)
        b_k = tl.load(k_ptr + b_position[:, None] * stride_k_t + offs_d[None, :],
            mask=is_source[:, None] & (offs_d[None, :] < D), other=0.0)
        b_q = tl.load(q_ptr + b_position[:, None] * stride_q_t + offs_d[None, :],
            mask=is_dest[:, None] & (offs_d[None, :] < D), other=0.0)
        last = tl.minimum(start + BLOCK_E, stop) - 1
        label_last = tl.load(label_ptr + last)
        if BLOCK_P == BLOCK_D:
            b_p = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
        else:
            # Wide float32 heads: a whole row is too much for the registers of a three-term product.
            b_p = tl.zeros([BLOCK_E, BLOCK_E], tl.float32)
            for column in tl.range(0, D, BLOCK_P):
                offs_p = column + tl.arange(0, BLOCK_P)
                b_kp = tl.load(k_ptr + b_position[:, None] * stride_k_t + offs_p[None, :],
                    mask=is_source[:, None] & (offs_p[None, :] < D), other=0.0)
                b_qp = tl.load(q_ptr + b_position[:, None] * stride_q_t + offs_p[None, :],
                    mask=is_dest[:, None] & (offs_p[None, :] < D), other=0.0)
                b_p = tl.dot(b_qp, tl.trans(b_kp), b_p, input_precision=PRECISION)
        seen = (offs_e[:, None] > offs_e[None, :]) & (b_label[:, None] == b_label[None, :])
        b_p = tl.where(seen, b_p, 0.0)
        b_in = tl.where(b_label == label_in, 1.0, 0.0)
        b_out = tl.where(is_source & (b_label == label_last), 1.0, 0.0)
        stays = tl.where(label_last == label_in, 1.0, 0.0)
        if HAS_G:
            b_high, b_low = _elapsed_at(high_ptr, low_ptr, b_position, e < stop)
            high, low = _elapsed_at(high_ptr, low_ptr, tl.load(order_ptr + last) // 2, True)
            b_p *= _decay_from(b_high[:, None], b_low[:, None], b_high[None, :], b_low[None, :])
            b_in *= _decay_from(b_high, b_low, high_in, low_in)
            b_out *= _decay_from(high, low, b_high, b_low)
            stays *= _decay_from(high, low, high_in, low_in)
            high_in, low_in = high, low
        if HAS_W:
            w_ptrs = w_ptr + batch * stride_w_b + b_position * stride_w_t + head * stride_w_h
            b_w = tl.load(w_ptrs, mask=is_source, other=0.0).to(tl.float32)
            b_p *= b_w[None, :]
            b_out *= b_w
        b_sum = tl.sum(b_p, 1) + tl.sum(b_q.to(tl.float32) * b_z[None, :], 1) * b_in
        tl.store(out_ptr + lane * seq + b_position, b_sum * scale, mask=is_dest)
        b_z = b_z * stays + tl.sum(b_k.to(tl.float32) * b_out[:, None], 0)
        label_in = label_last
