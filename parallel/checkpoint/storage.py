"""Checkpoint folders on disk: written under another name and renamed, checked before they are read.

NAME/                     one checkpoint
    checkpoint.json       the caller's extra, the optimizer's settings, size and CRC-32 of every other file
    .metadata             torch.distributed.checkpoint's index: which part of which tensor is where
    __0_0.distcp, ...     the tensors
.NAME.writing-XXXX/       being written; its writer holds a lock on it, which tells it from a dead writer's leftover
.NAME.replaced/           the previous NAME, while the new one replaces it
.NAME.removed/            a NAME that is being deleted
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import json
import os
import pickle
import shutil
import stat
import uuid
import zlib
from collections.abc import Collection, Iterator
from enum import Enum, EnumMeta
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import CheckpointException, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.filesystem import _StorageWriterTransforms
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from ..core.agreement import on_first, together
from ..core.mesh import Group

MANIFEST = "checkpoint.json"
INDEX = ".metadata"
DATA_SUFFIX = ".distcp"
FORMAT = "shardfuse checkpoint 1"
_REPLACED = ".replaced"


# --- writing ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def replacing(target: Path, group: Group) -> Iterator[Path]:
    """A new folder to write into; it replaces ``target`` when the block succeeds and is removed when it fails.

    Every rank enters. Raises ValueError if ``target`` is something other than a checkpoint.
    """
    lock: int | None = None

    def begin() -> Path:
        nonlocal lock
        _refuse_foreign(target)
        target.parent.mkdir(parents=True, exist_ok=True)
        tidy(target)
        folder, lock = beside(target)
        return folder

    folder = on_first(group, begin)
    try:
        yield folder
        on_first(group, lambda: publish(folder, target))
    except BaseException:
        if group.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    finally:
        if lock is not None:
            os.close(lock)


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
        name for name in os.listdir(target) if name not in (MANIFEST, INDEX) and not name.endswith(DATA_SUFFIX)
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
    _remove_dead(target.parent, glob.escape(target.name))


def remove(target: Path) -> None:
    """Delete a checkpoint; its name never refers to half of it. One with foreign files stays."""
    if _foreign(target):
        return
    removed = target.with_name(f".{target.name}.removed")
    shutil.rmtree(removed, ignore_errors=True)
    target.rename(removed)
    shutil.rmtree(removed, ignore_errors=True)


def sweep(folder: Path, pattern: str) -> None:
    """:func:`tidy` for all names in ``folder`` that match the glob ``pattern``; also finishes interrupted removals."""
    for name in names(folder, pattern):
        tidy(folder / name)
    _remove_dead(folder, pattern)
    for leftover in folder.glob(f".{pattern}.removed"):
        shutil.rmtree(leftover, ignore_errors=True)


def _remove_dead(folder: Path, pattern: str) -> None:
    """Remove from ``folder`` the leftovers of dead writers of checkpoints whose names match ``pattern``."""
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


class _Stream:
    """A file to which several tensors are written one after another; a tensor's writer must not close it."""

    def __init__(self, raw: Any) -> None:
        self.write, self.flush, self.close = raw.write, raw.flush, raw.flush


class _Transforms(_StorageWriterTransforms):
    """No transform, and a stream without a finaliser: torch's own flushes the file again when it is collected.

    The file is closed by then, which Python 3.13 reports on stderr.
    """

    def transform_save_stream(self, write_item: WriteItem, raw_stream: Any) -> tuple[Any, list[str]]:
        return _Stream(raw_stream), []


