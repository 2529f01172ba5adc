"""Starting worker processes: results, errors, ports, and no process that outlives its parent."""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from shardfuse.training import launch as launching
from shardfuse.training.launch import PortError, WorkerError, launch

_SUPPORT = str(Path(__file__).parents[1] / "support")


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Any:
    """tests/support/launched.py, importable here and in the workers."""
    monkeypatch.syspath_prepend(_SUPPORT)
    monkeypatch.setenv("PYTHONPATH", _SUPPORT, prepend=os.pathsep)
    return importlib.import_module("launched")


def test_results_come_back_in_order_of_rank(launched: Any):
    assert launch(launched.who, {"a": 1}, processes=3) == [(rank, 3, {"a": 1}) for rank in range(3)]


@pytest.mark.ranks
def test_ranks_meet_on_the_loopback_interface(launched: Any):
    assert launch(launched.all_reduce_of_ranks, processes=2) == [3.0, 3.0]


def test_environment_of_a_worker(launched: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")  # another job's
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    names = ("GLOO_SOCKET_IFNAME", "MASTER_ADDR", "OMP_NUM_THREADS", "LOCAL_RANK")
    (seen,) = launch(launched.environment, *names, processes=1, threads=3)
    assert seen == {"GLOO_SOCKET_IFNAME": "lo", "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "3", "LOCAL_RANK": "0"}


@pytest.mark.parametrize("rank", [0, 1])
def test_error_of_a_worker_is_one_line(launched: Any, rank: int):
    with pytest.raises(WorkerError, match=f"^rank {rank}: ValueError: two words$") as caught:
        launch(launched.raise_on, rank, "two\n words", processes=2)
    assert caught.value.kind == "ValueError"
    assert "launched.py" in caught.value.trace


def test_killed_worker_is_named(launched: Any):
    with pytest.raises(WorkerError, match=r"^rank 1 was killed by SIGKILL \(out of memory\?\)$"):
        launch(launched.die_on, 1, signal.SIGKILL, processes=2)


def test_killed_worker_is_told_from_one_that_the_launch_had_to_kill(launched: Any):
    with pytest.raises(WorkerError, match=r"^rank 1 was killed by SIGKILL \(out of memory\?\)$"):
        launch(launched.die_on, 1, signal.SIGKILL, True, processes=2)


@pytest.mark.ranks
def test_frozen_worker_is_named_soon_after_the_timeout(launched: Any, tmp_path: Path):
    case = importlib.import_module("train_case")
    settings = case.settings(tmp_path / "out", 2, parallel={"tp": 2}, timeout=240)
    mark = tmp_path / "frozen"
    error = r"^rank 1: CollectiveError: \S+: \w+ failed.*; rank 0 did not respond and was ended$"
    with pytest.raises(WorkerError, match=error):
        launch(case.run_and_freeze, settings.to_json(), 0, 2, str(mark), 4.0, processes=2)
    assert time.time() - mark.stat().st_mtime < 4 + 25  # torch's agent alone would wait 30 s


@pytest.mark.parametrize(("kind", "starts"), [(RuntimeError, 3), (ValueError, 1)])
def test_what_may_go_better_is_tried_again(launched: Any, tmp_path: Path, kind: type[Exception], starts: int):
    with pytest.raises(WorkerError, match=rf"^rank 0: {kind.__name__}: no luck$"):
        launch(launched.count_and_raise, str(tmp_path / "starts"), kind, processes=1, max_restarts=2)
    assert (tmp_path / "starts").read_text() == "once\n" * starts


def test_killed_worker_is_started_again(launched: Any, tmp_path: Path):
    assert launch(launched.count_and_die_once, str(tmp_path / "starts"), processes=1, max_restarts=1) == [2]


def test_reports_of_errors_stay_for_ranks_that_read_them(launched: Any):
    with pytest.raises(WorkerError, match=r"^rank 0: RuntimeError: error-0-0.json$"):
        launch(launched.raise_reports, processes=1, max_restarts=1)


def _stops(launched: Any, folder: Path, count: int) -> list[str]:
    """Send signals to this process while a worker waits for a file; a single signal also writes that file."""
    asked: list[int] = []
    waiting, path = folder / "waiting", folder / "stop"

    def ask(signum: int) -> None:
        asked.append(signum)
        if count == 1:
            (folder / "writing").write_text(signal.Signals(signum).name)
            (folder / "writing").rename(path)
        else:
            os.kill(os.getpid(), signal.SIGTERM)

    def interrupt() -> None:
        launched.await_file(waiting)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    try:
        return launch(launched.wait_for, str(waiting), str(path), processes=1, on_stop=ask)
    finally:
        assert asked == [signal.SIGINT]


def test_first_signal_asks(launched: Any, tmp_path: Path):
    assert _stops(launched, tmp_path, 1) == ["SIGINT"]


def test_second_signal_ends(launched: Any, tmp_path: Path):
    with pytest.raises(launching.Stopped, match="SIGTERM"):
        _stops(launched, tmp_path, 2)


def test_files_in_between_are_removed(launched: Any, tmp_path: Path):
    launch(launched.who, 0, processes=1, folder=tmp_path)
    with pytest.raises(WorkerError):
        launch(launched.raise_on, 0, "no", processes=1, folder=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_signal_handlers_and_environment_are_given_back(launched: Any):
    before = [signal.getsignal(signum) for signum in launching.STOP_SIGNALS]
    launch(launched.who, 0, processes=1)
    assert [signal.getsignal(signum) for signum in launching.STOP_SIGNALS] == before
    assert "TORCHELASTIC_SIGNALS_TO_HANDLE" not in os.environ


def test_port_is_used(launched: Any):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    assert launch(launched.environment, "MASTER_PORT", processes=1, port=port) == [{"MASTER_PORT": str(port)}]


def test_port_in_use(launched: Any):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(PortError, match=rf"^port {port} on 127.0.0.1 cannot be used \(Address already in use\)"):
            launch(launched.who, 0, processes=1, port=port)


@pytest.mark.parametrize("port", [0, -1, 65536])
def test_port_out_of_range(launched: Any, port: int):
    with pytest.raises(PortError, match="expected a number from 1 to 65535"):
        launch(launched.who, 0, processes=1, port=port)


def test_function_that_no_other_process_can_import_is_refused():
    with pytest.raises(ValueError, match="must be a module-level function"):
        launch(lambda: 0, processes=1)


def test_cores_are_shared_out(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(launching, "available_cores", lambda: 8)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert [launching.threads_per_process(n) for n in (1, 2, 3, 16)] == [8, 4, 2, 1]
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert [launching.threads_per_process(n) for n in (1, 2, 3, 16)] == [3, 3, 2, 1]


# A separate parent, because the test kills it. It reports 128 + n, as the demo does.
_PARENT = """
import signal, sys
from shardfuse.training.launch import Stopped, launch
import launched
try:
    launch(launched.sleep_ignoring, signal.SIGINT, processes=2)
except Stopped as stop:
    sys.exit(128 + stop.signum)
"""


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_no_worker_outlives_its_parent(launched: Any, signum: signal.Signals, tmp_path: Path):
    leftovers = launched.Leftovers()
    parent = subprocess.Popen(
        [sys.executable, "-c", _PARENT],
        env=leftovers.environment() | {"TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert parent.stdout is not None
    assert [parent.stdout.readline() for _ in range(2)] == ["asleep\n"] * 2
    assert len(leftovers.processes()) == 3
    os.killpg(parent.pid, signum)  # as Ctrl-C does: the whole group
    _, errors = parent.communicate(timeout=60)
    leftovers.assert_none()
    assert errors == ""
    assert parent.returncode == (-signal.SIGKILL if signum == signal.SIGKILL else 128 + signum)
    if signum != signal.SIGKILL:  # SIGKILL leaves no chance to clean up
        assert not list(tmp_path.iterdir())


_TRAIN = ["-m", "shardfuse", "train", "run.toml"]
_DEMO = ["-m", "shardfuse", "demo", "--device", "cpu"]


@pytest.mark.parametrize(
    ("command", "moment", "processes", "signum"),
    [
        pytest.param(_TRAIN, "1 process", 1, signal.SIGINT, id="train-starting-SIGINT"),
        pytest.param(_TRAIN, "1 process", 2, signal.SIGTERM, id="train-started-SIGTERM"),
        pytest.param(_DEMO, "2/5", 3, signal.SIGTERM, id="demo-started-SIGTERM"),
    ],
)
def test_storm_of_signals(
    launched: Any, tmp_path: Path, command: list[str], moment: str, processes: int, signum: signal.Signals
):
    """From a moment on, when as many processes run, signals come until the command has ended."""
    case = importlib.import_module("train_case")
    case.write_toml(tmp_path / "run.toml", case.values("out", steps=1_000_000))
    leftovers = launched.Leftovers()
    process = subprocess.Popen(
        [sys.executable, *command],
        env=leftovers.environment() | {"OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    assert any(line.startswith(moment) for line in process.stdout)
    while len(leftovers.processes()) < processes:
        time.sleep(0.01)
    while process.poll() is None:
        for send in (os.killpg, os.kill):
            with contextlib.suppress(ProcessLookupError):
                send(process.pid, signum)
        time.sleep(0.01)
    _, errors = process.communicate(timeout=60)
    leftovers.assert_none()
    assert process.returncode == 128 + signum, errors
    assert errors.startswith(f"stopped by {signum.name};")
    assert errors.count("\n") == 1, errors
