"""Prefix matching: how much a head attends to what followed earlier copies of the current token."""

from typing import Literal

import torch
from jaxtyping import Bool, Float
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
    return aggregate(weights, filled_targets(probe, offset), aggregation)


def uniform_chance(probe: RepeatedTokens, aggregation: Aggregation = "rowsum", *, offset: int = 1) -> float:
    """The score of uniform attention, A[i, j] = 1 / (i + 1), on the same tokens."""
    filled = filled_targets(probe, offset)
    rows = torch.arange(1, probe.tokens.shape[1] + 1, dtype=torch.float64, device=filled.device)
    weights = (filled / rows[:, None])[:, None]
    return float(aggregate(weights, filled, aggregation).mean())


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
    sizes = (pattern.shape[0], pattern.shape[2])
    if sizes != (source.shape[0], filled.shape[1]) or pattern.shape[3] < rows.stop:
        expected = f"{source.shape[0]} sequences, {filled.shape[1]} rows and {rows.stop} sources"
        raise ValueError(f"the pattern has shape {tuple(pattern.shape)}; the probe has {expected}")
    index = torch.where(filled, source[:, rows] + offset, 0)
    found = pattern.gather(-1, index[:, None].expand(-1, pattern.shape[1], -1, -1))
    return found * filled[:, None]


def aggregate(
    weights: Float[Tensor, "batch head dest n"],
    filled: Bool[Tensor, "batch dest n"],
    aggregation: Aggregation,
) -> Float[Tensor, "batch head"]:
    """Reduce weights at targets to one number for each sequence and head, in float64."""
    if aggregation not in AGGREGATIONS:
        raise ValueError(f"aggregation is {aggregation!r}; accepted are {', '.join(AGGREGATIONS)}")
    if not filled.any(-1).any(-1).all():
        raise ValueError("a sequence has no token that comes again: nothing to match")
    weights = weights.double()
    if aggregation == "pairs":
        return weights.sum((-1, -2)) / filled.sum((-1, -2))[:, None]
    if aggregation == "latest":
        # Filled places come first, so place 0 is the most recent copy.
        return weights[..., 0].sum(-1) / filled[..., 0].sum(-1)[:, None]
    return weights.sum((-1, -2)) / filled.any(-1).sum(-1)[:, None]


def standard_error(by_sequence: Float[Tensor, "batch *head"]) -> Float[Tensor, "*head"]:
    """Standard error of the mean over the first axis; 0 for a single sequence, which has none to show."""
    n = by_sequence.shape[0]
    if n < 2:
        return torch.zeros_like(by_sequence[0])
    return by_sequence.std(0, correction=1) / n**0.5


def filled_targets(probe: RepeatedTokens, offset: int) -> Bool[Tensor, "batch dest n"]:
    """Which of the n places of each row hold a target at `s + offset`; see `RepeatedTokens.has_target`."""
    return probe.has_target(offset)
