"""Prefix matching from fused sums over matching sources: no pattern, and no list of edges either.

A match is named by labels: source j counts in row i where label_src[j] = label_dest[i] and j <= i. For
prefix matching at an offset the label of a row is its token, and that of a source the token `offset` places
before it.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from interp.sequences import RepeatedTokens
from kernels import KernelError
from models.mixers.reading import Reading

# Labels that match nothing.
_NO_ROW, _NO_SOURCE = -2, -1

Labels = tuple[Int64[Tensor, "batch seq"], Int64[Tensor, "batch seq"]]


def match_scores(
    reading: Reading, probe: RepeatedTokens, offsets: Sequence[int], *, backend: str | None = None
) -> dict[str, Tensor] | None:
    """`rowsum`, `latest` and `pairs` of `edge_scores.EdgeScores`; None where there are no fused sums.

    There are some on CUDA tensors, where the weights are A itself (normalisation "none") and the offsets
    begin at 1.

    Args:
        backend: "triton" is met or refused, "torch" gives None, None goes by the tensors' device.

    Raises:
        ValueError: a sequence has no token that comes again.
        KernelError: backend "triton" where there are no fused sums.
    """
    if reading.normalisation != "none" or offsets[0] != 1 or min(offsets) < 1:
        if backend == "triton":
            raise KernelError(
                f"match_scores: weights {reading.normalisation!r} at offsets {list(offsets)} have no fused "
                "sums; accepted: weights 'none' at offsets from 1 up, or backend 'torch'"
            )
        return None
    sums = []
    for dest, src in (*(follower_labels(probe, offset) for offset in offsets), latest_labels(probe)):
        found = reading.entries.match_sums(dest, src, backend=backend)
        if found is None:
            return None
        sums.append(found.double().sum(-1))
    n_rows = torch.stack([_rows_with_target(probe, offset) for offset in offsets], -1)
    if not n_rows.all():
        raise ValueError("a sequence has no token that comes again: nothing to match")
    *by_offset, latest = sums
    return {
        "rowsum": torch.stack(by_offset, -1) / n_rows[:, None],
        "latest": latest / n_rows[:, :1],
        "pairs": by_offset[0] / probe.n_earlier.sum(-1)[:, None],
    }


def follower_labels(probe: RepeatedTokens, offset: int) -> Labels:
    """Labels by which row i matches every s + offset with x_s = x_i; offset >= 1."""
    tokens = probe.tokens.long()
    dest = tokens.clone()
    dest[:, : probe.first] = _NO_ROW
    src = torch.full_like(tokens, _NO_SOURCE)
    src[:, probe.first + offset :] = tokens[:, probe.first : tokens.shape[1] - offset]
    return dest, src


def latest_labels(probe: RepeatedTokens) -> Labels:
    """Labels by which row i matches s + 1 for the most recent s with x_s = x_i, and nothing else."""
    rows = torch.arange(probe.tokens.shape[1], device=probe.tokens.device).expand_as(probe.tokens)
    known = probe.latest >= 0
    # Rows without a copy write their label beyond the end.
    place = torch.where(known, probe.latest + 1, probe.tokens.shape[1])
    src = torch.full_like(torch.nn.functional.pad(rows, (0, 1)), _NO_SOURCE)
    src = src.scatter(1, place, rows)[:, :-1]
    return torch.where(known, rows, _NO_ROW), src


def _rows_with_target(probe: RepeatedTokens, offset: int) -> Float[Tensor, " batch"]:
    """How many rows have a target at s + offset that is not after them: the first copy's is the earliest."""
    rows = torch.arange(probe.tokens.shape[1], device=probe.tokens.device)
    return ((probe.earliest >= 0) & (probe.earliest + offset <= rows)).sum(-1).double()
