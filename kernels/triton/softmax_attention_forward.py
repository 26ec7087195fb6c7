"""Forward kernels of causal softmax attention: online softmax over key tiles, base-2 exponentials, logsumexp
kept."""

import typing

import triton
import triton.language as tl


@triton.jit
@typing.no_type_check
def _attention_tiles(
    b_acc, b_max, b_sum, b_q, k_ptr, v_ptr, stride_k_t, stride_v_t, start, stop, offs_i, n_src, window,
    scale_log2, wide,
    D_K: tl.constexpr, D_V: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    MASKED: tl.constexpr, HAS_WINDOW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add the key tiles of [start, stop) to the running maximum, sum and output."""
    offs_n = tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    offs_v = tl.arange(0, BLOCK_V)
    for start_n in tl.range(start, stop, BLOCK_N):
        tile = start_n + wide
        k_ptrs = k_ptr + tile * stride_k_t + offs_n[None, :] * stride_k_t + offs_k[:, None]
        v_ptrs = v_ptr + tile * stride_v_t + offs_n[:, None] * stride_v_t + offs_v[None, :]
        if MASKED:
            inside = start_n + offs_n < n_src
            b_k = tl.load(k_ptrs, mask=inside[None, :] & (offs_k[:, None] < D_K), other=0.0)
        elif D_K < BLOCK_K:
            b_k = tl.load(k_ptrs, mask=offs_k[:, None] < D_K, other=0.0)
        else:
            b_k = tl.load(k_ptrs)
        b_s = tl.dot(b_q, b_k, input_precision=PRECISION)  # [BLOCK_M, BLOCK_N]
        if MASKED:
            j = start_n + offs_n
            allowed = (j[None, :] <= offs_i[:, None]) & inside[None, :]
            if HAS_WINDOW:
                allowed = allowed & (j[None, :] > offs_i[:, None] - window)
            b_s = tl.where(allowed, b_s, float("-inf"))
        b_new = tl.maximum(b_max, tl.max(b_s, 1) * scale_log2)
        b_p = tl.exp2(b_s * scale_log2 - b_new[:, None])
        b_keep = tl.exp2(b_max - b_new)
        b_sum = b_sum * b_keep + tl.sum(b_p, 1)
        b_acc = b_acc * b_keep[:, None]
        if MASKED:
            b_v = tl.load(v_ptrs, mask=inside[:, None] & (offs_v[None, :] < D_V), other=0.0)
        elif D_V < BLOCK_V:
            b_v = tl.load(v_ptrs, mask=offs_v[None, :] < D_V, other=0.0)
        else:
            b_v = tl.load(v_ptrs)
        b_acc = tl.dot(b_p.to(b_v.dtype), b_v, b_acc, input_precision=PRECISION)
        b_max = b_new
    return b_acc, b_max, b_sum


@triton.jit
@typing.no_type_check
def _attention_fwd_kernel(
    q_ptr, k_ptr, v_ptr, sink_ptr, o_ptr, lse_ptr,
    stride_q_b, stride_q_t, stride_q_h, stride_k_b, stride_k_t, stride_k_h, stride_v_b, stride_v_t,
    stride_v_h,
    n_head, n_dest, n_src, window, scale_log2,
    GROUP: tl.constexpr, D_K: tl.constexpr, D_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SINK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of queries of one head. The last tiles, which read most, start first."""
    n_tile = tl.cdiv(n_dest, BLOCK_M)
    pid = tl.program_id(0)
    start_m = (n_tile - 1 - pid % n_tile) * BLOCK_M
    batch = (pid // n_tile // n_head).to(tl.int64)
    head = (pid // n_tile % n_head).to(tl.int64)
    offs_m = tl.arange(0, BLOCK_M)
    offs_k = tl.arange(0, BLOCK_K)
    offs_v = tl.arange(0, BLOCK_V)
    mask_m = start_m + offs_m < n_dest
    q_ptr += batch * stride_q_b + head * stride_q_h + start_m.to(tl.int64) * stride_q_t
    mask_q = mask_m[:, None] & (offs_k[None, :] < D_K)
    b_q = tl.load(q_ptr + offs_m[:, None] * stride_q_t + offs_k[None, :], mask=mask_q, other=0.0)
    k_ptr += batch * stride_k_b + head // GROUP * stride_k_h
    v_ptr += batch * stride_v_b + head // GROUP * stride_v_h

    first = start_m + n_src - n_dest
    offs_i = first + offs_m
    stop = tl.minimum(first + BLOCK_M, n_src)
    b_max = tl.full([BLOCK_M], -1e30, tl.float32)
    b_sum = tl.zeros([BLOCK_M], tl.float32)
    b_acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    if HAS_WINDOW:
        diagonal = tl.maximum(first - window + 1, 0) // BLOCK_N * BLOCK_N
    else:
        diagonal = (first + 1) // BLOCK_N * BLOCK_N
        b_acc, b_max, b_sum = _attention_tiles(
            b_acc, b_max, b_sum, b_q, k_ptr, v_ptr, stride_k_t, stride_v_t, 0, diagonal, offs_i, n_src,
            window, scale_log2, batch * 0,
            D_K, D_V, BLOCK_N, BLOCK_K, BLOCK_V, False, False, PRECISION,
        )  # fmt: skip
    b_acc, b_max, b_sum = _attention_tiles(
        b_acc, b_max, b_sum, b_q, k_ptr, v_ptr, stride_k_t, stride_v_t, diagonal, stop, offs_i, n_src, window,
        scale_log2, batch * 0,
        D_K, D_V, BLOCK_N, BLOCK_K, BLOCK_V, True, HAS_WINDOW, PRECISION,
    )  # fmt: skip
    if HAS_SINK:
        sink = tl.load(sink_ptr + head).to(tl.float32) * 1.4426950408889634
        b_new = tl.maximum(b_max, sink)
        b_keep = tl.exp2(b_max - b_new)
        b_sum = b_sum * b_keep + tl.exp2(sink - b_new)
        b_acc = b_acc * b_keep[:, None]
        b_max = b_new
    b_o = b_acc / b_sum[:, None]
    o_ptr += ((batch * n_dest + start_m) * n_head + head) * D_V
    mask_o = mask_m[:, None] & (offs_v[None, :] < D_V)
    tl.store(o_ptr + offs_m[:, None] * (n_head * D_V) + offs_v[None, :], b_o.to(o_ptr.dtype.element_ty),
        mask=mask_o)
    lse = (b_max + tl.log2(b_sum)) * 0.6931471805599453
    tl.store(lse_ptr + (batch * n_head + head) * n_dest + start_m + offs_m, lse, mask=mask_m)
