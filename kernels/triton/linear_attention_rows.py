"""One program of linear attention: a segment of one head, chunk after chunk, the state in registers.

    out_i = u_i scale sum_j (<a_i, b_j> + x_i y_j) decay(i, j) w_j c_j

as `linear_attention_kernels` explains it. In a segment of chunks that decay mildly, decay(i, j) is a factor
of i times a factor of j, which scale the rows of the result and the columns of the chunk's pattern; otherwise
every pair has its own exponential.

Gradients of decays and weights are sums over row products <t_i, out_i> (t is q beside dq, k beside dk) whose
parts cancel. In half precision they keep float32's digits: pairs of a chunk are multiplied in float32, and
what is rounded for matrix products with the state, and for its updates, is two numbers.
"""

import typing

import triton
import triton.language as tl


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
    return b_high, b_high, tl.minimum(total - b_high, 0.0), total


@triton.jit
@typing.no_type_check
def _pair_decay(b_high, b_low, REVERSE: tl.constexpr, EXACT: tl.constexpr):
    """decay(i, j) of every pair of a chunk whose source is seen, at most 1."""
    b_gap = b_high[:, None] - b_high[None, :]
    if EXACT:
        b_gap += b_low[:, None] - b_low[None, :]
    b_gap = -b_gap if REVERSE else b_gap
    return tl.exp2(tl.minimum(b_gap, 0.0))


@triton.jit
@typing.no_type_check
def _is_hard(high_ptr, first, stop, MILD: tl.constexpr, BLOCK_T: tl.constexpr):
    """1 if a chunk of a segment keeps less than 2^MILD of its state, otherwise 0."""
    # A warp's reduction of integers is known to be the same in all its threads, so that what depends on it
    # stays in uniform registers.
    offs = tl.arange(0, 32)
    b_total = tl.zeros([32], tl.float32)
    for start in tl.range(first, stop, 32 * BLOCK_T):
        end = tl.minimum(start + (offs + 1) * BLOCK_T, stop) - 1
        b_total = tl.minimum(b_total, tl.load(high_ptr + end, mask=start + offs * BLOCK_T < stop, other=0.0))
    return tl.max((b_total < MILD).to(tl.int32), 0)


@triton.jit
@typing.no_type_check
def _split(b_x, dtype: tl.constexpr, ROUND: tl.constexpr = False):
    """float32 numbers as sums of two of a half-precision dtype, which hold twice its digits. The first is
    cut off, unless it is also used without the second: then it is rounded."""
    if dtype == tl.bfloat16:
        # Integers are quicker than conversions there and back.
        b_bits = b_x.to(tl.int32, bitcast=True) + (0x8000 if ROUND else 0)
        b_high = (b_bits & -0x10000).to(tl.float32, bitcast=True)
    else:
        b_high = b_x.to(dtype).to(tl.float32)
    return b_high.to(dtype), (b_x - b_high).to(dtype)


@triton.jit
@typing.no_type_check
def _for_columns(ptr, start, stride, first, stop, BLOCK_T: tl.constexpr):
    """Numbers of a chunk's steps, [BLOCK_T, copies]; `tl.max` along the copies makes factors of columns.
    `start` is 64 bits wide where a stride is given.

    One number a step is loaded again by every thread for all of its columns, and what follows computed again:
    a quarter of the loop's instructions. More numbers than threads are loaded once and moved.
    """
    COPIES: tl.constexpr = 256 // BLOCK_T
    offs = tl.arange(0, BLOCK_T)
    mask = (start + offs >= first) & (start + offs < stop)
    offs_2 = offs[:, None] * stride + tl.zeros([1, COPIES], tl.int32)
    return tl.load(ptr + start * stride + offs_2, mask=mask[:, None], other=0.0).to(tl.float32)


