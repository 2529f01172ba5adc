"""The inputs of ``parallelize`` and ``init_mesh``: meshes, batches, positions, a single process, wrapped models."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from shardfuse import ParallelTransformer, TransformerConfig, load_checkpoint, parallelize
from shardfuse.kernels.dev import accuracy
from shardfuse.layers.hf.folders import export_hf, load_hf
from shardfuse.parallel.checkpoint.entries import full_state_dict
from shardfuse.parallel.core.rendezvous import init_mesh
from shardfuse.parallel.pipeline.timeline import Costs
from shardfuse.parallel.zero import zero

CONFIG = TransformerConfig(
    vocab_size=40, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4, num_kv_heads=2, max_positions=32
)


def _model(mesh: Any = None, **options: Any) -> ParallelTransformer:
    return ParallelTransformer(CONFIG, mesh=mesh, device="meta", **options)


def _batch(rows: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(CONFIG.vocab_size, (rows, 9), generator=torch.Generator().manual_seed(0))
    return tokens[:, :-1], tokens[:, 1:]


def _said(call: Any) -> str:
    try:
        call()
    except ValueError as error:
        return str(error)
    return "nothing"


# --------------------------------------------------------------------------------------------------------------- meshes


def _meshes_body(rank: int, world: int) -> list[str]:
    def named(name: str) -> Any:
        return init_device_mesh("cpu", (world,), mesh_dim_names=(name,))

    mesh = init_mesh(dp=world)
    root = _model(mesh).to_empty(device="cpu")
    fully_shard(root, mesh=mesh["dp"])  # type: ignore[index]
    return [
        _said(lambda: parallelize(_model(), init_device_mesh("cpu", (world,)), zero=2)),
        _said(lambda: parallelize(_model(), named("data"), zero=2)),
        _said(lambda: parallelize(_model(), named("stage"), schedule="1f1b")),
        _said(lambda: zero.shard(torch.nn.Linear(4, 4), named("data"), zero=1)),
        _said(lambda: parallelize(_model(), zero=1)),
        _said(lambda: parallelize(root, mesh, zero=0)),
        _said(lambda: parallelize(_model(), named("dp_replicate"))),
        _said(lambda: parallelize(_model(), init_mesh(tp=world))),
    ]


def test_meshes_over_which_ranks_would_train_apart_are_refused(ranks: Any):
    for said in ranks(2, _meshes_body):
        assert said == [
            "the mesh's dimensions [2] have no names, so their meaning is unknown: make it by init_mesh(), or "
            "name them (mesh_dim_names) 'dp_replicate', 'dp', 'pp' and 'tp'",
            *(
                f"the mesh has a dimension {name!r} of 2 ranks, over which nothing would be spread: expected "
                "'dp_replicate', 'dp', 'pp', 'tp'; rename it, or pass the sub-mesh without it if its ranks are yours "
                "to keep alike"
                for name in ("data", "stage", "data")
            ),
            "zero=1 without a mesh shards nothing over the 2 processes: pass init_mesh()",
            "this FSDPParallelTransformer is already sharded: shard it once, or build it anew",
            "the mesh has a dimension 'dp_replicate', which repeats the shards of 'dp', and no 'dp': name it 'dp'",
            "the model was built for 1 tensor-parallel rank(s) and the mesh has tp=2: build it with mesh=mesh, "
            "or fuse(model, mesh)",
        ]


@pytest.mark.parametrize("missing", ["RANK", "MASTER_ADDR", "MASTER_PORT"])
def test_variables_that_are_missing_are_named(monkeypatch: pytest.MonkeyPatch, missing: str):
    for name, value in {"RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv(missing)
    with pytest.raises(ValueError, match=f"WORLD_SIZE=2 but no {missing}: start the processes with torchrun"):
        init_mesh(device_type="cpu")


_ALONE = """
import sys, torch, shardfuse as sf
sys.path[:0] = {here!r}
from test_parallelize_input import _batch, _model
losses = []
for offload in (False, True):
    model = sf.parallelize(_model(dtype=torch.float64), zero=3, offload=offload, microbatches=2, seed=0, device="cpu")
    assert (model.mesh is not None) is offload
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(2):
        losses.append(model.step(*_batch()).item())
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    sf.save_checkpoint({folder!r} + str(offload), model, optimizer)
    before = [param.detach().clone() for param in model.parameters()]
    for param in model.parameters():
        param.data.zero_()
    sf.load_checkpoint({folder!r} + str(offload), model, optimizer)
    assert all(torch.equal(*pair) for pair in zip(before, model.parameters()))
