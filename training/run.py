"""What a worker process does: train and save, or load and look. Module-level functions for ``launch``."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import torch
from rich.console import Console

from ..layers.hf import export_hf
from ..layers.transformer import ParallelTransformer
from ..parallel import mesh as meshes
from ..parallel.checkpoint import load_checkpoint, read_extra, save_checkpoint
from ..parallel.mesh import MeshLike
from .config import TrainConfig
from .data import load_corpus
from .loop import TrainResult, build_model, build_optimizer, evaluate, train
from .progress import ProgressDisplay

CHECKPOINT = "checkpoint"
EXPORT = "model"


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
