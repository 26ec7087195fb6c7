"""What a command says on stderr while it works: one line that changes, or now and then a line of a log."""

import sys
import time

# Between two lines where stderr is no terminal.
EVERY_S = 5.0


class ProgressLine:
    """Called with a short sentence; used as a context, it leaves no unfinished line behind.

    On a terminal each sentence replaces the one before. Elsewhere a sentence is a line, the first at once and
    then at most one in `every_s` seconds (None: nothing).
    """

    def __init__(self, prog: str, *, every_s: float | None = EVERY_S):
        self.prog, self.every_s = prog, every_s
        self._next = 0.0

    def __enter__(self) -> "ProgressLine":
        return self

    def __exit__(self, *error: object) -> None:
        self._rewrite("")

    def __call__(self, words: str) -> None:
        if sys.stderr is None:
            return
        if sys.stderr.isatty():
            self._rewrite(words)
        elif self.every_s is not None and time.monotonic() >= self._next:
            self._next = time.monotonic() + self.every_s
            print(f"{self.prog}: {words}", file=sys.stderr, flush=True)

    def warn(self, words: str) -> None:
        """Say something that stays."""
        if sys.stderr is None:
            return
        self._rewrite("")
        print(f"{self.prog}: {words}", file=sys.stderr, flush=True)

    def _rewrite(self, words: str) -> None:
        if sys.stderr is not None and sys.stderr.isatty():
            print(f"\r\033[K{words}", end="", file=sys.stderr, flush=True)