assert all(abs(one - other) < 1e-10 for one, other in zip(losses[:2], losses[2:])), losses
assert losses[1] < losses[0]
"""


def test_a_process_alone_may_offload(tmp_path: Path):
    """It uses FSDP2 on a mesh of one; its checkpoint equals the bare model's."""
    script = _ALONE.format(
        here=[str(Path(__file__).parent), str(Path(__file__).parents[1] / "support")], folder=str(tmp_path / "offload-")
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    states = []
    for offload in (False, True):
        model = ParallelTransformer(CONFIG, dtype=torch.float64)
        load_checkpoint(tmp_path / f"offload-{offload}", model)
        states.append(model.state_dict())
    assert states[0].keys() == states[1].keys()
    for name, value in states[0].items():
        assert accuracy.within(name, value, states[1][name], 1e-10).ok


# -------------------------------------------------------------------------------------------------------------- batches


def _bad_batches_body(rank: int, world: int) -> list[str]:
    """First one rank's batch is wrong; then arguments are wrong for any batch."""
    mesh = init_mesh(dp=world)
    model = parallelize(_model(mesh), mesh, seed=0)
    tokens, targets = _batch()
    mine = (tokens.float(), targets) if rank == 1 else (tokens, targets)
    small = (tokens.to(torch.uint8), targets) if rank == 1 else (tokens, targets)
    unknown = (tokens, targets + CONFIG.vocab_size) if rank == 1 else (tokens, targets)
    rows, positions = (0, torch.arange(7)) if rank == 1 else (4, torch.arange(8))
    return [
        _said(lambda: model.step(*mine)),
        _said(lambda: model.step(*small)),
        _said(lambda: model.step(*unknown)),
        _said(lambda: model.step(tokens[:rows], targets[:rows], positions=positions)),
        _said(lambda: model.step(tokens, torch.arange(8), targets)),
        _said(lambda: model.evaluate(tokens)),
        _said(lambda: model.step()),
    ]


def test_batches_that_cannot_be_taken_are_refused_on_every_rank(ranks: Any):
    good, bad = ranks(2, _bad_batches_body)
    others = "1 of 2 ranks that read data refused their batch; their errors say why"
    in_a_row = "in a row: expected tokens and targets; positions go by name"
    assert good[:4] == [others] * 4
    assert bad[:4] == [
        "tokens are torch.float32: expected whole numbers, torch.int64 or torch.int32",
        "tokens are torch.uint8: expected whole numbers, torch.int64 or torch.int32",
        f"cross-entropy: target {_batch()[1][0, 0] + 40} is neither in the vocabulary of 40 nor ignore_index=-100",
        "positions [7]: expected [8] or [0, 8]",
    ]
    for said in (good, bad):
        assert [line[: line.index(" in a row")] for line in said[4:]] == ["3 tensors", "1 tensor", "0 tensors"]
        assert all(in_a_row in line for line in said[4:])


def _costs_body(rank: int, world: int) -> list[Any]:
    mesh = init_mesh(pp=world)
    costs = [Costs(1, 1, 1), Costs(4, 4, 4), Costs(1, 1, 1), 3.0]
    options = {"schedule": "1f1b", "seed": 0}
    kept = cast(ParallelTransformer, parallelize(_model(mesh), mesh, costs=costs, **options).module).kept
    mine = [1.0] * 4 if rank == 0 else [5.0, 1.0, 1.0, 1.0]
    return [sorted(kept), _said(lambda: parallelize(_model(mesh), mesh, costs=mine, **options))]


def test_costs_cut_a_pipeline_and_ranks_agree_on_them(ranks: Any):
    (first, said), (second, others) = ranks(2, _costs_body)
    assert (first, second) == ([0, 1], [2, 3])
    assert said == others
    assert said.startswith("costs differ between ranks, which would cut the model differently")


def _positions_body(rank: int, world: int, degrees: dict[str, int], options: dict[str, Any]) -> list[float]:
    mesh = init_mesh(**degrees)
    model = parallelize(_model(mesh, dtype=torch.float64), mesh, seed=0, **options)
    batch, shifted = _batch(), torch.arange(8).repeat(4, 1) + torch.arange(4)[:, None]
    losses = [model.step(*batch, positions=positions).item() for positions in (None, shifted % 5, shifted[3] % 5)]
    return [*losses, model.evaluate(*batch, positions=shifted % 5).item()]


def test_positions_reach_every_micro_batch(ranks: Any):
    whole = _model(dtype=torch.float64)
    parallelize(whole, seed=0, device="cpu")
    (tokens, targets), shifted = _batch(), torch.arange(8).repeat(4, 1) + torch.arange(4)[:, None]
    expected = [
        whole(tokens, targets, positions=positions).item()
        for positions in (None, shifted % 5, shifted[3] % 5, shifted % 5)
    ]
    assert len(set(expected)) == 3
    spread = [({"pp": 2}, {"schedule": "1f1b", "microbatches": 2}), ({"dp": 2}, {"zero": 2, "microbatches": 3})]
    for degrees, options in spread:
        for losses in ranks(2, _positions_body, degrees, options):
            assert losses == pytest.approx(expected, rel=1e-12)


def test_what_spreads_a_model_is_not_in_its_names(tmp_path: Path):
    model = _model()
    spread = parallelize(model, seed=0, device="cpu")
    compiled = torch.compile(spread)  # nothing runs, so nothing is compiled
    for wrapped in (spread, compiled):
        assert full_state_dict(wrapped).keys() == model.state_dict().keys()
    export_hf(cast(ParallelTransformer, spread), tmp_path)
    for name, value in load_hf(tmp_path).state_dict().items():
        assert torch.equal(value, model.state_dict()[name]), name


def test_positions_reach_forward_too():
    model = parallelize(_model(dtype=torch.float64), seed=0, device="cpu")
    (tokens, targets), positions = _batch(), torch.arange(8) * 2
    plain, placed = model(tokens, targets), model(tokens, targets, positions=positions)
    assert plain != placed
    assert placed.item() == pytest.approx(model.evaluate(tokens, targets, positions=positions).item(), rel=1e-12)


def test_a_module_takes_its_positions_in_a_row():
    model = parallelize(torch.nn.Linear(4, 4), device="cpu")
    with pytest.raises(ValueError, match="positions: Linear takes its inputs in a row"):
        model.step(torch.ones(2, 4), torch.ones(2), positions=torch.arange(2))
