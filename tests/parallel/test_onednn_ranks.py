"""oneDNN's products over ranks: right, chosen alike, and no second copy of parameters that ZeRO takes away."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from mlp_case import D, T, pair, run_with_grads, verdicts
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import shardfuse as sf
from shardfuse import tp_group
from shardfuse.kernels.linear import cpu
from shardfuse.kernels.runtime import dispatch, onednn
from shardfuse.parallel.core import first_calls
from shardfuse.parallel.core.sharding import spec_of, unwrap

WHY_NOT = onednn.why_not(torch.float32)
pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))


def _layer_body(rank: int, world: int, gated: bool, sequence_parallel: bool, overlap: str) -> list[str]:
    options = {"sequence_parallel": sequence_parallel, "overlap": overlap, "impl": "onednn"}
    ours, stock = pair(gated, mesh=tp_group(dist.group.WORLD), **options)
    x, dy = torch.randn(T, D, requires_grad=True), torch.randn(T, D)
    cut: dict[str, Any] = {name: spec_of(param).index for name, param in ours.named_parameters()}
    if sequence_parallel:
        cut["x"] = cut["y"] = slice(rank * T // world, (rank + 1) * T // world)
    rows = cut.get("x", slice(None))
    dispatch.counts.clear()
    found = run_with_grads(ours, x[rows], dy[rows])
    assert {impl for op, impl in dispatch.counts if op in ("linear_act", "gated_linear")} == {"onednn"}
    low = run_with_grads(stock, x, dy)
    oracle = run_with_grads(copy.deepcopy(stock).double(), x.double().detach().requires_grad_(), dy.double())
    wrong = verdicts(found, low, oracle, cut)
    ours.eval()
    with torch.no_grad():
        for _ in range(2):
            y = ours(x[rows])
    for param in ours.parameters():
        (local,), _ = unwrap([param])
        assert (onednn.packed_bytes(local) > 0) == (param.dim() == 2)
    return wrong + verdicts({"y": y}, {"y": low["y"]}, {"y": oracle["y"]}, cut)


@pytest.mark.parametrize("overlap", ["none", "chunked"])
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["", "sp"])
def test_layers_over_ranks(ranks: Any, sequence_parallel: bool, overlap: str):
    for gated in (False, True):
        assert ranks(2, _layer_body, gated, sequence_parallel, overlap) == [[], []]


def _processors_body(rank: int, world: int) -> tuple[list[str], set[str], str]:
    """Ranks whose tables differ: what they are told, what their layers run, and what ``explain`` says."""
    kept = cpu.fingerprint
    cpu.fingerprint = lambda: f"processor {rank}"
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            layer = sf.ParallelMLP(1024, 64, mesh=tp_group(dist.new_group([0, 1])))
            dispatch.counts.clear()
            layer(torch.randn(2048, 1024))
            layer(torch.randn(2048, 1024))
        ran = {impl for op, impl in dispatch.counts if op == "linear_act"}
        return [str(each.message) for each in said], ran, sf.explain(layer).rows[0].why
    finally:
        cpu.fingerprint = kept
        cpu.forget()


def test_ranks_on_different_processors_take_torchs_own(ranks: Any):
    for said, ran, why in ranks(2, _processors_body):
        (warning,) = said
        assert "ranks 0 and 1 choose their products on a CPU differently, by processor 0 and by processor 1" in warning
        assert warning.endswith("give all ranks one table with SHARDFUSE_TUNED")
        assert ran == {"reference"}
        assert "so all take torch's own" in why


def _asked_body(rank: int, world: int) -> int:
    asked: list[Any] = []
    inner = first_calls.collectives.gather_objects
    first_calls.collectives.gather_objects = lambda given, *a, **k: (asked.append(given), inner(given, *a, **k))[1]
    try:
        group = tp_group(dist.new_group([0, 1]))
        for _ in range(3):
            sf.ParallelMLP(8, 16, mesh=group)(torch.randn(3, 8))
    finally:
        first_calls.collectives.gather_objects = inner
    return asked.count(cpu.fingerprint())


def test_a_group_is_asked_once(ranks: Any):
    assert ranks(2, _asked_body) == [1, 1]


def _zero_body(rank: int, world: int) -> list[int]:
    """Bytes packed of a sharded model's parameters, and of a whole one's, after calls for inference."""
    found, results = [], []
    for shard in (True, False):
        torch.manual_seed(0)
        model = torch.nn.Sequential(sf.ParallelMLP(8, 16, impl="onednn"), sf.ParallelMLP(8, 16, impl="onednn"))
        if shard:
            for block in model:
                fully_shard(block, mesh=init_device_mesh("cpu", (world,)))
            fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
        x = torch.randn(5, 8)
        model(x).sum().backward()
        model.eval()
        before = len(onednn._packed)
        with torch.no_grad():
            for _ in range(3):
                y = model(x)
        found.append(len(onednn._packed) - before)
        results.append(y)
    torch.testing.assert_close(*results)
    return found


def _two_dimensions_body(rank: int, world: int) -> int:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(sf.ParallelMLP(8, 16, mesh=mesh["tp"], impl="onednn") for _ in range(2)))
    for block in (*model, model):
        fully_shard(block, mesh=mesh["dp"])
    model.eval()
    before = len(onednn._packed)
    with torch.no_grad():
        for _ in range(3):
            model(torch.ones(5, 8))
    return len(onednn._packed) - before


@pytest.mark.nightly
def test_what_zero_takes_away_beside_tensor_parallelism_is_not_packed(ranks: Any):
    assert ranks(4, _two_dimensions_body) == [0] * 4


def test_what_zero_takes_away_is_not_packed(ranks: Any):
    assert ranks(2, _zero_body) == [[0, 4]] * 2
