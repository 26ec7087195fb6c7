"""Attention summed over matching sources, without the pattern: what prefix matching needs, for every mixer.

A destination i and a source j <= i match where label_dest[i] == label_src[j] (for prefix matching: the token
at i, and the token before j). Softmax: one pass over the tiles without values keeps two sums. Linear
attention: see `linear_matches`. Selective scan: the positions are put in order of label, then time, and the
operator itself runs over them with a value of 1 and a reset where the label changes, so the cost is linear in
the length.
"""

import math
import typing

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.config_table import config
from kernels.triton.launch import LOG2E, check_dtype, check_width, launch, power_of_two, rows
from kernels.triton.linear_matches import events, linear_matches
from kernels.triton.ops import register
from kernels.triton.selective_scan import selective_scan

__all__ = ["linear_matches", "scan_matches", "softmax_matches"]

# Bytes that one group of heads or channels may take at a time.
BUDGET = 48_000_000


@triton.jit
@typing.no_type_check
def _match_tiles(
    b_max, b_sum, b_match, b_q, b_dest, k_ptr, src_ptr, stride_k_t, start, stop, offs_i, n_src, window,
    scale_log2, wide,
    D_K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, MASKED: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Add the key tiles of [start, stop) to the running maximum, sum and matching sum."""
    offs_n = tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    for start_n in tl.range(start, stop, BLOCK_N):
        j = start_n + offs_n
        tile = start_n + wide
        k_ptrs = k_ptr + tile * stride_k_t + offs_n[None, :] * stride_k_t + offs_k[:, None]
        b_k = tl.load(k_ptrs, mask=(j < n_src)[None, :] & (offs_k[:, None] < D_K), other=0.0)
        b_src = tl.load(src_ptr + j, mask=j < n_src, other=-1)
        b_s = tl.dot(b_q, b_k, input_precision=PRECISION)
        if MASKED:
            allowed = (j[None, :] <= offs_i[:, None]) & (j < n_src)[None, :]
            if HAS_WINDOW:
                allowed = allowed & (j[None, :] > offs_i[:, None] - window)
            b_s = tl.where(allowed, b_s, float("-inf"))
        b_new = tl.maximum(b_max, tl.max(b_s, 1) * scale_log2)
        b_p = tl.exp2(b_s * scale_log2 - b_new[:, None])
        b_keep = tl.exp2(b_max - b_new)
        b_sum = b_sum * b_keep + tl.sum(b_p, 1)
        b_match = b_match * b_keep + tl.sum(tl.where(b_dest[:, None] == b_src[None, :], b_p, 0.0), 1)
        b_max = b_new
    return b_max, b_sum, b_match


@triton.jit
@typing.no_type_check
def _match_kernel(
    q_ptr, k_ptr, sink_ptr, dest_ptr, src_ptr, match_ptr, lse_ptr,
    stride_q_b, stride_q_t, stride_q_h, stride_k_b, stride_k_t, stride_k_h, n_head, seq, window, scale_log2,
    GROUP: tl.constexpr, D_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SINK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Attention that one tile of destinations pays to its matching sources, and its logsumexp."""
    n_tile = tl.cdiv(seq, BLOCK_M)
    pid = tl.program_id(0)
    first = (n_tile - 1 - pid % n_tile) * BLOCK_M
    batch = (pid // n_tile // n_head).to(tl.int64)
    head = (pid // n_tile % n_head).to(tl.int64)
    offs_m = tl.arange(0, BLOCK_M)
    offs_k = tl.arange(0, BLOCK_K)
    offs_i = first + offs_m
    mask_m = offs_i < seq
    q_ptr += batch * stride_q_b + head * stride_q_h + first.to(tl.int64) * stride_q_t
    q_mask = mask_m[:, None] & (offs_k[None, :] < D_K)
    b_q = tl.load(q_ptr + offs_m[:, None] * stride_q_t + offs_k[None, :], mask=q_mask, other=0.0)
    b_dest = tl.load(dest_ptr + batch * seq + offs_i, mask=mask_m, other=-2)
    k_ptr += batch * stride_k_b + head // GROUP * stride_k_h
    src_ptr += batch * seq
    stop = tl.minimum(first + BLOCK_M, seq)
    b_max = tl.full([BLOCK_M], -1e30, tl.float32)
    b_sum = tl.zeros([BLOCK_M], tl.float32)
    b_match = tl.zeros([BLOCK_M], tl.float32)
    if HAS_WINDOW:
        diagonal = tl.maximum(first - window + 1, 0) // BLOCK_N * BLOCK_N
    else:
        diagonal = (first + 1) // BLOCK_N * BLOCK_N
        b_max, b_sum, b_match = _match_tiles(
            b_max, b_sum, b_match, b_q, b_dest, k_ptr, src_ptr, stride_k_t, 0, diagonal, offs_i, seq, window,
            scale_log2,
            batch * 0, D_K, BLOCK_N, BLOCK_K, False, False, PRECISION,
        )  # fmt: skip
    b_max, b_sum, b_match = _match_tiles(
        b_max, b_sum, b_match, b_q, b_dest, k_ptr, src_ptr, stride_k_t, diagonal, stop, offs_i, seq, window,
        scale_log2,
        batch * 0, D_K, BLOCK_N, BLOCK_K, True, HAS_WINDOW, PRECISION,
    )  # fmt: skip
    if HAS_SINK:
        sink = tl.load(sink_ptr + head).to(tl.float32) * 1.4426950408889634
        b_new = tl.maximum(b_max, sink)
        b_match = b_match * tl.exp2(b_max - b_new)
        b_sum = b_sum * tl.exp2(b_max - b_new) + tl.exp2(sink - b_new)
        b_max = b_new
    row = (batch * n_head + head) * seq + offs_i
    tl.store(match_ptr + row, b_match / b_sum, mask=mask_m)
    tl.store(lse_ptr + row, (b_max + tl.log2(b_sum)) * 0.6931471805599453, mask=mask_m)


def softmax_matches(
    q: Tensor,
    k: Tensor,
    label_dest: Tensor,
    label_src: Tensor,
    *,
    scale: float | None = None,
    window: int | None = None,
    sink: Tensor | None = None,
) -> Tensor:
    """sum of A_ij over the matching j, [batch head seq] float32; memory is linear in the length.

    Args:
        q: [batch seq head d_head]; k: [batch seq kv_head d_head]; options as in softmax attention.
        label_dest, label_src: [batch seq] integers >= 0; a negative source label never matches.
    """
    check_dtype("softmax_matches", k)
    check_width("softmax_matches", "d_head", q.shape[-1])
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    if scale < 0:
        q, scale = -q, -scale
    window = 0 if window is None or window >= k.shape[1] else window
    dest, src = (x.to(torch.int32).contiguous() for x in (label_dest, label_src))
    q = q.detach().to(k.dtype)
    return torch.ops.beyond_softmax.softmax_matches(q, k.detach(), sink, dest, src, max(scale, 1e-30),
        window)[0]


def _softmax_matches(
    q: Tensor, k: Tensor, sink: Tensor | None, dest: Tensor, src: Tensor, scale: float, window: int
) -> tuple[Tensor, Tensor]:
    q, k = rows(q), rows(k)
    batch, seq, heads, d = q.shape
    found = torch.empty(2, batch, heads, seq, dtype=torch.float32, device=q.device)
    width = power_of_two(d)
    c = config("attention_match", width, q.dtype, q.device)
    launch(
        _match_kernel, (-(-seq // c.block_m) * heads * batch,), q, k, sink, dest, src, found[0], found[1],
        *q.stride()[:3], *k.stride()[:3], heads, seq, window, scale * LOG2E, GROUP=heads // k.shape[2], D_K=d,
        BLOCK_M=c.block_m, BLOCK_N=c.block_n, BLOCK_K=width, HAS_WINDOW=window > 0, HAS_SINK=sink is not None,
        PRECISION="tf32x3" if q.dtype == torch.float32 else "tf32", num_warps=c.warps, num_stages=c.stages,
    )  # fmt: skip
    return found[0].clone(), found[1].clone()


def _fake_matches(
    q: Tensor, k: Tensor, sink: Tensor | None, dest: Tensor, src: Tensor, scale: float, window: int
) -> tuple[Tensor, Tensor]:
    shape = (q.shape[0], q.shape[2], q.shape[1])
    return q.new_empty(shape, dtype=torch.float32), q.new_empty(shape, dtype=torch.float32)


def _events(label_dest: Tensor, label_src: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As `events`, and the event of each destination [seq]."""
    position, is_dest, starts = events(label_dest, label_src)
    order = 2 * position + is_dest
    event = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    return position, is_dest, starts, event[1::2]


def scan_matches(
    dt: Tensor, A_log: Tensor, B: Tensor, C: Tensor, label_dest: Tensor, label_src: Tensor
) -> Tensor:
    """Signed sum of the selective scan's A_ij over the matching j, [batch channel seq] float32, a few
    channels at a time.

    Args:
        dt: [batch seq channel]; A_log: [channel d_state]; B, C: [batch seq d_state].
        label_dest, label_src: [batch seq] integers >= 0; a negative source label never matches.
    """
    batch, seq, channels = dt.shape
    found = torch.empty(batch, channels, seq, dtype=torch.float32, device=dt.device)
    at_once = max(16, min(channels, BUDGET // (2 * seq * 4 * 2) * 4))
    for b in range(batch):
        position, is_dest, starts, event = _events(label_dest[b], label_src[b])
        writes = (B.detach()[b].float()[position] * ~is_dest[:, None])[None]
        reads = (C.detach()[b].float()[position] * is_dest[:, None])[None]
        for channel in range(0, channels, at_once):
            own = dt.detach()[b, :, channel : channel + at_once].double()
            at = own.cumsum(0)[position]
            gap = torch.empty_like(at, dtype=torch.float32)
            gap[1:] = at[1:] - at[:-1]
            # A step this long forgets everything; u dt gives the write its own step.
            gap.masked_fill_(starts[:, None], 1e30)
            gap.clamp_(min=1e-30)
            u = own.float()[position] / gap
            y, _ = selective_scan(u[None], gap[None], A_log.detach()[channel : channel + at_once], writes,
                reads)
            found[b, channel : channel + at_once] = y[0, event].T
    return found


register(
    "softmax_matches(Tensor q, Tensor k, Tensor? sink, Tensor dest, Tensor src, float scale, "
    "int window) -> (Tensor, Tensor)",
    _softmax_matches,
    _fake_matches,
)
