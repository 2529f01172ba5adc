"""Invariant mode on a CPU: a request's tokens and log-probabilities have the same bits however it is served.

One table of what else there is to serve and how, against the request alone with its prompt in one piece. Without
``invariant=True`` the bits of most cells differ on most machines; no test relies on that, since on some they may not.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest
import torch

from shardfuse.layers.transformer import ParallelTransformer
from shardfuse.parallel.core.rendezvous import init_mesh
from shardfuse.serving import Engine, Request, SamplingParams
from shardfuse.serving.windows import ROWS, cut
from shardfuse.testing import tiny_model

VOCAB = 332  # of all sizes: vectors and tiles have remainders
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 144,
    "intermediate_size": 412,
    "num_heads": 8,
    "num_kv_heads": 4,
    "init_std": 0.08,
}
Events = list[tuple[Any, ...]]


def _model(dtype: torch.dtype = torch.float32, mesh: Any = None, style: str = "gated") -> ParallelTransformer:
    return tiny_model(style, dtype=dtype, mesh=mesh, **SIZES)


_cached = functools.cache(_model)


def _prompts(count: int, seed: int = 0) -> list[list[int]]:
    drawn = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, 40, (count,), generator=drawn).tolist()
    return [torch.randint(0, VOCAB, (length,), generator=drawn).tolist() for length in lengths]


# Longer than a window of the model, its last token alone in one.
PROMPT = torch.randint(0, VOCAB, (49,), generator=torch.Generator().manual_seed(7)).tolist()
SAMPLING = {
    "greedy": SamplingParams(logprobs=3),
    "sampled": SamplingParams(temperature=0.9, top_p=0.95, top_k=200, seed=5, logprobs=3),
    "prompt scores": SamplingParams(logprobs=3, prompt_logprobs=2),
}


def _watched(sampling: str, **options: Any) -> Request:
    return Request(PROMPT, max_new_tokens=10, sampling=SAMPLING[sampling], **options)


@dataclass(frozen=True)
class Cell:
    company: int = 0
    times: int = 1  # that the watched request is served, the last of which counts
    n: int = 1
    threads: int = 1
    host: bool = False
    options: dict[str, Any] = field(default_factory=dict)


def _few(tokens: int, seqs: int) -> dict[str, int]:
    return {"max_num_batched_tokens": tokens, "max_num_seqs": seqs}


SCARCE = {"num_blocks": 24, "block_size": 4}
TABLE: dict[str, Cell] = {
    "7 others": Cell(7),
    "31 others": Cell(31),
    "a token at a time": Cell(options=_few(1, 1)),
    "3 tokens": Cell(2, options=_few(3, 3)),
    "16 tokens": Cell(7, options=_few(16, 8)),
    "preempted": Cell(7, options=SCARCE),
    "preempted, kept by the host": Cell(7, host=True, options=SCARCE | {"num_host_blocks": 100}),
    "a hit": Cell(times=2, options={"block_size": 8}),
    "a hit among others": Cell(7, times=2, options={"block_size": 1, "num_blocks": 512}),
    "blocks of 5": Cell(3, options={"block_size": 5}),
    "blocks of 256": Cell(3, options={"block_size": 256, "num_blocks": 32}),
    "3 answers": Cell(3, n=3),
    "3 answers, preempted": Cell(3, n=3, options=SCARCE | _few(16, 8) | {"num_blocks": 19}),
    "2 threads": Cell(3, threads=2),
    "everything": Cell(31, times=2, n=2, threads=2, host=True, options=SCARCE | _few(16, 16) | {"num_host_blocks": 64}),
}


@contextlib.contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
        assert torch.get_num_threads() == count
    finally:
        torch.set_num_threads(before)


def _serve(engine: Engine, requests: list[Request]) -> list[Events]:
    """What each answer of the last request was told, in the order of its answers."""
    numbers = [engine.add(request) for request in requests]
    found: dict[int, Events] = {}
    for event in engine.run():
        assert event.error is None
        if event.request == numbers[-1]:
            told = event.token, event.logprob, event.top_logprobs, event.prompt_logprobs, event.finish
            found.setdefault(event.index, []).append(told)
    return [found[index] for index in sorted(found)]


def _engine(model: Any, **options: Any) -> Engine:
    return Engine(model, **{"num_blocks": 256, "block_size": 16, "max_num_seqs": 40, "invariant": True, **options})


def _alone(model: Any, sampling: str, n: int = 1) -> list[Events]:
    return _serve(_engine(model), [_watched(sampling, n=n)])


_cached_alone = functools.cache(lambda sampling, n: _alone(_cached(), sampling, n))


def _in(cell: Cell, model: Any, sampling: str) -> tuple[Engine, list[Events]]:
    with _threads(cell.threads):
        engine = _engine(model, **cell.options)
        if cell.host:
            engine._host.block_seconds = 0.0  # it always pays
        for round_ in range(cell.times):
            others = [
                Request(prompt, max_new_tokens=6 + i % 7, sampling=SamplingParams(temperature=float(i % 2), seed=i))
                for i, prompt in enumerate(_prompts(cell.company, round_))
            ]
            found = _serve(engine, [*others, _watched(sampling, n=cell.n)])
    return engine, found


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("name", TABLE)
def test_the_bits_of_an_answer_do_not_depend_on(name: str, sampling: str) -> None:
    cell = TABLE[name]
    engine, found = _in(cell, _cached(), sampling)
    assert found == _cached_alone(sampling, cell.n)
    assert len(found) == cell.n
    assert (engine.stats.preemptions > 0) == (cell.options.get("num_blocks", 32) < 32)
    assert (engine.stats.kept_tokens > 0) == cell.host
    assert cell.times == 1 or sampling == "prompt scores" or engine.stats.shared_tokens >= 40


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("style", ["gelu", "gated"])
def test_in_every_dtype(dtype: torch.dtype, style: str) -> None:
    cell = Cell(7, options=_few(16, 8) | {"block_size": 8})
    model = _model(dtype, style=style)
    assert _in(cell, model, "prompt scores")[1] == _alone(model, "prompt scores")


@pytest.mark.parametrize("kv_dtype", ["fp8", "int8"])
def test_over_a_quantised_cache(kv_dtype: str) -> None:
    cell = Cell(7, options=_few(16, 8) | {"kv_dtype": kv_dtype})
    assert _in(cell, _cached(), "sampled")[1] == _serve(_engine(_cached(), kv_dtype=kv_dtype), [_watched("sampled")])


@pytest.mark.parametrize("kind", ["gpt2", "llama", "mixtral"])
def test_models_of_transformers(kind: str) -> None:
    """Projections that are no layers of ours, Conv1D, and experts that share tokens out."""
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": VOCAB, "hidden_size": 144, "num_hidden_layers": 2, "num_attention_heads": 4}
    more = {} if kind == "gpt2" else {"intermediate_size": 212, "num_key_value_heads": 2}
    more |= {"num_local_experts": 4} if kind == "mixtral" else {}
    config = transformers.AutoConfig.for_model(kind, **sizes, **more, initializer_range=0.1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
    assert _in(Cell(3, options=_few(16, 4)), model, "greedy")[1] == _alone(model, "greedy")


def test_the_model_is_called_with_one_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is why the equality above holds with any library."""
    shapes, forward = set(), ParallelTransformer.forward

    def watched(self: ParallelTransformer, tokens: torch.Tensor, **given: Any) -> torch.Tensor:
        logits = forward(self, tokens, **given)
        shapes.add((len(tokens), len(logits), torch.get_num_threads()))
        return logits

    monkeypatch.setattr(ParallelTransformer, "forward", watched)
    _in(TABLE["everything"], _cached(), "greedy")
    assert shapes == {(ROWS, 0, 1), (ROWS, ROWS, 1)}


