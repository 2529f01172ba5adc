"""Ranks that were started differently are told so, by rank, field and both values, before anything is trained."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardfuse import ParallelTransformer, TransformerConfig, parallelize
from shardfuse.parallel.core import agreement, collectives
from shardfuse.parallel.core.agreement import checksum
from shardfuse.parallel.core.mesh import everyone
from shardfuse.parallel.core.rendezvous import init_mesh

pytestmark = pytest.mark.ranks

CONFIG: dict[str, Any] = {
    "style": "gated", "vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_layers": 4, "num_heads": 2,
}  # fmt: skip


def _built(rank: int, mesh: Any, change: dict[str, Any], **options: Any) -> Any:
    """The model of CONFIG over ``mesh``; on rank 1 with ``change`` of the config, or of the options."""
    config = {**CONFIG, **{k: v for k, v in change.items() if rank == 1 and hasattr(TransformerConfig, k)}}
    options |= {name: value for name, value in change.items() if rank == 1 and not hasattr(TransformerConfig, name)}
    layers = {name: options.pop(name) for name in ("sequence_parallel", "impl", "dtype") if name in options}
    model = ParallelTransformer(TransformerConfig(**config), mesh=mesh, device="meta", **layers)
    return parallelize(model, mesh, **{"seed": 0, **options})


def _refusal(action: Any) -> str:
    try:
        action()
    except ValueError as error:
        return str(error)
    return "no error"


def _different_body(rank: int, world: int, shape: dict[str, int], change: dict[str, Any]) -> str:
    mesh = init_mesh(**shape, device_type="cpu")
    options = {"schedule": "1f1b"} if shape.get("pp") else {}
    message = _refusal(lambda: _built(rank, mesh, change, **options))
    assert dist.get_world_size(everyone().pg) == world  # the group goes on working
    return message


DIFFERENT = [
    ({"style": "gelu", "bias": None}, "config.style is 'gated' on rank 0 and 'gelu' on rank 1"),
    ({"intermediate_size": 64}, "config.intermediate_size is 32 on rank 0 and 64 on rank 1"),
    ({"num_layers": 6}, "config.num_layers is 4 on rank 0 and 6 on rank 1"),
    ({"tie_embeddings": True}, "config.tie_embeddings is False on rank 0 and True on rank 1"),
    ({"seed": 1}, "seed is 0 on rank 0 and 1 on rank 1"),
    ({"recompute": True}, "recompute is None on rank 0 and True on rank 1"),
    ({"dtype": torch.bfloat16}, "torch.float32, on meta on rank 0 and [32, 16] torch.bfloat16, on meta on rank 1"),
]


@pytest.mark.parametrize("shape", [{"tp": 2}, {"dp": 2}, {"pp": 2}], ids=lambda shape: next(iter(shape)))
@pytest.mark.parametrize(("change", "says"), DIFFERENT, ids=lambda each: next(iter(each)) if each else "")
def test_ranks_that_were_started_differently(ranks: Any, shape: dict[str, int], change: dict[str, Any], says: str):
    for message in ranks(2, _different_body, shape, change):
        assert message.startswith("parallelize: ")
        assert says in message


def _refused_body(rank: int, world: int, refusing: int) -> str:
    """One rank alone asks for what cannot be."""
    mesh = init_mesh(pp=world, tp=1, device_type="cpu")
    wrong = {"microbatches": 0} if rank == refusing else {"microbatches": 4}
    return _refusal(lambda: _built(rank, mesh, {}, schedule="1f1b", **wrong))


@pytest.mark.parametrize("refusing", [0, 1, 2])
def test_what_one_rank_refuses_all_refuse(ranks: Any, refusing: int):
    for rank, message in enumerate(ranks(3, _refused_body, refusing)):
        own = "" if rank == refusing else f"rank {refusing}: "
        assert message == f"{own}microbatches=0: expected at least 1"


def _mesh_body(rank: int, world: int) -> list[str]:
    degrees: Any = [{"tp": 2}, {"dp": 2}], [{"tp": 2}, {"tp": 3}], [{"tp": 3}, {"tp": 2}]
    degrees += [{"tp": 2}, {"tp": "2"}], [{"tp": 2}, {"device_type": "gpu"}]
    return [_refusal(lambda each=each: init_mesh(**{"device_type": "cpu"} | each[rank])) for each in degrees]  # type: ignore


def test_ranks_that_ask_for_other_meshes(ranks: Any):
    first, second = ranks(2, _mesh_body)
    assert first[0] == second[0]
    assert first[0].startswith("init_mesh: dp is 1 on rank 0 and 2 on rank 1")
    assert "tp=3 = 3, but 2 processes were started" in first[1]
    assert first[1].startswith("rank 1: ")
    assert second[2].startswith("rank 0: ")
    assert first[3].startswith("rank 1: init_mesh: tp='2': expected a whole number")
    assert first[4].startswith("rank 1: init_mesh: device_type='gpu': expected 'cpu'")


def _values_body(rank: int, world: int, shape: dict[str, int], change: str) -> str:
    """Weights that the program drew by itself, of which one tensor is another on rank 1."""
    mesh = init_mesh(**shape, device_type="cpu")
    torch.manual_seed(0)
    model = ParallelTransformer(TransformerConfig(**CONFIG), mesh=mesh)
    if rank == 1:
        with torch.no_grad():
            param = model.get_parameter(change)
            (param.to_local() if hasattr(param, "to_local") else param).flatten()[-1] += 2**-10
    return _refusal(lambda: parallelize(model, mesh, schedule="1f1b" if "pp" in shape else None))


@pytest.mark.parametrize(
    ("shape", "name"),
    [({"tp": 2}, "model.norm.weight"), ({"pp": 2}, "lm_head.weight"), ({"pp": 2}, "model.norm.weight")],
    ids=["tp-norm", "pp-head", "pp-norm"],
)
def test_given_weights_that_differ(ranks: Any, shape: dict[str, int], name: str):
    for message in ranks(2, _values_body, shape, name):
        assert f"the checksum of {name} is " in message


def _shards_body(rank: int, world: int) -> str:
    """Shards differ by their nature, and replicas take the first one's values."""
    mesh = init_mesh(dp=2, tp=2, device_type="cpu")
    torch.manual_seed(mesh.get_local_rank("dp"))
    return _refusal(lambda: parallelize(ParallelTransformer(TransformerConfig(**CONFIG), mesh=mesh), mesh))


