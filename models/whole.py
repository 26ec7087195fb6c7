"""Whole numbers: what counts as one where a count, a place or an index is asked for."""

import operator
from typing import Any

import numpy as np
import torch


def is_whole(value: Any) -> bool:
    """True for Python's and NumPy's integers and tensors of one; not for 1.0, and not for True."""
    if type(value) is int:
        return True
    if isinstance(value, bool | np.bool_) or (isinstance(value, torch.Tensor) and value.dtype == torch.bool):
        return False
    try:
        operator.index(value)
    except TypeError:
        return False
    return True
