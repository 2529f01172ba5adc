"""The partition of parts into stages: as even over the ranks as possible."""

from __future__ import annotations

import itertools
import random

import pytest

from shardfuse import TransformerConfig
from shardfuse.layers.config import part_costs
from shardfuse.parallel.pipeline.partition import balanced, loads, owners


def test_layouts():
    assert owners(4, 4) == [0, 1, 2, 3]
    assert owners(6, 3) == [0, 1, 2, 0, 1, 2]
    assert owners(6, 3, "v") == [0, 1, 2, 2, 1, 0]
    assert owners(9, 3, "v") == [0, 1, 2, 2, 1, 0, 0, 1, 2]


def _best(costs: list[float], stages: int, layout: str, ranks: int) -> float:
    """The lowest load of the slowest rank over all partitions."""
    cuts = itertools.combinations(range(1, len(costs)), stages - 1)
    borders = ([0, *inner, len(costs)] for inner in cuts)
    return min(max(loads(costs, [range(*pair) for pair in itertools.pairwise(b)], layout, ranks)) for b in borders)


@pytest.mark.parametrize("seed", range(40))
def test_one_stage_on_each_rank_is_the_best_there_is(seed: int):
    draw = random.Random(seed)
    costs = [draw.choice([0.0, 1.0, 1.5, 3.0, 7.0]) for _ in range(draw.randint(4, 10))]
    stages = draw.randint(1, 4)
    ranges = balanced(costs, stages)
    assert max(loads(costs, ranges)) == pytest.approx(_best(costs, stages, "loop", stages))


@pytest.mark.parametrize("seed", range(20))
def test_the_slowest_stage_counts_first_and_then_how_even_the_others_are(seed: int):
    """Uneven costs, where the evenest cut by squares is seldom the one with the lowest maximum."""
    draw = random.Random(seed)
    costs = [draw.random() ** 3 for _ in range(draw.randint(5, 10))]
    stages = draw.randint(2, 4)
    cuts = itertools.combinations(range(1, len(costs)), stages - 1)
    every = [[range(*pair) for pair in itertools.pairwise([0, *inner, len(costs)])] for inner in cuts]
    least = min(max(loads(costs, ranges)) for ranges in every)
    best = [ranges for ranges in every if max(loads(costs, ranges)) <= least + 1e-9]
    assert balanced(costs, stages) == min(best, key=lambda ranges: sum(load**2 for load in loads(costs, ranges)))


@pytest.mark.parametrize(("layout", "ranks"), [("loop", 2), ("loop", 3), ("v", 2), ("v", 3)])
@pytest.mark.parametrize("head", [0.4, 1.0, 2.6, 4.0])
@pytest.mark.parametrize("blocks", [5, 6, 7, 8])
def test_several_stages_on_each_rank_of_a_model_of_equal_blocks(layout: str, ranks: int, head: float, blocks: int):
    costs = [0.1] + [1.0] * blocks + [head]
    ranges = balanced(costs, 2 * ranks, layout=layout, ranks=ranks)
    assert max(loads(costs, ranges, layout, ranks)) == pytest.approx(_best(costs, 2 * ranks, layout, ranks))


def test_stages_are_consecutive_whole_and_never_empty():
    for stages, layout, ranks in ((1, "loop", 1), (4, "loop", 4), (8, "loop", 4), (8, "v", 4)):
        ranges = balanced([0.0] * 11, stages, layout=layout, ranks=ranks)
        assert [part for parts in ranges for part in parts] == list(range(11))
        assert all(len(parts) for parts in ranges)


def test_equally_good_partitions_give_way_to_the_evenest():
    assert sorted(map(len, balanced([1.0] * 10, 4))) == [2, 2, 3, 3]


def test_a_heavy_head_stands_alone_and_an_embedding_costs_little():
    config = TransformerConfig(vocab_size=128_000, hidden_size=512, intermediate_size=2048, num_layers=12)
    parts = part_costs(config, 2048)
    assert [part.name for part in parts[:2]] == ["model.embed_tokens", "model.layers.0"]
    head, block = parts[-1].cost, parts[1].cost
    assert head == 2 * 512 * 128_000
    assert block == 2 * (512 * 512 * 4 + 2048 * 512 + 2 * 512 * 2048)
    assert head > 10 * block
    ranges = balanced([part.cost for part in parts], 4)
    assert [len(parts) for parts in ranges] == [5, 4, 4, 1]


def test_windows_and_grouped_queries_cost_less():
    wide = TransformerConfig(hidden_size=64, num_heads=8)
    assert _block(wide, 4096) > _block(TransformerConfig(hidden_size=64, num_heads=8, attention_window=256), 4096)
    assert _block(wide, 256) == _block(TransformerConfig(hidden_size=64, num_heads=8, attention_window=256), 256)
    assert _block(wide, 64) > _block(TransformerConfig(hidden_size=64, num_heads=8, num_kv_heads=2), 64)


def _block(config: TransformerConfig, length: int) -> float:
    return part_costs(config, length)[1].cost


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: balanced([1.0] * 3, 4), "a model of 3 parts cannot be cut into 4 pipeline stages"),
        (lambda: balanced([1.0, -1.0], 2), "expected numbers of at least 0"),
        (lambda: balanced([1.0, float("nan")], 2), "expected numbers of at least 0"),
        (lambda: balanced([1.0] * 8, 6, ranks=4), "6 stages over 4 pipeline ranks"),
        (lambda: balanced([1.0] * 8, 4, layout="x"), "layout='x': expected one of loop, v"),
    ],
)
def test_what_makes_no_partition_is_refused(call, message: str):
    with pytest.raises(ValueError, match=message):
        call()
