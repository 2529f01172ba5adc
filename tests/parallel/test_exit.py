"""A process that imports shardfuse exits cleanly, even if gloo's threads still hold tensors."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardfuse.parallel.core import gloo_threads

# At exit only a gloo thread can free a tensor, and it needs Python's lock for that. The other rank comes when the first
# one no longer holds the tensor itself, and tells it so by a byte: nothing on the way releases the lock.
_SCRIPT = """
import atexit, mmap, os, sys, time, weakref

late = mmap.mmap(-1, 1)
first = os.getpid()
rank = int(os.fork() == 0)
import torch
import torch.distributed as dist

atexit.register(lambda: print("freed" if freed() is None else "held", flush=True))  # runs after shardfuse's
import shardfuse

dist.init_process_group("gloo", store=dist.FileStore(sys.argv[1], 2), rank=rank, world_size=2)
group = dist.group.WORLD  # keeps the threads, even if the group is destroyed
source = torch.ones(1)
outputs = [torch.zeros(1), torch.zeros(1)]
if rank == 1:
    while not late[0] and os.getppid() == first:
        time.sleep(0.001)
    dist.all_gather(outputs, source)
    os._exit(0)
sys.setswitchinterval(1000)  # the lock changes hands where this thread releases it, and nowhere else
freed = weakref.ref(source)
done = dist.all_gather(outputs, source, async_op=True).get_future()
del source
late[0] = 1
while not done.done():
    pass
assert freed() is not None, "gloo's thread freed the tensor before it could be seen"
"""


def _run(code: str, store: Path) -> tuple[int, str]:
    done = subprocess.run([sys.executable, "-c", code, str(store)], capture_output=True, text=True, timeout=600)
    return done.returncode, done.stdout.strip() + done.stderr.strip()


@pytest.mark.parametrize("code", [0, 3])
def test_the_interpreter_ends_after_gloos_threads_have_let_go(tmp_path: Path, code: int):
    assert _run(f"{_SCRIPT}\nsys.exit({code})", tmp_path / "store") == (code, "freed")


def _meet_late(rank: int, world: int) -> list[bool]:
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        store.wait(["looked"])
    work = dist.all_reduce(torch.ones(1), async_op=True)
    settled = [gloo_threads.settle(0.05)] if rank == 0 else []
    store.set("looked", "")
    work.wait()
    return [*settled, gloo_threads.settle()]


@pytest.mark.ranks
def test_a_collective_under_way_is_waited_for_so_long(ranks: Any):
    assert ranks(2, _meet_late) == [[False, True], [True]]


def _task(folder: Path, name: str, wait: str | None) -> None:
    (folder / name).mkdir()
    (folder / name / "comm").write_text(f"{gloo_threads.THREAD}\n")
    if wait is not None:
        (folder / name / "syscall").write_text(wait + "\n")


@pytest.mark.parametrize(
    ("waits", "settled"),
    [
        ([], True),
        (["202 0x1 0x189 0x0 0x0 0x0 0xffffffff 0x7 0x7"], True),
        (["202 0x1 0x189 0x0 0x7 0x0 0xffffffff 0x7 0x7"], False),  # for a peer or Python's lock, with a timeout
        (["202 0x1 0x189 0x0 0x0 0x0 0xffffffff 0x7 0x7", "running"], False),
        (["-1 0x7 0x7"], False),  # waiting for a page fault
        ([None], False),  # a system without this information
    ],
)
def test_idle_threads_wait_for_work_without_a_time_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, waits: list[str | None], settled: bool
):
    for number, wait in enumerate(waits):
        _task(tmp_path, str(number), wait)
    monkeypatch.setattr(gloo_threads, "TASKS", tmp_path)
    assert gloo_threads.settle(gloo_threads.LIMIT_S if settled else 0.0) == settled


def test_a_system_without_proc_has_nothing_to_look_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(gloo_threads, "TASKS", tmp_path / "missing")
    assert gloo_threads.settle()
