"""Runs each file of ./interpreted in a process in which Triton's interpreter stands for the compiler."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
FILES = sorted((Path(__file__).parent / "interpreted").glob("test_*.py"))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("file", FILES, ids=[file.stem for file in FILES])
def test_kernels_in_the_interpreter(file):
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    environment.pop("PYTEST_XDIST_WORKER", None)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-x", "-o", "addopts=--import-mode=importlib", "-p",
        "no:cacheprovider", "--durations=5", str(file)],
        env=environment, cwd=Path(__file__).parents[3], capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout and " skipped" not in done.stdout
