"""Writes to a paged cache, and attention over it, like one before: see test_repeated.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from shardfuse.kernels.kv_cache import checks as write_checks
from shardfuse.kernels.kv_cache import norm_rope_write_kv_, write_kv_
from shardfuse.kernels.kv_cache import op as write
from shardfuse.kernels.paged_attention import checks, paged_attention, plan_attention
from shardfuse.kernels.runtime import device, dispatch, tuning

pytestmark = [
    pytest.mark.interpret,
    pytest.mark.skipif(dispatch.triton_version() is None, reason="Triton is not installed"),
]

T, N, K, H, SIZE, BLOCKS = 5, 4, 2, 16, 4, 6
SLOTS = torch.tensor([0, 5, 6, 21, -1])
Write = Callable[..., torch.Tensor | None]


def _cache(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(BLOCKS, K, SIZE, 2 * H, dtype=dtype)


def _scales() -> dict[str, torch.Tensor]:
    return {name: torch.zeros(BLOCKS, K, SIZE) for name in ("k_scale", "v_scale")}


Q, KEYS, VALUES = torch.randn(T, N, H), torch.randn(T, K, H), torch.randn(T, K, H)
TABLES: dict[str, Any] = {"cos": torch.randn(T, H // 2), "sin": torch.randn(T, H // 2)}
WRITES: dict[str, tuple[torch.dtype, bool, bool, dict[str, Any]]] = {
    # dtype of the cache, whether each token has a scale, whether q is there, what else is given
    "keys and values": (torch.float32, False, False, {}),
    "into fp16": (torch.float16, False, False, {}),
    "rotated": (torch.float32, False, True, TABLES),
    "normalised": (torch.float32, False, True, {**TABLES, "q_norm": torch.randn(H), "k_norm": torch.randn(H)}),
    "in pairs": (torch.float32, False, True, {**TABLES, "interleaved": True}),
    "fp8, a scale for each token": (torch.float8_e4m3fn, True, True, TABLES),
    "int8, one scale": (torch.int8, False, False, {"k_scale": torch.tensor([0.02]), "v_scale": torch.tensor([0.03])}),
}


def _written(name: str, impl: str, *, split: bool = False, **changed: Any) -> list[torch.Tensor]:
    """The cache, the scales and the new q, of one write."""
    dtype, by_token, rotates, options = WRITES[name]
    cache, scales = _cache(dtype), _scales() if by_token else {}
    pages: Any = [cache[..., :H].contiguous(), cache[..., H:].contiguous()] if split else cache
    given = {"q": Q, "k": KEYS, "v": VALUES, "slot_mapping": SLOTS} | options | scales | changed
    q, k, v, slots = (given.pop(each) for each in ("q", "k", "v", "slot_mapping"))
    with torch.no_grad():
        if rotates:
            out = norm_rope_write_kv_(q, k, v, pages, slots, check=False, impl=impl, **given)
        else:
            out = None
            write_kv_(pages, k, v, slots, check=False, impl=impl, **given)
    return [*(pages if split else [cache]), *scales.values(), *([] if out is None else [out])]


def _assert_like(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected):
        torch.testing.assert_close(ours.float(), theirs.float(), rtol=1e-5, atol=1e-5)


@pytest.fixture
def unasked(monkeypatch):
    """From now on nothing may be checked."""

    def forbid() -> None:
        for module, name in ((write_checks, "check_write"), (checks, "check")):
            monkeypatch.setattr(module, name, lambda *a, **k: pytest.fail("it was looked at anew"))

    return forbid


@pytest.mark.parametrize("split", [False, True], ids=["one cache", "two"])
@pytest.mark.parametrize("name", WRITES)
def test_a_write_like_one_before_gives_the_same(name: str, split: bool, unasked):
    tuning.forget()
    expected = _written(name, "reference", split=split)
    first = _written(name, "triton", split=split)
    unasked()
    before = dispatch.counts.copy()
    again = _written(name, "triton", split=split)
    assert [impl for _, impl in dispatch.counts - before] == ["triton"]
    assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(first, again))
    _assert_like(again, expected)
    assert sum(each.count_nonzero() for each in map(torch.Tensor.float, again)) > 0


OTHERS: dict[str, dict[str, Any]] = {
    "eps": {"eps": 0.5},
    "an offset": {"norm_offset": 1.0},
    "fewer tokens": {
        "q": Q[:3], "k": KEYS[:3], "v": VALUES[:3], "slot_mapping": SLOTS[:3], "cos": TABLES["cos"][:3],
        "sin": TABLES["sin"][:3],
    },
    "every other slot": {"slot_mapping": SLOTS.repeat_interleave(2)[::2]},
    "tables that lie otherwise": {name: table.t().contiguous().t() for name, table in TABLES.items()},
    "an odd address": {"q": torch.cat([torch.zeros(1), Q.flatten()])[1:].view_as(Q)},
    "rows apart": {"k": torch.cat([KEYS, KEYS], -1)[..., :H]},
    "heads that are not dense": {"v": torch.stack([VALUES, VALUES], -1)[..., 0]},
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_a_write_unlike_one_before_is_its_own(name: str):
    tuning.forget()
    for _ in range(2):
        _written("normalised", "triton")
    for _ in range(2):
        _assert_like(
            _written("normalised", "triton", **OTHERS[name]), _written("normalised", "reference", **OTHERS[name])
        )


def test_writes_that_need_a_copy_or_a_check_are_not_kept():
    tuning.forget()
    _written("normalised", "triton", **OTHERS["every other slot"])
    _written("normalised", "triton", **OTHERS["heads that are not dense"])
    write_kv_(_cache(), KEYS, VALUES, SLOTS, impl="triton")  # on a CPU this reads the slots
    with dispatch.row_invariance():
        _written("rotated", "triton")
    assert len(write._calls) == 1
    with pytest.raises(ValueError, match="names slot 99"):
        write_kv_(_cache(), KEYS, VALUES, torch.full_like(SLOTS, 99), impl="triton")


@pytest.mark.parametrize(
    ("wrong", "error", "says"),
    [
        ({"v": VALUES.half()}, ValueError, "v is torch.float16"),
        ({"slot_mapping": SLOTS.int()}, ValueError, "slot_mapping is torch.int32"),
        ({"cos": TABLES["cos"][:4]}, ValueError, "cos has shape"),
        ({"k_norm": torch.randn(H + 1)}, ValueError, "k_norm is"),
        ({"k_scale": torch.ones(1)}, ValueError, "k_scale and v_scale belong to"),
        ({"q": torch.randn(T, N, H, device="meta")}, ValueError, "q is on meta"),
    ],
)
def test_what_does_not_fit_is_refused_after_what_did(wrong: dict[str, Any], error: type[Exception], says: str):
    for _ in range(2):
        _written("normalised", "triton")
    with pytest.raises(error, match=says):
        _written("normalised", "triton", **wrong)


def test_a_gradient_is_refused_after_a_call_without():
    for _ in range(2):
        _written("keys and values", "triton")
    with pytest.raises(RuntimeError, match="has no gradient"):
        write_kv_(_cache(), KEYS.clone().requires_grad_(), VALUES, SLOTS, check=False, impl="triton")


# --- attention --------------------------------------------------------------------------------------------------------

LENS, STARTS = torch.tensor([9, 14], dtype=torch.int32), torch.tensor([0, 2, 5], dtype=torch.int32)
BLOCK_TABLES = torch.tensor([[3, 0, 1, 0], [5, 2, 4, 1]], dtype=torch.int32)
PAGES = torch.randn(BLOCKS, K, SIZE, 2 * H)
ATTENTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 3},
    "bent": {"softcap": 2.0, "scale": 0.5},
    "sinks and slopes": {"sinks": torch.randn(N), "alibi_slopes": torch.rand(N)},
    "invariant": {"invariant": True},
    "bounded": {"min_query_len": 2, "max_query_len": 3, "max_seq_len": 14},
}
_OF_THE_PLAN = ("window", "invariant", "min_query_len", "max_query_len", "max_seq_len")


def _plan(options: dict[str, Any]) -> Any:
    shared = {name: value for name, value in options.items() if name in _OF_THE_PLAN}
    return plan_attention(Q, PAGES, BLOCK_TABLES, LENS, STARTS, impl="triton", **shared)


def _attended(plan: Any, impl: str = "triton", **options: Any) -> list[torch.Tensor]:
    given = {"q": Q, "kv_cache": PAGES, "block_tables": BLOCK_TABLES} | options
    tensors = (given.pop("q"), given.pop("kv_cache"), given.pop("block_tables"), LENS, STARTS)
    with torch.no_grad():
        found: Any = paged_attention(*tensors, plan=plan, return_lse=True, check=False, impl=impl, **given)
    return list(found)


@pytest.mark.parametrize("name", ATTENTIONS)
def test_attention_like_that_before_gives_the_same(name: str, unasked):
    """As the layers of a step: over one plan, with caches of their own."""
    options = ATTENTIONS[name]
    alike = {each: value for each, value in options.items() if each != "invariant"}
    expected = [_attended(None, "reference", kv_cache=cache, **alike) for cache in (PAGES, PAGES.flip(0))]
    plan = _plan(options)
    first = _attended(plan, **options)
    unasked()
    before = dispatch.counts.copy()
    again = _attended(plan, **options)
    deeper = _attended(plan, kv_cache=PAGES.flip(0), **options)
    assert dict(dispatch.counts - before) == {("paged_attention", "triton"): 2}
    assert len(plan.settled) == 1
    assert all(map(torch.equal, first, again))
    _assert_like(again, expected[0])
    _assert_like(deeper, expected[1])


@pytest.mark.parametrize(
    "changed",
    [
        {"scale": 0.1},
        {"softcap": 1.0},
        {"sinks": torch.randn(N)},
        {"q": torch.cat([Q, Q], -1)[..., :H]},
        {"q": torch.stack([Q, Q], -1)[..., 0]},
        {"kv_cache": (PAGES[..., :H], PAGES[..., H:].contiguous())},
        {"kv_cache": torch.cat([torch.zeros(1), PAGES.flatten()])[1:].view_as(PAGES)},
        {"block_tables": torch.stack([BLOCK_TABLES, BLOCK_TABLES], -1)[..., 0]},
        {"block_tables": torch.cat([BLOCK_TABLES, BLOCK_TABLES], 1)[:, :4]},
    ],
)
def test_attention_unlike_that_before_is_its_own(changed: dict[str, Any]):
    plan = _plan({})
    for _ in range(2):
        _attended(plan)
    for _ in range(2):
        _assert_like(_attended(plan, **changed), _attended(None, "reference", **changed))


def test_bytes_at_odd_addresses_are_looked_at():
    """Values of two bytes at an even address are read as one number, and two addresses may be odd in another way."""
    pages = torch.randint(-99, 99, PAGES.shape, dtype=torch.int8)
    scales = {"k_scale": torch.tensor([0.02]), "v_scale": torch.tensor([0.03])}
    plan = plan_attention(Q, pages, BLOCK_TABLES, LENS, STARTS, impl="triton")
    for first in (16, 2, 1, 6, 3):
        moved = torch.zeros(pages.numel() + 16, dtype=torch.int8)[first : first + pages.numel()].view_as(pages)
        moved.copy_(pages)
        for _ in range(2):
            found = _attended(plan, kv_cache=moved, **scales)
            _assert_like(found, _attended(None, "reference", kv_cache=pages, **scales))
    assert [each is not None for each in plan.settled.values()] == [True]  # type: ignore[union-attr]


def test_a_plan_with_other_lengths_than_it_was_made_of_is_looked_at(monkeypatch):
    """Other tensors, or the same ones after a change of their size."""
    lengths = LENS.clone()
    plan = plan_attention(Q, PAGES, BLOCK_TABLES, lengths, STARTS, impl="triton")

    def attended(lengths: torch.Tensor) -> Any:
        tensors = (Q, PAGES, BLOCK_TABLES, lengths, STARTS)
        with torch.no_grad():
            return paged_attention(*tensors, plan=plan, return_lse=True, check=False, impl="triton")

    for _ in range(2):
        expected = attended(lengths)
    looked, check = [], checks.check
    monkeypatch.setattr(checks, "check", lambda *given: looked.append(check(*given)))
    attended(lengths)
    assert not looked
    assert all(map(torch.equal, attended(LENS.clone()), expected))
    assert looked
    lengths.resize_(1)
    with pytest.raises(ValueError, match=r"block_tables has shape \(2, 4\): expected \[1, blocks\]"):
        attended(lengths)


def test_bounds_are_part_of_a_call():
    plan = _plan({"max_seq_len": 14})
    for _ in range(2):
        _attended(plan, max_seq_len=14)
    _attended(plan, max_seq_len=13)
    assert len(plan.settled) == 2
    with pytest.raises(ValueError, match="max_seq_len"):
        _attended(plan, max_seq_len=3)


def test_numbers_of_other_types_are_converted():
    """By the op's schema; what they were looked up by must not stay."""
    plan = _plan({})
    expected = _attended(None, "reference", scale=0.3125, softcap=2.0)
    for scale, softcap in ((np.float32(0.3125), 2), (torch.tensor(0.3125), np.float64(2.0)), (0.3125, 2.0)):
        _assert_like(_attended(plan, scale=scale, softcap=softcap), expected)
    assert len(plan.settled) == 1


