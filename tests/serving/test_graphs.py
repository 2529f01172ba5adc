"""The runner's captured steps, with a stand-in for CUDA graphs that runs again what it captured, and the seal.

As in a graph, what is captured keeps the numbers that the host knew then, and reads all others where they lie.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from serving_case import exact

from shardfuse.kernels.runtime import sealing
from shardfuse.kernels.runtime.sealing import SealBroken
from shardfuse.serving import Engine, Request, SamplingParams
from shardfuse.serving.graphs import Graphs, Run
from shardfuse.serving.inputs import Kind, Shape, StepInputs

LENGTHS = (7, 1, 12, 3, 9, 5, 2)


def _requests(n: int = 1) -> list[Request]:
    generator = torch.Generator().manual_seed(1)
    return [
        Request(
            torch.randint(0, 32, (length,), generator=generator).tolist(),
            max_new_tokens=6 + length,
            sampling=SamplingParams(temperature=0.9 * (length % 2), seed=length),
            n=n,
        )
        for length in LENGTHS
    ]


class StandIn:
    """Counts what is captured and how often it is replayed."""

    def __init__(self) -> None:
        self.captured = 0
        self.replayed = 0

    def __call__(self, compute: Run) -> tuple[torch.Tensor, Run]:
        self.captured += 1
        first = compute()
        out = torch.empty_like(first)

        def replay() -> torch.Tensor:
            self.replayed += 1
            return out.copy_(compute())

        return first, replay


def _engine(**options: Any) -> tuple[Engine, StandIn]:
    sizes = {"num_blocks": 40, "block_size": 4, "max_num_seqs": 6, "max_num_batched_tokens": 8} | options
    engine, capture = Engine(exact("gated"), **sizes), StandIn()
    engine._runner.graphs = Graphs(capture, sizes["max_num_seqs"], engine._runner._max_model_len)
    return engine, capture


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("num_blocks", [9, 40])
def test_captured_steps_give_the_same_tokens(num_blocks: int, n: int) -> None:
    expected = Engine(exact("gated"), num_blocks=64, block_size=4).generate(_requests(n))
    engine, capture = _engine(num_blocks=num_blocks)
    assert engine.generate(_requests(n)) == expected
    assert (engine.stats.preemptions > 0) == (num_blocks == 9)
    assert 0 < capture.captured <= 4  # of 1, 2, 4 and 6 sequences
    assert capture.replayed >= 3 * capture.captured
    assert engine.generate(_requests(n)) == expected


def test_sizes_are_few_and_cover_every_step() -> None:
    graphs = Graphs(StandIn(), 20, 10_000)
    found = Counter(
        graphs.size(Shape(Kind.COMPUTE, sequences=count, max_seq_len=length))
        for count in range(1, 21)
        for length in (1, 1024, 1025, 9999, 10_000)
    )
    assert set(found) == set(graphs.sizes())
    assert {seqs for seqs, _ in found} == {1, 2, 4, 8, 16, 20}
    assert {length for _, length in found} == {1024, 4096, 10_000}
    assert next(graphs.sizes()) == (20, 10_000)
    assert {seqs for seqs, _ in Graphs(StandIn(), 1, 100).sizes()} == {1}


def test_after_a_warm_up_nothing_is_captured() -> None:
    engine, capture = _engine()
    told: list[str] = []
    engine.warmup(told.append)
    assert told[0] == "prefill of 8 tokens"
    assert len(told) == 1 + capture.captured == 1 + 4
    before = capture.captured
    with engine.sealed():
        answers = engine.generate(_requests())
    assert capture.captured == before
    assert answers == Engine(exact("gated"), num_blocks=64, block_size=4).generate(_requests())


def test_a_warm_up_writes_nothing() -> None:
    """Also where nothing is captured: blocks that requests share stay what they are."""
    for captured in (True, False):
        engine, _ = _engine()
        if not captured:
            engine._runner.graphs = None
        cache = engine._runner.cache
        assert cache is not None
        cache.data.fill_(0.5)
        engine.warmup()
        assert bool((cache.data == 0.5).all())


def test_a_seal_names_what_would_break_it() -> None:
    engine, _ = _engine()
    engine.add(Request([1, 2, 3], max_new_tokens=4))
    with engine.sealed():
        events = list(engine.run())
    assert events[-1].finish == "error"
    assert isinstance(events[-1].error, SealBroken)
    assert "a decode step of 1 sequences up to 64 tokens would be captured, after the seal" in str(events[-1].error)
    assert not engine.busy
    assert len(engine.generate([Request([1, 2, 3], max_new_tokens=4)])[0]) == 4  # without the seal


def test_a_warm_up_wants_an_idle_open_engine() -> None:
    engine, _ = _engine()
    engine.add(Request([1], max_new_tokens=2))
    with pytest.raises(RuntimeError, match="requests are being served; warm up before the first one"):
        engine.warmup()
    engine.close()
    with pytest.raises(RuntimeError, match="the engine is closed"):
        engine.warmup()


def test_a_seal_keeps_triton_from_compiling() -> None:
    knobs = pytest.importorskip("triton").knobs
    before = knobs.runtime.jit_cache_hook
    with sealing.sealed(), pytest.raises(SealBroken, match=r"Triton would compile kernel\[fp32\], after the seal"):
        knobs.runtime.jit_cache_hook(key="k", repr="kernel[fp32]", fn=None)
    assert knobs.runtime.jit_cache_hook is before
    sealing.refuse("anything")  # without a seal


# --- the buffer -------------------------------------------------------------------------------------------------------


def test_long_lists_of_changes_and_copies_are_split() -> None:
    inputs = StepInputs(8, 2, 2000, torch.device("cpu"))
    changes = [(row, column, 7 * column + row) for row in range(2) for column in range(700)]
    parts = list(inputs.batches(changes))
    assert len(parts) == 6
    for part in parts:
        inputs.change(inputs.pack_list(Kind.CHANGE, part))
    assert all(inputs.table[row, column] == block for row, column, block in changes)
    shape = inputs.pack_list(Kind.COPY, changes[:5])
    assert inputs.shape() == shape
    assert inputs.copies(inputs.shape()) == changes[:5]
