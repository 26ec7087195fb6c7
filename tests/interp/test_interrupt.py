"""Ctrl-C during a command's imports, some of which swallow the exception that it raises."""

import subprocess
import sys

import pytest

SCRIPT = """
import contextlib, os, signal
from interp.interrupt import ended_by_interrupt
{before}
with ended_by_interrupt("command: interrupted", alone={alone}):
    with contextlib.suppress(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
print("went on")
try:
    os.kill(os.getpid(), signal.SIGINT)
except KeyboardInterrupt:
    print("interrupted later")
"""
IGNORED = "signal.signal(signal.SIGINT, signal.SIG_IGN)"


def _ended(before: str = "", alone: bool = True) -> tuple[int, str, str]:
    script = SCRIPT.format(before=before, alone=alone)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr


def test_it_ends_the_process_with_one_line():
    assert _ended() == (130, "", "command: interrupted\n")


@pytest.mark.parametrize(
    ("before", "alone", "said"), [("", False, "went on\ninterrupted later\n"), (IGNORED, True, "went on\n")]
)
def test_nothing_changes_where_somebody_else_handles_it(before, alone, said):
    assert _ended(before, alone) == (0, said, "")


def test_a_line_that_cannot_be_written_ends_the_process_too():
    script = SCRIPT.format(before="", alone=True).replace("KeyboardInterrupt)", "BaseException)")
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=full, text=True)
    assert (done.returncode, done.stdout) == (130, "")


def test_after_the_imports_it_is_an_exception_again():
    script = SCRIPT.replace("os.kill(os.getpid(), signal.SIGINT)\nprint", "pass\nprint")
    done = subprocess.run(
        [sys.executable, "-c", script.format(before="", alone=True)], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (0, "went on\ninterrupted later\n")
