"""The engine: its output and its timing, shortages of blocks, and errors.

Models compute in fp64. Batched and solo forwards then differ by about 1e-14, and the oracle asserts for every token a
margin of at least a million times that: tokens must be equal, ties are excluded, nothing is retried.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import subprocess
import sys
import weakref
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from serving_case import STYLES, build, exact

from shardfuse.kernels.runtime import dispatch
from shardfuse.layers.transformer import ParallelTransformer
from shardfuse.parallel.core.rendezvous import init_mesh
from shardfuse.serving import Engine, EngineStats, QueueFull, Request, SamplingParams, TokenEvent
from shardfuse.serving import engine as engine_module
from shardfuse.serving.sampling import uniform

MARGIN = 1e-8  # between the best two logits, which are of order 1


@torch.no_grad()
def _solo(model: ParallelTransformer, request: Request, margin: float = MARGIN) -> list[int]:
    """The answer to ``request`` alone, without a cache: each token recomputes the whole sequence."""
    tokens = list(request.prompt)
    answer: list[int] = []
    sampling = request.sampling
    while len(answer) < request.max_new_tokens and not (answer and answer[-1] in request.stop):
        logits = model.gather_logits(model(torch.tensor([tokens])))[0, -1]
        if sampling.temperature > 0:
            answer.append(_inverse_cdf(logits, sampling, len(answer)))
        else:
            best = logits.topk(2).values
            assert best[0] - best[1] > margin
            answer.append(int(logits.argmax()))
        tokens.append(answer[-1])
    return answer


def _inverse_cdf(logits: torch.Tensor, sampling: SamplingParams, position: int) -> int:
    """The token whose interval of [0, 1) contains the number of a position."""
    u = uniform([sampling.seed], [position]).item()
    edges = torch.softmax(logits / sampling.temperature, 0).cumsum(0)
    assert (edges - u).abs().min() > MARGIN
    return int((edges <= u).sum())


def _requests() -> list[Request]:
    """Seven requests of different lengths and arrival steps, greedy and sampled; one stops early."""
    generator = torch.Generator().manual_seed(1)
    shapes = [(3, 9, 0), (11, 4, 0), (1, 12, 0), (20, 7, 2), (6, 1, 3), (2, 10, 3), (9, 8, 9)]
    return [
        Request(
            torch.randint(32, (prompt,), generator=generator).tolist(),
            max_new_tokens=new,
            stop=(5, 17) if i == 2 else (),
            sampling=SamplingParams(temperature=0.8 if i % 3 == 1 else 0.0, seed=100 + i),
            arrival=arrival,
        )
        for i, (prompt, new, arrival) in enumerate(shapes)
    ]


def _answers(events: Iterable[TokenEvent], count: int) -> list[list[int]]:
    answers: list[list[int]] = [[] for _ in range(count)]
    for event in events:
        if event.token is not None:
            answers[event.request].append(event.token)
    return answers


def _drained(engine: Engine) -> bool:
    return not engine.busy and engine._allocator.used_blocks == 0


# --- generation -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_rolling_batch_equals_solo_forward(style: str, block_size: int) -> None:
    """Requests outnumber slots and arrive at different steps; the budget splits prompts; tokens stream."""
    model, requests = exact(style), _requests()
    expected = [_solo(model, request) for request in requests]
    assert len({token for answer in expected for token in answer}) > 10  # not a model that repeats itself

    engine = Engine(
        model, num_blocks=160 // block_size, block_size=block_size, max_num_seqs=3, max_num_batched_tokens=8
    )
    numbers = [engine.add(request) for request in requests]
    assert numbers == list(range(7))
    steps: list[list[TokenEvent]] = []
    while engine.busy:
        steps.append(engine.step())
    assert _answers((event for step in steps for event in step), 7) == expected
    assert _drained(engine)

    for request, number in zip(requests, numbers):
        when = [i for i, step in enumerate(steps) for event in step if event.request == number]
        assert when[0] >= request.arrival
        assert len(set(when)) == len(when)  # one token a step, without delay
        ends = [event.finish for step in steps for event in step if event.request == number]
        stopped = expected[number][-1] in request.stop
        assert ends == [None] * (len(ends) - 1) + ["stop" if stopped else "length"]
    assert max(len(step) for step in steps) == engine.stats.peak_seqs == 3
    assert engine.stats.preemptions == 0


def test_an_answer_ends_at_its_stop_token() -> None:
    model = exact("gelu")
    whole = _solo(model, Request([3, 1, 4], max_new_tokens=12))
    stop = whole[5]
    cut = whole[: whole.index(stop) + 1]
    engine = Engine(model, num_blocks=8)
    engine.add(Request([3, 1, 4], max_new_tokens=12, stop=[stop]))
    events = list(engine.run())
    assert [event.token for event in events] == cut
    assert events[-1].finish == "stop"


@pytest.mark.parametrize(("num_blocks", "block_size"), [(30, 1), (14, 2), (8, 4), (11, 4)])
def test_preemption_loses_nothing(num_blocks: int, block_size: int) -> None:
    """When blocks run out, requests are preempted and restarted; all tokens stay the same, sampled ones too."""
    model, requests = exact("gated"), _requests()
    engine = Engine(model, num_blocks=num_blocks, block_size=block_size, max_num_seqs=4, max_num_batched_tokens=16)
    assert engine.generate(requests) == [_solo(model, request) for request in requests]
    assert engine.stats.preemptions > 0
    assert engine.stats.recomputed_tokens > 0
    assert engine.stats.peak_blocks <= num_blocks
    assert _drained(engine)


@settings(max_examples=20)
@given(
    order=st.permutations(range(7)),
    spare_blocks=st.integers(0, 8),
    block_size=st.sampled_from([1, 2, 4]),
    max_num_seqs=st.integers(1, 7),
    more_tokens=st.integers(0, 20),
)
def test_sizes_and_order_change_no_token(
    order: list[int], spare_blocks: int, block_size: int, max_num_seqs: int, more_tokens: int
) -> None:
    model, requests = exact("gated"), _requests()
    engine = Engine(
        model,
        num_blocks=-(-26 // block_size) + spare_blocks,  # 26 tokens: the longest request's
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + more_tokens,
    )
    answers = engine.generate([requests[i] for i in order])
    assert answers == [_answers_of_gated()[i] for i in order]
    assert _drained(engine)


@functools.cache
def _answers_of_gated() -> list[list[int]]:
    return [_solo(exact("gated"), request) for request in _requests()]


@pytest.mark.interpret
def test_the_kernels_serve_a_model() -> None:
    """The same loop with interpreted kernels in fp32: the choice of every token is within fp32 rounding."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = build("gelu", dtype=torch.float32)
    requests = [Request([1, 2, 3], max_new_tokens=3), Request([9, 8, 7, 6, 5, 4, 3, 2], max_new_tokens=3)]
    rounded = []
    for request in requests:
        tokens = torch.tensor([[*request.prompt, *_solo(exact("gelu"), request)]])
        with torch.no_grad():
            rounded.append((model(tokens) - exact("gelu")(tokens)).abs().max().item())
    engine = Engine(model.to(device), num_blocks=8, block_size=4, max_num_seqs=2, impl="triton")
    for request, answer in zip(requests, engine.generate(requests)):
        with torch.no_grad():
            logits = exact("gelu")(torch.tensor([[*request.prompt, *answer]]))[0]
        for token, row in zip(answer, logits[len(request.prompt) - 1 :]):
            # Twice the error that the stock forward makes in fp32, for the best logit and for the chosen one.
            assert row[token] >= row.max() - 4 * max(rounded)
    assert _drained(engine)


