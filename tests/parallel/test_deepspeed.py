"""DeepSpeed's ZeRO around the same model: the generated configuration, and the real package if installed."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from data_parallel_case import BATCH, TERMS, batch, build, share
from ranks import Pool
from torch import nn

from shardfuse import init_mesh
from shardfuse.kernels.dev import accuracy
from shardfuse.parallel.core.sharding import spec_of
from shardfuse.parallel.pipeline.split_backward import stage_backward_input, stage_backward_weight
from shardfuse.parallel.zero.deepspeed import deepspeed_config, initialize, mpu

MAX_NORM, STEPS = 0.5, 2
ADAM = {"lr": 0.01, "eps": 1e-3}


# --- the generated configuration --------------------------------------------------------------------------------------


def test_the_configuration_says_what_was_asked() -> None:
    config = deepspeed_config(zero=3, micro_batch=2, accumulate=4, max_norm=1.5, precision="bf16", offload=True, seed=1)
    assert config["train_micro_batch_size_per_gpu"] == 2
    assert config["gradient_accumulation_steps"] == 4
    assert config["gradient_clipping"] == 1.5
    assert config["zero_optimization"] == {
        "stage": 3,
        "offload_optimizer": {"device": "cpu"},
        "offload_param": {"device": "cpu"},
    }
    assert config["bf16"] == {"enabled": True}
    assert config["seed"] == 1
    plain = deepspeed_config(zero=1, micro_batch=1)
    assert plain["gradient_clipping"] == 0.0
    assert plain["zero_optimization"] == {"stage": 1}
    assert not plain.keys() & {"bf16", "fp16"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"zero": 4}, "zero=4: expected"),
        ({"precision": "fp8"}, "precision='fp8': expected None or one of bf16, fp16"),
        ({"micro_batch": 0}, "micro_batch=0, accumulate=1: expected at least 1"),
        ({"accumulate": 0}, "accumulate=0: expected at least 1"),
    ],
)
def test_what_deepspeed_does_not_know_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        deepspeed_config(**{"zero": 1, "micro_batch": 1, **options})


def test_a_missing_package_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    model = nn.Linear(2, 2)
    with pytest.raises(RuntimeError, match="pip install deepspeed"):
        initialize(model, torch.optim.SGD(model.parameters()), None, deepspeed_config(zero=1, micro_batch=1))  # type: ignore[arg-type]


def _mpu_body(rank: int, world: int) -> tuple[Any, ...]:
    unit = mpu(init_mesh(dp=2, tp=2))
    assert unit.get_data_parallel_group_ranks() == dist.get_process_group_ranks(unit.get_data_parallel_group())
    assert unit.get_model_parallel_world_size() == unit.get_tensor_model_parallel_world_size() == 2
    lonely = mpu(init_mesh(dp=1, tp=4))
    assert lonely.get_data_parallel_group_ranks() == [rank]
    assert lonely.get_data_parallel_world_size() == 1
    with pytest.raises(ValueError, match="the mesh has 2 pipeline stages"):
        mpu(init_mesh(pp=2, tp=2))
    return (
        unit.get_data_parallel_rank(),
        unit.get_data_parallel_world_size(),
        unit.get_data_parallel_group_ranks(),
        unit.get_model_parallel_rank(),
        dist.get_process_group_ranks(unit.get_model_parallel_group()),
        unit.get_tensor_model_parallel_src_rank(),
    )


@pytest.mark.ranks
def test_who_shares_what_is_the_meshs(ranks: Any) -> None:
    for rank, found in enumerate(ranks(4, _mpu_body)):
        share_of, part = divmod(rank, 2)
        pair = [share_of * 2, share_of * 2 + 1]
        assert found == (share_of, 2, [part, part + 2], part, pair, pair[0])


def _counted_norm(rank: int, world: int, dims: dict[str, Any]) -> float:
    """The norm of a grid's gradients as DeepSpeed forms it: over the first rank's parameters and all marked ones."""
    mesh = init_mesh(**dims)
    unit = mpu(mesh)
    model = build(mesh, params="local")
    model(*(share(whole, mesh) for whole in batch(0))).backward()
    counted = [
        param for param in model.parameters() if param.tensor_model_parallel or unit.get_model_parallel_rank() == 0
    ]
    grads = [param.grad for param in counted]
    for grad in grads:  # dp holds copies of the model
        dist.all_reduce(grad, dist.ReduceOp.AVG, unit.get_data_parallel_group())
    squares = sum((grad.square().sum() for grad in grads), torch.zeros((), dtype=torch.float64))
    dist.all_reduce(squares, group=unit.get_model_parallel_group())
    assert unit.get_tensor_model_parallel_src_rank() == rank - unit.get_model_parallel_rank()
    return squares.sqrt().item()


@pytest.mark.ranks
@pytest.mark.parametrize(
    "dims", [{"dp": 1, "grid": (1, 2, 2)}, {"dp": 1, "grid": (1, 2), "depth": 2}, {"dp": 2, "grid": (1, 1, 2)}], ids=str
)
def test_a_grids_norm_counts_copies_once(ranks: Any, dims: dict[str, Any]) -> None:
    model = build()
    model(*batch(0)).backward()
    expected = nn.utils.clip_grad_norm_(model.parameters(), float("inf")).item()
    assert ranks(4, _counted_norm, dims) == [pytest.approx(expected, rel=1e-12)] * 4


def test_a_mesh_of_other_dimensions_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"mpu: mesh is None: expected dp with tp or a grid: .* init_mesh\(alone=True\)"
    ):
        mpu(None)


# --- the real package -------------------------------------------------------------------------------------------------


@pytest.fixture
def own_ranks() -> Iterator[Any]:
    """A separate pool: importing DeepSpeed changes the process, and its stage 3 numbers modules by their count in the
    process, which must be equal on all ranks."""
    if importlib.util.find_spec("deepspeed") is None:
        pytest.skip("DeepSpeed is not installed: pip install deepspeed")
    pool = Pool()
    yield pool
    pool.close()


def _trained(stage: int, mesh: Any, dims: dict[str, Any], accumulate: int) -> dict[str, torch.Tensor]:
    """Losses, norms and this rank's parameters after STEPS steps of DeepSpeed."""
    from deepspeed.utils import safe_get_full_fp32_param

    model = build(mesh, params="local", dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAM)
    micro = BATCH // dims["dp"] // accumulate
    config = deepspeed_config(zero=stage, micro_batch=micro, accumulate=accumulate, max_norm=MAX_NORM)
    engine = initialize(model, optimizer, mesh, config)
    found = {}
    for number in range(STEPS):
        parts = zip(*(share(whole, mesh).chunk(accumulate) for whole in batch(number)))
        for tokens, targets in parts:
            engine.backward(engine(tokens, targets))
            engine.step()
        norm = engine.get_global_grad_norm()
        if norm is not None:  # stage 0 keeps it to itself
            found[f"norm {number}"] = torch.as_tensor(norm).float()
    for name, param in model.named_parameters():
        found[name] = (safe_get_full_fp32_param(param) if stage else param.detach()).clone()
    engine.destroy()
    return found


