"""Softmax attention summed over matching sources, without the pattern.

A destination i and a source j <= i match where label_dest[i] == label_src[j]. One kernel finds, once for all
heads, which pairs of tiles hold a match at all; the main kernel is a logsumexp without values that compares
labels in those tiles alone.
"""

import math
import typing

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.config_table import config
from kernels.triton.launch import LOG2E, check_dtype, check_width, launch, power_of_two, rows
from kernels.triton.ops import operators, register
from kernels.triton.softmax_attention_tiles import attends, grid, is_cut, load_rows, place

# Source tiles of one program that looks for matches.
TILES = 16


@triton.jit
@typing.no_type_check
def _match_tile_kernel(
    dest_ptr, src_ptr, found_ptr, seq, n_column, window,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TILES: tl.constexpr, HAS_WINDOW: tl.constexpr,
):  # fmt: skip
    """Whether one tile of destinations has a match in each of TILES tiles of sources. Tiles that the causal
    mask or the window hides are left unwritten."""
    n_tile = tl.cdiv(seq, BLOCK_M)
    tile_m = tl.program_id(0) % n_tile
    column = tl.program_id(1) * TILES
    batch = (tl.program_id(0) // n_tile).to(tl.int64)
    first = tile_m * BLOCK_M
    stop = tl.minimum(first + BLOCK_M, seq)
    needed = column * BLOCK_N < stop
    if HAS_WINDOW:
        needed = needed & ((column + TILES) * BLOCK_N > first - window + 1)
    if needed:
        j = column * BLOCK_N + tl.arange(0, TILES * BLOCK_N)
        b_src = tl.load(src_ptr + batch * seq + j, mask=j < seq, other=-1).to(tl.uint32, bitcast=True)
        b_gap = tl.full([TILES * BLOCK_N], 0xFFFFFFFF, tl.uint32)
        for i in tl.range(first, stop):
            dest = tl.load(dest_ptr + batch * seq + i).to(tl.uint32, bitcast=True)
            b_gap = tl.minimum(b_gap, b_src ^ dest)
        b_found = tl.min(tl.reshape(b_gap, [TILES, BLOCK_N]), 1) == 0
        columns = column + tl.arange(0, TILES)
        found_ptr += (batch * n_tile + tile_m) * n_column
        tl.store(found_ptr + columns, b_found.to(tl.int8), mask=columns < n_column)


@triton.jit
@typing.no_type_check
def _match_kernel(
    q_ptr, k_ptr, sink_ptr, dest_ptr, src_ptr, found_ptr, match_ptr, lse_ptr,
    stride_q_b, stride_q_t, stride_q_h, stride_k_b, stride_k_t, stride_k_h, n_head, seq, window, scale_log2,
    GROUP: tl.constexpr, D_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SINK: tl.constexpr, EVEN: tl.constexpr,
    SPREAD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Attention that one tile of destinations pays to its matching sources, and its logsumexp."""
    n_tile = tl.cdiv(seq, BLOCK_M)
    tile, batch, head = place(n_tile, n_head, SPREAD)
    tile_m = n_tile - 1 - tile
    first = tile_m * BLOCK_M
    offs_m = tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    mask_m = first + offs_m < seq
    q_ptr += batch * stride_q_b + head * stride_q_h + first.to(tl.int64) * stride_q_t
    q_ptrs = q_ptr + (offs_m[:, None] * stride_q_t + offs_k[None, :])
    b_q = load_rows(q_ptrs, mask_m, offs_k, D_K, BLOCK_K, EVEN)
    dest_ptr += batch * seq + first
    src_ptr += batch * seq
    found_ptr += (batch * n_tile + tile_m) * tl.cdiv(seq, BLOCK_N)

    stop = tl.minimum(first + BLOCK_M, seq)
    start = batch * 0
    if HAS_WINDOW:
        start = tl.maximum(first - window + 1, 0).to(tl.int64) // BLOCK_N * BLOCK_N
    k_ptr += batch * stride_k_b + head // GROUP * stride_k_h + start * stride_k_t
    k_ptrs = k_ptr + (offs_n[:, None] * stride_k_t + offs_k[None, :])
    b_max = tl.full([BLOCK_M], -1e30, tl.float32)
    b_sum = tl.zeros([BLOCK_M], tl.float32)
    b_match = tl.zeros([BLOCK_M], tl.float32)
    for start_n in tl.range(start.to(tl.int32), stop, BLOCK_N):
        found = tl.load(found_ptr + start_n // BLOCK_N)
        inside = start_n + offs_n < seq
        b_k = load_rows(k_ptrs, inside, offs_k, D_K, BLOCK_K, EVEN)
        k_ptrs += BLOCK_N * stride_k_t
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
        if is_cut(first, start_n, window, BLOCK_M, BLOCK_N, HAS_WINDOW):
            seen = attends((first + offs_m)[:, None], (start_n + offs_n)[None, :], window, HAS_WINDOW)
            b_s = tl.where(seen, b_s, float("-inf"))
        b_new = tl.maximum(b_max, tl.max(b_s, 1) * scale_log2)
        b_p = tl.exp2(b_s * scale_log2 - b_new[:, None])
        b_keep = tl.exp2(b_max - b_new)
        b_sum = b_sum * b_keep + tl.sum(b_p, 1)
        b_match = b_match * b_keep
        if found != 0:
            b_dest = tl.load(dest_ptr + offs_m, mask=mask_m, other=-2)
            b_src = tl.load(src_ptr + start_n + offs_n, mask=inside, other=-1)
            b_match += tl.sum(tl.where(b_dest[:, None] == b_src[None, :], b_p, 0.0), 1)
        b_max = b_new
    if HAS_SINK:
        sink = tl.load(sink_ptr + head).to(tl.float32) * 1.4426950408889634
        b_new = tl.maximum(b_max, sink)
        b_match = b_match * tl.exp2(b_max - b_new)
        b_sum = b_sum * tl.exp2(b_max - b_new) + tl.exp2(sink - b_new)
        b_max = b_new
    row = (batch * n_head + head) * seq + first + offs_m
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
    """sum of A_ij over the matching j, [batch head seq] float32; memory is linear in the length, but for one
    byte a pair of tiles.

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
    return operators.softmax_matches(q, k.detach(), sink, dest, src, max(scale, 1e-30), window)[0]


def _softmax_matches(
    q: Tensor, k: Tensor, sink: Tensor | None, dest: Tensor, src: Tensor, scale: float, window: int
) -> tuple[Tensor, Tensor]:
    q, k = rows(q), rows(k)
    batch, seq, heads, d = q.shape
    width = power_of_two(d)
    c = config("attention_match", width, q.dtype, q.device)
    n_tile, n_column = -(-seq // c.block_m), -(-seq // c.block_n)
    found = torch.empty(batch, n_tile, n_column, dtype=torch.int8, device=q.device)
    launch(
        _match_tile_kernel, (n_tile * batch, -(-n_column // TILES)), dest, src, found, seq, n_column, window,
        BLOCK_M=c.block_m, BLOCK_N=c.block_n, TILES=TILES, HAS_WINDOW=window > 0, num_warps=4,
    )  # fmt: skip
    match, lse = (torch.empty(batch, heads, seq, dtype=torch.float32, device=q.device) for _ in range(2))
    at = grid(n_tile, heads, batch)
    launch(
        _match_kernel, at, q, k, sink, dest, src, found, match, lse, *q.stride()[:3],
        *k.stride()[:3], heads, seq, window, scale * LOG2E, GROUP=heads // k.shape[2], D_K=d,
        BLOCK_M=c.block_m, BLOCK_N=c.block_n, BLOCK_K=width, HAS_WINDOW=window > 0, HAS_SINK=sink is not None,
        EVEN=seq % c.block_m == 0 and seq % c.block_n == 0, SPREAD=len(at) == 3,
        PRECISION="tf32x3" if q.dtype == torch.float32 else "tf32", num_warps=c.warps, num_stages=c.stages,
        maxnreg=c.registers,
    )  # fmt: skip
    return match, lse


def _fake_matches(
    q: Tensor, k: Tensor, sink: Tensor | None, dest: Tensor, src: Tensor, scale: float, window: int
) -> tuple[Tensor, Tensor]:
    shape = (q.shape[0], q.shape[2], q.shape[1])
    return q.new_empty(shape, dtype=torch.float32), q.new_empty(shape, dtype=torch.float32)


register(
    "softmax_matches(Tensor q, Tensor k, Tensor? sink, Tensor dest, Tensor src, float scale, "
    "int window) -> (Tensor, Tensor)",
    _softmax_matches,
    _fake_matches,
)
