"""For tests that start processes: functions for those to run, and the search for what they may leave behind."""

from __future__ import annotations

import os
import signal
import sys
import time
import uuid
from pathlib import Path
from typing import Any

MARK = "SHARDFUSE_TEST_MARK"


def who(value: Any) -> tuple[int, int, Any]:
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), value


def environment(*names: str) -> dict[str, str | None]:
    return {name: os.environ.get(name) for name in names}


def raise_on(rank: int, message: str) -> None:
    """Raise on one rank; the others sleep until they are ended."""
    if int(os.environ["RANK"]) == rank:
        raise ValueError(message)
    time.sleep(600)


def die_on(rank: int, signum: int) -> None:
    if int(os.environ["RANK"]) == rank:
        os.kill(os.getpid(), signum)
    time.sleep(600)


def count_and_raise(path: str, kind: type[Exception]) -> None:
    """Add a line to the file at ``path``, then fail."""
    with open(path, "a") as file:
        file.write("once\n")
    raise kind("no luck")


def count_and_die_once(path: str) -> int:
    """How many lines the file at ``path`` has, this call's included; a process that writes the first is killed."""
    with open(path, "a+") as file:
        file.write("once\n")
        file.seek(0)
        count = len(file.readlines())
    if count == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return count


def raise_reports() -> None:
    """Fail with the names of the errors that earlier attempts reported."""
    raise RuntimeError(" ".join(sorted(path.name for path in Path(sys.argv[2]).glob("error-*"))))


def wait_for(waiting: str, path: str) -> str:
    """Say that this rank is there by making the file ``waiting``, then read ``path`` when it is there."""
    Path(waiting).touch()
    return await_file(path).read_text()


def await_file(path: str | Path) -> Path:
    while not os.path.exists(path):
        time.sleep(0.01)
    return Path(path)


def sleep_ignoring(*signals: int) -> None:
    """Say that this rank is there, then sleep, deaf to ``signals``."""
    for signum in signals:
        signal.signal(signum, signal.SIG_IGN)
    os.write(1, b"asleep\n")  # in one piece: print may write the line and its end apart, and another rank's between
    time.sleep(600)


def all_reduce_of_ranks() -> float:
    """A sum over gloo, set up as the project does it."""
    import torch

    from shardfuse.parallel.core import collectives, mesh

    group = mesh.tp_group(mesh.init_mesh(device_type="cpu"))
    total = collectives.all_reduce(torch.tensor(float(group.rank + 1)), group, site="test")
    mesh.shutdown()
    return float(total)


class Leftovers:
    """Processes that carry this one's mark in their environment, and shared memory abandoned since it was made."""

    def __init__(self) -> None:
        self.mark = uuid.uuid4().hex
        self._shared_before = _shared_memory()

    def environment(self) -> dict[str, str]:
        """This process's environment with the mark, and without what the tests set for themselves."""
        dropped = ("OMP_NUM_THREADS", "TRITON_INTERPRET", "SHARDFUSE_POISON", "SHARDFUSE_DEBUG", "RANK", "WORLD_SIZE")
        kept = {name: value for name, value in os.environ.items() if name not in dropped}
        return kept | {MARK: self.mark, "PYTHONSAFEPATH": "1"}

    def processes(self) -> list[str]:
        """The command lines of living processes with the mark."""
        found = []
        for folder in Path("/proc").iterdir():
            if not folder.name.isdigit() or int(folder.name) == os.getpid():
                continue
            try:
                marked = f"{MARK}={self.mark}".encode() in (folder / "environ").read_bytes()
                state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
                if marked and state not in "ZX":
                    found.append((folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"))
            except OSError:  # it ended meanwhile, or is somebody else's
                continue
        return found

    def assert_none(self, within: float = 5.0) -> None:
        """Processes that are being killed get a moment to be gone."""
        deadline = time.monotonic() + within
        while self.processes() and time.monotonic() < deadline:
            time.sleep(0.02)
        assert self.processes() == []
        assert _shared_memory() - self._shared_before == set()


def _shared_memory() -> set[str]:
    """The entries of /dev/shm that no living process maps. Other programs' come and go while tests run."""
    folder = Path("/dev/shm")
    names = {entry.name for entry in folder.iterdir()} if folder.is_dir() else set()
    for process in Path("/proc").iterdir():
        if names and process.name.isdigit():
            try:
                maps = (process / "maps").read_text(errors="replace")
            except OSError:
                continue
            names = {name for name in names if f"/dev/shm/{name}" not in maps}
    return names
