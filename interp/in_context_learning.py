"""Behaviour: loss by position, in-context learning, and what is gained on repeated tokens.

`losses[n, p - 1]` is -log p(x_p | x_0 .. x_{p-1}) in nats, for p = 1 .. seq - 1.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from interp.prefix_matching import standard_error
from interp.sequences import RepeatedTokens

# Olsson's positions, and the context they are read in.
LATE, EARLY, CONTEXT = 500, 50, 512


@dataclass(frozen=True, kw_only=True)
class InContextLearning:
    """L(late) - L(early) of every window, nats; negative is better. `window_by_sequence`: means around
    both.
    """

    late: int
    early: int
    by_sequence: Float[Tensor, " batch"]
    window_by_sequence: Float[Tensor, " batch"]

    @property
    def score(self) -> float:
        """Mean over windows."""
        return float(self.by_sequence.mean())

    @property
    def standard_error(self) -> float:
        """Standard error over windows."""
        return float(standard_error(self.by_sequence))


def icl_positions(seq: int) -> tuple[int, int]:
    """`(late, early)` = (500, 50) for 501 tokens and more, else the same fractions of the length.

    Raises:
        ValueError: the length leaves no two positions.
    """
    if seq > LATE:
        return LATE, EARLY
    late, early = min(round(LATE / CONTEXT * seq), seq - 1), max(1, round(EARLY / CONTEXT * seq))
    if late <= early:
        raise ValueError(f"windows of {seq} tokens are too short for a late and an early position")
    return late, early


def in_context_learning_score(
    losses: Float[Tensor, "batch seq_minus_1"], positions: tuple[int, int] | None = None
) -> InContextLearning:
    """Loss late in the window minus loss early in it.

    Args:
        losses: Natural text, the same windows and positions at every checkpoint.
        positions: `(late, early)`; default `icl_positions`. Window means reach as far to both sides as early
            / 2. Two places say little of windows with a fixed structure: in a segment copy that ends in
            random tokens the late one may lie behind the copy. The loss by position tells more there.

    Source: Olsson et al. 2022, arXiv:2209.11895: token 500 minus token 50.
    """
    seq = losses.shape[1] + 1
    late, early = positions or icl_positions(seq)
    if not 1 <= early < late < seq:
        raise ValueError(f"positions ({late}, {early}) in windows of {seq} tokens: 1 <= early < late < seq")
    losses = losses.double()
    reach = early // 2
    windows = [losses[:, max(p - reach - 1, 0) : p + reach].mean(1) for p in (late, early)]
    return InContextLearning(
        late=late,
        early=early,
        by_sequence=losses[:, late - 1] - losses[:, early - 1],
        window_by_sequence=windows[0] - windows[1],
    )


@dataclass(frozen=True, kw_only=True)
class RepeatLosses:
    """Losses on repeated random tokens, one value for each sequence, nats."""

    first_copy: Float[Tensor, " batch"]
    later_copies: Float[Tensor, " batch"]
    later_copies_shuffled: Float[Tensor, " batch"]

    @property
    def repeat_gain(self) -> Float[Tensor, " batch"]:
        """First copy minus later copies. Rises in one-layer controls too: they learn which tokens repeat."""
        return self.first_copy - self.later_copies

    @property
    def order_gain(self) -> Float[Tensor, " batch"]:
        """Later copies shuffled minus in order: what knowing the order is worth. Induction's measure of
        behaviour.
        """
        return self.later_copies_shuffled - self.later_copies


def repeat_losses(
    in_order: Float[Tensor, "batch seq_minus_1"],
    shuffled: Float[Tensor, "batch seq_minus_1"],
    probe: RepeatedTokens,
) -> RepeatLosses:
    """Mean loss on the first copy and on the later ones, in order and with each later copy shuffled on its
    own.

    The first token of the second copy stands apart: nothing before it shows that the block repeats. Without
    BOS the very first token has no prediction and does not count.
    """
    start, period = probe.first, probe.period
    first = slice(max(start - 1, 0), start + period - 1)
    later = slice(start + period, None)
    return RepeatLosses(
        first_copy=in_order[:, first].double().mean(1),
        later_copies=in_order[:, later].double().mean(1),
        later_copies_shuffled=shuffled[:, later].double().mean(1),
    )


def bigram_hits(tokens: Int[Tensor, "batch seq"]) -> Bool[Tensor, "batch seq_minus_1"]:
    """True at p (column p - 1) where the bigram (x_{p-1}, x_p) already occurred earlier in the window."""
    pairs = tokens[:, :-1].long() * (int(tokens.max()) + 1) + tokens[:, 1:].long()
    ordered, order = pairs.sort(dim=1, stable=True)
    seen = torch.zeros_like(ordered, dtype=torch.bool)
    seen[:, 1:] = ordered[:, 1:] == ordered[:, :-1]
    return torch.zeros_like(seen).scatter(1, order, seen)


def hit_loss(
    losses: Float[Tensor, "batch seq_minus_1"], tokens: Int[Tensor, "batch seq"]
) -> tuple[float | None, float]:
    """Mean loss at repeated bigrams in nats (None: there are none), and the share of positions that are
    ones.
    """
    hits = bigram_hits(tokens)
    share = float(hits.double().mean())
    return (float(losses.double()[hits].mean()) if share else None), share
