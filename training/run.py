"""What a worker process does: train and save, or load and look. Module-level functions for ``launch``."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import uuid
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console

from ..layers.hf.folders import export_hf
from ..layers.transformer import ParallelTransformer
from ..parallel.checkpoint import storage
from ..parallel.checkpoint.checkpoint import load_checkpoint, read_extra, save_checkpoint
from ..parallel.core import collectives
from ..parallel.core import mesh as meshes
from ..parallel.core.mesh import Group, MeshLike
from .config import TrainConfig
from .data import load_corpus
from .folders import RunFolder
from .loop import TrainResult, build_model, build_optimizer, evaluate, train
from .metrics import ProgressDisplay
from .restart import Stop, StopFile
from .settings import RunSettings
from .trainer import RunResult, Trainer
from .trainer import train as run_trainer

CHECKPOINT = "checkpoint"
EXPORT = "model"
_LAUNCH = "shardfuse/launch"  # in the store that torchrun's agent keeps


def train_and_save(config: TrainConfig, folder: Path) -> TrainResult:
    """Train over all processes that were started together; checkpoint and exported model go into ``folder``."""
    mesh = meshes.init_mesh(device_type=config.device)
    corpus = load_corpus(config.data, seq=config.seq)
    model = build_model(config, mesh)
    optimizer = build_optimizer(model, config)
    if model.group.rank == 0:
        with ProgressDisplay(Console(), config.steps) as display:
            result = train(model, optimizer, corpus, config, on_step=display)
    else:
        result = train(model, optimizer, corpus, config)
    extra = {"config": json.loads(config.to_json()), "step": result.steps, "held_out": result.held_out}
    save_checkpoint(folder / CHECKPOINT, model, optimizer, extra=extra)
    export_hf(model, folder / EXPORT)
    meshes.shutdown()
    return result


def load_trained(
    folder: Path, mesh: MeshLike = None, *, device: str = "cpu"
) -> tuple[ParallelTransformer, torch.optim.Optimizer, TrainConfig]:
    """Model, optimizer and config of a run that ``train_and_save`` left in ``folder``, at this mesh's degree."""
    saved = TrainConfig.from_json(json.dumps(read_extra(folder / CHECKPOINT)["config"]))
    config = dataclasses.replace(saved, device=device)
    model = build_model(config, mesh)
    optimizer = build_optimizer(model, config)
    load_checkpoint(folder / CHECKPOINT, model, optimizer)
    return model, optimizer, config


def evaluate_saved(folder: Path) -> float:
    """The held-out loss of a saved run, over all processes that were started together, on CPUs."""
    model, _, config = load_trained(folder, meshes.init_mesh(device_type="cpu"))
    held_out = evaluate(model, load_corpus(config.data, seq=config.seq), config)
    meshes.shutdown()
    return held_out


def train_run(settings: RunSettings, resume: bool, stop_file: StopFile | None = None) -> RunResult:
    """The run of resolved ``settings``, over all processes that were started together.

    Whoever started them with a ``stop_file`` holds the run's folder; otherwise the first rank does. Processes that are
    started again, after a failure or because torchrun's machines came or went, go on from the newest checkpoint,
    whatever ``resume`` says, if those before them were let into the folder.
    """
    parallel = settings.parallel
    assert parallel.dp is not None  # resolve() filled it in
    mesh = meshes.init_mesh(
        dp_replicate=parallel.dp_replicate,
        dp=parallel.dp,
        pp=parallel.pp,
        tp=parallel.tp,
        device_type=settings.device,
        timeout=None if settings.timeout is None else timedelta(seconds=settings.timeout),
    )
    folder: RunFolder | None = None
    trainer: Trainer | None = None
    try:
        with Stop(meshes.everyone(), stop_file) as stop, contextlib.ExitStack() as held:
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