def _serve_on_rank(rank: int, world: int, style: str, num_blocks: int) -> tuple[list[list[int]], int] | None:
    mesh = init_mesh(tp=world, device_type="cpu")
    engine = Engine(build(style, mesh), num_blocks=num_blocks, block_size=4, max_num_seqs=3, max_num_batched_tokens=8)
    if rank:
        return engine.follow()
    answers = engine.generate(_requests())
    engine.dismiss()
    return answers, engine.stats.preemptions


@pytest.mark.ranks
@pytest.mark.parametrize("style", STYLES)
def test_ranks_agree_with_the_unsharded_model(style: str, ranks: Any) -> None:
    expected = [_solo(exact(style), request) for request in _requests()]
    (answers, preemptions), _ = ranks(2, _serve_on_rank, style, num_blocks=8)
    assert answers == expected
    assert preemptions > 0


VARIANTS: dict[str, dict[str, Any]] = {
    "window": {"attention_window": 5},
    "softcap": {"attention_softcap": 0.5},
    "sinks": {"attention_sinks": True},
    "all": {"attention_window": 9, "attention_softcap": 2.0, "attention_sinks": True, "rope_interleaved": True},
}


def _variant(name: str, dtype: torch.dtype) -> ParallelTransformer:
    model = build("gated", dtype=dtype, **VARIANTS[name])
    with torch.no_grad():
        for block in model.model.layers:
            if block.self_attn.sinks is not None:
                block.self_attn.sinks.copy_(torch.linspace(-1.0, 3.0, model.config.num_heads))
    return model


