"""Short names of units and readings, the same in every figure and table."""

from collections.abc import Iterable

from interp.records import AttentionMap, HeadScore

READINGS = {
    "pattern": "attention pattern",
    "ssm": "implied attention of the state-space recurrence (ssm)",
    "block": "whole block, convolution and gate included (block)",
}
UNIT_LETTERS = {"head": "H", "state": "S", "cluster": "C"}


def unit_name(unit: HeadScore | AttentionMap, *, with_reading: bool = False) -> str:
    """`L1H3`, `L0S7` for a state index, `L0` for a whole layer; the reading follows where asked for."""
    letter = UNIT_LETTERS.get(unit.unit)
    name = f"L{unit.layer}" if letter is None else f"L{unit.layer}{letter}{unit.head}"
    return f"{name} {unit.reading}" if with_reading else name


def readings_of(heads: Iterable[HeadScore]) -> tuple[str, ...]:
    """The readings that occur, in the order pattern, ssm, block, then others by name."""
    there = {head.reading for head in heads}
    known = [reading for reading in READINGS if reading in there]
    return (*known, *sorted(there - set(known)))


def several_readings(heads: Iterable[HeadScore]) -> bool:
    """True when one layer has rows under more than one reading, so that names must say which."""
    seen: dict[int, str] = {}
    return any(seen.setdefault(head.layer, head.reading) != head.reading for head in heads)
