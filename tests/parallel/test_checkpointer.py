"""A run's checkpoints: asynchronous writes, atomicity, the number kept, and exact resumption."""

from __future__ import annotations

import os
import pickle
import resource
import signal
import subprocess
import sys
import threading
from collections import Counter, OrderedDict
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_case import Exploit
from torch import nn

from shardfuse.parallel.checkpoint import checkpoint, storage, tensor_files
from shardfuse.parallel.checkpoint.checkpoint import load_checkpoint, save_checkpoint
from shardfuse.parallel.checkpoint.manager import Checkpointer, Resumed
from shardfuse.parallel.checkpoint.rng_state import gather_random, pack, unpack
from shardfuse.parallel.core.rendezvous import init_mesh
from shardfuse.parallel.data import data_loader


def _model(seed: int = 0) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))


def _names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def _equal(model: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(value, other.state_dict()[name]) for name, value in model.state_dict().items())


# --- resuming ---------------------------------------------------------------------------------------------------------


class _Run:
    """A small training with all kinds of state: dropout, a sampler, a schedule."""

    def __init__(self, seed: int) -> None:
        self.model = _model(seed)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.schedule = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [2, 5, 9], gamma=0.5)
        data = torch.randn(20, 4, generator=torch.Generator().manual_seed(1))
        self.loader: Any = data_loader(data, batch_size=3, seed=7)  # type: ignore[arg-type]
        self.states = {"sampler": self.loader.sampler, "schedule": self.schedule}

    def train(self, steps: int) -> list[float]:
        losses: list[float] = []
        while len(losses) < steps:
            for batch in self.loader:
                loss = self.model(batch).square().mean()
                loss.backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
                self.schedule.step()
                losses.append(loss.item())
                if len(losses) == steps:
                    break
        return losses


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path: Path, asynchronous: bool) -> None:
    torch.manual_seed(11)
    want = _Run(seed=0).train(16)

    torch.manual_seed(11)
    first = _Run(seed=0)
    with Checkpointer(tmp_path) as run:
        assert run.latest() is None
        assert run.load(first.model, first.optimizer, states=first.states) is None
        losses = first.train(8)
        run.save(8, first.model, first.optimizer, {"note": "x"}, states=first.states, asynchronous=asynchronous)
        first.train(3)  # steps after a save are not in it

    torch.manual_seed(99)
    second = _Run(seed=5)
    second.train(2)
    with Checkpointer(tmp_path) as run:
        assert run.load(second.model, second.optimizer, states=second.states) == Resumed(8, {"note": "x"})
    assert losses + second.train(8) == want


def test_a_save_holds_what_was_there_when_it_was_called(tmp_path: Path, monkeypatch: Any) -> None:
    """The test delays the write until the model has changed."""
    changed = threading.Event()
    write = tensor_files.Writer.write_data

    def late(*args: Any, **kwargs: Any) -> Any:
        assert changed.wait(60)
        return write(*args, **kwargs)

    monkeypatch.setattr(tensor_files.Writer, "write_data", late)
    model, before = _model(), _model()
    extra = {"losses": [1.0]}
    with Checkpointer(tmp_path) as run:
        run.save(1, model, extra=extra)
        extra["losses"].append(2.0)
        with torch.no_grad():
            for param in model.parameters():
                param.fill_(7)
        assert not run.path(1).exists()
        changed.set()
        assert run.load(model) == Resumed(1, {"losses": [1.0]})
    assert _equal(model, before)


def test_the_thread_works_on_this_ranks_gpu(tmp_path: Path, monkeypatch: Any) -> None:
    chosen = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_rng_state", torch.get_rng_state)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: chosen.append((device, threading.current_thread())))
    with Checkpointer(tmp_path) as run:
        run.save(1, _model())
    assert [device for device, _ in chosen] == [3]
    assert chosen[0][1] is not threading.current_thread()


def test_a_save_starts_no_gpu_that_is_not_in_use(monkeypatch: Any) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert gather_random(None, checkpoint.everyone())["0/1"].keys() == {"cpu"}


