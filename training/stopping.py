"""Ending a run between two steps: a signal asks, all ranks agree, and what was reached is saved.

torchrun passes a signal on to the ranks. Ranks that ``launch`` started find a file that the process which started them
leaves, also if they are just being started again; schedulers that signal every process of a job reach them as well.
"""

from __future__ import annotations

import signal
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from ..parallel.core import collectives
from ..parallel.core.mesh import Group

ASKING = (signal.SIGINT, signal.SIGTERM)


class StopFile:
    """Where the process that started the ranks says that they are to stop, and by which signal."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, signum: int) -> None:
        self.path.write_text(str(int(signum)))

    def read(self) -> int:
        """The signal, 0 while nobody asked."""
        try:
            return int(self.path.read_text() or 0)
        except FileNotFoundError:
            return 0


class Stop:
    """A context in which this rank listens to signals, and looks for ``file``; ``agreed`` is the same on every rank.

    Only the first signal counts: where a scheduler and torchrun both pass one on, the second would end the rank in the
    middle of its last step.
    """

    def __init__(self, group: Group, file: StopFile | None = None) -> None:
        self._group = group
        self._file = file
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
        return int(collectives.all_reduce(torch.tensor(asked), self._group, site="train.stop", op="max"))

    def _receive(self, signum: int, frame: FrameType | None) -> None:
        self._received = self._received or signum