def test_shards_and_replicas_may_differ(ranks: Any):
    assert ranks(4, _shards_body) == ["no error"] * 4


def _data_body(rank: int, world: int, shape: dict[str, int], step: int, check: bool) -> list[str]:
    """What each step says where, from ``step`` on, ranks that share their data are given different tokens."""
    mesh = init_mesh(**shape, device_type="cpu")
    model = _built(rank, mesh, {}, **({"schedule": "1f1b"} if "pp" in shape else {}))
    model.check_data = check
    said = []
    for i in range(step + 1):
        seed = rank if i == step else mesh.get_local_rank("dp")
        text = torch.randint(32, (4, 9), generator=torch.Generator().manual_seed(seed))
        said.append(_refusal(lambda text=text: model.step(text[:, :-1], text[:, 1:])))  # type: ignore[misc]
        model.zero_grad()
    return said


@pytest.mark.parametrize("shape", [{"tp": 2}, {"pp": 2}], ids=lambda shape: next(iter(shape)))
@pytest.mark.parametrize(("step", "check"), [(0, None), (2, False), (4, True)])
def test_different_batches_where_they_are_shared(ranks: Any, shape: dict[str, int], step: int, check: bool | None):
    for *before, last in ranks(2, _data_body, shape, step, check):
        assert set(before) <= {"no error"}
        assert last.startswith("ranks 0 and 1 differ along tp or pp alone, so they share their data, and were given")


def test_data_parallel_ranks_read_their_own(ranks: Any):
    assert ranks(2, _data_body, {"dp": 2}, 1, True) == [["no error"] * 2] * 2