# (max_num_seqs, max_num_batched_tokens, block_size): alone, unsplit; batched, split; all split, with odd pages.
COMPANIES = ((1, 64, None), (4, 64, 16), (3, 4, 3))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("name", VARIANTS)
def test_windows_softcaps_and_sinks_are_served(name: str, dtype: torch.dtype) -> None:
    """The greedy tokens equal the training forward's, for any batch and any split of the prompt."""
    model = _variant(name, dtype)
    requests = [dataclasses.replace(request, sampling=SamplingParams()) for request in _requests()]
    expected = [_solo(model, request, margin=1e-8 if dtype == torch.float64 else 1e-4) for request in requests]
    assert expected != [_solo(exact("gated"), request) for request in requests]
    for slots, step_tokens, block_size in COMPANIES:
        sizes = {"max_num_seqs": slots, "max_num_batched_tokens": step_tokens, "block_size": block_size}
        assert Engine(model, num_blocks=64, **sizes).generate(requests) == expected


@pytest.mark.parametrize("kv_dtype", ["fp8", "int8"])
def test_a_quantised_cache_answers_alike_in_any_company(kv_dtype: str) -> None:
    model, requests = exact("gelu"), _requests()
    requests += [Request([i], 20, sampling=SamplingParams(temperature=2.0, seed=i)) for i in range(8)]
    alone = [Engine(model, num_blocks=64, kv_dtype=kv_dtype).generate([request])[0] for request in requests]
    engine = Engine(model, num_blocks=64, block_size=4, max_num_seqs=3, max_num_batched_tokens=8, kv_dtype=kv_dtype)
    assert engine._runner.cache.data.element_size() == 1
    assert engine.generate(requests) == alone
    assert alone != [_solo(model, request) for request in requests]  # else the cache is not quantised


@pytest.mark.parametrize("kv_dtype", [None, "int8"])
def test_a_shared_beginning_changes_no_token(kv_dtype: str | None) -> None:
    """Of requests that share 13 tokens in blocks of 4: together, later, and after others took the blocks."""
    model, sampling = exact("gated"), SamplingParams(temperature=1.0, seed=1)
    begin = torch.randint(32, (13,), generator=torch.Generator().manual_seed(2)).tolist()
    alike = [Request([*begin, *range(i)], max_new_tokens=6, sampling=sampling) for i in range(5)]
    apart = [dataclasses.replace(request, cache_salt=str(i)) for i, request in enumerate(alike)]
    sizes = {"num_blocks": 24, "block_size": 4, "max_num_seqs": 3, "max_num_batched_tokens": 24, "kv_dtype": kv_dtype}
    plain = Engine(model, **sizes, prefix_caching=False)
    expected = plain.generate(alike)
    assert plain.stats.shared_tokens == 0
    engine = Engine(model, **sizes)
    assert engine.generate(alike) == expected
    shared = engine.stats.shared_tokens
    assert shared >= 2 * 12
    assert engine.generate(alike) == expected
    assert engine.stats.shared_tokens >= shared + 5 * 12
    assert engine.stats.prefill_tokens + engine.stats.shared_tokens == 2 * plain.stats.prefill_tokens
    shared = engine.stats.shared_tokens
    assert engine.generate(apart) == expected
    assert engine.stats.shared_tokens == shared
    assert engine.generate(_requests()) == plain.generate(_requests())
    assert engine.generate(alike) == expected
    assert _drained(engine)


