"""Refused combinations, each built here without the check to show its fault, and accepted ones."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from data_parallel_case import batch, build, everywhere, share
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn.parallel import DataParallel, DistributedDataParallel

from shardfuse import ColumnParallelLinear, ParallelMLP, ParallelTransformer, init_mesh
from shardfuse.parallel import compatibility
from shardfuse.parallel.compatibility import REFUSALS, check
from shardfuse.parallel.core.mesh import data_group
from shardfuse.parallel.core.sharding import local_tensor
from shardfuse.parallel.pipeline.split_backward import stage_backward_input, stage_backward_weight
from shardfuse.parallel.zero import zero

SPLIT = {"schedule": "zbv", "splits_backward": True}


def _refused(*args: Any, name: str, **kwargs: Any) -> None:
    """Assert that check raises with the reason and remedy of the entry ``name``."""
    (entry,) = [refusal for refusal in REFUSALS if refusal.name == name]
    with pytest.raises(ValueError) as caught:
        check(*args, **kwargs)
    assert entry.fix in str(caught.value)
    assert "{" not in str(caught.value)


# --- a backward in two passes, as zero-bubble schedules run it -------------------------------------------------------


def _net() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))


def _rows(rank: int) -> torch.Tensor:
    return torch.randn(4, 4, generator=torch.Generator().manual_seed(rank))


def _mean_gradients(world: int) -> list[torch.Tensor]:
    net = _net()
    for rank in range(world):
        net(_rows(rank)).sum().backward()
    return [param.grad / world for param in net.parameters()]


def _split_backward(module: nn.Module, x: torch.Tensor) -> None:
    """The actions of torch's pipeline stage in its passes for inputs and weights."""
    x = x.requires_grad_()
    y = module(x)
    _, groups = stage_backward_input([y], [torch.ones_like(y)], [x], module.parameters())
    stage_backward_weight(module.parameters(), groups)


def _right(module: nn.Module, world: int) -> bool:
    grads = [param.grad for param in module.parameters()]
    whole = [grad.full_tensor() if hasattr(grad, "full_tensor") else grad for grad in grads]
    return all(
        grad is not None and torch.allclose(grad, mean, rtol=1e-5) for grad, mean in zip(whole, _mean_gradients(world))
    )


def _sharded(mesh: Any, stage: int) -> bool:
    """Whether a split backward over FSDP2 gives the right gradients, with a pipeline stage's calls."""
    module = _net()
    for part in (module[0], module[2], module):
        fully_shard(part, mesh=mesh["dp"], reshard_after_forward=stage == 3)
    module.unshard()
    module.set_is_last_backward(False)
    module.set_reshard_after_backward(False)
    module.set_requires_gradient_sync(False)
    if hasattr(module, "set_manual_backward_finalization"):  # torch 2.15
        module.set_manual_backward_finalization(True)
    _split_backward(module, _rows(dist.get_rank()))
    alone, _ = dist.new_subgroups(1)
    stage_of = PipelineStage(module, 0, 1, torch.device("cpu"), group=alone)
    stage_of.has_backward = True
    stage_of.perform_reduce_grad(1)
    return _right(module, dist.get_world_size())


def _split_body(rank: int, world: int) -> dict[str, bool]:
    mesh = init_mesh(dp=world, tp=1)
    _refused(_net(), mesh, zero=3, **SPLIT, name="split backward + resharding")
    _refused(DistributedDataParallel(_net()), mesh, zero=0, **SPLIT, name="split backward + DDP")
    with pytest.raises(ValueError, match="zero=3 under schedule='zbv'"):
        zero.shard(_net(), mesh, zero=3, **SPLIT)
    for stage in (0, 1, 2):
        check(_net(), mesh, zero=stage, **SPLIT)
    check(_net(), mesh, zero=3, schedule="1f1b")
    replica = DistributedDataParallel(_net())
    _split_backward(replica, _rows(rank))
    return {"zero 3": _sharded(mesh, 3), "zero 2": _sharded(mesh, 2), "ddp": _right(replica, world)}


@pytest.mark.ranks
def test_split_backward_needs_whole_parameters_and_no_ddp(ranks: Any) -> None:
    for right in ranks(2, _split_body):
        assert right == {"zero 3": False, "zero 2": True, "ddp": False}


def _gpipe_body(rank: int, world: int) -> bool:
    """Three steps of GPipe over two stages, each in DDP; returns whether replicas are still equal."""
    mesh = init_mesh(dp=2, pp=2, tp=1)
    module = DistributedDataParallel(_net(), process_group=mesh.get_group("dp"))
    check(module, None, schedule="gpipe")
    example = torch.empty(2, 4, device="meta", requires_grad=True)
    stage = PipelineStage(
        module,
        mesh.get_local_rank("pp"),
        2,
        torch.device("cpu"),
        input_args=(example,),
        output_args=(example,),
        group=mesh.get_group("pp"),
    )
    schedule = ScheduleGPipe(stage, 2, loss_fn=lambda y, target: (y - target).square().sum())
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    inputs = (_rows(mesh.get_local_rank("dp")),) if stage.is_first else ()
    for _ in range(3):
        schedule.step(*inputs, target=_rows(9) if stage.is_last else None)
        optimizer.step()
        optimizer.zero_grad()
    weights = everywhere([param.detach() for param in module.parameters()])
    return all(torch.equal(a, b) for a, b in zip(weights[rank], weights[(rank + 2) % world]))


