"""The small runs that the notebooks read: taken from a folder, or trained into it first."""

import os
import subprocess
import sys
from pathlib import Path

from experiments.errors import TrainingError
from experiments.runs import load_run

# Where runs are kept; the folder of `make demo` at the root of the repository unless this says another.
VARIABLE = "DEMO_OUT"
ROOT = Path(__file__).resolve().parents[2]


def finished_runs(*names: str, out: str | Path | None = None) -> dict[str, Path]:
    """Folders of named runs that have their last checkpoint; those that lack it are trained, all at once.

    Args:
        names: Named runs, such as `demo-softmax` (`train-lm --list`).
        out: Where they are kept; default the environment variable DEMO_OUT, else the repository's `demo-out`.

    Returns:
        The folder of each, relative to the current one.

    Raises:
        TrainingError: a run could not be trained (its messages come first).
    """
    folder = Path(out or os.environ.get(VARIABLE) or ROOT / "demo-out")
    found = {name: Path(os.path.relpath(folder / name)) for name in names}
    missing = [name for name in names if not is_finished(name, found[name])]
    if missing:
        print(f"training {', '.join(missing)}: about a minute each ...", flush=True)
    running = {name: _start(name, found[name]) for name in missing}
    failed = [name for name, process in running.items() if process.wait() != 0]
    if failed:
        raise TrainingError(f"runs that could not be trained: {', '.join(failed)}")
    return found


def is_finished(name: str, folder: Path) -> bool:
    """Whether the folder holds the run's last checkpoint."""
    return (folder / f"step_{load_run(name).training.steps:08d}").is_dir()


def _start(name: str, folder: Path) -> subprocess.Popen:
    """A process that trains a run, or goes on with one that was broken off, on one thread."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "experiments.cli", name, "--out", str(folder), "--quiet"]
    if (folder / "run.json").is_file():
        command.append("--resume")
    return subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"})
