"""Guided answers: what they have to be, in any company, and at no cost to anybody else's steps."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("tokenizers", reason="tokenizers is not installed (pip install .[hf])")
pytest.importorskip("llguidance", reason="llguidance is not installed (pip install .[guided])")

import llguidance
import tokenizer_case as case

from shardfuse.serving import Engine, Guide, Request, SamplingParams, TokenEvent, guide_process, guiding
from shardfuse.serving.sampling import uniform

MARGIN = 1e-8  # between what is chosen and what is not; solo and batched forwards in fp64 differ by about 1e-14
TOKENIZER = case.byte_level()
END = TOKENIZER.token_to_id(case.END)
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 3},
        "kind": {"enum": ["cat", "日本", 7]},
        "sizes": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3},
    },
    "required": ["name", "kind", "sizes"],
    "additionalProperties": False,
}
WORDS = ["yes", "no", "not at all", 'naïve "quotes"\n', "日本"]
PATTERN = "[a-f]{2,9}(é|日){1,3}[0-9]{0,5}x"
LARK = r"""start: pair | "[" pair "," pair "]"
pair: word | "[" word "," word "]"
word: /[xy日]{1,3}/"""


def _is_of_schema(text: str) -> bool:
    value = json.loads(text)
    return (
        list(value) == ["name", "kind", "sizes"]
        and len(value["name"]) <= 3
        and value["kind"] in ("cat", "日本", 7)
        and len(value["sizes"]) <= 3
        and all(isinstance(each, int) and 0 <= each <= 99 for each in value["sizes"])
    )


def _is_of_grammar(text: str) -> bool:
    """Words, in brackets of two levels at most."""
    pairs = re.sub("[xy日]{1,3}", "w", text)
    return pairs.replace("[w,w]", "w", 2) in ("w", "[w,w]")


GUIDES: dict[str, tuple[Guide, Callable[[str], object]]] = {
    "schema": (Guide.json_schema(SCHEMA, any_whitespace=False), _is_of_schema),
    "regex": (Guide.regex(PATTERN), lambda text: re.fullmatch(PATTERN, text)),
    "choice": (Guide.choice(WORDS), WORDS.__contains__),
    "grammar": (Guide.grammar(LARK), _is_of_grammar),
}


def _engine(num_blocks: int = 2000, **options: Any) -> Engine:
    given = {"block_size": 4, "max_num_seqs": 32, "tokenizer": TOKENIZER, **options}
    return Engine(case.model(), num_blocks=num_blocks, **given)


def _request(guide: Guide | None, seed: int = 0, new: int = 90, **fields: Any) -> Request:
    sampling = SamplingParams(temperature=0.7 * (seed % 3), seed=seed, guide=guide)
    return Request([40 + seed, 7, 100 + seed], new, sampling=sampling, **{"stop": [END], **fields})


def _run(engine: Engine, *requests: Request) -> list[list[TokenEvent]]:
    numbers = [engine.add(request) for request in requests]
    events = list(engine.run())
    return [[event for event in events if event.request == number] for number in numbers]


def _tokens(events: list[TokenEvent]) -> list[int]:
    return [event.token for event in events if event.token is not None]


def _text(events: list[TokenEvent]) -> str:
    return "".join(event.text for event in events)


def _compiled(engine: Engine, *guides: Guide) -> None:
    states = [engine._guides.start(guide, ()) for guide in guides]
    for state in states:
        state.compiled.matcher.result(60)


def _all() -> list[tuple[str | None, Request]]:
    """32 requests, every fifth of them free."""
    kinds = [*GUIDES, None]
    asked = []
    for i in range(32):
        kind = kinds[i % 5]
        asked.append((kind, _request(None if kind is None else GUIDES[kind][0], seed=i)))
    return asked


@torch.no_grad()
def _solo(request: Request) -> list[int]:
    """The answer alone: each token from a forward of the whole sequence, masked by llguidance with the real EOS."""
    tokenizer = llguidance.LLTokenizer(TOKENIZER.to_str(), n_vocab=case.VOCABULARY, eos_token=END)
    sampling, answer = request.sampling, []
    guide = sampling.guide
    matcher = None if guide is None else guide_process.build(tokenizer, guide.kind, guide.source, guide.any_whitespace)
    while len(answer) < request.max_new_tokens and not (answer and answer[-1] == END):
        logits = case.model()(torch.tensor([[*request.prompt, *answer]]))[0, -1]
        if matcher is not None:
            if matcher.is_stopped():
                break
            allowed = [i for i, byte in enumerate(matcher.compute_logit_bias()) if byte]
            logits = torch.full_like(logits, -torch.inf).index_copy(0, torch.tensor(allowed), logits[allowed])
        if sampling.temperature:
            edges = torch.softmax(logits / sampling.temperature, 0).cumsum(0)
            number = uniform([sampling.seed], [len(answer)]).item()
            assert (edges - number).abs().min() > MARGIN
            answer.append(int((edges <= number).sum()))
        else:
            best = logits.topk(2).values
            assert best[0] - best[1] > MARGIN
            answer.append(int(logits.argmax()))
        if matcher is not None:
            assert matcher.consume_token(answer[-1])
    return answer


# ------------------------------------------------------------------------------------------------- one batch of all
@pytest.mark.parametrize("blocks", [2000, 60])
def test_guided_and_free_requests_share_their_steps(blocks: int):
    """Also where blocks run out, and a preempted answer goes on where its guide was."""
    kinds, requests = zip(*_all())
    engine = _engine(blocks)
    _compiled(engine, *(guide for guide, _ in GUIDES.values()))
    found = _run(engine, *requests)
    assert (engine.stats.preemptions > 0) == (blocks == 60)
    for kind, request, events in zip(kinds, requests, found):
        assert _tokens(events) == _solo(request)
        if kind is not None:
            assert events[-1].finish == "stop"
            assert GUIDES[kind][1](_text(events)), (kind, _text(events))
    assert len({_text(events) for events in found}) > 20


def test_guides_cost_no_step():
    requests = [request for _, request in _all()]
    free = [dataclasses.replace(each, sampling=dataclasses.replace(each.sampling, guide=None)) for each in requests]
    guided, plain = _engine(), _engine()
    _compiled(guided, *(guide for guide, _ in GUIDES.values()))
    _run(guided, *requests)
    _run(plain, *free)
    assert guided.stats.steps <= plain.stats.steps == 90
    assert guided.stats.peak_seqs == plain.stats.peak_seqs == 32


def test_masks_of_all_rows_are_filled_at_once():
    """What each row's mask alone says; prints what filling and applying 32 of them takes."""
    engine = _engine()
    states = []
    for guide, _ in list(GUIDES.values()) * 8:
        states.append(engine._guides.start(guide, [END]))
        states[-1].compiled.matcher.result(60)
        assert states[-1].begin() is None
    logits = torch.randn(32, case.VOCABULARY)
    began = time.perf_counter()
    together = guiding.masked(logits, states)
    filled = time.perf_counter()
    guiding.fill(states)
    print(f"32 rows: {1e6 * (filled - began):.0f} us, of which masks {1e6 * (time.perf_counter() - filled):.0f} us")
    for row, state in enumerate(states):
        allowed = torch.tensor(list(state.matcher.compute_logit_bias()))[: case.VOCABULARY] > 0
        assert 0 < allowed.sum() < 300
        assert torch.equal(together[row] > -torch.inf, allowed)
        assert torch.equal(together[row][allowed], logits[row][allowed])
    half = guiding.masked(logits, [state if row % 2 else None for row, state in enumerate(states)])
    assert torch.equal(half[1::2], together[1::2])
    assert torch.equal(half[::2], logits[::2])


