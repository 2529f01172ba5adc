"""A channel of a memory pool: on every rank two buffers used in turn, flags, and the count of exchanges."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Protocol

import torch

from ....kernels.runtime import alloc
from ....kernels.runtime.signals import (
    CHUNKS,
    EPOCH,
    LIMIT_MS,
    PHASES,
    REPORT,
    ExchangeTimeout,
    Signals,
    describe,
    following,
    new_state,
)
from .backends import SymmetricBuffer
from .sizes import aligned, pad_bytes

_VIEWS = 64  # shapes whose views are cached
_DOINGS = 64  # recent exchanges that errors reported by the device can name
_BOTH = 2  # in place of a slot: both slots


class Owner(Protocol):
    """The interface of a pool to its channels."""

    rank: int
    size: int
    device: torch.device
    timeout_s: float

    @property
    def is_virtual(self) -> bool: ...

    @property
    def whose(self) -> str: ...

    def settle(self) -> SymmetricBuffer: ...

    def barrier(self) -> None: ...


class Channel:
    """``slot_bytes`` twice, on each of ``size`` ranks; ``epoch`` is the number of the last exchange, int32.

    :meth:`begin` and :meth:`end` enclose a rank's launches of an exchange; :meth:`abandon` replaces ``end`` if a launch
    fails. Exchanges of one channel do not overlap on a rank; those of different channels may.
    """

    def __init__(self, pool: Owner, name: str, slot_bytes: int, epoch: int, rebase_every: int) -> None:
        self.name, self.slot_bytes, self.epoch = name, slot_bytes, epoch
        self.rank, self.size, self.device = pool.rank, pool.size, pool.device
        self._pool, self._rebase_every, self._since_rebase = pool, rebase_every, 0
        with torch.inference_mode(False):  # a tensor made in inference mode cannot be used outside it
            self._state = new_state(self.rank, self.size, pool.timeout_s, self.device)
            self._state[EPOCH] = epoch
            self._report = torch.zeros(REPORT, dtype=torch.int32, pin_memory=self.device.type == "cuda")
        self._place: tuple[SymmetricBuffer, int, int] | None = None  # memory, offset, slot_bytes
        self._pads: list[torch.Tensor] = []
        self._slots: list[torch.Tensor] = []  # each rank's, both, uint8 [2, aligned slot_bytes]
        self._tables: list[torch.Tensor] = []  # Signals.table for either slot
        self._views: dict[tuple[int, tuple[int, ...], torch.dtype], list[torch.Tensor]] = {}
        self._counts: str | None = None  # the counter of exchanges, "host" or "device", from the first one on
        self._captured = False  # whether a graph holds its addresses
        self._open: str | None = None  # a description of the exchange under way
        self._doings: deque[tuple[int | None, str]] = deque(maxlen=_DOINGS)
        self._broken: str | None = None
        self._stream: torch.cuda.Stream | None = None  # the stream of the last exchange's readers

    def begin(self, shape: Sequence[int], dtype: torch.dtype, *, op: str = "") -> tuple[list[torch.Tensor], Signals]:
        """Begin the next exchange: (each rank's slot as ``dtype`` ``shape``, its signals). Collective.

        It overwrites the previous exchange's data. On a GPU the current stream waits for the previous exchange's
        stream. ``op`` names the caller in errors.

        Raises ValueError where ``shape`` does not fit in a slot; RuntimeError where the channel is broken, the previous
        exchange has not ended, the device counts or a graph is being captured; ExchangeTimeout where an earlier
        exchange turns out to have failed, or a rebase times out.
        """
        if capturing():
            raise RuntimeError(
                f"channel {self.name!r}: begin() inside graph capture: the host counts the exchanges, and a graph "
                "would repeat one of them; use a channel's device_counted()"
            )
        self._prepare("host", shape, dtype)
        if self._stream is not None:  # kernels on that stream may still read the last exchange's data
            torch.cuda.current_stream(self.device).wait_stream(self._stream)
        if self._since_rebase >= self._rebase_every:
            self._rebase()
        if alloc.poisoned():
            # No peer writes here before this rank has raised a flag of the new exchange. With NaN, a read that comes
            # too early shows; the data of two exchanges ago is often the same as the new data.
            self._slots[self.rank][self.epoch % 2].fill_(255)
        self.epoch = following(self.epoch)
        self._since_rebase += 1
        self._open = self._doing(op or "exchange", shape, dtype)
        self._doings.append((self.epoch, self._open))
        slot = self.epoch % 2
        return self._view(slot, shape, dtype), self._signals(self.epoch, slot)

    def end(self) -> None:
        """Mark that all kernels of the exchange have been launched on the current stream.

        Kernels launched there before the next :meth:`begin` may still read the data: that one waits for them. On a CPU
        the exchange has run: raises ExchangeTimeout if one of its waits timed out. On a GPU the next :meth:`begin` or
        :meth:`check` raises it.
        """
        if self._open is None:
            raise RuntimeError(f"channel {self.name!r}: end() without begin(): no exchange is under way")
        self._open = None
        if self.device.type == "cuda":
            self._stream = torch.cuda.current_stream(self.device)
        else:
            self.check()

    def abandon(self) -> None:
        """Give up the exchange under way, which failed on this rank; does nothing if there is none.

        Its peers may lack this rank's rows and flags, so no rank can wait for it. The next :meth:`begin` synchronizes
        all ranks, as for a rebase. If all ranks gave up the same exchange, that recovers the channel; otherwise the
        peers wait for this exchange, and this rank for them, until they time out.
        """
        if self._open is None:
            return
        self._open = None
        if self.device.type == "cuda":
            self._stream = torch.cuda.current_stream(self.device)
        self._since_rebase = self._rebase_every

    def device_counted(
        self, shape: Sequence[int], dtype: torch.dtype, *, op: str = ""
    ) -> tuple[list[torch.Tensor], Signals]:
        """For kernels that count exchanges themselves, in ``signals.state``, so that a graph can hold them.

        Returns (each rank's slots [2, *shape]; signals with the epoch None and slot 0's addresses), valid for one
        launch: later they may lie elsewhere. From then on only such kernels may use the channel, and from the first
        capture on it does not move. In every exchange each of them raises every flag that any of them waits for (so
        one-shot and two-shot ``all_reduce_rmsnorm`` use different channels), because nothing rebases the flags.
        Collective.

        Raises what :meth:`begin` raises; during a capture only where memory still has to be allocated.
        """
        self._prepare("device", shape, dtype)
        self._captured |= capturing()
        self._doings.append((None, self._doing(op or "exchange counted by the device", shape, dtype)))
        return self._view(_BOTH, shape, dtype), self._signals(None, 0)

    def check(self) -> None:
        """Raise ExchangeTimeout if a wait of a finished kernel timed out, RuntimeError if the channel is broken."""
        if self._broken is not None:
            raise RuntimeError(
                f"channel {self.name!r} is broken since: {self._broken}; close() its pool on every rank, or start anew"
            )
        if self._report[0]:
            known = dict(self._doings)
            doing = known.get(int(self._report[4])) or self._doings[-1][1]
            self._broken = describe(self._report, self.rank, doing)
            raise ExchangeTimeout(self._broken)

    # --- for the pool ------------------------------------------------------------------------------------------------

    def bind(self, buffer: SymmetricBuffer, offset: int, resets: Sequence[int]) -> None:
        """Take this place in the memory and set the flags of the ranks ``resets`` there to the current epoch."""
        start, stride = offset + pad_bytes(self.size), aligned(self.slot_bytes)
        if self._counts == "device":  # the pool has waited for its kernels
            self.epoch = int(self._state[EPOCH])
        shape = (PHASES, self.size, CHUNKS)
        self._place = (buffer, offset, self.slot_bytes)
        self._pads = [
            memory[offset : offset + 4 * math.prod(shape)].view(torch.int32).view(shape) for memory in buffer.tensors
        ]
        self._slots = [memory[start : start + 2 * stride].view(2, stride) for memory in buffer.tensors]
        pads = [pad.data_ptr() for pad in self._pads]
        self._tables = [
            torch.tensor([[slots.data_ptr() + slot * stride for slots in self._slots], pads], dtype=torch.int64).to(
                self.device
            )
            for slot in (0, 1)
        ]
        self._views.clear()
        for rank in resets:
            self._pads[rank].fill_(self.epoch)
            if alloc.poisoned():
                self._slots[rank].fill_(255)

    def at(self, buffer: SymmetricBuffer | None, offset: int, slot_bytes: int) -> bool:
        """Whether the channel already has this place."""
        return self._place is not None and self._place == (buffer, offset, slot_bytes)

    def check_movable(self) -> None:
        """RuntimeError where an exchange or a captured graph relies on the channel's address."""
        if self._open is not None:
            raise RuntimeError(f"symmetric memory cannot move while an exchange is under way: {self._open}")
        if self._captured or (self._counts and self._pool.is_virtual):
            holder = "captured graphs may hold" if self._counts == "device" else "the other virtual ranks have"
            raise RuntimeError(
                f"symmetric memory cannot move: channel {self.name!r} is in use, and {holder} its addresses; request "
                "all channels at their full size before"
            )

    def set_timeout(self, timeout_s: float) -> None:
        self._state[LIMIT_MS] = new_state(self.rank, self.size, timeout_s, "cpu")[LIMIT_MS]

    def release(self) -> None:
        """Release the memory."""
        self._place = None
        self._pads, self._slots, self._tables = [], [], []
        self._views.clear()

    # --- internals ----------------------------------------------------------------------------------------------------

    def _prepare(self, counts: str, shape: Sequence[int], dtype: torch.dtype) -> None:
        """Allocate memory if needed; raise if the exchange cannot run."""
        self.check()
        self._pool.settle()
        if self._open is not None:
            raise RuntimeError(
                f"channel {self.name!r}: {self._open}, number {self.epoch}, has not ended: end() has to follow the "
                "launch of its last reader; if that failed (a step that ran out of memory, say), its peers are left "
                "waiting: SymmetricMemoryPool.existing(group).close() on every rank, and the next step "
                "makes another"
            )
        if self._counts not in (None, counts):
            raise RuntimeError(
                f"channel {self.name!r}: the {self._counts} counts its exchanges, so the {counts} cannot; use two"
            )
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes > self.slot_bytes:
            raise ValueError(
                f"channel {self.name!r}: {dtype} {list(shape)} takes {nbytes} bytes and a slot has {self.slot_bytes}; "
                f"ask for channel({self.name!r}, {nbytes}) on every rank before, in a pool that has room for it"
            )
        self._counts = counts

    def _rebase(self) -> None:
        """Bring all flags to the current epoch, with no exchange under way: long unused flags would seem ahead."""
        self._pool.barrier()
        self._pads[self.rank].fill_(self.epoch)
        self._pool.barrier()
        self._since_rebase = 0

    def _doing(self, op: str, shape: Sequence[int], dtype: torch.dtype) -> str:
        return f"{op} (channel {self.name!r}{self._pool.whose}, {dtype} {list(shape)})"

    def _view(self, slot: int, shape: Sequence[int], dtype: torch.dtype) -> list[torch.Tensor]:
        """Each rank's slot as a tensor, cached: making R of them takes longer than launching a kernel."""
        key = slot, tuple(shape), dtype
        views = self._views.get(key)
        if views is None:
            if len(self._views) >= _VIEWS:
                self._views.clear()
            nbytes = math.prod(shape) * dtype.itemsize
            with torch.inference_mode(False):
                both = [slots[:, :nbytes].view(dtype).view(2, *shape) for slots in self._slots]
                views = self._views[key] = both if slot == _BOTH else [pair[slot] for pair in both]
        return list(views)

    def _signals(self, epoch: int | None, slot: int) -> Signals:
        return Signals(
            self.rank, epoch, self._pads, self._tables[slot], self._state, self._report, self._pool.timeout_s
        )


def capturing() -> bool:
    """Whether the current stream records a CUDA graph. (Without CUDA the query itself fails.)"""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
