"""Gradients of keys and values of one segment together: what they read, their decays and their chunks are the
same. For decayed heads whose states, one and its transpose, fit into registers."""

import typing

import triton
import triton.language as tl

from kernels.triton.linear_attention_rows import _chunk_decay, _rounded


@triton.jit
@typing.no_type_check
def _key_value(
    q_ptr, k_ptr, v_ptr, do_ptr, w_ptr, high_ptr, low_ptr, s_ptr, s_last_ptr, dk_ptr, dv_ptr, dot_ptr, dw_ptr,
    dd_ptr,
    stride_q_t, stride_k_t, stride_v_t, stride_do_t, stride_w_t,
    row_first, n_head, first, stop, skip, scale, gain_first, gain_last,
    D_K: tl.constexpr, D_V: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr, HAS_W: tl.constexpr, HAS_D: tl.constexpr, HAS_FIRST: tl.constexpr,
    SAVE_LAST: tl.constexpr, EXACT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The rows dv and dk of the table, with mild decays. Pointers are those of the head, of s that of the
    segment."""
    dtype = q_ptr.dtype.element_ty
    offs_t = tl.arange(0, BLOCK_T)
    offs_k = tl.arange(0, BLOCK_K)
    offs_v = tl.arange(0, BLOCK_V)
    mask_s = (offs_k[:, None] < D_K) & (offs_v[None, :] < D_V)
    mask_x = (offs_v[:, None] < D_V) & (offs_k[None, :] < D_K)
    # The state q do^T, and its transpose: the transpose of a product is no operand of another.
    b_s = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
    b_x = tl.zeros([BLOCK_V, BLOCK_K], tl.float32)
    if HAS_FIRST:
        b_s = tl.load(s_ptr + offs_k[:, None] * D_V + offs_v[None, :], mask=mask_s, other=0.0) * gain_first
        b_x = tl.load(s_ptr + offs_k[None, :] * D_V + offs_v[:, None], mask=mask_x, other=0.0) * gain_first
    seen = offs_t[:, None] <= offs_t[None, :]
    b_dd = tl.zeros([BLOCK_T], tl.float32)
    n_chunk = tl.cdiv(stop - first, BLOCK_T)
    for chunk in tl.range(n_chunk):
        start = first + (n_chunk - 1 - chunk) * BLOCK_T
        wide = row_first * 0 + start
        row = row_first + wide * n_head
        mask_t = start + offs_t < stop
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
        b_w = tl.full([BLOCK_T], 1.0, tl.float32)
        if HAS_W:
            b_w = tl.load(w_ptr + wide * stride_w_t + offs_t * stride_w_t, mask=mask_t, other=0.0)
            b_w = b_w.to(tl.float32)
        b_high, b_low, b_rest, total = _chunk_decay(high_ptr, low_ptr, start, stop, offs_t, BLOCK_T, EXACT)
        b_fac = tl.exp2(b_high)
        b_gain = tl.exp2(-b_high) * scale
        b_s *= tl.exp2(total)
        b_x *= tl.exp2(total)
        b_dof = (b_do.to(tl.float32) * b_fac[:, None]).to(dtype)
        b_qf = (b_q.to(tl.float32) * b_fac[:, None]).to(dtype)

        b_p = tl.where(seen, tl.dot(b_k, tl.trans(b_q), input_precision=PRECISION), 0.0)
        b_dv = tl.dot(b_k, b_s.to(dtype), input_precision=PRECISION)
        b_dv = tl.dot(b_p.to(dtype), b_dof, b_dv, input_precision=PRECISION) * (b_gain * b_w)[:, None]
        b_s = tl.dot(tl.trans(b_q), b_dof, b_s, input_precision=PRECISION)
        if HAS_D:
            b_dv += skip * b_do.to(tl.float32)
        tl.store(dv_ptr + row * D_V + offs_t[:, None] * (n_head * D_V) + offs_v[None, :],
            b_dv.to(dv_ptr.dtype.element_ty), mask=mask_v)

        b_p = tl.dot(b_v, tl.trans(b_do), input_precision=PRECISION)
        if HAS_D:
            b_dd += tl.sum(tl.where(offs_t[:, None] == offs_t[None, :], b_p, 0.0), 1)
        b_dk = tl.dot(b_v, b_x.to(dtype), input_precision=PRECISION)
        b_p = tl.where(seen, b_p, 0.0)
        b_dk = tl.dot(b_p.to(dtype), b_qf, b_dk, input_precision=PRECISION)
        b_x = tl.dot(tl.trans(b_do), b_qf, b_x, input_precision=PRECISION)
        if HAS_W:
            b_dot = tl.sum(b_k.to(tl.float32) * b_dk, 1) * b_gain
            tl.store(dw_ptr + row + offs_t * n_head, b_dot, mask=mask_t)
        # Keys as the gradient of queries sums them.
        b_kf = _rounded(b_k.to(tl.float32) * (b_w * tl.exp2(b_rest))[:, None], dtype)
        b_dot = tl.sum(b_kf * b_dk, 1) * (b_gain * tl.exp2(-b_rest))
        tl.store(dot_ptr + row + offs_t * n_head, b_dot, mask=mask_t)
        b_dk *= (b_gain * b_w)[:, None]
        tl.store(dk_ptr + row * D_K + offs_t[:, None] * (n_head * D_K) + offs_k[None, :],
            b_dk.to(dk_ptr.dtype.element_ty), mask=mask_k)
    if SAVE_LAST:
        tl.store(s_last_ptr + offs_k[:, None] * D_V + offs_v[None, :], b_s * gain_last, mask=mask_s)
    if HAS_D:
        tl.store(dd_ptr, tl.sum(b_dd, 0))