@pytest.mark.nightly
@pytest.mark.ranks
def test_ddp_under_gpipe_is_let_through(ranks: Any) -> None:
    """DDP's reducer fails in the second step if torch must run a stage to infer its shapes; this project's Pipeline
    passes the shapes."""
    assert ranks(4, _gpipe_body) == [True] * 4


# --- tensor-parallel parameters --------------------------------------------------------------------------------------


def _same_folder() -> str:
    """A new folder with the same name on all ranks."""
    return everywhere(tempfile.mkdtemp())[0]


def _survives_dcp(model: nn.Module, names: list[str]) -> bool:
    """Whether torch's own checkpoint restores this rank's parameters."""
    folder, params = _same_folder(), dict(model.named_parameters())
    before = {name: local_tensor(params[name]).detach().clone() for name in names}
    dcp.save(model.state_dict(), checkpoint_id=folder)
    with torch.no_grad():
        for name in names:
            local_tensor(params[name]).zero_()
    dcp.load(model.state_dict(), checkpoint_id=folder)
    same = all(torch.equal(local_tensor(params[name]), value) for name, value in before.items())
    everywhere(None)
    shutil.rmtree(folder, ignore_errors=True)
    return same


def _local_body(rank: int, world: int) -> dict[str, bool]:
    mesh = init_mesh(dp=2, tp=2)
    for stage in (0, 1, 3):
        _refused(build(mesh, params="local"), mesh, zero=stage, name="local parameters + FSDP2")
        check(build(mesh), mesh, zero=stage)
    _refused(build(mesh, params="local"), mesh, engine="ddp", dcp=True, name="local parameters + DCP")
    check(build(mesh, params="local"), mesh, engine="ddp")
    split = ["model.layers.0.self_attn.q_proj.weight", "model.layers.0.mlp.c_proj.weight"]
    found = {}
    for name, params, shards in (
        ("local", "local", False),
        ("local, sharded", "local", True),
        ("dtensor", "dtensor", 1),
    ):
        model = build(mesh, params=params)
        if shards:
            fully_shard(model, mesh=mesh["dp"])
        found[name] = all(everywhere(_survives_dcp(model, split)))
    return found


@pytest.mark.ranks
def test_torchs_checkpoints_lose_local_parts(ranks: Any) -> None:
    for found in ranks(4, _local_body):
        assert found == {"local": False, "local, sharded": False, "dtensor": True}


def _dtensor_body(rank: int, world: int) -> list[str]:
    mesh = init_mesh(tp=2)
    model = build(mesh)
    _refused(model, mesh, engine="ddp", name="DDP + DTensor")
    _refused(model, mesh, engine="zero_optimizer", zero=1, name="ZeroRedundancyOptimizer + DTensor")
    _refused(model, mesh, engine="deepspeed", zero=1, name="DeepSpeed + DTensor")
    local = build(mesh, params="local")
    _refused(local, mesh, engine="deepspeed", **SPLIT, name="DeepSpeed + split backward")
    for engine in compatibility.ENGINES:
        check(local, mesh, engine=engine)
    said = []
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.1)
    model(*batch(0)).backward()
    for call in (lambda: DistributedDataParallel(model), optimizer.step):
        with pytest.raises(Exception) as caught:
            call()
        said.append(str(caught.value))
    return said


@pytest.mark.ranks
def test_engines_that_broadcast_parameters_cannot_take_dtensors(ranks: Any) -> None:
    for said in ranks(2, _dtensor_body):  # torch 2.11 flattens parameters before it broadcasts them
        assert all("broadcast_" in message or "Attempted to flatten" in message for message in said)


def _wgrad_body(rank: int, world: int) -> None:
    mesh = init_mesh(dp=world, tp=1)
    mlp = ParallelMLP(8, 16, fuse_wgrad_accumulation=True)
    for wrapped, options in ((mlp, {"zero": 1}), (mlp, {"engine": "ddp"}), (DistributedDataParallel(mlp), {})):
        _refused(wrapped, mesh, **options, name="wgrad accumulation + a wrapper")
    check(mlp, None, zero=1)  # no other rank to reduce with
    check(ParallelMLP(8, 16), mesh, zero=1)


