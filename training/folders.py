"""The folders that runs write: the demo's output folder, and a training run's, which one run holds at a time.

A killed demo leaves the previous output unchanged, and a folder ``.NAME.writing-XXXX``, which the next demo removes:
the writer's lock on that folder ends with the writer.

A run's folder NAME::

    NAME/
        settings.json         the run's settings, every default included
        metrics.jsonl         a line per logged step
        tensorboard/          the same for TensorBoard, where it is installed
        checkpoints/          the checkpoints to resume from
        model/                the trained model for transformers, once the run is complete
        .lock                 locked while a run is under way
        .job                  the names of the launch and the job, until the run is complete
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..parallel.checkpoint import storage
from . import metrics

REPORT = "report.json"


class OutputError(ValueError):
    """A folder that cannot be written to; the message is one line with the reason and the remedy."""


@contextmanager
def output_folder(path: Path, *, maker: str, names: Collection[str], need_bytes: int) -> Iterator[Path]:
    """Yield a new folder to write into: it replaces ``path`` when the block succeeds and is removed when it fails.

    ``path`` may be missing, empty, or an earlier output: a folder whose ``report.json`` names the same ``maker`` and
    that holds nothing but ``names``. Raises OutputError for anything else, for an unwritable place, and where fewer
    than ``need_bytes`` are free.
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
    """Write ``report.json``, which also marks the folder as ``maker``'s; NaN and infinity become null."""
    text = json.dumps(metrics.finite({"made_by": maker, **content}), indent=2, allow_nan=False)
    (folder / REPORT).write_text(text + "\n", encoding="utf-8")


def _refuse_foreign(target: Path, maker: str, names: Collection[str]) -> None:
    """Raise OutputError where ``target`` cannot be replaced, or holds files that ``maker`` did not write."""
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
        what = f"it holds {foreign[0]!r}" if foreign else f"its report.json does not name {maker}"
        raise OutputError(
            f"--out {target}: this folder is not an earlier output of {maker} ({what}), and it would be replaced; "
            "choose another folder, or remove it yourself"
        )


def _made_by(target: Path, maker: str) -> bool:
    try:
        return json.loads((target / REPORT).read_text(encoding="utf-8")).get("made_by") == maker
    except (OSError, ValueError, AttributeError):
        return False


SETTINGS = "settings.json"
CHECKPOINTS = "checkpoints"
EXPORT = "model"
_LOCK = ".lock"
_JOB = ".job"
_TRACES = (SETTINGS, metrics.FILE, metrics.FOLDER, CHECKPOINTS, EXPORT)


class RunFolderError(ValueError):
    """A folder that a run cannot use; the message is one line with the reason and the remedy."""


class RunFolder:
    """A context that holds ``path`` for one run and refuses other runs until it ends.

    Without ``resume`` it also refuses a folder that holds an earlier run; with ``resume`` it accepts the folder. A
    launcher restarts processes without telling them, after a failure and where machines join or leave. ``launch`` names
    all processes of one launcher; ``job`` names a job that may be launched several times. A run that entered under
    either name may enter again and resumes, even without ``resume``; inside the context the attribute ``resume`` says
    so. Raises RunFolderError on entry.
    """

    def __init__(self, path: Path, *, resume: bool, launch: str | None = None, job: str | None = None) -> None:
        self.path = path
        self.resume = resume
        self._launch, self._job = launch, job
        self._lock: int | None = None

    def __enter__(self) -> RunFolder:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise RunFolderError(
                f"--out {self.path}: cannot be written to ({error.strerror or error}); choose another folder"
            ) from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.resume = self.resume or self._is_of_this_job()
            self._refuse_earlier_run()
            self._leave_mark(self._launch, self._job)
        except BlockingIOError:
            self.__exit__()
            raise RunFolderError(
                f"--out {self.path}: another run is writing there now; choose another folder, or stop that run"
            ) from None
        except RunFolderError:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def complete(self) -> None:
        """Mark the run as complete: the next launch of the same job is another run."""
        self._leave_mark(self._launch)

    def _is_of_this_job(self) -> bool:
        mark = self.path / _JOB
        marked = mark.read_text(encoding="utf-8").splitlines() if mark.exists() else []
        return any(name in marked for name in (self._launch, self._job))

    def _leave_mark(self, *names: str | None) -> None:
        lines = [f"{name}\n" for name in names if name is not None]
        if lines:
            (self.path / _JOB).write_text("".join(lines), encoding="utf-8")
        else:
            (self.path / _JOB).unlink(missing_ok=True)

    def _refuse_earlier_run(self) -> None:
        found = [name for name in _TRACES if (self.path / name).exists()]
        if found and not self.resume:
            raise RunFolderError(
                f"--out {self.path}: it holds an earlier run ({found[0]}); pass --resume to continue it, or choose "
                "another folder"
            )
