"""Whole processes that start in milliseconds: a server imports the package once and forks each program's ranks.

    with Server() as server:
        ended = server.run(body, [("a",), ("b",)], limit=30.0)  # body(rank, world, "a") in rank 0, ... "b" in rank 1

Unlike the workers of ranks.py, each rank is a program of its own: it finds the others by torchrun's variables, an
exception ends it with a traceback and status 1, and its interpreter ends as any other, with all clean-up. A body is a
module-level function of a test file.
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import gc
import os
import pickle
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any, NamedTuple

from launched import Leftovers
from ranks import PR_SET_PDEATHSIG, load, locate

POLL_S = 0.002
EXTRA_S = 20.0  # beyond a run's limit: until then a late rank is waited for, and its stack is written
HOST = "127.0.0.1"
# In the error of a rank whose peer is gone. That of torch's own collectives, such as FSDP2's, names no site.
LOST = "could not connect|another rank (of the group ended|failed first)|[Cc]onnection (closed|reset)|[Tt]imed out"
BEGIN = "SHARDFUSE_TEST_BEGIN"  # names the file with the time when a rank began


class Strike(NamedTuple):
    """A signal from outside, ``after`` so many seconds from the rank's beginning."""

    rank: int
    signum: int
    after: float


@dataclass(frozen=True)
class Ended:
    """How one rank ended."""

    status: int  # the exit status, or minus the signal that ended it
    seconds: float  # from the last rank's beginning to the end of this one's Python code
    output: str
    hung: bool  # stopped by SIGSTOP or late, so ended by the server

    @property
    def error(self) -> str:
        """The exception at the end of the output, or the last line."""
        lines = re.sub(r"^\[rank\d+\]: ", "", self.output.strip(), flags=re.MULTILINE).splitlines() or [""]
        begins = [i for i, line in enumerate(lines) if line.startswith("Traceback")]
        if not begins:
            return lines[-1]
        after = lines[begins[-1] + 1 :]
        return "\n".join(after[next((i for i, line in enumerate(after) if line[:1] not in (" ", "")), 0) :])


def problems(ended: Sequence[Ended], limit: float, says: Sequence[str], struck: Mapping[int, int]) -> list[str]:
    """What is wrong where every rank should have failed within ``limit`` seconds, with an error that ``says[rank]``.

    ``struck`` ranks may have ended by a signal instead.
    """
    found = []
    for rank, end in enumerate(ended):
        by_signal = rank in struck and end.status == -struck[rank]
        if end.hung and not by_signal:
            found.append(f"rank {rank} had not ended after {end.seconds:.1f} s")
        elif end.seconds > limit and not end.hung:
            found.append(f"rank {rank} ended after {end.seconds:.1f} s")
        elif end.status <= 0 and not by_signal:
            found.append(f"rank {rank} ended with status {end.status}")
        elif "terminate called" in end.output:
            found.append(f"rank {rank} aborted in C++")
        elif not by_signal and not re.search(says[rank], end.error):
            found.append(f"rank {rank} does not say {says[rank]!r} but: {end.error}")
    if found:
        for rank, end in enumerate(ended):
            found.append(f"rank {rank}, status {end.status}, {end.seconds:.1f} s: ...\n{end.output[-3000:]}")
    return found


