"""The errors of `models`, and the one sentence that names what was meant instead."""

import difflib
from collections.abc import Iterable


class ConfigError(ValueError):
    """A configuration, or an input to a model, that cannot be used; the message says what is accepted."""


class CheckpointError(OSError):
    """A checkpoint on disk that cannot be read, or could not be written."""


class UnknownHook(KeyError):
    """A hook name that no hook point of the model has."""

    def __str__(self) -> str:
        # KeyError would show the message in quotes.
        return str(self.args[0]) if self.args else ""


class HookNotFired(RuntimeError):
    """A hook point that exists, but does not fire in the chosen form."""


def out_of_memory(error: BaseException) -> str | None:
    """One line on what could not be allocated, on the CPU or a GPU; None for errors of another kind."""
    said = " ".join(str(error).split())
    too_large = "allocate" in said or "Storage size calculation overflowed" in said
    if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and too_large):
        return f"out of memory, a smaller model, batch or probe is needed: {said}"
    return None


def closest(name: str, names: Iterable[str], n: int = 3) -> str:
    """Text to append to an error: the accepted names nearest to `name`, or all of them when few.

    Returns:
        `"; did you mean a, b?"` where something is near, else `"; accepted: a, b, c"` (at most 20 names).
    """
    accepted = list(dict.fromkeys(names))
    near = difflib.get_close_matches(name, accepted, n=n, cutoff=0.6)
    if near:
        return f"; did you mean {', '.join(near)}?"
    shown = ", ".join(accepted[:20]) + (", ..." if len(accepted) > 20 else "")
    return f"; accepted: {shown}" if accepted else ""
