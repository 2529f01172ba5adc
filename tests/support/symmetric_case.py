"""Shared by tests of symmetric memory: a pool, an exchange by hand, a rank's error and its memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from shardfuse.kernels.runtime.signals import Signals, raise_flags
from shardfuse.parallel.core.mesh import Group, everyone
from shardfuse.parallel.overlap.memory import pool
from shardfuse.parallel.overlap.memory.backends import wait_words
from shardfuse.parallel.overlap.memory.pool import Channel, SymmetricMemoryPool

ROWS, WIDTH = 3, 5
SLOT = 4 * 4 * ROWS * WIDTH  # up to four ranks' rows in fp32
TIMEOUT_S = 60.0


@contextmanager
def counting(first_epoch: int = pool.FIRST_EPOCH, rebase_every: int = pool.REBASE_EVERY) -> Iterator[None]:
    """Pools made in the block count exchanges from ``first_epoch`` and rebase sooner, as if a long run preceded."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool, "FIRST_EPOCH", first_epoch)
        patch.setattr(pool, "REBASE_EVERY", rebase_every)
        yield


def make_pool(
    group: Group | None = None,
    *,
    first_epoch: int = pool.FIRST_EPOCH,
    rebase_every: int = pool.REBASE_EVERY,
    **options: Any,
) -> SymmetricMemoryPool:
    """The pool on the CPU from ``SymmetricMemoryPool.of``, for ``group`` or for all ranks."""
    with counting(first_epoch, rebase_every):
        return SymmetricMemoryPool.of(group or everyone(), **{"device": "cpu", "timeout_s": TIMEOUT_S, **options})


def said_by(run: Callable[[], Any], error: type[BaseException] = RuntimeError) -> str:
    """The error that ``run`` raises in a worker process."""
    with pytest.raises(error) as caught:
        run()
    return str(caught.value)


def exchange(channel: Channel, value: float, chunk: int = 0) -> tuple[Signals, torch.Tensor]:
    """An all-gather of rows full of ``value`` + rank, flags and all; (signals, what this rank got [R, ROWS, WIDTH])."""
    peers, signals = channel.begin((channel.size, ROWS, WIDTH), torch.float32, op="test")
    push(peers, signals, value, chunk)
    got = pull(peers, signals, chunk)
    channel.end()
    return signals, got


def push(peers: list[torch.Tensor], signals: Signals, value: float, chunk: int = 0) -> None:
    """Fill this rank's row at every peer with ``value`` + rank, and raise the flags."""
    for peer in peers:
        peer[signals.rank].fill_(value + signals.rank)
    raise_flags(signals, 0, chunk, range(len(peers)))


def pull(peers: list[torch.Tensor], signals: Signals, chunk: int = 0) -> torch.Tensor:
    """The data from all ranks [R, ROWS, WIDTH], after waiting for their flags."""
    assert signals.epoch is not None
    assert not wait_words(signals.pads[signals.rank][0, :, chunk], signals.epoch, TIMEOUT_S)
    return peers[signals.rank].clone()


def expected_rows(size: int, value: float) -> torch.Tensor:
    """The result of an exchange on every rank [size, ROWS, WIDTH]."""
    return (value + torch.arange(size)).reshape(size, 1, 1).expand(size, ROWS, WIDTH)


def run_exchanges(channel: Channel, count: int) -> list[int | None]:
    """Run exchanges and check their data; returns their epochs."""
    epochs = []
    for step in range(count):
        signals, got = exchange(channel, 10.0 * step, chunk=step % 3)
        assert torch.equal(got.cpu(), expected_rows(channel.size, 10.0 * step)), f"step {step}"
        epochs.append(signals.epoch)
    return epochs


def memory_held() -> tuple[int, int]:
    """(file descriptors, mappings) of symmetric memory in this process."""
    files = []
    for entry in os.scandir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # a gloo thread may have closed its socket since
            files.append(os.readlink(entry.path))
    mappings = Path("/proc/self/maps").read_text().count("/memfd:shardfuse")
    return sum("memfd:shardfuse" in file for file in files), mappings
