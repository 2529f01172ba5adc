"""Rank 0 leads the other tensor-parallel ranks: it sends each step's buffer, and they compute the step.

Only rank 0 has requests, a scheduler and a sampler. It sends the buffer of ``inputs.py`` over separate gloo groups, so
no message of a step can meet a collective of the model. While requests are live, a rank waits for the next buffer as
long as for any collective of the model's group (``init_mesh(timeout=...)``); otherwise it waits without a limit.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..parallel.core.mesh import Group, limit_timeout, share_timeout

_PATIENT = timedelta(days=3650)


class RanksLost(RuntimeError):
    """A rank of the model ended or did not answer in time; the engine stops serving."""


class StepChannel:
    """Sends buffers from rank 0 of ``group`` to its other ranks; in a group of one it does nothing.

    All ranks create one together. Raises :class:`RanksLost` if a rank cannot be reached in time.
    """

    def __init__(self, group: Group) -> None:
        self.leads = group.rank == 0
        self.alone = group.size == 1
        self.idle = True  # whether no buffer is due, so that waiting has no limit
        if self.alone:
            return
        self._group = group
        ranks = dist.get_process_group_ranks(group.pg)
        make: dict[str, Any] = {"ranks": ranks, "backend": "gloo", "use_local_synchronization": True}
        self._root, self._count = ranks[0], len(ranks)
        self._prompt = dist.new_group(**make)
        share_timeout(self._prompt)
        self._patient = dist.new_group(**make, timeout=_PATIENT)

    def limit(self, timeout: timedelta) -> None:
        """Let this rank give up the others after ``timeout`` from now on, in the model's collectives as well."""
        if not self.alone:
            for pg in (self._group.pg, self._prompt):
                limit_timeout(pg, timeout)

    def send(self, buffer: torch.Tensor, *, idle: bool = False) -> None:
        """Send a buffer, on rank 0. After one sent with ``idle`` the others wait without a limit."""
        if not self.alone:
            self._broadcast(buffer)
            self.idle = idle

    def receive(self, buffer: torch.Tensor) -> None:
        """Receive the next buffer, on the other ranks. They then pass its ``idle`` to :meth:`rest`."""
        self._broadcast(buffer)

    def rest(self, idle: bool) -> None:
        """Set whether waiting for the next buffer has a limit."""
        self.idle = idle

    def gather(self, value: int) -> list[int]:
        """Every rank's ``value``, on every rank."""
        if self.alone:
            return [value]
        values = [torch.zeros(1, dtype=torch.int64) for _ in range(self._count)]
        try:
            dist.all_gather(values, torch.tensor([value]), group=self._prompt)
        except RuntimeError as error:
            raise _lost("an answer", error) from error
        return [int(each) for each in values]

    def _broadcast(self, buffer: torch.Tensor) -> None:
        try:
            dist.broadcast(buffer, self._root, group=self._patient if self.idle else self._prompt)
        except RuntimeError as error:
            raise _lost("a step's plan", error) from error


def _lost(what: str, error: Exception) -> RanksLost:
    return RanksLost(
        f"a rank of the model has ended, or has not answered within the mesh's timeout (init_mesh(timeout=...)), while "
        f"ranks exchanged {what}: start the ranks again ({error})"
    )
