"""Recorded decode steps on a CPU: the logits of the model's own forward, bit for bit, or no recording."""

from __future__ import annotations

import contextlib
import copy
import itertools
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from serving_case import STYLES

from shardfuse import fuse
from shardfuse.layers.attention import paged
from shardfuse.layers.transformer import ParallelTransformer
from shardfuse.serving import Engine, Request, SamplingParams, TokenEvent
from shardfuse.serving.recording import _SEEN, Recording, Recordings
from shardfuse.testing import solo_tokens, tiny_model

LENGTHS = (5, 1, 9, 3)


def _requests(new: int = 24) -> list[Request]:
    generator = torch.Generator().manual_seed(2)
    return [
        Request(
            torch.randint(0, 32, (length,), generator=generator).tolist(),
            max_new_tokens=new - 5 * (length == 3),
            sampling=SamplingParams(temperature=0.7 * (length % 2), seed=length, logprobs=2),
        )
        for length in LENGTHS
    ]


def _events(engine: Engine, requests: list[Request]) -> list[TokenEvent]:
    for each in requests:
        engine.add(each)
    return list(engine.run())


def _recordings(engine: Engine) -> Recordings:
    found = engine._runner.recordings
    assert found is not None
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("style", STYLES)
def test_a_replayed_step_is_the_models_own(style: str, dtype: torch.dtype) -> None:
    """Log-probabilities included; lengths grow over blocks, and sequences come and go."""
    model = tiny_model(style, dtype=dtype, vocab_size=32, hidden_size=64)
    sizes: dict[str, Any] = {"num_blocks": 32, "block_size": 4}
    engine = Engine(model, **sizes)
    expected = _events(Engine(model, enforce_eager=True, **sizes), _requests())
    assert _events(engine, _requests()) == expected
    assert _recordings(engine).replayed >= 10
    replayed = _recordings(engine).replayed
    assert [event.token for event in _events(engine, _requests())] == [event.token for event in expected]
    assert _recordings(engine).replayed > replayed + 10


def test_models_of_transformers_are_not_replayed() -> None:
    """Their masks ask the positions for packed sequences: a value, by which another step may go another way."""
    pytest.importorskip("transformers")
    from served_case import build

    model = fuse(build("llama", seed=1))
    sizes: dict[str, Any] = {"num_blocks": 32, "block_size": 4, "max_model_len": 64}
    engine = Engine(model, **sizes)
    assert engine._runner.recordings is None
    assert _events(engine, _requests()) == _events(Engine(model, enforce_eager=True, **sizes), _requests())


@pytest.mark.parametrize("how", ["in place", "through .data", "update_weights"])
def test_changed_weights_end_a_recording(how: str) -> None:
    model, other = (tiny_model(seed=seed, dtype=torch.float64, vocab_size=32) for seed in (0, 1))
    engine = Engine(model, num_blocks=32, prefix_caching=False)
    _events(engine, _requests())
    assert _recordings(engine).replayed >= 10
    if how == "update_weights":
        engine.update_weights(other.state_dict())
    for mine, its in zip(model.parameters(), other.parameters()):
        if how == "in place":
            with torch.no_grad():
                mine.copy_(its)
        elif how == "through .data":
            mine.data = its.data.clone()
    answers = engine.generate(_requests())
    assert answers == [solo_tokens(other, request) for request in _requests()]


class Odd(ParallelTransformer):
    """Multiplies its logits by a number that the host reads off the tokens."""

    reads: Any

    def __call__(self, tokens: torch.Tensor, **kwargs: Any) -> Any:
        logits = super().__call__(tokens, **kwargs)
        return logits * (1 + self.reads(tokens) % 7)


def _odd(reads: Any) -> Odd:
    model = copy.deepcopy(tiny_model(dtype=torch.float64, vocab_size=32))
    model.__class__, model.reads = Odd, staticmethod(reads)
    return model  # type: ignore[return-value]