def test_what_is_not_asked_for_is_left_alone(tmp_path: Path) -> None:
    run = _Run(seed=0)
    run.train(4)
    save_checkpoint(tmp_path / "c", run.model, run.optimizer, states=run.states)
    other = _Run(seed=1)
    load_checkpoint(tmp_path / "c", other.model, states={"schedule": other.schedule})
    assert other.schedule.last_epoch == 4
    assert other.loader.sampler.consumed == 0
    assert not other.optimizer.state


# --- retention --------------------------------------------------------------------------------------------------------


def test_the_last_few_are_kept_and_the_last_written_is_the_latest(tmp_path: Path) -> None:
    with Checkpointer(tmp_path / "runs" / "a", keep=2) as run:
        for step in (10, 20, 30):
            run.save(step, _model(step))
        assert run.latest() == 30
        assert _names(run.folder) == [".lock", "step-00000020", "step-00000030"]
        assert run.load(_model(), step=20) == Resumed(20, {})
        run.save(25, _model(25))  # gone back to 20
        assert run.latest() == 25
        assert _names(run.folder) == [".lock", "step-00000025", "step-00000030"]
        run.save(30, _model(31))  # again: replaced
        model = _model()
        assert run.load(model) == Resumed(30, {})
        assert _equal(model, _model(31))
    assert _names(run.folder) == ["step-00000025", "step-00000030"]


def test_all_can_be_kept(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, keep=None) as run:
        for step in range(4):
            run.save(step, _model())
    assert len(_names(tmp_path)) == 4


def test_other_peoples_files_stay(tmp_path: Path) -> None:
    """They stay even in a checkpoint that is due for removal."""
    others = ["notes.txt", ".other.removed", ".other.writing-1", "step-final"]
    for name in others[:1]:
        (tmp_path / name).write_text("")
    for name in others[1:]:
        (tmp_path / name).mkdir()
    with Checkpointer(tmp_path, keep=1) as run:
        run.save(1, _model(), asynchronous=False)
        (run.path(1) / "notes.txt").write_text("")
        run.save(2, _model())
        run.save(3, _model())
        assert run.latest() == 3
    assert _names(tmp_path) == sorted([*others, "step-00000001", "step-00000003"])


def test_threads_end_with_the_checkpointer(tmp_path: Path) -> None:
    before = threading.active_count()
    with Checkpointer(tmp_path) as run:
        run.save(1, _model())
    assert threading.active_count() == before


# --- failures ---------------------------------------------------------------------------------------------------------

KILLED = """
import sys, threading, torch
from torch import nn
from shardfuse.parallel.checkpoint import storage, tensor_files
from shardfuse.parallel.checkpoint.manager import Checkpointer

moment, folder = sys.argv[1:]

def stop(*args, **kwargs):
    print("there", flush=True)
    threading.Event().wait()

run, model = Checkpointer(folder), nn.Linear(2, 2)
run.save(1, model, asynchronous=False)
if moment == "data":
    tensor_files.Writer.write_data = stop
elif moment == "manifest":
    storage.write_manifest = stop
else:
    storage.publish = stop
run.save(2, model)
run.wait()
"""


NIGHTLY = [pytest.param(moment, marks=pytest.mark.nightly) for moment in ("data", "manifest")]


