"""For tests that start processes: functions for the processes to run, and the search for leftovers."""

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
    """Raise on one rank; the others sleep until they are killed."""
    if int(os.environ["RANK"]) == rank:
        raise ValueError(message)
    time.sleep(600)


def die_on(rank: int, signum: int, deaf: bool = False) -> None:
    """Kill one rank; the others sleep, and ignore SIGTERM if they are ``deaf``."""
    if deaf:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if int(os.environ["RANK"]) == rank:
        os.kill(os.getpid(), signum)
    time.sleep(600)


def count_and_raise(path: str, kind: type[Exception]) -> None:
    """Add a line to the file at ``path``, then fail."""
    with open(path, "a") as file:
        file.write("once\n")
    raise kind("no luck")


def count_and_die_once(path: str) -> int:
    """Add a line to the file at ``path`` and return their number; the process that writes the first is killed."""
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
    """Announce this rank by creating the file ``waiting``, then read ``path`` when it exists."""
    Path(waiting).touch()
    return await_file(path).read_text()


def await_file(path: str | Path) -> Path:
    while not os.path.exists(path):
        time.sleep(0.01)
    return Path(path)


def sleep_ignoring(*signals: int) -> None:
    """Announce this rank, then sleep and ignore ``signals``."""
    for signum in signals:
        signal.signal(signum, signal.SIG_IGN)
    os.write(1, b"asleep\n")  # atomic: print may write the line end separately, after another rank's line
    time.sleep(600)


def all_reduce_of_ranks() -> float:
    """A sum over gloo, with the project's set-up."""
    import torch

    from shardfuse.parallel.core import collectives
    from shardfuse.parallel.core.mesh import tp_group
    from shardfuse.parallel.core.rendezvous import init_mesh, shutdown

    group = tp_group(init_mesh(device_type="cpu"))
    total = collectives.all_reduce(torch.tensor(float(group.rank + 1)), group, site="test")
    shutdown()
    return float(total)


class Leftovers:
    """Processes with this object's mark in their environment, and shared memory abandoned since its creation."""

    def __init__(self) -> None:
        self.mark = uuid.uuid4().hex
        self._shared_before = _shared_memory()

    def environment(self) -> dict[str, str]:
        """This process's environment with the mark, and without the tests' own variables."""
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
            except OSError:  # it ended meanwhile, or belongs to another user
                continue
        return found

    def assert_none(self, within: float = 5.0) -> None:
        """Assert that nothing is left; processes being killed get a moment to end."""
        deadline = time.monotonic() + within
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not left, f"still there after {within} s: {left}"
        assert _shared_memory() - self._shared_before == set()


def _shared_memory() -> set[str]:
    """The entries of /dev/shm that no living process maps. Other programs' entries may change meanwhile."""
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
