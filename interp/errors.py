"""Errors of the instruments: a probe or a path that they cannot read."""


class DetectionError(ValueError):
    """What a command reports in one line: the value that was wrong, and what is accepted."""


class InterventionError(ValueError):
    """An intervention that cannot be made: the value that was wrong, and what is accepted, in one line."""
