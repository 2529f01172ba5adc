"""R virtual ranks on one device: they time exchanges between ranks on a single GPU.

On a GPU every rank is a stream of one process, with copies on streams of their own, in a pool of virtual ranks
(``parallel/overlap/memory/pool.py``). Ranks wait for each other inside their kernels, so the programs of all of them
have to be on the chip at once: each rank gets an equal share of the multiprocessors and launches no more programs than
that (``kernels/runtime/device.slots``). Four things would make a wait last for ever; every wait ends after TIMEOUT_S:

    a kernel that is loaded while others spin: loading waits for them. ``alone`` runs everything once beforehand, with
        all flags raised
    a graph that is launched for the first time while others spin: CUDA uploads it then, which may allocate memory and
        wait for the device. ``captured`` replays each alone beforehand, with the flags of its exchanges raised
    a copy within one device that the driver makes with a kernel of its own: SPARE multiprocessors stay free for it
    streams that share one of CUDA's hardware queues, where one's copy waits behind another's kernel: CUDA opens 8, and
        ``open_queues`` requests more

On a CPU, where the interpreter runs one kernel after another, ranks run one after another: all flags are raised
beforehand, and after ROUNDS exchanges with the same operands the data of all ranks has arrived. That tests the path and
measures nothing.
"""

from __future__ import annotations

import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...kernels.comm.transport import STREAMS
from ...kernels.runtime import device as chips
from ...kernels.runtime.signals import EPOCH, ExchangeTimeout, Signals, describe, in_one_process
from ...parallel.overlap.memory.pool import SymmetricMemoryPool
from ...parallel.overlap.memory.sizes import layout, own_slots

TIMEOUT_S = 4.0  # of a wait: longer than any timed call, shorter than a watchdog's limit
SPARE = 4  # multiprocessors
ROUNDS = 3  # exchanges before results count: a two-shot all-reduce of ranks in turn needs that many in a slot
QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"
_CUDA_QUEUES, _MOST_QUEUES = 8, 32  # CUDA's default and its limit
AHEAD = 2**30  # a flag value that every exchange of a run takes as raised
_NAME = "bench"
# The sources on which results of virtual ranks depend, besides the ops'.
SYMMETRIC = tuple(f"parallel/overlap/memory/{part}.py" for part in ("pool", "backends", "channel", "sizes"))

Body = Callable[[int], Any]


def open_queues() -> None:
    """Request all of CUDA's hardware queues. It takes effect only before CUDA starts."""
    os.environ.setdefault(QUEUES, str(_MOST_QUEUES))


