"""Prefix matching, previous token and copying on chosen edges: the dense scores without a T x T tensor.

Memory is linear in length. Time is that of the edges for softmax and normalised linear attention. Rows of
|A| (Mamba-2's scan, unnormalised linear attention) are added up block by block: quadratic in length, though
sources whose decay has underflowed cost nothing. Where weights are norms of contributions (Mamba-1, every
block reading) no linear form exists, because a norm of a sum over channels cannot be split into source and
destination: their row sums take row blocks of all pairs too, with a vector of d_source numbers each.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from interp import copying
from interp.match_scores import match_scores
from interp.sequences import RepeatedTokens
from models.mixers.reading import Reading

# Probes longer than this many tokens are scored on edges; up to it a pattern is small.
LINEAR_MEMORY_ABOVE = 1024
# Edges, and numbers in the logits of edges, that are worked on together.
_EDGES_AT_ONCE = 1 << 16
_LOGITS_AT_ONCE = 1 << 24


@dataclass(frozen=True, kw_only=True)
class EdgeScores:
    """Scores of one reading by sequence and unit, as `prefix_matching` and `previous_token` define them.

    Attributes:
        rowsum: Prefix matching at each of the offsets asked for.
        latest, pairs: The other two aggregations, at the first of the offsets.
        previous: Mean A[i, i-1].
        first_position: Mean A[i, 0] of the rows after the first copy.
    """

    rowsum: Float[Tensor, "batch unit offset"]
    latest: Float[Tensor, "batch unit"]
    pairs: Float[Tensor, "batch unit"]
    previous: Float[Tensor, "batch unit"]
    first_position: Float[Tensor, "batch unit"]


def chosen(probe: RepeatedTokens, linear_memory: bool | None) -> bool:
    """Whether a probe is scored on edges: as told, or (None) where it is longer than LINEAR_MEMORY_ABOVE."""
    return probe.tokens.shape[1] > LINEAR_MEMORY_ABOVE if linear_memory is None else linear_memory


def edge_scores(
    reading: Reading,
    probe: RepeatedTokens,
    *,
    offsets: Sequence[int] = (1,),
    backend: str | None = None,
) -> EdgeScores:
    """The scores of a reading of the probe's tokens; see `EdgeScores`.

    Args:
        backend: "torch" gathers edges, "triton" takes the fused sums or is refused; None goes by the device.

    Raises:
        ValueError: a sequence has no token that comes again.
        KernelError: backend "triton" where there are no fused sums.
    """
    found = match_scores(reading, probe, offsets, backend=backend)
    if found is None:
        return _gathered(reading, probe, offsets)
    return EdgeScores(**found, **_columns(reading, probe))


def _gathered(reading: Reading, probe: RepeatedTokens, offsets: Sequence[int]) -> EdgeScores:
    """The scores edge by edge."""
    sums = _Sums(reading, len(offsets))
    for rows in _row_blocks(probe, len(offsets)):
        sums.add(reading, probe, rows, offsets)
    if not sums.n_rows.all():
        raise ValueError("a sequence has no token that comes again: nothing to match")
    return EdgeScores(
        rowsum=sums.targets / sums.n_rows[:, None],
        latest=sums.latest / sums.n_latest[:, None],
        pairs=sums.targets[..., 0] / sums.n_pairs[:, None],
        **_columns(reading, probe),
    )


def _columns(reading: Reading, probe: RepeatedTokens) -> dict[str, Float[Tensor, "batch unit"]]:
    """Mean weights of the previous position and of position 0, of which each row has one."""
    seq, device = probe.tokens.shape[1], reading.constant.device
    starts = {"previous": (1 + probe.first, 1), "first_position": (probe.first + probe.period, None)}
    return {
        name: _mean_column(reading, torch.arange(start, seq, device=device), back)
        for name, (start, back) in starts.items()
    }


def _mean_column(
    reading: Reading, rows: Int64[Tensor, " row"], back: int | None
) -> Float[Tensor, "batch unit"]:
    """Mean over rows of the edge to the position `back` before each, or (None) to position 0, float64."""
    total = torch.zeros(reading.n_batch, reading.n_units, dtype=torch.float64, device=rows.device)
    for some in rows.split(max(1, _EDGES_AT_ONCE // reading.n_batch)):
        batch = torch.arange(reading.n_batch, device=rows.device).repeat_interleave(len(some))
        dest = some.repeat(reading.n_batch)
        src = torch.zeros_like(dest) if back is None else dest - back
        total.index_add_(0, batch, reading.edge_weights(batch, dest, src).double())
    return total / len(rows)


class _Sums:
    """Running sums over blocks of rows, float64, and how many rows and pairs they are of."""

    def __init__(self, reading: Reading, n_offsets: int):
        shape, device = (reading.n_batch, reading.n_units), reading.constant.device
        self.targets = torch.zeros(*shape, n_offsets, dtype=torch.float64, device=device)
        self.latest = torch.zeros_like(self.targets[..., 0])
        self.n_rows = torch.zeros(shape[0], n_offsets, dtype=torch.float64, device=device)
        self.n_latest = torch.zeros_like(self.n_rows[:, 0])
        self.n_pairs = torch.zeros_like(self.n_latest)

    def add(self, reading: Reading, probe: RepeatedTokens, rows: slice, offsets: Sequence[int]) -> None:
        """Read a block of destinations."""
        source, filled = probe.earlier_of(rows)
        dest = torch.arange(rows.start, rows.stop, device=source.device)
        for at, offset in enumerate(offsets):
            target = source + offset
            exists = filled & (target <= dest[:, None]) & (target >= 0)
            batch, row, place = exists.nonzero().unbind(1)
            weights = reading.edge_weights(batch, dest[row], target[exists]).double()
            self.targets[..., at].index_add_(0, batch, weights)
            self.n_rows[:, at] += exists.any(-1).sum(-1)
            if at == 0:
                recent = place == 0
                self.latest.index_add_(0, batch[recent], weights[recent])
                self.n_latest += exists[..., :1].sum((-1, -2))
                self.n_pairs += exists.sum((-1, -2))


def _row_blocks(probe: RepeatedTokens, extra: int) -> Iterator[slice]:
    """Consecutive rows that have at most `_EDGES_AT_ONCE` edges together, at least one row each."""
    most = probe.n_earlier.amax(0) + extra
    ends = (most * len(probe.tokens)).cumsum(0).cpu()
    start = 0
    while start < len(ends):
        done = int(ends[start - 1]) if start else 0
        stop = max(start + 1, int(torch.searchsorted(ends, done + _EDGES_AT_ONCE, right=True)))
        yield slice(start, stop)
        start = stop


def copying_scores(
    reading: Reading, probe: RepeatedTokens, directions: Float[Tensor, "batch position d_model"]
) -> dict[str, Tensor]:
    """The copying columns of `head_scores.UnitSamples`; `edge` and `edge_argmax` are means by sequence.

    `directions` are those of the tokens of the first copy, BOS before them where the probe has one.
    """
    bos = probe.bos is not None
    parts: list[dict[str, Tensor]] = []
    outputs = copying.unit_outputs(reading, directions.shape[1])
    width = reading.n_batch * reading.n_units * directions.shape[1]
    for start in range(0, directions.shape[1], max(1, _LOGITS_AT_ONCE // width)):
        rows = slice(start, min(start + max(1, _LOGITS_AT_ONCE // width), directions.shape[1]))
        weights = reading.weights(rows)[..., : directions.shape[1]]
        options = {"bos": bos, "rows": rows}
        alone = copying.logit_copying(outputs, reading.W_out, weights, directions, **options)
        part = {"logit": 4 * alone.ratio - 1, "logit_2r": 2 * alone.two_ratio - 1}
        if bos:
            options["with_bos"] = True
            everything = copying.logit_copying(outputs, reading.W_out, weights, directions, **options)
            part["logit_with_bos"] = 4 * everything.ratio - 1
        parts.append(part)
    found = {name: torch.cat([part[name] for part in parts], -1) for name in parts[0]}
    return found | _edge_copying(reading, probe, directions[:, probe.first :])


def _edge_copying(
    reading: Reading, probe: RepeatedTokens, directions: Float[Tensor, "batch token d_model"]
) -> dict[str, Tensor]:
    """Means over each sequence's induction edges, gathered from blocks of destinations."""
    total, best, n, n_raised = 0, 0, 0, 0
    most = max(1, _LOGITS_AT_ONCE // (reading.n_units * probe.period))
    for rows in _row_blocks(probe, 1):
        dest, src = probe.edges_of(rows)
        for edges in zip(dest.split(most, 1), src.split(most, 1), strict=True):
            filled = (edges[1] <= edges[0]).sum(1)
            if not filled.any():
                continue
            found = copying.edge_copying(reading, probe, directions, edges=edges)
            score = 4 * found.raises.ratio - 1
            raised = score.isfinite()
            total = total + torch.where(raised, score, 0).sum(-1)
            n_raised = n_raised + raised.sum(-1)
            best = best + found.argmax_by_sequence.nan_to_num(0) * filled[:, None]
            n = n + filled[:, None]
    return {"edge": (total / n_raised)[..., None], "edge_argmax": best / n}
