"""One writer for each run folder: an operating-system lock that ends with the process that holds it."""

import contextlib
import os
import socket
from pathlib import Path

from models.errors import CheckpointError

try:
    import fcntl
except ImportError:
    # No such locks here (Windows): training goes on without.
    fcntl = None

NAME = ".lock"


class FolderLock:
    """The lock of one folder, a file `.lock` in it while it is held.

    The kernel releases it when the process ends, however it ends: the file that a killed one leaves locks
    nobody out. On a file system without locks nothing is locked.
    """

    def __init__(self, folder: Path):
        self.path = folder / NAME
        self._handle: int | None = None

    def take(self) -> None:
        """Take the lock.

        Raises:
            CheckpointError: another process holds it, or the folder cannot be written.
        """
        if fcntl is None or self._handle is not None:
            return
        while True:
            try:
                handle = self._opened()
            except OSError as error:
                raise CheckpointError(f"{self.path} cannot be written: {error.strerror}") from error
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = _holder(handle)
                os.close(handle)
                raise CheckpointError(
                    f"{self.path.parent} is being written by another training{holder}; wait for its end, or "
                    "give another folder"
                ) from None
            except OSError:
                # A file system without locks.
                os.close(handle)
                self.path.unlink(missing_ok=True)
                return
            if _is_at(self.path, handle):
                break
            # The holder before took the file away between opening and locking.
            os.close(handle)
        self._handle = handle
        # Not where the file is another user's.
        with contextlib.suppress(OSError):
            os.ftruncate(handle, 0)
            os.write(handle, f"process {os.getpid()} on {socket.gethostname()}".encode())

    def _opened(self) -> int:
        """The file, made if it is not there; the one that another user's process left is opened to read."""
        try:
            return os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except PermissionError:
            return os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)

    def release(self) -> None:
        """Give the lock back and remove its file; nothing where it is not held."""
        if self._handle is None:
            return
        handle, self._handle = self._handle, None
        # Before the lock ends: who waits at the file finds that it is another one.
        self.path.unlink(missing_ok=True)
        fcntl.flock(handle, fcntl.LOCK_UN)
        os.close(handle)


def _is_at(path: Path, handle: int) -> bool:
    try:
        there = os.stat(path)
    except FileNotFoundError:
        return False
    held = os.fstat(handle)
    return (there.st_dev, there.st_ino) == (held.st_dev, held.st_ino)


def _holder(handle: int) -> str:
    said = os.pread(handle, 200, 0).decode("utf-8", errors="replace").strip()
    return f" ({said})" if said else ""
