"""Linear attention summed over matching sources, in time linear in the length: a scan over events by label.

A destination i and a source j <= i match where label_dest[i] == label_src[j]. Positions are put in order of
label, then time, each as a source and as a destination; the sum of decayed keys starts anew at each label,
and a destination reads it. The order is cut into segments, as in linear attention.
"""

import typing

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.launch import check_dtype, check_width, launch, power_of_two, processors, rows
from kernels.triton.linear_attention_kernels import _linear_scan_kernel

BLOCK_E = 32


@triton.jit
@typing.no_type_check
def _after(keep, total, keep_later, total_later):
    """Two decayed sums, one after the other."""
    return keep * keep_later, total * keep_later + total_later


@triton.jit
@typing.no_type_check
def _linear_match_kernel(
    q_ptr, k_ptr, w_ptr, gap_ptr, position_ptr, kind_ptr, z_ptr, total_ptr, out_ptr,
    stride_q_t, stride_q_h, stride_k_t, stride_k_h, n_head, seq, n_event, n_segment, segment, scale,
    GROUP_Q: tl.constexpr, GROUP_K: tl.constexpr, D: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_D: tl.constexpr, HAS_G: tl.constexpr, HAS_W: tl.constexpr, OUTPUT: tl.constexpr,
):  # fmt: skip
    """One segment of the events of one head: what it adds to the sum by itself, or its destinations."""
    part = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    offs_e = tl.arange(0, BLOCK_E)
    offs_d = tl.arange(0, BLOCK_D)
    mask_d = offs_d < D
    place = head * n_segment + part
    b_z = tl.zeros([BLOCK_D], tl.float32)
    if OUTPUT:
        b_z = tl.load(z_ptr + place * D + offs_d, mask=mask_d, other=0.0)
    b_kept = tl.full([BLOCK_D], 1.0, tl.float32)
    first = part * segment
    stop = tl.minimum(first + segment, n_event)
    for start in tl.range(first, stop, BLOCK_E):
        e = start + offs_e
        mask = e < stop
        b_position = tl.load(position_ptr + e, mask=mask, other=0)
        # 1: a destination; 2: the first of its label.
        b_kind = tl.load(kind_ptr + e, mask=mask, other=0)
        is_source = mask & (b_kind % 2 == 0)
        is_dest = mask & (b_kind % 2 == 1)
        k_ptrs = k_ptr + b_position[:, None] * stride_k_t + head // GROUP_K * stride_k_h + offs_d[None, :]
        b_k = tl.load(k_ptrs, mask=is_source[:, None] & mask_d[None, :], other=0.0).to(tl.float32)
        if HAS_W:
            b_w = tl.load(w_ptr + b_position * n_head + head, mask=is_source, other=0.0).to(tl.float32)
            b_k = b_k * b_w[:, None]
        b_keep = tl.where(b_kind >= 2, 0.0, 1.0)
        if HAS_G:
            b_gap = tl.load(gap_ptr + e * n_head + head, mask=mask & (b_kind < 2), other=0.0)
            b_keep = b_keep * tl.exp2(b_gap * 1.4426950408889634)
        b_keep = b_keep[:, None] + tl.zeros([BLOCK_E, BLOCK_D], tl.float32)
        b_keep, b_sum = tl.associative_scan((b_keep, b_k), 0, _after)
        b_sum += b_keep * b_z[None, :]
        if OUTPUT:
            q_ptrs = q_ptr + b_position[:, None] * stride_q_t + head // GROUP_Q * stride_q_h + offs_d[None, :]
            b_q = tl.load(q_ptrs, mask=is_dest[:, None] & mask_d[None, :], other=0.0).to(tl.float32)
            tl.store(out_ptr + head * seq + b_position, tl.sum(b_q * b_sum, 1) * scale, mask=is_dest)
        last = (offs_e == BLOCK_E - 1)[:, None]
        b_z = tl.sum(tl.where(last, b_sum, 0.0), 0)
        b_kept = b_kept * tl.sum(tl.where(last, b_keep, 0.0), 0)
    if not OUTPUT:
        tl.store(z_ptr + place * D + offs_d, b_z, mask=mask_d)
        kept = tl.max(b_kept, 0)
        tl.store(total_ptr + place, tl.log2(kept))


