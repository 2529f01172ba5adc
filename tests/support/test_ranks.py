"""The pool of worker processes: an error on one rank fails the call without a retry."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytestmark = pytest.mark.ranks


def _is_alone(rank: int, world: int) -> bool:
    return rank == 0 and world == 1 and not dist.is_initialized()


def _drawn(rank: int, world: int) -> float:
    return torch.rand(()).item()


def _raises_once(rank: int, world: int, folder: Path) -> None:
    if rank == 1 and not (folder / "tried").exists():
        (folder / "tried").touch()
        raise ValueError("bad luck")
    dist.barrier()


def _dies(rank: int, world: int) -> None:
    if rank == 1:
        os._exit(7)
    dist.barrier()


def _hangs(rank: int, world: int) -> None:
    if rank == 0:
        signal.pause()


def test_what_goes_wrong_on_a_rank_fails_the_call(ranks: Any, tmp_path: Path) -> None:
    assert ranks(1, _is_alone) == [True]
    assert len({*ranks(2, _drawn), *ranks(2, _drawn)}) == 1  # every call starts from the same seed
    with pytest.raises(AssertionError, match=r"rank 1 of 3:\nTraceback[\s\S]*in _raises_once[\s\S]*: bad luck"):
        ranks(3, _raises_once, tmp_path)
    pool = type(ranks)()  # a separate one: these tests end it
    try:
        with pytest.raises(RuntimeError, match="rank 1 died with exit code 7"):
            pool(2, _dies)
        with pytest.raises(TimeoutError, match=r"ranks \[0\] of 2 did not finish within 1 s"):
            pool(2, _hangs, timeout=1.0)
    finally:
        pool.close()
