"""Layout validation from the settings alone: refusals and warnings before any process starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from shardfuse.commands.train import TrainOptions, run_train
from shardfuse.parallel.pipeline.timeline import Costs
from shardfuse.training import stages
from shardfuse.training.layout import padding, remarks, resolve
from shardfuse.training.settings import RunSettings, parse


def _settings(processes: int, batch: int = 8, **parallel: Any) -> RunSettings:
    model = {"num_layers": 8}
    return resolve(parse({"device": "cpu", "model": model, "data": {"batch": batch}, "parallel": parallel}), processes)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"parallel": {"tp": 3}}, "vocab_size=256 does not divide by the 3 tensor-parallel ranks"),
        (
            {"parallel": {"tp": 2}, "model": {"num_heads": 3, "head_dim": 8}},
            "num_heads=3 does not divide by the 2 tensor-parallel ranks",
        ),
        (
            {"parallel": {"pp": 2, "schedule": "zbv"}, "model": {"num_layers": 1}},
            "a model of 3 parts cannot be cut into 4 pipeline stages",
        ),
        ({"parallel": {"pp": 2, "schedule": "zigzag"}}, "schedule='zigzag': expected one of naive, gpipe, 1f1b"),
        ({"parallel": {"schedule": "zigzag"}}, "schedule='zigzag': expected one of naive, gpipe, 1f1b"),
        (
            {"parallel": {"pp": 2, "schedule": "1f1b", "microbatches": 1}},
            "schedule='1f1b' over 2 pipeline ranks needs at least 2 micro-batches, not 1",
        ),
        (
            {"parallel": {"pp": 2, "dp": 2, "schedule": "zbv", "zero": 3}},
            "zero=3 under schedule='zbv', which splits backward: ",
        ),
        (
            {"parallel": {"overlap": "most"}},
            "ParallelTransformer: overlap='most': expected one of auto, kernel, chunked, none",
        ),
    ],
    ids=lambda value: " ".join(value.get("parallel", {})) if isinstance(value, dict) else "",
)
def test_layouts_that_cannot_be_leave_no_folder(values: dict[str, Any], says: str, tmp_path: Path):
    flat = [f"{section}.{name}={value}" for section, content in values.items() for name, value in content.items()]
    flags = {"out": str(tmp_path / "run"), "device": "cpu"}
    with pytest.raises(ValueError) as caught:
        run_train(TrainOptions(flags=flags, assignments=tuple(flat)))
    assert str(caught.value).startswith(says)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_as_many_stages_as_the_model_has_parts():
    shallow = parse({"model": {"num_layers": 2}, "parallel": {"pp": 2, "schedule": "zbv"}, "device": "cpu"})
    assert resolve(shallow, 2).parallel.microbatches == 8


@pytest.mark.parametrize(
    ("schedule", "pp", "sequences", "count"),
    [
        ("zbv", 2, 8, 8),  # two for each of four stages
        ("zbv", 2, 100, 8),
        ("zbv", 2, 4, 4),  # at most one per sequence
        ("1f1b", 4, 5, 5),
        ("1f1b", 4, 3, 4),  # the schedule's minimum
        ("dualpipev", 2, 1, 4),
        ("interleaved_1f1b", 4, 11, 10),  # in rounds of equal size
    ],
)
def test_default_count_of_micro_batches_fits_the_share(schedule: str, pp: int, sequences: int, count: int):
    assert _settings(pp, batch=sequences, pp=pp, schedule=schedule).parallel.microbatches == count
    assert _settings(2 * pp, batch=2 * sequences, pp=pp, schedule=schedule).parallel.microbatches == count


def test_counts_that_were_given_stay():
    assert _settings(1).parallel.microbatches is None
    assert _settings(2, batch=2, pp=2, schedule="gpipe", microbatches=7).parallel.microbatches == 7


@pytest.mark.parametrize("given", [None, 3])
def test_costs_are_measured_for_the_micro_batches_of_the_run(given: int | None):
    settings = _settings(4, pp=2, schedule="zbv", **({} if given is None else {"microbatches": given}))
    with mock.patch.object(stages, "measured_costs", return_value=[Costs()]) as measure:
        for schedule in ("zbv", "1f1b"):
            stages.part_costs(settings, schedule)
    assert [call.kwargs["split"] for call in measure.call_args_list] == [True, False]
    assert measure.call_args.args[1:] == (1 if given is None else 2, settings.data.seq)


def test_usual_settings_need_no_remark():
    for settings in (
        _settings(1, zero=1),
        _settings(4, zero=1, dp_replicate=2),
        _settings(4, dp_replicate=4),
        _settings(2, microbatches=3),
        _settings(4, pp=2, schedule="zbv"),
    ):
        assert remarks(settings) == []


def test_replicas_of_what_is_not_sharded_are_remarked_on():
    (said,) = remarks(_settings(4, dp_replicate=2, tp=2, zero=1))
    assert said.startswith(
        "zero = 1 shards nothing: shards are counted by dp, which is 1, and dp_replicate = 2 are whole"
    )


@pytest.mark.parametrize(
    ("parallel", "batch", "empty", "advice"),
    [
        ({"microbatches": 6}, 4, 2, "data.batch = 6, or microbatches = 4"),
        ({"dp": 2, "pp": 2, "schedule": "gpipe", "microbatches": 4}, 12, 2, "data.batch = 16, or microbatches = 3"),
        ({"pp": 4, "schedule": "1f1b"}, 3, 1, "data.batch = 4"),
    ],
)
def test_padding_is_counted_and_what_avoids_it_works(parallel: dict[str, Any], batch: int, empty: int, advice: str):
    processes = parallel.get("dp", 1) * parallel.get("pp", 1)
    settings = _settings(processes, batch, **parallel)
    (said,) = remarks(settings)
    assert f": {empty} empty sequences are added" in said
    assert said.endswith(f"use {advice}")
    for change in advice.split(", or "):
        name, _, value = change.partition(" = ")
        changed = {**parallel, "microbatches": settings.parallel.microbatches}
        if name == "microbatches":
            changed[name] = int(value)
        fixed = _settings(processes, int(value) if name == "data.batch" else batch, **changed)
        assert remarks(fixed) == []


def _padding_body(rank: int, world: int, rows: int, count: int) -> int:
    """The number of rows that the pipeline adds to a batch of ``rows``."""
    import torch

    from shardfuse import ParallelTransformer, TransformerConfig, init_mesh, parallelize

    config = TransformerConfig(num_layers=1, hidden_size=8, num_heads=1, intermediate_size=8)
    mesh = init_mesh(pp=world, device_type="cpu")
    model = parallelize(
        ParallelTransformer(config, mesh=mesh, device="meta"), mesh, schedule="gpipe", microbatches=count, seed=0
    )
    assert model.pipeline is not None
    return len(model.pipeline._padded(torch.zeros(rows, 4, dtype=torch.int64), 0)) - rows


@pytest.mark.parametrize(("rows", "count"), [(4, 3), (2, 4), (4, 4)])
def test_padding_is_the_pipeline_s(ranks: Any, rows: int, count: int):
    parallel = _settings(2, rows, pp=2, schedule="gpipe", microbatches=count).parallel
    assert ranks(2, _padding_body, rows, count) == [padding(parallel, rows)] * 2