class Writer(FileSystemWriter):
    """torch's writer, which raises the OSError, such as a full disk, that a failure of its clean-up would hide."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.transforms = _Transforms()

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        try:
            return super().write_data(plan, planner)
        except Exception as error:
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, OSError):
                cause = cause.__cause__ or cause.__context__
            raise (cause or error) from None


def write_manifest(folder: Path, fields: dict[str, Any], group: Group) -> None:
    """Write ``checkpoint.json``, with size and CRC-32 of every file of ``folder``; each rank reads its share."""
    # A barrier, and the union of all ranks' views of the folder.
    names = sorted(set().union(*together(group, lambda: set(os.listdir(folder)))))
    sums: dict[str, list[int]] = {}
    for part in together(group, lambda: {name: _checksum(folder / name) for name in names[group.rank :: group.size]}):
        sums |= part
    on_first(group, lambda: _write_text(folder / MANIFEST, json.dumps({"format": FORMAT, **fields, "files": sums})))


def _write_text(path: Path, text: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _checksum(path: Path) -> list[int]:
    size = crc = 0
    with open(path, "rb") as file:
        while piece := file.read(1 << 22):
            size += len(piece)
            crc = zlib.crc32(piece, crc)
    return [size, crc]


def _sync(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _replaced(target: Path) -> Path:
    return target.with_name(f".{target.name}{_REPLACED}")


# --- reading ----------------------------------------------------------------------------------------------------------


def open_checkpoint(target: Path) -> tuple[Path, dict[str, Any]]:
    """The folder and manifest of the checkpoint at ``target``."""
    folder = locate(target)
    return folder, read_manifest(folder)


def names(folder: Path, pattern: str) -> list[str]:
    """The names in ``folder`` of checkpoints, in place or moved aside, that match the glob ``pattern``."""
    aside = {path.name[1:].removesuffix(_REPLACED) for path in folder.glob(f".{pattern}{_REPLACED}")}
    return sorted(aside | {path.name for path in folder.glob(pattern) if path.is_dir()})


def locate(target: Path) -> Path:
    """The checkpoint's folder: ``target``, or the one moved aside if its replacement was interrupted."""
    replaced = _replaced(target)
    return replaced if not target.exists() and (replaced / MANIFEST).exists() else target


def read_manifest(folder: Path) -> dict[str, Any]:
    """``checkpoint.json``. Raises ValueError or FileNotFoundError, which describe what is there instead."""
    if not folder.exists():
        raise FileNotFoundError(f"{folder}: no such checkpoint; give the folder that save_checkpoint wrote")
    path = folder / MANIFEST
    if not path.exists():
        raise ValueError(
            f"{folder}: not a checkpoint (it has no {MANIFEST}); give the folder that save_checkpoint wrote"
        )
    _check_regular(path)
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: cut short or corrupt ({error}); load another checkpoint") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise ValueError(f"{path}: not written by this version of shardfuse (expected format {FORMAT!r})")
    if problem := _problem(manifest):
        raise ValueError(f"{path}: corrupt ({problem}); load another checkpoint")
    return manifest


def _problem(manifest: dict[str, Any]) -> str | None:
    """What is missing from a manifest or of the wrong type; None for a valid one."""
    files, groups = manifest.get("files"), manifest.get("param_groups", [])
    if not isinstance(manifest.get("extra"), dict):
        return "it has no dictionary 'extra'"
    if not isinstance(manifest.get("serial", 0), int):
        return "its 'serial' is not a number"
    if not isinstance(groups, list) or not all(map(_is_group, groups)):
        return "its 'param_groups' are not lists of names with settings"
    if not isinstance(files, dict) or not all(map(_is_checksum, files.values())):
        return "it has no dictionary 'files' of sizes and CRC-32s"
    for name in files:
        if os.path.basename(name) != name:  # a path to a file elsewhere, or to a device
            return f"it lists {name!r}, which is outside the checkpoint"
    return None if INDEX in files else f"it does not list {INDEX}"


def _is_group(group: Any) -> bool:
    if not isinstance(group, dict) or not isinstance(group.get("settings"), dict):
        return False
    params = group.get("params")
    return isinstance(params, list) and all(isinstance(name, str) for name in params)


