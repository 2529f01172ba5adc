"""The work of a worker process: train, or evaluate a trained model. Module-level functions for ``launch``."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from torch.distributed.device_mesh import DeviceMesh

from ..parallel.core import agreement, collectives
from ..parallel.core import mesh as meshes
from ..parallel.core.mesh import Group
from ..parallel.core.rendezvous import connect, default_device, init_mesh, shutdown
from .data.loading import needs_preparation, prepare_run
from .folders import RunFolder
from .metrics import ProgressDisplay
from .restart import Stop, StopFile
from .settings import RunSettings, flat
from .trainer import RunResult, Trainer
from .trainer import train as run_trainer

REFUSAL_TIMEOUT = timedelta(minutes=2)  # to wait for the others, before this process knows the run's own timeout
BEAT = 1.0  # seconds between two signs of life of a rank that prepares data
_LAUNCH = "shardfuse/launch"  # in the store that torchrun's agent keeps


def restore(settings: RunSettings, mesh: DeviceMesh | None = None) -> Trainer:
    """Load the newest checkpoint of the run in the folder of resolved ``settings``, spread over ``mesh``.

    Raises ValueError if there is no checkpoint, and as :meth:`Trainer.resume` does.
    """
    trainer = Trainer(settings, mesh)
    if not trainer.resume():
        raise ValueError(f"{settings.out}: there is no checkpoint; train first")
    return trainer


def evaluate_saved(settings: RunSettings) -> float | None:
    """The held-out loss of the saved run, over all processes of this launch."""
    trainer = restore(settings, _mesh(settings))
    held_out = trainer.evaluate()
    trainer.close()
    shutdown()
    return held_out


def settle_together(settle: Callable[[], RunSettings]) -> RunSettings:
    """The resolved settings that ``settle`` returns on all processes of this launch, which it connects.

    An error of ``settle`` on one process is raised on all. Raises ValueError if their settings differ, and the errors
    of ``init_mesh``.
    """
    if int(os.environ["WORLD_SIZE"]) == 1:
        return settle()
    try:
        settings = settle()
    except Exception as error:
        _refuse(error)
        raise
    connect(settings.device or default_device(), _timeout(settings))
    return agreement.agree_on(meshes.everyone(), lambda: settings, flat, what="train")


def _refuse(error: Exception) -> None:
    """Tell all other processes that this one has no settings, because of ``error``."""

    def refuse() -> RunSettings:
        raise error

    with contextlib.suppress(RuntimeError):  # the other processes have ended or do not arrive
        connect(default_device(), REFUSAL_TIMEOUT)
        with contextlib.suppress(type(error)):
            agreement.agree_on(meshes.everyone(), refuse, flat, what="train")


def train_run(
    settings: RunSettings, resume: bool, stop_file: StopFile | None = None, prepared: list[Path] | None = None
) -> RunResult:
    """Run resolved ``settings`` over all processes of this launch.

    With a ``stop_file`` the parent process holds the run's folder; otherwise the first rank does, and prepares the data
    as well, unless these are the folders ``prepared``. Restarted processes
    (after a failure, or because torchrun's machines joined or left) resume from the newest checkpoint, even without
    ``resume``, if their predecessors had entered the folder.
    """
    mesh = _mesh(settings)
    folder: RunFolder | None = None
    trainer: Trainer | None = None
    try:
        with Stop(meshes.everyone(), stop_file, settings.time_limit) as stop, contextlib.ExitStack() as held:
            restarts = _restarts(meshes.everyone())
            if stop_file is not None:
                resume = resume or restarts > 0
            else:
                folder = RunFolder(Path(settings.out), resume=resume, launch=_launch(), job=_job())
                resume = agreement.on_first(meshes.everyone(), lambda: held.enter_context(folder).resume)
            if prepared is None and needs_preparation(settings):
                prepared = _prepare(settings, stop)
            trainer = Trainer(settings, mesh, prepared)
            result = _run(trainer, stop, resume, restarts)
            if folder is not None and meshes.everyone().rank == 0 and result.steps == result.planned:
                folder.complete()
    except ValueError:
        _leave(trainer)
        raise
    shutdown()
    return result


def _mesh(settings: RunSettings) -> DeviceMesh | None:
    """The mesh of resolved ``settings``, over all processes."""
    parallel = settings.parallel
    assert parallel.dp is not None  # resolve() filled it in
    return init_mesh(
        dp_replicate=parallel.dp_replicate,
        dp=parallel.dp,
        pp=parallel.pp,
        tp=parallel.tp,
        device_type=settings.device,
        timeout=_timeout(settings),
    )


def _prepare(settings: RunSettings, stop: Stop) -> list[Path]:
    """The folders of the data, which the first rank prepares. The others hear of it every second, because they may wait
    for longer than an exchange may take. Raises the first rank's error, and ValueError after a stop signal."""
    ranks = meshes.everyone()
    console = Console(highlight=False)
    ended = threading.Event()

    def work() -> list[Path]:
        return prepare_run(settings, console, ended.is_set)

    with ThreadPoolExecutor(1) as pool:
        made = pool.submit(work) if ranks.rank == 0 else None
        while True:
            if made is not None:
                wait([made], BEAT)
            done = torch.tensor(int(made is not None and made.done()))
            if int(collectives.all_reduce(done, ranks, site="train.prepare", op="max")):
                return agreement.on_first(ranks, made.result if made is not None else list)
            if signum := stop.agreed(training=False):
                ended.set()
                raise ValueError(f"stopped by {signal.Signals(signum).name} while data were prepared; start again")


def _timeout(settings: RunSettings) -> timedelta | None:
    return None if settings.timeout is None else timedelta(seconds=settings.timeout)


def _run(trainer: Trainer, stop: Stop, resume: bool, restarts: int) -> RunResult:
    """Train to the end, from the newest checkpoint if ``resume``; the first rank shows the progress."""
    settings, first = trainer.settings, meshes.everyone().rank == 0
    console = Console(highlight=False)
    if resume and trainer.resume() and first:
        again = f"restarted ({restarts}): " if restarts else ""
        console.print(f"  {again}resuming from step {trainer.step} of {settings.steps}")
    if not first:
        return run_trainer(trainer, stop)
    with ProgressDisplay(console, settings.steps) as display:
        return run_trainer(trainer, stop, on_step=display, on_remark=lambda text: _warn(console, text))


def _warn(console: Console, text: str) -> None:
    console.print(f"warning: {text}", markup=False, soft_wrap=True)


def _leave(trainer: Trainer | None) -> None:
    """Leave the process group cleanly, after finishing a pending checkpoint."""
    if trainer is not None:
        with contextlib.suppress(RuntimeError, OSError):  # the caller already raises an error
            trainer.checkpointer.wait()
    shutdown()


def _restarts(ranks: Group) -> int:
    """The number of restarts after a failure: the maximum over the processes.

    Each machine's agent counts its own restarts, and an agent that joined later has counted fewer.
    """
    mine = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    return int(collectives.all_reduce(torch.tensor(mine), ranks, site="train.restarts", op="max"))


def _launch() -> str | None:
    """A name shared by all processes of one torchrun; None where its agent keeps no store for them.

    ``--rdzv-id`` would not do: it may be missing, and a later torchrun may get the same one.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(address, port, is_master=False, wait_for_workers=False)
    return store.compare_set(_LAUNCH, "", uuid.uuid4().hex).decode()


def _job() -> str | None:
    """torchrun's name for this job; None if it has no name."""
    name = os.environ.get("TORCHELASTIC_RUN_ID", "")
    return name if name not in ("", "none") else None  # "none" is torchrun's own default
