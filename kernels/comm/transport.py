"""How a rank's rows get to its peers: copies that cost no multiprocessor, a flag after each piece.

Between GPUs the copy engines move them, on streams of their own; on a CPU this thread does. A rank keeps its own rows
in its own slot, from where they go to all peers, piece after piece: each of them is waiting for the first. For a piece
the host makes two calls, however many peers there are: one copies its rows to all of them, the next one, on the same
stream, its flag (``kernels/runtime/copies.py``). Pieces take the streams in turn: the copies of one do not wait for
another's flags.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from functools import partial

import torch

from ..runtime import device
from ..runtime.copies import spread
from ..runtime.signals import Signals, raise_flags, raise_own_flags, rows_of

STREAMS = 2  # for one channel's copies


def pieces_for(rows: int) -> int:
    """In how many pieces to send a rank's ``rows``: each long enough to fill the tiles of a wide product."""
    return max(1, min(8, rows // 256))


def start_push(x: torch.Tensor, peers: list[torch.Tensor], signals: Signals, pieces: int) -> Callable[[], None]:
    """Push ``x``, this rank's rows of [T, D], into ``peers`` [T, D]; what is returned finishes it.

    Call it once the kernel that waits for the rows is launched, on the same stream.

    The own rows are in place at once, on the product's stream: a copy within a GPU may want multiprocessors, and the
    product takes them all. The others' leave when the product is launched, which has rows to begin with while the host
    asks for them.
    """
    keep(x, peers, signals, pieces)
    if x.is_cuda:
        return partial(_send_beside, peers, signals, pieces, torch.cuda.current_stream(x.device).record_event())
    send(peers, signals, pieces)
    return lambda: None


def keep(x: torch.Tensor, peers: list[torch.Tensor], signals: Signals, pieces: int) -> None:
    """Put this rank's rows into its own slot, and raise their flags there."""
    first, last = rows_of(signals.rank, len(peers), peers[signals.rank].shape[0])
    if last > first:
        peers[signals.rank][first:last].copy_(x, non_blocking=True)
    raise_own_flags(signals, pieces)


def send(peers: list[torch.Tensor], signals: Signals, pieces: int, streams: Sequence[torch.cuda.Stream] = ()) -> None:
    """Copy this rank's rows from its own slot to all other ranks', with a flag after each piece; on a GPU on
    ``streams``, the last of which is then the current one.
    """
    rank, size = signals.rank, len(peers)
    whole = peers[rank]
    first, last = rows_of(rank, size, whole.shape[0])
    per = -(-whole.shape[0] // size)
    piece = -(-per // pieces)
    row_bytes = whole.shape[1] * whole.itemsize
    others = order(rank, size)[1:]
    for number in range(pieces):
        if streams:
            torch.cuda.set_stream(streams[number % len(streams)])
        start, stop = (min(first + count * piece, last) for count in (number, number + 1))
        if stop > start:
            spread(peers, rank, others, start * row_bytes, (stop - start) * row_bytes)
        raise_flags(signals, 0, number, others)


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


def _send_beside(peers: list[torch.Tensor], signals: Signals, pieces: int, kept: torch.cuda.Event) -> None:
    """``send`` on the channel's streams, once the own rows are ``kept``; the current stream waits for its end."""
    here = torch.cuda.current_stream(signals.state.device)
    streams = _copy_streams(signals.state.device, signals.state.data_ptr())[:pieces]
    for stream in streams:
        stream.wait_event(kept)
    with torch.cuda.stream(streams[0]):
        send(peers, signals, pieces, streams)
    for stream in streams:
        here.wait_stream(stream)


def order(rank: int, size: int) -> list[int]:
    """This rank first, whose own tiles are the first to be computed, then its neighbours."""
    return [(rank + step) % size for step in range(size)]


@functools.cache
def _copy_streams(device: torch.device, channel: int) -> list[torch.cuda.Stream]:
    """STREAMS for each channel: a group's rows do not queue behind another's."""
    return [torch.cuda.Stream(device, priority=-1) for _ in range(STREAMS)]
