"""Logits that are NaN or infinite: the request that gets them is told, and no other one is touched."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from serving_case import exact
from torch.overrides import TorchFunctionMode

from shardfuse.layers.transformer import ParallelTransformer
from shardfuse.parallel.core.rendezvous import init_mesh
from shardfuse.serving import Engine, LogitsNotFinite, Request, SamplingParams, TokenEvent
from shardfuse.serving.request import SequenceState
from shardfuse.serving.sampling import Sampled, sample
from shardfuse.serving.sampling_params import NoTokenLeft
from shardfuse.testing import solo_tokens, tiny_model

NAN, INF = float("nan"), float("inf")
SIZES: dict[str, Any] = {"num_blocks": 32, "block_size": 4}
# Each way through the sampler.
WAYS = {
    "greedy": {},
    "drawn": {"temperature": 1.0},
    "filtered": {"temperature": 1.0, "top_k": 3, "top_p": 0.9},
    "scored": {"logprobs": 2},
    "changed": {"repetition_penalty": 1.5, "logit_bias": {1: 3.0}},
    "allowed": {"allowed_tokens": (0, 1)},
}


def _state(**params: Any) -> SequenceState:
    return SequenceState(0, Request([1, 2], sampling=SamplingParams(**params)), [1, 2, 3])


def _said(found: Sampled | Exception) -> str:
    assert isinstance(found, LogitsNotFinite)
    return str(found)


# --- the sampler ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("way", WAYS)
def test_rows_that_are_no_numbers_give_an_error_and_move_no_other(way: str, dtype: torch.dtype) -> None:
    rows = torch.tensor(
        [[0.0, 2.0, 1.0, 0.0], [0, 1, 2, NAN], [NAN] * 4, [0, 0, INF, 0], [-INF] * 4, [1, 0, -INF, -INF]], dtype=dtype
    )
    states = [_state(**WAYS[way]) for _ in rows]
    found = sample(rows, states)
    for bad in (1, 2, 3, 4):
        assert "logits for token 2 of the answer, at position 3, are NaN or infinite" in _said(found[bad])
    good = [0, 5]
    assert [found[row] for row in good] == sample(rows[good], [states[row] for row in good])
    assert [type(found[row]) for row in good] == [Sampled, Sampled]


def test_a_token_that_is_impossible_stays_impossible() -> None:
    (found,) = sample(torch.tensor([[0.0, -INF, 0.0]]), [_state(logprobs=3)])
    assert isinstance(found, Sampled)
    assert dict(found.top_logprobs)[1] == -INF
    assert found.token == 0


def test_a_change_past_the_dtypes_range_is_no_fault_of_the_model() -> None:
    (found,) = sample(torch.tensor([[0.0, 65504.0]], dtype=torch.float16), [_state(logit_bias={1: 100.0})])
    assert found == Sampled(1)


def test_tokens_of_which_none_is_possible_are_told_as_such() -> None:
    rows = torch.tensor([[0.0, -INF, 1.0]])
    (found,) = sample(rows, [_state(allowed_tokens=(1,))])
    assert isinstance(found, NoTokenLeft)
    assert "after 1 tokens of the answer, none of allowed_tokens has a finite logit" in str(found)


class _Copies(TorchFunctionMode):
    """Counts the calls that wait for a device and copy from it."""

    WAITS = ("tolist", "item", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__")

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (name := getattr(func, "__name__", "")) in self.WAITS:
            self.seen[name] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("way", "copies"), [*((way, 1 + 2 * (way == "scored")) for way in WAYS)])
def test_the_check_copies_nothing_of_its_own_from_the_device(way: str, copies: int) -> None:
    """The tokens are one copy, log-probabilities two more, however many sequences there are."""
    rows, states = torch.randn(5, 8), [_state(**WAYS[way]) for _ in range(5)]
    sample(rows, states)  # constants become tensors
    with _Copies() as counted:
        sample(rows, states)
    assert counted.seen == {"tolist": copies}


# --- the engine -------------------------------------------------------------------------------------------------------


Breaking = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Breaks(ParallelTransformer):
    """Its logits are NaN after the tokens for which ``breaks`` (tokens, positions) says so."""

    breaks: Breaking

    def __call__(self, tokens: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        logits: torch.Tensor = super().__call__(tokens, **kwargs)
        at = kwargs["cache"].logit_indices
        return logits.masked_fill(self.breaks(tokens[at], kwargs["positions"][at]).unsqueeze(1), NAN)


def _breaking(breaks: Breaking) -> Breaks:
    model = copy.copy(exact("gated"))
    model.__class__, model.breaks = Breaks, breaks  # type: ignore[assignment]
    return model  # type: ignore[return-value]


def _ends(events: list[TokenEvent]) -> dict[int, TokenEvent]:
    return {event.request: event for event in events if event.finish is not None}


@pytest.mark.parametrize("eager", [True, False])
def test_a_request_ends_at_the_step_whose_logits_are_nan(eager: bool) -> None:
    requests = [
        Request([1, 2, 3], max_new_tokens=8),
        Request([4, 5, 6, 7, 8, 9], max_new_tokens=12),
        Request([2, 2], max_new_tokens=8, sampling=SamplingParams(temperature=0.8, seed=3, logprobs=1)),
    ]
    expected = [solo_tokens(exact("gated"), each) for each in requests]
    engine = Engine(_breaking(lambda token, position: position == 12), enforce_eager=eager, **SIZES)
    numbers = [engine.add(each) for each in requests]
    events = list(engine.run())
    last = _ends(events)[numbers[1]]
    assert (last.token, last.finish, type(last.error)) == (None, "error", LogitsNotFinite)
    assert "logits for token 8 of the answer, at position 13," in str(last.error)
    got = [
        [event.token for event in events if event.request == number and event.token is not None] for number in numbers
    ]
    assert got == [expected[0], expected[1][:7], expected[2]]
    assert engine.stats.not_finite == 1
    assert not engine.busy
    assert engine._allocator.used_blocks == 0


def test_what_a_failed_answer_computed_is_not_shared() -> None:
    """Its keys and values may be NaN as well: a later request with the same beginning computes its own."""
    where = torch.tensor(9)
    engine = Engine(_breaking(lambda token, position: position == where), **SIZES)
    request = Request(list(range(10)), max_new_tokens=3)
    engine.generate([Request(list(range(8)), max_new_tokens=1)])  # publishes the first two blocks
    with pytest.raises(RuntimeError, match="NaN or infinite"):
        engine.generate([request])
    assert engine.stats.shared_tokens == 8
    where.fill_(-1)
    assert engine.generate([request]) == [solo_tokens(exact("gated"), request)]
    assert engine.stats.shared_tokens == 8


def test_scores_of_a_prompt_that_are_no_numbers_end_its_request() -> None:
    engine = Engine(_breaking(lambda token, position: token == 7), max_num_batched_tokens=8, **SIZES)
    engine.add(Request([1, 2, 3, 7, 5], max_new_tokens=2, sampling=SamplingParams(prompt_logprobs=1)))
    engine.add(Request([1, 2, 3, 5], max_new_tokens=2, sampling=SamplingParams(prompt_logprobs=1)))
    ends = _ends(list(engine.run()))
    assert "the model's logits after token 4 of the prompt are NaN or infinite" in str(ends[0].error)
    assert ends[1].error is None


def test_every_answer_of_a_request_is_told() -> None:
    engine = Engine(_breaking(lambda token, position: position == 2), **SIZES)
    engine.add(Request([1, 2, 3], max_new_tokens=4, n=3, sampling=SamplingParams(temperature=1.0)))
    events = list(engine.run())
    assert [(event.index, event.finish, type(event.error)) for event in events] == [
        (index, "error", LogitsNotFinite) for index in range(3)
    ]
    assert not engine.busy


@pytest.mark.parametrize("sizes", [{"max_num_seqs": 2}, {"num_blocks": 3}], ids=["seats", "blocks"])
def test_answers_that_wait_for_room_are_told_as_well(sizes: dict[str, int]) -> None:
    """Of several answers to a prompt, those without a seat or a block own nothing yet; another request goes on."""
    engine = Engine(_breaking(lambda token, position: position == 6), **{**SIZES, **sizes})
    other = Request([1, 2], max_new_tokens=4)
    engine.add(other)
    engine.add(Request([1, 2, 3, 4, 5, 6, 7], max_new_tokens=4, n=5))
    events = list(engine.run())
    assert [event.token for event in events if event.request == 0] == solo_tokens(exact("gated"), other)
    assert [(event.index, type(event.error)) for event in events if event.request == 1] == [
        (index, LogitsNotFinite) for index in range(5)
    ]
    assert engine.stats.not_finite == 5
    assert engine.stats.generated_tokens == 4
    assert not engine.busy
    assert engine._allocator.used_blocks == 0


# --- weights ----------------------------------------------------------------------------------------------------------


def _spoilt() -> ParallelTransformer:
    model = tiny_model(vocab_size=32)
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[3, 5] = NAN
    return model


def test_an_engine_over_weights_that_are_nan_says_which() -> None:
    with pytest.raises(ValueError, match=r"1 of the \d+ parameters .* hold NaN, model.layers.1.mlp.down_proj.weight"):
        Engine(_spoilt(), **SIZES)


def test_a_model_of_transformers_is_looked_at_before_its_pages_are() -> None:
    pytest.importorskip("transformers")
    from served_case import build

    model = build("llama", seed=1)
    with torch.no_grad():
        model.lm_head.weight[0, 0] = NAN
    with pytest.raises(ValueError, match=r"parameters of this .*LlamaForCausalLM hold NaN, lm_head.weight first"):
        Engine(model, **SIZES)


def test_infinite_weights_are_served() -> None:
    """As a bias of -inf that bans a token; a sum of both infinities is NaN, and no weight is."""
    model = tiny_model(vocab_size=32)
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight[0, :2] = torch.tensor([INF, -INF])
    Engine(model, **SIZES)


def test_new_weights_are_looked_at_too() -> None:
    model = tiny_model(vocab_size=32)
    engine = Engine(model, **SIZES)
    good = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ValueError, match=r"hold NaN, model.layers.1.mlp.down_proj.weight first"):
        engine.update_weights(_spoilt().state_dict())
    engine.update_weights(good)
    request = Request([1, 2], max_new_tokens=3)
    assert engine.generate([request]) == [solo_tokens(model, request)]


def _one_rank_spoilt(rank: int, world: int) -> str:
    model = tiny_model(vocab_size=32, mesh=init_mesh(tp=world, device_type="cpu"))
    if rank == 1:
        with torch.no_grad():
            model.model.layers[1].mlp.down_proj.weight.to_local()[3, 1] = NAN  # type: ignore[operator]
    with pytest.raises(ValueError, match="hold NaN") as told:
        Engine(model, **SIZES)
    return str(told.value)


@pytest.mark.ranks
def test_every_rank_is_told_of_one_ranks_nan(ranks: Any) -> None:
    first, second = ranks(2, _one_rank_spoilt)
    assert first == second