@pytest.mark.parametrize("rows", [1, 4, 16])
def test_windows_have_each_token_once_in_the_row_of_its_position(rows: int) -> None:
    drawn = torch.Generator().manual_seed(rows)
    for _ in range(50):
        queries = torch.randint(0, 40, (6,), generator=drawn)
        contexts = torch.randint(0, 40, (6,), generator=drawn)
        starts, lens = [0, *queries.cumsum(0).tolist()], (queries + contexts).tolist()
        windows = cut(starts, lens, rows)
        done = contexts.tolist()
        for pieces in windows:
            ends = [(p.row, p.row + p.size) for p in pieces]
            assert all(end <= row for (_, end), (row, _) in pairwise([(0, 0), *ends, (rows, rows)]))
            assert len({p.sequence for p in pieces}) == len(pieces)
            for p in pieces:  # a sequence's tokens come in their order
                position = done[p.sequence]
                assert (p.row, p.token) == (position % rows, starts[p.sequence] + position - int(contexts[p.sequence]))
                done[p.sequence] += p.size
                assert p.length == done[p.sequence]
        assert done == lens


def _on_rank(rank: int, world: int) -> list[list[Events]] | None:
    model = _model(torch.float64, init_mesh(tp=world, device_type="cpu"))
    found = []
    for cell in (Cell(), Cell(3, options=SCARCE | _few(16, 4) | {"num_blocks": 18})):
        if rank:
            with _engine(model, **cell.options) as engine:
                engine.follow()
        else:
            engine, events = _in(cell, model, "sampled")
            engine.close()
            found.append(events)
            assert (engine.stats.preemptions > 0) == bool(cell.company)
    return found or None


@pytest.mark.ranks
@pytest.mark.parametrize("world", [2, 4])
def test_over_ranks_the_bits_stay_and_between_degrees_the_tokens(ranks: Any, world: int) -> None:
    """The ranks' sums round unlike those of one process: across degrees only tokens can agree, and in fp64 they do."""
    alone, among_others = ranks(world, _on_rank)[0]
    assert among_others == alone
    expected = _alone(_cached(torch.float64), "sampled")
    assert [event[0] for event in alone[0]] == [event[0] for event in expected[0]]