def linear_matches(
    q: Tensor,
    k: Tensor,
    label_dest: Tensor,
    label_src: Tensor,
    *,
    log_decay: Tensor | None = None,
    k_weight: Tensor | None = None,
    scale: float = 1.0,
) -> Tensor:
    """Signed sum of the unnormalised A_ij over the matching j, [batch head seq] float32, in time linear in
    the length.

    Args:
        q, k: [batch seq group d_k]; log_decay: None, [head] or [batch seq head]; k_weight: None or [batch seq
        head].
        label_dest, label_src: [batch seq] integers >= 0; a negative source label never matches.
    """
    check_dtype("linear_matches", k)
    check_width("linear_matches", "d_k", k.shape[-1])
    batch, seq = q.shape[:2]
    sized = [x.shape[-1] for x in (log_decay, k_weight) if x is not None]
    heads = max([q.shape[2], k.shape[2], *sized])
    q, k = rows(q.detach()), rows(k.detach())
    weight = None if k_weight is None else k_weight.detach().contiguous()
    elapsed = None
    if log_decay is not None:
        elapsed = log_decay.detach().double().expand(batch, seq, heads).cumsum(1)
    found = torch.empty(batch, heads, seq, dtype=torch.float32, device=q.device)
    for b in range(batch):
        position, is_dest, starts = events(label_dest[b], label_src[b])
        kind = is_dest.to(torch.int32) + 2 * starts
        gap = None
        if elapsed is not None:
            gap = torch.diff(elapsed[b][position], dim=0, prepend=elapsed[b, :1]).float()
        _matches(q[b], k[b], None if weight is None else weight[b], gap, position, kind, found[b], scale)
    return found


def events(label_dest: Tensor, label_src: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Sources and destinations of one sequence in order of label, time, and source before destination:
    position, is destination, is the first of its label; [2 seq] each."""
    labels = torch.stack([label_src, label_dest], dim=1).flatten().to(torch.int32)
    labels, order = torch.sort(labels, stable=True)
    starts = torch.ones_like(labels, dtype=torch.bool)
    starts[1:] = labels[1:] != labels[:-1]
    return order // 2, order % 2 == 1, starts


def _matches(
    q: Tensor, k: Tensor, w: Tensor | None, gap: Tensor | None, position: Tensor, kind: Tensor, out: Tensor,
    scale: float,
) -> None:  # fmt: skip
    """Fill out [head seq] for one sequence."""
    heads, seq = out.shape
    d = k.shape[2]
    n_event = 2 * seq
    wanted = max(1, 8 * processors(q.device) // heads)
    segment = max(2, -(-n_event // (wanted * BLOCK_E))) * BLOCK_E
    n_segment = -(-n_event // segment)
    options = {"dtype": torch.float32, "device": q.device}
    z, last = torch.empty(heads, n_segment, d, **options), torch.empty(heads, d, **options)
    total = torch.empty(heads, n_segment, **options)
    for output in (False, True):
        launch(
            _linear_match_kernel, (n_segment, heads), q, k, w, gap, position, kind, z, total, out,
            *q.stride()[:2], *k.stride()[:2], heads, seq, n_event, n_segment, segment, scale,
            GROUP_Q=heads // q.shape[1], GROUP_K=heads // k.shape[1], D=d, BLOCK_E=BLOCK_E,
            BLOCK_D=power_of_two(d), HAS_G=gap is not None, HAS_W=w is not None, OUTPUT=output,
            num_warps=4 if d <= 64 else 8,
        )  # fmt: skip
        if not output:
            launch(
                _linear_scan_kernel, (heads * -(-d // 64),), z, total, None, None, last, None, d, 0,
                n_segment, 1.0, BLOCK=64, REVERSE=False, HAS_G=True, HAS_FIRST=False, HAS_FIRST_Z=False,
                HAS_Z=False, num_warps=1,
            )  # fmt: skip
