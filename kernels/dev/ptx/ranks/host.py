"""What ranks do beside kernels: rows that copy engines push on streams of their own, and flags that hosts raise.

On a CPU ``comm/transport.py`` copies rows in the thread that calls it. Here they are queued as on a GPU: each of the
channel's streams is an actor that copies and raises flags in its own order, beside the product that waits for them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import torch

from ....comm import op, transport
from ....runtime import signals as flags
from ....runtime.signals import CHUNKS, Signals, rows_of
from .. import driver
from ..memory import Allocation
from .launch import execute
from .world import World, current, local


@dataclass(eq=False)
class Stream:
    """A stream of copies of one rank: what is queued runs one after the other."""

    rank: int
    queue: list[Callable[[Stream], None]] = field(default_factory=list)
    view: int = 0
    agent: int = 0
    time: int = 0


@dataclass(frozen=True)
class Wrong:
    """Ways to get the host's part of the protocol wrong, for ``seeds.py``."""

    flags_first: bool = False  # a piece's flags are raised before its rows are copied
    flags_crossed: bool = False  # each stream raises the flags of the other one's piece
    unordered: bool = False  # streams do not wait for the own rows
    not_awaited: bool = False  # an exchange ends before its copies
    silent: bool = False  # pieces without rows raise no flag


RIGHT = Wrong()


@contextlib.contextmanager
def hosting(world: World, wrong: Wrong = RIGHT) -> Iterator[None]:
    """Within the block the launches and the host's stores and copies of ``world``'s actors are those of its ranks."""
    host = _Host(world, wrong)
    with contextlib.ExitStack() as stack:
        for owner, name, new in (
            (driver, "execute", execute),
            (driver, "_storages", lambda: _reachable(world)),
            (transport, "start_push", host.start_push),
            (transport, "spread", host.spread),
            (transport, "raise_flags", host.raise_flags),
            (transport, "raise_own_flags", host.raise_own_flags),
            (op, "raise_flags", host.raise_flags),
            (torch.cuda, "set_stream", host.set_stream),
        ):
            stack.enter_context(mock.patch.object(owner, name, new))
        yield


def _reachable(world: World) -> list[Allocation]:
    """What a kernel may reach through a table of addresses: the slots and flags of all ranks, and nothing else."""
    regions = [each for each in world.shadow.regions if each.kind != "state"]
    return [Allocation(each.start, each.size, f"the {each.kind} of rank {each.rank}") for each in regions]


class _Host:
    """In place of functions of ``transport`` and ``signals``, with their arguments."""

    def __init__(self, world: World, wrong: Wrong) -> None:
        self.world, self.wrong = world, wrong

    def start_push(
        self, x: torch.Tensor, peers: list[torch.Tensor], signals: Signals, pieces: int
    ) -> Callable[[], None]:
        world, rank, whole = self.world, signals.rank, peers[signals.rank]
        first, last = rows_of(rank, len(peers), whole.shape[0])
        world.host_writes(rank, whole[first:last])
        before = world.host_view[rank]
        transport.keep(x, peers, signals, pieces)
        view = before if self.wrong.unordered else world.host_view[rank]
        streams = [Stream(rank, view=view, agent=int(world.clocks.agents(rank)[0])) for _ in range(transport.STREAMS)]
        streams = streams[:pieces]
        in_place_of_torchs: Any = streams
        transport.send(peers, signals, pieces, in_place_of_torchs)
        self.set_stream(None)
        actors = [
            world.start(f"rank {rank}, stream {n}", rank, partial(self._run, each), copies=True)
            for n, each in enumerate(streams)
        ]

        def sent() -> None:
            while not self.wrong.not_awaited and not all(each.done for each in actors):
                _paused(world, lambda: [f"waits for its copies: {', '.join(each.name for each in actors)}"])
            if not self.wrong.not_awaited:
                for each in streams:
                    world.host_view[rank] = world.clocks.join(world.host_view[rank], each.view)

        return sent

    def _run(self, stream: Stream) -> None:
        for step in stream.queue:
            step(stream)
            self.world.progress = True
            _paused(self.world, list)

    def set_stream(self, stream: Stream | None) -> None:
        local.stream = stream

    def spread(self, tensors: Sequence[torch.Tensor], rank: int, to: Sequence[int], start: int, nbytes: int) -> None:
        tensors = list(tensors)

        def copy(stream: Stream) -> None:
            world, clock = self.world, (stream.agent, stream.time, stream.view)
            world.host_access(rank, tensors[rank].data_ptr() + start, nbytes, False, *clock)
            for peer in to:
                world.host_access(rank, tensors[peer].data_ptr() + start, nbytes, True, *clock)
            _SPREAD(tensors, rank, to, start, nbytes)

        self._queue(copy)

    def raise_flags(self, signals: Signals, phase: int, chunk: int, to: Sequence[int]) -> None:
        stream, epoch = getattr(local, "stream", None), signals.epoch
        assert epoch is not None
        if stream is None:
            view = self.world.host_knows(signals.rank)
            for peer in to:
                self._raise(signals, peer, phase, chunk, view)
            return
        if self.wrong.flags_crossed:
            chunk ^= 1

        def raising(stream: Stream) -> None:
            stream.time += 1
            stream.view = self.world.clocks.knowing(stream.view, [stream.agent], stream.time)
            for peer in to:
                word = signals.pads[peer].view(-1)[(phase * len(signals.pads) + signals.rank) * CHUNKS + chunk]
                self.world.host_raises(signals.rank, word, epoch, stream.view, stream.agent, stream.time)

        copied = getattr(local, "copied", False)
        local.copied = False
        if self.wrong.silent and not copied:
            return
        if self.wrong.flags_first and copied:
            stream.queue.insert(len(stream.queue) - 1, raising)
        else:
            stream.queue.append(raising)

    def raise_own_flags(self, signals: Signals, chunks: int) -> None:
        view = self.world.host_knows(signals.rank)
        for chunk in range(chunks):
            self._raise(signals, signals.rank, 0, chunk, view)

    def _raise(self, signals: Signals, peer: int, phase: int, chunk: int, view: int) -> None:
        world, rank = self.world, signals.rank
        word = signals.pads[peer].view(-1)[(phase * len(signals.pads) + rank) * CHUNKS + chunk]
        assert signals.epoch is not None
        world.host_raises(rank, word, signals.epoch, view, int(world.host[rank]), world.host_time[rank])

    def _queue(self, step: Callable[[Stream], None]) -> None:
        local.copied = True
        local.stream.queue.append(step)


def _paused(world: World, waits: Callable[[], list[str]]) -> None:
    actor = current()
    assert actor is not None
    assert actor.world is world
    actor.pause(waits)


_SPREAD = flags.spread