@triton.jit
@typing.no_type_check
def _row_sum(
    a_ptr, b_ptr, c_ptr, t_ptr, o_ptr, w_ptr, u_ptr, high_ptr, low_ptr, delta_ptr, s_ptr, z_ptr, s_last_ptr,
    z_last_ptr, out_ptr, den_ptr, dot_ptr, dw_ptr, dd_ptr,
    stride_a_t, stride_b_t, stride_c_t, stride_t_t, stride_w_t, stride_u_t, stride_out_t, stride_s_r,
    stride_s_c,
    row_first, n_head, first, stop, column, skip, scale, gain_first, gain_last, eps,
    D_B: tl.constexpr, D_C: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_B: tl.constexpr,
    BLOCK_C: tl.constexpr, CALL: tl.constexpr, HAS_G: tl.constexpr, HAS_W: tl.constexpr,
    HAS_U: tl.constexpr, NORMALISE: tl.constexpr, HAS_D: tl.constexpr, HAS_DOT: tl.constexpr,
    HAS_FIRST: tl.constexpr, SAVE_LAST: tl.constexpr, LOAD_DELTA: tl.constexpr, HARD: tl.constexpr,
    EXACT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One row of the table, one block of output columns. Pointers are those of the head, of s and z those of
    the segment, of out the first row's for "dv" and the tensor's for others, whose rows have no gaps."""
    REVERSE: tl.constexpr = CALL == "dv" or CALL == "dk"
    # Row products whose differences are summed: half precision keeps what rounding leaves as a second number.
    TWICE: tl.constexpr = HAS_DOT and HAS_G and not EXACT
    dtype = a_ptr.dtype.element_ty
    offs_t = tl.arange(0, BLOCK_T)
    offs_b = tl.arange(0, BLOCK_B)
    offs_c = column + tl.arange(0, BLOCK_C)
    mask_s = (offs_b[:, None] < D_B) & (offs_c[None, :] < D_C)
    s_offs = offs_b[:, None] * stride_s_r + offs_c[None, :] * stride_s_c
    b_s = tl.zeros([BLOCK_B, BLOCK_C], tl.float32)
    if HAS_FIRST:
        b_s = tl.load(s_ptr + s_offs, mask=mask_s, other=0.0) * gain_first
    # The sum of keys: beside b for the denominator, in equal rows beside c for gradients.
    if CALL == "o":
        b_z = tl.zeros([BLOCK_B], tl.float32)
    else:
        b_z = tl.zeros([BLOCK_T, BLOCK_C], tl.float32)
    if NORMALISE and HAS_FIRST:
        if CALL == "o":
            b_z = tl.load(z_ptr + offs_b, mask=offs_b < D_B, other=0.0) * gain_first
        else:
            b_z += tl.load(z_ptr + offs_c, mask=offs_c < D_C, other=0.0)[None, :] * gain_first
    if REVERSE:
        seen = offs_t[:, None] <= offs_t[None, :]
    else:
        seen = offs_t[:, None] >= offs_t[None, :]
    b_dd = tl.zeros([BLOCK_T], tl.float32)
    n_chunk = tl.cdiv(stop - first, BLOCK_T)
    AHEAD: tl.constexpr = -BLOCK_T if REVERSE else BLOCK_T
    COLUMNS: tl.constexpr = HAS_G and not HARD
    begin = first + (n_chunk - 1) * BLOCK_T if REVERSE else first
    if COLUMNS:
        b_next = _for_columns(high_ptr, begin, 1, first, stop, BLOCK_T)
        if HAS_W:
            b_next_w = _for_columns(w_ptr, row_first * 0 + begin, stride_w_t, first, stop, BLOCK_T)
    for chunk in tl.range(n_chunk):
        step = n_chunk - 1 - chunk if REVERSE else chunk
        start = first + step * BLOCK_T
        # The only 64-bit numbers of a chunk are the same in all threads.
        wide = row_first * 0 + start
        row = row_first + wide * n_head
        mask_t = start + offs_t < stop
        if COLUMNS:
            # A chunk ahead, so that nothing waits for it.
            b_column = tl.max(b_next, 1)
            b_next = _for_columns(high_ptr, start + AHEAD, 1, first, stop, BLOCK_T)
            if HAS_W:
                b_column_w = tl.max(b_next_w, 1)
                b_next_w = _for_columns(w_ptr, wide + AHEAD, stride_w_t, first, stop, BLOCK_T)
        mask_b = mask_t[:, None] & (offs_b[None, :] < D_B)
        mask_c = mask_t[:, None] & (offs_c[None, :] < D_C)
        b_a = tl.load(a_ptr + wide * stride_a_t + offs_t[:, None] * stride_a_t + offs_b[None, :],
            mask=mask_b, other=0.0)
        b_b = tl.load(b_ptr + wide * stride_b_t + offs_t[:, None] * stride_b_t + offs_b[None, :],
            mask=mask_b, other=0.0)
        b_c = tl.load(c_ptr + wide * stride_c_t + offs_t[:, None] * stride_c_t + offs_c[None, :],
            mask=mask_c, other=0.0)
        if HAS_DOT:
            b_t = tl.load(t_ptr + wide * stride_t_t + offs_t[:, None] * stride_t_t + offs_c[None, :],
                mask=mask_c, other=0.0)
        b_f = tl.full([BLOCK_T], 1.0, tl.float32)
        if HAS_W:
            b_f = tl.load(w_ptr + wide * stride_w_t + offs_t * stride_w_t, mask=mask_t, other=0.0)
            b_f = b_f.to(tl.float32)
        if NORMALISE and CALL != "o":
            if LOAD_DELTA:
                b_delta = tl.load(delta_ptr + row + offs_t * n_head, mask=mask_t, other=0.0)
            else:
                # [BLOCK_T, BLOCK_B]: beside do, which is a for dq and b for dk.
                b_o = tl.load(o_ptr + row * D_B + offs_t[:, None] * (n_head * D_B) + offs_b[None, :],
                    mask=mask_b, other=0.0)
                b_do = b_b if CALL == "dk" else b_a
                b_delta = tl.sum(b_o.to(tl.float32) * b_do.to(tl.float32), 1)
        b_p = tl.dot(b_a, tl.trans(b_b), input_precision=PRECISION)  # [BLOCK_T, BLOCK_T]
        if HAS_D and CALL == "dk":
            b_dd += tl.sum(tl.where(offs_t[:, None] == offs_t[None, :], b_p, 0.0), 1)
        if NORMALISE and CALL == "dk":
            b_p -= b_delta[None, :]
        if NORMALISE and CALL == "dq":
            b_p -= b_delta[:, None]
        b_p = tl.where(seen, b_p, 0.0)
        b_gain = tl.full([BLOCK_T], 1.0, tl.float32) * scale
        b_fac = b_f
        if HAS_G:
            b_high, b_low, b_rest, total = _chunk_decay(high_ptr, low_ptr, start, stop, offs_t, BLOCK_T,
                EXACT)
            b_toward = b_high if REVERSE else b_rest
            b_fac = b_f * tl.exp2(b_toward)
            if not HARD:
                # Destinations divide by what decays from them to the side of the chunk where sources end.
                b_gain *= tl.exp2(-b_toward)
                b_s *= tl.exp2(total)
                b_z *= tl.exp2(total)
        b_cf = b_c
        if HAS_G or HAS_W:
            b_scaled = b_c.to(tl.float32) * b_fac[:, None]
            b_cf = b_scaled.to(dtype)
        if TWICE:
            # Sums of keys take the first of the two alone.
            b_cf, b_c_low = _split(b_scaled, dtype, NORMALISE)
            b_s_high, b_s_low = _split(b_s, dtype)
            b_out = tl.dot(b_a, b_s_high, input_precision=PRECISION)
            b_out = tl.dot(b_a, b_s_low, b_out, input_precision=PRECISION)
        else:
            b_out = tl.dot(b_a, b_s.to(dtype), input_precision=PRECISION)
        if NORMALISE and CALL == "dq":
            b_out -= b_delta[:, None] * b_z
        if NORMALISE and CALL == "dk":
            b_out += b_z
        if NORMALISE and CALL == "o":
            b_den = tl.sum(b_a.to(tl.float32) * b_z[None, :], 1)
        # With decays the pattern has the factors of sources, and c comes as it is: one rounding less.
        b_cp = b_c if HAS_G else b_cf
        if HAS_G and HARD:
            b_p *= _pair_decay(b_high, b_low, REVERSE, EXACT)
            b_from = tl.exp2(b_rest if REVERSE else b_high)
            b_out *= b_from[:, None]
            if NORMALISE and CALL == "o":
                b_den *= b_from
            if HAS_W:
                b_p *= b_f[None, :]
            b_s *= tl.exp2(total)
            b_z *= tl.exp2(total)
        elif HAS_G:
            b_column = tl.exp2(b_column if REVERSE else tl.minimum(total - b_column, 0.0))
            if HAS_W:
                b_column *= b_column_w
            b_p *= b_column[None, :]
        if TWICE:
            b_tc = tl.dot(b_t, tl.trans(b_c), input_precision=PRECISION)  # [BLOCK_T, BLOCK_T]
            b_dot = tl.sum(b_p * b_tc, 1) + tl.sum(b_t.to(tl.float32) * b_out, 1)
        b_w = b_p.to(dtype)
        b_out = tl.dot(b_w, b_cp, b_out, input_precision=PRECISION)
        b_s = tl.dot(tl.trans(b_b), b_cf, b_s, input_precision=PRECISION)
        if TWICE:
            b_s = tl.dot(tl.trans(b_b), b_c_low, b_s, input_precision=PRECISION)
        if NORMALISE and CALL == "o":
            if HAS_W and not HAS_G:
                b_p *= b_fac[None, :]
            b_den += tl.sum(b_p, 1)
            b_z += tl.sum(b_b.to(tl.float32) * b_fac[:, None], 0)
            b_inverse = 1.0 / (b_den * b_gain + eps)
            tl.store(den_ptr + row + offs_t * n_head, b_inverse, mask=mask_t)
            b_gain *= b_inverse
        if NORMALISE and CALL == "dq":
            b_z = tl.dot(tl.full([BLOCK_T, BLOCK_T], 1.0, dtype), b_cf, b_z, input_precision=PRECISION)
        if NORMALISE and CALL == "dk":
            b_minus = (tl.zeros([BLOCK_T, BLOCK_T], tl.float32) - b_delta[None, :]).to(dtype)
            b_z = tl.dot(b_minus, b_cf, b_z, input_precision=PRECISION)
        if HAS_DOT:
            if not TWICE:
                b_dot = tl.sum(b_t.to(tl.float32) * b_out, 1)
            b_dot *= b_gain
        if HAS_U:
            b_u = tl.load(u_ptr + wide * stride_u_t + offs_t * stride_u_t, mask=mask_t, other=0.0)
            b_gain *= b_u.to(tl.float32)
        if HAS_DOT:
            if HAS_U and CALL == "dk":
                tl.store(dw_ptr + row + offs_t * n_head, b_dot, mask=mask_t)
            if HAS_U:
                b_dot *= b_u.to(tl.float32)
            if HAS_G:
                tl.store(dot_ptr + row + offs_t * n_head, b_dot, mask=mask_t)
        b_out *= b_gain[:, None]
        if HAS_D and CALL != "dk":
            b_out += skip * b_c.to(tl.float32)
        if CALL == "dv":
            out_ptrs = out_ptr + wide * stride_out_t + offs_t[:, None] * stride_out_t + offs_c[None, :]
        else:
            out_ptrs = out_ptr + row * D_C + offs_t[:, None] * (n_head * D_C) + offs_c[None, :]
        tl.store(out_ptrs, b_out.to(out_ptr.dtype.element_ty), mask=mask_c)
    if SAVE_LAST:
        if CALL != "dk":
            tl.store(s_last_ptr + s_offs, b_s * gain_last, mask=mask_s)
        if NORMALISE:
            if CALL == "o":
                tl.store(z_last_ptr + offs_b, b_z * gain_last, mask=offs_b < D_B)
            else:
                tl.store(z_last_ptr + offs_c, tl.max(b_z, 0) * gain_last, mask=offs_c < D_C)
    if HAS_D and CALL == "dk":
        tl.store(dd_ptr, tl.sum(b_dd, 0), mask=column == 0)
