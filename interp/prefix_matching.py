"""Prefix matching: how much a head attends to what followed earlier copies of the current token."""

from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from interp.sequences import RepeatedTokens

Aggregation = Literal["rowsum", "latest", "pairs"]
AGGREGATIONS = ("rowsum", "latest", "pairs")


def prefix_matching_score(
    pattern: Float[Tensor, "batch head dest=seq src=seq"],
    probe: RepeatedTokens,
    aggregation: Aggregation = "rowsum",
    *,
    offset: int = 1,
) -> Float[Tensor, " head"]:
    """Attention paid to the tokens that followed earlier copies of the current token.

    Args:
        pattern: Implied attention, or nonnegative weights made from it. Rows need not sum to 1: Mamba's
            entries are signed.
        probe: Tokens of which some come again. Targets of position i are all `s + offset` with `x_s = x_i`,
            `s < i`.
        aggregation: `rowsum` adds over the targets of a row, `latest` takes the most recent one, both then
            average over rows that have a target; `pairs` averages over (row, target) pairs, where a perfect
            head is below 1 when tokens come three times or more.
        offset: 1 for the follower of the copy.

    Returns:
        One score per head, no unit; for softmax attention in [0, 1], and a perfect head has `rowsum` 1.

    Raises:
        ValueError: `pattern` and `probe` differ in shape, no token comes again, or the aggregation is
            unknown.

    Source: Olsson et al. 2022, arXiv:2209.11895, head activation evaluators. Differs: `rowsum` and `latest`.
    """
    return prefix_matching_by_sequence(pattern, probe, aggregation, offset=offset).mean(0)


def prefix_matching_by_sequence(
    pattern: Float[Tensor, "batch head dest=seq src=seq"],
    probe: RepeatedTokens,
    aggregation: Aggregation = "rowsum",
    *,
    offset: int = 1,
) -> Float[Tensor, "batch head"]:
    """`prefix_matching_score` before the mean over sequences."""
    weights = target_weights(pattern, probe, offset=offset)
    return aggregate(weights, probe, aggregation, offset=offset)


def uniform_chance(probe: RepeatedTokens, aggregation: Aggregation = "rowsum", *, offset: int = 1) -> float:
    """The score of uniform attention, A[i, j] = 1 / (i + 1), on the same tokens."""

    def found() -> float:
        filled = filled_targets(probe, offset)
        rows = torch.arange(1, probe.tokens.shape[1] + 1, dtype=torch.float64, device=filled.device)
        weights = (filled / rows[:, None])[:, None]
        return float(aggregate(weights, probe, aggregation, offset=offset).mean())

    return probe.once(("uniform_chance", aggregation, offset), found)


def target_weights(
    pattern: Float[Tensor, "batch head dest src"],
    probe: RepeatedTokens,
    *,
    offset: int = 1,
    rows: slice | None = None,
) -> Float[Tensor, "batch head dest n"]:
    """The weights at `s + offset` for the n earlier copies s of each row's token, most recent first, 0 where
    none.

    `rows` says which destinations `pattern` holds, for patterns that come in blocks of rows.
    """
    rows = rows or slice(0, probe.tokens.shape[1])
    source, _ = probe.earlier
    filled = filled_targets(probe, offset)[:, rows]
    _check_shape(pattern, filled, rows.stop)
    index = torch.where(filled, source[:, rows] + offset, 0)
    found = pattern.gather(-1, index[:, None].expand(-1, pattern.shape[1], -1, -1))
    return found * filled[:, None]


def target_weights_at(
    pattern: Float[Tensor, "batch head dest src"], probe: RepeatedTokens, offsets: tuple[int, ...]
) -> Float[Tensor, "offset batch head dest n"]:
    """`target_weights` of all rows at several offsets."""

    def found() -> tuple[Tensor, Tensor]:
        filled = torch.stack([filled_targets(probe, offset) for offset in offsets])
        at = torch.stack([probe.earlier[0] + offset for offset in offsets])
        return torch.where(filled, at, 0), filled

    index, filled = probe.once(("targets", *offsets), found)
    _check_shape(pattern, filled[0], probe.tokens.shape[1])
    index = index[:, :, None].expand(-1, -1, pattern.shape[1], -1, -1)
    return pattern.expand(len(offsets), *pattern.shape).gather(-1, index) * filled[:, :, None]


