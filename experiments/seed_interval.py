"""A mean over seeds with its interval."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

# 97.5% points of Student's t by degrees of freedom.
_T = (math.nan, 12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)


@dataclass(frozen=True, kw_only=True)
class SeedInterval:
    """Mean and 95% interval (Student's t over seeds); None for a single seed."""

    mean: float
    half_width: float | None
    n: int

    def __str__(self) -> str:
        return f"{self.mean:.2f}" if self.half_width is None else f"{self.mean:.2f} ± {self.half_width:.2f}"


def over_seeds(values: Sequence[float | None]) -> SeedInterval | None:
    """The interval of the values that there are; None where there is none."""
    found = [value for value in values if value is not None]
    if not found:
        return None
    n, mean = len(found), sum(found) / len(found)
    if n == 1:
        return SeedInterval(mean=mean, half_width=None, n=1)
    deviation = math.sqrt(sum((value - mean) ** 2 for value in found) / (n - 1))
    t = _T[n - 1] if n <= len(_T) else 1.96
    return SeedInterval(mean=mean, half_width=t * deviation / math.sqrt(n), n=n)


def cell(values: Sequence[float | None]) -> str:
    """The interval as text for a table, a dash where nothing was measured."""
    found = over_seeds(values)
    return "–" if found is None else str(found)
