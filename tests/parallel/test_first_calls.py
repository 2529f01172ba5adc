"""A layer whose ranks built or called it differently says so in its first calls, before anything is sent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardfuse import (
    ColumnParallelLinear,
    ParallelAttention,
    ParallelMLP,
    ParallelTransformer,
    RowParallelLinear,
    TransformerConfig,
    VocabParallelEmbedding,
    parallelize,
)
from shardfuse.parallel.core.first_calls import COMPARED_CALLS
from shardfuse.parallel.core.rendezvous import init_mesh
from shardfuse.parallel.parallel_model import CHECKED_CALLS, _weight

pytestmark = pytest.mark.ranks

CONFIG = TransformerConfig(
    vocab_size=32, hidden_size=16, intermediate_size=32, num_layers=2, num_heads=2, tie_embeddings=False
)
LAYERS: dict[str, tuple[Callable[..., Any], Callable[[int], torch.Tensor]]] = {
    "column": (lambda **options: ColumnParallelLinear(8, 16, **options), lambda n: torch.ones(n, 8)),
    "row": (lambda **options: RowParallelLinear(16, 8, **options), lambda n: torch.ones(n, 8)),
    "mlp": (lambda **options: ParallelMLP(8, 16, **options), lambda n: torch.ones(n, 8)),
    "gated": (lambda **options: ParallelMLP(8, 16, gated=True, **options), lambda n: torch.ones(n, 8)),
    "attention": (lambda **options: ParallelAttention(16, 2, **options), lambda n: torch.ones(1, n, 16)),
    "embedding": (lambda **options: VocabParallelEmbedding(32, 8, **options), lambda n: torch.zeros(n).long()),
    "transformer": (lambda **options: ParallelTransformer(CONFIG, **options), lambda n: torch.zeros(1, n).long()),
}


def _refusal(action: Callable[[], Any]) -> str:
    try:
        action()
    except ValueError as error:
        return str(error)
    return "no error"


def _sizes_body(rank: int, world: int, name: str, call: int, grad: bool) -> tuple[str, str]:
    """What call number ``call`` says, which rank 1 makes with one row more; then what an equal one says."""
    mesh = init_mesh(tp=2, device_type="cpu")
    make, inputs = LAYERS[name]
    layer = make(mesh=mesh)
    with torch.set_grad_enabled(grad):
        for _ in range(call):
            layer(inputs(4))
        return _refusal(lambda: layer(inputs(4 + rank))), _refusal(lambda: layer(inputs(4)))


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize(("call", "grad"), [(0, True), (COMPARED_CALLS - 1, False)])
def test_inputs_of_two_sizes(ranks: Any, name: str, call: int, grad: bool):
    sizes = [str(list(LAYERS[name][1](n).shape)) for n in (4, 5)]
    for message, after in ranks(2, _sizes_body, name, call, grad):
        assert all(size in message for size in sizes)
        assert f"call {call + 1}: " in message
        assert after == "no error"


def _built_body(rank: int, world: int, change: dict[str, Any]) -> str:
    mesh = init_mesh(tp=2, device_type="cpu")
    torch.manual_seed(0)
    layer = ParallelMLP(8, mesh=mesh, **{"ffn_size": 16, **(change if rank == 1 else {})})
    return _refusal(lambda: layer(torch.ones(4, 8)))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"activation": "relu"}, "activation is 'gelu_tanh' on rank 0 and 'relu' on rank 1"),
        ({"ffn_size": 32}, "c_fc.out_features is 16 on rank 0 and 32 on rank 1"),
        ({"recompute": 2}, "recompute is 0 on rank 0 and 2 on rank 1"),
        ({"bias": False}, "parameter c_fc.bias is [16] torch.float32 on rank 0 and nothing on rank 1"),
        (
            {"dtype": torch.float64},
            "parameter c_fc.weight is [16, 8] torch.float32 on rank 0 and [16, 8] torch.float64",
        ),
        ({"overlap": "none"}, "overlap is 'auto' on rank 0 and 'none' on rank 1"),
    ],
    ids=lambda each: next(iter(each)) if isinstance(each, dict) else "",
)
def test_layers_that_were_built_differently(ranks: Any, change: dict[str, Any], says: str):
    for message in ranks(2, _built_body, change):
        assert message.startswith(f"ParallelMLP: {says}")


def _values_body(rank: int, world: int, where: str) -> str:
    """Ranks with seeds of their own: whole parameters, or tokens, differ."""
    mesh = init_mesh(dp=2, tp=2, device_type="cpu")
    torch.manual_seed(rank if where == "bias" else 0)
    layer = VocabParallelEmbedding(32, 8, mesh=mesh) if where == "tokens" else ParallelMLP(8, 16, mesh=mesh)
    torch.manual_seed(rank)
    return _refusal(lambda: layer(torch.randint(32, (4,)) if where == "tokens" else torch.ones(4, 8)))


def test_values_that_differ(ranks: Any):
    for rank, message in enumerate(ranks(4, _values_body, "bias")):
        first = rank - rank % 2
        assert message.startswith("ParallelMLP: the checksum of c_proj.bias is ")
        assert f"on rank {first} and " in message
        assert f"on rank {first + 1}; start all ranks" in message
    for message in ranks(4, _values_body, "tokens"):
        assert "the checksum of tokens is " in message
        assert "ranks that share a layer call it alike, with the same tokens" in message


def _later_body(rank: int, world: int, features: int) -> str:
    """A later call of two sizes, where torch compares every collective; of more than a message's bytes or fewer."""
    before = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        layer = RowParallelLinear(8, features, mesh=dist.new_group(list(range(world))), overlap="none")
        for _ in range(COMPARED_CALLS):
            layer(torch.ones(4, 4))
        layer(torch.ones(4 + rank, 4))
    except RuntimeError as error:
        return str(error)
    finally:
        dist.set_debug_level(before)
    return "no error"


