"""Kernels of linear attention with a scalar decay or none: states of segments, their scan, outputs.

Outputs and all gradients are one sum over sources with the roles of the tensors changed:

    out_i = u_i scale (sum_j (<a_i, b_j> + x_i y_j) decay(i, j) w_j c_j + what the state brings)

    call | a   b   c  | w (source) u (dest) | x       y       | sources
    o    | q   k   v  | k_weight   1        | -       -       | j <= i
    dq   | do  v   k  | k_weight   1 / den  | -delta  1       | j <= i
    dv   | k   q   do | 1 / den    k_weight | -       -       | j >= i
    dk   | v   do  q  | 1 / den    k_weight | 1       -delta  | j >= i

with delta_i = <do_i, o_i> and x, y, den only where rows are normalised. A sequence is cut into segments that
run in parallel, a segment into chunks that run in turn with the state sum_j decay w_j b_j c_j^T in registers.
Sums of decays in a chunk are two float32 numbers for float32 inputs, so that differences keep their digits.
In reverse, states are kept divided by `scale`.
"""

import typing

import triton
import triton.language as tl

from kernels.triton.linear_attention_rows import _chunk_decay, _is_hard, _row_sum, _split

# A new length is no new kernel.
SIZES = ("n_head", "seq", "n_segment", "segment")


