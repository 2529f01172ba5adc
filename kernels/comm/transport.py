"""How a rank's rows get to its peers: copies that cost no multiprocessor, a flag after each piece.

Between GPUs the copy engines move them, on a stream of their own; on a CPU this thread does. Peers are served in the
order rank + 1, rank + 2, ..., so that no two ranks push to the same one at a time, and a piece goes to all of them
before the next, because each is waiting for the first.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from ..runtime import device
from ..runtime.signals import Signals, raise_flags, rows_of


def pieces_for(rows: int) -> int:
    """In how many pieces to send a rank's ``rows``: each long enough to fill the tiles of a wide product."""
    return max(1, min(8, rows // 256))


def start_push(x: torch.Tensor, peers: list[torch.Tensor], signals: Signals, pieces: int) -> Callable[[], None]:
    """Push ``x``, this rank's rows of [T, D], into ``peers`` [T, D]; what is returned finishes it.

    Call it once the kernel that waits for the rows is launched: what comes after on its stream may then free ``x``.
    """
    if x.is_cuda:
        return _push_by_engine(x, peers, signals, pieces)
    _push(x, peers, signals, pieces)
    return lambda: None


def wait_for_rows(signals: Signals, pieces: int) -> None:
    """Hold this rank's stream (on a CPU, this thread) until the rows of every rank are here."""
    import triton  # only when a kernel runs

    from ..runtime.signals_triton import clock_of
    from .wait_triton import _wait_kernel

    pad = signals.pads[signals.rank]
    arguments = {
        "wait_ptrs": (pad, signals.state, signals.report),
        "epoch": signals.epoch,
        "PIECES": pieces,
        "FLAGS": triton.next_power_of_2(pieces * len(signals.pads)),
        "CLOCK": clock_of(device.architecture(pad.device)),
    }
    device.launch(_wait_kernel, (1,), arguments, num_warps=1, num_stages=1, on=pad, config="wait")


def _push_by_engine(x: torch.Tensor, peers: list[torch.Tensor], signals: Signals, pieces: int) -> Callable[[], None]:
    """The own rows at once, on the product's stream: a copy within a GPU may want multiprocessors, and the product
    takes them all. The others' when the product is launched, which has rows to begin with while the host asks for them.
    """
    here, beside = torch.cuda.current_stream(x.device), _copy_stream(x.device, signals.state.data_ptr())
    beside.wait_stream(here)
    own, *others = order(signals.rank, len(peers))
    _push(x, peers, signals, pieces, to=[own])

    def send() -> None:
        with torch.cuda.stream(beside):
            _push(x, peers, signals, pieces, to=others)
        here.wait_stream(beside)

    return send


def _push(
    x: torch.Tensor, peers: list[torch.Tensor], signals: Signals, pieces: int, to: list[int] | None = None
) -> None:
    rank, size = signals.rank, len(peers)
    first, last = rows_of(rank, size, peers[rank].shape[0])
    per = -(-peers[rank].shape[0] // size)
    piece = -(-per // pieces)
    for number in range(pieces):
        start, stop = (min(first + count * piece, last) for count in (number, number + 1))
        for peer in order(rank, size) if to is None else to:
            if stop > start:
                peers[peer][start:stop].copy_(x[start - first : stop - first], non_blocking=True)
            raise_flags(signals, 0, number, [peer])


def order(rank: int, size: int) -> list[int]:
    """This rank first, whose own tiles are the first to be computed, then its neighbours."""
    return [(rank + step) % size for step in range(size)]


@functools.cache
def _copy_stream(device: torch.device, channel: int) -> torch.cuda.Stream:
    """One for each channel: a group's rows do not queue behind another's."""
    return torch.cuda.Stream(device, priority=-1)
