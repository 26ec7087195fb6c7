"""What someone typed, as a message quotes it: short, however long it is."""

from typing import Any

MOST = 40


def quoted(value: Any) -> str:
    """A value in Python's spelling; the first 40 characters of long ones, and an ellipsis."""
    if isinstance(value, str):
        return repr(value) if len(value) <= MOST else f"{value[:MOST]!r}…"
    return shortened(repr(value))


def shortened(text: str) -> str:
    """The first 40 characters of a long text, and an ellipsis."""
    return text if len(text) <= MOST else f"{text[:MOST]}…"


def whole_number(digits: str, most: int) -> int:
    """The number that decimal digits spell, or `most` + 1 where it is larger: Python refuses long ones."""
    # As many digits as `most` has, however many zeros stand before them.
    significant = "".join(str(int(digit)) for digit in digits[-len(str(most)) :])
    before = digits[: -len(str(most))]
    return most + 1 if any(int(digit) for digit in before) else min(int(significant), most + 1)
