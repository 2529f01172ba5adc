"""When the requests of `serve` get their tokens: what is noted of each side, and the rows."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")

from shardfuse.bench.harness.benchmark import Settings
from shardfuse.bench.harness.latency import Times, percentiles, timing, whole
from shardfuse.bench.suites import serve, serve_latency

DRY = Settings(torch.device("cpu"), dry=True)


def test_times_follow_from_when_tokens_came():
    times = Times.of(10.0, [[11.0, 11.5, 12.5], [13.0, 13.25, 13.5]])
    assert times.first == [1.0, 3.0]
    assert times.between == [0.5, 1.0, 0.25, 0.25]
    assert times.whole == 3.5


def test_figures_are_percentiles_over_all_rounds_in_microseconds():
    loads = [Times([0.1, 0.2], [0.01], 1.0), Times([0.4], [0.02, 0.03], 3.0)]
    found = {metric: figure(loads) for metric, figure in percentiles().items()}
    assert found == {
        "first token, percentile 50, us": 0.2,
        "first token, percentile 99, us": 0.4,
        "token to token, percentile 50, us": 0.02,
        "token to token, percentile 99, us": 0.03,
    }
    assert timing(whole, loads).value == 2e6
    assert timing(whole, loads).noise == pytest.approx(2 / 3)


def test_every_token_of_every_request_is_timed():
    rig = serve._rig(True)
    count = len(rig.prompts)
    for times in (serve_latency.engine(rig), serve_latency.static(rig)):
        assert len(times.first) == count
        assert len(times.between) == count * (rig.new - 1)
        assert 0 < min(times.first) <= max(times.first) < times.whole
        assert min(times.between) >= 0
    assert len(set(serve_latency.static(rig).first)) == 1  # its requests advance together
    with pytest.raises(RuntimeError, match=r"got \[1\] tokens where 4 were asked for"):
        serve_latency._whole(rig, 0.0, [[1.0]] * count)


def test_rows_are_the_percentiles_against_each_peer():
    rows = [row for row in serve.plan(DRY) if row.metric in percentiles()]
    assert [(row.metric, row.peer_name) for row in rows] == [
        (metric, peer) for peer in (serve.STATIC, serve.BATCH) for metric in percentiles()
    ]
    for row in rows[:4]:
        ours, peer = row.run()
        assert ours.value > 0
        assert peer.value > 0


@pytest.mark.nightly
def test_the_rolling_batch_of_transformers_is_timed_too():
    rig = serve._rig(True)
    times = serve_latency.batch(rig)
    assert len(times.between) == len(rig.prompts) * (rig.new - 1)
