"""Files that a kill leaves whole, and folders that one process at a time works on."""

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any


def replace(path: Path, write: Callable[[Path], Any]) -> None:
    """Lets `write` make a file beside `path`, then puts it in its place: a kill leaves either."""
    temporary = path.with_name(path.name + ".tmp")
    write(temporary)
    _sync(temporary)
    os.replace(temporary, path)
    _sync(path.parent)


def lock(folder: Path) -> int:
    """A handle that is held until it is closed, or the process ends.

    It keeps out the processes of this host; on some network disks also those of others.

    Raises:
      ValueError: another one is held.
      OSError: the disk has no locks.
    """
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(handle)
        if not isinstance(error, BlockingIOError):
            raise
        raise ValueError(
            f"{folder}: another process works in it; wait for its end, or name another folder"
        ) from None
    return handle


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Holds the lock of a folder."""
    handle = lock(folder)
    try:
        yield
    finally:
        os.close(handle)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
