"""``plan_write``: what the layers of a step share on a CPU changes no bit of what is written and rotated."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shardfuse.kernels.kv_cache import norm_rope_write_kv_, plan_write

pytestmark = pytest.mark.usefixtures("without_gradients")
T, N, K, H, B = 5, 6, 2, 16, 4
SLOTS = [9, 0, 31, 14, 3]
Call = dict[str, Any]


@pytest.fixture
def without_gradients() -> Any:
    with torch.no_grad():
        yield


def call(tokens: int = T, *, rotary: int = H, interleaved: bool = False, columns: bool = True) -> Call:
    """The arguments, with q, k and v as columns of one matrix or as three."""
    qkv = torch.randn(tokens, (N + 2 * K) * H).split([N * H, K * H, K * H], 1)
    q, k, v = (x.view(tokens, -1, H) if columns else x.contiguous().view(tokens, -1, H) for x in qkv)
    angles = torch.randn(tokens, rotary // 2)
    return {
        **{"q": q, "k": k, "v": v, "kv_cache": torch.full((8, K, B, 2 * H), -1.0)},
        **{"slot_mapping": torch.tensor(SLOTS[:tokens]), "cos": angles.cos(), "sin": angles.sin()},
        "interleaved": interleaved,
    }


def planned(given: Call) -> Any:
    names = ("q", "kv_cache", "slot_mapping", "cos", "sin", "interleaved")
    return plan_write(**{name: given[name] for name in names})


def both(given: Call, plan: Any, **options: Any) -> bool:
    """Whether the results are the same bits with the plan, without it, and of the reference."""
    found = []
    for more in ({"plan": plan}, {}, {"plan": plan, "impl": "reference"}):
        cache = given["kv_cache"].clone()
        q = norm_rope_write_kv_(**given | {"kv_cache": cache}, check=False, **more, **options)
        found.append((q, cache))
    return all(torch.equal(x, y) for other in found[1:] for x, y in zip(found[0], other, strict=True))


@pytest.mark.parametrize("columns", [True, False], ids=["columns", "apart"])
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize("rotary", [H, 6])
@pytest.mark.parametrize("tokens", [1, T])
def test_the_same_bits_with_a_plan(tokens: int, rotary: int, interleaved: bool, columns: bool) -> None:
    given = call(tokens, rotary=rotary, interleaved=interleaved, columns=columns)
    plan = planned(given)
    assert plan is not None
    for _ in range(2):  # layers
        kept = [given[name].clone() for name in "qkv"]
        assert both(given, plan)
        assert all(torch.equal(given[name], x) for name, x in zip("qkv", kept))
        given |= {name: torch.randn_like(given[name]) for name in "qkv"}


@pytest.mark.parametrize("written", [0, 1, 3])
def test_padding_behind_the_tokens_is_not_written(written: int) -> None:
    given = call()
    given["slot_mapping"][written:] = -1
    plan = planned(given)
    assert plan is not None
    assert both(given, plan)


def test_columns_are_read_where_they_lie() -> None:
    given = call()
    q = norm_rope_write_kv_(**given, plan=planned(given), check=False)
    assert q.stride(0) == (N + 2 * K) * H  # of the matrix that holds what was written, too


def test_a_plan_of_other_slots_or_tables_is_not_used() -> None:
    given = call()
    for name, change in (("slot_mapping", SLOTS[::-1]), ("cos", 0.5), ("sin", 0.25)):
        plan = planned(given)
        given[name].copy_(torch.tensor(change).expand_as(given[name]))
        assert both(given, plan)
    for name in ("slot_mapping", "cos", "sin"):
        plan, other = planned(given), call()
        assert both(given | {name: other[name].flip(0)}, plan)
    assert both(given | {"interleaved": True}, planned(given))


def test_calls_that_a_plan_does_not_fit() -> None:
    given = call()
    plan = planned(given)
    assert both(given, plan, q_norm=torch.rand(H))
    assert both(given | {"kv_cache": torch.zeros(8, K, 2 * B, 2 * H)[:, :, ::2]}, plan)
    assert both(given | {"kv_cache": torch.zeros(8, K, B, 2 * H, dtype=torch.bfloat16)}, plan)
    assert both(given | {name: given[name].bfloat16() for name in "qkv"}, plan)


def test_what_is_not_planned() -> None:
    given = call()
    assert planned(given | {"slot_mapping": torch.tensor([9, 0, -1, 14, 3])}) is None  # padding before a token
    assert planned(given | {"kv_cache": torch.zeros(8, K, B, 2 * H, dtype=torch.int8)}) is None
    assert planned(given | {"kv_cache": torch.zeros(8, K, B, 3 * H)}) is None  # values of another size
    with torch.inference_mode():
        assert planned(call()) is None
