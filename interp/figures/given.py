"""What a figure is given, as numbers that can be drawn; what cannot be drawn is named."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from models.whole import is_whole


def numbers(values: Any, name: str) -> np.ndarray:
    """Real numbers in float64, of arrays, nested sequences and tensors (with gradients, on any device).

    Raises:
        ValueError: complex numbers, text, or rows of different lengths.
    """
    if hasattr(values, "detach"):
        values = values.detach().cpu()
        values = values.numpy() if values.is_complex() else values.double().numpy()
    try:
        found = np.asarray(values)
        if found.dtype.kind not in "biuf":
            found = np.array(found.tolist(), dtype=np.float64)
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(
            f"{name} holds what is no real number; accepted: real numbers, in rows of equal length"
        ) from None
    return found.astype(np.float64, copy=False)


def with_gaps(values: Any, name: str) -> np.ndarray:
    """`numbers` in which NaN stands for a gap.

    Raises:
        ValueError: as `numbers`, or an infinite value.
    """
    found = numbers(values, name)
    if np.isinf(found).any():
        infinite = found[np.isinf(found)][0]
        raise ValueError(f"{name} holds {infinite}; accepted: finite values, and NaN for a gap")
    return found


def last_value(values: np.ndarray) -> float:
    """The last value that is no gap; ValueError where there is none."""
    there = values[np.isfinite(values)]
    if not len(there):
        raise ValueError("a line holds gaps alone; accepted: at least one finite value")
    return float(there[-1])


def checked_limit(limit: float | None) -> float | None:
    """The end of a colour scale.

    Raises:
        ValueError: it is not positive and finite.
    """
    if limit is not None and not (math.isfinite(limit) and limit > 0):
        raise ValueError(f"limit {limit}; accepted: None or a positive finite number")
    return limit


def checked_count(value: int, name: str) -> int:
    """A number of things to draw.

    Raises:
        ValueError: no whole number, or below 1.
    """
    if not is_whole(value) or value < 1:
        raise ValueError(f"{name} {value!r}; accepted: a whole number from 1 up")
    return value


def checked_tokens(tokens: Sequence[str | bytes]) -> Sequence[str | bytes]:
    """Tokens as text.

    Raises:
        ValueError: one that is none, such as an id.
    """
    for token in tokens:
        if not isinstance(token, str | bytes):
            raise ValueError(f"tokens hold {token!r}; accepted: text (str or bytes), as `str(id)` for an id")
    return tokens
