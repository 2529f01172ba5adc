"""Readers and writers of one checkpoint at the same time: nothing is mixed, and a second writer is told who writes."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from checkpoint_case import Net, assert_equal
from torch import nn

from shardfuse.parallel.checkpoint import manager, storage
from shardfuse.parallel.checkpoint.checkpoint import load_checkpoint, read_extra, save_checkpoint
from shardfuse.parallel.checkpoint.entries import full_state_dict
from shardfuse.parallel.checkpoint.manager import Checkpointer, Resumed
from shardfuse.parallel.core.mesh import tp_group


def _save(path: Path, seed: int) -> None:
    save_checkpoint(path, Net(seed=seed), extra={"seed": seed})


def _interrupt_load(monkeypatch: pytest.MonkeyPatch, act: Callable[[int], None]) -> None:
    """Call ``act`` with the number of the attempt after checksums were compared and before tensors are read."""
    load, attempts = dcp.load, iter(range(1, 1000))

    def late(*args: Any, **kwargs: Any) -> None:
        act(next(attempts))
        load(*args, **kwargs)

    monkeypatch.setattr(dcp, "load", late)


# --- readers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("times", [1, 3])
def test_a_checkpoint_that_is_replaced_while_it_is_read_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    _save(tmp_path / "c", 1)
    _interrupt_load(monkeypatch, lambda n: _save(tmp_path / "c", 1 + n) if n <= times else None)
    model = Net(seed=9)
    assert load_checkpoint(tmp_path / "c", model) == {"seed": 1 + times}
    assert_equal(full_state_dict(model), full_state_dict(Net(seed=1 + times)))


def test_an_endlessly_replaced_checkpoint_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _save(tmp_path / "c", 1)
    _interrupt_load(monkeypatch, lambda n: _save(tmp_path / "c", 1 + n))
    model = Net(seed=99)
    with pytest.raises(RuntimeError, match=r"c: other processes replaced this checkpoint 10 times while it was being "):
        load_checkpoint(tmp_path / "c", model)
    assert_equal(full_state_dict(model), full_state_dict(Net(seed=99)))


def test_a_checkpoint_that_is_removed_while_it_is_read_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _save(tmp_path / "c", 1)
    _interrupt_load(monkeypatch, lambda n: shutil.rmtree(tmp_path / "c"))
    with pytest.raises(FileNotFoundError, match="c: no such checkpoint"):
        load_checkpoint(tmp_path / "c", Net())


def test_the_latest_is_looked_up_again_when_it_was_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when a run keeps one checkpoint and an evaluation follows it."""
    load = manager.load_checkpoint
    with Checkpointer(tmp_path, keep=1) as run, Checkpointer(tmp_path) as evaluation:
        run.save(1, nn.Linear(2, 2), asynchronous=False)

        def late(*args: Any, **kwargs: Any) -> Any:
            monkeypatch.setattr(manager, "load_checkpoint", load)
            run.save(2, nn.Linear(2, 2), asynchronous=False)
            return load(*args, **kwargs)

        monkeypatch.setattr(manager, "load_checkpoint", late)
        assert evaluation.load(nn.Linear(2, 2)) == Resumed(2, {})
        with pytest.raises(FileNotFoundError, match="step-00000001: no such checkpoint"):
            evaluation.load(nn.Linear(2, 2), step=1)


def _load_twice(rank: int, world: int, path: Path) -> Any:
    """Load while rank 1 replaces the checkpoint between rank 0's look at the files and its own."""
    group = tp_group(dist.group.WORLD)
    load, calls = dcp.load, []

    def late(*args: Any, **kwargs: Any) -> None:
        calls.append(1)
        if len(calls) == 1:
            if rank == 1:
                shutil.rmtree(path)
                shutil.copytree(path.with_name("2"), path)
            dist.barrier()
        load(*args, **kwargs)

    dcp.load = late
    try:
        model = Net(group, seed=9)
        return load_checkpoint(path, model), full_state_dict(model), len(calls)
    finally:
        dcp.load = load


@pytest.mark.ranks
def test_all_ranks_read_again_together(ranks: Any, tmp_path: Path) -> None:
    _save(tmp_path / "1", 1)
    _save(tmp_path / "2", 2)
    for extra, model, calls in ranks(2, _load_twice, tmp_path / "1"):
        assert extra == {"seed": 2}
        assert_equal(model, full_state_dict(Net(seed=2)))
        assert calls == 2


# --- writers ----------------------------------------------------------------------------------------------------------

HERE = f"process {os.getpid()} on {socket.gethostname()}"


def test_a_second_writer_is_told_who_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, first, writing, go = tmp_path / "c", threading.current_thread(), threading.Event(), threading.Event()
    write = dcp.FileSystemWriter.write_data

    def late(*args: Any, **kwargs: Any) -> Any:
        if threading.current_thread() is not first:
            writing.set()
            assert go.wait(60)
        return write(*args, **kwargs)

    monkeypatch.setattr(dcp.FileSystemWriter, "write_data", late)
    thread = threading.Thread(target=_save, args=(path, 1))
    thread.start()
    try:
        assert writing.wait(60)
        with pytest.raises(RuntimeError) as caught:
            _save(path, 2)
        ways = "wait until that has ended, close its Checkpointer, or choose another path"
        assert str(caught.value) == f"{path}: {HERE} is writing it; {ways}"
        _save(tmp_path / "d", 3)  # another checkpoint is free
    finally:
        go.set()
        thread.join()
    assert read_extra(path) == {"seed": 1}
    _save(path, 2)
    assert read_extra(path) == {"seed": 2}
    assert sorted(os.listdir(tmp_path)) == ["c", "d"]


