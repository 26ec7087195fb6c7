"""Backward kernels of causal softmax attention: queries and the row sums delta, then keys and values. No
atomics.

With p_ij = exp(s_ij - lse_i), dp_ij = <do_i, v_j> and delta_i = <do_i, o_i> - dlse_i:
ds_ij = p_ij (dp_ij - delta_i), dv_j = sum_i p_ij do_i, dk_j = scale sum_i ds_ij q_i, dq_i = scale sum_j ds_ij
k_j.
Transposed scores are computed as such: no dot is fed a transposed dot result.
"""

import typing

import triton
import triton.language as tl


@triton.jit
@typing.no_type_check
def _attention_bwd_key_tiles(
    b_dk, b_dv, b_k, b_v, q_ptr, do_ptr, lse_ptr, delta_ptr, stride_q_t, stride_do_t, start, stop, shift,
    offs_j,
    n_dest, window, scale_log2, wide,
    D_K: tl.constexpr, D_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    MASKED: tl.constexpr, HAS_WINDOW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add the query tiles of [start, stop) to dk and dv."""
    offs_m = tl.arange(0, BLOCK_M)
    offs_k = tl.arange(0, BLOCK_K)
    offs_v = tl.arange(0, BLOCK_V)
    for start_m in tl.range(start, stop, BLOCK_M):
        tile = start_m + wide
        mask_m = start_m + offs_m < n_dest
        q_ptrs = q_ptr + tile * stride_q_t + offs_m[:, None] * stride_q_t + offs_k[None, :]
        do_ptrs = do_ptr + tile * stride_do_t + offs_m[:, None] * stride_do_t + offs_v[None, :]
        b_q = tl.load(q_ptrs, mask=mask_m[:, None] & (offs_k[None, :] < D_K), other=0.0)
        b_st = tl.dot(b_k, tl.trans(b_q), input_precision=PRECISION)  # [BLOCK_N, BLOCK_M]
        b_lse = tl.load(lse_ptr + start_m + offs_m, mask=mask_m, other=0.0) * 1.4426950408889634
        b_pt = tl.exp2(b_st * scale_log2 - b_lse[None, :])
        if MASKED:
            i = shift + start_m + offs_m
            allowed = (offs_j[:, None] <= i[None, :]) & mask_m[None, :]
            if HAS_WINDOW:
                allowed = allowed & (offs_j[:, None] > i[None, :] - window)
            b_pt = tl.where(allowed, b_pt, 0.0)
        b_do = tl.load(do_ptrs, mask=mask_m[:, None] & (offs_v[None, :] < D_V), other=0.0)
        b_dv = tl.dot(b_pt.to(b_do.dtype), b_do, b_dv, input_precision=PRECISION)
        b_dpt = tl.dot(b_v, tl.trans(b_do), input_precision=PRECISION)
        b_delta = tl.load(delta_ptr + start_m + offs_m, mask=mask_m, other=0.0)
        b_dst = b_pt * (b_dpt - b_delta[None, :])
        b_dk = tl.dot(b_dst.to(b_q.dtype), b_q, b_dk, input_precision=PRECISION)
    return b_dk, b_dv


@triton.jit
@typing.no_type_check
def _attention_bwd_key_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr,
    stride_q_b, stride_q_t, stride_q_h, stride_k_b, stride_k_t, stride_k_h, stride_v_b, stride_v_t,
    stride_v_h,
    stride_do_b, stride_do_t, stride_do_h, n_head, n_dest, n_src, window, scale, scale_log2,
    GROUP: tl.constexpr, D_K: tl.constexpr, D_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, HAS_WINDOW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of keys of one key/value head, over all query heads of its group. First tiles, read most,
    start first."""
    n_tile = tl.cdiv(n_src, BLOCK_N)
    n_kv = n_head // GROUP
    pid = tl.program_id(0)
    start_n = pid % n_tile * BLOCK_N
    batch = (pid // n_tile // n_kv).to(tl.int64)
    kv_head = (pid // n_tile % n_kv).to(tl.int64)
    offs_n = tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    offs_v = tl.arange(0, BLOCK_V)
    mask_n = start_n + offs_n < n_src
    mask_k = mask_n[:, None] & (offs_k[None, :] < D_K)
    mask_v = mask_n[:, None] & (offs_v[None, :] < D_V)
    k_ptr += batch * stride_k_b + kv_head * stride_k_h + start_n.to(tl.int64) * stride_k_t
    v_ptr += batch * stride_v_b + kv_head * stride_v_h + start_n.to(tl.int64) * stride_v_t
    b_k = tl.load(k_ptr + offs_n[:, None] * stride_k_t + offs_k[None, :], mask=mask_k, other=0.0)
    b_v = tl.load(v_ptr + offs_n[:, None] * stride_v_t + offs_v[None, :], mask=mask_v, other=0.0)
    b_dk = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    b_dv = tl.zeros([BLOCK_N, BLOCK_V], tl.float32)

    shift = n_src - n_dest
    offs_j = start_n + offs_n
    start = tl.maximum(start_n - shift, 0) // BLOCK_M * BLOCK_M
    if HAS_WINDOW:
        full = tl.maximum(tl.minimum(start_n + BLOCK_N - 1 + window - shift, n_dest), start)
    else:
        full = tl.minimum(tl.cdiv(tl.maximum(start_n + BLOCK_N - shift, 0), BLOCK_M) * BLOCK_M, n_dest)
    for member in range(GROUP):
        head = kv_head * GROUP + member
        q_head = q_ptr + batch * stride_q_b + head * stride_q_h
        do_head = do_ptr + batch * stride_do_b + head * stride_do_h
        row = (batch * n_head + head) * n_dest
        b_dk, b_dv = _attention_bwd_key_tiles(
            b_dk, b_dv, b_k, b_v, q_head, do_head, lse_ptr + row, delta_ptr + row, stride_q_t, stride_do_t,
            start, full,
            shift, offs_j, n_dest, window, scale_log2, batch * 0, D_K, D_V, BLOCK_M, BLOCK_K, BLOCK_V, True,
            HAS_WINDOW, PRECISION,
        )  # fmt: skip
        if not HAS_WINDOW:
            b_dk, b_dv = _attention_bwd_key_tiles(
                b_dk, b_dv, b_k, b_v, q_head, do_head, lse_ptr + row, delta_ptr + row, stride_q_t,
                stride_do_t, full,
                n_dest, shift, offs_j, n_dest, window, scale_log2, batch * 0, D_K, D_V, BLOCK_M, BLOCK_K,
                BLOCK_V, False, False,
                PRECISION,
            )  # fmt: skip
    out = (batch * n_src + start_n) * n_kv + kv_head
    dk_ptrs = dk_ptr + out * D_K + offs_n[:, None] * (n_kv * D_K) + offs_k[None, :]
    dv_ptrs = dv_ptr + out * D_V + offs_n[:, None] * (n_kv * D_V) + offs_v[None, :]
    tl.store(dk_ptrs, (b_dk * scale).to(dk_ptr.dtype.element_ty), mask=mask_k)
    tl.store(dv_ptrs, b_dv.to(dv_ptr.dtype.element_ty), mask=mask_v)


@triton.jit
@typing.no_type_check
def _attention_bwd_query_tiles(
    b_dq, b_q, b_do, b_lse, b_delta, k_ptr, v_ptr, stride_k_t, stride_v_t, start, stop, offs_i, n_src, window,
    scale_log2, wide,
    D_K: tl.constexpr, D_V: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    MASKED: tl.constexpr, HAS_WINDOW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add the key tiles of [start, stop) to dq."""
    offs_n = tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    offs_v = tl.arange(0, BLOCK_V)
    for start_n in tl.range(start, stop, BLOCK_N):
        tile = start_n + wide
        j = start_n + offs_n
        mask_k = offs_k[None, :] < D_K
        mask_v = offs_v[None, :] < D_V
        if MASKED:
            mask_k = mask_k & (j < n_src)[:, None]
            mask_v = mask_v & (j < n_src)[:, None]
        b_k = tl.load(k_ptr + tile * stride_k_t + offs_n[:, None] * stride_k_t + offs_k[None, :], mask=mask_k,
            other=0.0)
        b_v = tl.load(v_ptr + tile * stride_v_t + offs_n[:, None] * stride_v_t + offs_v[None, :], mask=mask_v,
            other=0.0)
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
        b_p = tl.exp2(b_s * scale_log2 - b_lse[:, None])
        if MASKED:
            allowed = (j[None, :] <= offs_i[:, None]) & (j < n_src)[None, :]
            if HAS_WINDOW:
                allowed = allowed & (j[None, :] > offs_i[:, None] - window)
            b_p = tl.where(allowed, b_p, 0.0)
        b_dp = tl.dot(b_do, tl.trans(b_v), input_precision=PRECISION)
        b_ds = b_p * (b_dp - b_delta[:, None])
        b_dq = tl.dot(b_ds.to(b_k.dtype), b_k, b_dq, input_precision=PRECISION)
    return b_dq


@triton.jit
@typing.no_type_check
def _attention_bwd_query_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, do_ptr, lse_ptr, dlse_ptr, delta_ptr, dq_ptr,
    stride_q_b, stride_q_t, stride_q_h, stride_k_b, stride_k_t, stride_k_h, stride_v_b, stride_v_t,
    stride_v_h,
    stride_do_b, stride_do_t, stride_do_h, n_head, n_dest, n_src, window, scale, scale_log2,
    GROUP: tl.constexpr, D_K: tl.constexpr, D_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_DLSE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of queries of one head, and its delta. The last tiles, which read most, start first."""
    n_tile = tl.cdiv(n_dest, BLOCK_M)
    pid = tl.program_id(0)
    start_m = (n_tile - 1 - pid % n_tile) * BLOCK_M
    batch = (pid // n_tile // n_head).to(tl.int64)
    head = (pid // n_tile % n_head).to(tl.int64)
    offs_m = tl.arange(0, BLOCK_M)
    offs_k = tl.arange(0, BLOCK_K)
    offs_v = tl.arange(0, BLOCK_V)
    mask_m = start_m + offs_m < n_dest
    mask_q = mask_m[:, None] & (offs_k[None, :] < D_K)
    mask_o = mask_m[:, None] & (offs_v[None, :] < D_V)
    q_ptr += batch * stride_q_b + head * stride_q_h + start_m.to(tl.int64) * stride_q_t
    do_ptr += batch * stride_do_b + head * stride_do_h + start_m.to(tl.int64) * stride_do_t
    b_q = tl.load(q_ptr + offs_m[:, None] * stride_q_t + offs_k[None, :], mask=mask_q, other=0.0)
    b_do = tl.load(do_ptr + offs_m[:, None] * stride_do_t + offs_v[None, :], mask=mask_o, other=0.0)
    row = (batch * n_head + head) * n_dest + start_m + offs_m
    b_lse = tl.load(lse_ptr + row, mask=mask_m, other=0.0) * 1.4426950408889634
    o_ptr += ((batch * n_dest + start_m) * n_head + head) * D_V
    b_o = tl.load(o_ptr + offs_m[:, None] * (n_head * D_V) + offs_v[None, :], mask=mask_o, other=0.0)
    b_delta = tl.sum(b_o.to(tl.float32) * b_do.to(tl.float32), 1)
    if HAS_DLSE:
        b_delta -= tl.load(dlse_ptr + row, mask=mask_m, other=0.0)
    tl.store(delta_ptr + row, b_delta, mask=mask_m)
    k_ptr += batch * stride_k_b + head // GROUP * stride_k_h
    v_ptr += batch * stride_v_b + head // GROUP * stride_v_h

    first = start_m + n_src - n_dest
    offs_i = first + offs_m
    stop = tl.minimum(first + BLOCK_M, n_src)
    b_dq = tl.zeros([BLOCK_M, BLOCK_K], tl.float32)
    if HAS_WINDOW:
        diagonal = tl.maximum(first - window + 1, 0) // BLOCK_N * BLOCK_N
    else:
        diagonal = (first + 1) // BLOCK_N * BLOCK_N
        b_dq = _attention_bwd_query_tiles(
            b_dq, b_q, b_do, b_lse, b_delta, k_ptr, v_ptr, stride_k_t, stride_v_t, 0, diagonal, offs_i, n_src,
            window,
            scale_log2, batch * 0, D_K, D_V, BLOCK_N, BLOCK_K, BLOCK_V, False, False, PRECISION,
        )  # fmt: skip
    b_dq = _attention_bwd_query_tiles(
        b_dq, b_q, b_do, b_lse, b_delta, k_ptr, v_ptr, stride_k_t, stride_v_t, diagonal, stop, offs_i, n_src,
        window,
        scale_log2, batch * 0, D_K, D_V, BLOCK_N, BLOCK_K, BLOCK_V, True, HAS_WINDOW, PRECISION,
    )  # fmt: skip
    dq_ptr += ((batch * n_dest + start_m) * n_head + head) * D_K
    dq_ptrs = dq_ptr + offs_m[:, None] * (n_head * D_K) + offs_k[None, :]
    tl.store(dq_ptrs, (b_dq * scale).to(dq_ptr.dtype.element_ty), mask=mask_q)
