"""A run's output folder: written beside its place, renamed into it when it is complete.

Whoever is killed on the way leaves the previous output as it was, and a folder ``.NAME.writing-XXXX`` that the next
run removes: its writer holds a lock on it, which ends with the writer.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..parallel.checkpoint import storage

REPORT = "report.json"


class OutputError(ValueError):
    """A folder that cannot be written to; the message is one line that says why and what to do."""


@contextmanager
def output_folder(path: Path, *, maker: str, names: Collection[str], need_bytes: int) -> Iterator[Path]:
    """A new folder to write into, which takes ``path``'s place when the block ends well and disappears when not.

    ``path`` may be missing, empty, or an earlier output: a folder whose ``report.json`` names the same ``maker`` and
    which holds nothing but ``names``. Raises OutputError for anything else, for a place that cannot be written to, and
    where fewer than ``need_bytes`` are free.
    """
    target = Path(os.path.realpath(path))
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        storage.tidy(target)
        _refuse_foreign(target, maker, {*names, REPORT})
        free = shutil.disk_usage(target.parent).free
        if free < need_bytes:
            raise OutputError(
                f"--out {path}: {free >> 20} MiB are free on that disk and {need_bytes >> 20} MiB are needed; "
                "make room, or choose another folder"
            )
        folder, lock = storage.beside(target)
    except OSError as error:
        raise OutputError(
            f"--out {path}: cannot be written to ({error.strerror or error}); choose another folder"
        ) from None
    try:
        yield folder
        storage.publish(folder, target)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    finally:
        os.close(lock)


def write_report(folder: Path, maker: str, content: dict[str, Any]) -> None:
    """``report.json``, which also marks the folder as ``maker``'s."""
    (folder / REPORT).write_text(json.dumps({"made_by": maker, **content}, indent=2) + "\n", encoding="utf-8")


def _refuse_foreign(target: Path, maker: str, names: Collection[str]) -> None:
    """OutputError if taking ``target``'s place would delete what is not ours, or cannot work."""
    if not os.path.lexists(target):
        return
    if not target.is_dir():
        raise OutputError(f"--out {target}: a file is in the way; choose another folder")
    if os.path.ismount(target):
        raise OutputError(f"--out {target}: it is a mount point, which cannot be replaced; choose a folder inside it")
    found = sorted(os.listdir(target))
    if not found:
        return
    foreign = [name for name in found if name not in names]
    if foreign or not _made_by(target, maker):
        what = f"it holds {foreign[0]!r}" if foreign else "no report.json in it says so"
        raise OutputError(
            f"--out {target}: this folder is not an earlier output of {maker} ({what}), and it would be replaced; "
            "choose another folder, or remove it yourself"
        )


def _made_by(target: Path, maker: str) -> bool:
    try:
        return json.loads((target / REPORT).read_text(encoding="utf-8")).get("made_by") == maker
    except (OSError, ValueError, AttributeError):
        return False
