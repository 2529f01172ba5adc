"""One training through a chain of layouts: each loads the previous one's checkpoint bit for bit and continues."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from shardfuse import ParallelTransformer, TransformerConfig
from shardfuse.kernels.dev import accuracy
from shardfuse.parallel.checkpoint import storage, tensor_files
from shardfuse.parallel.checkpoint.manager import Checkpointer
from shardfuse.parallel.core.mesh import data_coordinate
from shardfuse.parallel.core.rendezvous import init_mesh
from shardfuse.parallel.parallelize import parallelize

SIZES: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_layers": 4,
    "num_heads": 4,
    "num_kv_heads": 4,
    "max_positions": 16,
}
CONFIGS = {
    "gated-tied": TransformerConfig(style="gated", tie_embeddings=True, **SIZES),
    "gelu": TransformerConfig(style="gelu", bias=True, **SIZES),
}
BATCH, LENGTH = 12, 8


# Mesh degrees and options of parallelize.
ALONE: dict[str, Any] = {}
CHAIN: list[dict[str, Any]] = [
    ALONE,
    {"dp": 2, "tp": 2, "zero": 3},
    {"pp": 2, "tp": 2, "schedule": "1f1b", "microbatches": 2},
    {"dp_replicate": 2, "dp": 2, "zero": 3},
    {"dp": 2, "pp": 2, "zero": 1, "schedule": "interleaved_zb", "microbatches": 4},
    {"tp": 4},
    {"dp": 3, "zero": 1},
    {"pp": 2, "dp": 2, "zero": 0, "schedule": "zbv", "microbatches": 4},
    {"dp": 2, "tp": 2, "zero": 2, "offload": True},
    ALONE,
]
SHORT: list[dict[str, Any]] = [  # over two processes; each degree and the ZeRO stage change
    {"dp": 2, "zero": 3},
    {"tp": 2},
    {"pp": 2, "schedule": "zbv", "microbatches": 4},
    {"dp": 2, "zero": 1},
]
DIMS = ("dp_replicate", "dp", "pp", "tp")


def _world(layout: dict[str, Any]) -> int:
    return math.prod(layout.get(name, 1) for name in DIMS)


def _batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    rows = torch.randint(32, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(step))
    return rows[:, :-1], rows[:, 1:]


def _build(style: str, layout: dict[str, Any], dtype: torch.dtype) -> tuple[Any, torch.optim.Optimizer]:
    options = dict(layout)
    mesh = init_mesh(**{name: options.pop(name, 1) for name in DIMS}, device_type="cpu")
    model = ParallelTransformer(CONFIGS[style], mesh=mesh, dtype=dtype, device="meta")
    spread = parallelize(model, mesh, seed=5, **options)
    return spread, torch.optim.AdamW(spread.parameters(), lr=1e-2, foreach=False)


def _step(model: Any, optimizer: torch.optim.Optimizer, step: int) -> float:
    """Train on this rank's share; returns the loss of the whole batch."""
    share, shares = data_coordinate(model.mesh)
    loss = model.step(*(rows[share::shares] for rows in _batch(step)))
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def _hop(rank: int, world: int, style: str, layout: dict[str, Any], folder: Path, step: int) -> float:
    """Load the last checkpoint, save it again elsewhere, train a step, save."""
    model, optimizer = _build(style, layout, torch.float64)
    places = [Checkpointer(folder / name, mesh=model.mesh) for name in ("run", "again")]
    with places[0] as run, places[1] as again:
        resumed = run.load(model.module, optimizer)
        assert (0 if resumed is None else resumed.step) == step
        if resumed is not None:
            again.save(step, model.module, optimizer)
        loss = _step(model, optimizer, step)
        run.save(step + 1, model.module, optimizer)
    return loss


def _contents(folder: Path, step: int) -> dict[str, torch.Tensor]:
    """The whole logical tensors of model and optimizer in a checkpoint."""
    reader = tensor_files.Reader(*storage.open_checkpoint(folder / f"step-{step:08d}"))
    index = reader.read_metadata().state_dict_metadata
    wanted = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in index.items()
        if not key.startswith("state.")
    }
    dcp.load(wanted, storage_reader=reader, no_dist=True)
    return wanted


def _keys(config: TransformerConfig) -> set[str]:
    """The entries of a checkpoint of model and AdamW for each parameter."""
    names = [name for name, _ in ParallelTransformer(config, device="meta").named_parameters()]
    states = [f"optimizer.{name}.{each}" for name in names for each in ("step", "exp_avg", "exp_avg_sq")]
    return {*(f"model.{name}" for name in names), *states}


def _alone(style: str, dtype: torch.dtype, steps: int) -> torch.Tensor:
    model, optimizer = _build(style, ALONE, dtype)
    return torch.tensor([_step(model, optimizer, step) for step in range(steps)], dtype=dtype)


@pytest.mark.ranks
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # one process reads the checkpoint
@pytest.mark.parametrize(
    ("style", "chain"),
    [
        pytest.param("gated-tied", SHORT, id="short"),
        # These take minutes: make test-all runs them.
        *(pytest.param(style, CHAIN, id=style, marks=pytest.mark.nightly) for style in CONFIGS),
    ],
)
def test_a_chain_of_layouts(ranks: Any, tmp_path: Path, style: str, chain: list[dict[str, Any]]) -> None:
    losses = []
    for step, layout in enumerate(chain):
        losses.append(ranks(_world(layout), _hop, style, layout, tmp_path, step)[0])
        if step:
            loaded, again = (_contents(tmp_path / name, step) for name in ("run", "again"))
            assert loaded.keys() == again.keys(), layout
            assert loaded.keys() >= _keys(CONFIGS[style]), layout
            for key, value in loaded.items():
                assert torch.equal(value, again[key]), (layout, key)
    # In fp64 the layouts differ from one process by far less than fp32 would.
    low, oracle = (_alone(style, dtype, len(chain)) for dtype in (torch.float32, torch.float64))
    verdict = accuracy.judge("losses", torch.tensor(losses, dtype=torch.float64), low, oracle)
    assert verdict.ok, verdict
