"""Backward kernels of causal softmax attention: queries and the row sums delta, then keys and values. No
atomics.

With p_ij = exp(s_ij - lse_i), dp_ij = <do_i, v_j> and delta_i = <do_i, o_i> - dlse_i:
ds_ij = p_ij (dp_ij - delta_i), dv_j = sum_i p_ij do_i, dk_j = scale sum_i ds_ij q_i, dq_i = scale sum_j ds_ij
k_j.
Transposed scores are computed as such: no dot is fed a transposed dot result. The first kernel leaves
(lse_i / ln 2, delta_i) side by side for the second, which reads both by one load.
"""

import typing

import triton
import triton.language as tl

from kernels.triton.softmax_attention_tiles import attends, is_cut, load_rows, place


@triton.jit
@typing.no_type_check
def _attention_bwd_key_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, rows_ptr, dk_ptr, dv_ptr,
    stride_q_b, stride_q_t, stride_q_h, stride_k_b, stride_k_t, stride_k_h, stride_v_b, stride_v_t,
    stride_v_h,
    stride_do_b, stride_do_t, stride_do_h, n_head, n_dest, n_src, window, scale, scale_log2,
    GROUP: tl.constexpr, D_K: tl.constexpr, D_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, HAS_WINDOW: tl.constexpr, EVEN: tl.constexpr,
    TOGETHER: tl.constexpr, SPREAD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of keys of one key/value head, over all query heads of its group. First tiles, read most,
    start first. TOGETHER: both products of scores, then the two sums; fewer numbers live in half precision,
    more in float32."""
    n_tile = tl.cdiv(n_src, BLOCK_N)
    n_kv = n_head // GROUP
    tile, batch, kv_head = place(n_tile, n_kv, SPREAD)
    start_n = tile * BLOCK_N
    offs_m = tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    offs_v = tl.arange(0, BLOCK_V)
    offs_2 = tl.arange(0, 2)
    mask_n = start_n + offs_n < n_src
    k_ptr += batch * stride_k_b + kv_head * stride_k_h + start_n.to(tl.int64) * stride_k_t
    v_ptr += batch * stride_v_b + kv_head * stride_v_h + start_n.to(tl.int64) * stride_v_t
    k_ptrs = k_ptr + (offs_n[:, None] * stride_k_t + offs_k[None, :])
    v_ptrs = v_ptr + (offs_n[:, None] * stride_v_t + offs_v[None, :])
    b_k = load_rows(k_ptrs, mask_n, offs_k, D_K, BLOCK_K, EVEN)
    b_v = load_rows(v_ptrs, mask_n, offs_v, D_V, BLOCK_V, EVEN)
    b_dk = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    b_dv = tl.zeros([BLOCK_N, BLOCK_V], tl.float32)

    # The first key, counted as a row of queries.
    first = start_n - (n_src - n_dest)
    start = tl.maximum(first, 0) // BLOCK_M * BLOCK_M
    stop = n_dest
    if HAS_WINDOW:
        stop = tl.minimum(first + (BLOCK_N - 1) + window, n_dest)
    wide = start.to(tl.int64)
    for member in range(GROUP):
        head = kv_head * GROUP + member
        q_head = q_ptr + batch * stride_q_b + head * stride_q_h + wide * stride_q_t
        do_head = do_ptr + batch * stride_do_b + head * stride_do_h + wide * stride_do_t
        q_offs = offs_m[:, None] * stride_q_t + offs_k[None, :]
        do_offs = offs_m[:, None] * stride_do_t + offs_v[None, :]
        row_head = rows_ptr + 2 * ((batch * n_head + head) * n_dest + start)
        row_offs = 2 * offs_m[:, None] + offs_2[None, :]
        for start_m in tl.range(start, stop, BLOCK_M):
            inside = start_m + offs_m < n_dest
            b_q = load_rows(q_head + q_offs, inside, offs_k, D_K, BLOCK_K, EVEN)
            b_st = tl.dot(b_k, tl.trans(b_q), input_precision=PRECISION)  # [BLOCK_N, BLOCK_M]
            if TOGETHER:
                b_do = load_rows(do_head + do_offs, inside, offs_v, D_V, BLOCK_V, EVEN)
                b_dpt = tl.dot(b_v, tl.trans(b_do), input_precision=PRECISION)
            if is_cut(start_m, first, window, BLOCK_M, BLOCK_N, HAS_WINDOW):
                seen = attends((start_m + offs_m)[None, :], (first + offs_n)[:, None], window, HAS_WINDOW)
                b_st = tl.where(seen, b_st, float("-inf"))
            b_lse, b_delta = tl.split(load_rows(row_head + row_offs, inside, offs_2, 2, 2, EVEN))
            b_pt = tl.exp2(b_st * scale_log2 - b_lse[None, :])
            if not TOGETHER:
                b_do = load_rows(do_head + do_offs, inside, offs_v, D_V, BLOCK_V, EVEN)
                b_dv = tl.dot(b_pt.to(b_do.dtype), b_do, b_dv, input_precision=PRECISION)
                b_dpt = tl.dot(b_v, tl.trans(b_do), input_precision=PRECISION)
            b_dst = (b_pt * (b_dpt - b_delta[None, :])).to(b_q.dtype)
            if TOGETHER:
                b_dv = tl.dot(b_pt.to(b_do.dtype), b_do, b_dv, input_precision=PRECISION)
            b_dk = tl.dot(b_dst, b_q, b_dk, input_precision=PRECISION)
            q_head += BLOCK_M * stride_q_t
            do_head += BLOCK_M * stride_do_t
            row_head += 2 * BLOCK_M
    out = (batch * n_src + start_n) * n_kv + kv_head
    dk_ptrs = dk_ptr + out * D_K + (offs_n[:, None] * (n_kv * D_K) + offs_k[None, :])
    dv_ptrs = dv_ptr + out * D_V + (offs_n[:, None] * (n_kv * D_V) + offs_v[None, :])
    mask_k = mask_n[:, None] & (offs_k[None, :] < D_K)
    mask_v = mask_n[:, None] & (offs_v[None, :] < D_V)
    tl.store(dk_ptrs, (b_dk * scale).to(dk_ptr.dtype.element_ty), mask=mask_k)
    tl.store(dv_ptrs, b_dv.to(dv_ptr.dtype.element_ty), mask=mask_v)


@triton.jit
@typing.no_type_check
def _attention_bwd_query_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, do_ptr, lse_ptr, dlse_ptr, rows_ptr, dq_ptr,
    stride_q_b, stride_q_t, stride_q_h, stride_k_b, stride_k_t, stride_k_h, stride_v_b, stride_v_t,
    stride_v_h,
    stride_do_b, stride_do_t, stride_do_h, n_head, n_dest, n_src, window, scale, scale_log2,
    GROUP: tl.constexpr, D_K: tl.constexpr, D_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_DLSE: tl.constexpr,
    EVEN: tl.constexpr, SPREAD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of queries of one head, and its delta. The last tiles, which read most, start first."""
    n_tile = tl.cdiv(n_dest, BLOCK_M)
    tile, batch, head = place(n_tile, n_head, SPREAD)
    start_m = (n_tile - 1 - tile) * BLOCK_M
    offs_m = tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    offs_v = tl.arange(0, BLOCK_V)
    mask_m = start_m + offs_m < n_dest
    q_ptr += batch * stride_q_b + head * stride_q_h + start_m.to(tl.int64) * stride_q_t
    do_ptr += batch * stride_do_b + head * stride_do_h + start_m.to(tl.int64) * stride_do_t
    o_ptr += ((batch * n_dest + start_m) * n_head + head) * D_V
    q_ptrs = q_ptr + (offs_m[:, None] * stride_q_t + offs_k[None, :])
    do_ptrs = do_ptr + (offs_m[:, None] * stride_do_t + offs_v[None, :])
    o_ptrs = o_ptr + (offs_m[:, None] * (n_head * D_V) + offs_v[None, :])
    b_q = load_rows(q_ptrs, mask_m, offs_k, D_K, BLOCK_K, EVEN)
    b_do = load_rows(do_ptrs, mask_m, offs_v, D_V, BLOCK_V, EVEN)
    b_o = load_rows(o_ptrs, mask_m, offs_v, D_V, BLOCK_V, EVEN)
    row = (batch * n_head + head) * n_dest + start_m + offs_m
    b_lse = tl.load(lse_ptr + row, mask=mask_m, other=0.0) * 1.4426950408889634
    b_delta = tl.sum(b_o.to(tl.float32) * b_do.to(tl.float32), 1)
    if HAS_DLSE:
        b_delta -= tl.load(dlse_ptr + row, mask=mask_m, other=0.0)
    tl.store(rows_ptr + 2 * row, b_lse, mask=mask_m)
    tl.store(rows_ptr + 2 * row + 1, b_delta, mask=mask_m)

    first = start_m + n_src - n_dest
    stop = tl.minimum(first + BLOCK_M, n_src)
    start = batch * 0
    if HAS_WINDOW:
        start = tl.maximum(first - window + 1, 0).to(tl.int64) // BLOCK_N * BLOCK_N
    k_ptr += batch * stride_k_b + head // GROUP * stride_k_h + start * stride_k_t
    v_ptr += batch * stride_v_b + head // GROUP * stride_v_h + start * stride_v_t
    k_ptrs = k_ptr + (offs_n[:, None] * stride_k_t + offs_k[None, :])
    v_ptrs = v_ptr + (offs_n[:, None] * stride_v_t + offs_v[None, :])
    b_dq = tl.zeros([BLOCK_M, BLOCK_K], tl.float32)
    for start_n in tl.range(start.to(tl.int32), stop, BLOCK_N):
        inside = start_n + offs_n < n_src
        b_k = load_rows(k_ptrs, inside, offs_k, D_K, BLOCK_K, EVEN)
        k_ptrs += BLOCK_N * stride_k_t
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
        b_v = load_rows(v_ptrs, inside, offs_v, D_V, BLOCK_V, EVEN)
        v_ptrs += BLOCK_N * stride_v_t
        b_dp = tl.dot(b_do, tl.trans(b_v), input_precision=PRECISION)
        if is_cut(first, start_n, window, BLOCK_M, BLOCK_N, HAS_WINDOW):
            seen = attends((first + offs_m)[:, None], (start_n + offs_n)[None, :], window, HAS_WINDOW)
            b_s = tl.where(seen, b_s, float("-inf"))
        b_p = tl.exp2(b_s * scale_log2 - b_lse[:, None])
        b_ds = b_p * (b_dp - b_delta[:, None])
        b_dq = tl.dot(b_ds.to(b_k.dtype), b_k, b_dq, input_precision=PRECISION)
    dq_ptr += ((batch * n_dest + start_m) * n_head + head) * D_K
    dq_ptrs = dq_ptr + (offs_m[:, None] * (n_head * D_K) + offs_k[None, :])
    mask_q = mask_m[:, None] & (offs_k[None, :] < D_K)
    tl.store(dq_ptrs, (b_dq * scale).to(dq_ptr.dtype.element_ty), mask=mask_q)
