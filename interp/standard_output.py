"""What a command prints on stdout: any text in any encoding, and one error where it cannot be written."""

import contextlib
import errno
import os
import sys
from collections.abc import Iterator
from typing import NoReturn


class OutputError(OSError):
    """Standard output cannot be written: closed, or on a full disk."""


@contextlib.contextmanager
def printed() -> Iterator[None]:
    """A block that does nothing but print; what it printed has been written when it ends.

    Characters that the encoding of stdout lacks become "?". After an error stdout leads nowhere, so that
    nothing is tried again when the interpreter ends.

    Raises:
        OutputError: stdout is closed, or what it leads to cannot be written.
        BrokenPipeError: the reader went away (`| head`).
    """
    out = sys.stdout
    if out is None or out.closed:
        raise OutputError(errno.EBADF, "closed", "stdout")
    if hasattr(out, "reconfigure"):
        out.reconfigure(errors="replace")
    try:
        yield
        out.flush()
    except OSError as error:
        _lead_nowhere(out)
        if isinstance(error, BrokenPipeError):
            raise
        raise OutputError(error.errno, error.strerror or str(error), "stdout") from None


def say(text: object) -> None:
    """Print one line; errors as `printed`."""
    with printed():
        print(text)


def write_bytes(data: bytes) -> None:
    """Write to stdout as it is; errors as `printed`."""
    with printed():
        sys.stdout.flush()
        sys.stdout.buffer.write(data)


def stand_in_for_stderr() -> None:
    """Where stderr is closed (`2>&-`), let what is said there go nowhere: print would write it to stdout."""
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")


def leave(status: int) -> NoReturn:
    """End the process here, what it printed written.

    The interpreter would first take apart all that torch and CUDA have loaded, which takes from half a second
    to two. A profiler, debugger or coverage tool that watches the process has its say first.
    """
    if _is_watched():
        sys.exit(status)
    for out in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            out.flush()
    os._exit(status)


def _is_watched() -> bool:
    if sys.getprofile() is not None or sys.gettrace() is not None:
        return True
    # From Python 3.12 on, by one of six tools.
    monitoring = getattr(sys, "monitoring", None)
    return monitoring is not None and any(monitoring.get_tool(n) is not None for n in range(6))


def _lead_nowhere(out: object) -> None:
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, out.fileno())
        os.close(nowhere)
