"""Forward kernel of causal softmax attention: online softmax over key tiles, base-2 exponentials, logsumexp
kept."""

import typing

import triton
import triton.language as tl

from kernels.triton.softmax_attention_tiles import attends, is_cut, load_rows, place


@triton.jit
@typing.no_type_check
def _attention_fwd_kernel(
    q_ptr, k_ptr, v_ptr, sink_ptr, o_ptr, lse_ptr,
    stride_q_b, stride_q_t, stride_q_h, stride_k_b, stride_k_t, stride_k_h, stride_v_b, stride_v_t,
    stride_v_h,
    n_head, n_dest, n_src, window, scale_log2,
    GROUP: tl.constexpr, D_K: tl.constexpr, D_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SINK: tl.constexpr,
    EVEN: tl.constexpr, SPREAD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of queries of one head. The last tiles, which read most, start first."""
    n_tile = tl.cdiv(n_dest, BLOCK_M)
    tile, batch, head = place(n_tile, n_head, SPREAD)
    start_m = (n_tile - 1 - tile) * BLOCK_M
    offs_m = tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    offs_v = tl.arange(0, BLOCK_V)
    mask_m = start_m + offs_m < n_dest
    q_ptr += batch * stride_q_b + head * stride_q_h + start_m.to(tl.int64) * stride_q_t
    q_ptrs = q_ptr + (offs_m[:, None] * stride_q_t + offs_k[None, :])
    b_q = load_rows(q_ptrs, mask_m, offs_k, D_K, BLOCK_K, EVEN)

    first = start_m + n_src - n_dest
    stop = tl.minimum(first + BLOCK_M, n_src)
    start = batch * 0
    if HAS_WINDOW:
        start = tl.maximum(first - window + 1, 0).to(tl.int64) // BLOCK_N * BLOCK_N
    k_ptr += batch * stride_k_b + head // GROUP * stride_k_h + start * stride_k_t
    v_ptr += batch * stride_v_b + head // GROUP * stride_v_h + start * stride_v_t
    k_ptrs = k_ptr + (offs_n[:, None] * stride_k_t + offs_k[None, :])
    v_ptrs = v_ptr + (offs_n[:, None] * stride_v_t + offs_v[None, :])
    b_max = tl.full([BLOCK_M], -1e30, tl.float32)
    b_sum = tl.zeros([BLOCK_M], tl.float32)
    b_acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    for start_n in tl.range(start.to(tl.int32), stop, BLOCK_N):
        inside = start_n + offs_n < n_src
        b_k = load_rows(k_ptrs, inside, offs_k, D_K, BLOCK_K, EVEN)
        k_ptrs += BLOCK_N * stride_k_t
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)  # [BLOCK_M, BLOCK_N]
        if is_cut(first, start_n, window, BLOCK_M, BLOCK_N, HAS_WINDOW):
            seen = attends((first + offs_m)[:, None], (start_n + offs_n)[None, :], window, HAS_WINDOW)
            b_s = tl.where(seen, b_s, float("-inf"))
        b_new = tl.maximum(b_max, tl.max(b_s, 1) * scale_log2)
        b_p = tl.exp2(b_s * scale_log2 - b_new[:, None])
        b_keep = tl.exp2(b_max - b_new)
        b_sum = b_sum * b_keep + tl.sum(b_p, 1)
        b_acc = b_acc * b_keep[:, None]
        b_v = load_rows(v_ptrs, inside, offs_v, D_V, BLOCK_V, EVEN)
        v_ptrs += BLOCK_N * stride_v_t
        b_acc = tl.dot(b_p.to(b_v.dtype), b_v, b_acc, input_precision=PRECISION)
        b_max = b_new
    if HAS_SINK:
        sink = tl.load(sink_ptr + head).to(tl.float32) * 1.4426950408889634
        b_new = tl.maximum(b_max, sink)
        b_keep = tl.exp2(b_max - b_new)
        b_sum = b_sum * b_keep + tl.exp2(sink - b_new)
        b_acc = b_acc * b_keep[:, None]
        b_max = b_new
    b_o = b_acc * (1.0 / b_sum)[:, None]
    o_ptr += ((batch * n_dest + start_m) * n_head + head) * D_V
    mask_o = mask_m[:, None] & (offs_v[None, :] < D_V)
    tl.store(o_ptr + (offs_m[:, None] * (n_head * D_V) + offs_v[None, :]), b_o.to(o_ptr.dtype.element_ty),
        mask=mask_o)
    lse = (b_max + tl.log2(b_sum)) * 0.6931471805599453
    tl.store(lse_ptr + (batch * n_head + head) * n_dest + start_m + offs_m, lse, mask=mask_m)