def test_invariance_is_asked_for_while_the_model_computes() -> None:
    seen = []

    class Watched(_FailsOnce):
        def __call__(self, tokens: torch.Tensor, **kwargs: Any) -> torch.Tensor:
            seen.append(dispatch.row_invariant())
            return super().__call__(tokens, **kwargs)

    for invariant in (False, True):
        Engine(Watched(exact("gelu"), 0), num_blocks=4, invariant=invariant).generate([Request([1], max_new_tokens=1)])
    assert seen == [False, True]
    assert not dispatch.row_invariant()


# --- its life ---------------------------------------------------------------------------------------------------------


# In a process of its own: what an allocator gives back to the system depends on what it was told before.
_MEASURE = """
import os
import torch
from shardfuse import Engine, ParallelTransformer, Request, TransformerConfig

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

sizes = dict(hidden_size=32, intermediate_size=64, num_layers=2, num_heads=4, num_kv_heads=2, vocab_size=32)
model = ParallelTransformer(TransformerConfig(**sizes)).eval()
with Engine(model, num_blocks=80_000, block_size=16) as engine:
    engine.generate([Request([1, 2, 3])])
    engine._runner.cache.data.fill_(1.0)  # every page of it
    size, held = engine._runner.cache.data.nbytes, resident()
print(size, held, held - resident())
"""


