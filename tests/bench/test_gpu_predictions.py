"""Predictions: the document's, beside what was found; some follow from counts of what their kernels move."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from shardfuse.bench.gpu import predictions
from shardfuse.bench.harness import memory_limit, runner
from shardfuse.bench.harness.benchmark import Settings
from shardfuse.bench.harness.memory_limit import Launches
from shardfuse.bench.harness.report import Row
from shardfuse.kernels.dev import counts_report

COPY, KEY = "copy of the bytes", ("a-case", "forward, us", "copy of the bytes")
BOTH = Launches("norm", "a-case", ("fwd", "bwd"))


def _record(**rows: tuple[float, float]) -> dict[str, Any]:
    """Of kernels: what they move in device memory and in L1, over the necessary bytes."""
    listed = [[kernel, 1.0, moved, touched] for kernel, (touched, moved) in rows.items()]
    return {"columns": ["loads", "moved", "touched"], "cases": {"sm_90 norm a-case": ["source", *listed]}}


@pytest.mark.parametrize(
    ("bwd", "low", "high"),
    [
        ((1.0, 1.0), 0.80, 1.00),
        ((1.0, 2.0), 0.80, 1.00),  # weights that every block reads, from a cache
        ((1.25, 2.0), 0.64, 0.80),  # sectors of which a part is used
        ((1.25, 12.4), 0.40, 0.50),  # lanes with a sector of their own each
    ],
)
def test_the_slowest_level_limits(monkeypatch: pytest.MonkeyPatch, bwd: tuple[float, float], low: float, high: float):
    """The worst of a row's launches counts."""
    record = _record(fwd=(1.0, 1.0), bwd=bwd, sum=(50.0, 50.0))
    monkeypatch.setattr(memory_limit, "_record", lambda: record)
    found = predictions.by_memory("norm", KEY, BOTH, (0.8, 1.0), "a pass")
    assert found[:4] == ("norm", KEY, low, high)
    moved = f"moves {bwd[0]:.2f} of the necessary bytes in device memory, {bwd[1]:.2f} in L1"
    assert found.why == f"{moved}, at 0.80 to 1.00 of the copy's rate: a pass"


def test_launches_that_are_not_recorded_are_an_error(tmp_path, monkeypatch: pytest.MonkeyPatch):
    record = _record(fwd=(1.0, 1.0))
    with pytest.raises(LookupError, match=r"counts-triton-3.7.1.json has no bwd of 'sm_90 norm a-case'"):
        memory_limit.counted(BOTH, record)
    with pytest.raises(LookupError, match="has no bwd, fwd of 'sm_90 norm gone'"):
        memory_limit.counted(BOTH._replace(case="gone"), record)
    with pytest.raises(LookupError, match=r"has no columns of .* with touched, moved"):
        memory_limit.counted(BOTH._replace(kernels=("fwd",)), {**record, "columns": ["loads", "moved", "by_block"]})
    monkeypatch.setattr(memory_limit, "RECORD", tmp_path / "none.json")
    memory_limit._record.cache_clear()
    with pytest.raises(LookupError, match=r"there is no .*none.json, on which predictions rest"):
        predictions.by_memory("norm", KEY, BOTH, (0.8, 1.0), "a pass")


def test_a_wheel_predicts_what_rests_on_no_counts(tmp_path, monkeypatch: pytest.MonkeyPatch):
    """It has no record of them."""
    whole = predictions.predictions()
    monkeypatch.setattr(memory_limit, "RECORD", tmp_path / "none.json")
    fewer = predictions.predictions()
    assert 0 < len(fewer) < len(whole)
    assert set(fewer) < set(whole)


def test_the_record_is_that_of_the_counts():
    """Rows against a copy follow from it."""
    version = memory_limit.RECORD.stem.removeprefix("counts-triton-")
    assert counts_report.path(version) == memory_limit.RECORD
    assert counts_report.read(version)
    assert set(memory_limit._LEVELS) <= set(counts_report.COLUMNS)
    # No recorded case launches the cast by row.
    copies = [each for each in predictions.predictions() if each.key[2] == COPY and each.bench != "quantise"]
    assert {each.bench for each in copies} == {"norm", "rope", "cache_write", "paged_decode"}
    assert all(each.why.startswith("moves ") for each in copies)


def test_predictions_are_about_rows_of_the_short_plans():
    for each in predictions.predictions():
        planned = runner.find(each.bench).plan(Settings(torch.device("cuda"), short=True))
        assert each.key in [row.key for row in planned], each.key
        assert 0 < each.low < each.high


def test_predictions_stand_beside_what_was_found():
    first = predictions.predictions()[0]
    rows = [Row(*first.key[:2], 1.0, 0.95, first.key[2], ratio, None, None) for ratio in (first.low, first.high + 1)]
    for row, verdict in zip(rows, ("as expected", "above")):
        shown = predictions.table(predictions.compared(first.bench, [row]))
        assert [str(cells[-1]) for cells in shown.rows] == [verdict]
    assert not list(predictions.compared("another", rows))


def test_the_document_lists_the_predictions():
    """SHARDFUSE_WRITE_DOCS=1 writes the table."""
    lines = [
        f"| {each.bench} | {', '.join(each.key[:2])} | {each.key[2]} | {each.low:.2f} to {each.high:.2f} | {each.why} |"
        for each in predictions.predictions()
    ]
    document = Path(__file__).parents[2] / "docs" / "gpu.md"
    before, _, rest = document.read_text().partition("<!-- predictions -->\n")
    head = "| benchmark | row | peer | expected ratio | because |\n|---|---|---|---|---|\n"
    table, _, after = rest.partition("<!-- /predictions -->")
    wanted = head + "\n".join(lines) + "\n"
    if os.environ.get("SHARDFUSE_WRITE_DOCS") == "1":
        document.write_text(f"{before}<!-- predictions -->\n{wanted}<!-- /predictions -->{after}")
        return
    assert table == wanted
