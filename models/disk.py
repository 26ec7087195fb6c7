"""A folder that appears on the disk whole or not at all."""

import ctypes
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import safetensors

from models.errors import CheckpointError


@contextmanager
def written_folder(folder: Path) -> Iterator[Path]:
    """A temporary sibling to write files into, which becomes `folder` when the block ends without an error.

    Files and folders are flushed to the disk before the rename. An earlier folder of that name is exchanged
    in one step where the file system can, else moved aside and removed afterwards.

    Raises:
        CheckpointError: the block or the rename failed for want of space or permission. Whatever was raised,
            the temporary folder is gone and an earlier folder is as it was.
    """
    temporary = folder.with_name(f".{folder.name}.tmp-{secrets.token_hex(4)}")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(folder)
        temporary.mkdir()
        yield temporary
        for path in temporary.iterdir():
            _fsync(path)
        _fsync(temporary)
        _replace(temporary, folder)
        _fsync(folder.parent)
    except CheckpointError:
        raise
    except (OSError, safetensors.SafetensorError) as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(f"{folder} could not be written: {reason}") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _remove_leftovers(folder: Path) -> None:
    """Clear away what writers that were killed left, and put back a folder that one had moved aside."""
    for path in list(folder.parent.iterdir()):
        if path.name.startswith(f".{folder.name}.tmp-"):
            if path.name.endswith("-old") and not folder.exists():
                path.rename(folder)
            else:
                shutil.rmtree(path, ignore_errors=True)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _replace(new: Path, old: Path) -> None:
    """`new` takes the name `old`; what had that name takes the name `new`, and is removed by the caller."""
    if not old.exists():
        new.rename(old)
        return
    if _exchange(new, old):
        return
    aside = new.with_name(new.name + "-old")
    old.rename(aside)
    try:
        new.rename(old)
    except OSError:
        aside.rename(old)
        raise
    shutil.rmtree(aside, ignore_errors=True)


def _exchange(a: Path, b: Path) -> bool:
    """Exchange two names atomically (Linux's renameat2); False where that is not possible."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None) if os.name == "posix" else None
    if renameat2 is None:
        return False
    at_fdcwd, exchange = -100, 2
    return renameat2(at_fdcwd, os.fsencode(a), at_fdcwd, os.fsencode(b), exchange) == 0
