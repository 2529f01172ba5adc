"""The checkpoints of a run: written in the background, limited to the last few, found again after a crash.

FOLDER/
    step-00000100/        a checkpoint (``storage.py``)
    step-00000200/
    .step-...             being written or removed; the next save removes the leftovers of dead processes
    .lock                 held by the Checkpointer that saves, from its first save until it is closed; names its process

A save copies this rank's parts to host memory and returns; a thread writes them, on a process group of its own, and
renames the folder once every rank's part is complete. Until then the previous checkpoint is the latest.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from ..core import agreement
from ..core.mesh import Group, everyone, share_timeout
from . import storage
from .checkpoint import Snapshot, StrPath, load_checkpoint, take_snapshot, write_snapshot
from .rng_state import RandomStates, gather_random, restore_random

__all__ = ["Checkpointer", "Resumed"]

_PATTERN = "step-*"
_RANDOM = "random"  # the state that is always saved


class Resumed(NamedTuple):
    """The point from which a run resumes: the saved step, and the ``extra`` saved with it."""

    step: int
    extra: dict[str, Any]


class Checkpointer:
    """Saves a run's checkpoints to ``folder``, keeps the last ``keep`` (None: all) and loads them in any layout.

    All processes create one and call its methods in the same order; they share the file system. ``mesh`` determines
    which ranks draw the same random numbers (``random.py``). One save runs at a time: the next call of any method waits
    for it and raises its error. Until then host memory holds a second copy of this rank's parts. From its first save
    on, no other Checkpointer can save to the folder until this one is closed or its process ends; any can load.

    Use it as a context manager, or call :meth:`close`: a process that is killed, or leaves by ``os._exit``, loses the
    save under way (and nothing else).
    """

    def __init__(self, folder: StrPath, *, keep: int | None = 2, mesh: DeviceMesh | None = None) -> None:
        if keep is not None and keep < 1:
            raise ValueError(f"keep={keep}: expected at least 1, or None to keep every checkpoint")
        self.folder = Path(os.path.realpath(folder))
        self.keep = keep
        self._mesh = mesh
        self._ranks = _own_group()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._under_way: Future[None] | None = None
        self._lock = storage.WriterLock(self.folder / ".lock", self.folder)
        self._claimed = False

    def save(
        self,
        step: int,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        extra: dict[str, Any] | None = None,
        *,
        states: Mapping[str, Stateful] | None = None,
        asynchronous: bool = True,
    ) -> None:
        """Save the state after ``step`` steps, including torch's random states.

        Arguments are :func:`save_checkpoint`'s. With ``asynchronous`` it returns as soon as model and optimizer may
        change; the next call then raises a failure to write. A checkpoint of the same step is replaced.

        Raises ValueError for contents that cannot be saved, RuntimeError when writing fails or another Checkpointer
        saves to the folder. Every rank raises.
        """
        self.wait()
        if step < 0:
            raise ValueError(f"step={step}: expected the number of steps done, 0 or more")
        if states is not None and _RANDOM in states:
            raise ValueError(f"states[{_RANDOM!r}]: that name is taken by torch's random states; choose another one")
        random = _Random(self._mesh, self._ranks)
        random.gather()
        together = {**(states or {}), _RANDOM: random}
        snapshot = take_snapshot(model, optimizer, states=together, extra=extra, ranks=self._ranks)
        self._claim()
        if asynchronous:
            device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
            self._under_way = self._thread.submit(self._write_aside, device, step, snapshot.on_host())
        else:
            self._write(step, snapshot)

    def load(
        self,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        *,
        step: int | None = None,
        states: Mapping[str, Stateful] | None = None,
    ) -> Resumed | None:
        """Load the latest checkpoint, or that of ``step``; return None if there is none yet.

        Arguments and errors are :func:`load_checkpoint`'s; any layout of ranks may have written it. It restores torch's
        random states, too; at another degree of data parallelism it seeds them from the saved ones.
        """
        self.wait()
        together = {**(states or {}), _RANDOM: _Random(self._mesh, self._ranks)}
        wanted = self.latest() if step is None else step
        while wanted is not None:
            try:
                extra = load_checkpoint(self.path(wanted), model, optimizer, states=together, group=self._ranks)
                return Resumed(wanted, extra)
            except FileNotFoundError:
                if step is not None or (latest := self.latest()) == wanted:
                    raise
                wanted = latest  # another process has removed this checkpoint after saving a later one
        return None

    def latest(self) -> int | None:
        """The step of the checkpoint that was written last; None if there is none.

        It need not be the highest step: a run that returned to an earlier step continues from there. This method skips
        an unreadable checkpoint folder if the last readable one has a higher step. Otherwise the unreadable folder may
        be the latest, and the method raises its error: ValueError, or OSError from the system.
        """
        self.wait()
        return agreement.on_first(self._ranks, self._latest)

    def path(self, step: int) -> Path:
        """The folder of ``step``'s checkpoint."""
        return self.folder / f"step-{step:08d}"

    def wait(self) -> None:
        """Wait until the save under way is complete. Raises RuntimeError, on every rank, when it failed."""
        if self._under_way is not None:
            writing, self._under_way = self._under_way, None
            writing.result()

    def close(self) -> None:
        """Wait, and free the thread and the process group. Raises as :meth:`wait` does."""
        try:
            self.wait()
        finally:
            self._thread.shutdown()
            self._lock.release()
            if self._ranks.size > 1 and dist.is_initialized():
                dist.destroy_process_group(self._ranks.pg)

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _claim(self) -> None:
        """Take the folder's lock, on rank 0. Every rank raises if another process holds it."""

        def take() -> None:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock.acquire()

        if not self._claimed:
            with storage.explained(self.folder, "writing"):
                agreement.on_first(self._ranks, take)
            self._claimed = True

    def _write_aside(self, device: int | None, step: int, snapshot: Snapshot) -> None:
        """:meth:`_write` in the thread, with this rank's CUDA device: a new thread starts with the first one."""
        if device is not None:
            torch.cuda.set_device(device)
        self._write(step, snapshot)

    def _write(self, step: int, snapshot: Snapshot) -> None:
        serial = agreement.on_first(self._ranks, self._next_serial)
        write_snapshot(self.path(step), Snapshot(snapshot.tensors, {**snapshot.fields, "serial": serial}), self._ranks)
        agreement.on_first(self._ranks, self._remove_old)

    def _next_serial(self) -> int:
        return 1 + max(self._serials()[0].values(), default=0)

    def _steps(self) -> list[int]:
        """The steps of the readable checkpoints, in the order in which they were written."""
        serials, _ = self._serials()
        return sorted(serials, key=lambda step: serials[step])

    def _latest(self) -> int | None:
        serials, unreadable = self._serials()
        latest = max(serials, key=lambda step: (serials[step], step), default=None)
        for step in sorted(unreadable, reverse=True):
            if latest is None or step > latest:
                raise unreadable[step]
        return latest

    def _serials(self) -> tuple[dict[int, int], dict[int, Exception]]:
        """Step -> the serial number of its save, which increases; step -> why the checkpoint cannot be read."""
        found: dict[int, int] = {}
        unreadable: dict[int, Exception] = {}
        for name in storage.names(self.folder, _PATTERN):
            if match := re.fullmatch(r"step-(\d{8,})", name):
                step = int(match[1])
                try:
                    found[step] = storage.open_checkpoint(self.folder / name)[1].get("serial", 0)
                except (OSError, ValueError) as error:
                    unreadable[step] = error
        return found, unreadable

    def _remove_old(self) -> None:
        storage.sweep(self.folder, _PATTERN)
        if self.keep is not None:
            for step in self._steps()[: -self.keep]:
                storage.remove(self.path(step))


class _Random:
    """Torch's random states as a Stateful."""

    def __init__(self, mesh: DeviceMesh | None, ranks: Group) -> None:
        self._mesh, self._ranks = mesh, ranks
        self._gathered: RandomStates = {}

    def gather(self) -> None:
        """Collect them from all ranks, before anything that may fail on only one rank."""
        self._gathered = gather_random(self._mesh, self._ranks)

    def state_dict(self) -> RandomStates:
        return self._gathered

    def load_state_dict(self, states: RandomStates) -> None:
        restore_random(states, self._mesh, self._ranks)


def _own_group() -> Group:
    """All processes in another group, over gloo: the thread's messages do not mix with others."""
    world = everyone()
    if world.size == 1:
        return world
    pg = dist.new_group(backend="gloo")
    share_timeout(pg)
    return Group(pg, world.rank, world.size, None)