def _is_checksum(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(isinstance(number, int) for number in value)


def _check_regular(path: Path) -> None:
    """ValueError for a link, which may lead outside the checkpoint, and for an endless file, such as a device."""
    if not stat.S_ISREG(path.lstat().st_mode):
        raise ValueError(f"{path}: a link, or not a file; put the file itself there or load another checkpoint")


def check_files(folder: Path, manifest: dict[str, Any], group: Group) -> None:
    """ValueError on every rank if a file is missing or was changed; each rank reads its share."""

    def check() -> None:
        files = sorted(manifest["files"].items())
        for name, written in files[group.rank :: group.size]:
            path = folder / name
            if not os.path.lexists(path):
                raise ValueError(f"{path}: missing from the checkpoint; copy it again or load another checkpoint")
            _check_regular(path)
            found = _checksum(path)
            if found != written:
                how = "cut short" if found[0] < written[0] else "corrupt"
                raise ValueError(
                    f"{path}: {how} ({found[0]} bytes with CRC-32 {found[1]:08x}, written were {written[0]} with "
                    f"{written[1]:08x}); copy it again or load another checkpoint"
                )

    together(group, check)


class Reader(FileSystemReader):
    """torch's reader for untrusted files: loading a checkpoint cannot run code.

    torch unpickles the index, which may call anything. This reader accepts only the classes of which an index consists,
    and only entries that are tensors, which torch loads with ``weights_only=True``, from files that ``manifest`` lists:
    :func:`check_files` has checked those.
    """

    def __init__(self, folder: Path, manifest: dict[str, Any]) -> None:
        super().__init__(folder)
        self._files = manifest["files"]
        self._index: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self._index is None:
            self._index = _read_index(Path(self.path) / INDEX, self._files)
        return self._index


def _read_index(path: Path, files: Collection[str]) -> Metadata:
    try:
        with open(path, "rb") as file:
            index = _IndexUnpickler(file).load()
    except (pickle.UnpicklingError, EOFError, AttributeError, TypeError, IndexError, ValueError) as error:
        raise ValueError(f"{path}: not the index of a checkpoint ({error}); load another checkpoint") from error
    if not isinstance(index, Metadata) or not isinstance(index.storage_data, dict):
        raise ValueError(f"{path}: not the index of a checkpoint; load another checkpoint")
    for name, entry in index.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            raise ValueError(f"{path}: {name} is not a tensor, and nothing else is read from a checkpoint")
    for where in index.storage_data.values():
        listed = getattr(where, "relative_path", None)
        if not isinstance(listed, str) or listed not in files:
            raise ValueError(f"{path}: it points to {listed!r}, which is not a file of the checkpoint ({MANIFEST})")
    return index


_INDEX_CLASSES = {
    "torch.distributed.checkpoint.metadata": {
        "_MEM_FORMAT_ENCODING",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "pathlib": {"PosixPath"},
    "pathlib._local": {"PosixPath"},  # Python 3.13
}


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _member
        allowed = name in _INDEX_CLASSES.get(module, ())
        if module == "torch":
            allowed = name == "Size" or isinstance(getattr(torch, name, None), torch.dtype)
        if not allowed:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no index needs")
        if module == "pathlib._local":
            module = "pathlib"  # every Python version has the class here
        return super().find_class(module, name)


def _member(kind: Any, name: Any) -> Enum:
    """The member ``name`` of the enumeration ``kind``: the only use that an index has for ``getattr``.

    The first releases of Python 3.11 pickle a member as a call of ``getattr``. The unpickler has already checked
    ``kind``, and the member's value would give the index the same.
    """
    if isinstance(kind, EnumMeta) and isinstance(name, str) and name in kind.__members__:
        return kind[name]
    raise pickle.UnpicklingError(f"it asks for builtins.getattr of {kind!r} and {name!r}, which no index needs")


# --- errors -----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def explained(path: Path, doing: str) -> Iterator[None]:
    """Turns errors of torch.distributed.checkpoint and the system into one line that names ``path``."""
    try:
        yield
    except CheckpointException as error:
        rank, (cause, _) = min(error.failures.items())
        if isinstance(cause, KeyboardInterrupt):  # torch catches it, too
            raise cause from error
        raise RuntimeError(_line(path, doing, cause, rank)) from error
    except OSError as error:
        if isinstance(error, FileNotFoundError) and error.errno is None:  # our own, already clear
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