def test_the_memory_of_a_closed_engine_comes_back() -> None:
    done = subprocess.run([sys.executable, "-c", _MEASURE], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    size, held, given_back = map(int, done.stdout.split())
    assert held > size > 100 << 20
    assert given_back > 0.9 * size


def test_a_closed_engine_can_be_opened_again() -> None:
    model, requests = exact("gelu"), _requests()
    expected = [_solo(model, request) for request in requests]
    with Engine(model, num_blocks=64, block_size=4) as engine:
        assert engine._runner.cache is not None
        held = weakref.ref(engine._runner.cache.data)
        engine.add(requests[0])
        engine.step()
    assert held() is None
    assert not engine.busy
    assert _drained(engine)
    with pytest.raises(RuntimeError, match=r"add: the engine is closed: open\(\) it"):
        engine.add(requests[0])
    for _ in range(2):
        with engine:
            assert engine.generate(requests) == expected


def test_an_engine_that_is_paused_computes_nothing() -> None:
    engine = Engine(exact("gelu"), num_blocks=16, block_size=4)
    engine.add(Request([1, 2], max_new_tokens=4))
    other = engine.add(Request([3], max_new_tokens=4))
    events = engine.step()
    engine.pause()
    steps = engine.stats.steps
    assert engine.step() == []
    engine.cancel(other)
    assert [event.finish for event in engine.step()] == ["cancelled"]
    with pytest.raises(RuntimeError, match=r"paused, and requests wait: call resume\(\) first"):
        next(engine.run())
    assert engine.stats.steps == steps
    engine.resume()
    events += engine.run()
    assert _answers(events, 2)[0] == _solo(engine.model, Request([1, 2], max_new_tokens=4))


@pytest.mark.parametrize("in_place", [True, False])
def test_answers_go_on_with_new_weights(in_place: bool) -> None:
    """Tokens that are there stay, the next follow from the new weights alone, and no prefix is stale."""
    model = copy.deepcopy(exact("gated"))
    later = copy.deepcopy(model)
    with torch.no_grad():
        for param in later.parameters():
            param.add_(torch.randn(param.shape, generator=torch.Generator().manual_seed(5), dtype=param.dtype) * 0.3)
    requests = [Request([1, 2, 3, 4, 5, 6, 7, 8, i], max_new_tokens=8) for i in range(3)]
    engine = Engine(model, num_blocks=32, block_size=4, max_num_seqs=2)
    for request in requests:
        engine.add(request)
    events = [event for _ in range(4) for event in engine.step()]
    if in_place:  # as a trainer does
        with torch.no_grad():
            for param, new in zip(model.parameters(), later.parameters()):
                param.copy_(new)
        engine.update_weights()
    else:
        engine.update_weights(later.state_dict())
    before = _answers(events, 3)
    assert [len(answer) for answer in before] == [4, 4, 0]
    after = _answers(engine.run(), 3)
    for request, old, new in zip(requests, before, after):
        rest = dataclasses.replace(request, prompt=[*request.prompt, *old], max_new_tokens=8 - len(old))
        assert new == _solo(later, rest)
    assert [*before[0], *after[0]] != _solo(exact("gated"), requests[0])
    assert engine.generate(requests) == [_solo(later, request) for request in requests]


def test_weights_that_do_not_fit_are_refused() -> None:
    engine = Engine(copy.deepcopy(exact("gelu")), num_blocks=16)
    with pytest.raises((RuntimeError, ValueError)):
        engine.update_weights({"nothing": torch.zeros(1)})


# --- arrival and completion -------------------------------------------------------------------------------------------


def test_requests_that_run_out_of_time_end_with_what_they_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """One while it runs, one while it waits, one before it arrives; the others do not notice."""
    now = [1000.0]
    monkeypatch.setattr(engine_module.time, "monotonic", lambda: now[0])
    model = exact("gelu")
    engine = Engine(model, num_blocks=16, block_size=4, max_num_seqs=2)
    asked = [
        Request([1, 2], max_new_tokens=9, timeout_s=3.5),
        Request([3, 4], max_new_tokens=6, timeout_s=60),
        Request([5], max_new_tokens=9, timeout_s=2.5),
        Request([6], max_new_tokens=3),
        Request([7], max_new_tokens=3, arrival=50, timeout_s=5),
    ]
    numbers = [engine.add(request) for request in asked]
    events = []
    while engine.busy:
        events += engine.step()
        now[0] += 1
    answers = _answers(events, len(asked))
    expected = [_solo(model, request) for request in asked]
    assert answers == [expected[0][:4], expected[1], [], expected[3], []]
    ends = {event.request: event.finish for event in events if event.finish is not None}
    assert ends == dict(zip(numbers, ("timeout", "length", "timeout", "length", "timeout")))
    assert not engine._deadlines
    assert _drained(engine)


def test_a_full_queue_refuses_and_loses_nothing() -> None:
    engine = Engine(exact("gelu"), num_blocks=16, block_size=4, max_num_seqs=1, max_queued_requests=2)
    request = Request([1, 2], max_new_tokens=3)
    engine.add(request)
    engine.step()  # it runs, and waits no longer
    for _ in range(2):
        engine.add(request)
    with pytest.raises(QueueFull, match="2 answers wait, this request has 1, and max_queued_requests=2: send it late"):
        engine.add(request)
    with pytest.raises(ValueError, match="prompt is empty"):  # what cannot be served is said first
        engine.add(Request([]))
    engine.cancel(2)
    assert engine.add(request) == 3
    assert [event.request for event in engine.run() if event.finish == "length"] == [0, 1, 3]

    engine = Engine(exact("gelu"), num_blocks=16, block_size=4, max_num_seqs=1, max_queued_tokens=8)
    assert engine.add(Request([1], max_new_tokens=20)) == 0  # more than the queue holds, and nobody waits
    engine.step()
    engine.add(request)
    with pytest.raises(QueueFull, match=r"1 answers of 5 tokens wait, this request has 5 .*max_queued_tokens=8"):
        engine.add(request)
    engine.add(Request([1], max_new_tokens=2))
    assert sum(event.finish is not None for event in engine.run()) == 3
    for name in ("max_queued_requests", "max_queued_tokens"):
        with pytest.raises(ValueError, match=f"{name}=0"):
            Engine(exact("gelu"), num_blocks=16, **{name: 0})


def test_cancelled_requests_leave_and_the_others_do_not_notice() -> None:
    model = exact("gelu")
    engine = Engine(model, num_blocks=16, block_size=4, max_num_seqs=2)
    kept = Request([3], max_new_tokens=9)
    done, running, staying, waiting, coming = (
        engine.add(request)
        for request in (
            Request([1], max_new_tokens=1),
            Request([2], max_new_tokens=20),
            kept,
            Request([4], max_new_tokens=20),
            Request([5], max_new_tokens=9, arrival=50),
        )
    )
    events = [event for _ in range(3) for event in engine.step()]
    assert [event.request for event in events if event.finish] == [done]
    assert [engine.cancel(number) for number in (done, running, waiting, coming)] == [False, True, True, True]
    assert not engine.cancel(running)

    events += list(engine.run())
    cancelled = [event for event in events if event.finish == "cancelled"]
    assert cancelled == [TokenEvent(number, None, "cancelled") for number in (running, waiting, coming)]
    assert _answers(events, 5)[staying] == _solo(model, kept)
    assert engine.stats.steps == 10
    assert _drained(engine)
    with pytest.raises(ValueError, match="no request 5"):
        engine.cancel(5)


def test_requests_may_come_while_others_run() -> None:
    model, first, second = exact("gated"), Request([1, 2], max_new_tokens=6), Request([3, 4, 5], max_new_tokens=5)
    engine = Engine(model, num_blocks=16)
    engine.add(first)
    events = []
    for event in engine.run():
        events.append(event)
        if len(events) == 2:
            engine.add(second)
    assert _answers(events, 2) == [_solo(model, first), _solo(model, second)]


def test_an_idle_step_passes_the_time() -> None:
    engine = Engine(exact("gelu"), num_blocks=4)
    assert engine.step() == []
    assert not engine.busy
    engine.add(Request([1], max_new_tokens=1, arrival=3))
    assert [len(engine.step()) for _ in range(3)] == [0, 0, 1]
    engine.add(Request([1], max_new_tokens=1, arrival=2))  # already past: scheduled at once
    assert len(engine.step()) == 1
    assert engine.stats.steps == 2


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request([]), "prompt is empty"),
        (Request([1, 32]), r"prompt\[1\] is 32: expected 0 to 31"),
        (Request([-1]), r"prompt\[0\] is -1"),
        (Request([1.5]), "expected whole numbers"),  # type: ignore[list-item]
        (Request([1] * 20, max_new_tokens=13), "make 33: expected at most max_model_len=17; shorten either, or make"),
        (Request([1] * 9, max_new_tokens=9), "make 18: .* with more num_blocks: the cache has 4 of 4 tokens"),
        (Request([1], max_new_tokens=0), "max_new_tokens=0"),
        (Request([1], sampling=SamplingParams(temperature=-1.0)), "temperature=-1"),
        (Request([1], sampling=SamplingParams(temperature=float("nan"))), "temperature=nan"),
        (Request([1], timeout_s=0), "timeout_s=0: expected a positive number of seconds, or None"),
        (Request([1], timeout_s="1"), "timeout_s='1': expected a number of seconds"),  # type: ignore[arg-type]
        (Request([1], timeout_s=float("nan")), "timeout_s=nan"),
        (Request([1], cache_salt=1), "cache_salt=1: expected text"),  # type: ignore[arg-type]
        (Request([1], max_new_tokens=2.5), "max_new_tokens=2.5: expected a whole"),  # type: ignore[arg-type]
        (Request([1], stop=3), "stop=3: expected a collection"),  # type: ignore[arg-type]
        (Request([1], sampling={"top_p": 1}), "expected SamplingParams"),  # type: ignore[arg-type]
    ],
)
def test_a_bad_request_is_refused_and_the_engine_goes_on(request_: Request, message: str) -> None:
    model, good = exact("gelu"), Request([7, 8, 9], max_new_tokens=6)
    engine = Engine(model, num_blocks=4, block_size=4, max_model_len=32)
    number = engine.add(good)
    events = engine.step()
    with pytest.raises(ValueError, match=message):
        engine.add(request_)
    events += list(engine.run())
    assert {event.request for event in events} == {number}
    assert _answers(events, 1) == [_solo(model, good)]
    with pytest.raises(ValueError, match=message):
        engine.generate([good, request_])
    assert _drained(engine)


