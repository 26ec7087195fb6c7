"""What can go wrong while training, apart from bad configurations (ConfigError) and checkpoints
(CheckpointError).
"""

import functools
import sys
from collections.abc import Callable


class TrainingError(RuntimeError):
    """Training cannot start or go on; the message says why and what to change."""


def in_one_line(command: Callable[[list[str] | None], int]) -> Callable[[list[str] | None], int]:
    """A command whose named errors end it with one line on stderr and status 1 instead of a traceback."""

    @functools.wraps(command)
    def wrapped(arguments: list[str] | None = None) -> int:
        from interp.errors import DetectionError
        from models.errors import CheckpointError, ConfigError

        name = command.__module__.rpartition(".")[2]
        try:
            return command(arguments)
        except (ConfigError, CheckpointError, DetectionError, TrainingError) as error:
            print(f"{name}: {error}", file=sys.stderr)
        except OSError as error:
            where = f"{error.filename}: " if error.filename else ""
            print(f"{name}: {where}{error.strerror or error}", file=sys.stderr)
        return 1

    return wrapped