def _alone(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The same in one process, by torch."""
    model = build(dtype=dtype)
    optimizer, found = torch.optim.AdamW(model.parameters(), **ADAM), {}
    for number in range(STEPS):
        model(*batch(number)).backward()
        found[f"norm {number}"] = nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
    return found | {name: param.detach() for name, param in model.named_parameters()}


def _deepspeed_body(rank: int, world: int, dims: dict[str, Any], cases: list[tuple[int, int]]) -> list[Any]:
    mesh = init_mesh(**dims)
    specs = {name: spec_of(param) for name, param in build(mesh, params="local").named_parameters()}
    low, oracle = _alone(torch.float32), _alone(torch.float64)
    assert oracle["norm 0"] > 2 * MAX_NORM
    verdicts = []
    for stage, accumulate in cases:
        found = _trained(stage, mesh, dims, accumulate)
        assert specs.keys() <= found.keys()
        # All parameters together: some gradients are only rounding errors, which Adam amplifies.
        ours = torch.cat([found[name].flatten() for name in specs])
        parts = (
            torch.cat([whole[name][spec.index].flatten() for name, spec in specs.items()]) for whole in (low, oracle)
        )
        wrong = [accuracy.judge("parameters", ours, *parts, terms=TERMS)]
        wrong += [
            accuracy.judge(name, found[name], low[name], oracle[name], terms=TERMS)
            for name in found.keys() - specs.keys()
        ]
        verdicts.append((stage, accumulate, [str(verdict) for verdict in wrong if not verdict.ok]))
    return verdicts


@pytest.mark.ranks
@pytest.mark.parametrize("dims", [{"dp": 2, "tp": 1}, {"dp": 2, "tp": 2}, {"dp": 2, "grid": (1, 1, 2)}], ids=str)
def test_every_stage_trains_as_one_process_does(own_ranks: Any, dims: dict[str, Any]) -> None:
    cases = [(0, 1), (1, 1), (2, 1), (3, 1), (2, 2)]
    # The first call compiles an extension.
    for found in own_ranks(2 * dims.get("tp", 2), _deepspeed_body, dims, cases, timeout=900):
        assert found == [(stage, accumulate, []) for stage, accumulate in cases]


def _refused_body(rank: int, world: int) -> dict[str, str]:
    """The results of combinations that compatibility.py refuses, without its check."""
    import deepspeed

    mesh, said = init_mesh(tp=2), {}
    for name, stage in (("DTensor", 0), ("split backward, stage 0", 0), ("split backward, stage 1", 1)):
        model = build(mesh, dtype=torch.float32) if name == "DTensor" else nn.Linear(4, 4)
        optimizer = torch.optim.AdamW(model.parameters(), **ADAM)
        try:
            config = deepspeed_config(zero=stage, micro_batch=1)
            engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, mpu=mpu(mesh))
            x = torch.randn(2, 4, requires_grad=True)
            y = engine(x)
            _, groups = stage_backward_input([y], [torch.ones_like(y)], [x], engine.parameters())
            stage_backward_weight(engine.parameters(), groups)
        except Exception as error:
            said[name] = f"{error} {error.__cause__}"
    return said


@pytest.mark.ranks
def test_what_is_refused_fails(own_ranks: Any) -> None:
    for said in own_ranks(2, _refused_body, timeout=900):
        assert said.keys() == {"DTensor", "split backward, stage 0", "split backward, stage 1"}
        assert "swap" in said["DTensor"]
