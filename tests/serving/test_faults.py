"""What callers get wrong and what fails below: no request costs another one anything, and the engine stays usable."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from serving_case import build, config_of, exact

from shardfuse import parallelize
from shardfuse.layers.transformer import ParallelTransformer
from shardfuse.parallel.core.rendezvous import init_mesh
from shardfuse.serving import Engine, Request, SamplingParams, TokenEvent, sampling
from shardfuse.serving.request import SequenceState
from shardfuse.testing import solo_tokens

POISON = 13  # a token


class Model:
    """``exact("gated")``, which raises what ``fault`` returns for the step's tokens."""

    def __init__(self, fault: Callable[[Sequence[int]], bool], model: ParallelTransformer | None = None) -> None:
        self.model = exact("gated") if model is None else model
        self.fault = fault
        self.config, self.group = self.model.config, self.model.group
        self.gather_logits, self.parameters = self.model.gather_logits, self.model.parameters

    def __call__(self, tokens: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        logits = self.model(tokens, **kwargs)  # the cache is written
        if self.fault(tokens.tolist()):
            raise RuntimeError("a fault")
        return logits


def _engine(model: Any, **sizes: Any) -> Engine:
    return Engine(model, num_blocks=32, block_size=4, **sizes)


def _alone(request: Request) -> list[int]:
    return solo_tokens(exact("gated"), request)


def _idle(engine: Engine) -> bool:
    return not engine.busy and engine._allocator.used_blocks == 0 and not engine._scheduler.running


def _collect(events: Sequence[TokenEvent], number: int) -> list[int]:
    return [event.token for event in events if event.request == number and event.token is not None]


GOOD = (
    Request([1, 2, 3], max_new_tokens=6),
    Request([4, 5], max_new_tokens=7, sampling=SamplingParams(temperature=0.9, seed=5)),
    Request([6, 7, 8, 9, 10], max_new_tokens=5, sampling=SamplingParams(temperature=0.5, seed=6)),
)


# --- the caller's objects ---------------------------------------------------------------------------------------------


def test_a_prompt_that_grows_with_the_answer_changes_nothing() -> None:
    """The usual loop: ``prompt.append(event.token)``."""
    prompt, stop = [3, 1, 4], [40]
    request = Request(prompt, max_new_tokens=4, stop=stop)
    engine = _engine(exact("gated"))
    engine.add(request)
    events = []
    for event in engine.run():
        events.append(event.token)
        prompt.append(event.token)
        stop.append(event.token)
    assert events == _alone(Request([3, 1, 4], max_new_tokens=4))
    assert _idle(engine)


@pytest.mark.parametrize("prompt", [[1, 2], (1, 2), range(1, 3), torch.tensor([1, 2]), np.array([1, 2]), iter([1, 2])])
def test_a_request_holds_plain_immutable_tokens(prompt: Any) -> None:
    request = Request(prompt, stop={np.int64(7)})
    assert request.prompt == (1, 2)
    assert all(type(token) is int for token in (*request.prompt, *request.stop))
    assert hash(request) == hash(Request([1, 2], stop=[7]))
    with pytest.raises(dataclasses.FrozenInstanceError):
        request.prompt = (3,)  # type: ignore[misc]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (lambda: Request([1], stop="x"), "stop='x': expected token ids, not text; encode it"),
        (lambda: Request("hello"), "prompt='hello': expected token ids, not text"),
        (lambda: Request([1], stop=["x"]), "stop: expected whole numbers, token ids"),
        (lambda: Request([1], stop=[1.5]), "stop: expected whole numbers, token ids"),
        (lambda: Request([1], stop=None), "stop=None: expected a collection"),
        (lambda: Request(3), "prompt=3: expected a collection"),
        (lambda: Request(None), "prompt=None: expected a collection"),
        (lambda: Request(iter([1.5, 2])), "prompt: expected whole numbers"),
        (lambda: Request([True]), "prompt: expected whole numbers"),
        (lambda: Request(torch.tensor([[1, 2]])), "prompt: expected whole numbers"),
        (lambda: Request([1], max_new_tokens=True), "max_new_tokens=True: expected a whole number"),
        (lambda: Request([1], max_new_tokens=None), "max_new_tokens=None: expected a whole number"),
        (lambda: Request([1], arrival=0.5), "arrival=0.5: expected a whole number"),
        (lambda: [1, 2], "request is a list: expected a Request"),
        (lambda: None, "request is a NoneType: expected a Request"),
    ],
)
def test_a_bad_request_costs_the_others_nothing(bad: Callable[[], Any], message: str) -> None:
    engine = _engine(exact("gated"))
    number = engine.add(GOOD[0])
    events = engine.step()
    with pytest.raises(ValueError, match=message):
        engine.add(bad())
    events += list(engine.run())
    assert _collect(events, number) == _alone(GOOD[0])
    assert _idle(engine)


def test_cancel_refuses_what_is_no_number() -> None:
    with pytest.raises(ValueError, match="no request 'x'"):
        _engine(exact("gated")).cancel("x")  # type: ignore[arg-type]


# --- faults below -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [{}, {"max_num_seqs": 2, "max_num_batched_tokens": 3}])
def test_a_sequence_that_the_model_fails_on_ends_alone(sizes: dict[str, int]) -> None:
    engine = _engine(Model(lambda tokens: POISON in tokens), **sizes)
    numbers = [engine.add(request) for request in GOOD[:2]]
    bad = engine.add(Request([1, 2, 3, 4, POISON], max_new_tokens=5))
    numbers.append(engine.add(GOOD[2]))
    events = list(engine.run())
    (failed,) = [event for event in events if event.request == bad]
    assert (failed.token, failed.finish, str(failed.error)) == (None, "error", "a fault")
    assert [_collect(events, number) for number in numbers] == [_alone(request) for request in GOOD]
    assert _idle(engine)
    assert engine.generate([GOOD[0]]) == [_alone(GOOD[0])]


