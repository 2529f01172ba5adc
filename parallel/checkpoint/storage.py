"""Checkpoint folders on disk: written under a temporary name and renamed, checked before use.

NAME/                     one checkpoint
    checkpoint.json       the caller's extra, the optimizer's settings, size and CRC-32 of every other file
    index.json            which part of which tensor is where (``index.py``)
    __0_0.distcp, ...     the tensors, as torch.distributed.checkpoint writes them
    .metadata             its own index, for torch's tools: a pickle, which this package never reads
.NAME.lock                held by NAME's writer, which it names
.NAME.writing-XXXX/       being written; its writer holds a lock on it, which tells it from a dead writer's leftover
.NAME.replaced/           the previous NAME, while the new one replaces it
.NAME.removed/            a NAME that is being deleted

Loading trusts nothing in the folder. It reads no pickle: everything but the elements of tensors is JSON, which is
checked field by field, and the elements are read as bytes. Sizes and CRC-32s cover every file and ``checkpoint.json``
has a checksum of its own, so damage is detected before anything changes. A checksum does not stop an attacker, who can
choose every value in a checkpoint, but can change nothing beyond these.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import os
import re
import shutil
import socket
import uuid
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from torch.distributed.checkpoint import CheckpointException

from ..core.agreement import agree, on_first, together
from ..core.mesh import Group
from . import checked, index

MANIFEST = "checkpoint.json"
TORCH_INDEX = ".metadata"
DATA_SUFFIX = ".distcp"
FORMAT = "shardfuse checkpoint 2"
TRIES = 10  # how often a reader starts again while writers replace the checkpoint
_REPLACED = ".replaced"
_LOCK = ".lock"
_REMEDY = "load another checkpoint"

T = TypeVar("T")
Manifest = dict[str, Any]


# --- writing ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def replacing(target: Path, group: Group) -> Iterator[Path]:
    """A new folder to write into; it replaces ``target`` when the block succeeds and is removed when it fails.

    Every rank enters. Raises ValueError if ``target`` is something other than a checkpoint.
    """
    writer = _lock_of(target)
    alive: int | None = None

    def begin() -> Path:
        nonlocal alive
        target.parent.mkdir(parents=True, exist_ok=True)
        writer.acquire()
        _refuse_foreign(target)
        tidy(target)
        folder, alive = beside(target)
        return folder

    try:
        folder = on_first(group, begin)
        try:
            yield folder
            on_first(group, lambda: publish(folder, target))
        except BaseException:
            if group.rank == 0:
                shutil.rmtree(folder, ignore_errors=True)
            raise
    finally:
        if alive is not None:
            os.close(alive)
        writer.release()


class WriterLock:
    """A lock on the file ``path`` for the one writer of ``target``; the file names the holder, for refusals.

    The system ends the lock with its process, so the file that a killed writer leaves does not block the next one.
    """

    def __init__(self, path: Path, target: Path) -> None:
        self._path, self._target = path, target
        self._fd: int | None = None

    def acquire(self) -> None:
        """Raise RuntimeError, which names host and process, if another writer holds the lock."""
        while True:
            fd = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _is_file(fd, self._path):
                    break
            except BlockingIOError:
                holder = os.pread(fd, 300, 0).decode(errors="replace")
                os.close(fd)
                who = holder or "another process"
                raise RuntimeError(
                    f"{self._target}: {who} is writing it; wait until that has ended, close its Checkpointer, or "
                    "choose another path"
                ) from None
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)  # its holder removed the file at that moment
        self._fd = fd
        _held.add(self)
        try:
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
        except OSError:  # such as a full disk
            self.release()
            raise

    def release(self) -> None:
        """Give the lock back, if this process holds it, and remove the file."""
        fd, self._fd = self._fd, None
        if fd is not None:
            _held.discard(self)
            with contextlib.suppress(OSError):
                self._path.unlink()
            fcntl.flock(fd, fcntl.LOCK_UN)
            os.close(fd)

    def forget(self) -> None:
        """Close a forked process's copy of the lock, which its parent still holds."""
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)

    def __del__(self) -> None:
        self.release()


def _lock_of(target: Path) -> WriterLock:
    return WriterLock(target.with_name(f".{target.name}{_LOCK}"), target)


_held: weakref.WeakSet[WriterLock] = weakref.WeakSet()


def _forget_locks() -> None:
    """Close a forked process's copies (a DataLoader worker's, say), which would outlive the holder of the locks."""
    for lock in list(_held):
        lock.forget()
    _held.clear()


os.register_at_fork(after_in_child=_forget_locks)


def _is_file(fd: int, path: Path) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(fd), os.stat(path))
    return False


def _refuse_foreign(target: Path) -> None:
    """ValueError if replacing ``target`` would delete foreign files."""
    if not os.path.lexists(target):
        return
    if not target.is_dir():
        raise ValueError(f"{target}: a file of that name exists; choose another path for the checkpoint")
    if foreign := _foreign(target):
        raise ValueError(
            f"{target}: this folder holds {foreign[0]!r}, which is not part of a checkpoint, and writing would delete "
            "it; choose another path for the checkpoint"
        )