# --------------------------------------------------------------------------------------------------------- its end
def test_an_answer_ends_where_nothing_more_can_come():
    (events,) = _run(_engine(), _request(Guide.regex("ab{3}"), stop=()))
    assert _text(events) == "abbb"
    assert [event.finish for event in events] == [None, None, None, "stop"]


@pytest.mark.parametrize("as_stop", [True, False])
def test_a_stop_token_may_end_a_complete_answer_only(as_stop: bool):
    """A stop token, or the EOS of a transformers tokenizer; it belongs to the answer's tokens."""
    transformers = pytest.importorskip("transformers")
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=TOKENIZER, eos_token=case.END)
    engine = _engine(tokenizer=TOKENIZER if as_stop else fast)
    sampling = SamplingParams(guide=Guide.regex("a{3,50}"), logit_bias={END: 1e6})
    (events,) = _run(engine, Request([1], 40, stop=[END] if as_stop else (), sampling=sampling))
    assert _text(events) == "aaa"
    assert (events[-1].token, events[-1].finish, events[-1].stop_reason) == (END, "stop", END)


def test_a_stop_token_that_is_text_waits_for_the_end():
    letter = TOKENIZER.token_to_id("a")
    sampling = SamplingParams(guide=Guide.regex("[ab]{3}c"), logit_bias={letter: 1e6})
    engine = _engine()
    free, stopped = _run(engine, Request([1], 9, sampling=sampling), Request([1], 9, stop=[letter], sampling=sampling))
    assert (_text(free), _text(stopped)) == ("aaac", "bbbc")


