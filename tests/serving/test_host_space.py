"""Preempted sequences that keep their keys and values in host memory: the same tokens, and nothing left behind."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from serving_case import build, exact

from shardfuse.parallel.core.rendezvous import init_mesh
from shardfuse.serving import Engine, Request, SamplingParams
from shardfuse.serving.host_space import HostSpace


def _requests() -> list[Request]:
    generator = torch.Generator().manual_seed(3)
    return [
        Request(
            torch.randint(0, 32, (length,), generator=generator).tolist(),
            max_new_tokens=12,
            sampling=SamplingParams(temperature=0.8 * (length % 2), seed=length),
            n=1 + length % 3,
        )
        for length in (9, 4, 1, 12, 6)
    ]


def _engine(model: Any = None, **options: Any) -> Engine:
    sizes = {"num_blocks": 9, "block_size": 4, "max_num_seqs": 6, "max_num_batched_tokens": 8}
    return Engine(exact("gated") if model is None else model, **sizes, **options)


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("kv_dtype", [None, "int8"])
@pytest.mark.parametrize("num_host_blocks", [3, 100])
def test_what_was_kept_is_brought_back(num_host_blocks: int, kv_dtype: str | None, prefix_caching: bool) -> None:
    options: dict[str, Any] = {"kv_dtype": kv_dtype, "prefix_caching": prefix_caching}
    plain = _engine(**options)
    expected = plain.generate(_requests())
    engine = _engine(num_host_blocks=num_host_blocks, **options)
    engine._host.block_seconds = 0.0  # it always pays
    assert engine.generate(_requests()) == expected
    assert engine.stats.preemptions > 0
    assert engine.stats.kept_tokens > 0
    assert engine.stats.recomputed_tokens < plain.stats.recomputed_tokens
    engine._host.settle()
    assert engine._host.free_blocks == num_host_blocks
    assert not engine._allocator.used_blocks


def test_it_is_measured_and_not_done_where_it_does_not_pay() -> None:
    engine = _engine(num_host_blocks=100)
    assert 0 < engine._host.block_seconds < math.inf
    engine._host.block_seconds = math.inf
    engine.generate(_requests())
    assert engine.stats.preemptions > 0
    assert engine.stats.kept_tokens == 0


def test_the_cheaper_way_is_taken() -> None:
    host = HostSpace(4, lambda: 1e-3)
    host.block_seconds = 5e-3
    assert host.keep(1, 5, [7]) == []  # equal
    assert host.keep(1, 6, [7]) == [(7, 3)]
    assert host.keep(2, 60, [1, 2, 3, 4]) == []  # no room
    assert host.bring(1, 0, [9]) == [(3, 9)]
    assert host.keep(2, 60, [1, 2, 3, 4]) == []  # the copies are still to be made
    host.settle()
    assert len(host.keep(2, 60, [1, 2, 3, 4])) == 4
    assert HostSpace(4, lambda: 0.0).keep(1, 100, [7]) == []  # nothing is known yet


@pytest.mark.parametrize("how", ["cancel", "weights"])
def test_what_is_kept_goes_with_its_request_and_its_weights(how: str) -> None:
    engine = _engine(num_host_blocks=100)
    engine._host.block_seconds = 0.0
    numbers = [engine.add(each) for each in _requests()]
    while engine._host.free_blocks == 100:
        engine.step()
    if how == "cancel":
        for number in numbers:
            engine.cancel(number)
    else:
        engine.update_weights()
    engine._host.settle()
    assert engine._host.free_blocks == 100
    list(engine.run())
    assert not engine._allocator.used_blocks


def test_to_open_an_open_engine_touches_no_block() -> None:
    """A ``with`` block that begins while requests live: what is measured is not measured over their keys and values."""
    engine = _engine(num_host_blocks=100)
    engine._host.block_seconds = 0.0
    numbers = [engine.add(each) for each in _requests()]
    found: dict[tuple[int, int], list[int | None]] = {}
    events = []
    while engine._host.free_blocks == 100:
        events += engine.step()
    with engine:
        assert engine._host.block_seconds == 0.0
        events += engine.run()
    for event in events:
        found.setdefault((event.request, event.index), []).append(event.token)
    answers = [found[number, i] for number, each in zip(numbers, _requests()) for i in range(each.n)]
    assert answers == _engine().generate(_requests())


def test_a_negative_number_is_refused() -> None:
    with pytest.raises(ValueError, match="num_host_blocks"):
        _engine(num_host_blocks=-1)


def _on_rank(rank: int, world: int) -> tuple[list[list[int]], int] | None:
    mesh = init_mesh(tp=world, device_type="cpu")
    with _engine(build("gated", mesh), num_host_blocks=50) as engine:
        engine._host.block_seconds = 0.0
        if rank:
            return engine.follow()
        return engine.generate(_requests()), engine.stats.kept_tokens


@pytest.mark.ranks
def test_every_rank_keeps_its_heads(ranks: Any) -> None:
    answers, kept = ranks(2, _on_rank)[0]
    assert answers == _engine().generate(_requests())
    assert kept > 0