@triton.jit
@typing.no_type_check
def _linear_decay_kernel(
    g_ptr, high_ptr, low_ptr, stride_g_b, stride_g_t, stride_g_h, n_head, seq,
    BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Base-2 log decays [batch head seq] summed from the start of each chunk, that step included, as high and
    low part."""
    batch = tl.program_id(2).to(tl.int64)
    offs_t = batch * 0 + tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    offs_h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    mask = (offs_h < n_head)[:, None] & (offs_t < seq)[None, :]
    g_ptrs = g_ptr + batch * stride_g_b + offs_h[:, None] * stride_g_h + offs_t[None, :] * stride_g_t
    # A large decay takes digits from those beside it: one float32 sum holds less than two.
    least = -1e5 if EXACT else -60.0
    b_g = tl.maximum(tl.load(g_ptrs, mask=mask, other=0.0).to(tl.float32), least) * 1.4426950408889634
    place = (batch * n_head + offs_h)[:, None] * seq + offs_t[None, :]
    if EXACT:
        b_wide = tl.cumsum(b_g.to(tl.float64), 1)
        b_high = b_wide.to(tl.float32)
        tl.store(low_ptr + place, (b_wide - b_high.to(tl.float64)).to(tl.float32), mask=mask)
    else:
        b_high = tl.cumsum(b_g, 1)
    tl.store(high_ptr + place, b_high, mask=mask)


@triton.jit(do_not_specialize=SIZES)
@typing.no_type_check
def _linear_state_kernel(
    b_ptr, c_ptr, o_ptr, w_ptr, high_ptr, low_ptr, delta_ptr, s_ptr, total_ptr,
    stride_b_b, stride_b_t, stride_b_h, stride_c_b, stride_c_t, stride_c_h, stride_w_b, stride_w_t,
    stride_w_h, n_head, seq, n_segment, segment,
    GROUP_B: tl.constexpr, GROUP_C: tl.constexpr, D_B: tl.constexpr, D_C: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_B: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_ALL: tl.constexpr, REVERSE: tl.constexpr,
    HAS_G: tl.constexpr, HAS_W: tl.constexpr, HAS_Z: tl.constexpr, HAS_DELTA: tl.constexpr,
    Z_DOT: tl.constexpr, EXACT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """State that one segment adds by itself, seen from its end (its start in reverse), for one block of
    columns; delta = <o, c>."""
    n_block = tl.cdiv(D_C, BLOCK_C)
    pid = tl.program_id(0)
    column = pid % n_block * BLOCK_C
    part = pid // n_block % n_segment
    lane = (pid // n_block // n_segment).to(tl.int64)
    batch = lane // n_head
    head = lane % n_head
    offs_t = tl.arange(0, BLOCK_T)
    offs_b = tl.arange(0, BLOCK_B)
    offs_c = column + tl.arange(0, BLOCK_C)
    offs_all = tl.arange(0, BLOCK_ALL)
    b_ptr += batch * stride_b_b + head // GROUP_B * stride_b_h
    c_ptr += batch * stride_c_b + head // GROUP_C * stride_c_h
    b_s = tl.zeros([BLOCK_B, BLOCK_C], tl.float32)
    # The sum of b in 16 columns: high parts of the weights in half of them, low parts in the others.
    offs_z = tl.arange(0, 16)
    if Z_DOT:
        b_z = tl.zeros([BLOCK_B, 16], tl.float32)
    else:
        b_z = tl.zeros([BLOCK_B], tl.float32)
    b_total = tl.zeros([1], tl.float32)
    first = part * segment
    stop = tl.minimum(first + segment, seq)
    n_chunk = tl.cdiv(stop - first, BLOCK_T)
    for chunk in tl.range(n_chunk):
        step = n_chunk - 1 - chunk if REVERSE else chunk
        start = first + step * BLOCK_T
        wide = lane * 0 + start
        mask_t = start + offs_t < stop
        mask_b = mask_t[:, None] & (offs_b[None, :] < D_B)
        mask_c = mask_t[:, None] & (offs_c[None, :] < D_C)
        b_b = tl.load(b_ptr + wide * stride_b_t + offs_t[:, None] * stride_b_t + offs_b[None, :],
            mask=mask_b, other=0.0)
        b_c = tl.load(c_ptr + wide * stride_c_t + offs_t[:, None] * stride_c_t + offs_c[None, :],
            mask=mask_c, other=0.0)
        if HAS_DELTA:
            b_all = b_c
            if D_C > BLOCK_C:
                b_all = tl.load(c_ptr + wide * stride_c_t + offs_t[:, None] * stride_c_t + offs_all[None, :],
                    mask=mask_t[:, None] & (offs_all[None, :] < D_C), other=0.0)
        b_f = tl.full([BLOCK_T], 1.0, tl.float32)
        if HAS_G:
            b_high, b_low, b_rest, total = _chunk_decay(
                high_ptr + lane * seq, low_ptr + lane * seq, start, stop, offs_t, BLOCK_T, EXACT
            )
            b_f = b_f * tl.exp2(b_high if REVERSE else b_rest)
            b_s = b_s * tl.exp2(total)
            b_z = b_z * tl.exp2(total)
            b_total += total
        if HAS_W:
            w_ptrs = w_ptr + batch * stride_w_b + head * stride_w_h + wide * stride_w_t + offs_t * stride_w_t
            b_f = b_f * tl.load(w_ptrs, mask=mask_t, other=0.0).to(tl.float32)
        if HAS_G and not EXACT:
            # Gradients of decays are differences of sums over these states.
            b_c, b_c_low = _split(b_c.to(tl.float32) * b_f[:, None], b_c.dtype)
            b_s = tl.dot(tl.trans(b_b), b_c_low, b_s, input_precision=PRECISION)
        elif HAS_G or HAS_W:
            b_c = (b_c.to(tl.float32) * b_f[:, None]).to(b_c.dtype)
        b_s = tl.dot(tl.trans(b_b), b_c, b_s, input_precision=PRECISION)
        if HAS_DELTA:
            row = (batch * seq + start) * n_head + head
            b_o = tl.load(o_ptr + row * D_C + offs_t[:, None] * (n_head * D_C) + offs_all[None, :],
                mask=mask_t[:, None] & (offs_all[None, :] < D_C), other=0.0)
            b_delta = tl.sum(b_all.to(tl.float32) * b_o.to(tl.float32), 1)
            b_f = -b_f * b_delta
            tl.store(delta_ptr + row + offs_t * n_head, b_delta, mask=mask_t & (column == 0))
        if HAS_Z:
            if Z_DOT:
                # With time along the rows of b_y, the product read out of bounds (sm_90, Triton 3.6).
                b_main = b_f.to(b_b.dtype)
                b_error = (b_f - b_main.to(tl.float32)).to(b_b.dtype)
                b_y = tl.where(offs_z[:, None] < 8, b_main[None, :], b_error[None, :])
                b_z = tl.dot(tl.trans(b_b), tl.trans(b_y), b_z, input_precision=PRECISION)
            else:
                b_z += tl.sum(b_b.to(tl.float32) * b_f[:, None], 0)
    place = lane * n_segment + part
    # z stands behind s.
    s_ptr += place * (D_B * D_C + (D_B if HAS_Z else 0))
    s_ptrs = s_ptr + offs_b[:, None] * D_C + offs_c[None, :]
    tl.store(s_ptrs, b_s, mask=(offs_b[:, None] < D_B) & (offs_c[None, :] < D_C))
    if column == 0:
        if HAS_Z:
            if Z_DOT:
                tl.store(s_ptr + D_B * D_C + offs_b, tl.sum(b_z, 1) * 0.125, mask=offs_b < D_B)
            else:
                tl.store(s_ptr + D_B * D_C + offs_b, b_z, mask=offs_b < D_B)
        if HAS_G:
            tl.store(total_ptr + place + tl.arange(0, 1), b_total)


@triton.jit(do_not_specialize=SIZES)
@typing.no_type_check
def _linear_scan_kernel(
    s_ptr, total_ptr, first_ptr, first_z_ptr, last_ptr, last_z_ptr, size, size_z, n_segment, gain,
    BLOCK: tl.constexpr, AHEAD: tl.constexpr, REVERSE: tl.constexpr, HAS_G: tl.constexpr,
    HAS_FIRST: tl.constexpr, HAS_FIRST_Z: tl.constexpr, HAS_Z: tl.constexpr,
):  # fmt: skip
    """Replace what each segment adds by the state that enters it; write the state that leaves the last one.

    States inside are those outside divided by `gain`; z stands behind s.
    """
    n_block = tl.cdiv(size + size_z, BLOCK)
    pid = tl.program_id(0)
    lane = (pid // n_block).to(tl.int64)
    offs = pid % n_block * BLOCK + tl.arange(0, BLOCK)
    mask = offs < size + size_z
    of_s = offs < size
    of_z = mask & (offs >= size)
    b_s = tl.zeros([BLOCK], tl.float32)
    if HAS_FIRST:
        b_s += tl.load(first_ptr + lane * size + offs, mask=of_s, other=0.0) / gain
    if HAS_FIRST_Z:
        b_s += tl.load(first_z_ptr + lane * size_z + offs - size, mask=of_z, other=0.0) / gain
    step = -1 if REVERSE else 1
    place = lane * n_segment + (n_segment - 1 if REVERSE else 0)
    s_ptrs = s_ptr + place * (size + size_z) + offs
    stride = step * (size + size_z)
    for start in tl.range(0, n_segment, AHEAD):
        # Loaded before the first of them is needed: each takes longer to come than all sums.
        own = ()
        totals = ()
        for count in tl.static_range(AHEAD):
            more = start + count < n_segment
            own += (tl.load(s_ptrs + count * stride, mask=mask & more, other=0.0),)
            if HAS_G:
                totals += (tl.load(total_ptr + place + step * (start + count), mask=more, other=0.0),)
        for count in tl.static_range(AHEAD):
            tl.store(s_ptrs + count * stride, b_s, mask=mask & (start + count < n_segment))
            if HAS_G:
                b_s = b_s * tl.exp2(totals[count])
            b_s += own[count]
        s_ptrs += AHEAD * stride
    tl.store(last_ptr + lane * size + offs, b_s * gain, mask=of_s)
    if HAS_Z:
        tl.store(last_z_ptr + lane * size_z + offs - size, b_s * gain, mask=of_z)


@triton.jit(do_not_specialize=SIZES)
@typing.no_type_check
def _linear_output_kernel(
    q_ptr, k_ptr, v_ptr, w_ptr, high_ptr, low_ptr, d_ptr, s_ptr, z_ptr, s_last_ptr, z_last_ptr, o_ptr,
    den_ptr,
    stride_q_b, stride_q_t, stride_q_h, stride_k_b, stride_k_t, stride_k_h, stride_v_b, stride_v_t,
    stride_v_h, stride_w_b, stride_w_t, stride_w_h, n_head, seq, n_segment, segment, stride_s, stride_z,
    scale, eps,
    GROUP_Q: tl.constexpr, GROUP_K: tl.constexpr, D_K: tl.constexpr, D_V: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, HAS_G: tl.constexpr,
    HAS_W: tl.constexpr, NORMALISE: tl.constexpr, HAS_D: tl.constexpr, HAS_FIRST: tl.constexpr,
    SAVE_LAST: tl.constexpr, MILD: tl.constexpr, K_LIKE_Q: tl.constexpr, V_LIKE_Q: tl.constexpr,
    FLAT_Q: tl.constexpr, FLAT_V: tl.constexpr, EXACT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Outputs of one segment of one head, one block of columns."""
    if FLAT_Q:
        stride_q_t = n_head * D_K
    if FLAT_V:
        stride_v_t = n_head * D_V
    if K_LIKE_Q:
        stride_k_t = stride_q_t
    if V_LIKE_Q:
        stride_v_t = stride_q_t
    n_block = tl.cdiv(D_V, BLOCK_V)
    # From the end: what the kernels of the states read last is still in the cache.
    pid = tl.num_programs(0) - 1 - tl.program_id(0)
    part = pid // n_block % n_segment
    lane = (pid // n_block // n_segment).to(tl.int64)
    batch = lane // n_head
    head = lane % n_head
    place = lane * n_segment + part
    if HAS_W:
        w_ptr += batch * stride_w_b + head * stride_w_h
    if HAS_G:
        high_ptr += lane * seq
        low_ptr += lane * seq
    if HAS_FIRST:
        s_ptr += place * stride_s
        if NORMALISE:
            z_ptr += place * stride_z
    if SAVE_LAST:
        s_last_ptr += lane * (D_K * D_V)
        if NORMALISE:
            z_last_ptr += lane * D_K
    skip = 0.0
    if HAS_D:
        skip = tl.load(d_ptr + head).to(tl.float32)
    q_ptr += batch * stride_q_b + head // GROUP_Q * stride_q_h
    k_ptr += batch * stride_k_b + head // GROUP_K * stride_k_h
    v_ptr += batch * stride_v_b + head * stride_v_h
    first = part * segment
    stop = tl.minimum(first + segment, seq)
    row_first = batch * seq * n_head + head
    column = pid % n_block * BLOCK_V
    hard = 0
    if HAS_G:
        hard = _is_hard(high_ptr, first, stop, MILD, BLOCK_T)
    for HARD in tl.static_range(2 if HAS_G else 1):
        if hard == HARD:
            _row_sum(
                q_ptr, k_ptr, v_ptr, None, None, w_ptr, None, high_ptr, low_ptr, None, s_ptr, z_ptr,
                s_last_ptr, z_last_ptr, o_ptr, den_ptr, None, None, None, stride_q_t, stride_k_t, stride_v_t,
                0, stride_w_t, 0, 0, D_V, 1, row_first, n_head, first, stop, column, skip, scale, 1.0, 1.0,
                eps, D_K, D_V, BLOCK_T, BLOCK_K, BLOCK_V, "o", HAS_G, HAS_W, False, NORMALISE, HAS_D, False,
                HAS_FIRST, SAVE_LAST, False, HARD, EXACT, PRECISION,
            )
