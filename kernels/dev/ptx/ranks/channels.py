"""A channel for virtual ranks: slots and flags as ``parallel/overlap/memory/channel.py`` lays them out, in one process.

Kernels are a floor below that one. Tests of whole layers (tests/support/ptx_layers.py) run over it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from ....runtime.signals import (
    CHUNKS,
    PHASES,
    REPORT,
    ExchangeTimeout,
    Signals,
    describe,
    following,
    new_state,
)
from .clocks import Region

_ALIGNED = 16  # bytes, to whose multiples slots begin


class Channel:
    """One rank's; ``epoch`` is the number of its last exchange."""

    def __init__(self, rank: int, slots: list[torch.Tensor], pads: list[torch.Tensor], timeout_s: float) -> None:
        self.rank, self.epoch, self.slots, self.pads, self.timeout_s = rank, 0, slots, pads, timeout_s
        flags = [pad.data_ptr() for pad in pads]
        self.tables = [torch.tensor([[of_rank[k].data_ptr() for of_rank in slots], flags]) for k in (0, 1)]
        self.state = new_state(rank, len(slots), timeout_s, "cpu")
        self.report = torch.zeros(REPORT, dtype=torch.int32)

    @property
    def stale(self) -> torch.Tensor:
        """The own slot of the last exchange, which :meth:`begin` fills with NaN."""
        return self.slots[self.rank][self.epoch % 2]

    def begin(self, shape: Sequence[int], dtype: torch.dtype) -> tuple[list[torch.Tensor], Signals]:
        """The next exchange: each rank's slot as ``dtype`` ``shape``, and its signals."""
        self.stale.fill_(255)
        self.epoch = following(self.epoch)
        return self.views(self.epoch % 2, shape, dtype), self._signals(self.epoch)

    def device_counted(self, shape: Sequence[int], dtype: torch.dtype) -> tuple[list[torch.Tensor], Signals]:
        """Both slots of each rank [2, *shape], for kernels that count exchanges themselves."""
        both = zip(self.views(0, shape, dtype), self.views(1, shape, dtype))
        steps = [int(b.data_ptr() - a.data_ptr()) // dtype.itemsize for a, b in both]
        firsts = self.views(0, shape, dtype)
        return [a.as_strided((2, *shape), (step, *a.stride())) for a, step in zip(firsts, steps)], self._signals(None)

    def views(self, slot: int, shape: Sequence[int], dtype: torch.dtype) -> list[torch.Tensor]:
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        return [of_rank[slot][:nbytes].view(dtype).view(*shape) for of_rank in self.slots]

    def end(self) -> None:
        """Raise ExchangeTimeout if a wait has timed out."""
        failure = describe(self.report, self.rank, "an exchange")
        if failure is not None:
            raise ExchangeTimeout(failure)

    def _signals(self, epoch: int | None) -> Signals:
        table = self.tables[0 if epoch is None else epoch % 2]
        return Signals(self.rank, epoch, self.pads, table, self.state, self.report, self.timeout_s)


def channels(ranks: int, nbytes: int, timeout_s: float) -> list[Channel]:
    """One for each rank, with two slots of so many bytes on each, full of NaN."""
    room = -(-max(nbytes, 1) // _ALIGNED) * _ALIGNED
    slots = [_aligned(2 * room).fill_(255).view(2, room) for _ in range(ranks)]
    pads = [torch.zeros(PHASES, ranks, CHUNKS, dtype=torch.int32) for _ in range(ranks)]
    return [Channel(rank, slots, pads, timeout_s) for rank in range(ranks)]


def _aligned(size: int) -> torch.Tensor:
    whole = torch.empty(size + _ALIGNED, dtype=torch.uint8)
    return whole[-whole.data_ptr() % _ALIGNED :][:size]


def regions(
    slots: Sequence[torch.Tensor], pads: Sequence[torch.Tensor], states: Sequence[torch.Tensor]
) -> Iterator[Region]:
    """What is to be watched of one channel, by rank."""
    for rank, of_rank in enumerate(zip(slots, pads, states)):
        for tensor, kind in zip(of_rank, ("slots", "flags", "state")):
            yield Region(tensor.data_ptr(), tensor.numel() * tensor.itemsize, rank, kind)
