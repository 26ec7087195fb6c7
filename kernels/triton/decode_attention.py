"""One-token steps of softmax attention on a GPU: the cache is split over programs, then their
parts are put together. No gradients.

Source: Dao et al. 2023, Flash-Decoding (the split). A program reads its part of the cache once for all query
heads of a group.
"""

import math
import typing

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.launch import LOG2E, check_dtype, check_width, launch, power_of_two, processors, rows
from kernels.triton.ops import operators, register

OPERATOR = "softmax_step"
BLOCK_N = 64


@triton.jit
@typing.no_type_check
def _attention_step_kernel(
    q_ptr, k_ptr, v_ptr, part_ptr, stat_ptr, stride_q_b, stride_q_h, stride_k_b, stride_k_t, stride_k_h,
    stride_v_b, stride_v_t, stride_v_h, n_head, first, n_src, length, scale_log2,
    GROUP: tl.constexpr, D_K: tl.constexpr, D_V: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Output of the query heads of one group from one part of the keys, with its maximum and sum."""
    n_kv = n_head // GROUP
    split = tl.program_id(1)
    batch = (tl.program_id(0) // n_kv).to(tl.int64)
    kv_head = (tl.program_id(0) % n_kv).to(tl.int64)
    offs_g = tl.arange(0, BLOCK_G)
    offs_n = tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    offs_v = tl.arange(0, BLOCK_V)
    head = kv_head * GROUP + offs_g
    q_ptrs = q_ptr + batch * stride_q_b + head[:, None] * stride_q_h + offs_k[None, :]
    b_q = tl.load(q_ptrs, mask=(offs_g < GROUP)[:, None] & (offs_k < D_K)[None, :], other=0.0)
    k_ptr += batch * stride_k_b + kv_head * stride_k_h
    v_ptr += batch * stride_v_b + kv_head * stride_v_h
    b_max = tl.full([BLOCK_G], -1e30, tl.float32)
    b_sum = tl.zeros([BLOCK_G], tl.float32)
    b_acc = tl.zeros([BLOCK_G, BLOCK_V], tl.float32)
    start = batch * 0 + first + split * length
    stop = tl.minimum(start + length, n_src)
    for start_n in tl.range(start, stop, BLOCK_N):
        inside = start_n + offs_n < stop
        k_ptrs = k_ptr + start_n * stride_k_t + offs_n[None, :] * stride_k_t + offs_k[:, None]
        v_ptrs = v_ptr + start_n * stride_v_t + offs_n[:, None] * stride_v_t + offs_v[None, :]
        b_k = tl.load(k_ptrs, mask=inside[None, :] & (offs_k < D_K)[:, None], other=0.0)
        b_v = tl.load(v_ptrs, mask=inside[:, None] & (offs_v < D_V)[None, :], other=0.0)
        b_s = tl.dot(b_q, b_k, input_precision=PRECISION) * scale_log2  # [BLOCK_G, BLOCK_N]
        b_s = tl.where(inside[None, :], b_s, float("-inf"))
        b_new = tl.maximum(b_max, tl.max(b_s, 1))
        b_p = tl.exp2(b_s - b_new[:, None])
        b_keep = tl.exp2(b_max - b_new)
        b_sum = b_sum * b_keep + tl.sum(b_p, 1)
        b_acc = tl.dot(b_p.to(b_v.dtype), b_v, b_acc * b_keep[:, None], input_precision=PRECISION)
        b_max = b_new
    row = (batch * n_head + head) * tl.num_programs(1) + split
    own = offs_g < GROUP
    tl.store(stat_ptr + row * 2, b_max, mask=own)
    tl.store(stat_ptr + row * 2 + 1, b_sum, mask=own)
    part_ptrs = part_ptr + row[:, None] * D_V + offs_v[None, :]
    tl.store(part_ptrs, b_acc, mask=own[:, None] & (offs_v < D_V)[None, :])


@triton.jit
@typing.no_type_check
def _attention_step_sum_kernel(
    part_ptr, stat_ptr, sink_ptr, o_ptr, n_head, n_split,
    D_V: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_V: tl.constexpr, HAS_SINK: tl.constexpr,
):  # fmt: skip
    """Output of one head from its parts, and the sink."""
    row = tl.program_id(0).to(tl.int64)
    offs_s = tl.arange(0, BLOCK_S)
    offs_v = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    mask_s = offs_s < n_split
    mask_v = offs_v < D_V
    stat_ptrs = stat_ptr + (row * n_split + offs_s) * 2
    b_max = tl.load(stat_ptrs, mask=mask_s, other=-1e30)
    b_sum = tl.load(stat_ptrs + 1, mask=mask_s, other=0.0)
    largest = tl.max(b_max, 0)
    if HAS_SINK:
        sink = tl.load(sink_ptr + tl.program_id(0) % n_head).to(tl.float32) * 1.4426950408889634
        largest = tl.maximum(largest, sink)
    b_share = tl.exp2(b_max - largest)
    total = tl.sum(b_share * b_sum, 0)
    if HAS_SINK:
        total += tl.exp2(sink - largest)
    part_ptrs = part_ptr + (row * n_split + offs_s)[:, None] * D_V + offs_v[None, :]
    b_part = tl.load(part_ptrs, mask=mask_s[:, None] & mask_v[None, :], other=0.0)
    b_o = tl.sum(b_part * b_share[:, None], 0) / total
    tl.store(o_ptr + row * D_V + offs_v, b_o.to(o_ptr.dtype.element_ty), mask=mask_v)


def softmax_step(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None, window: int | None = None,
    sink: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Attention of the last position.

    Args:
        q: [batch head d_head]; k: [batch src kv_head d_head]; v: [batch src kv_head d_v], this position
            included; any strides.
        scale, window, sink: As in `softmax_attention`.

    Returns:
        Output [batch head d_v].
    """
    check_dtype(OPERATOR, v)
    check_width(OPERATOR, "d_head", q.shape[-1])
    check_width(OPERATOR, "d_v", v.shape[-1])
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    window = 0 if window is None or window >= k.shape[1] else window
    return operators.softmax_step(q.to(v.dtype), k.to(v.dtype), v, sink, scale, window)


def _splits(lanes: int, n_src: int, device: torch.device) -> tuple[int, int]:
    """(number of parts, keys of a part): about four programs for every multiprocessor, at most 64 parts."""
    wanted = max(1, min(64, 4 * processors(device) // max(lanes, 1), -(-n_src // (2 * BLOCK_N))))
    length = -(-n_src // (wanted * BLOCK_N)) * BLOCK_N
    return -(-n_src // length), length


def _softmax_step(
    q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, scale: float, window: int
) -> Tensor:
    q, k, v = rows(q), rows(k), rows(v)
    batch, heads, d_k = q.shape
    n_src, n_kv, d_v = v.shape[1:]
    first = n_src - window if window else 0
    n_split, length = _splits(batch * n_kv, n_src - first, q.device)
    part = torch.empty(batch, heads, n_split, d_v, dtype=torch.float32, device=q.device)
    stat = torch.empty(batch, heads, n_split, 2, dtype=torch.float32, device=q.device)
    o = torch.empty(batch, heads, d_v, dtype=v.dtype, device=q.device)
    width = max(power_of_two(d_k), power_of_two(d_v))
    launch(
        _attention_step_kernel, (batch * n_kv, n_split), q, k, v, part, stat, *q.stride()[:2],
        *k.stride()[:3], *v.stride()[:3], heads, first, n_src, length, scale * LOG2E, GROUP=heads // n_kv,
        D_K=d_k, D_V=d_v, BLOCK_G=power_of_two(heads // n_kv), BLOCK_N=BLOCK_N if width < 256 else 32,
        BLOCK_K=power_of_two(d_k), BLOCK_V=power_of_two(d_v),
        PRECISION="tf32x3" if q.dtype == torch.float32 else "tf32", num_warps=4 if width < 256 else 8,
        num_stages=2 if q.dtype != torch.float32 and width < 256 else 1,
    )  # fmt: skip
    block_v = min(32, power_of_two(d_v))
    launch(
        _attention_step_sum_kernel, (batch * heads, -(-d_v // block_v)), part, stat, sink, o, heads, n_split,
        D_V=d_v, BLOCK_S=power_of_two(n_split, 2), BLOCK_V=block_v, HAS_SINK=sink is not None, num_warps=1,
    )  # fmt: skip
    return o


def _fake(q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, scale: float, window: int) -> Tensor:
    return v.new_empty(*q.shape[:2], v.shape[3])


register(
    "softmax_step(Tensor q, Tensor k, Tensor v, Tensor? sink, float scale, int window) -> Tensor",
    _softmax_step,
    _fake,
)