def by_offset(
    pattern: Float[Tensor, "batch head dest src"], probe: RepeatedTokens, offsets: tuple[int, ...]
) -> dict[str, Float[Tensor, "batch head *offset"]]:
    """`rowsum`, `latest` and `pairs` at the first offset, and `by_offset`: `rowsum` at all of them."""
    weights = target_weights_at(pattern, probe, offsets).double()
    counts = [_counts_at(probe, offset) for offset in offsets]
    n_rows = probe.once(("n_rows", *offsets), lambda: torch.stack([count["rowsum"] for count in counts]))
    # Rows without a target hold zeros, so that one sum serves two scores.
    total = weights.sum((-1, -2))
    rowsum = total / n_rows
    return {
        "rowsum": rowsum[0],
        "latest": _total(weights[0], "latest") / counts[0]["latest"],
        "pairs": total[0] / counts[0]["pairs"],
        "by_offset": rowsum.movedim(0, -1),
    }


def _check_shape(pattern: Tensor, filled: Bool[Tensor, "batch dest n"], n_sources: int) -> None:
    if (pattern.shape[0], pattern.shape[2]) != filled.shape[:2] or pattern.shape[3] < n_sources:
        expected = f"{filled.shape[0]} sequences, {filled.shape[1]} rows and {n_sources} sources"
        raise ValueError(f"the pattern has shape {tuple(pattern.shape)}; the probe has {expected}")


def aggregate(
    weights: Float[Tensor, "batch head dest n"],
    probe: RepeatedTokens,
    aggregation: Aggregation,
    *,
    offset: int = 1,
) -> Float[Tensor, "batch head"]:
    """Reduce weights at the targets of all rows to one number for each sequence and head, in float64."""
    if aggregation not in AGGREGATIONS:
        raise ValueError(f"aggregation is {aggregation!r}; accepted are {', '.join(AGGREGATIONS)}")
    return _total(weights.double(), aggregation) / _counts_at(probe, offset)[aggregation]


def _total(weights: Float[Tensor, "batch head dest n"], aggregation: Aggregation) -> Tensor:
    # Filled places come first, so place 0 is the most recent copy.
    return weights[..., 0].sum(-1) if aggregation == "latest" else weights.sum((-1, -2))


def _counts_at(probe: RepeatedTokens, offset: int) -> dict[str, Int[Tensor, "batch one"]]:
    return probe.once(("counts", offset), lambda: _counts(filled_targets(probe, offset)))


def _counts(filled: Bool[Tensor, "batch dest n"]) -> dict[str, Int[Tensor, "batch one"]]:
    """What each aggregation divides by."""
    if not filled.any(-1).any(-1).all():
        raise ValueError("a sequence has no token that comes again: nothing to match")
    rows = {"rowsum": filled.any(-1), "latest": filled[..., 0], "pairs": filled.flatten(1)}
    return {name: held.sum(-1)[:, None] for name, held in rows.items()}


def standard_error(by_sequence: Float[Tensor, "batch *head"]) -> Float[Tensor, "*head"]:
    """Standard error of the mean over the first axis; 0 for a single sequence, which has none to show."""
    n = by_sequence.shape[0]
    if n < 2:
        return torch.zeros_like(by_sequence[0])
    return by_sequence.std(0, correction=1) / n**0.5


def filled_targets(probe: RepeatedTokens, offset: int) -> Bool[Tensor, "batch dest n"]:
    """Which of the n places of each row hold a target at `s + offset`; see `RepeatedTokens.has_target`."""
    return probe.has_target(offset)