def test_a_forked_process_does_not_free_its_parents_lock(tmp_path: Path) -> None:
    """The child's own lock may get the number of the parent's open file."""
    lock = storage.WriterLock(tmp_path / ".lock", tmp_path)
    lock.acquire()
    child = os.fork()
    if child == 0:  # pragma: no cover
        try:
            own = storage.WriterLock(tmp_path / ".other", tmp_path)
            own.acquire()
            lock.release()
            os._exit(0 if (tmp_path / ".lock").exists() and (tmp_path / ".other").exists() else 3)
        except BaseException:
            os._exit(4)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    with pytest.raises(RuntimeError, match="is writing it"):
        storage.WriterLock(tmp_path / ".lock", tmp_path).acquire()
    lock.release()


def test_one_checkpointer_saves_to_a_folder_at_a_time(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    with Checkpointer(tmp_path / "run") as other:
        with Checkpointer(tmp_path / "run") as run:
            run.save(1, model, asynchronous=False)
            assert other.load(model) == Resumed(1, {})
            with pytest.raises(RuntimeError, match=f"run: {HERE} is writing it; wait until that has ended"):
                other.save(2, model)
            run.save(2, model)
        assert other.latest() == 2
        other.save(3, model)
    assert sorted(os.listdir(tmp_path / "run")) == ["step-00000002", "step-00000003"]


def test_a_checkpointer_that_is_dropped_gives_the_folder_back(tmp_path: Path) -> None:
    run = Checkpointer(tmp_path)
    run.save(1, nn.Linear(2, 2), asynchronous=False)
    del run
    with Checkpointer(tmp_path) as run:
        run.save(2, nn.Linear(2, 2))


def test_a_lock_that_cannot_be_written_is_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with Checkpointer(tmp_path / "run") as run, monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        for save in (lambda: _save(tmp_path / "c", 1), lambda: run.save(1, nn.Linear(2, 2))):
            with pytest.raises(RuntimeError, match="no space left while writing the checkpoint"):
                save()
        patch.undo()
        run.save(1, nn.Linear(2, 2))
    _save(tmp_path / "c", 1)
    assert sorted(os.listdir(tmp_path)) == ["c", "run"]


def _save_both(rank: int, world: int, folder: Path) -> list[str]:
    """Save a checkpoint c and a series; returns what each said."""
    model, said = nn.Linear(2, 2), []
    with Checkpointer(folder / "run") as run:
        for save in (lambda: save_checkpoint(folder / "c", model), lambda: run.save(1, model)):
            try:
                save()
                said.append("saved")
            except RuntimeError as error:
                said.append(str(error))
    return said


HOLD = """
import os, sys
from pathlib import Path
from shardfuse.parallel.checkpoint import storage
folder = Path(sys.argv[1])
locks = [storage.WriterLock(folder / name, folder) for name in (".c.lock", "run/.lock")]
for lock in locks:
    lock.acquire()
if os.fork():
    print(os.getpid(), flush=True)
sys.stdin.read()
"""


@pytest.mark.ranks
def test_all_ranks_refuse_and_a_killed_holder_does_not_block_the_next(ranks: Any, tmp_path: Path) -> None:
    """The holder has forked, as for a DataLoader, and the child outlives it."""
    (tmp_path / "run").mkdir()
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    assert holder.stdin is not None
    try:
        name = f"process {int(holder.stdout.readline())} on {socket.gethostname()}"
        for said in ranks(2, _save_both, tmp_path):
            assert said[0].startswith(f"{tmp_path / 'c'}: {name} is writing it")
            assert said[1].startswith(f"{tmp_path / 'run'}: {name} is writing it")
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        assert (tmp_path / ".c.lock").read_text() == (tmp_path / "run" / ".lock").read_text() == name
        assert ranks(2, _save_both, tmp_path) == [["saved", "saved"]] * 2
    finally:
        holder.kill()
        holder.stdin.close()
        holder.stdout.close()
    assert sorted(os.listdir(tmp_path)) == ["c", "run"]
    assert os.listdir(tmp_path / "run") == ["step-00000001"]


WRITE = """
import sys, time, torch
from torch import nn
from shardfuse.parallel.checkpoint.checkpoint import save_checkpoint
model, path, number, seconds = nn.Linear(300, 300), sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
end, saved, step = time.monotonic() + seconds, 0, number
while time.monotonic() < end:
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(step)
    try:
        save_checkpoint(path, model, extra={"step": step})
        saved += 1
    except RuntimeError as error:
        assert "is writing it" in str(error), error
    step += 2
print(saved)
"""


@pytest.mark.nightly
def test_two_writers_and_a_reader_in_a_race(tmp_path: Path) -> None:
    seconds, path = 20, tmp_path / "c"
    save_checkpoint(path, nn.Linear(300, 300), extra={"step": None})
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", WRITE, str(path), str(number), str(seconds)], stdout=subprocess.PIPE, text=True
        )
        for number in range(2)
    ]
    model, loaded = nn.Linear(300, 300), 0
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with contextlib.suppress(RuntimeError):  # it was replaced ten times
            step = load_checkpoint(path, model)["step"]
            loaded += 1
        if loaded and step is not None:
            assert all(torch.equal(param, torch.full_like(param, step)) for param in model.parameters())
    for writer in writers:
        out, _ = writer.communicate(timeout=60)
        assert writer.returncode == 0
        assert int(out) > 0
    assert loaded > 0
    assert os.listdir(tmp_path) == ["c"]