@pytest.mark.parametrize(("new", "finish"), [(4, "length"), (5, "stop")])
def test_the_length_counts_as_it_does_elsewhere(new: int, finish: str):
    (events,) = _run(_engine(), _request(Guide.regex("x{5}"), new=new))
    assert _text(events) == "x" * new
    assert events[-1].finish == finish


def test_a_stop_string_ends_a_guided_answer_too():
    (events,) = _run(_engine(), _request(Guide.regex("x{5}yz{5}"), stop_strings=["yz"]))
    assert (_text(events), events[-1].finish) == ("xxxxx", "stop")


# ------------------------------------------------------------------------------------------- with everything else
def test_what_a_request_allows_and_what_its_guide_allows():
    """Both; where they have nothing in common, that request ends, and no other one notices."""
    a, b = (TOKENIZER.token_to_id(each) for each in "ab")
    both = SamplingParams(guide=Guide.regex("[bc]{4}"), allowed_tokens=[a, b])
    neither = SamplingParams(guide=Guide.regex("b{2}c{2}"), allowed_tokens=[a, b])
    penalised = SamplingParams(guide=Guide.regex("[bc]{4}"), logit_bias={a: 1e6, b: 1e3}, frequency_penalty=2e3)
    requests = [
        Request([1, i], 9, sampling=each) for i, each in enumerate((both, neither, penalised, SamplingParams()))
    ]
    first, second, third, free = _run(_engine(), *requests)
    assert _text(first) == "bbbb"
    assert _text(second) == "bb"
    assert second[-1].finish == "error"
    assert re.match("guide: after 2 tokens .* none .* is in allowed_tokens: allow more", str(second[-1].error))
    assert _text(third) == "bcbc"
    assert _tokens(free) == _solo(requests[3])


def test_logprobs_are_the_models_own():
    sampling = SamplingParams(guide=Guide.regex("日+"), logprobs=2)
    (events,) = _run(_engine(), Request([5, 6], 3, sampling=sampling))
    with torch.no_grad():
        scores = case.model()(torch.tensor([[5, 6]]))[0, -1].log_softmax(-1)
    assert events[0].logprob == pytest.approx(scores[events[0].token].item())
    assert [token for token, _ in events[0].top_logprobs] == scores.topk(2).indices.tolist()


def test_a_fork_goes_its_own_way():
    engine = _engine()
    state = engine._guides.start(Guide.regex("a(bc|de)"), ())
    state.compiled.matcher.result(60)
    assert state.begin() is None
    a, b, c, d = (TOKENIZER.token_to_id(each) for each in "abcd")
    state.advance(a)
    other = state.fork()
    for token in (b, c):
        state.advance(token)
    other.advance(d)
    assert (state.done, other.done) == (True, False)
    with pytest.raises(RuntimeError, match=f"guide: token {c} is refused"):
        other.advance(c)


