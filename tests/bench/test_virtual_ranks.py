"""Virtual ranks: one process's streams in the place of GPUs, here without a GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from shardfuse.bench.harness import virtual_ranks
from shardfuse.kernels.runtime import device as chips
from shardfuse.kernels.runtime.signals import EPOCH, ExchangeTimeout, raise_flags, reached

CPU, GPU = torch.device("cpu"), torch.device("cuda")


class _Stream:
    """Notes what it waits for; what is launched on it runs at once."""

    made: list[_Stream]

    def __init__(self, device: Any = None, **options: Any) -> None:
        self.waited: list[_Stream] = []
        _Stream.made.append(self)

    def wait_stream(self, other: _Stream) -> None:
        self.waited.append(other)

    def wait_event(self, event: Any) -> None:
        pass


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[_Stream]]:
    """Stand-ins for CUDA's; the first is the current one."""
    _Stream.made = []
    current = [_Stream()]

    @contextlib.contextmanager
    def on(stream: _Stream) -> Iterator[None]:
        current.append(stream)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "Stream", _Stream)
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: current[-1])
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    monkeypatch.setenv(virtual_ranks.QUEUES, "32")
    return _Stream.made


def test_ranks_run_beside_each_other_between_fork_and_join(streams: list[_Stream]):
    with virtual_ranks.OnStreams(3, (3, 8), torch.float32, CPU) as ranks:
        here, *theirs = streams
        used = ranks.run(lambda rank: (rank, torch.cuda.current_stream(), chips.program_slots(CPU)))
    assert used == [(rank, theirs[rank], ranks.share) for rank in range(3)]
    assert here.waited == theirs
    assert all(stream.waited == [here] for stream in theirs)


def test_alone_nobody_waits_and_afterwards_flags_are_true(streams: list[_Stream]):
    """Or the exchanges after it would not wait for data that has yet to come."""
    with virtual_ranks.OnStreams(2, (2, 8), torch.float32, CPU) as ranks:
        seen: list[bool] = []

        def body(rank: int) -> Any:
            _, signals = ranks.begin(rank)
            seen.append(bool((signals.pads[rank] == virtual_ranks.AHEAD).all()))
            raise_flags(signals, 0, 0, range(2))
            ranks.end(rank)
            return signals

        ranks.run(body)
        ranks.alone(body)
        first, second = ranks.run(body)
        assert seen == [False, False, True, True, False, False]
        assert first.epoch == second.epoch == 3
        for rank, pad in enumerate(first.pads):
            assert pad[0, :, 0].tolist() == [3, 3]
            assert pad[1].unique().tolist() == pad[0, :, 1:].unique().tolist() == [2], rank  # of the exchange alone


def test_alone_with_exchanges_that_the_device_counts(streams: list[_Stream]):
    with virtual_ranks.OnStreams(2, (2, 8), torch.float32, CPU) as ranks:

        def body(rank: int) -> Any:
            peers, signals = ranks.counted(rank)
            assert peers[0].shape == (2, 2, 8)
            signals.state[0] += 1
            return signals

        ranks.alone(body)
        assert all(pad.unique().tolist() == [1] for pad in ranks.counted(0)[1].pads)


def test_graphs_are_captured_a_rank_at_a_time(streams: list[_Stream], monkeypatch: pytest.MonkeyPatch):
    """One each, on the rank's stream and in its share; a replay runs where the rank's launches would."""
    log: list[Any] = []

    class Graph:
        def replay(self) -> None:
            log.append(("replay", torch.cuda.current_stream()))

    @contextlib.contextmanager
    def capture(graph: Graph, stream: _Stream) -> Iterator[None]:
        log.append(("capture", stream))
        yield

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    with virtual_ranks.OnStreams(2, (2, 8), torch.float32, CPU) as ranks:
        replay = ranks.captured(lambda rank: (rank, chips.program_slots(CPU)))
        assert log == [(what, stream) for what in ("capture", "replay") for stream in streams[1:]]
        assert ranks.run(replay) == [(0, ranks.share), (1, ranks.share)]
    assert log[4:] == [("replay", stream) for stream in streams[1:]]


def test_no_graph_is_launched_for_the_first_time_while_others_spin(
    streams: list[_Stream], monkeypatch: pytest.MonkeyPatch
):
    """CUDA uploads it then, and may wait for kernels that wait for this rank. What each replays is an exchange."""
    captured: list[tuple[Graph, Any]] = []
    exchanges: dict[int, Any] = {}  # by the rank

    class Graph:
        launched = False

        def replay(self) -> None:
            (rank,) = (signals.rank for graph, signals in captured if graph is self)
            signals = exchanges[rank]
            assert self.launched or not spinning(), f"rank {rank} waits for the kernels of {spinning()}"
            self.launched = True
            signals.state[EPOCH] += 1
            for pad in signals.pads:
                pad[0, rank, 0] = signals.state[EPOCH]

    def spinning() -> list[int]:
        """The ranks whose kernels wait for flags."""
        return [
            rank
            for rank, signals in exchanges.items()
            if not all(reached(flag, int(signals.state[EPOCH])) for flag in signals.pads[rank][0, :, 0].tolist())
        ]

    @contextlib.contextmanager
    def capture(graph: Graph, stream: _Stream) -> Iterator[None]:
        before = set(exchanges)
        yield
        captured.extend((graph, exchanges[rank]) for rank in exchanges if rank not in before)

    def body(rank: int) -> None:
        exchanges[rank] = ranks.counted(rank)[1]
        assert not exchanges[rank].pads[rank].any()  # a graph that raised flags would raise them in every replay

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    with virtual_ranks.OnStreams(3, (3, 8), torch.float32, CPU) as ranks:
        replay = ranks.captured(body)
        for exchange in (2, 3):  # the first was the one alone
            ranks.run(replay)
            assert not spinning()
            assert all(signals.pads[rank][0, :, 0].tolist() == [exchange] * 3 for rank, signals in exchanges.items())


def test_failed_wait_of_any_rank_is_found(streams: list[_Stream]):
    with virtual_ranks.OnStreams(2, (2, 8), torch.float32, CPU) as ranks:
        signals = ranks.run(ranks.counted)[1][1]
        ranks.check()
        signals.report[0] = 1
        with pytest.raises(ExchangeTimeout, match="rank 1 waited in vain"):
            ranks.check()


def test_streams_that_would_share_a_queue_are_refused(streams: list[_Stream], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(virtual_ranks.QUEUES, "5")
    with pytest.raises(RuntimeError, match="3 virtual ranks have 10 streams and CUDA has 5 hardware queues"):
        virtual_ranks.OnStreams(3, (3, 8), torch.float32, CPU)
    monkeypatch.delenv(virtual_ranks.QUEUES)
    virtual_ranks.OnStreams(2, (2, 8), torch.float32, CPU).close()
    with pytest.raises(
        RuntimeError, match=r"4 virtual ranks have 13 streams and CUDA has 8 .* set .*=32 before CUDA starts"
    ):
        virtual_ranks.OnStreams(4, (4, 8), torch.float32, CPU)
    virtual_ranks.open_queues()
    virtual_ranks.OnStreams(8, (8, 8), torch.float32, CPU).close()
