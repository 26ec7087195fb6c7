"""Write a file whole or not at all."""

import os
from pathlib import Path

# Names of unfinished files begin so; a run folder is cleaned of them when it is opened.
TEMPORARY = ".tmp-"


def write_atomically(path: Path, data: bytes) -> None:
    """Write to a temporary sibling, fsync, rename. On any error the sibling is removed and `path` is as it
    was.

    Raises:
        OSError: the data could not be written (a full disk, say).
    """
    temporary = path.with_name(f"{TEMPORARY}{path.name}")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync_folder(path.parent)


def fsync_folder(folder: Path) -> None:
    """Make a rename in `folder` durable, where the system can."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(handle)
    except OSError:
        pass
    finally:
        os.close(handle)
