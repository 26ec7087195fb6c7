"""Ctrl-C while a command still imports: libraries that try an import swallow the exception it raises."""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator

# What a shell says of a command that Ctrl-C ended.
INTERRUPTED = 130


@contextlib.contextmanager
def ended_by_interrupt(said: str, *, alone: bool = True) -> Iterator[None]:
    """A block of imports in a process of the command's own (`alone`): Ctrl-C ends the process there and
    then, with one line on stderr. Where somebody else handles the signal, or ignores it, nothing changes."""
    ours = alone and threading.current_thread() is threading.main_thread()
    if not ours or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return

    def end(*_: object) -> None:
        # Whatever becomes of the line: closed, full, or its reader gone.
        with contextlib.suppress(Exception):
            os.write(2, f"{said}\n".encode(errors="replace"))
        os._exit(INTERRUPTED)

    signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
