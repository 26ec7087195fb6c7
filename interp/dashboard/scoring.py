"""Scores of every checkpoint of a run, made in the background once and shown by all windows."""

import threading
from dataclasses import dataclass

from interp.dashboard.run import Run
from interp.records import DetectionReport

# What the training view shows; copying and cuts take longer and have `detect-induction`.
SCORES = ("prefix_matching", "previous_token", "in_context_learning", "repeats")


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far the scoring of a run is: `report` when done, `error` when it failed."""

    done: int
    total: int
    report: DetectionReport | None = None
    error: str | None = None


class Scoring:
    """Scores runs, each in one thread of its own that begins when it is first asked for."""

    def __init__(self) -> None:
        # By path and checkpoints: a run that has grown is scored anew.
        self._found: dict[tuple[str, tuple[int, ...]], Progress] = {}
        self._lock = threading.Lock()

    def of(self, run: Run) -> Progress:
        """Progress of a run; starts it."""
        key = (run.path, run.steps)
        with self._lock:
            if key not in self._found:
                self._found[key] = Progress(done=0, total=len(run.steps))
                threading.Thread(target=self._score, args=key, daemon=True).start()
            return self._found[key]

    def _score(self, path: str, steps: tuple[int, ...]) -> None:
        from interp.detect import detect
        from interp.errors import DetectionError
        from kernels import KernelError
        from models.errors import CheckpointError, ConfigError

        key, total = (path, steps), len(steps)

        def progress(done: int, total: int, step: int) -> None:
            self._found[key] = Progress(done=done, total=total)

        try:
            report = detect(path, scores=SCORES, progress=progress, n_maps=0)
        except (DetectionError, CheckpointError, ConfigError, KernelError, OSError) as error:
            self._found[key] = Progress(done=0, total=total, error=" ".join(str(error).split()))
        else:
            self._found[key] = Progress(done=total, total=total, report=report)
