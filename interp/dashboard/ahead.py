"""Work done before it is asked for: one thread that makes what will probably be chosen next."""

import threading
from collections.abc import Callable, Sequence

# Between a wish and its work, seconds: the answers of the moment, and the browser's drawing, come first.
PAUSE = 0.25


class Ahead:
    """Does the jobs of the last wish, one after the other; a newer wish replaces those not begun.

    Attributes:
        idle: Set while there is nothing to do.
    """

    def __init__(self, pause: float = PAUSE):
        self.idle = threading.Event()
        self.idle.set()
        self._pause = pause
        self._jobs: list[Callable[[], object]] = []
        self._changed = threading.Condition()
        threading.Thread(target=self._work, daemon=True).start()

    def wish(self, jobs: Sequence[Callable[[], object]]) -> None:
        """Jobs in order of likelihood."""
        with self._changed:
            self._jobs = list(jobs)
            if self._jobs:
                self.idle.clear()
            self._changed.notify()

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._jobs:
                    self.idle.set()
                    self._changed.wait()
                # A wish that comes meanwhile begins the pause anew.
                while self._changed.wait(self._pause):
                    pass
                job = self._jobs.pop(0) if self._jobs else None
            if job is not None:
                job()
