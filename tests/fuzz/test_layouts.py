"""Random models in random layouts train as one process does, or every rank refuses them alike."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
from fuzz import Fuzz
from layout_case import compare_spread, make_batches

from shardfuse import TransformerConfig
from shardfuse.parallel.pipeline.schedules import SCHEDULES

pytestmark = [pytest.mark.nightly, pytest.mark.fuzz]

WORLD = 4  # at most
# Degrees of (dp_replicate, dp, pp, tp).
MESHES = [degrees for degrees in itertools.product(range(1, WORLD + 1), repeat=4) if 1 < math.prod(degrees) <= WORLD]
FUSED = ("llama", "qwen2", "gemma2", "gpt2")
# What a rank says whose own batch is valid.
OF_OTHERS = "N of N ranks that read data refused their batch; their errors say why"


def _case(draw: Random) -> dict[str, Any]:
    """The arguments of ``_body``. Most suit each other: a case that is refused tests less."""
    rarely: Callable[[], bool] = lambda: draw.random() < 0.1
    dp_replicate, dp, pp, tp = draw.choice(MESHES)
    schedule = draw.choice(list(SCHEDULES)) if (pp > 1) != rarely() else None
    stages = pp * (SCHEDULES[schedule].stages_per_rank if schedule else 1)
    kv_heads = draw.choice([1, 2, 3, 4]) if rarely() else tp * draw.choice([1, 2])
    vocab_size = 12 * draw.choice([1, 2, 3])  # any tp divides it
    config: dict[str, Any] = {
        "style": draw.choice(["gelu", "gated"]),
        "vocab_size": vocab_size - rarely(),
        "hidden_size": draw.choice([12, 16, 20]),
        "intermediate_size": 12 * draw.choice([1, 2, 3]) + rarely(),
        "num_layers": draw.randint(2, 6) if rarely() else draw.randint(max(2, stages), max(6, stages)),
        "num_kv_heads": kv_heads,
        "num_heads": kv_heads * draw.choice([1, 2, 3]),
        "head_dim": draw.choice([2, 4, 8]),
        "tie_embeddings": draw.random() < 0.5,
        "norm_offset": draw.choice([0.0, 1.0]),
        "init_std": 0.1,
    }
    if rarely():
        config["bias"] = draw.random() < 0.5
    if rarely():
        config["rope_interleaved"] = True
    attention = {"attention_window": draw.randint(2, 5), "attention_softcap": 3.0, "attention_sinks": True}
    config |= {name: value for name, value in attention.items() if draw.random() < 0.2}
    length, rows = draw.randint(4, 8), draw.randint(1, 9)
    # Targets before 3 count: a first token alone has gradients of 0 for queries and keys, and no relative error.
    ignored = [(draw.randrange(rows), draw.randrange(3, length)) for _ in range(draw.randrange(3))]
    return {
        "config": config | {"max_positions": length},
        "batches": (draw.randrange(1000), rows, length, vocab_size - 1, ignored),
        "degrees": {"dp_replicate": dp_replicate, "dp": dp, "pp": pp, "tp": tp},
        "options": {
            "zero": draw.randrange(4),
            "schedule": schedule,
            "microbatches": draw.choice([None, None, stages, 2 * stages, draw.randint(1, 2 * stages)]),
            "recompute": draw.choice([None, True, False]),
            "overlap": draw.choice([None, "none", "auto", "chunked"]),
        },
        "layers": {
            "sequence_parallel": draw.random() < 0.4,
            "overlap": draw.choice(["auto", "none", "chunked"]),
            "recompute": draw.random() < 0.2,
            "mlp_recompute": draw.randrange(3),
        },
    }


def _reason(message: str) -> str:
    """A refusal's message without its rank and its numbers, which may be those of a rank's own batch.

    A share of the data without sequences is refused for the micro-batch that would be made of none.
    """
    said = re.sub(r"\d+", "N", re.sub(r"^rank \d+: ", "", message))
    return re.sub(r"tokens of a (micro-)?batch to divide by N ranks: .*", "tokens to divide by N ranks", said)


def _body(rank: int, world: int, case: dict[str, Any]) -> tuple[str, Any]:
    """("trained", the differences) or ("refused", the message)."""
    try:
        config = TransformerConfig(**case["config"])
        found = compare_spread(config, make_batches(*case["batches"]), case["degrees"], case["options"], case["layers"])
    except ValueError as error:
        return "refused", str(error)
    return "trained", found


def _fused_case(draw: Random) -> tuple[Any, ...]:
    """A layout of a fused foreign model."""
    rarely: Callable[[], bool] = lambda: draw.random() < 0.1
    dp_replicate, dp, pp, tp = draw.choice(MESHES)
    schedule = draw.choice(list(SCHEDULES)) if (pp > 1) != rarely() else None
    stages = pp * (SCHEDULES[schedule].stages_per_rank if schedule else 1)
    microbatches = draw.choice([None, None, stages, draw.randint(1, 2 * stages)])
    divides = tp > 1 and draw.random() < 0.4
    kind, recompute, zero = draw.choice(FUSED), draw.choice([None, True]), draw.randrange(4)
    return kind, dp, pp, tp, zero, schedule, microbatches, recompute, divides, dp_replicate


def _fused_body(rank: int, world: int, case: tuple[Any, ...]) -> tuple[str, Any]:
    from fused_layout_case import Layout, compare

    try:
        return "trained", compare(Layout(*case))
    except ValueError as error:
        return "refused", str(error)


def _world_of(case: Any) -> int:
    return math.prod(case["degrees"].values()) if isinstance(case, dict) else case[1] * case[2] * case[3] * case[-1]


@pytest.mark.parametrize(("draw_case", "body"), [(_case, _body), (_fused_case, _fused_body)], ids=["own", "fused"])
def test_layouts(ranks: Any, fuzz: Fuzz, draw_case: Any, body: Any):
    if body is _fused_body:
        pytest.importorskip("transformers")

    def check(number: int, draw: Random) -> str:
        case = draw_case(draw)
        world = _world_of(case)
        try:
            answers = ranks(world, body, case)
            outcomes = {outcome for outcome, _ in answers}
            assert len(outcomes) == 1, answers
            if outcomes == {"trained"}:
                assert answers == [("trained", [])] * world
                return "trained"
            reasons = {_reason(message) for _, message in answers} - {OF_OTHERS}
            assert len(reasons) == 1, answers
            return f"refused ({reasons.pop()[:70]}...)"
        except Exception as error:
            raise AssertionError(f"{case}\n{error}") from error

    found = fuzz.run(check)
    assert fuzz.only is not None or found["trained"] >= found.total() / 5, found
