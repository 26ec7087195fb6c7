"""Scores of every checkpoint of a run, made in the background once and shown by all windows."""

import os
import tempfile
import threading
import traceback
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from pathlib import Path

from interp.dashboard.messages import attempt
from interp.dashboard.run import Run
from interp.records import DetectionReport

# What the training view shows; copying and cuts take longer and have `detect-induction`.
SCORES = ("prefix_matching", "previous_token", "in_context_learning", "repeats")
Told = Callable[[int, int, int], None]


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far the scoring of a run is: `report` when done, `error` when it failed.

    `left_out` has a sentence for each checkpoint that could not be read.
    """

    done: int
    total: int
    report: DetectionReport | None = None
    error: str | None = None
    left_out: tuple[str, ...] = ()


def scored(run: Run, told: Told) -> tuple[DetectionReport, tuple[str, ...]]:
    """Scores of the checkpoints that can be read, and a sentence for each that cannot.

    Raises:
        DetectionError, CheckpointError, ConfigError: none can be read, or the run cannot be scored.
    """
    from interp import detect

    options = {"scores": SCORES, "progress": told, "n_maps": 0}
    report, error = attempt(lambda: detect(run.path, **options))
    if error is None:
        return report, ()
    # Checked only now: where all can be read, each is loaded once.
    unread = run.unreadable()
    if not unread or not set(run.steps) - set(unread) or not Path(run.path).is_dir():
        return detect(run.path, **options), ()
    with tempfile.TemporaryDirectory() as folder:
        _link_others(Path(run.path), Path(folder), set(unread))
        report = detect(folder, **options)
    said = tuple(f"step {step:,}: {why}" for step, why in unread.items())
    return replace(report, path=run.path), said


def _link_others(run: Path, folder: Path, left_out: set[int]) -> None:
    """Links to all that a run folder holds but some checkpoints."""
    for entry in run.iterdir():
        number = entry.name.removeprefix("step_")
        if not (number != entry.name and number.isdecimal() and int(number) in left_out):
            os.symlink(entry.resolve(), folder / entry.name)


class Scoring:
    """Scores runs, each in one thread of its own that begins when it is first asked for."""

    def __init__(self) -> None:
        # By path: the files as they lay when it began, and how far it is.
        self._found: dict[str, tuple[Hashable, Progress]] = {}
        self._lock = threading.Lock()

    def of(self, run: Run, *, again: bool = False) -> Progress:
        """Progress of a run; starts it, anew where files have changed since.

        Args:
            again: Start anew also where it has failed.
        """
        files = run.fingerprint()
        with self._lock:
            known, progress = self._found.get(run.path, (None, None))
            failed = progress is not None and progress.error is not None
            if known != files or (again and failed):
                progress = Progress(done=0, total=len(run.steps))
                self._found[run.path] = (files, progress)
                threading.Thread(target=self._score, args=(run, files), daemon=True).start()
            return progress

    def _score(self, run: Run, files: Hashable) -> None:
        total = len(run.steps)

        def tell(done: int, total: int, step: int) -> None:
            self._keep(run, files, Progress(done=done, total=total))

        try:
            made, error = attempt(lambda: scored(run, tell))
        except Exception as unexpected:
            # The page waits for an end: said there in one line, whole at the terminal.
            traceback.print_exc()
            made, error = None, f"{type(unexpected).__name__}: {' '.join(str(unexpected).split())}"
        if error is not None:
            progress = Progress(done=0, total=total, error=error)
        else:
            progress = Progress(done=total, total=total, report=made[0], left_out=made[1])
        self._keep(run, files, progress)

    def _keep(self, run: Run, files: Hashable, progress: Progress) -> None:
        """Unless the files have changed and another thread scores them."""
        with self._lock:
            if self._found[run.path][0] == files:
                self._found[run.path] = (files, progress)