def test_a_step_that_depends_on_what_the_host_reads_is_not_replayed() -> None:
    """Through an op, which is seen; and past all ops, which the comparison finds."""
    for reads, warns in ((lambda tokens: int(tokens[0]), False), (lambda tokens: tokens.tolist()[0], True)):
        model = _odd(reads)
        expected = _events(Engine(model, num_blocks=32, enforce_eager=True), _requests())
        engine = Engine(model, num_blocks=32)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            assert _events(engine, _requests()) == expected
        assert _recordings(engine).replayed == 0
        assert any("other logits, keys or values than its forward" in str(each.message) for each in said) == warns


class Host(torch.nn.Module):
    """A layer that computes past all ops: a recording holds the result of one step for all."""

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None, **_: Any) -> torch.Tensor:
        y = torch.from_numpy(np.tanh(x.detach().numpy()))
        return y if residual is None else y + residual


@pytest.mark.parametrize("kv_dtype", [None, "fp8"])
def test_keys_and_values_of_a_wrong_replay_do_not_stay(kv_dtype: str | None) -> None:
    model = tiny_model(dtype=torch.float32, vocab_size=32)
    model.model.layers[0].mlp = Host()
    sizes: dict[str, Any] = {"num_blocks": 32, "block_size": 4, "kv_dtype": kv_dtype}
    expected = _events(Engine(model, enforce_eager=True, **sizes), _requests())
    engine = Engine(model, **sizes)
    with pytest.warns(UserWarning, match="other logits, keys or values than its forward"):
        assert _events(engine, _requests()) == expected
    assert _recordings(engine).replayed == 0


class Last(ParallelTransformer):
    """Its last layer's keys and values, which a host writes, reach the logits of later steps alone."""

    def __call__(self, tokens: torch.Tensor, **kwargs: Any) -> Any:
        logits = super().__call__(tokens, **kwargs)
        heads = torch.full((len(tokens), 4, 8), float(tokens.tolist()[0]))
        kwargs["cache"].attend(1, heads, heads[:, :2], heads[:, :2])
        return logits


def test_logits_alone_do_not_make_a_replay_right() -> None:
    """Keys and values that the step leaves to later ones are compared as well."""
    model = copy.deepcopy(tiny_model(dtype=torch.float32, vocab_size=32))
    heads = model.config.num_heads, model.config.num_kv_heads, model.config.head_dim
    assert heads == (4, 2, 8)
    model.__class__ = Last
    engine = Engine(model, num_blocks=32, block_size=4)
    with pytest.warns(UserWarning, match="other logits, keys or values than its forward"):
        _events(engine, _requests())
    assert _recordings(engine).replayed == 0


class Counting(ParallelTransformer):
    """Counts its forwards in a buffer, through a view of it."""

    def __call__(self, tokens: torch.Tensor, **kwargs: Any) -> Any:
        self.forwards[:1].add_(1)  # type: ignore[operator, index, union-attr]
        return super().__call__(tokens, **kwargs)


def _counting() -> Any:
    model = copy.deepcopy(tiny_model(dtype=torch.float32, vocab_size=32))
    model.__class__ = Counting
    model.register_buffer("forwards", torch.zeros(2, dtype=torch.int64))
    return model


def test_writes_to_what_attention_returned_are_replayed() -> None:
    model = copy.deepcopy(tiny_model(dtype=torch.float32, vocab_size=32))
    attention = model.model.layers[0].self_attn
    attention.o_proj.register_forward_pre_hook(lambda module, args: (args[0].mul_(0.5), *args[1:]))
    engine = Engine(model, num_blocks=32, block_size=4)
    expected = _events(Engine(model, num_blocks=32, block_size=4, enforce_eager=True), _requests())
    assert _events(engine, _requests()) == expected
    assert _recordings(engine).replayed >= 10


def test_a_model_that_writes_to_its_own_tensor_runs_once_a_step() -> None:
    model = _counting()
    engine = Engine(model, num_blocks=32, block_size=4)
    expected = _events(Engine(tiny_model(dtype=torch.float32, vocab_size=32), num_blocks=32, block_size=4), _requests())
    assert _events(engine, _requests()) == expected
    assert engine.stats.steps > 2 * _SEEN
    assert model.forwards.tolist() == [engine.stats.steps, 0]
    assert _recordings(engine).replayed == 0


