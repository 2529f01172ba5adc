"""Memory that all ranks of a group can write, and the exchanges in it.

A group has one *memory pool*, which all layers and pipeline stages share. It holds a few *channels* ("gather",
"reduce", ...): on every rank two slots for data, used in turn, and a pad of flags. One use of a channel by all ranks is
an *exchange*; ``kernels/runtime/signals.py`` describes how data and flags travel in one, docs/overlap.md why two slots
are enough. The layout of one rank's memory:

    "barrier": pad int32 [PHASES, R, CHUNKS]  |  "probe": pad, slot 0, slot 1  |  the first other channel  |  ...

"Collective" has its usual meaning: all ranks make these calls with the same arguments in the same order. Memory is
allocated at first use and reallocated when channels are added or grow.

``channel.py`` has the channel, ``backends.py`` the allocation, ``sizes.py`` the bytes that a model needs, ``probe.py``
the probe.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from ....kernels.runtime.signals import ExchangeTimeout, raise_flags
from ...core.mesh import Group
from . import probe
from .backends import (
    Backend,
    MemoryUnavailable,
    SymmetricBuffer,
    _SharedBackend,
    _TorchBackend,
    _VirtualBackend,
    wait_words,
)
from .channel import Channel, capturing
from .sizes import BARRIER, PROBE, largest, layout, model_slots, own_slots, pool_bytes, table, text

__all__ = ["Channel", "SymmetricBuffer", "SymmetricMemoryPool", "model_slots", "pool_bytes"]

TIMEOUT_S = 120.0  # a peer may be compiling its kernels
LONGEST_S = 2e6  # kernels count milliseconds in 32 bits
FIRST_EPOCH = 0  # of a new pool's channels
REBASE_EVERY = 2**30  # exchanges: a flag unused for 2^31 of them seems to be ahead


class SymmetricMemoryPool:
    """The symmetric memory of a group, as one rank sees it. Made by :meth:`of` or :meth:`virtual`.

    ``rank``, ``size`` and ``device`` are the group's and this rank's; ``timeout_s`` bounds every wait.
    """

    def __init__(self, backend: Backend, limit: int | None, timeout_s: float, whose: str = "") -> None:
        _check_timeout(timeout_s)
        self.rank, self.size, self.device, self.is_virtual = backend.rank, backend.size, backend.device, backend.virtual
        self.timeout_s, self.whose = timeout_s, whose
        self._backend, self._limit = backend, limit
        self._counting = FIRST_EPOCH, REBASE_EVERY
        self._channels: dict[str, Channel] = {}
        self._buffer: SymmetricBuffer | None = None
        self._settled = self._closed = False
        self._broken: str | None = None
        self._probed: list[str | None] = []  # the probe's answer, once there is one
        self._end: weakref.finalize[..., Any] | None = None
        own = own_slots(self.size)
        # A barrier raises all flags that it waits for, so it needs no rebase; a rebase consists of barriers.
        self._channels[BARRIER] = Channel(self, BARRIER, own[BARRIER], FIRST_EPOCH, sys.maxsize)
        self.channel(PROBE, own[PROBE])

    @classmethod
    def of(
        cls,
        group: Group,
        *,
        device: torch.device | str,
        bytes: int | None = None,
        timeout_s: float | None = None,
    ) -> SymmetricMemoryPool:
        """The pool of ``group``, created if there is none. Collective. It is closed with its group.

        ``bytes`` is the pool's size on each rank, allocated at once; a channel that does not fit is refused.
        :func:`pool_bytes` gives what a model needs. None: the pool grows with its channels. For an existing pool, more
        ``bytes`` and another ``timeout_s`` (seconds; 120 at first) replace the old ones.

        Raises ValueError for a group of one rank, a destroyed group or another device than before; RuntimeError where
        more bytes would move memory that is in use.
        """
        if group.size == 1:
            raise ValueError(
                "SymmetricMemoryPool.of: a group of one rank has no peer to exchange with; use virtual(1, ...)"
            )
        device = _indexed(device)
        _close_destroyed()
        pool = _pools.get(group.pg)
        if pool is not None and not pool._closed:
            pool._change(device, bytes, timeout_s)
            return pool
        whose, current = _whose(group), _without_holding(group)
        backend = _TorchBackend(current, device) if device.type == "cuda" else _SharedBackend(current, device)
        pool = cls(backend, bytes, TIMEOUT_S if timeout_s is None else timeout_s, whose)
        _pools[group.pg] = pool
        # Runs when the group is freed or the process ends. It holds the pool; the pool does not hold the group.
        pool._end = weakref.finalize(group.pg, pool.close)
        return pool

    @staticmethod
    def existing(group: Group) -> SymmetricMemoryPool | None:
        """The pool of ``group`` if there is one. Not collective."""
        pool = _pools.get(group.pg)
        return None if pool is None or pool._closed else pool

    @classmethod
    def virtual(
        cls,
        world: int,
        bytes: int,
        device: torch.device | str = "cpu",
        *,
        timeout_s: float = TIMEOUT_S,
    ) -> list[SymmetricMemoryPool]:
        """``world`` ranks in this process, each with ``bytes``: for tests, and for measurements on one GPU.

        Ranks that wait for each other on the host (:meth:`barrier`, a rebase) need a thread each, and a channel that
        has been used does not move.
        """
        if world < 1:
            raise ValueError(f"SymmetricMemoryPool.virtual: world={world}: expected at least 1")
        team = _VirtualBackend.team(world, bytes, _indexed(device))
        return [cls(backend, bytes, timeout_s) for backend in team]

    def channel(self, name: str, slot_bytes: int) -> Channel:
        """The channel ``name``, with slots of at least ``slot_bytes``, created or enlarged if needed. Collective.

        Raises ValueError where the pool's bytes do not suffice, RuntimeError where memory in use would move or the pool
        is closed or broken.
        """
        if slot_bytes < 0:
            raise ValueError(f"channel {name!r}: slot_bytes={slot_bytes}: expected 0 or more")
        self._check_open()
        self._check_whole()
        known = self._channels.get(name)
        if known is not None and slot_bytes <= known.slot_bytes:
            return known
        self._plan({**self._slots(), name: slot_bytes}, self._limit)
        if known is None:
            known = self._channels[name] = Channel(self, name, slot_bytes, *self._counting)
        known.slot_bytes = slot_bytes
        self._settled = False
        return known

    def ready(self, name: str, slot_bytes: int) -> bool:
        """Whether the channel ``name`` has memory for slots of ``slot_bytes``, so that using it moves nothing."""
        channel = self._channels.get(name)
        return self._settled and channel is not None and slot_bytes <= channel.slot_bytes

    def barrier(self, timeout_s: float | None = None) -> None:
        """Wait on the host until all ranks are here and their launches on the current stream are done. Collective.

        Raises ExchangeTimeout, which names the missing ranks, after ``timeout_s`` (default: the pool's); the pool is
        then broken.
        """
        channel = self._channels[BARRIER]
        _, signals = channel.begin((0,), torch.uint8, op="barrier")
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        raise_flags(signals, 0, 0, range(self.size))
        limit = self.timeout_s if timeout_s is None else timeout_s
        missing = wait_words(signals.pads[self.rank][0, :, 0], channel.epoch, limit)
        if missing:
            peers = ", ".join(f"rank {peer} (its flag stands at {flag})" for peer, flag in missing.items())
            self._broken = (
                f"barrier{self.whose}: rank {self.rank} waited {limit:g} s in vain for {peers}, epoch "
                f"{channel.epoch}: a missing rank has died, hangs, or makes other calls; look at its output first"
            )
            raise ExchangeTimeout(self._broken)
        channel.end()

    def check(self) -> None:
        """Raise ExchangeTimeout if a wait of a finished kernel timed out, RuntimeError if the pool is broken."""
        self._check_open()
        self._check_whole()
        for channel in self._channels.values():
            channel.check()

    def probe(self, timeout_s: float | None = None) -> str | None:
        """The reason, in one line, why this memory must not be used, or None. Collective; all ranks get the same
        answer.

        Every rank writes patterns into every peer's memory and gets them back, in both slots, within ``timeout_s``
        (default: the pool's). An allocation that fails is an answer, too. Later calls return the first answer. Memory
        that failed is not used again.
        """
        self._check_open()
        if not self._probed:
            limit = self.timeout_s if timeout_s is None else timeout_s
            self._broken = None if self.is_virtual else self._try(limit)
            self._probed.append(self._broken)
        return self._probed[0]

    def budget(self, wanted: Mapping[str, int] | None = None) -> str:
        """A printable table of each channel's bytes on each rank, assuming that ``wanted`` slots are requested too."""
        title = f"symmetric memory{self.whose}, on each of {self.size} ranks"
        return table(largest(self._slots(), wanted or {}), self.size, self._limit, title)

    def close(self) -> None:
        """Free the memory; every later use raises. Views then are invalid on a GPU; on a CPU they keep it alive."""
        if self._closed:
            return
        self._closed = True
        if self._end is not None:
            self._end.detach()
        if self._buffer is not None:
            self._wait_for_device()
            self._buffer.close()
            self._buffer = None
        for channel in self._channels.values():
            channel.release()

    def settle(self) -> SymmetricBuffer:
        """The memory, with a place for every channel. Collective where channels have changed.

        Raises MemoryUnavailable where it cannot be allocated, RuntimeError where the pool is closed or broken, or where
        memory has to be allocated during a graph capture.
        """
        self._check_open()
        self._check_whole()
        if not self._settled:
            self._lay_out()
        assert self._buffer is not None
        return self._buffer

    def _try(self, timeout_s: float) -> str | None:
        try:
            self.settle()
        except MemoryUnavailable as error:
            return str(error)
        try:
            finding = probe.run(self._channels[PROBE], timeout_s)
        except Exception as error:  # the other ranks are about to gather this rank's finding
            finding = probe.Finding(0, f"rank {self.rank} failed: {type(error).__name__}: {error}")
        found = self._backend.agree(finding)
        findings = [finding for finding in found if finding is not None]
        return f"probe{self.whose}: {min(findings).text}" if findings else None

    def _change(self, device: torch.device, limit: int | None, timeout_s: float | None) -> None:
        """Apply the arguments of :meth:`of` to an existing pool."""
        if device != self.device:
            raise ValueError(
                f"SymmetricMemoryPool.of: device={device}: the group's pool is on {self.device}; close() it first"
            )
        if timeout_s is not None:
            _check_timeout(timeout_s)
        if limit is not None and limit > (self._limit or 0):
            self._plan(self._slots(), limit)
            self._limit, self._settled = limit, False
        if timeout_s is not None and timeout_s != self.timeout_s:
            self.timeout_s = timeout_s
            for channel in self._channels.values():
                channel.set_timeout(timeout_s)

    def _slots(self) -> dict[str, int]:
        return {name: channel.slot_bytes for name, channel in self._channels.items()}

    def _plan(self, slots: dict[str, int], limit: int | None) -> None:
        """Raise where the channels do not fit, or where memory in use would move."""
        places, total = layout(slots, self.size)
        if limit is not None and total > limit:
            channels = ", ".join(f"{name!r} (2 x {text(slot)})" for name, slot in slots.items())
            raise ValueError(
                f"symmetric memory{self.whose}: the channels {channels} take {total} bytes on each rank, and the pool "
                f"may take {limit}; make it with bytes={total} or more (pool_bytes says what a model needs)"
            )
        moves = self._buffer is not None and (limit or total) > self._buffer.nbytes
        for name, channel in self._channels.items():
            if moves or not channel.at(self._buffer, places[name], slots[name]):
                channel.check_movable()

    def _lay_out(self) -> None:
        """Allocate enough memory, and give every channel whose place has changed its new place."""
        if capturing():
            raise RuntimeError(
                "symmetric memory is allocated at its first use, which cannot be inside graph capture: probe() the "
                "pool, or warm up, with all channels at their full size before"
            )
        self._wait_for_device()  # this rank's launches must end before the others learn of its arrival
        slots = self._slots()
        places, total = layout(slots, self.size)
        if not self.is_virtual:
            self._compare(slots)
        capacity = self._limit or total
        with (
            torch.inference_mode(False),
            self._backend.lock,
        ):  # a tensor made in inference mode cannot be used outside it
            if self._buffer is None or capacity > self._buffer.nbytes:
                self._buffer = self._backend.allocate(capacity)
            for name, channel in self._channels.items():
                if not channel.at(self._buffer, places[name], slots[name]):
                    channel.bind(self._buffer, places[name], self._backend.resets((name, places[name], slots[name])))
            self._wait_for_device()
        if not self.is_virtual:
            self._backend.agree(None)  # no rank raises a flag before all have set theirs
        self._settled = True

    def _compare(self, slots: dict[str, int]) -> None:
        asked = self._backend.agree((slots, self._limit))
        for rank, theirs in enumerate(asked):
            if theirs != asked[0]:
                raise RuntimeError(
                    f"symmetric memory{self.whose}: rank 0 has channels with slots of {asked[0][0]} and bytes="
                    f"{asked[0][1]}, rank {rank} {theirs[0]} and bytes={theirs[1]}; all ranks have to make the same "
                    "calls in the same order"
                )

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError(
                "this pool was closed, or its process group destroyed; SymmetricMemoryPool.of makes another"
            )

    def _check_whole(self) -> None:
        if self._broken is not None:
            raise RuntimeError(f"this pool is broken since: {self._broken}; close() it on every rank, or start anew")

    def _wait_for_device(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


# By ProcessGroup.
_pools: weakref.WeakKeyDictionary[Any, SymmetricMemoryPool] = weakref.WeakKeyDictionary()


def _close_destroyed() -> None:
    """Close the pools of destroyed groups, which a mesh or a module may keep alive."""
    for pg, pool in list(_pools.items()):
        if not _exists(pg):
            pool.close()
            del _pools[pg]


def _exists(pg: Any) -> bool:
    try:
        return bool(dist.get_process_group_ranks(pg))
    except (KeyError, ValueError):
        return False


def _whose(group: Group) -> str:
    """The global ranks of a group that has not all of them, for errors; empty for one that has."""
    if not _exists(group.pg):
        raise ValueError("SymmetricMemoryPool.of: group: its process group has been destroyed; pass one that exists")
    members = dist.get_process_group_ranks(group.pg)
    return "" if len(members) == dist.get_world_size() else f" of the group of global ranks {members}"


def _without_holding(group: Group) -> Callable[[], Group]:
    """A function that returns the group, for as long as others hold it."""
    pg, rank, size = weakref.ref(group.pg), group.rank, group.size

    def current() -> Group:
        alive = pg()
        if alive is None:
            raise RuntimeError("the pool's process group has gone; make another group, and SymmetricMemoryPool.of it")
        return Group(alive, rank, size, None)

    return current


def _indexed(device: torch.device | str) -> torch.device:
    """``device``, a GPU with its index; ValueError for anything but a CPU or a GPU."""
    device = torch.device(device)
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"symmetric memory: device={device}: expected a CPU or a GPU ('cpu', 'cuda')")
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _check_timeout(timeout_s: float) -> None:
    if not 0 < timeout_s < LONGEST_S:  # False for NaN
        raise ValueError(f"timeout_s={timeout_s}: expected a number of seconds above 0 and below {LONGEST_S:g}")
