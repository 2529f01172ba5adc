"""The planner's memory and step time beside published runs, one by one."""

from __future__ import annotations

import pytest

from shardfuse.parallel.plan import check, efficiency, published
from shardfuse.parallel.plan.layout import Layout


def test_every_judged_source_is_predicted_without_its_own_runs() -> None:
    sources = check.steps()
    judged = {source.name: source.passed for source in sources if source.passed is not None}
    assert {"megatron2021-T1", "mcore0.8", "torchtitan2412", "torchtitan2506", "llm-foundry"} <= judged.keys()
    assert all(judged.values()), judged


def test_a_wrong_prediction_fails_its_source() -> None:
    runs = [run for run in published.runs() if run.source == "mcore0.8" and run.seconds is not None]
    steps = tuple(check.Step(run, 1.2 * (run.seconds or 0.0), run.seconds or 0.0) for run in runs)
    assert check.Source("mcore0.8", steps).passed is False


def test_memory_is_that_of_every_published_split_and_peak() -> None:
    held = check.memory()
    assert sum(each.what == "peak" for each in held) == 19
    assert sum(each.what == "activations" for each in held) == 4
    assert not [each for each in held if not each.passed]


def test_what_ships_is_fitted_to_all_runs() -> None:
    assert efficiency.shipped() == pytest.approx(efficiency.fit(published.runs()), abs=0.002)


def test_a_batch_that_does_not_divide_is_refused() -> None:
    with pytest.raises(ValueError, match="use a multiple of 8"):
        Layout(dp=4, micro=2, batch=12)
