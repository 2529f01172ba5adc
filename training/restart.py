"""Ending a run between two steps (a signal asks, all ranks agree, what was reached is saved), and going on from there.

torchrun passes a signal on to the ranks. Ranks that ``launch`` started find a file that the process which started them
leaves, also if they are just being started again; schedulers that signal every process of a job reach them as well.
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

from ..parallel.checkpoint import storage
from ..parallel.core import collectives
from ..parallel.core.mesh import Group
from .settings import RunSettings

ASKING = (signal.SIGINT, signal.SIGTERM)
TIME_IS_UP = signal.SIGALRM  # what stands for a run's own time limit among the signals


class StopFile:
    """Where the process that started the ranks says that they are to stop, and by which signal."""

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
    """A context in which this rank listens to signals, and looks for ``file``; ``agreed`` is the same on every rank.

    Once ``time_limit`` seconds have passed on any rank since the first call, ``agreed`` is TIME_IS_UP.

    Only the first signal counts: where a scheduler and torchrun both pass one on, the second would end the rank in the
    middle of its last step.
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

    def agreed(self) -> int:
        """The signal that asked any of the ranks to stop, 0 for none. Every rank calls it after the same step."""
        asked = self._received or (self._file.read() if self._file else 0)
        now = time.monotonic()
        self._began = min(self._began, now)
        if not asked and self._time_limit is not None and now - self._began >= self._time_limit:
            asked = int(TIME_IS_UP)
        return int(collectives.all_reduce(torch.tensor(asked), self._group, site="train.stop", op="max"))

    def _receive(self, signum: int, frame: FrameType | None) -> None:
        self._received = self._received or signum


def check_resumable(path: Path, step: int, extra: dict[str, Any], settings: RunSettings) -> None:
    """ValueError unless the checkpoint at ``path``, with its ``extra``, is one that the run can go on from."""
    saved = extra.get("settings")
    if not isinstance(saved, dict) or "precision" not in saved.get("parallel", {}):
        raise ValueError(
            f"{path}: not a checkpoint that shardfuse train wrote, and --resume goes on from no other; choose another "
            "--out, with --start if the model is to begin as an exported one"
        )
    if step > settings.steps:
        raise ValueError(
            f"steps = {settings.steps}: the run in {settings.out} is past that, at step {step}; pass --steps with more "
            "than that to go on, or choose another --out"
        )


@contextlib.contextmanager
def torn_explained(folder: Path, ranks: Group) -> Iterator[None]:
    """Where the newest checkpoint in ``folder`` is torn, its ValueError also says how to go on from one before it.

    Every rank enters, and all leave it with an error or none does.
    """
    try:
        yield
    except ValueError as error:
        torn, whole = _newest(folder, ranks)
        if not torn:
            raise
        if whole is None:
            advice = "there is no other one: choose another --out to start from the first step"
        else:
            away = " and ".join(f"{folder / name} (mv {folder / name} {folder / name}.torn)" for name in torn)
            advice = f"--resume takes {whole} once {away} is out of the way"
        raise ValueError(f"{error}; {advice}") from error


def _newest(folder: Path, ranks: Group) -> tuple[list[str], str | None]:
    """The checkpoints that are torn, from the highest step down to the first that is whole; and that one."""
    torn: list[str] = []
    for name in storage.on_first(ranks, lambda: storage.names(folder, "step-*"))[::-1]:
        if name.removeprefix("step-").isdigit():
            if _is_whole(folder / name, ranks):
                return torn, name
            torn.append(name)
    return torn, None


def _is_whole(path: Path, ranks: Group) -> bool:
    try:
        target, manifest = storage.on_first(ranks, lambda: storage.open_checkpoint(path))
        storage.check_files(target, manifest, ranks)
    except (ValueError, FileNotFoundError):
        return False
    return True