@pytest.mark.parametrize("moment", ["rename", *NIGHTLY])
def test_a_process_killed_while_saving_leaves_the_checkpoint_before(tmp_path: Path, moment: str) -> None:
    process = subprocess.Popen([sys.executable, "-c", KILLED, moment, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "there\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    *locks, writing, before = _names(tmp_path)
    assert (locks, before) == ([".lock", ".step-00000002.lock"], "step-00000001")
    assert writing.startswith(".step-00000002.writing-")

    with Checkpointer(tmp_path) as run:
        assert run.load(nn.Linear(2, 2)) == Resumed(1, {})
        run.save(3, nn.Linear(2, 2))
    assert _names(tmp_path) == ["step-00000001", "step-00000003"]


LOST = """
import os, signal, sys
import torch.distributed as dist
from torch import nn
from shardfuse.parallel.checkpoint import storage, tensor_files
from shardfuse.parallel.checkpoint.manager import Checkpointer

rank, folder, store = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
run, model = Checkpointer(folder), nn.Linear(2, 2)
run.save(1, model, asynchronous=False)
if rank == 1:
    tensor_files.Writer.write_data = lambda *args, **kwargs: os.kill(os.getpid(), signal.SIGKILL)
run.save(2, model)
try:
    run.wait()
except RuntimeError as error:
    print(error, flush=True)
os._exit(0)
"""


@pytest.mark.nightly
def test_the_other_ranks_hear_of_one_that_was_killed_while_saving(tmp_path: Path) -> None:
    arguments = [str(tmp_path / "run"), str(tmp_path / "store")]
    processes = [
        subprocess.Popen([sys.executable, "-c", LOST, str(rank), *arguments], stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    said = [process.communicate(timeout=300)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, -signal.SIGKILL]
    assert "has another rank of the group ended" in said[0]
    with Checkpointer(tmp_path / "run") as run:
        assert run.load(nn.Linear(2, 2)) == Resumed(1, {})


def _full_disk(rank: int, world: int, folder: Path) -> list[str]:
    """One rank's disk is full during the second checkpoint; returns each call's error."""
    big = nn.Linear(200, 200)
    said = []
    with Checkpointer(folder) as run:
        run.save(1, big)
        run.wait()
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        if rank == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
        try:
            mine = nn.Module()
            mine.register_parameter(f"rank{rank}", nn.Parameter(torch.zeros(200, 200)))  # as in stages
            run.save(2, mine)
            run.wait()
        except RuntimeError as error:
            said.append(str(error))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        said.append(str(run.load(big)))
        run.save(3, mine)
        said.append(str(run.latest()))
    return said


@pytest.mark.ranks
def test_every_rank_hears_of_a_failed_write_and_goes_on(ranks: Any, tmp_path: Path) -> None:
    for failure, loaded, latest in ranks(2, _full_disk, tmp_path):
        assert "step-00000002: no space left on rank 1 while writing the checkpoint" in failure
        assert loaded == "Resumed(step=1, extra={})"
        assert latest == "3"
    assert _names(tmp_path) == ["step-00000001", "step-00000003"]


def test_a_failed_write_shows_at_the_next_call(tmp_path: Path, monkeypatch: Any) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    run = Checkpointer(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(tensor_files.Writer, "write_data", fail)
        run.save(1, _model())
        with pytest.raises(RuntimeError, match="step-00000001: no space left while writing"):
            run.save(2, _model())
    run.save(2, _model())
    assert run.latest() == 2
    run.close()


def test_a_damaged_checkpoint_is_refused_by_name(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as run:
        for step in (1, 2):
            run.save(step, _model(step))
        run.wait()
        data = run.path(2) / "__0_0.distcp"
        data.write_bytes(data.read_bytes()[:-1])
        with pytest.raises(ValueError, match=r"step-00000002/__0_0.distcp: cut short"):
            run.load(_model())
        (run.path(2) / storage.MANIFEST).write_text("{")
        with pytest.raises(ValueError, match=r"step-00000002/checkpoint.json: cut short or corrupt"):
            run.load(_model())
        assert run.load(_model(), step=1) == Resumed(1, {})
        with pytest.raises(FileNotFoundError, match="step-00000007: no such checkpoint"):
            run.load(_model(), step=7)


def test_an_unreadable_checkpoint_counts_unless_a_later_one_is_good(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, keep=2) as run:
        run.save(1, _model(), asynchronous=False)
        (run.path(1) / storage.MANIFEST).write_text("{")
        with pytest.raises(ValueError, match=r"step-00000001/checkpoint.json: cut short or corrupt"):
            run.latest()
        for step in (2, 3, 4):
            run.save(step, _model())
        assert run.latest() == 4
        assert run.load(_model()) == Resumed(4, {})
    assert _names(tmp_path) == ["step-00000001", "step-00000003", "step-00000004"]


def _timeout(rank: int, world: int, folder: Path) -> float:
    init_mesh(dp=world, device_type="cpu", timeout=timedelta(seconds=77))
    with Checkpointer(folder) as run:
        return run._ranks.pg._get_backend(torch.device("cpu")).options._timeout.total_seconds()  # type: ignore[union-attr]


@pytest.mark.ranks
def test_writing_waits_as_long_as_the_run_does(ranks: Any, tmp_path: Path) -> None:
    assert ranks(2, _timeout, tmp_path) == [77.0, 77.0]


def test_bad_arguments(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="keep=0: expected at least 1"):
        Checkpointer(tmp_path, keep=0)
    with Checkpointer(tmp_path) as run:
        with pytest.raises(ValueError, match="step=-1: expected"):
            run.save(-1, _model())
        with pytest.raises(ValueError, match="that name is taken"):
            run.save(1, _model(), states={"random": _Run(0).schedule})
        with pytest.raises(ValueError, match="extra must be JSON"):
            run.save(1, _model(), extra={"seed": torch.ones(1)})
        run.save(1, _model())
        with pytest.raises(ValueError, match=r"holds no state of 'schedule' \(but of: 'random'\)"):
            run.load(_model(), states={"schedule": _Run(0).schedule})
    assert _names(tmp_path) == ["step-00000001"]


# --- states -----------------------------------------------------------------------------------------------------------


def test_states_come_back_as_they_were() -> None:
    """Including integer keys, which JSON would turn into strings, and milestones, which are a Counter."""
    state = {
        1: "a",
        "t": (1, 2.5, None, True, float("inf"), 1 << 80, 2j),
        "nested": [{"x": {2: True}}, set(), frozenset({(1, "\ud800")}), b"\0", bytearray(b"x")],
        None: OrderedDict(b=1, a=2),
        "count": Counter([3, 3, 5]),
        ("of", "torch"): [torch.Size([2, 3]), torch.bfloat16, torch.device("cuda:1")],
    }
    tensors = [torch.arange(3, dtype=torch.int16), torch.ones(2, 3).t(), torch.tensor(True), torch.empty(0, 2)]
    again = unpack("it", pack("it", {**state, "tensors": tensors}))
    for got, want in zip(again.pop("tensors"), tensors, strict=True):
        assert got.dtype == want.dtype
        assert torch.equal(got, want)
    assert again == state
    assert [type(each) for each in again.values()] == [type(each) for each in state.values()]
    assert list(again[None]) == ["b", "a"]


def _packed(text: str, elements: bytes = b"") -> torch.Tensor:
    data = text.encode()
    return torch.frombuffer(bytearray(len(data).to_bytes(8, "little") + data + elements), dtype=torch.uint8)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[1]",
        "{}",
        '{"list": [1], "tuple": []}',
        '{"list": 1}',
        '{"dict": [1]}',
        '{"dict": [[{"list": []}, 1]]}',
        '{"getattr": ["os", "system"]}',
        '{"dtype": ["nn"]}',
        '{"device": ["moon"]}',
        '{"bytes": ["?"]}',
        '{"Size": ["x"]}',
        '{"tensor": ["float32", [2], 0]}',
        '{"tensor": ["float32", [-1], 0]}',
        '{"tensor": ["float32", [1], -4]}',
        '{"tensor": ["float32", [1]]}',
        '{"tensor": ["qint8", [1], 0]}',
        '{"list": [' * 10_000 + "]}" * 10_000,
    ],
    ids=lambda text: text[:24],
)
def test_bytes_that_are_not_plain_data_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="the state of 'it' is not plain data: "):
        unpack("it", _packed(text, b"1234"))


def test_random_states_that_are_not_are_refused(tmp_path: Path) -> None:
    class Other:
        def state_dict(self) -> Any:
            return {"0/1": {"cpu": torch.zeros(3, dtype=torch.uint8)}}

    snapshot = checkpoint.take_snapshot(_model(), states={"random": Other()}, ranks=checkpoint.everyone())
    checkpoint.write_snapshot(tmp_path / "step-00000001", snapshot, checkpoint.everyone())
    with Checkpointer(tmp_path) as run, pytest.raises(ValueError, match="they are not the states of torch's gener"):
        run.load(_model())


class _Rule:
    def __call__(self, step: int) -> float:
        return 0.5


def test_a_state_that_is_more_than_data_is_refused_when_saving(tmp_path: Path) -> None:
    model = _model()
    schedule = torch.optim.lr_scheduler.LambdaLR(torch.optim.SGD(model.parameters(), lr=1.0), _Rule())
    schedule.rule = _Rule()  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=r"states\['schedule'\]: its state_dict\(\) holds something that cannot"):
        save_checkpoint(tmp_path / "c", model, states={"schedule": schedule})
    assert _names(tmp_path) == []


def test_loading_runs_no_code_from_a_state(tmp_path: Path) -> None:
    class Evil:
        def state_dict(self) -> Any:
            return {}

        def load_state_dict(self, state: Any) -> None:
            raise AssertionError(f"got {state}")

    model, evil = _model(), Evil()
    blob = torch.frombuffer(bytearray(pickle.dumps(Exploit(tmp_path / "pwned"), protocol=2)), dtype=torch.uint8)
    snapshot = checkpoint.take_snapshot(model, states={"evil": evil}, ranks=checkpoint.everyone())
    snapshot.tensors["state.evil"] = blob
    checkpoint.write_snapshot(tmp_path / "c", snapshot, checkpoint.everyone())
    with pytest.raises(ValueError, match=r"c: the state of 'evil' is not plain data"):
        load_checkpoint(tmp_path / "c", model, states={"evil": evil})
    assert not (tmp_path / "pwned").exists()


def _draws(rank: int, world: int, folder: Path) -> dict[str, float]:
    """Each layout's draws after loading a checkpoint of dp=2, tp=2, and the saver's own next draws."""
    drawn = {}
    mesh = init_mesh(dp=2, tp=2, device_type="cpu")
    torch.manual_seed(mesh["dp"].get_local_rank() + 40)  # type: ignore[index]
    torch.rand(3)
    with Checkpointer(folder, mesh=mesh) as run:
        run.save(1, nn.Linear(2, 2))
        drawn["on"] = torch.rand(()).item()
        run.load(nn.Linear(2, 2))
        drawn["same"] = torch.rand(()).item()
    for name, degrees in {"dp": {"dp": 4}, "tp": {"tp": 4}, "pp": {"dp": 2, "pp": 2}}.items():
        with Checkpointer(folder, mesh=init_mesh(**degrees, device_type="cpu")) as run:
            run.load(nn.Linear(2, 2))
            drawn[name] = torch.rand(()).item()
    return drawn


@pytest.mark.ranks
def test_random_states_follow_the_data(ranks: Any, tmp_path: Path) -> None:
    drawn = ranks(4, _draws, tmp_path)
    by_layout = {name: [each[name] for each in drawn] for name in drawn[0]}
    assert by_layout["same"] == by_layout["on"] == by_layout["pp"]
    assert len(set(by_layout["on"])) == 2
    assert len(set(by_layout["dp"])) == 4  # one share per rank: new, different seeds
    assert len(set(by_layout["tp"])) == 1


# --- ZeroRedundancyOptimizer ------------------------------------------------------------------------------------------


def _zero_redundancy(rank: int, world: int, folder: Path, load: bool, steps: int) -> list[float]:
    """Replicas with equal batches and sharded optimizer state, or a single process with AdamW."""
    from torch.distributed.optim import ZeroRedundancyOptimizer  # its import warns about other code

    model = _model(3 if load else 0).eval()
    if world == 1:
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.5)
    else:
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.5)
    if load:
        load_checkpoint(folder, model, optimizer)
    assert optimizer.param_groups[0]["lr"] == (0.05 if load else 0.5)
    optimizer.param_groups[0]["lr"] = 0.05
    losses = []
    for _ in range(steps):
        loss = model(torch.linspace(-1, 1, 12).view(3, 4)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if not load:
        save_checkpoint(folder, model, optimizer)
    return losses


@pytest.mark.ranks
def test_a_zero_redundancy_optimizer_saves_and_loads_all_of_its_state(ranks: Any, tmp_path: Path) -> None:
    want = ranks(1, _zero_redundancy, tmp_path / "alone", False, 6)[0]
    for name, before, after in (("split", 2, 1), ("again", 1, 2)):
        losses = ranks(before, _zero_redundancy, tmp_path / name, False, 3)[0]
        for rest in ranks(after, _zero_redundancy, tmp_path / name, True, 3):
            assert losses + rest == want