def make(size: int, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> VirtualRanks:
    """``size`` ranks that exchange slots of ``shape``. Use it in a ``with`` block, which frees the memory."""
    kind = OnStreams if device.type == "cuda" else TakingTurns
    return kind(size, shape, dtype, device)


def share_of(device: torch.device, size: int) -> int:
    """The number of programs that each of ``size`` ranks may run at a time."""
    spare = SPARE if device.type == "cuda" else 0
    return max(1, (chips.program_slots(device) - spare) // size)


class VirtualRanks(ABC):
    """``size`` ranks on ``device``, each of which may run ``share`` programs at a time."""

    def __init__(self, size: int, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
        self.size, self.shape, self.dtype, self.device = size, tuple(shape), dtype, device
        self.share = share_of(device, size)

    def __enter__(self) -> VirtualRanks:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @abstractmethod
    def run(self, body: Body) -> list[Any]:
        """``body(rank)`` of every rank, concurrently if the device can; the current stream waits for all."""

    @abstractmethod
    def alone(self, body: Body) -> None:
        """``body(rank)`` of one rank after another, without waits: it loads kernels and allocates memory."""

    @abstractmethod
    def begin(self, rank: int) -> tuple[list[torch.Tensor], Signals]:
        """The rank's next exchange, counted by the host: (each rank's slot, its signals)."""

    @abstractmethod
    def end(self, rank: int) -> None:
        """Mark that the last reader of the rank's exchange has been launched."""

    @abstractmethod
    def counted(self, rank: int) -> tuple[list[torch.Tensor], Signals]:
        """The rank's exchanges, counted by the device: (each rank's two slots, its signals)."""

    @abstractmethod
    def captured(self, body: Body) -> Body:
        """``body`` of each rank as a CUDA graph, which the result replays; on a CPU ``body`` itself.

        Each graph is launched once, alone, as in :meth:`alone`; that leaves the ranks' counts of exchanges equal.
        """

    def settled(self, body: Body, rounds: int = ROUNDS) -> list[Any]:
        """The ranks' results of the last of ``rounds`` calls; raises as :meth:`check`."""
        found = []
        for _ in range(rounds):
            found = self.run(body)
        self.check()
        return found

    @abstractmethod
    def check(self) -> None:
        """Raise ExchangeTimeout if a wait timed out: timings since then are invalid."""

    @abstractmethod
    def close(self) -> None:
        """Free the memory."""


class OnStreams(VirtualRanks):
    """Ranks that run concurrently on a GPU."""

    def __init__(self, size: int, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(size, shape, dtype, device)
        queues = int(os.environ.get(QUEUES, _CUDA_QUEUES))
        streams = (1 + STREAMS) * size + 1
        if queues < streams:
            raise RuntimeError(
                f"{size} virtual ranks have {streams} streams and CUDA has {queues} hardware queues: streams in "
                f"one queue would wait for each other; set {QUEUES}={_MOST_QUEUES} before CUDA starts"
            )
        slot = math.prod(shape) * dtype.itemsize
        total = layout({**own_slots(size), _NAME: slot}, size)[1]
        self._pools = SymmetricMemoryPool.virtual(size, total, device, timeout_s=TIMEOUT_S)
        self._channels = [pool.channel(_NAME, slot) for pool in self._pools]
        for pool in self._pools:  # this waits for the device, which is impossible once a kernel spins
            pool.settle()
        self._streams = [torch.cuda.Stream(device) for _ in range(size)]
        self._alone: list[Signals] | None = None  # of the exchanges made inside alone()
        self._captured: list[Signals] | None = None  # of the exchanges of a graph that is being captured

    def run(self, body: Body) -> list[Any]:
        here = torch.cuda.current_stream(self.device)
        found = []
        for stream in self._streams:
            stream.wait_stream(here)
        with chips.slots(self.share):
            for rank, stream in enumerate(self._streams):
                with torch.cuda.stream(stream):
                    found.append(body(rank))
        for stream in self._streams:
            here.wait_stream(stream)
        return found

    def alone(self, body: Body) -> None:
        torch.cuda.synchronize(self.device)
        self._alone = []
        try:
            with chips.slots(self.share):
                for rank, stream in enumerate(self._streams):
                    with torch.cuda.stream(stream):
                        body(rank)
                    torch.cuda.synchronize(self.device)
            for signals in self._alone:  # restore the values of flags that were raised too high
                epoch = int(signals.state[EPOCH]) if signals.epoch is None else signals.epoch
                signals.pads[signals.rank].fill_(epoch)
            torch.cuda.synchronize(self.device)
        finally:
            self._alone = None

    def begin(self, rank: int) -> tuple[list[torch.Tensor], Signals]:
        return self._ready(*self._channels[rank].begin(self.shape, self.dtype, op="benchmark"))

    def end(self, rank: int) -> None:
        self._channels[rank].end()

    def counted(self, rank: int) -> tuple[list[torch.Tensor], Signals]:
        return self._ready(*self._channels[rank].device_counted(self.shape, self.dtype, op="benchmark"))

    def captured(self, body: Body) -> Body:
        graphs = [torch.cuda.CUDAGraph() for _ in range(self.size)]
        results: list[Any] = []
        exchanges: list[list[Signals]] = []
        with chips.slots(self.share):
            for rank, graph in enumerate(graphs):
                self._captured = []
                exchanges.append(self._captured)
                try:
                    with torch.cuda.graph(graph, stream=self._streams[rank]):
                        results.append(body(rank))
                finally:
                    self._captured = None

        def replay(rank: int) -> Any:
            graphs[rank].replay()
            return results[rank]

        def first_replay(rank: int) -> None:
            for signals in exchanges[rank]:
                self._raise_own(signals)
            replay(rank)

        self.alone(first_replay)
        return replay

    def check(self) -> None:
        torch.cuda.synchronize(self.device)
        for channel in self._channels:
            channel.check()

    def close(self) -> None:
        for pool in self._pools:
            pool.close()

    def _ready(self, peers: list[torch.Tensor], signals: Signals) -> tuple[list[torch.Tensor], Signals]:
        if self._captured is not None:
            self._captured.append(signals)
        elif self._alone is not None:
            self._raise_own(signals)
        return peers, signals

    def _raise_own(self, signals: Signals) -> None:
        """Raise all flags that the rank waits for, until ``alone`` ends."""
        assert self._alone is not None
        signals.pads[signals.rank].fill_(AHEAD)
        self._alone.append(signals)


class TakingTurns(VirtualRanks):
    """Ranks that run one after another on a CPU: no rank waits, and data comes from the previous round."""

    def __init__(self, size: int, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(size, shape, dtype, device)
        self._known: dict[bool, tuple[list[torch.Tensor], list[Signals]]] = {}  # by whether the device counts

    def run(self, body: Body) -> list[Any]:
        with chips.slots(self.share):
            return [body(rank) for rank in range(self.size)]

    def alone(self, body: Body) -> None:
        self.run(body)

    def begin(self, rank: int) -> tuple[list[torch.Tensor], Signals]:
        return self._exchange(rank, counted=False)

    def end(self, rank: int) -> None:
        pass

    def counted(self, rank: int) -> tuple[list[torch.Tensor], Signals]:
        return self._exchange(rank, counted=True)

    def captured(self, body: Body) -> Body:
        return body

    def check(self) -> None:
        for _, ranks in self._known.values():
            for signals in ranks:
                failure = describe(signals.report, signals.rank, "benchmark")
                if failure is not None:
                    raise ExchangeTimeout(failure)

    def close(self) -> None:
        self._known.clear()

    def _exchange(self, rank: int, *, counted: bool) -> tuple[list[torch.Tensor], Signals]:
        if counted not in self._known:
            shape = (2, *self.shape) if counted else self.shape
            peers = [torch.zeros(shape, dtype=self.dtype, device=self.device) for _ in range(self.size)]
            self._known[counted] = peers, in_one_process(peers, timeout_s=TIMEOUT_S, epoch=None if counted else 1)
        peers, ranks = self._known[counted]
        ranks[rank].pads[rank].fill_(AHEAD)
        return peers, ranks[rank]
