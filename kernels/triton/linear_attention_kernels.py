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


@triton.jit
@typing.no_type_check
def _chunk_decay(high_ptr, low_ptr, start, stop, offs_t, BLOCK_T: tl.constexpr, EXACT: tl.constexpr):
    """Sums up to and including each step of a chunk (high and low part), from each step to its end, total."""
    mask_t = start + offs_t < stop
    end = tl.minimum(start + BLOCK_T, stop) - 1
    b_high = tl.load(high_ptr + start + offs_t, mask=mask_t, other=0.0)
    total = tl.load(high_ptr + end)
    if EXACT:
        b_low = tl.load(low_ptr + start + offs_t, mask=mask_t, other=0.0)
        low = tl.load(low_ptr + end)
        return b_high, b_low, tl.minimum((total - b_high) + (low - b_low), 0.0), total + low
    return b_high, b_high, total - b_high, total


@triton.jit
@typing.no_type_check
def _linear_state_kernel(
    b_ptr, c_ptr, y_ptr, w_ptr, high_ptr, low_ptr, s_ptr, total_ptr,
    stride_b_b, stride_b_t, stride_b_h, stride_c_b, stride_c_t, stride_c_h, stride_w_b, stride_w_t,
    stride_w_h, n_head, seq, n_segment, segment,
    GROUP_B: tl.constexpr, GROUP_C: tl.constexpr, D_B: tl.constexpr, D_C: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_B: tl.constexpr, BLOCK_C: tl.constexpr, REVERSE: tl.constexpr, HAS_G: tl.constexpr,
    HAS_W: tl.constexpr,
    HAS_Z: tl.constexpr, HAS_Y: tl.constexpr, EXACT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """State that one segment adds by itself, seen from its end (its start in reverse), for one block of
    columns."""
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
    b_ptr += batch * stride_b_b + head // GROUP_B * stride_b_h
    c_ptr += batch * stride_c_b + head // GROUP_C * stride_c_h
    b_s = tl.zeros([BLOCK_B, BLOCK_C], tl.float32)
    b_z = tl.zeros([BLOCK_B], tl.float32)
    b_total = tl.zeros([1], tl.float32)
    first = part * segment
    stop = tl.minimum(first + segment, seq)
    n_chunk = tl.cdiv(stop - first, BLOCK_T)
    for chunk in tl.range(n_chunk):
        step = n_chunk - 1 - chunk if REVERSE else chunk
        start = lane * 0 + first + step * BLOCK_T
        mask_t = start + offs_t < stop
        mask_b = mask_t[:, None] & (offs_b[None, :] < D_B)
        mask_c = mask_t[:, None] & (offs_c[None, :] < D_C)
        b_b = tl.load(b_ptr + start * stride_b_t + offs_t[:, None] * stride_b_t + offs_b[None, :],
            mask=mask_b, other=0.0)
        b_c = tl.load(c_ptr + start * stride_c_t + offs_t[:, None] * stride_c_t + offs_c[None, :],
            mask=mask_c, other=0.0)
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
            w_ptrs = w_ptr + batch * stride_w_b + head * stride_w_h + (start + offs_t) * stride_w_t
            b_f = b_f * tl.load(w_ptrs, mask=mask_t, other=0.0).to(tl.float32)
        if HAS_G or HAS_W:
            b_c = (b_c.to(tl.float32) * b_f[:, None]).to(b_c.dtype)
        b_s = tl.dot(tl.trans(b_b), b_c, b_s, input_precision=PRECISION)
        if HAS_Y:
            b_f = -b_f * tl.load(y_ptr + (batch * seq + start + offs_t) * n_head + head, mask=mask_t,
                other=0.0)
        if HAS_Z:
            b_z += tl.sum(b_b.to(tl.float32) * b_f[:, None], 0)
    place = lane * n_segment + part
    # z stands behind s.
    s_ptr += place * (D_B * D_C + (D_B if HAS_Z else 0))
    s_ptrs = s_ptr + offs_b[:, None] * D_C + offs_c[None, :]
    tl.store(s_ptrs, b_s, mask=(offs_b[:, None] < D_B) & (offs_c[None, :] < D_C))
    if column == 0:
        if HAS_Z:
            tl.store(s_ptr + D_B * D_C + offs_b, b_z, mask=offs_b < D_B)
        if HAS_G:
            tl.store(total_ptr + place + tl.arange(0, 1), b_total)


@triton.jit
@typing.no_type_check
def _linear_scan_kernel(
    s_ptr, total_ptr, first_ptr, first_z_ptr, last_ptr, last_z_ptr, size, size_z, n_segment, gain,
    BLOCK: tl.constexpr, REVERSE: tl.constexpr, HAS_G: tl.constexpr, HAS_FIRST: tl.constexpr,
    HAS_FIRST_Z: tl.constexpr, HAS_Z: tl.constexpr,
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
    b_own = tl.load(s_ptrs, mask=mask, other=0.0)
    for count in tl.range(n_segment):
        # Loaded one segment ahead.
        more = count + 1 < n_segment
        next_ptrs = s_ptrs + step * (size + size_z)
        b_next = tl.load(next_ptrs, mask=mask & more, other=0.0)
        tl.store(s_ptrs, b_s, mask=mask)
        if HAS_G:
            b_s = b_s * tl.exp2(tl.load(total_ptr + place + step * count))
        b_s += b_own
        b_own, s_ptrs = b_next, next_ptrs
    tl.store(last_ptr + lane * size + offs, b_s * gain, mask=of_s)
    if HAS_Z:
        tl.store(last_z_ptr + lane * size_z + offs - size, b_s * gain, mask=of_z)


@triton.jit
@typing.no_type_check
def _linear_output_kernel(
    a_ptr, b_ptr, c_ptr, t_ptr, o_ptr, w_ptr, u_ptr, high_ptr, low_ptr, d_ptr, delta_ptr, s_ptr, z_ptr,
    s_last_ptr, z_last_ptr, out_ptr, den_ptr, dot_ptr, dd_ptr,
    stride_a_b, stride_a_t, stride_a_h, stride_b_b, stride_b_t, stride_b_h, stride_c_b, stride_c_t,
    stride_c_h,
    stride_t_b, stride_t_t, stride_t_h, stride_w_b, stride_w_t, stride_w_h, stride_u_b, stride_u_t,
    stride_u_h,
    stride_s_r, stride_s_c, n_head, seq, n_segment, segment, block_stride, stride_s, stride_z, scale,
    gain_first, gain_last, eps,
    GROUP_A: tl.constexpr, GROUP_B: tl.constexpr, GROUP_C: tl.constexpr, GROUP_T: tl.constexpr,
    D_B: tl.constexpr, D_C: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_C: tl.constexpr, CALL: tl.constexpr,
    REVERSE: tl.constexpr,
    HAS_G: tl.constexpr, HAS_W: tl.constexpr, HAS_U: tl.constexpr, NORMALISE: tl.constexpr,
    HAS_D: tl.constexpr,
    HAS_DOT: tl.constexpr, HAS_FIRST: tl.constexpr, SAVE_LAST: tl.constexpr, EXACT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One segment of one head, one block of output columns, chunk after chunk. CALL is a row of the module's
    table."""
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
    a_ptr += batch * stride_a_b + head // GROUP_A * stride_a_h
    b_ptr += batch * stride_b_b + head // GROUP_B * stride_b_h
    c_ptr += batch * stride_c_b + head // GROUP_C * stride_c_h
    place = lane * n_segment + part
    mask_s = (offs_b[:, None] < D_B) & (offs_c[None, :] < D_C)
    # The sum of keys runs along b for the denominator, along c for its gradients.
    Z_SIZE: tl.constexpr = BLOCK_B if CALL == "o" else BLOCK_C
    offs_z = offs_b if CALL == "o" else offs_c
    D_Z: tl.constexpr = D_B if CALL == "o" else D_C
    b_z = tl.zeros([Z_SIZE], tl.float32)
    b_s = tl.zeros([BLOCK_B, BLOCK_C], tl.float32)
    if HAS_FIRST:
        s_ptrs = s_ptr + place * stride_s + offs_b[:, None] * stride_s_r + offs_c[None, :] * stride_s_c
        b_s = tl.load(s_ptrs, mask=mask_s, other=0.0) * gain_first
        if NORMALISE:
            b_z = tl.load(z_ptr + place * stride_z + offs_z, mask=offs_z < D_Z, other=0.0) * gain_first
    skip = 0.0
    if HAS_D:
        skip = tl.load(d_ptr + head).to(tl.float32)
    b_dd = tl.zeros([BLOCK_T], tl.float32)
    first = part * segment
    stop = tl.minimum(first + segment, seq)
    n_chunk = tl.cdiv(stop - first, BLOCK_T)
    for chunk in tl.range(n_chunk):
        step = n_chunk - 1 - chunk if REVERSE else chunk
        start = lane * 0 + first + step * BLOCK_T
        mask_t = start + offs_t < stop
        mask_b = mask_t[:, None] & (offs_b[None, :] < D_B)
        mask_c = mask_t[:, None] & (offs_c[None, :] < D_C)
        row = (batch * seq + start + offs_t) * n_head + head
        b_a = tl.load(a_ptr + start * stride_a_t + offs_t[:, None] * stride_a_t + offs_b[None, :],
            mask=mask_b, other=0.0)
        b_b = tl.load(b_ptr + start * stride_b_t + offs_t[:, None] * stride_b_t + offs_b[None, :],
            mask=mask_b, other=0.0)
        b_c = tl.load(c_ptr + start * stride_c_t + offs_t[:, None] * stride_c_t + offs_c[None, :],
            mask=mask_c, other=0.0)
        b_f = tl.full([BLOCK_T], 1.0, tl.float32)
        if HAS_W:
            w_ptrs = w_ptr + batch * stride_w_b + head * stride_w_h + (start + offs_t) * stride_w_t
            b_f = b_f * tl.load(w_ptrs, mask=mask_t, other=0.0).to(tl.float32)
        b_p = tl.dot(b_a, tl.trans(b_b), input_precision=PRECISION)  # [BLOCK_T, BLOCK_T]
        if NORMALISE and CALL == "dq":
            b_o = tl.load(o_ptr + row[:, None] * D_B + offs_b[None, :], mask=mask_b, other=0.0)
            b_delta = tl.sum(b_o.to(tl.float32) * b_a.to(tl.float32), 1)
            tl.store(delta_ptr + row, b_delta, mask=mask_t)
            b_p -= b_delta[:, None]
        if NORMALISE and CALL == "dk":
            b_delta = tl.load(delta_ptr + row, mask=mask_t, other=0.0)
            b_p -= b_delta[None, :]
        b_out = tl.dot(b_a, b_s.to(b_a.dtype), input_precision=PRECISION)
        if NORMALISE and CALL == "dq":
            b_out -= b_delta[:, None] * b_z[None, :]
        if NORMALISE and CALL == "dk":
            b_out += b_z[None, :]
        if NORMALISE and CALL == "o":
            b_den = tl.sum(b_a.to(tl.float32) * b_z[None, :], 1)
        seen = offs_t[:, None] <= offs_t[None, :] if REVERSE else offs_t[:, None] >= offs_t[None, :]
        b_update = b_f
        if HAS_G:
            b_high, b_low, b_rest, total = _chunk_decay(
                high_ptr + lane * seq, low_ptr + lane * seq, start, stop, offs_t, BLOCK_T, EXACT
            )
            b_gap = b_high[:, None] - b_high[None, :]
            if EXACT:
                b_gap += b_low[:, None] - b_low[None, :]
            b_gap = -b_gap if REVERSE else b_gap
            b_p = b_p * tl.exp2(tl.where(seen, tl.minimum(b_gap, 0.0), float("-inf")))
            b_out = b_out * tl.exp2(b_rest if REVERSE else b_high)[:, None]
            if NORMALISE and CALL == "o":
                b_den = b_den * tl.exp2(b_high)
            b_update = b_f * tl.exp2(b_high if REVERSE else b_rest)
            b_s = b_s * tl.exp2(total)
            b_z = b_z * tl.exp2(total)
        else:
            b_p = tl.where(seen, b_p, 0.0)
        if HAS_W:
            b_p = b_p * b_f[None, :]
        b_out = tl.dot(b_p.to(b_c.dtype), b_c, b_out, input_precision=PRECISION) * scale
        if HAS_G or HAS_W:
            b_cf = (b_c.to(tl.float32) * b_update[:, None]).to(b_c.dtype)
            b_s = tl.dot(tl.trans(b_b), b_cf, b_s, input_precision=PRECISION)
        else:
            b_s = tl.dot(tl.trans(b_b), b_c, b_s, input_precision=PRECISION)
        if NORMALISE and CALL == "o":
            b_den = (b_den + tl.sum(b_p, 1)) * scale + eps
            b_inverse = 1.0 / b_den
            b_out = b_out * b_inverse[:, None]
            tl.store(den_ptr + row, b_inverse, mask=mask_t)
            b_z += tl.sum(b_b.to(tl.float32) * b_update[:, None], 0)
        if NORMALISE and CALL == "dq":
            b_z += tl.sum(b_c.to(tl.float32) * b_update[:, None], 0)
        if NORMALISE and CALL == "dk":
            b_z -= tl.sum(b_c.to(tl.float32) * (b_update * b_delta)[:, None], 0)
        if HAS_DOT:
            t_ptrs = t_ptr + batch * stride_t_b + head // GROUP_T * stride_t_h + (start + offs_t)[:,
                None] * stride_t_t
            b_t = tl.load(t_ptrs + offs_c[None, :], mask=mask_c, other=0.0).to(tl.float32)
            tl.store(dot_ptr + column // BLOCK_C * block_stride + row, tl.sum(b_t * b_out, 1), mask=mask_t)
        if HAS_U:
            u_ptrs = u_ptr + batch * stride_u_b + head * stride_u_h + (start + offs_t) * stride_u_t
            b_out = b_out * tl.load(u_ptrs, mask=mask_t, other=0.0).to(tl.float32)[:, None]
        if HAS_D:
            if CALL == "dk":
                b_dd += tl.sum(b_a.to(tl.float32) * b_b.to(tl.float32), 1)
            else:
                b_out += skip * b_c.to(tl.float32)
        tl.store(out_ptr + row[:, None] * D_C + offs_c[None, :], b_out.to(out_ptr.dtype.element_ty),
            mask=mask_c)
    if SAVE_LAST:
        if CALL != "dk":
            s_ptrs = s_last_ptr + lane * (D_B * D_C) + offs_b[:, None] * stride_s_r + offs_c[None,
                :] * stride_s_c
            tl.store(s_ptrs, b_s * gain_last, mask=mask_s)
        if NORMALISE:
            tl.store(z_last_ptr + lane * D_Z + offs_z, b_z * gain_last, mask=offs_z < D_Z)
    if HAS_D and CALL == "dk":
        if column == 0:
            tl.store(dd_ptr + place, tl.sum(b_dd, 0))