@pytest.mark.ranks
def test_gradients_in_buffers_are_not_reduced(ranks: Any) -> None:
    """tests/parallel/test_main_grad.py shows that the layers themselves refuse."""
    ranks(2, _wgrad_body)


def _data_parallel_body(rank: int, world: int) -> list[str]:
    mesh = init_mesh(tp=2)
    said = []
    for params in ("dtensor", "local"):
        layer = ColumnParallelLinear(4, 6, mesh=mesh, params=params)
        _refused(DataParallel(layer), mesh, name="nn.DataParallel + tensor parallelism")
        with pytest.raises(ValueError) as caught:
            layer._replicate_for_data_parallel()  # DataParallel's first call in a forward over several GPUs
        said.append(str(caught.value))
    return said


@pytest.mark.ranks
def test_data_parallel_threads_are_refused_by_the_layers(ranks: Any) -> None:
    for said in ranks(2, _data_parallel_body):
        assert all("start one process per GPU" in message for message in said)


def test_data_parallel_in_one_process_runs() -> None:
    model = build(dtype=torch.float32)
    check(DataParallel(model), None)
    assert torch.equal(DataParallel(model)(*batch(0)), model(*batch(0)))
    assert isinstance(_replicas(model)[0], ParallelTransformer)
    whole = model(*batch(0))
    whole.backward()
    grads = [param.grad.clone() for param in model.parameters()]
    model.zero_grad()
    first, second = (each(*rows) for each, rows in zip(_replicas(model), zip(*(t.chunk(2) for t in batch(0)))))
    ((first + second) / 2).backward()
    for param, grad in zip(model.parameters(), grads):
        torch.testing.assert_close(param.grad, grad)


def _replicas(model: nn.Module) -> list[nn.Module]:
    """Two replicas, as from torch.nn.parallel.replicate for two GPUs; their parameters depend on the model's."""
    replicas = []
    for _ in range(2):
        copies = {module: module._replicate_for_data_parallel() for module in model.modules()}
        for module, copied in copies.items():
            for name, child in module._modules.items():
                copied._modules[name] = copies[child]
            for name, param in module._parameters.items():
                if param is None:
                    copied._parameters[name] = None
                else:
                    setattr(copied, name, param.view_as(param))
        replicas.append(copies[model])
    return replicas


# --- everything else -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"zero": 4}, "zero=4: expected 0 .* or 3"),
        ({"zero": True}, "zero=True: expected"),
        ({"engine": "horovod"}, "engine='horovod': expected one of fsdp2, ddp, zero_optimizer, deepspeed"),
    ],
)
def test_what_is_not_known(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check(nn.Linear(2, 2), None, **options)


def _several_body(rank: int, world: int) -> None:
    mesh = init_mesh(dp=world, tp=1)
    layer = ParallelMLP(8, 16, fuse_wgrad_accumulation=True)
    with pytest.raises(ValueError) as caught:
        check(layer, mesh, zero=3, **SPLIT)
    assert "fuse_wgrad_accumulation" in str(caught.value)
    assert "zero=3" in str(caught.value)
    check(layer, mesh["tp"], zero=3, **SPLIT)  # a mesh without data parallelism wraps nothing


@pytest.mark.ranks
def test_all_that_is_wrong_is_said_at_once(ranks: Any) -> None:
    ranks(2, _several_body)


def test_every_refusal_is_tried_here() -> None:
    source = Path(__file__).read_text()
    assert [refusal.name for refusal in REFUSALS if f'name="{refusal.name}"' not in source] == []


def _ddp_body(rank: int, world: int, dims: dict[str, int]) -> bool:
    """DDP over the data-parallel ranks, on plain parameters, gives the gradients of the whole batch."""
    mesh = init_mesh(**dims)
    group, model = data_group(mesh), build(mesh, params="local")
    check(model, mesh, engine="ddp")
    replica = DistributedDataParallel(model, process_group=group.pg)
    for index, last in enumerate((False, True)):  # two micro-batches, of which the second reduces
        zero.accumulate(replica, last)
        (replica(*(share(whole, mesh) for whole in batch(index))) / 2).backward()
        before = [param.grad.clone() for param in model.parameters()]
        if not last:
            assert any(len({float(g.sum()) for g in everywhere(grad)[:: dims["tp"]]}) > 1 for grad in before)
    alone = build(mesh, params="local")
    for index in range(2):
        (alone(*batch(index)) / 2).backward()
    return all(torch.allclose(a.grad, b.grad) for a, b in zip(model.parameters(), alone.parameters()))


@pytest.mark.ranks
@pytest.mark.parametrize(
    "dims", [{"dp": 2, "tp": 1}, pytest.param({"dp": 2, "tp": 2}, marks=pytest.mark.nightly)], ids=str
)
def test_ddp_works_on_plain_parameters(ranks: Any, dims: dict[str, int]) -> None:
    assert all(ranks(dims["dp"] * dims["tp"], _ddp_body, dims))