class Server:
    """The process that forks programs."""

    def __init__(self) -> None:
        self._connection, theirs = Pipe()
        path = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {**Leftovers().environment(), "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(theirs.fileno()), str(os.getpid())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            env={**environment, "GLOO_SOCKET_IFNAME": "lo", "TORCH_CPP_LOG_LEVEL": "ERROR"},
        )
        theirs.close()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *exception: object) -> None:
        self._connection.close()
        self._process.kill()
        self._process.wait()

    def run(
        self,
        body: Callable[..., Any],
        arguments: Sequence[tuple[Any, ...]],
        *,
        limit: float,
        variables: Mapping[int, Mapping[str, str]] | None = None,
        delays: Sequence[float] = (),
        strike: Strike | None = None,
    ) -> list[Ended]:
        """Run ``body(rank, world, *arguments[rank])`` in a process for each rank; how each of them ended.

        The ranks begin after ``delays``, with ``variables`` of their own beside torchrun's. A rank that has not ended
        ``limit`` + EXTRA_S seconds after the last one began is killed.
        """
        everywhere = {"MASTER_ADDR": HOST, "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(len(arguments))}
        ranks = [
            _Rank(
                *(rank, len(arguments), arguments[rank], limit, delays[rank] if delays else 0.0),
                {**everywhere, "RANK": str(rank), "LOCAL_RANK": str(rank), **(variables or {}).get(rank, {})},
            )
            for rank in range(len(arguments))
        ]
        self._connection.send_bytes(pickle.dumps((*locate(body), [tuple(rank) for rank in ranks], strike, limit)))
        return [Ended(*fields) for fields in pickle.loads(self._connection.recv_bytes())]


def begin() -> None:
    """For a body: from this moment on its time counts, rather than from its start."""
    _note_time(Path(os.environ[BEGIN]))


def _note_time(path: Path) -> None:
    path.with_suffix(".writing").write_text(str(time.monotonic()))
    path.with_suffix(".writing").rename(path)


def free_port() -> int:
    with socket.socket() as free:
        free.bind((HOST, 0))
        return free.getsockname()[1]


class _Rank(NamedTuple):
    rank: int
    world: int
    arguments: tuple[Any, ...]
    limit: float
    delay: float
    environment: dict[str, str]


def _serve(connection: Connection) -> None:
    """Fork the ranks of each program that comes. In a forked process it returns, or raises, at the program's end."""
    import pytest  # noqa: F401 (the test files import it)

    import shardfuse.cli
    import shardfuse.commands.train
    import shardfuse.parallel.pipeline.pipeline
    import shardfuse.parallel.zero.zero  # noqa: F401

    assert len(os.listdir("/proc/self/task")) == 1, "a process with threads cannot be forked safely"
    gc.freeze()  # a forked process neither traverses nor collects what it shares with this one
    while True:
        try:
            path, name, ranks, strike, limit = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        folder = Path(tempfile.mkdtemp())  # not a context, which the forked processes would leave, too
        pids = []
        for fields in ranks:
            pids.append(os.fork())
            if pids[-1] == 0:
                connection.close()
                return _become(_Rank(*fields), path, name, folder)
        connection.send_bytes(pickle.dumps(_wait(pids, folder, strike, limit)))
        shutil.rmtree(folder)


def _become(rank: _Rank, path: str, name: str, folder: Path) -> None:
    """Be one rank of a program."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    output = os.open(folder / f"output-{rank.rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(rank.environment)
    body = getattr(load(path), name)
    os.environ[BEGIN] = str(folder / f"begin-{rank.rank}")
    # The interpreter then frees its memory, which takes seconds in a forked process on a busy machine.
    atexit.register(_note_time, folder / f"end-{rank.rank}")
    atexit.register(faulthandler.cancel_dump_traceback_later)
    time.sleep(rank.delay)
    begin()
    faulthandler.dump_traceback_later(rank.limit + 2.0, file=2)
    body(rank.rank, rank.world, *rank.arguments)


def _wait(pids: list[int], folder: Path, strike: Strike | None, limit: float) -> list[tuple[Any, ...]]:
    """Wait for the ranks, and return the fields of each one's Ended."""
    running, statuses, ends = dict(enumerate(pids)), {}, {}
    begins: dict[int, float] = {}
    hung: set[int] = set()
    while running:
        time.sleep(POLL_S)
        now = time.monotonic()
        for rank, pid in list(running.items()):
            if (folder / f"begin-{rank}").exists():
                begins[rank] = float((folder / f"begin-{rank}").read_text())
            changed, status = os.waitpid(pid, os.WNOHANG | os.WUNTRACED)
            if changed and os.WIFSTOPPED(status):
                hung.add(rank)
            elif changed:
                statuses[rank], ends[rank] = os.waitstatus_to_exitcode(status), now
                del running[rank]
        if strike is not None and strike.rank in running and now > begins.get(strike.rank, now) + strike.after:
            os.kill(running[strike.rank], strike.signum)
            strike = None
        late = begins.keys() >= running.keys() and now > max(begins.values(), default=now) + limit + EXTRA_S
        if late or set(running) <= hung:
            hung |= set(running)
            for pid in running.values():
                os.kill(pid, signal.SIGKILL)
    last = max(float(path.read_text()) for path in folder.glob("begin-?"))
    for path in folder.glob("end-?"):
        ends[int(path.name[-1])] = float(path.read_text())
    outputs = [(folder / f"output-{rank}").read_text(errors="replace") for rank in range(len(pids))]
    return [(statuses[rank], ends[rank] - last, outputs[rank], rank in hung) for rank in range(len(pids))]


def _main() -> None:
    fd, parent = int(sys.argv[1]), int(sys.argv[2])
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent died before the line above
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    _serve(Connection(fd))


if __name__ == "__main__":
    _main()
