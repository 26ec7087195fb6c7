"""The files that `detect-induction` writes: checked before the work, each one's name its own."""

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from interp.errors import DetectionError

# As a file's name: standard output.
STDOUT = "-"


def check_outputs(outputs: Mapping[str, str]) -> None:
    """Refuse outputs that cannot be written, or that are one file.

    Args:
        outputs: Option, such as `--json`, to the name that was given with it.

    Raises:
        DetectionError: names the option and what is wrong with its file.
    """
    seen: dict[str, str] = {}
    for option, name in outputs.items():
        if not name:
            raise DetectionError(f"{option} ''; accepted: the name of a file to write, or - for stdout")
        if name != STDOUT:
            _check_writable(name)
        place = name if name == STDOUT else os.path.realpath(name)
        if place in seen:
            raise DetectionError(
                f"{name} is given for two outputs, {seen[place]} and {option}; give each a name of its own"
            )
        seen[place] = option


def _check_writable(name: str) -> None:
    path = Path(name).resolve()
    if path.is_dir() or name.endswith("/"):
        raise DetectionError(f"{name!r} is a folder; give the name of a file to write")
    if path.exists() and not path.is_file():
        return
    if not path.parent.is_dir():
        raise DetectionError(f"{path} cannot be written: there is no folder {path.parent}")
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise DetectionError(f"{path} cannot be written: {error.strerror}") from None
