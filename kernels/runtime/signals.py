"""How ranks tell each other that data has arrived: flags in symmetric memory.

An *exchange* is one use of a channel by all its ranks. In exchange ``e`` rank s writes data into the memory of its
peers, then raises a flag there: it stores ``e`` in word [phase, s, chunk] of the peer's pad, with release semantics at
system scope. The peer spins, with acquire semantics, until the word has reached ``e``, and reads. Flags are never
reset, so none can be missed and none has to be waited for to go away; "reached" is a signed comparison that survives
the wrap of 32 bits. docs/overlap.md has the whole protocol, ``signals_triton.py`` the kernels' side of it.

Who makes exchanges is ``parallel/overlap/memory/pool.py``. Here is what a kernel and its launcher need to know of one.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import NamedTuple

import torch

from .copies import spread

PHASES = 2  # a two-shot all-reduce exchanges twice: addends, then sums
CHUNKS = 64  # flags for each phase and source

REPORT = 8  # words of a report: whether there is one, phase, peer, chunk, epoch, the flag as it was last seen
STATE = 256  # words of a channel's own state
EPOCH, GAVE_UP, DONE, RANK, SIZE, LIMIT_MS, COUNTERS = 0, 1, 2, 3, 4, 5, 64  # in it; a counter for each destination
MAX_RANKS = STATE - COUNTERS


class Signals(NamedTuple):
    """The synchronising half of one exchange, as one rank sees it; the data half is ``peers``, views of the slots."""

    rank: int
    epoch: int | None  # of this exchange; None where the device counts (word EPOCH of ``state`` has the last one's)
    pads: list[torch.Tensor]  # each rank's flags, int32 [PHASES, R, CHUNKS]
    table: torch.Tensor  # int64 [2, R], on the device: the addresses of ``peers`` and of ``pads``
    state: torch.Tensor  # int32 [STATE], on the device, this rank's alone; from new_state()
    report: torch.Tensor  # int32 [REPORT], which the host can read without waiting for the device
    timeout_s: float  # how long a wait may take


class Gathered(NamedTuple):
    """A GEMM whose rows of A arrive from the ranks that own them: its tiles wait for the pieces they touch."""

    peers: list[torch.Tensor]  # [T, K] each; this rank's is A
    signals: Signals
    pieces: int  # in which each rank's rows arrive, one flag each


class Scattered(NamedTuple):
    """A GEMM whose rows of C are addends: they go to the ranks that own them."""

    peers: list[torch.Tensor]  # [R, rows of a rank, N] each, by source
    signals: Signals


Remote = Gathered | Scattered


def new_state(rank: int, size: int, timeout_s: float, device: torch.device | str) -> torch.Tensor:
    """A channel's own state at its beginning, int32 [STATE]. ValueError for more ranks than it has counters for."""
    if size > MAX_RANKS:
        raise ValueError(f"{size} ranks share a channel: it has counters for {MAX_RANKS}; split the group")
    words = [0] * STATE
    words[RANK], words[SIZE], words[LIMIT_MS] = rank, size, max(1, round(timeout_s * 1e3))
    return torch.tensor(words, dtype=torch.int32, device=device)


def in_one_process(peers: list[torch.Tensor], *, timeout_s: float, epoch: int | None = 1) -> list[Signals]:
    """Signals of every rank for ``peers`` on one device, all in this process: for tests and timings of one GPU."""
    size, device = len(peers), peers[0].device
    pads = [torch.zeros(PHASES, size, CHUNKS, dtype=torch.int32, device=device) for _ in peers]
    table = torch.tensor([[t.data_ptr() for t in tensors] for tensors in (peers, pads)], device=device)
    reports = [torch.zeros(REPORT, dtype=torch.int32, pin_memory=device.type == "cuda") for _ in peers]
    states = [new_state(rank, size, timeout_s, device) for rank in range(size)]
    return [Signals(rank, epoch, pads, table, states[rank], reports[rank], timeout_s) for rank in range(size)]


def raise_flags(signals: Signals, phase: int, chunk: int, to: Sequence[int]) -> None:
    """Raise this rank's flag [phase, own, chunk] at the ranks ``to``, after all that its thread or stream wrote.

    On a GPU no kernel writes it: one that spins may hold every multiprocessor. The stream's front end raises the own
    flag, and copy engines take its value to the peers, because since CUDA 13.1 a stream writes to its own GPU alone
    (github.com/NVIDIA/nccl/issues/2052). So the own flag has to be up where ``to`` leaves it out.
    """
    assert signals.epoch is not None
    index = _flag_index(signals, phase, chunk)
    own = signals.pads[signals.rank]
    if not own.is_cuda:
        fence()
        for peer in to:
            signals.pads[peer].view(-1)[index] = signals.epoch
        return
    peers = [peer for peer in to if peer != signals.rank]
    if signals.rank in to:
        torch.ops.symm_mem.stream_write_value32_(own.view(-1).view(torch.uint32), index, signals.epoch % 2**32)
    spread(signals.pads, signals.rank, peers, 4 * index, 4)


def raise_own_flags(signals: Signals, chunks: int) -> None:
    """Raise this rank's flags [0, own, 0 .. chunks - 1] at itself, after all that its thread or stream wrote."""
    assert signals.epoch is not None
    index = _flag_index(signals, 0, 0)
    own = signals.pads[signals.rank].view(-1)
    if not own.is_cuda:
        fence()
    own[index : index + chunks].fill_(signals.epoch)


def _flag_index(signals: Signals, phase: int, chunk: int) -> int:
    """Where in a pad this rank's flag is."""
    return (phase * len(signals.pads) + signals.rank) * CHUNKS + chunk


_lock = threading.Lock()


def fence() -> None:
    """Earlier writes of this thread become visible before later ones: unlocking releases, locking again acquires."""
    for _ in range(2):
        with _lock:
            pass


class ExchangeTimeout(RuntimeError, TimeoutError):
    """A rank waited for a peer longer than it may."""


def following(epoch: int) -> int:
    """The epoch after ``epoch``: 1, 2, ..., 2^31 - 1, -2^31, ..., -1, 0, 1, ..."""
    return (epoch + 1 + 2**31) % 2**32 - 2**31


def reached(flag: int, epoch: int) -> bool:
    """Whether a flag says that exchange ``epoch`` has come: what kernels compute in wrapping 32-bit arithmetic."""
    return (flag - epoch + 2**31) % 2**32 - 2**31 >= 0


def describe(report: torch.Tensor, rank: int, doing: str) -> str | None:
    """What the first wait that ran out of time was waiting for; None if none did."""
    claimed, phase, peer, chunk, epoch, seen, *_ = report.tolist()
    if not claimed:
        return None
    what = ("data", "sums")[phase]
    return (
        f"{doing}: rank {rank} waited in vain for {what} from rank {peer} (chunk {chunk}, exchange {epoch}; its flag "
        f"stands at {seen}); that rank has died, hangs, or makes other calls than this one: look at its output first"
    )


def rows_of(rank: int, size: int, rows: int) -> tuple[int, int]:
    """[first, last) of ``rows`` that are ``rank``'s of ``size``: equal parts, rounded up, the last short or empty."""
    per = -(-rows // size)
    return min(rank * per, rows), min((rank + 1) * per, rows)


def own_rows(rows: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    """Those of ``rows`` that are ``rank``'s of ``size``."""
    first, last = rows_of(rank, size, rows.shape[0])
    return rows[first:last]