def test_an_error_of_the_model_in_a_recorded_step_does_not_end_recording() -> None:
    """A ValueError, as our own ops raise it: it reaches the caller, and the steps after it are replayed."""
    decodes = itertools.count()

    def reads(tokens: torch.Tensor) -> int:
        if len(tokens) == 1 and next(decodes) == _SEEN:
            raise ValueError("a fault")
        return 0

    engine, request = Engine(_odd(reads), num_blocks=32), Request([1, 2], max_new_tokens=24)
    engine.add(request)
    events = [event for _ in range(1 + _SEEN) for event in engine.step()]
    with pytest.raises(ValueError, match="a fault"):
        engine.step()
    events += engine.run()
    assert [event.token for event in events] == solo_tokens(tiny_model(dtype=torch.float64, vocab_size=32), request)
    assert _recordings(engine).replayed > 10


@pytest.mark.parametrize("times", [2, 3])
def test_a_replay_that_raises_where_the_forward_does_not_is_compared_again(
    times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Want of memory, say, which passes; what does not pass ends recording, with a warning."""
    faults = itertools.count()
    replay = Recording.replay

    def fails(recording: Recording, *args: Any) -> torch.Tensor:
        if next(faults) < times:
            raise MemoryError("no room")
        return replay(recording, *args)

    monkeypatch.setattr(Recording, "replay", fails)
    model, request = tiny_model(dtype=torch.float64, vocab_size=32), Request([1, 2], max_new_tokens=24)
    engine = Engine(model, num_blocks=32)
    with pytest.warns(UserWarning, match="other logits") if times == 3 else contextlib.nullcontext():
        assert engine.generate([request]) == [solo_tokens(model, request)]
    assert (_recordings(engine).replayed > 10) == (times == 2)


def test_the_layers_of_a_replayed_step_share_one_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the rotation and the cache write: one for each step, and one more for a step that is computed to compare."""
    made = []
    plan_write = paged.plan_write
    monkeypatch.setattr(paged, "plan_write", lambda *args, **options: made.append(1) or plan_write(*args, **options))
    engine = Engine(tiny_model(dtype=torch.float32, vocab_size=32, num_layers=3), num_blocks=32)
    _events(engine, _requests())
    before, steps, replayed = len(made), engine.stats.steps, _recordings(engine).replayed
    _events(engine, _requests())
    assert _recordings(engine).replayed > replayed + 10
    steps = engine.stats.steps - steps
    assert steps <= len(made) - before <= steps + 1


def test_an_engine_that_is_told_so_runs_the_model_in_every_step() -> None:
    calls = []
    model = _odd(lambda tokens: calls.append(len(tokens)) or 0)  # type: ignore[func-returns-value]
    engine = Engine(model, num_blocks=32, enforce_eager=True)
    _events(engine, _requests())
    assert engine._runner.recordings is None
    assert len(calls) == engine.stats.steps
    calls.clear()
    engine = Engine(model, num_blocks=32)
    _events(engine, _requests())
    assert len(calls) + _recordings(engine).replayed == engine.stats.steps


def test_few_recordings_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardfuse.serving.recording._KEPT", 2)
    engine = Engine(tiny_model(vocab_size=32), num_blocks=64, max_num_seqs=8)
    for count in (1, 2, 3, 1):
        answers = engine.generate([Request([count, each], max_new_tokens=12) for each in range(count)])
        assert answers == [
            solo_tokens(engine.model, Request([count, each], max_new_tokens=12)) for each in range(count)
        ]
        assert len(_recordings(engine)._kept) <= 2


def test_torchs_compiler_stays_out_of_the_recorder():
    """A step with a compiled part is recorded; torch.compile reads that part's code alone, and not the recorder's."""
    from torch._dynamo.utils import counters

    answers, frames = [], []
    for enforce_eager in (True, False):
        torch._dynamo.reset()
        counters.clear()
        model = tiny_model(dtype=torch.float32)
        for block in model.model.layers:
            block.mlp.compile(backend="eager")
        engine = Engine(model, num_blocks=40, block_size=8, enforce_eager=enforce_eager)
        answers.append(engine.generate([Request([1, 2, 3, 4], 30)]))
        frames.append(counters["frames"]["total"])
    assert answers[0] == answers[1]
    assert frames[0] == frames[1] > 0
    assert _recordings(engine).replayed > 0