def _sizes_body(rank: int, world: int) -> str:
    """Batches of two sizes, which gloo would end a process for."""
    mesh = init_mesh(tp=2, device_type="cpu")
    model = _built(rank, mesh, {})
    text = torch.zeros(2 + 2 * rank, 9, dtype=torch.long)
    return _refusal(lambda: model.step(text[:, :-1], text[:, 1:]))


def test_sizes_that_differ_are_named_before_anything_is_sent(ranks: Any):
    for message in ranks(2, _sizes_body):
        assert "torch.int64 [2, 8]" in message
        assert "torch.int64 [4, 8]" in message


def _messages_body(rank: int, world: int, shape: dict[str, int], check: bool | None) -> list[int]:
    """How often each of five steps asks the other ranks about its batch; ``check`` is said before the fifth."""
    mesh = init_mesh(**shape, device_type="cpu")
    model = _built(rank, mesh, {}, **({"schedule": "1f1b"} if "pp" in shape else {}))
    model.check_data = False
    text = torch.zeros(4, 9, dtype=torch.long)
    asked = []
    for i in range(5):
        if i == 4:
            model.check_data = check
        before = collectives.calls["all_reduce", "step.targets"]
        model.step(text[:, :-1], text[:, 1:])
        asked.append(collectives.calls["all_reduce", "step.targets"] - before)
        model.zero_grad()
    return asked


@pytest.mark.parametrize("shape", [{"tp": 2}, {"pp": 2}], ids=lambda shape: next(iter(shape)))
@pytest.mark.parametrize(("check", "asks"), [(False, 0), (None, 1), (True, 1)])
def test_a_message_of_its_own_can_be_left_out(ranks: Any, shape: dict[str, int], check: bool | None, asks: int):
    assert ranks(2, _messages_body, shape, check) == [[1, 1, 1, 0, asks]] * 2


def test_the_sum_over_targets_is_made_anyway(ranks: Any):
    assert ranks(2, _messages_body, {"dp": 2}, False) == [[1] * 5] * 2


class _Local(Exception):
    """An error that cannot be sent: it takes other arguments than it keeps."""

    def __init__(self, a: int, b: int) -> None:
        super().__init__(f"{a} {b}")


def _error_body(rank: int, world: int, kind: str) -> tuple[str, str]:
    def work() -> int:
        if rank == 1:
            raise {"value": ValueError("bad"), "local": _Local(1, 2)}[kind]
        return rank

    try:
        agreement.agree_on(everyone(), work, lambda _: {}, what="test")
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def test_errors_keep_their_type_where_they_can_be_sent(ranks: Any):
    assert ranks(2, _error_body, "value") == [("ValueError", "rank 1: bad"), ("ValueError", "bad")]
    assert ranks(2, _error_body, "local") == [("RuntimeError", "rank 1: _Local: 1 2"), ("_Local", "1 2")]


def _gone_body(rank: int, world: int) -> tuple[str, str]:
    """Rank 1 refuses while rank 0 is gone."""
    if rank == 0:
        return "", ""

    def gone(*args: Any, **options: Any) -> Any:
        raise RuntimeError("agree: gather_objects failed: has another rank of the group ended?")

    def work() -> int:
        raise ValueError("bad")

    before, collectives.gather_objects = collectives.gather_objects, gone
    try:
        agreement.agree_on(everyone(), work, lambda _: {}, what="test")
    except Exception as error:
        return type(error).__name__, str(error)
    finally:
        collectives.gather_objects = before
    return "", ""


def test_an_own_error_is_not_hidden_by_the_others_end(ranks: Any):
    assert ranks(2, _gone_body)[1] == ("ValueError", "bad")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float64])
def test_checksums_tell_values_and_places_apart(dtype: torch.dtype):
    x = torch.randint(2, (7, 5), generator=torch.Generator().manual_seed(0)).to(dtype)
    other = x.clone()
    other[3, 2] = 1 - x[3, 2].int() if dtype != torch.bool else ~x[3, 2]
    assert checksum(x) == checksum(x.clone()) == checksum(x.t().contiguous().t())
    assert checksum(x) != checksum(other)
    assert checksum(x) != checksum(x.flip(0))
    assert checksum(nn.Parameter(x.float())) == checksum(x.float())
    assert checksum(x[:0]) == 0
