"""The probe: whether symmetric memory works. It sends patterns to every peer and back, and compares each word.

Existing links may still lose or misplace writes (wrong IOMMU settings, say), so layers use symmetric memory only after
it has passed the probe. Every wait has a time limit.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import NamedTuple

import torch

from ....kernels.runtime.signals import ExchangeTimeout, raise_flags
from .backends import wait_words
from .channel import Channel
from .sizes import PROBE_WORDS

EXCHANGES = 2  # one in each slot
THERE, BACK = 0, 1  # the phases of an exchange, and the halves of a slot


class Finding(NamedTuple):
    """A failure and its step: of several ranks' findings the earliest is the cause."""

    step: int
    text: str


def run(channel: Channel, timeout_s: float) -> Finding | None:
    """Run this rank's part of a probe in ``channel``. Collective; it ends on every rank, whatever the others do."""
    deadline = time.monotonic() + timeout_s
    with _beside(channel.device):
        for exchange in range(EXCHANGES):
            try:
                finding = _exchange(channel, deadline, timeout_s, exchange)
            except ExchangeTimeout as error:  # of the rebase before it
                finding = Finding(2 * exchange, str(error))
            if finding is not None:
                return finding
    return None


@contextlib.contextmanager
def _beside(device: torch.device) -> Iterator[None]:
    """On a GPU, a stream like those of rows and flags: the default stream takes another path (``copies.py``)."""
    if device.type != "cuda":
        yield
        return
    here, stream = torch.cuda.current_stream(device), torch.cuda.Stream(device)
    stream.wait_stream(here)
    with torch.cuda.stream(stream):
        yield
    here.wait_stream(stream)


def _exchange(channel: Channel, deadline: float, timeout_s: float, exchange: int) -> Finding | None:
    """Send a row to every rank, send back the rows received, compare both. Slots are int32 [2, R, PROBE_WORDS]."""
    rank, size = channel.rank, channel.size
    peers, signals = channel.begin((2, size, PROBE_WORDS), torch.int32, op="probe")
    own = peers[rank]
    for phase in (THERE, BACK):
        for peer in range(size):
            row = _pattern(rank, peer, size, exchange, own.device) if phase == THERE else own[THERE, peer]
            peers[peer][phase, rank].copy_(row)
        raise_flags(signals, phase, 0, range(size))
        step = 2 * exchange + phase
        missing = wait_words(signals.pads[rank][phase, :, 0], channel.epoch, max(0.0, deadline - time.monotonic()))
        if missing:
            peer = min(missing)
            return Finding(
                step,
                f"rank {rank} saw no flag of rank {peer} within {timeout_s:g} s (phase {phase}, exchange "
                f"{channel.epoch}; the flag stands at {missing[peer]})",
            )
        for peer in range(size):
            route = (peer, rank) if phase == THERE else (rank, peer)
            finding = _compare(own[phase, peer], _pattern(*route, size, exchange, own.device), route, phase, step)
            if finding is not None:
                return finding
    channel.end()
    return None


def _pattern(source: int, target: int, size: int, exchange: int, device: torch.device) -> torch.Tensor:
    """int32 [PROBE_WORDS]; none of its words occurs in another pattern of the probe, or is zero."""
    first = 1 + ((exchange * size + source) * size + target) * PROBE_WORDS
    return torch.arange(first, first + PROBE_WORDS, dtype=torch.int32, device=device)


def _compare(
    seen: torch.Tensor, expected: torch.Tensor, route: tuple[int, int], phase: int, step: int
) -> Finding | None:
    wrong = (seen != expected).nonzero()
    if not len(wrong):
        return None
    word = int(wrong[0])
    return Finding(
        step,
        f"what rank {route[0]} sent to rank {route[1]} arrived {'there' if phase == THERE else 'back'} with "
        f"{len(wrong)} of {PROBE_WORDS} words wrong (word {word} is {int(seen[word])}, not {int(expected[word])})",
    )
