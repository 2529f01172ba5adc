"""How two sides of a benchmark are timed: in turns, on operands out of the cache, and what is called noise."""

from __future__ import annotations

import dataclasses
from functools import partial

import pytest
import torch

from shardfuse.bench.harness import stock, timing

CPU = torch.device("cpu")


def test_sides_alternate_and_every_rank_makes_the_same_calls():
    calls: list[str] = []
    timing.compare_fixed(lambda: calls.append("a"), lambda: calls.append("b"), rounds=3, calls=2)
    assert "".join(calls) == "aabbbbaaaabb"


def test_slower_side_is_seen_as_slower():
    x = torch.randn(64, 64)
    once, often = timing.compare([lambda: x @ x], [lambda: [x @ x for _ in range(8)]], CPU, seconds=0.1)
    assert once.value * 3 < often.value
    assert once.noise is not None


def test_compiled_peer_never_becomes_eager():
    """A row starts without earlier rows' compilations, and past the limit it fails."""

    def double(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    # patch, because taking a setting back by attribute would delete it
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=False, recompile_limit=2):
        for size in range(1, 5):
            row = stock.compiled(double, backend="eager")
            assert row(torch.ones(size)).tolist() == [2.0] * size
        row(torch.ones(8))
        with pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit):
            row(torch.ones(9))
    torch._dynamo.reset()


def test_input_sets_rotate():
    seen: list[int] = []
    side = [lambda i=i: seen.append(i) for i in range(3)]
    timing.compare(side, [lambda: None], CPU, seconds=0.0)
    assert seen[:6] == [0, 1, 2, 0, 1, 2]


def test_host_figure_ignores_disturbed_samples():
    assert timing._first_decile([9.0] * 80 + [1.0] * 20) == 1.0


def test_calls_in_a_row_begin_together():
    calls: list[str] = []
    timing.compare_queued(
        lambda: calls.append("a"), lambda: calls.append("b"), CPU, rounds=2, calls=3, align=lambda: calls.append("|")
    )
    assert "".join(calls) == "|aaa|bbb|bbb|aaa"


class _Clock:
    """Stands for torch.cuda's clock: a device that is five times as slow as the host seems."""

    now = 0.0

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = _Clock.now

        def synchronize(self) -> None:
            pass

        def elapsed_time(self, end: _Clock.Event) -> float:
            return end.at - self.at  # milliseconds


def test_device_times_are_the_medians_between_events(monkeypatch):
    for name, stand_in in (("Event", _Clock.Event), ("_sleep", lambda cycles: None), ("synchronize", lambda: None)):
        monkeypatch.setattr(torch.cuda, name, stand_in)
    work = iter([1.0, 1.0, 100.0] * 1000)

    def call(milliseconds: float) -> None:
        _Clock.now += milliseconds * next(work)

    ours, peer = timing.compare([lambda: call(2.0)], [lambda: call(3.0)], torch.device("cuda"), seconds=0.0)
    assert (ours.value, peer.value) == (2000.0, 3000.0)
    assert ours.host is not None


def test_queued_calls_hide_the_host_behind_a_spin_and_begin_behind_the_other_ranks(monkeypatch):
    """A spin for all that the host does, the collective, an event, the calls, an event."""
    log: list[str] = []
    host_us = {"align": 100.0, "call": 40.0}
    for name, stand_in in (("Event", _Clock.Event), ("synchronize", lambda: None)):
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: log.append(f"spin {cycles}"))
    monkeypatch.setattr(timing, "_per_call", lambda side, count: [side() for _ in range(count)] and 40.0)
    monkeypatch.setattr(timing, "_spin_cycles", lambda side: 1000 * int(host_us["align" if side is align else "call"]))

    def align() -> None:
        log.append("align")
        _Clock.now += 77.0  # the ranks' difference: before the first event

    def call() -> None:
        log.append("call")
        _Clock.now += 2.0

    ours, peer = timing.compare_queued(call, call, torch.device("cuda"), rounds=3, calls=4, align=align)
    assert log[-6:] == [f"spin {1000 * (100 + 4 * 40)}", "align", *["call"] * 4]
    assert (ours.value, ours.host) == (peer.value, peer.host) == (2000.0, 40.0)


@pytest.mark.parametrize("count", [2, 4, 6])
def test_no_side_finds_its_operands_in_the_cache(monkeypatch, count):
    """The cache holds whatever the last ``count / 2 - 1`` calls (at least one) used."""
    for name, stand_in in (("Event", _Clock.Event), ("_sleep", lambda cycles: None), ("synchronize", lambda: None)):
        monkeypatch.setattr(torch.cuda, name, stand_in)
    used: list[int] = []

    def call(operands: int) -> None:
        _Clock.now += 0.006 if operands in used[-max(1, count // 2 - 1) :] else 0.010
        used.append(operands)

    sides = [[partial(call, operands) for operands in range(count)] for _ in range(2)]
    for side in timing.compare(*sides, torch.device("cuda"), seconds=0.0):
        assert side.value == pytest.approx(10.0)
        assert side.noise == pytest.approx(0.0, abs=1e-6)


def test_noise_is_not_what_the_order_makes():
    """Samples that are longer in the rounds that a side begins."""
    assert timing._summary([3.0, 2.0] * 8, timing.statistics.median).noise == 0.0
    assert timing._summary([3.0, 2.0, 4.0, 2.0] * 4, timing.statistics.median).noise == pytest.approx(0.4)


def test_large_sets_are_few(monkeypatch):
    properties = dataclasses.make_dataclass("Properties", ["L2_cache_size"])(50 << 20)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    sets = [timing.input_sets(size << 20, torch.device("cuda")) for size in (1, 20, 50, 100, 200, 4000)]
    assert sets == [64, 12, 6, 4, 2, 2]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_device_times_on_a_gpu():
    device = torch.device("cuda")
    x = torch.randn(2048, 2048, device=device)
    once, often = timing.compare([lambda: x @ x], [lambda: [x @ x for _ in range(8)]], device, seconds=0.1)
    assert 6.0 < often.value / once.value < 10.0
    assert timing.copy_bandwidth(device, size=1 << 28) > 1e11
    assert timing.gemm_peak(device, size=2048) > 1e12
    assert timing.input_sets(1 << 20, device) * (1 << 20) > torch.cuda.get_device_properties(device).L2_cache_size
