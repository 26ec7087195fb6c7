"""Gradients of keys and values of one segment together: what they read, their decays and their chunks are the
same. For decayed heads whose states, one and its transpose, fit into registers."""

import typing

import triton
import triton.language as tl

from kernels.triton.linear_attention_rows import _chunk_decay, _for_columns, _split


@triton.jit
@typing.no_type_check
def _key_value(
    q_ptr, k_ptr, v_ptr, do_ptr, high_ptr, low_ptr, s_ptr, s_last_ptr, dk_ptr, dv_ptr, dot_ptr,
    stride_q_t, stride_k_t, stride_v_t, stride_do_t,
    row_first, n_head, first, stop, scale, gain_first, gain_last,
    D_K: tl.constexpr, D_V: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr, HAS_FIRST: tl.constexpr,
    SAVE_LAST: tl.constexpr, EXACT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The rows dv and dk of the table, with mild decays. Pointers are those of the head, of s that of the
    segment."""
    dtype = q_ptr.dtype.element_ty
    offs_t = tl.arange(0, BLOCK_T)
    offs_k = tl.arange(0, BLOCK_K)
    offs_v = tl.arange(0, BLOCK_V)
    mask_x = (offs_v[:, None] < D_V) & (offs_k[None, :] < D_K)
    x_offs = offs_k[None, :] * D_V + offs_v[:, None]
    # The state do q^T.
    b_x = tl.zeros([BLOCK_V, BLOCK_K], tl.float32)
    if HAS_FIRST:
        b_x = tl.load(s_ptr + x_offs, mask=mask_x, other=0.0) * gain_first
    seen = offs_t[:, None] <= offs_t[None, :]
    n_chunk = tl.cdiv(stop - first, BLOCK_T)
    begin = first + (n_chunk - 1) * BLOCK_T
    b_next = _for_columns(high_ptr, begin, 1, first, stop, BLOCK_T)
    for chunk in tl.range(n_chunk):
        start = first + (n_chunk - 1 - chunk) * BLOCK_T
        wide = row_first * 0 + start
        row = row_first + wide * n_head
        mask_t = start + offs_t < stop
        # As in `_row_sum`.
        b_column = tl.max(b_next, 1)
        b_next = _for_columns(high_ptr, start - BLOCK_T, 1, first, stop, BLOCK_T)
        mask_k = mask_t[:, None] & (offs_k[None, :] < D_K)
        mask_v = mask_t[:, None] & (offs_v[None, :] < D_V)
        b_q = tl.load(q_ptr + wide * stride_q_t + offs_t[:, None] * stride_q_t + offs_k[None, :],
            mask=mask_k, other=0.0)
        b_k = tl.load(k_ptr + wide * stride_k_t + offs_t[:, None] * stride_k_t + offs_k[None, :],
            mask=mask_k, other=0.0)
        b_v = tl.load(v_ptr + wide * stride_v_t + offs_t[:, None] * stride_v_t + offs_v[None, :],
            mask=mask_v, other=0.0)
        b_do = tl.load(do_ptr + wide * stride_do_t + offs_t[:, None] * stride_do_t + offs_v[None, :],
            mask=mask_v, other=0.0)
        b_high, b_low, b_rest, total = _chunk_decay(high_ptr, low_ptr, start, stop, offs_t, BLOCK_T, EXACT)
        b_fac = tl.exp2(b_high)
        b_gain = tl.exp2(-b_high) * scale
        b_x *= tl.exp2(total)

        b_kq = tl.dot(b_k, tl.trans(b_q), input_precision=PRECISION)
        b_vo = tl.dot(b_v, tl.trans(b_do), input_precision=PRECISION)
        b_pair = tl.where(seen, tl.exp2(b_column)[None, :], 0.0)
        b_kq *= b_pair
        b_dot = tl.sum(b_kq * b_vo, 1)
        b_kq_half = b_kq.to(dtype)
        b_vo_half = (b_vo * b_pair).to(dtype)
        b_scaled = b_q.to(tl.float32) * b_fac[:, None]
        if EXACT:
            b_x_high, b_qf = b_x, b_scaled
        else:
            b_x_high, b_x_low = _split(b_x, dtype, True)
            b_qf, b_q_low = _split(b_scaled, dtype)

        b_dk = tl.dot(b_v, b_x_high, input_precision=PRECISION)
        if not EXACT:
            b_dk = tl.dot(b_v, b_x_low, b_dk, input_precision=PRECISION)
        b_dot = (b_dot + tl.sum(b_k.to(tl.float32) * b_dk, 1)) * b_gain
        b_dk = tl.dot(b_vo_half, b_q, b_dk, input_precision=PRECISION)
        b_dk *= b_gain[:, None]
        tl.store(dk_ptr + row * D_K + offs_t[:, None] * (n_head * D_K) + offs_k[None, :],
            b_dk.to(dk_ptr.dtype.element_ty), mask=mask_k)
        b_dv = tl.dot(b_k, tl.trans(b_x_high), input_precision=PRECISION)
        b_dv = tl.dot(b_kq_half, b_do, b_dv, input_precision=PRECISION) * b_gain[:, None]
        tl.store(dv_ptr + row * D_V + offs_t[:, None] * (n_head * D_V) + offs_v[None, :],
            b_dv.to(dv_ptr.dtype.element_ty), mask=mask_v)

        b_x = tl.dot(tl.trans(b_do), b_qf, b_x, input_precision=PRECISION)
        if not EXACT:
            b_x = tl.dot(tl.trans(b_do), b_q_low, b_x, input_precision=PRECISION)
        tl.store(dot_ptr + row + offs_t * n_head, b_dot, mask=mask_t)
    if SAVE_LAST:
        tl.store(s_last_ptr + x_offs, b_x * gain_last, mask=mask_x)
