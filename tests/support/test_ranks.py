"""The pool of worker processes itself: it says what happened on which rank, never hangs, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytestmark = pytest.mark.ranks


@pytest.fixture
def pool(ranks: Any) -> Iterator[Any]:
    """A pool of its own, for tests that end one."""
    pool = type(ranks)()
    yield pool
    pool.close()


def _who(rank: int, world: int, factor: int, *, offset: int = 0) -> tuple[int, int, int, torch.Tensor]:
    total = torch.tensor([rank * factor + offset])
    if world > 1:
        dist.all_reduce(total)
    return os.getpid(), rank, world, total


def test_results_come_in_order_of_rank_and_processes_are_reused(ranks: Any) -> None:
    first = ranks(3, _who, 10, offset=1)
    again = ranks(3, _who, 10, offset=1)
    pair = ranks(2, _who, 10)
    assert [(rank, world, int(total)) for _, rank, world, total in first] == [(0, 3, 33), (1, 3, 33), (2, 3, 33)]
    assert [pid for pid, *_ in again] == [pid for pid, *_ in first]
    assert [(pid, int(total)) for pid, _, _, total in pair] == [(pid, 10) for pid, *_ in first[:2]]


def _is_alone(rank: int, world: int) -> bool:
    return rank == 0 and world == 1 and not dist.is_initialized()


def test_a_world_of_one_has_no_process_group(ranks: Any) -> None:
    assert ranks(1, _is_alone) == [True]


def _seeded(rank: int, world: int) -> float:
    return torch.rand(()).item()


def test_every_call_starts_from_the_same_seed_on_every_rank(ranks: Any) -> None:
    drawn = ranks(2, _seeded) + ranks(2, _seeded)
    assert len(set(drawn)) == 1


def _one_raises(rank: int, world: int) -> None:
    if rank == 1:
        raise ValueError("bad luck")
    dist.barrier()


def test_a_rank_that_raises_stops_the_others(ranks: Any) -> None:
    before = [pid for pid, *_ in ranks(3, _who, 1)]
    with pytest.raises(
        AssertionError, match=r"rank 1 of 3:\nTraceback[\s\S]*in _one_raises[\s\S]*ValueError: bad luck"
    ):
        ranks(3, _one_raises)
    assert [pid for pid, *_ in ranks(3, _who, 1)] == before


def _one_dies(rank: int, world: int) -> None:
    if rank == 1:
        os._exit(7)
    dist.barrier()


def _one_hangs(rank: int, world: int) -> None:
    if rank == 0:
        signal.pause()


def test_dead_and_hanging_ranks_end_the_pool_and_the_next_call_starts_another(pool: Any) -> None:
    before = [pid for pid, *_ in pool(2, _who, 1)]
    with pytest.raises(RuntimeError, match="rank 1 died with exit code 7"):
        pool(2, _one_dies)
    with pytest.raises(TimeoutError, match=r"ranks \[0\] of 2 did not finish within 1 s"):
        pool(2, _one_hangs, timeout=1.0)
    after = [pid for pid, *_ in pool(2, _who, 1)]
    assert not set(before) & set(after)
    assert not any(_alive(pid) for pid in before)


def test_only_functions_that_workers_can_find(ranks: Any) -> None:
    with pytest.raises(ValueError, match="a module-level function"):
        ranks(2, lambda rank, world: None)


def _loses(rank: int, world: int, folder: Path, message: str) -> int:
    """Fails the first time, on rank 1."""
    tried = folder / f"{rank}"
    if rank == 1 and not tried.exists():
        tried.touch()
        raise RuntimeError(message)
    return os.getpid()


def test_a_connection_lost_while_connecting_is_made_once_more(ranks: Any, tmp_path: Path, capfd: Any) -> None:
    """By other workers, and it is said. Any other error is the test's."""
    lost = "Gloo connectFullMesh failed with Connection closed by peer"
    assert len(set(ranks(2, _loses, tmp_path, lost))) == 2
    assert "_loses, which runs once more" in capfd.readouterr().err
    (tmp_path / "1").unlink()
    with pytest.raises(AssertionError, match="rank 1 of 2"):
        ranks(2, _loses, tmp_path, "something else")


def test_workers_end_with_the_process_that_started_them(tmp_path: Path) -> None:
    """Even where it is killed. No shared memory stays behind either."""
    shared = set(os.listdir("/dev/shm"))
    script = tmp_path / "parent.py"
    script.write_text(
        textwrap.dedent(f"""
            import importlib.util, os, signal
            spec = importlib.util.spec_from_file_location("ranks", {str(Path(__file__).with_name("ranks.py"))!r})
            ranks = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(ranks)

            def body(rank, world):
                return os.getpid()

            if __name__ == "__main__":
                print(*ranks.Pool()(2, body), flush=True)
                os.kill(os.getpid(), signal.SIGKILL)
        """)
    )
    parent = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=300)
    assert parent.returncode == -signal.SIGKILL, parent.stderr
    workers = [int(pid) for pid in parent.stdout.split()]
    assert len(workers) == 2
    deadline = time.monotonic() + 30
    while any(_alive(pid) for pid in workers):
        assert time.monotonic() < deadline, f"{workers} live on"
        os.sched_yield()
    assert set(os.listdir("/dev/shm")) <= shared


def _alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"