def test_the_longest_request_that_fits_is_served() -> None:
    """17 tokens in 4 blocks of 4: the last one is never stored."""
    request = Request([1] * 9, max_new_tokens=8)
    engine = Engine(exact("gelu"), num_blocks=4, block_size=4)
    assert engine.generate([request]) == [_solo(exact("gelu"), request)]
    assert engine.stats.peak_blocks == 4


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"num_blocks": 0}, "num_blocks=0"),
        ({"num_blocks": 4, "block_size": 0}, "block_size=0"),
        ({"num_blocks": 4, "kv_dtype": "fp4"}, "kv_dtype='fp4': expected None or one of fp8, int8"),
        ({"num_blocks": 4, "max_num_seqs": 0}, "max_num_seqs=0"),
        ({"num_blocks": 4, "max_model_len": 65}, "max_model_len=65: expected 2 to 64"),
        ({"num_blocks": 4, "max_num_batched_tokens": 2}, "max_num_batched_tokens=2 is less than max_num_seqs=8"),
    ],
)
def test_engine_refuses(sizes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Engine(exact("gelu"), **sizes)


def test_generate_wants_an_idle_engine() -> None:
    engine = Engine(exact("gelu"), num_blocks=4)
    engine.add(Request([1], max_new_tokens=2))
    with pytest.raises(RuntimeError, match="other requests"):
        engine.generate([Request([1], max_new_tokens=2)])


class _FailsOnce:
    """A model that fails in its n-th call."""

    def __init__(self, model: ParallelTransformer, call: int) -> None:
        self.model, self.calls_left = model, call
        self.config, self.group = model.config, model.group
        self.gather_logits, self.parameters = model.gather_logits, model.parameters

    def __call__(self, tokens: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        self.calls_left -= 1
        if self.calls_left == 0:
            raise RuntimeError("out of memory")
        return self.model(tokens, **kwargs)


@pytest.mark.parametrize("call", [1, 2, 9])
def test_a_failed_step_can_be_taken_again(call: int) -> None:
    model, requests = exact("gelu"), _requests()
    engine = Engine(_FailsOnce(model, call), num_blocks=11, block_size=4, max_num_seqs=3, max_num_batched_tokens=8)
    for request in requests:
        engine.add(request)
    engine.add(Request([1], max_new_tokens=2))
    engine.cancel(7)
    events: list[TokenEvent] = []
    failures = 0
    while engine.busy:
        try:
            events += engine.step()
        except RuntimeError:
            failures += 1
    assert failures == 1
    assert _answers(events, 8)[:7] == [_solo(model, request) for request in requests]
    assert TokenEvent(7, None, "cancelled") in events
    assert _drained(engine)


# --- statistics -------------------------------------------------------------------------------------------------------


def test_stats_of_a_known_run() -> None:
    """6 tokens of prompt in steps of 4 + 2, then 3 decodes; blocks of 4."""
    engine = Engine(exact("gelu"), num_blocks=8, block_size=4, max_num_seqs=2, max_num_batched_tokens=4)
    engine.generate([Request([1, 2, 3, 4, 5, 6], max_new_tokens=4)])
    stats = engine.stats
    assert (stats.steps, stats.prefill_tokens, stats.generated_tokens, stats.decode_tokens) == (5, 6, 4, 3)
    assert (stats.peak_seqs, stats.peak_blocks, stats.recomputed_tokens, stats.preemptions) == (1, 3, 0, 0)
    # Stored after each step: 4, 6, 7, 8, 9 tokens in 1, 2, 2, 2, 3 blocks.
    assert (stats.slot_steps, stats.unused_slot_steps) == (40, 6)
    assert stats.kv_waste == 6 / 40
    assert stats.prefill_seconds > 0
    assert stats.decode_seconds > 0


def test_rates() -> None:
    stats = EngineStats(
        prefill_tokens=30, generated_tokens=12, decode_tokens=10, prefill_seconds=2.0, decode_seconds=4.0
    )
    assert (stats.prefill_tokens_per_s, stats.decode_tokens_per_s, stats.tokens_per_s) == (15.0, 2.5, 2.0)
    assert EngineStats().tokens_per_s == EngineStats().kv_waste == 0.0
