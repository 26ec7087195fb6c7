"""Linear attention summed over matching sources, in time linear in the length: sums over events by label.

A destination i and a source j <= i match where label_dest[i] == label_src[j]. Positions are put in order of
label, then time, each as a source and as a destination. The order is cut into segments: one kernel sums the
decayed keys of each segment's last label, another adds to what enters a segment the products inside its
blocks.
"""

import torch
from torch import Tensor

from kernels.triton.launch import check_dtype, check_width, launch, power_of_two, processors, rows
from kernels.triton.linear_match_kernels import _elapsed_kernel, _match_output_kernel, _match_state_kernel

BLOCK_ELAPSED = 1024


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
    if q.dtype != k.dtype:
        q, k = q.float(), k.float()
    w = None if k_weight is None else k_weight.detach().expand(batch, seq, heads)
    elapsed = None if log_decay is None else _elapsed(log_decay.detach().expand(batch, seq, heads))
    labels = torch.empty(batch, seq, 2, dtype=torch.int32, device=q.device)
    labels[..., 0], labels[..., 1] = label_src, label_dest
    labels, order = torch.sort(labels.flatten(1), dim=1, stable=True)
    return _matches(q, k, w, elapsed, order, labels, heads, scale)


def _elapsed(g: Tensor) -> Tensor:
    """Base-2 log decays [batch seq head] summed from the start, high and low part [2 batch head seq]."""
    batch, seq, heads = g.shape
    n_block = -(-seq // BLOCK_ELAPSED)
    sums = torch.empty(batch, heads, n_block, dtype=torch.float64, device=g.device)
    parts = torch.empty(2, batch, heads, seq, dtype=torch.float32, device=g.device)
    for output in (False, True):
        launch(
            _elapsed_kernel, (n_block, heads, batch), g, sums, parts[0], parts[1], *g.stride(), heads, seq,
            n_block, BLOCK=BLOCK_ELAPSED, BLOCK_N=64, OUTPUT=output, num_warps=4,
        )  # fmt: skip
    return parts


def _block(d: int, dtype: torch.dtype) -> tuple[int, int]:
    """Events of a block, warps of a program."""
    if dtype == torch.float32:
        return 16, 4 if d <= 64 else 8
    if d <= 64:
        return 64, 4
    return (32, 4) if d <= 128 else (16, 8)


def _matches(
    q: Tensor, k: Tensor, w: Tensor | None, elapsed: Tensor | None, order: Tensor, labels: Tensor, heads: int,
    scale: float,
) -> Tensor:  # fmt: skip
    """Sums [batch head seq] from the events in order of label, time, and source before destination."""
    batch, seq, d = q.shape[0], q.shape[1], k.shape[3]
    block_e, warps = _block(d, q.dtype)
    wanted = max(1, 8 * processors(q.device) // (heads * batch))
    segment = max(2, -(-2 * seq // (wanted * block_e))) * block_e
    n_segment = -(-2 * seq // segment)
    options = {"dtype": torch.float32, "device": q.device}
    z = torch.empty(batch, heads, n_segment, d, **options)
    kept = torch.empty(batch, heads, n_segment, **options)
    found = torch.empty(batch, heads, seq, **options)
    high, low = (None, None) if elapsed is None else elapsed
    w_strides = (0, 0, 0) if w is None else w.stride()
    shared = {
        "D": d,
        "BLOCK_E": block_e,
        "BLOCK_D": power_of_two(d),
        "HAS_G": elapsed is not None,
        "HAS_W": w is not None,
    }
    launch(
        _match_state_kernel, (n_segment, heads, batch), k, w, high, low, order, labels, z, kept,
        *k.stride()[:3], *w_strides, heads, seq, n_segment, segment, GROUP_K=heads // k.shape[2], **shared,
        num_warps=warps // 2,
    )  # fmt: skip
    launch(
        _match_output_kernel, (n_segment, heads, batch), q, k, w, high, low, order, labels, z, kept, found,
        *q.stride()[:3], *k.stride()[:3], *w_strides, heads, seq, n_segment, segment, scale,
        GROUP_Q=heads // q.shape[2], GROUP_K=heads // k.shape[2], **shared,
        BLOCK_P=min(power_of_two(d), 32 if q.dtype == torch.float32 else 128),
        PRECISION="tf32x3" if q.dtype == torch.float32 else "tf32", num_warps=warps,
    )  # fmt: skip
    return found


def events(label_dest: Tensor, label_src: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Sources and destinations of one sequence in order of label, time, and source before destination:
    position, is destination, is the first of its label; [2 seq] each."""
    labels = torch.stack([label_src, label_dest], dim=1).flatten().to(torch.int32)
    labels, order = torch.sort(labels, stable=True)
    starts = torch.ones_like(labels, dtype=torch.bool)
    starts[1:] = labels[1:] != labels[:-1]
    return order // 2, order % 2 == 1, starts
