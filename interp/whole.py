"""Whole numbers: what counts as one where a count, a place or an index is asked for."""

from numbers import Integral
from typing import Any


def is_whole(value: Any) -> bool:
    """True for Python's and NumPy's integers; not for 1.0, and not for True."""
    return isinstance(value, Integral) and not isinstance(value, bool)
