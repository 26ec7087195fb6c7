"""Errors that a person can do something about, as one sentence on the page; all others stay errors."""

from collections.abc import Callable
from typing import TypeVar

from interp.errors import DetectionError
from kernels import KernelError
from models.errors import CheckpointError, ConfigError, out_of_memory

Made = TypeVar("Made")
NAMED = (DetectionError, CheckpointError, ConfigError, KernelError)


def attempt(make: Callable[[], Made]) -> tuple[Made | None, str | None]:
    """What `make` returns and None; or None and the sentence that names what went wrong."""
    try:
        return make(), None
    except NAMED as error:
        return None, " ".join(str(error).split())
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        return None, f"{where}{error.strerror or error}"
    except (MemoryError, RuntimeError) as error:
        said = out_of_memory(error)
        if said is None:
            raise
        return None, said
