"""The planner's memory beside what ranks hold in real steps: weights, gradients, optimizer state, activations."""

from __future__ import annotations

from typing import Any

import pytest
from plan_memory_case import CASES, KINDS, Case, predicted, row, rows, run

from shardfuse.layers.transformer import FUSED_LOSS_BYTES
from shardfuse.parallel.plan.software import OURS, PLAIN

WITHIN = 0.01
WRITE = "PYTHONPATH=src python tests/support/plan_memory_case.py --write"


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_rank_holds_what_is_predicted(ranks: Any, case: Case) -> None:
    found = run(ranks, case)
    for rank, held in enumerate(found):
        planned = predicted(case, rank)
        assert {kind: held[kind] for kind in KINDS} == pytest.approx({k: planned[k] for k in KINDS}, rel=WITHIN), rank
        if case.layout.zero == 3:  # counts two blocks, of which forward ends with none
            assert held["gathered"] <= planned["gathered"], rank
        else:
            assert held["gathered"] == planned["gathered"], rank
    _is_the_pages(row(case, found), case)


def test_no_line_of_the_page_is_left_over() -> None:
    assert {name for name, line in rows().items() if " / " in line} == {str(case) for case in CASES}


def _is_the_pages(line: str, case: Case) -> None:
    """What was predicted has to be the same; what was measured may depend on torch's version a little."""
    there = rows()[str(case)]
    ours, theirs = ([cell.split(" / ") for cell in each.split(" | ")[2:6]] for each in (line, there))
    assert [pair[0] for pair in ours] == [pair[0] for pair in theirs], WRITE
    assert [float(pair[1]) for pair in ours] == pytest.approx([float(pair[1]) for pair in theirs], rel=WITHIN), WRITE


def test_the_limit_of_stored_logits_is_the_models() -> None:
    assert OURS.fused_loss == PLAIN.fused_loss == FUSED_LOSS_BYTES