def test_attention_with_another_plan_is_refused_after_its_own():
    plan = _plan({})
    for _ in range(2):
        _attended(plan)
    with pytest.raises(ValueError, match=r"window=3 \(plan: None\)"):
        _attended(plan, window=3)
    with pytest.raises(ValueError, match=r"q is torch\.float16"):
        _attended(plan, q=Q.half())
    with pytest.raises(ValueError, match="softcap is -1"):
        _attended(plan, softcap=-1.0)
    with pytest.raises(RuntimeError, match="has no gradient"):
        paged_attention(
            Q.clone().requires_grad_(), PAGES, BLOCK_TABLES, LENS, STARTS, plan=plan, check=False, impl="triton"
        )


MASKS: dict[str, dict[str, torch.Tensor]] = {
    "a prefix": {"prefix_lens": torch.tensor([9, 14], dtype=torch.int32)},
    "a tree": {"tree_mask": torch.tensor([[1, 0, 0], [0, 1, 0], [1, 0, 0], [0, 1, 0], [1, 0, 1]]).bool()},
}


@pytest.mark.parametrize("name", MASKS)
def test_masks_go_step_by_step(name: str):
    masks = MASKS[name]
    plan = plan_attention(Q, PAGES, BLOCK_TABLES, LENS, STARTS, impl="triton", **masks)
    expected = _attended(None, "reference", **masks)
    for _ in range(2):
        _assert_like(_attended(plan, **masks), expected)
    assert not plan.settled  # type: ignore[union-attr]
    assert not torch.allclose(expected[0], _attended(None, "reference")[0], atol=1e-3)


def test_places_for_results_go_step_by_step():
    plan = _plan({})
    out = torch.empty_like(Q)
    for _ in range(2):
        _attended(plan, out=out)
        with device.slots(1), pytest.raises(ValueError, match="plan was made for another call"):
            _attended(plan)
    assert not any(plan.settled.values())
