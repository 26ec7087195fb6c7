"""What can go wrong while training, apart from bad configurations (ConfigError) and checkpoints
(CheckpointError).
"""

import functools
import sys
from collections.abc import Callable

from interp.interrupt import INTERRUPTED


class TrainingError(RuntimeError):
    """Training cannot start or go on; the message says why and what to change."""


def in_one_line(command: Callable[[list[str] | None], int]) -> Callable[[list[str] | None], int]:
    """A command whose named errors end it with one line on stderr and status 1 instead of a traceback.

    A reader that goes away (`| head`) ends it with status 0, Ctrl-C with 130.
    """

    @functools.wraps(command)
    def wrapped(arguments: list[str] | None = None) -> int:
        from interp.errors import DetectionError
        from models.errors import CheckpointError, ConfigError

        name = _name(command)
        try:
            return command(arguments)
        except BrokenPipeError:
            return 0
        except KeyboardInterrupt:
            print(f"{name}: interrupted", file=sys.stderr)
            return INTERRUPTED
        except (ConfigError, CheckpointError, DetectionError, TrainingError) as error:
            print(f"{name}: {error}", file=sys.stderr)
        except OSError as error:
            where = f"{error.filename}: " if error.filename else ""
            print(f"{name}: {where}{error.strerror or error}", file=sys.stderr)
        return 1

    return wrapped


def _name(command: Callable) -> str:
    """Last part of the module; under `python -m` its own name, which `__module__` does not tell."""
    spec = command.__globals__.get("__spec__")
    return (spec.name if spec is not None else command.__module__).rpartition(".")[2]
