"""The planner's memory beside what ranks hold in real steps: weights, gradients, optimizer state, activations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from plan_memory_case import (
    CASES,
    GATED,
    GELU,
    KINDS,
    UNEVEN,
    Case,
    config_of,
    kept_by_kernels,
    predicted,
    row,
    rows,
    run,
)
from plan_memory_case import case as make_case

from shardfuse import ParallelTransformer
from shardfuse.layers.transformer import FUSED_LOSS_BYTES
from shardfuse.parallel.plan import stages
from shardfuse.parallel.plan.memory import of_rank, parameters
from shardfuse.parallel.plan.shapes import ModelShape
from shardfuse.parallel.plan.software import OURS, PLAIN

WITHIN = 0.01
# Before 2.13 (seen on 2.11) torch's pass for the inputs does not free the softmax of the loss.
KEEPS_SOFTMAX = torch.__version__ < "2.13"
WRITE = "PYTHONPATH=src python tests/support/plan_memory_case.py --write"


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_rank_holds_what_is_predicted(ranks: Any, case: Case) -> None:
    found = run(ranks, case)
    for rank, held in enumerate(found):
        planned = predicted(case, rank)
        within = within_of(case)
        assert {kind: held[kind] for kind in KINDS} == pytest.approx({k: planned[k] for k in KINDS}, rel=within), rank
        if case.layout.zero == 3:  # counts two blocks, of which forward ends with none
            assert held["gathered"] <= planned["gathered"], rank
        else:
            assert held["gathered"] == planned["gathered"], rank
        # Where backward is split, a micro-batch's input may have a gradient while it is still in use.
        assert held["buffers"] == pytest.approx(planned["buffers"], rel=0.15 if case.splits_backward else 0), rank
    _is_the_pages(row(case, found), case)


def test_a_rank_with_both_ends_of_a_tied_model_holds_a_copy() -> None:
    """The optimizer steps the embedding alone."""
    layout = make_case(UNEVEN, 4, pp=2, interleave=2, schedule="zbv").layout
    planned = stages.of_rank(UNEVEN, layout, PLAIN, 0)
    blocks = int(planned[0].blocks), int(planned[1].blocks)
    model = ParallelTransformer(config_of(UNEVEN, layout), device="meta")
    parts = range(1 + blocks[0]), range(5 - blocks[1], 6)
    model.keep([*parts[0], *parts[1]])
    held = {param for each in parts for param in model.stage(each).parameters()}
    assert sum(param.numel() for param in held) == parameters(UNEVEN, layout, planned)
    memory = of_rank(UNEVEN, layout, PLAIN, 0)
    assert memory.optimizer == 8 * sum(param.numel() for param in set(model.parameters()))
    assert memory.weights > memory.optimizer / 2


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("shape", [GATED, GELU], ids=lambda shape: shape.name)
@pytest.mark.parametrize("options", [{}, {"mlp_recompute": 1}, {"mlp_recompute": 2}, {"recompute": "full"}], ids=str)
def test_kernels_keep_what_is_predicted(options: dict[str, Any], shape: ModelShape, precision: str) -> None:
    case = make_case(shape, micro=2, precision=precision, **options)
    planned = of_rank(shape, case.layout, OURS, 0)
    assert kept_by_kernels(case) == pytest.approx(planned.activations + planned.logits, rel=1e-4)


def test_no_line_of_the_page_is_left_over() -> None:
    assert {name for name, line in rows().items() if " / " in line} == {str(case) for case in CASES}


def within_of(case: Case) -> float:
    return 0.03 if KEEPS_SOFTMAX and case.splits_backward else WITHIN


def _is_the_pages(line: str, case: Case) -> None:
    """What was predicted has to be the same; what was measured may depend on torch's version a little."""
    there = rows()[str(case)]
    ours, theirs = ([cell.split(" / ") for cell in each.split(" | ")[2:6]] for each in (line, there))
    within = within_of(case)
    assert [pair[0] for pair in ours] == [pair[0] for pair in theirs], WRITE
    assert [float(pair[1]) for pair in ours] == pytest.approx([float(pair[1]) for pair in theirs], rel=within), WRITE


def test_the_limit_of_stored_logits_is_the_models() -> None:
    assert OURS.fused_loss == PLAIN.fused_loss == FUSED_LOSS_BYTES
