"""What a worker process does: train, or evaluate what was trained. Module-level functions for ``launch``."""

from __future__ import annotations

import contextlib
import os
import uuid
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from torch.distributed.device_mesh import DeviceMesh

from ..parallel.checkpoint import storage
from ..parallel.core import collectives
from ..parallel.core import mesh as meshes
from ..parallel.core.mesh import Group
from .folders import RunFolder
from .metrics import ProgressDisplay
from .restart import Stop, StopFile
from .settings import RunSettings
from .trainer import RunResult, Trainer
from .trainer import train as run_trainer

_LAUNCH = "shardfuse/launch"  # in the store that torchrun's agent keeps


def restore(settings: RunSettings, mesh: DeviceMesh | None = None) -> Trainer:
    """The run in the folder of resolved ``settings`` as its newest checkpoint has it, spread over ``mesh``.

    Raises ValueError where there is none, and as :meth:`Trainer.resume` does.
    """
    trainer = Trainer(settings, mesh)
    if not trainer.resume():
        raise ValueError(f"{settings.out}: there is no checkpoint; train first")
    return trainer


def evaluate_saved(settings: RunSettings) -> float | None:
    """The held-out loss of :func:`restore`'s run, over all processes that were started together."""
    trainer = restore(settings, _mesh(settings))
    held_out = trainer.evaluate()
    trainer.close()
    meshes.shutdown()
    return held_out


def train_run(settings: RunSettings, resume: bool, stop_file: StopFile | None = None) -> RunResult:
    """The run of resolved ``settings``, over all processes that were started together.

    Whoever started them with a ``stop_file`` holds the run's folder; otherwise the first rank does. Processes that are
    started again, after a failure or because torchrun's machines came or went, go on from the newest checkpoint,
    whatever ``resume`` says, if those before them were let into the folder.
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
                resume = storage.on_first(meshes.everyone(), lambda: held.enter_context(folder).resume)
            trainer = Trainer(settings, mesh)
            result = _run(trainer, stop, resume, restarts)
            if folder is not None and meshes.everyone().rank == 0 and result.steps == settings.steps:
                folder.complete()
    except ValueError:
        _leave(trainer)
        raise
    meshes.shutdown()
    return result


def _mesh(settings: RunSettings) -> DeviceMesh | None:
    """The mesh that resolved ``settings`` ask for, of all processes."""
    parallel = settings.parallel
    assert parallel.dp is not None  # resolve() filled it in
    return meshes.init_mesh(
        dp_replicate=parallel.dp_replicate,
        dp=parallel.dp,
        pp=parallel.pp,
        tp=parallel.tp,
        device_type=settings.device,
        timeout=None if settings.timeout is None else timedelta(seconds=settings.timeout),
    )


def _run(trainer: Trainer, stop: Stop, resume: bool, restarts: int) -> RunResult:
    """Go on with what is there, if ``resume``, to the end; the first rank shows how far it is."""
    settings, first = trainer.settings, meshes.everyone().rank == 0
    console = Console(highlight=False)
    if resume and trainer.resume() and first:
        again = f"started again ({restarts}): " if restarts else ""
        console.print(f"  {again}going on from step {trainer.step} of {settings.steps}")
    if not first:
        return run_trainer(trainer, stop)
    with ProgressDisplay(console, settings.steps) as display:
        return run_trainer(trainer, stop, on_step=display)


def _leave(trainer: Trainer | None) -> None:
    """Leave the other processes in good order, after the checkpoint that is under way."""
    if trainer is not None:
        with contextlib.suppress(RuntimeError, OSError):  # there is an error to tell of already
            trainer.checkpointer.wait()
    meshes.shutdown()


def _restarts(ranks: Group) -> int:
    """How often these processes were started again after a failure: the most that any of them was told.

    Each machine's agent counts for itself, and one that joined later began later.
    """
    mine = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    return int(collectives.all_reduce(torch.tensor(mine), ranks, site="train.restarts", op="max"))


def _launch() -> str | None:
    """A name for all that torchrun starts until it ends, None where its agent keeps no store for these processes.

    ``--rdzv-id`` says something else: it may be missing, and a later torchrun may be given the same one.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(address, port, is_master=False, wait_for_workers=False)
    return store.compare_set(_LAUNCH, "", uuid.uuid4().hex).decode()


def _job() -> str | None:
    """What torchrun calls this job, None where it was given no name."""
    name = os.environ.get("TORCHELASTIC_RUN_ID", "")
    return name if name not in ("", "none") else None  # "none" is torchrun's own default