# ------------------------------------------------------------------------------------------------------ compilation
def test_a_guide_is_compiled_while_others_go_on(monkeypatch: pytest.MonkeyPatch):
    """The guided request alone waits, then it is served, and an equal guide is not compiled again."""
    may, compiled = threading.Event(), []
    original = guiding.Guides._begin

    def slow(self: guiding.Guides, each: Any) -> None:
        compiled.append(each.guide)
        assert may.wait(60)
        original(self, each)

    monkeypatch.setattr(guiding.Guides, "_begin", slow)
    engine, free = _engine(), Request([1], 6)
    waiting = engine.add(_request(Guide.choice(["yes"])))
    cancelled = engine.add(_request(Guide.choice(["no"])))
    assert engine.step() == engine.step() == []
    number = engine.add(free)
    events = [event for _ in range(6) for event in engine.step()]
    assert [event.request for event in events] == [number] * 6
    assert engine.cancel(cancelled)
    assert [event.finish for event in engine.step()] == ["cancelled"]
    assert engine.busy
    may.set()
    events = list(engine.run())
    assert {event.request for event in events} == {waiting}
    assert _text(events) == "yes"
    _run(engine, _request(Guide.choice(["yes"])))
    assert compiled == [Guide.choice(["yes"]), Guide.choice(["no"])]


@pytest.mark.parametrize(
    ("guide", "says"),
    [
        (Guide.regex("[ab"), "guide: this regex cannot be compiled: .*unclosed character class"),
        (Guide.json_schema({"type": "foo"}), "guide: this json_schema cannot be compiled: .*foo"),
        (Guide.json_schema({"$ref": "http://x/y"}), "guide: this json_schema cannot be compiled: .*http://x/y"),
        (Guide.grammar("start: other"), 'guide: this grammar cannot be compiled: .*unknown name: "other"'),
    ],
)
def test_a_guide_that_cannot_be_compiled_ends_its_request(guide: Guide, says: str):
    engine = _engine()
    failed, good = _run(engine, _request(guide), _request(Guide.choice(["yes"])))
    assert [event.finish for event in failed] == ["error"]
    assert isinstance(failed[0].error, ValueError)
    assert re.search(says, str(failed[0].error), re.DOTALL)
    assert "<state>" not in str(failed[0].error)
    assert _text(good) == "yes"
    assert not engine.busy
    with pytest.raises(RuntimeError, match=r"generate: requests\[0\] failed: guide: "):
        engine.generate([_request(guide)])


def test_a_tokenizer_of_another_kind_is_refused():
    class Plain:
        def decode(self, ids: list[int]) -> str:
            return ""

    with pytest.raises(ValueError, match=r"tokenizer is a .*Plain: expected a tokenizers.Tokenizer or a fast"):
        _engine(tokenizer=Plain()).add(_request(Guide.regex("a")))
    with pytest.raises(ValueError, match=r"guide, and the engine has no tokenizer"):
        _engine(tokenizer=None).add(_request(Guide.regex("a")))
    ((event,),) = _run(_engine(tokenizer=case.word_piece()), _request(Guide.regex("a")))
    assert re.match("guide: llguidance cannot read the tokenizer's tokens as bytes", str(event.error))


def test_without_llguidance_the_extra_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ValueError, match=r"llguidance is not installed: pip install 'shardfuse\[guided\]'"):
        _engine().add(_request(Guide.regex("a")))


def test_a_closed_engine_guides_again():
    engine = _engine()
    for _ in range(2):
        with engine:
            ((*_, last),) = _run(engine, _request(Guide.choice(["yes"])))
            assert last.finish == "stop"
        assert engine._guides._compiler is None


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Guide.json_schema("{"), r"Guide.json_schema: the schema is no JSON \("),
        (lambda: Guide.json_schema({"a": {1, 2}}), "the schema is no JSON"),
        (lambda: Guide.json_schema("[1]"), r"Guide.json_schema: \[1\]: expected an object"),
        (lambda: Guide.regex(""), "Guide.regex: '': expected text of at least one character"),
        (lambda: Guide.choice("yes"), "Guide.choice: 'yes': expected a collection of texts"),
        (lambda: Guide.choice([]), r"Guide.choice: \[\]: expected a collection"),
        (lambda: Guide.choice(["a", 3]), "Guide.choice: 3: expected text"),
        (lambda: Guide.grammar(None), "Guide.grammar: None"),
        (lambda: SamplingParams(guide="a+").check(9), r"guide='a\+': expected a Guide, such as"),
    ],
)
def test_what_makes_no_sense_is_refused(make: Callable[[], Any], says: str):
    with pytest.raises(ValueError, match=says):
        make()