@pytest.mark.parametrize("features", [8, 1 << 15])
def test_later_calls_are_compared_by_torch(ranks: Any, features: int):
    for message in ranks(2, _later_body, features):
        assert message.startswith("linear.out: all_reduce failed")
        assert f"[4, {features}]" in message
        assert f"[5, {features}]" in message


def _step_body(rank: int, world: int, shape: dict[str, int], evaluate: bool) -> list[str]:
    """Ten equal steps, then one in which the ranks that share their data pass two sizes, then an equal one."""
    mesh = init_mesh(**shape, device_type="cpu")
    schedule = {"schedule": "1f1b"} if shape.get("pp") else {}
    model = parallelize(ParallelTransformer(CONFIG, mesh=mesh, device="meta"), mesh, seed=0, **schedule)
    said = []
    for i in range(12):
        text = torch.zeros(4 + 4 * rank * (i == 10), 9, dtype=torch.long)
        call = model.evaluate if evaluate else model.step
        said.append(_refusal(lambda text=text, call=call: call(text[:, :-1], text[:, 1:])))  # type: ignore[misc]
    return said


@pytest.mark.parametrize("evaluate", [False, True], ids=["step", "evaluate"])
@pytest.mark.parametrize("shape", [{"tp": 2}, {"pp": 2}], ids=lambda shape: next(iter(shape)))
def test_sizes_are_compared_in_every_step(ranks: Any, shape: dict[str, int], evaluate: bool):
    for said in ranks(2, _step_body, shape, evaluate):
        assert said[:10] == ["no error"] * 10
        assert "torch.int64 [4, 8]" in said[10]
        assert "torch.int64 [8, 8]" in said[10]
        assert said[11] == "no error"


def _refused_body(rank: int, world: int, kind: str) -> str:
    """A batch that one of two ranks that share their data cannot take, in a later step."""
    mesh = init_mesh(tp=2, device_type="cpu")
    model = parallelize(ParallelTransformer(CONFIG, mesh=mesh, device="meta"), mesh, seed=0)
    text = torch.zeros(2, 9, dtype=torch.long)
    batch: list[Any] = [text[:, :-1], text[:, 1:]]
    for _ in range(CHECKED_CALLS):
        model.step(*batch)
    if rank == 1:
        bad = {"token": [text[:, :-1] + 32, batch[1]], "array": [batch[0], batch[1].numpy()], "missing": batch[:1]}
        batch = bad[kind]
    try:
        model.step(*batch)
    except (ValueError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("token", "ValueError: token 32 is outside the vocabulary of 32"),
        ("array", "TypeError: step: targets is a numpy.ndarray: expected a torch.Tensor"),
        ("missing", "ValueError: 1 tensor in a row: expected tokens and targets"),
    ],
)
def test_a_batch_that_one_rank_refuses(ranks: Any, kind: str, says: str):
    others, own = ranks(2, _refused_body, kind)
    assert own.startswith(says)
    same = "1 of 2 ranks that read data refused their batch; their errors say why"
    assert others.removeprefix("ValueError: ").startswith((same, "ranks 0 and 1 differ along tp or pp alone"))


@pytest.mark.parametrize("copies", [1, 2, 3, 8, 64])
def test_numbers_that_are_equal_add_up_to_zero(copies: int):
    rows = [[_weight(share, place, copies) for place in range(copies)] for share in range(4)]
    assert all(sum(row) == 0 for row in rows)
    if copies == 1:
        return
    for place in range(copies):  # one rank of each share differs, by the same amount up or down
        assert rows[0][place] - rows[1][place] != 0
        assert sum(row[place] for row in rows) != 0
    largest = float((1 << 20) - 1)
    assert sum(abs(weight) * largest for row in rows for weight in row) * 16384 / len(rows) / copies < 2**53


class _Adapter(nn.Module):
    """Another library's module, which keeps its rank."""

    def __init__(self, inner: nn.Module, rank: int) -> None:
        super().__init__()
        self.inner, self.rank = inner, rank

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


def _adapter_body(rank: int, world: int) -> str:
    layer = ParallelMLP(8, 16, mesh=init_mesh(tp=2, device_type="cpu"))
    layer.c_fc = _Adapter(layer.c_fc, rank)
    return _refusal(lambda: layer(torch.ones(4, 8)))


def test_what_foreign_modules_keep_is_theirs(ranks: Any):
    assert ranks(2, _adapter_body) == ["no error"] * 2