def test_a_draw_that_fails_ends_its_sequence_and_moves_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = sampling._draw

    def _draw(logits: torch.Tensor, likeliest: torch.Tensor, sequences: Sequence[SequenceState]) -> torch.Tensor:
        if any(sequence.request.sampling.temperature == 0.75 for sequence in sequences):
            raise ValueError("no distribution")
        return draw(logits, likeliest, sequences)

    engine = _engine(exact("gated"))
    numbers = [engine.add(request) for request in GOOD[1:2]]
    bad = engine.add(Request([1, 2], max_new_tokens=3, sampling=SamplingParams(temperature=0.75)))
    numbers += [engine.add(request) for request in GOOD[2:]]
    expected = [_alone(request) for request in GOOD[1:]]
    monkeypatch.setattr(sampling, "_draw", _draw)
    events = list(engine.run())
    assert [event.finish for event in events if event.request == bad] == ["error"]
    assert [_collect(events, number) for number in numbers] == expected
    assert _idle(engine)


def test_a_step_that_fails_on_no_sequence_by_itself_raises_and_loses_nothing() -> None:
    """Here a batch fails and each of its sequences does not: the step after a failed one computes them singly."""
    engine = _engine(Model(lambda tokens: len(tokens) > 5))
    numbers = [engine.add(request) for request in GOOD]
    events: list[TokenEvent] = []
    failures = 0
    while engine.busy and failures < 100:
        try:
            events += engine.step()
        except RuntimeError:
            failures += 1
    assert failures == 1
    assert [_collect(events, number) for number in numbers] == [_alone(request) for request in GOOD]
    assert _idle(engine)


def test_a_model_that_always_fails_leaves_an_idle_engine() -> None:
    engine = _engine(Model(lambda tokens: True), max_num_seqs=2)
    numbers = [engine.add(request) for request in GOOD]
    events = list(engine.run())
    assert [(event.request, event.finish) for event in events] == [(number, "error") for number in numbers]
    assert _idle(engine)


def test_generate_leaves_an_idle_engine_when_it_fails() -> None:
    engine = _engine(Model(lambda tokens: POISON in tokens))
    with pytest.raises(RuntimeError, match=r"generate: requests\[1\] failed: a fault"):
        engine.generate([GOOD[0], Request([POISON], max_new_tokens=3), GOOD[1]])
    assert _idle(engine)
    assert engine.generate(GOOD) == [_alone(request) for request in GOOD]


def _fails_on_all_ranks(rank: int, world: int) -> tuple[int, list[list[int]], list[str | None]] | None:
    model = build("gated", init_mesh(tp=world, device_type="cpu"))
    engine = _engine(Model(lambda tokens: POISON in tokens, model))
    if rank:
        return engine.follow()
    numbers = [engine.add(request) for request in GOOD]
    bad = engine.add(Request([POISON], max_new_tokens=3))
    events: list[TokenEvent] = []
    failures = 0
    while engine.busy and failures < 100:
        try:
            events += engine.step()
        except RuntimeError:
            failures += 1
    assert _idle(engine)
    engine.dismiss()
    ends = [event.finish for event in events if event.request == bad]
    return failures, [_collect(events, number) for number in numbers], ends


@pytest.mark.ranks
def test_ranks_that_fail_alike_end_the_same_sequence(ranks: Any) -> None:
    (failures, answers, ends), _ = ranks(2, _fails_on_all_ranks)
    assert failures == 0
    assert answers == [_alone(request) for request in GOOD]
    assert ends == ["error"]


# --- other models -----------------------------------------------------------------------------------------------------


def _stock() -> Any:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed (pip install .[hf])")
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=32, **sizes))


@pytest.mark.parametrize(
    ("model", "error", "message"),
    [
        (_stock, ValueError, r"this LlamaForCausalLM cannot be served: it is in training mode.*call model.eval\(\)"),
        (
            lambda: parallelize(ParallelTransformer(config_of("gated"))),
            TypeError,
            r"ParallelModel, which has no config: .*export_hf\(model.module, folder\)",
        ),
        (lambda: "folder", TypeError, r"model is a str, which has no config: .*load_hf\(folder\)"),
        (lambda: torch.nn.Linear(2, 2), TypeError, "model is a torch.nn.modules.linear.Linear, which has no config"),
        (lambda: ParallelTransformer(config_of("gated"), device="meta"), ValueError, "on the meta device"),
    ],
)
def test_an_engine_says_what_it_serves(model: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Engine(model(), num_blocks=4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_blocks": "8"}, "num_blocks='8': expected a whole number"),
        ({"num_blocks": 8.0}, "num_blocks=8.0: expected a whole number"),
        ({"num_blocks": True}, "num_blocks=True: expected a whole number"),
        ({"num_blocks": 8, "block_size": 4.0}, "block_size=4.0: expected a whole number"),
        ({"num_blocks": 8, "max_num_seqs": "2"}, "max_num_seqs='2': expected a whole number"),
        ({"num_blocks": 8, "max_num_batched_tokens": 8.5}, "max_num_batched_tokens=8.5: expected a whole number"),
        ({"num_blocks": 8, "max_model_len": "9"}, "max_model_len='9': expected a whole number"),
        ({"num_blocks": 8, "impl": "cuda"}, "impl='cuda': expected one of auto, triton, onednn, reference"),
    ],
)
def test_an_engine_refuses_options_when_it_is_built(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Engine(exact("gated"), **options)
