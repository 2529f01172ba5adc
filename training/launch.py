"""Start a function in several processes of this machine with torchrun's agent, and return the results.

    results = launch(train_run, settings, False, processes=2)     # [that of rank 0, of rank 1]

torch.distributed.elastic starts and watches the processes and ends all when one fails. This module adds: all traffic
stays on the loopback interface, the port is bound before any process starts, results and errors come back through files
in a folder, and no worker outlives the caller, even a caller killed with SIGKILL.
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, SubprocessContext
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo
from torch.distributed.elastic.rendezvous.api import RendezvousStoreInfo

from . import worker

HOST = "127.0.0.1"
STOP_SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT") if hasattr(signal, name)
)
MAX_THREADS = 8  # more do not speed up the models that start here
GRACE = 3.0  # seconds between SIGTERM and SIGKILL for the workers that remain after a failure or a stop signal


class PortError(ValueError):
    """An unusable port; the message is one line with the reason and the remedy."""


class WorkerError(RuntimeError):
    """A worker failed. The message is one line; ``trace`` is its traceback, empty for a killed process."""

    def __init__(self, rank: int, kind: str, message: str, trace: str = "") -> None:
        super().__init__(message)
        self.rank = rank
        self.kind = kind  # the exception's class name, or "Signal"
        self.trace = trace


class Stopped(BaseException):
    """A signal asked this process to end (SIGINT is Ctrl-C); every worker is gone."""

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum


def launch(
    entry: Callable[..., Any],
    *args: Any,
    processes: int,
    port: int | None = None,
    folder: Path | None = None,
    threads: int | None = None,
    max_restarts: int = 0,
    on_stop: Callable[[int], None] | None = None,
) -> list[Any]:
    """Run ``entry(*args)`` in ``processes`` new processes and return each rank's result, in order of rank.

    ``entry`` is a module-level function of an importable module; it reads torchrun's environment variables and
    initialises torch.distributed itself. Arguments and results are pickled. ``port`` is the rendezvous port on the
    loopback interface (None: the system chooses). ``folder`` holds the files exchanged with the workers (None: a
    temporary one). ``threads`` is torch's thread count per process; None divides the cores evenly.

    When a process fails, the agent ends all processes and restarts them, at most ``max_restarts`` times. It does so
    after a killed process or a RuntimeError, such as a collective's whose peer has died: other errors would recur.

    A stop signal ends all processes at once. With ``on_stop``, the first signal goes to that function instead, which
    asks the processes to finish by themselves; the second signal ends them. Processes that still run GRACE seconds
    after a failure or a stop signal are killed.

    Raises PortError for an unusable port, WorkerError for the first rank that failed, Stopped after a signal. Call it
    from the main thread: a worker dies with the thread that started it.
    """
    name = entry.__qualname__
    if not name.isidentifier() or entry.__module__ == "__main__":
        raise ValueError(f"launch: {name} must be a module-level function of a module that a new process can import")
    listener = _listen(port)
    with tempfile.TemporaryDirectory(prefix="shardfuse-", dir=folder) as created:
        job = Path(created)
        (job / "job.pickle").write_bytes(pickle.dumps((entry.__module__, name, args)))
        agent = _agent(job, processes, listener, threads or threads_per_process(processes), max_restarts)
        try:
            with _quiet_elastic(), _signals_end_the_agent(agent, on_stop):
                result = agent.run()
        except SignalException:
            raise Stopped(agent.received[0]) from None
        if result.is_failed():
            raise _first_error(job, result, agent.unresponsive)
        files = [job / f"result-{rank}.pickle" for rank in range(processes)]
        return [pickle.loads(file.read_bytes()) for file in files]  # noqa: S301 - ours, in a folder for this user alone


@contextmanager
def stop_signals() -> Iterator[None]:
    """A context in which the first stop signal (Ctrl-C and others) raises Stopped: for the main function of a command.

    After a stop signal here or in a ``launch`` inside, later ones are ignored until the process ends, so that none
    interrupts the clean-up or replaces the exit code.
    """

    def stop(signum: int) -> None:
        raise Stopped(signum)

    with _handling(stop, until_exit=True):
        yield


class _StopHandler:
    """The handler of all stop signals: each calls the next of ``actions``; without any left it does nothing."""

    def __init__(self) -> None:
        self.actions: list[Callable[[int], None]] = []
        self.received = False

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        if self.actions:
            self.received = True
            self.actions.pop(0)(signum)


@contextmanager
def _handling(*actions: Callable[[int], None], until_exit: bool = False) -> Iterator[None]:
    """Each stop signal calls the next of ``actions``; later ones are ignored.

    An inner context shares the handler of the outer one, so no signal finds the handlers half replaced; after a signal
    in the inner context, the outer one ignores all others. With ``until_exit``, a received signal leaves all of them
    ignored after the context. Signals that were already ignored (nohup) stay ignored.
    """
    before = {signum: signal.getsignal(signum) for signum in STOP_SIGNALS}
    before = {signum: handler for signum, handler in before.items() if handler is not signal.SIG_IGN}
    outer = next((handler for handler in before.values() if isinstance(handler, _StopHandler)), None)
    handler = outer or _StopHandler()
    following = handler.actions
    try:
        handler.actions = list(actions)
        if outer is None:
            for signum in before:
                signal.signal(signum, handler)
        yield
    finally:
        handler.actions = [] if handler.received else following
        if outer is None:
            for signum, earlier in before.items():
                # Python resets its own handlers while it exits, but not SIG_IGN.
                signal.signal(signum, signal.SIG_IGN if until_exit and handler.received else earlier)


def check_port(port: int | None) -> None:
    """Raise PortError unless ``port`` is free now, or None."""
    if port is not None:
        _listen(port).close()


def threads_per_process(processes: int) -> int:
    """An equal share of this process's available cores; OMP_NUM_THREADS can lower it."""
    share = max(1, min(MAX_THREADS, available_cores() // processes))
    given = os.environ.get("OMP_NUM_THREADS", "")
    return min(share, int(given)) if given.isdigit() and int(given) > 0 else share


def available_cores() -> int:
    """The cores that the affinity and the control group (a container's limit) leave to this process."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return max(1, min(cores, int(quota) // int(period)))
    except (OSError, ValueError):  # no cgroup v2, or "max"
        return cores


def _listen(port: int | None) -> socket.socket:
    """A socket that listens on the loopback interface. Binding it here reports a taken port before any work."""
    if port is not None and not 0 < port < 65536:
        raise PortError(f"port {port}: expected a number from 1 to 65535")
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((HOST, port or 0))
        listener.listen()
    except OSError as error:
        listener.close()
        raise PortError(
            f"port {port} on {HOST} cannot be used ({error.strerror}): choose another, or let the system choose"
        ) from None
    return listener


class _Loopback(RendezvousHandler):
    """torchrun's rendezvous reduced to one agent: a TCPStore on a socket that already listens.

    Restarted workers get a new store on another port: the old one holds addresses of dead processes.
    """

    def __init__(self, listener: socket.socket) -> None:
        self._run_id = uuid.uuid4().hex
        self._listener: socket.socket | None = listener

    @property
    def use_agent_store(self) -> bool:
        return True

    def get_backend(self) -> str:
        return "loopback"

    def get_run_id(self) -> str:
        return self._run_id

    def next_rendezvous(self) -> RendezvousInfo:
        listener, self._listener = self._listener or _listen(None), None
        port = listener.getsockname()[1]
        store = dist.TCPStore(
            HOST,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(minutes=5),
            master_listen_fd=listener.detach(),
        )
        return RendezvousInfo(dist.PrefixStore(self._run_id, store), 0, 1, RendezvousStoreInfo(HOST, port))

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def shutdown(self) -> bool:
        return True


class _Agent(LocalElasticAgent):
    """torchrun's agent, which ends the remaining workers within GRACE; torch waits 30 s before it sends SIGKILL."""

    def __init__(self, spec: WorkerSpec, logs: DefaultLogsSpecs) -> None:
        super().__init__(spec, logs)
        self.unresponsive: list[int] = []  # ranks of the newest attempt that outlived SIGTERM
        self.received: list[int] = []  # the stop signal that ends the run
        self._death_sig = signal.SIGTERM
        self._starting = False

    def end(self, signum: int, death_sig: signal.Signals) -> None:
        """End the workers with ``death_sig`` because of the stop signal ``signum``, once all have started.

        An exception while they start would lose those that run already.
        """
        self.received.append(signum)
        self._death_sig = death_sig
        if not self._starting:
            self._raise()

    def _raise(self) -> None:
        raise SignalException(f"signal {self.received[0]}", self._death_sig)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._starting = True
        try:
            pids = super()._start_workers(worker_group)
            self._shorten_close()
        finally:
            self._starting = False
        if self.received:
            self._raise()
        return pids

    def _shorten_close(self) -> None:
        context = self._pcontext
        assert isinstance(context, SubprocessContext)
        self.unresponsive.clear()
        close = context.close

        def close_soon(death_sig: signal.Signals | None = None, timeout: int = 0) -> None:
            self._end(context, death_sig or signal.SIGTERM)
            with suppress(ProcessLookupError):
                close()

        context.close = close_soon  # type: ignore[method-assign]  # torch has no option: it waits 30 s

    def _end(self, context: SubprocessContext, signum: signal.Signals) -> None:
        """Send ``signum`` to all running workers, and SIGKILL to those that still run after GRACE."""
        running = {rank: each for rank, each in context.subprocess_handlers.items() if each.proc.poll() is None}
        for handler in running.values():
            with suppress(ProcessLookupError):  # it has ended since
                handler.close(signum)
        deadline = time.monotonic() + GRACE
        for rank, handler in running.items():
            try:
                handler.proc.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                self.unresponsive.append(rank)
                with suppress(ProcessLookupError):
                    handler.close(signal.SIGKILL)


def _agent(job: Path, processes: int, listener: socket.socket, threads: int, max_restarts: int) -> _Agent:
    logs = job / "logs"
    logs.mkdir()
    spec = WorkerSpec(
        role="shardfuse",
        local_world_size=processes,
        entrypoint=sys.executable,
        args=(str(Path(worker.__file__).resolve()), str(os.getpid()), str(job), str(threads)),
        rdzv_handler=_Loopback(listener),
        max_restarts=max_restarts,
        monitor_interval=0.05,
        local_addr=HOST,
    )
    return _Agent(spec, DefaultLogsSpecs(log_dir=str(logs)))


@contextmanager
def _signals_end_the_agent(agent: _Agent, on_stop: Callable[[int], None] | None) -> Iterator[None]:
    """A stop signal ends the agent and its workers at once.

    With ``on_stop``, the first signal goes to that function and the second ends them.

    By default the agent handles the signals itself and forwards each to the workers. SIGINT would then reach Python's
    handler, which waits until a collective returns and prints a traceback; SIGTERM ends a worker at once, by the
    kernel's default.
    """

    def end_agent(signum: int) -> None:
        # Processes that were already asked may treat SIGTERM as the same request.
        agent.end(signum, signal.SIGKILL if on_stop else signal.SIGTERM)

    variable = "TORCHELASTIC_SIGNALS_TO_HANDLE"
    before_variable = os.environ.get(variable)
    os.environ[variable] = ""
    try:
        with _handling(*([on_stop] if on_stop else []), end_agent):
            yield
    finally:
        if before_variable is None:
            del os.environ[variable]
        else:
            os.environ[variable] = before_variable


@contextmanager
def _quiet_elastic() -> Iterator[None]:
    """Silence the agent's log: it prints several lines for an error that this module raises in one."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        yield
    finally:
        logging.disable(before)


_HINTS = {
    "SIGKILL": " (out of memory?)",
    # oneDNN's 16-bit products raise it on virtual machines that advertise AMX but trap on it.
    "SIGILL": " (an instruction that this CPU lacks: in 16-bit precision, try ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16)",
}


def _first_error(job: Path, result: RunResult, unresponsive: list[int]) -> WorkerError:
    """The first failure: a killed process, else the earliest exception (the others follow from it).

    Only the newest attempt with reports counts: earlier failures led to a restart. The agent's own signals count as no
    failure: SIGTERM, and SIGKILL for the ``unresponsive`` ranks. The message names these after an error that a
    missing peer may have caused.
    """
    for rank, failure in sorted(result.failures.items()):
        if failure.exitcode < 0 and failure.exitcode != -signal.SIGTERM and rank not in unresponsive:
            name = signal.Signals(-failure.exitcode).name
            hint = _HINTS.get(name, "")
            return WorkerError(rank, "Signal", f"rank {rank} was killed by {name}{hint}")
    reports = []
    for path in job.glob("error-*.json"):
        report = json.loads(path.read_text())
        attempt, rank = map(int, path.stem.split("-")[1:])
        reports.append((-attempt, report["time"], rank, report))
    if reports:
        _, _, rank, report = min(reports, key=lambda item: item[:2])
        line = " ".join(str(report["message"]).split())
        if unresponsive and not report["final"]:
            line += "".join(f"; rank {silent} did not respond and was ended" for silent in unresponsive)
        return WorkerError(rank, report["kind"], f"rank {rank}: {report['kind']}: {line}", report["trace"])
    rank, failure = min(item for item in result.failures.items() if item[0] not in unresponsive)
    return WorkerError(rank, "Exit", f"rank {rank} ended with exit code {failure.exitcode}")
