"""Stop a run between two steps (a signal asks, all ranks agree, the run saves a checkpoint), and resume it.

torchrun forwards a signal to the ranks. Under ``launch``, the parent process writes a file that its ranks read, so that
restarting ranks see it too; a cluster scheduler that signals every process of a job also reaches the ranks.
"""

from __future__ import annotations

import contextlib
import math
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from ..parallel.checkpoint import checked, storage
from ..parallel.core import agreement, collectives
from ..parallel.core.mesh import Group
from .settings import RunSettings

ASKING = (signal.SIGINT, signal.SIGTERM)
TIME_IS_UP = signal.SIGALRM  # stands for a run's own time limit among the signals


class StopFile:
    """The file in which the ranks' parent process asks them to stop, and names the signal."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, signum: int) -> None:
        self.path.write_text(str(int(signum)))

    def read(self) -> int:
        """The signal, 0 for none."""
        try:
            return int(self.path.read_text() or 0)
        except FileNotFoundError:
            return 0


class Stop:
    """A context in which this rank receives signals and polls ``file``; ``agreed`` is the same on every rank.

    When ``time_limit`` seconds have passed on any rank since the first call, ``agreed`` is TIME_IS_UP.

    Only the first signal counts: a cluster scheduler and torchrun may both deliver it, and the second must not end the
    rank in the middle of its last step.
    """

    def __init__(self, group: Group, file: StopFile | None = None, time_limit: float | None = None) -> None:
        self._group = group
        self._file = file
        self._time_limit, self._began = time_limit, math.inf
        self._received = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Stop:
        for signum in ASKING:
            if signal.getsignal(signum) is not signal.SIG_IGN:  # nohup
                self._before[signum] = signal.signal(signum, self._receive)
        return self

    def __exit__(self, *exception: object) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)
        self._before.clear()

    def agreed(self, *, training: bool = True) -> int:
        """The signal that asked any of the ranks to stop, 0 for none. Every rank calls it after the same step.

        Time counts from the first call with ``training``.
        """
        asked = self._received or (self._file.read() if self._file else 0)
        now = time.monotonic()
        if training:
            self._began = min(self._began, now)
        if not asked and self._time_limit is not None and now - self._began >= self._time_limit:
            asked = int(TIME_IS_UP)
        return int(collectives.all_reduce(torch.tensor(asked), self._group, site="train.stop", op="max"))

    def _receive(self, signum: int, frame: FrameType | None) -> None:
        self._received = self._received or signum


def check_resumable(
    path: Path, step: int, extra: dict[str, Any], settings: RunSettings, data: str | None = None
) -> None:
    """Raise ValueError unless the run can resume from the checkpoint at ``path``, which has this ``extra``.

    ``data`` is the digest of the run's prepared data.
    """
    saved = extra.get("settings")
    if not isinstance(saved, dict) or "precision" not in saved.get("parallel", {}):
        raise ValueError(
            f"{path}: shardfuse train did not write this checkpoint, and --resume accepts only its own; choose another "
            "--out, with --start to begin from an exported model"
        )
    if extra.get("data") != data:
        raise ValueError(
            f"{path}: it was saved with other data: text, tokenizer, or the settings that make windows of them (seq, "
            "packing, train_on, validation in [data]; whether log.eval_batches is 0) have changed since, so its "
            "position would be other windows; restore them, or choose another --out, with --start to begin from the "
            "trained model"
        )
    if step > settings.steps:
        raise ValueError(
            f"steps = {settings.steps}: the run in {settings.out} is past that, at step {step}; pass a larger --steps "
            "to continue it, or choose another --out"
        )


@contextlib.contextmanager
def torn_explained(folder: Path, ranks: Group) -> Iterator[None]:
    """If the newest checkpoint in ``folder`` is torn, add to its ValueError how to resume from an earlier one.

    Every rank enters; either all leave with an error or none does.
    """
    try:
        yield
    except ValueError as error:
        torn, whole = _newest(folder, ranks)
        if not torn:
            raise
        if whole is None:
            advice = "there is no other checkpoint: choose another --out to start from the first step"
        else:
            away = " and ".join(f"{folder / name} (mv {folder / name} {folder / name}.torn)" for name in torn)
            advice = f"--resume takes {whole} once {away} is out of the way"
        raise ValueError(f"{error}; {advice}") from error


def _newest(folder: Path, ranks: Group) -> tuple[list[str], str | None]:
    """The torn checkpoints newer than the newest whole one, from the highest step down; and the whole one."""
    torn: list[str] = []
    for name in agreement.on_first(ranks, lambda: storage.names(folder, "step-*"))[::-1]:
        if name.removeprefix("step-").isdigit():
            if _is_whole(folder / name, ranks):
                return torn, name
            torn.append(name)
    return torn, None


def _is_whole(path: Path, ranks: Group) -> bool:
    try:
        target, manifest = agreement.on_first(ranks, lambda: storage.open_checkpoint(path))
        checked.check_files(target, manifest["files"], ranks)
    except (ValueError, FileNotFoundError):
        return False
    return True
