"""The planner's memory beside what ranks over gloo hold: weights, gradients, the optimizer's state and activations."""

from __future__ import annotations

from typing import Any

import pytest
from plan_case import held

from shardfuse.parallel.plan import memory, software
from shardfuse.parallel.plan.layout import Layout
from shardfuse.parallel.plan.shapes import ModelShape

WITHIN = 0.10
VOCAB, LENGTH, BATCH = 512, 128, 8
SIZES = {"vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 256, "num_layers": 8, "num_heads": 4}
# Degrees, style, and what else differs.
CASES: list[tuple[dict[str, int], str, dict[str, Any]]] = [
    ({"tp": 1, "dp": 2}, "gelu", {"zero": 0}),
    ({"tp": 1, "dp": 2}, "gelu", {"zero": 1}),
    ({"tp": 1, "dp": 2}, "gated", {"zero": 2}),
    ({"tp": 1, "dp": 4}, "gelu", {"zero": 3}),
    ({"tp": 1, "dp": 4}, "gated", {"zero": 3, "recompute": True}),
    ({"tp": 2, "dp": 1}, "gelu", {"zero": 0}),
    ({"tp": 2, "dp": 1}, "gated", {"zero": 0, "sequence_parallel": True}),
    ({"tp": 4, "dp": 1}, "gelu", {"zero": 0, "sequence_parallel": True}),
    ({"tp": 2, "dp": 2}, "gelu", {"zero": 2, "sequence_parallel": True}),
    ({"tp": 2, "dp": 2}, "gated", {"zero": 3}),
    ({"tp": 1, "dp": 1, "pp": 2}, "gelu", {"zero": 0, "schedule": "1f1b"}),
    ({"tp": 1, "dp": 1, "pp": 4}, "gated", {"zero": 0, "schedule": "1f1b"}),
    ({"tp": 2, "dp": 1, "pp": 2}, "gelu", {"zero": 0, "schedule": "1f1b", "sequence_parallel": True}),
    ({"tp": 1, "dp": 2, "pp": 2}, "gelu", {"zero": 1, "schedule": "1f1b"}),
]


@pytest.mark.ranks
@pytest.mark.parametrize("degrees, style, options", CASES, ids=str)
def test_a_rank_holds_what_is_planned(ranks: Any, degrees: dict[str, int], style: str, options: dict[str, Any]) -> None:
    options = dict(options)
    world = 1
    for size in degrees.values():
        world *= size
    pp, dp = degrees.get("pp", 1), degrees["dp"]
    parallel = options.pop("sequence_parallel", False)
    recompute = bool(options.get("recompute"))
    microbatches = 4 if pp > 1 else 1
    found = ranks(
        world, held, SIZES | {"style": style}, degrees, options | {"microbatches": microbatches},
        {"sequence_parallel": parallel}, (BATCH, LENGTH + 1),
    )  # fmt: skip
    shape = ModelShape("small", 64, 8, 4, 4, 256, VOCAB, gated=style == "gated", biases=style == "gelu")
    layout = Layout(
        tp=degrees["tp"], pp=pp, dp=dp, zero=options["zero"], micro=BATCH // dp // microbatches, batch=BATCH,
        length=LENGTH, sequence_parallel=parallel, recompute="full" if recompute else "none", precision="fp32",
    )  # fmt: skip
    for rank, mine in enumerate(found):
        planned = memory.of_rank(shape, layout, software.PLAIN, rank // degrees["tp"] % pp)
        held_there = planned.states + planned.activations + planned.logits
        measured = sum(mine.values())
        print(
            rank,
            f"{held_there / measured - 1:+.3f}",
            {k: (v, round(getattr(planned, k))) for k, v in mine.items()},
            round(planned.logits),
        )
