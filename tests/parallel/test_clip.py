"""One gradient norm, whatever dimensions of the mesh the parameters are spread over."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from data_parallel_case import TERMS, batch, build, share
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from shardfuse import init_mesh
from shardfuse.kernels.dev import accuracy
from shardfuse.parallel.core import collectives
from shardfuse.parallel.core.mesh import tp_group
from shardfuse.parallel.core.sharding import logical
from shardfuse.parallel.zero import zero
from shardfuse.parallel.zero.clip import GradientClipper

MAX_NORM = 0.05


def _alone(dtype: torch.dtype, **options: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The norm and the clipped gradients of the whole model in one process, by torch."""
    model = build(dtype=dtype, **options)
    model(*batch(0)).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
    return norm, {name: param.grad for name, param in model.named_parameters()}


def _verdicts(norm: torch.Tensor, model: nn.Module, **options: Any) -> list[str]:
    low, oracle = _alone(torch.float32, **options), _alone(torch.float64, **options)
    assert oracle[0] > 2 * MAX_NORM  # there is something to clip
    verdicts = [accuracy.judge("norm", norm, low[0], oracle[0], terms=TERMS)]
    for name, param in model.named_parameters():
        grad = logical(param.grad, param)
        grad = grad.full_tensor() if isinstance(grad, DTensor) else grad
        verdicts.append(accuracy.judge(name, grad, low[1][name], oracle[1][name], terms=TERMS))
    return [str(verdict) for verdict in verdicts if not verdict.ok]


def _body(rank: int, world: int, cases: list[tuple[dict[str, int], int | None, dict[str, Any]]]) -> list[Any]:
    found = []
    for dims, stage, options in cases:
        mesh = init_mesh(**dims)
        model = build(mesh, **options)
        if stage is not None:
            zero.shard(model, mesh, zero=stage)
        model(*(share(whole, mesh) for whole in batch(0))).backward()
        clipper = GradientClipper(model.parameters(), MAX_NORM, mesh)
        collectives.reset_counts()
        norm = clipper.clip()
        assert dict(collectives.calls) == {("all_reduce", "clip.norm"): 1}
        options = {name: value for name, value in options.items() if name != "params"}
        found.append((dims, stage, _verdicts(norm, model, **options)))
    return found


@pytest.mark.ranks
@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(
            [
                ({"dp": 2, "tp": 2}, 0, {}),
                ({"dp": 2, "tp": 2}, 3, {"tie_embeddings": True, "sequence_parallel": True}),
                ({"dp_replicate": 2, "dp": 2, "tp": 1}, 1, {}),
            ],
            id="some",
        ),
        pytest.param(
            [
                (dims, stage, {"tie_embeddings": tied})
                for dims in (
                    {"dp": 2, "tp": 2},
                    {"dp_replicate": 2, "dp": 2, "tp": 1},
                    {"dp_replicate": 2, "tp": 2},
                    {"dp": 4, "tp": 1},
                )
                for stage in (0, 1, 3)
                for tied in (False, True)
            ],
            id="all",
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_the_norm_over_every_dimension_is_that_of_the_whole_model(ranks: Any, cases: Any) -> None:
    for found in ranks(4, _body, cases):
        assert found == [(dims, stage, []) for dims, stage, _ in cases]


@pytest.mark.ranks
@pytest.mark.parametrize("params", ["dtensor", "local"])
def test_the_norm_over_tensor_parallel_ranks(ranks: Any, params: str) -> None:
    for found in ranks(2, _body, [({"tp": 2}, None, {"params": params})]):
        assert found[0][2] == []


def _stages_body(rank: int, world: int) -> tuple[float, float, float]:
    """Two pipeline stages with parameters of their own and one that both hold; then a stage without gradients."""
    mesh = init_mesh(pp=2, tp=1)
    own, tied = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(2))
    own.grad, tied.grad = torch.full((3,), 1.0 + rank), torch.tensor([3.0, 4.0])
    clipper = GradientClipper([own, tied], float("inf"), mesh, copies={tied: 2})
    norm, is_plain_module = clipper.clip(), float(own.grad.sum())
    if rank == 1:
        own.grad = tied.grad = None
    half = clipper.norm()
    return float(norm) ** 2, is_plain_module, float(half) ** 2


@pytest.mark.ranks
def test_stages_add_up_and_what_two_hold_counts_once(ranks: Any) -> None:
    for rank, (square, total, half) in enumerate(ranks(2, _stages_body)):
        assert square == pytest.approx(3 * 1 + 3 * 4 + 25)
        assert total == 3 * (1 + rank)  # infinity clips nothing
        assert half == pytest.approx(3 * 1 + 25 / 2)


def _partial_body(rank: int, world: int) -> tuple[float, float]:
    """DTensor's own gradient of a replicated weight that sees split tokens is a sum that is still open."""
    mesh = tp_group(init_mesh(tp=2)).mesh
    weight = nn.Parameter(distribute_tensor(torch.ones(3, 2), mesh, [Replicate()]))
    x = distribute_tensor(torch.arange(12.0).view(4, 3), mesh, [Shard(0)])
    (x @ weight).sum().backward()
    before = weight.grad.placements[0].is_partial()
    assert before
    norm = GradientClipper([weight], 1.0, mesh).clip()
    return float(norm), float(weight.grad.full_tensor().norm())


@pytest.mark.ranks
def test_open_sums_are_closed_first(ranks: Any) -> None:
    expected = torch.arange(12.0).view(4, 3).sum(0)[:, None].expand(3, 2).norm()
    for norm, clipped in ranks(2, _partial_body):
        assert norm == pytest.approx(float(expected))
        assert clipped == pytest.approx(1.0, rel=1e-4)


def test_in_one_process_it_is_torchs() -> None:
    model = build()
    model(*batch(0)).backward()
    norm = GradientClipper(model.parameters(), MAX_NORM).clip()
    assert _verdicts(norm, model) == []
    assert norm.dtype == torch.float64


def test_bf16_gradients_are_summed_in_fp32_and_a_bad_one_shows() -> None:
    param = nn.Parameter(torch.zeros(4096, dtype=torch.bfloat16))
    param.grad = torch.full_like(param, 0.1)
    norm = GradientClipper([param], 1e9).clip()
    assert norm.dtype == torch.float32
    verdict = accuracy.judge("norm", norm, param.grad.float().norm(), param.grad.double().norm(), terms=param.numel())
    assert verdict.ok, verdict
    param.grad[7] = float("inf")
    assert GradientClipper([param], 1.0).clip().isinf()
    assert GradientClipper([], 1.0).clip() == 0


@pytest.mark.parametrize("max_norm", [0.0, -1.0, float("nan")])
def test_a_norm_that_is_none_is_refused(max_norm: float) -> None:
    with pytest.raises(ValueError, match="expected a norm above 0"):
        GradientClipper([], max_norm)


def _too_small_body(rank: int, world: int) -> str:
    mesh = init_mesh(dp=2, tp=1)
    model = nn.Linear(4, 4)
    zero.shard(model, mesh, zero=1)
    with pytest.raises(ValueError) as caught:
        GradientClipper(model.parameters(), 1.0, None)
    return str(caught.value)


@pytest.mark.ranks
def test_parameters_that_are_spread_over_more_ranks_are_refused(ranks: Any) -> None:
    for message in ranks(2, _too_small_body):
        assert "its 1 rank(s) cannot hold a parameter of shape [4, 4] that is split in 2" in message
