"""One process at a time writes a file, by a lock beside it that ends with the process, however that ends."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def only_writer(path: Path) -> Iterator[None]:
    """Inside, no other process is inside for ``path``. The lock is on the file ``.NAME.lock`` in the same folder.

    Raises ValueError where another process is inside, or the file system has no locks.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = path.with_name(f".{path.name}.lock")
    try:
        fd = _locked(lock)
    except BlockingIOError:
        raise ValueError(
            f"{path} is being written by another run: wait for its end, or choose another file with --out"
        ) from None
    except OSError as error:
        raise ValueError(f"{lock} cannot be locked ({error.strerror}): choose a file elsewhere with --out") from None
    try:
        yield
    finally:
        lock.unlink(missing_ok=True)
        os.close(fd)


def _locked(lock: Path) -> int:
    """A descriptor of the file that ``lock`` names, locked; BlockingIOError where another process has locked it."""
    while True:
        fd = os.open(lock, os.O_CREAT | os.O_RDWR, 0o666)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(fd), os.stat(lock)):
                    return fd
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)  # who held it has removed it since it was opened: a lock on no file keeps nobody out
