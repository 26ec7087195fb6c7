"""Previous-token score: mean attention to the position just before."""

import torch
from jaxtyping import Float
from torch import Tensor


def previous_token_score(
    pattern: Float[Tensor, "batch head dest=seq src=seq"], *, first: int = 1
) -> Float[Tensor, " head"]:
    """Mean of A[i, i-1] over sequences and `i >= first`.

    Args:
        pattern: Implied attention, or nonnegative weights made from it.
        first: The first row that counts; 2 where position 0 is BOS, so that BOS is no row's previous token.

    Returns:
        One score per head, no unit; in [0, 1] for softmax attention, 1 for a perfect previous-token head.

    Raises:
        ValueError: no row is left.
    """
    return previous_token_by_sequence(previous_weights(pattern), first=first).mean(0)


def previous_weights(
    pattern: Float[Tensor, "batch head dest src"], *, start: int = 0
) -> Float[Tensor, "batch head dest"]:
    """A[i, i-1] of each row, 0 for row 0; `start` is the first row that `pattern` holds."""
    if start == 0:
        return torch.nn.functional.pad(pattern.diagonal(-1, 2, 3), (1, 0))
    return pattern.diagonal(start - 1, 2, 3)


def previous_token_by_sequence(
    weights: Float[Tensor, "batch head seq"], *, first: int = 1
) -> Float[Tensor, "batch head"]:
    """Mean over rows of `previous_weights`, in float64."""
    if not 1 <= first < weights.shape[-1]:
        raise ValueError(f"first row {first} of {weights.shape[-1]}: no row with a previous token is left")
    return weights[..., first:].double().mean(-1)


def uniform_chance(seq: int, *, first: int = 1) -> float:
    """The score of uniform attention, A[i, j] = 1 / (i + 1)."""
    rows = torch.arange(first, seq, dtype=torch.float64)
    return float((1 / (rows + 1)).mean())
