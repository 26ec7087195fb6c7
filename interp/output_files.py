"""The files that `detect-induction` writes: checked before the work, each one's name its own."""

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from interp.errors import DetectionError

# As a file's name: standard output.
STDOUT = "-"
_OF_A_MODEL = ("run.json", "metrics.jsonl", "config.json", "training.json", "tokenizer.json")


def check_outputs(outputs: Mapping[str, str]) -> None:
    """Refuse outputs that cannot be written, or that are one file.

    Args:
        outputs: Option, such as `--json`, to the name that was given with it.

    Raises:
        DetectionError: names the option and what is wrong with its file.
    """
    seen: dict[str, str] = {}
    for option, name in outputs.items():
        if name != STDOUT:
            check_name(option, name)
            _check_writable(name)
        place = name if name == STDOUT else os.path.realpath(name)
        if place in seen:
            raise DetectionError(
                f"{name} is given for two outputs, {seen[place]} and {option}; give each a name of its own"
            )
        seen[place] = option


def check_name(option: str, name: str) -> None:
    """Refuse what is no file's name, and the files that a run or model consists of.

    Raises:
        DetectionError: as `check_outputs`.
    """
    if not name:
        raise DetectionError(f"{option} ''; accepted: the name of a file to write, or - for stdout")
    path = Path(name).resolve()
    if path.is_dir() or name.endswith("/"):
        raise DetectionError(f"{name!r} is a folder; give the name of a file to write")
    if path.is_file() and (path.name in _OF_A_MODEL or path.suffix in (".safetensors", ".gguf")):
        raise DetectionError(
            f"{path} is a file of a run or a model, which {option} would replace; give another name"
        )


def _check_writable(name: str) -> None:
    # Before links are followed: that of /dev/stdout leads to a pipe, which has no path.
    if Path(name).exists() and not Path(name).is_file():
        return
    path = Path(name).resolve()
    if not path.parent.is_dir():
        raise DetectionError(f"{path} cannot be written: there is no folder {path.parent}")
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise DetectionError(f"{path} cannot be written: {error.strerror}") from None