def _foreign(target: Path) -> list[str]:
    """The names in a checkpoint's folder that are not part of it."""
    return sorted(
        name
        for name in os.listdir(target)
        if name not in (MANIFEST, index.FILE, TORCH_INDEX) and not name.endswith(DATA_SUFFIX)
    )


def beside(target: Path) -> tuple[Path, int]:
    """A new folder next to ``target``, and a lock that its writer holds while it lives: a file descriptor to close."""
    folder = target.with_name(f".{target.name}.writing-{uuid.uuid4().hex[:8]}")
    folder.mkdir()
    lock = os.open(folder, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    return folder, lock


def tidy(target: Path) -> None:
    """Remove the leftovers of dead writers of ``target``, and restore a checkpoint that one had moved aside."""
    replaced = _replaced(target)
    if replaced.exists():
        if target.exists():
            shutil.rmtree(replaced, ignore_errors=True)
        else:
            replaced.rename(target)
    remove_dead(target.parent, glob.escape(target.name))


def remove(target: Path) -> None:
    """Delete a checkpoint, renaming it first so that its name never refers to a part. One with foreign files stays."""
    if _foreign(target):
        return
    removed = target.with_name(f".{target.name}.removed")
    shutil.rmtree(removed, ignore_errors=True)
    target.rename(removed)
    shutil.rmtree(removed, ignore_errors=True)


def sweep(folder: Path, pattern: str) -> None:
    """:func:`tidy` for all names in ``folder`` that match the glob ``pattern``; also finishes interrupted removals."""
    locked = {path.name[1:].removesuffix(_LOCK) for path in folder.glob(f".{pattern}{_LOCK}")}
    for name in sorted(locked.union(names(folder, pattern))):
        writer = _lock_of(folder / name)
        try:
            writer.acquire()
        except (RuntimeError, OSError):
            continue  # its writer lives
        try:
            tidy(folder / name)
        finally:
            writer.release()
    remove_dead(folder, pattern)
    for leftover in folder.glob(f".{pattern}.removed"):
        shutil.rmtree(leftover, ignore_errors=True)


def remove_dead(folder: Path, pattern: str) -> None:
    """Remove from ``folder`` the leftovers of dead writers of names that match ``pattern``."""
    for leftover in folder.glob(f".{pattern}.writing-*"):
        with contextlib.suppress(OSError):  # its writer lives, or another process removes it
            fd = os.open(leftover, os.O_RDONLY)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(leftover, ignore_errors=True)
            finally:
                os.close(fd)


def publish(folder: Path, target: Path) -> None:
    """Rename ``folder`` to ``target``. A reader finds the old checkpoint until it finds the new one."""
    _sync(folder)
    replaced = _replaced(target)
    if target.exists():
        target.rename(replaced)  # until the next rename, locate() returns that folder
    try:
        folder.rename(target)
    except OSError:
        if replaced.exists():
            replaced.rename(target)
        raise
    _sync(target.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def write_manifest(folder: Path, fields: dict[str, Any], group: Group) -> None:
    """Write ``checkpoint.json``, with size and CRC-32 of every file of ``folder``; each rank reads its share."""
    # A barrier, and the union of all ranks' views of the folder.
    names = sorted(set().union(*together(group, lambda: set(os.listdir(folder)))))
    sums: dict[str, checked.Sum] = {}
    for part in together(
        group, lambda: {name: checked.checksum(folder / name) for name in names[group.rank :: group.size]}
    ):
        sums |= part
    content = {"format": FORMAT, "generation": uuid.uuid4().hex, **fields, "files": sums}
    on_first(group, lambda: checked.write_json(folder / MANIFEST, content))


def _sync(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _replaced(target: Path) -> Path:
    return target.with_name(f".{target.name}{_REPLACED}")


# --- reading ----------------------------------------------------------------------------------------------------------


def unmixed(target: Path, group: Group, read: Callable[[Path, Manifest], T]) -> tuple[Manifest, T]:
    """The manifest of the checkpoint at ``target``, and the result of ``read``, called with its folder and manifest.

    Every rank enters. If a writer replaces the checkpoint meanwhile, all ranks read again, until every rank finds the
    same ``generation`` (each writer chooses a new one) before and after. Raises RuntimeError after too many attempts.
    """
    for _ in range(TRIES):
        place = agree(group, lambda: open_checkpoint(target))
        try:
            result = read(*place)
        except (ValueError, OSError, CheckpointException):
            if _still_there(target, place, group):
                raise
        else:
            if _still_there(target, place, group):
                return place[1], result
    raise RuntimeError(
        f"{target}: other processes replaced this checkpoint {TRIES} times while it was being read; load a copy, or "
        "wait until they have ended"
    )


def _still_there(target: Path, place: tuple[Path, Manifest], group: Group) -> bool:
    """Whether every rank opened the same generation and still finds it in the same folder."""

    def both() -> tuple[Any, Any]:
        try:
            now = open_checkpoint(target)
        except (ValueError, OSError):
            return _generation(place), None
        return _generation(place), _generation(now)

    return len({each for pair in together(group, both) for each in pair}) == 1


def _generation(place: tuple[Path, Manifest]) -> tuple[str, str]:
    return str(place[0]), place[1]["generation"]


def open_checkpoint(target: Path) -> tuple[Path, Manifest]:
    """The folder and manifest of the checkpoint at ``target``."""
    for _ in range(TRIES):  # a writer may rename the folder between finding and reading it
        folder = locate(target)
        with contextlib.suppress(FileNotFoundError):
            return folder, read_manifest(folder)
    if not folder.exists():
        raise FileNotFoundError(f"{folder}: no such checkpoint; give the folder that save_checkpoint wrote")
    raise ValueError(f"{folder}: not a checkpoint (it has no {MANIFEST}); give the folder that save_checkpoint wrote")


def names(folder: Path, pattern: str) -> list[str]:
    """The names in ``folder`` of checkpoints, in place or moved aside, that match the glob ``pattern``."""
    aside = {path.name[1:].removesuffix(_REPLACED) for path in folder.glob(f".{pattern}{_REPLACED}")}
    return sorted(aside | {path.name for path in folder.glob(pattern) if path.is_dir()})


def locate(target: Path) -> Path:
    """The checkpoint's folder: ``target``, or the one moved aside if its replacement was interrupted."""
    replaced = _replaced(target)
    return replaced if not target.exists() and (replaced / MANIFEST).exists() else target


def read_manifest(folder: Path) -> Manifest:
    """``checkpoint.json``. Raises FileNotFoundError, or ValueError that describes the folder's actual contents."""
    path = folder / MANIFEST
    try:
        manifest = checked.parse_checked(path, checked.read(path), FORMAT, remedy=_REMEDY)
    except NotADirectoryError:
        raise ValueError(
            f"{folder}: not a checkpoint, but a file; give the folder that save_checkpoint wrote"
        ) from None
    if problem := _problem(manifest):
        raise ValueError(f"{path}: corrupt ({problem}); {_REMEDY}")
    return manifest


def _problem(manifest: Manifest) -> str | None:
    """The first field of a manifest that is missing or has the wrong type; None for a valid manifest."""
    sums, groups = manifest.get("files"), manifest.get("param_groups", [])
    if not isinstance(manifest.get("extra"), dict):
        return "it has no dictionary 'extra'"
    if not isinstance(manifest.get("generation"), str):
        return "it has no 'generation'"
    if not checked.is_count(manifest.get("serial", 0)):
        return "its 'serial' is not a number"
    if not isinstance(groups, list) or not all(map(_is_group, groups)):
        return "its 'param_groups' are not lists of names with settings"
    names = [name for group in groups for name in group["params"]]
    if len(set(names)) < len(names):
        return "a parameter is in its 'param_groups' twice"
    if not checked.is_sums(sums):
        return "it has no dictionary 'files' of sizes and CRC-32s"
    for name in sums:
        if os.path.basename(name) != name:  # a path to a file elsewhere, or to a device
            return f"it lists {name!r}, which is outside the checkpoint"
        if name not in (index.FILE, TORCH_INDEX) and not _DATA.fullmatch(name):
            return f"it lists {name!r}, which no checkpoint has"
    return next((f"it does not list {name}" for name in (index.FILE, TORCH_INDEX) if name not in sums), None)


_DATA = re.compile(rf"__[0-9]+_[0-9]+{re.escape(DATA_SUFFIX)}")


def _is_group(group: Any) -> bool:
    if not isinstance(group, dict) or group.keys() != {"params", "settings"}:
        return False
    params, settings = group["params"], group["settings"]
    return (
        isinstance(params, list)
        and all(isinstance(name, str) for name in params)
        and isinstance(settings, dict)
        and "params" not in settings
    )


# --- errors -----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def explained(path: Path, doing: str) -> Iterator[None]:
    """Turn errors of torch.distributed.checkpoint and the system into one line that names ``path``."""
    try:
        yield
    except CheckpointException as error:
        rank, (cause, _) = min(error.failures.items())
        if isinstance(cause, KeyboardInterrupt):  # torch catches it, too
            raise cause from error
        raise RuntimeError(_line(path, doing, cause, rank)) from error
    except OSError as error:
        if isinstance(error, FileNotFoundError) and error.errno is None:  # our own error, already clear
            raise
        raise RuntimeError(_line(path, doing, error, None)) from error


def _line(path: Path, doing: str, cause: BaseException, rank: int | None) -> str:
    where = "" if rank is None else f" on rank {rank}"
    code = getattr(cause, "errno", None)
    if code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return f"{path}: no space left{where} while {doing} the checkpoint; free some, or choose another path"
    if code in (errno.EACCES, errno.EPERM, errno.EROFS):
        return f"{path}: not permitted{where} while {doing} the checkpoint; choose another path"
    return f"{path}: {doing} the checkpoint failed{where}: {type(cause).__name__}: {cause}"
