"""A pool of gloo worker processes that tests share.

``ranks(2, body, arg)`` runs ``body(rank, world, arg)`` in two processes and returns what each rank returned. A body is
a module-level function of a test file; workers find it by the file's path and its name, and load each file once.

Processes start once (importing torch takes seconds) and serve worlds of any size; every call creates and destroys a
default process group. ``ranks(1, ...)`` runs a single process without a process group. Reference cycles, compiled
graphs and FSDP2's hooks keep some groups alive, with gloo's threads, each of which wakes a hundred times a second:
a worker whose threads have become many more collects such groups, and is finally replaced.

A rank that raises closes its process group, so the others' collectives fail instead of waiting, and the call raises
RankError with the first rank's traceback. A dead rank, or a call past its timeout, ends the pool; the next call starts
a new one. Workers die with the process that started them.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib.util
import inspect
import os
import pickle
import signal
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

START_TIMEOUT = 300.0  # seconds to import torch on a busy machine
TIMEOUT = 120.0  # seconds for a call
GRACE = 10.0  # seconds for the other ranks to fail after the first
THREADS = 24  # of a worker: so many more than the last collection left, and it collects unused process groups
MOST_THREADS = 96  # above this a worker is replaced
PR_SET_PDEATHSIG = 1
LOST_WHILE_CONNECTING = "Gloo connectFullMesh failed"


class RankError(AssertionError):
    """A rank failed; holds the rank and its traceback."""

    def __init__(self, rank: int, world: int, trace: str) -> None:
        super().__init__(f"rank {rank} of {world}:\n{trace}")
        self.rank = rank


class Pool:
    """Workers in order of rank; ``pool(world, body, *args)`` uses the first ``world`` of them.

    ``environment`` are variables that the workers have besides this process's.
    """

    def __init__(self, **environment: str) -> None:
        self._environment = environment
        self._workers: list[_Worker | None] = []  # by rank; None: one that was ended
        self._store: Any = None
        self._calls = 0

    def __call__(
        self, world: int, body: Callable[..., Any], *args: Any, timeout: float = TIMEOUT, **kwargs: Any
    ) -> list[Any]:
        """Run ``body(rank, world, *args, **kwargs)`` on every rank; returns the results in order of rank.

        Fresh workers try once more where gloo lost a connection during set-up, which sometimes happens without a dead
        rank.
        """
        try:
            return self._run(world, body, *args, timeout=timeout, **kwargs)
        except RankError as error:
            if LOST_WHILE_CONNECTING not in str(error):
                raise
            print(f"gloo lost a connection in {body.__qualname__}, which runs once more:\n{error}", file=sys.stderr)
            self.close()
            return self._run(world, body, *args, timeout=timeout, **kwargs)

    def _run(self, world: int, body: Callable[..., Any], *args: Any, timeout: float, **kwargs: Any) -> list[Any]:
        task = pickle.dumps((*locate(body), args, kwargs, os.environ.get("PYTEST_CURRENT_TEST", "")))
        self._calls += 1
        try:
            workers = self._grow(world)
            for worker in workers:
                worker.start(task, world, self._store.port, self._calls)
            answers = _collect(workers, timeout)
        except BaseException:  # a dead or late rank, or Ctrl-C: the workers' state is unknown
            self.close()
            raise
        for rank, (ok, value, _) in sorted(enumerate(answers), key=lambda item: item[1][2]):
            if not ok:
                raise RankError(rank, world, value)
        for worker in workers:
            if worker.threads() > MOST_THREADS:
                worker.kill()
                self._workers[worker.rank] = None
        return [value for _, value, _ in answers]

    def _grow(self, world: int) -> list[_Worker]:
        """The first ``world`` workers; those that are not there are started."""
        if self._store is None:
            from shardfuse.parallel.core.rendezvous import loopback_store

            self._store = loopback_store()
        self._workers += [None] * (world - len(self._workers))
        fresh = [
            _Worker(rank, self._environment) for rank, worker in enumerate(self._workers[:world]) if worker is None
        ]
        for worker in fresh:
            self._workers[worker.rank] = worker
        _collect(fresh, START_TIMEOUT)
        return [worker for worker in self._workers[:world] if worker is not None]

    def close(self) -> None:
        for worker in filter(None, self._workers):
            worker.kill()
        self._workers.clear()


class _Worker:
    """One process and the pipe to it."""

    def __init__(self, rank: int, more: dict[str, str]) -> None:
        self.rank = rank
        self.connection, theirs = Pipe()
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "LOCAL_RANK": str(rank)} | more
        self.process = subprocess.Popen(
            [sys.executable, __file__, str(theirs.fileno()), str(rank), str(os.getpid())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            env=environment,
        )
        theirs.close()

    def start(self, task: bytes, world: int, port: int, call: int) -> None:
        self.connection.send_bytes(pickle.dumps((task, world, port, call)))

    def answer(self) -> tuple[bool, Any, float]:
        """(success, the result or the traceback, the time)."""
        try:
            return pickle.loads(self.connection.recv_bytes())
        except (EOFError, OSError):
            code = self.process.wait()
            raise RuntimeError(f"rank {self.rank} died with exit code {code}; see its output above") from None

    def threads(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/task"))

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self.connection.close()


def locate(body: Callable[..., Any]) -> tuple[str, str]:
    path, name = inspect.getsourcefile(body), body.__qualname__
    if path is None or not name.isidentifier():
        raise ValueError(f"ranks wants a module-level function of a test file, not {name}")
    return str(Path(path).resolve()), name


def _collect(workers: list[_Worker], timeout: float) -> list[tuple[bool, Any, float]]:
    answers: dict[int, tuple[bool, Any, float]] = {}
    waiting = {worker.connection: worker for worker in workers}
    deadline = time.monotonic() + timeout
    while waiting:
        ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for connection in ready:
            worker = waiting.pop(connection)  # type: ignore[call-overload]
            answers[worker.rank] = answer = worker.answer()
            if not answer[0]:
                deadline = min(deadline, time.monotonic() + GRACE)
    late = [worker.rank for worker in waiting.values()]
    failed = sorted((when, rank, value) for rank, (ok, value, when) in answers.items() if not ok)
    if late and failed:
        _, rank, trace = failed[0]
        raise RankError(rank, len(workers), f"{trace}\n(ranks {late} went on waiting and were ended)")
    if late:
        raise TimeoutError(f"ranks {late} of {len(workers)} did not finish within {timeout:.0f} s and were ended")
    return [answers[worker.rank] for worker in workers]


def _serve(connection: Connection, rank: int) -> None:
    """The worker: run tasks until the pipe closes."""
    import torch

    torch.set_num_threads(1)
    # As in pyproject.toml for the tests' own process.
    warnings.filterwarnings("ignore", category=RuntimeWarning, module=r"triton\.runtime\.interpreter")
    warnings.filterwarnings("error", module=r"shardfuse\.")
    import interpreter
    import margins

    interpreter.install()
    interpreter.allow()
    margins.install()
    connection.send_bytes(pickle.dumps((True, None, time.monotonic())))
    stores: dict[int, Any] = {}
    while True:
        try:
            task, world, port, call = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        try:
            with _process_group(rank, world, port, call, stores):
                answer = _attempt(task, rank, world)
        except Exception:  # the processes failed to connect or to disconnect
            answer = (False, traceback.format_exc(), time.monotonic())
        connection.send_bytes(pickle.dumps(answer))


def _attempt(task: bytes, rank: int, world: int) -> tuple[bool, Any, float]:
    import torch

    try:
        path, name, args, kwargs, os.environ["PYTEST_CURRENT_TEST"] = pickle.loads(task)
        torch.manual_seed(0)
        body = getattr(load(path), name)
        value = body(rank, world, *args, **kwargs)
        pickle.dumps(value)
    except BaseException:  # pytest's skip and fail are BaseExceptions
        # The time shows which rank failed first; the others' collectives then fail as well.
        return False, traceback.format_exc(), time.monotonic()
    return True, value, time.monotonic()


@contextlib.contextmanager
def _process_group(rank: int, world: int, port: int, call: int, stores: dict[int, Any]) -> Any:
    import torch.distributed as dist

    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world))
    if world == 1:
        yield
        return
    if port not in stores:
        stores[port] = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=dist.PrefixStore(f"call{call}", stores[port]), rank=rank, world_size=world)
    try:
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        _forget_meshes()
        _collect_groups()


def _forget_meshes() -> None:
    """Clear DTensor's cache of operations: its meshes' groups are gone, and the next call's meshes compare equal."""
    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor.debug import _clear_sharding_prop_cache

        _clear_sharding_prop_cache()


_left_threads = 0  # by the last collection


def _collect_groups() -> None:
    """Destroy the process groups that only compiled graphs and reference cycles still hold, once they are many.

    It takes as long as some tests do, and what it leaves, the next one leaves too.
    """
    global _left_threads
    if len(os.listdir("/proc/self/task")) <= _left_threads + THREADS:
        return
    if "torch._dynamo" in sys.modules:
        import torch

        torch._dynamo.reset()
    gc.collect()
    _left_threads = len(os.listdir("/proc/self/task"))


_modules: dict[str, Any] = {}


def load(path: str) -> Any:
    if path not in _modules:
        name = f"_ranks_{Path(path).stem}"
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # so that classes of the file can be pickled
        spec.loader.exec_module(module)
        _modules[path] = module
    return _modules[path]


def _main() -> None:
    fd, rank, parent = (int(argument) for argument in sys.argv[1:])
    if getattr(sys.flags, "safe_path", False):
        sys.path.insert(0, str(Path(__file__).parent))  # as on pytest's path in the tests' own process
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent died before the line above
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    _serve(Connection(fd), rank)


if __name__ == "__main__":
    _main()
