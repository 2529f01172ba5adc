"""The text of answers: all of it, none of it twice, nothing that a stop string may still take away."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

pytest.importorskip("tokenizers", reason="tokenizers is not installed (pip install .[hf])")

import tokenizer_case as case
from serving_case import exact
from tokenizers import Tokenizer

from shardfuse.serving import Engine, Request, SamplingParams, TokenEvent
from shardfuse.serving.prefixes import Prefixes
from shardfuse.serving.text import AnswerText, Decoders, StopStrings, TokenText

KINDS = {each.__name__: each for each in (case.byte_level, case.word_piece, case.sentence_piece)}
STOPS = ("\n\n", "日本", "üße", "🙂", "a f", ". ", "!", "é", "the", "ca", "at", "\ufffd", "tt", "t")


def _ids(tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    """Any tokens, and those of text, cut anywhere."""
    size = tokenizer.get_vocab_size()
    text = st.lists(st.sampled_from([*case.LINES, *STOPS]), max_size=4).map(
        lambda parts: tokenizer.encode("".join(parts)).ids
    )
    return st.one_of(
        st.lists(st.integers(0, size - 1), max_size=40),
        st.tuples(text, st.integers(0, 20)).map(lambda drawn: drawn[0][drawn[1] :]),
        st.lists(st.sampled_from([0, size - 1, 7, 200 % size]), max_size=80),
    )


def _first_stop(text: str, stops: Sequence[str]) -> tuple[int, int] | None:
    """Where the stop string that is complete first begins and ends, by the definition."""
    for end in range(1, len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return min(starts), end
    return None


# --------------------------------------------------------------------------------------------------------- decoding
@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_pieces_add_up(kind: str, data: st.DataObject):
    tokenizer = KINDS[kind]()
    ids = data.draw(_ids(tokenizer))
    text, whole = TokenText(Decoders(tokenizer).of()), ""
    for count, token in enumerate(ids, 1):
        whole += text.push(token)
        so_far = tokenizer.decode(ids[:count])
        assert so_far.startswith(whole)
        assert not so_far[len(whole) :].strip("\ufffd")  # only a part of a character comes late
    assert whole + text.flush() == tokenizer.decode(ids)
    assert text.flush() == ""


@given(st.lists(st.sampled_from([*"abcde", "é", "日", "▁a", "▁", "ö", "🙂", "語", "本"]), max_size=40))
def test_pieces_of_a_byte_fallback_add_up(parts: list[str]):
    tokenizer = case.byte_fallback()
    ids = tokenizer.encode("".join(parts)).ids
    text = TokenText(Decoders(tokenizer).of())
    assert "".join(map(text.push, ids)) + text.flush() == tokenizer.decode(ids)


@given(st.lists(st.integers(2, 257), max_size=80))
def test_bytes_that_are_no_text_do_no_harm_to_what_follows(ids: list[int]):
    """A byte fallback takes characters back; pieces, once given, stay."""
    tokenizer = case.byte_fallback()
    text = TokenText(Decoders(tokenizer).of())
    pieces = [text.push(token) for token in (*ids, *tokenizer.encode("abc日▁de").ids)]
    assert "".join(pieces).endswith("abc日 de")
    assert text.flush() == ""


def test_a_transformers_tokenizer_decodes_without_special_tokens():
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=case.byte_level(), eos_token=case.END)
    ids = [*case.byte_level().encode(case.LINES[0]).ids, tokenizer.eos_token_id]
    text = TokenText(Decoders(tokenizer).of())
    assert "".join(map(text.push, ids)) + text.flush() == case.LINES[0]


class Counting:
    """A tokenizer that counts the tokens that it decodes."""

    def __init__(self) -> None:
        self.count = 0

    def decode(self, ids: list[int]) -> str:
        self.count += len(ids)
        return case.byte_level().decode(ids)


_BYTE, *_BYTES = case.byte_level().encode("日").ids  # the beginning of a character, and the rest of it


@pytest.mark.parametrize("ids", [case.byte_level().encode(case.LINES[1] * 60).ids, [_BYTE] * 4000, [0] * 4000])
def test_the_cost_of_a_token_does_not_grow(ids: list[int]):
    counting = Counting()
    text = TokenText(Decoders(counting).of())
    whole = "".join(map(text.push, ids)) + text.flush()
    assert counting.count < 100 * len(ids)
    assert whole == case.byte_level().decode(ids)


def _byte_of(value: int) -> int:
    token = case.byte_fallback().token_to_id(f"<0x{value:02X}>")
    assert token is not None
    return token


@pytest.mark.parametrize(
    ("kind", "ids"),
    [
        ("byte_level", [_BYTE, *[case.byte_level().token_to_id(case.END)] * 3000, *_BYTES]),
        ("byte_fallback", [_byte_of(0xFF), *[_byte_of(0x41)] * 3000]),
        ("byte_fallback", [_byte_of(0xE6), _byte_of(0x97), *[_byte_of(0x41)] * 3000]),
    ],
    ids=["special tokens within a character", "letters after a byte", "letters after a part of a character"],
)
def test_a_window_without_a_place_to_cut_does_not_grow(kind: str, ids: list[int]):
    tokenizer, sizes = getattr(case, kind)(), []

    class Measuring:
        def decode(self, ids: list[int]) -> str:
            sizes.append(len(ids))
            return tokenizer.decode(ids)

    text = TokenText(Decoders(Measuring()).of())
    whole = "".join(map(text.push, ids)) + text.flush()
    assert max(sizes) <= 64
    if kind == "byte_level":
        assert whole == tokenizer.decode(ids)
    else:
        assert len(whole) == len(ids)


# ------------------------------------------------------------------------------------------------------ stop strings
@given(
    st.lists(st.text("abc", max_size=4), max_size=8),
    st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=4),
    st.booleans(),
)
@example(["xa", "b", "c"], ["abc", "b"], False)
@example(["ab", "abc"], ["abab", "babc"], True)
def test_a_stop_string_is_found_in_any_pieces(pieces: list[str], stops: list[str], included: bool):
    search, text, given_ = StopStrings(stops, included), "".join(pieces), ""
    for count, piece in enumerate(pieces, 1):
        given_ += search.push(piece)
        so_far = "".join(pieces[:count])
        first = _first_stop(so_far, stops)
        assert search.found == (None if first is None else so_far[slice(*first)])
        if first is None:
            held = so_far[len(given_) :]
            assert so_far.startswith(given_)
            assert held == "" or any(stop.startswith(held) for stop in stops)
    where = _first_stop(text, stops)
    expected = text if where is None else text[: where[1] if included else where[0]]
    assert given_ + search.flush() == expected


class NaiveStopStrings:
    """``StopStrings`` that searches all withheld text with each piece, for each string."""

    def __init__(self, strings: Sequence[str]) -> None:
        self.strings, self.held, self.found = strings, "", None

    def push(self, piece: str) -> str:
        text = "" if self.found else self.held + piece
        if where := _first_stop(text, self.strings):
            self.found, self.held = text[slice(*where)], ""
            return text[: where[0]]
        starts = [at for at in range(len(text)) if any(each.startswith(text[at:]) for each in self.strings)]
        self.held = text[min(starts, default=len(text)) :]
        return text[: len(text) - len(self.held)]


@given(
    st.lists(st.text("ab", max_size=5), max_size=14),
    st.lists(st.text("ab", min_size=1, max_size=9), min_size=1, max_size=9),
)
def test_each_piece_gives_what_a_search_of_all_text_would(pieces: list[str], stops: list[str]):
    search, naive = StopStrings(stops), NaiveStopStrings(stops)
    for piece in pieces:
        assert (search.push(piece), search.found) == (naive.push(piece), naive.found)
    assert search.flush() == naive.held


@pytest.mark.parametrize(
    "stops",
    [
        ["a" * 3000 + "b"],
        ["a" * 3000 + "b", "a" * 2000 + "c", "ba" * 2000],
        [("ab" * 40 + "a" * 20)[at:] + "c" for at in range(100)],
    ],
    ids=["one", "three", "each a part of the one before"],
)
def test_the_search_takes_a_few_steps_for_each_letter(stops: list[str], monkeypatch: pytest.MonkeyPatch):
    looks = []
    look = Prefixes._child
    monkeypatch.setattr(Prefixes, "_child", lambda *given: looks.append(None) or look(*given))
    text = ["a" * 6000 + "x", *["ab" * 40 + "a" * 20] * 40]
    prefixes = sum(map(len, stops))  # each is made once
    search = StopStrings(stops)
    given_ = "".join(search.push(letter) for piece in text for letter in piece)
    assert search.found is None
    assert given_ + search.flush() == "".join(text)
    assert 0 < len(looks) <= 4 * sum(map(len, text)) + 4 * min(prefixes, 6000)


def test_the_answers_to_a_request_share_its_stop_strings(monkeypatch: pytest.MonkeyPatch):
    made = []
    make = Prefixes.__init__
    monkeypatch.setattr(Prefixes, "__init__", lambda self, strings: made.append(strings) or make(self, strings))
    hot = SamplingParams(temperature=1.5, allowed_tokens=range(300), seed=3)
    stops = ["\ufffe never there" + "x" * 100_000] * 3
    engine = _engine(max_num_seqs=4)
    engine.add(Request([5, 6, 7], 12, sampling=hot, n=4, stop_strings=stops))
    events = list(engine.run())
    assert {event.index for event in events} == {0, 1, 2, 3}
    assert made == [(stops[0],)]


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data(), included=st.booleans())
def test_answers_end_where_their_text_says(kind: str, data: st.DataObject, included: bool):
    tokenizer = KINDS[kind]()
    ids = data.draw(_ids(tokenizer))
    stops = data.draw(st.lists(st.sampled_from(STOPS), min_size=1, max_size=3, unique=True))
    answer, whole = AnswerText(Decoders(tokenizer).of(), stops, included), ""
    for token in ids:
        whole += answer.push(token)
        if answer.stop_string is not None:
            break
    whole += answer.flush()
    text = tokenizer.decode(ids)
    where = _first_stop(text, stops)
    assert answer.stop_string == (None if where is None else text[slice(*where)])
    assert whole == (text if where is None else text[: where[1] if included else where[0]])


# -------------------------------------------------------------------------------------------------------- the engine
def _engine(**options: Any) -> Engine:
    return Engine(case.model(), num_blocks=160, block_size=4, tokenizer=case.byte_level(), **options)


def _texts(events: Sequence[TokenEvent], count: int) -> list[str]:
    return ["".join(event.text for event in events if event.request == number) for number in range(count)]


def _asked() -> list[Request]:
    hot = [SamplingParams(temperature=1.5, allowed_tokens=range(300), seed=seed) for seed in range(8)]
    return [Request(case.byte_level().encode("日本").ids, max_new_tokens=40, sampling=each) for each in hot]


@pytest.mark.parametrize("num_blocks", [160, 14])
def test_the_engine_stops_at_strings(num_blocks: int):
    """Each request's stop string is a piece of its own answer; also where blocks run out."""
    requests, tokenizer = _asked(), case.byte_level()
    free = _engine(max_num_seqs=8).generate(requests)
    texts = [tokenizer.decode(answer) for answer in free]
    stops = [text[10:13] for text in texts]
    engine = Engine(case.model(), num_blocks=num_blocks, block_size=4, tokenizer=tokenizer)
    for i, (request, stop) in enumerate(zip(requests, stops)):
        shown = i % 2 == 1
        engine.add(
            Request(
                request.prompt,
                40,
                sampling=request.sampling,
                stop_strings=[stop, "never there"],
                include_stop_str_in_output=shown,
            )
        )
    events = list(engine.run())
    assert (engine.stats.preemptions > 0) == (num_blocks == 14)
    for i, (found, text, stop) in enumerate(zip(_texts(events, 8), texts, stops)):
        start = text.find(stop)
        assert found == text[: start + (len(stop) if i % 2 else 0)]
        tokens = [event.token for event in events if event.request == i]
        assert tokens == free[i][: len(tokens)]
        assert stop in tokenizer.decode(tokens)
        assert stop not in tokenizer.decode(tokens[:-1]).rstrip("\ufffd")
        assert [event.finish for event in events if event.request == i][-1] == "stop"


def test_all_text_comes_at_every_end():
    """Of length, of a stop token, of a cancelled request, and of one with a stop string half there."""
    tokenizer, (first, second, third, fourth, *_) = case.byte_level(), _asked()
    free = _engine().generate([first, second, third, fourth])
    engine = _engine()
    engine.add(first)
    engine.add(Request(second.prompt, 40, stop=[free[1][20]], sampling=second.sampling))
    engine.add(third)
    text = tokenizer.decode(free[3])
    engine.add(
        Request(fourth.prompt, 40, sampling=fourth.sampling, stop_strings=[text[-5:] + "more", text[3:9] + "more"])
    )
    events = [event for _ in range(15) for event in engine.step()]
    engine.cancel(2)
    events += engine.run()
    stopped = free[1][: free[1].index(free[1][20]) + 1]
    expected = [tokenizer.decode(each) for each in (free[0], stopped, free[2][:15], free[3])]
    assert _texts(events, 4) == expected
    assert [event.finish for event in events if event.finish] == ["cancelled", "stop", "length", "length"]


def test_without_a_tokenizer_there_is_no_text():
    engine = Engine(exact("gelu"), num_blocks=8)
    engine.add(Request([1], max_new_tokens=3))
    assert [event.text for event in engine.run()] == [""] * 3
    with pytest.raises(ValueError, match=r"stop_strings, and the engine has no tokenizer: .*tokenizer=\.\.\."):
        engine.add(Request([1], stop_strings=("x",)))
    with pytest.raises(TypeError, match=r"tokenizer is a str: expected a tokenizers.Tokenizer"):
        Engine(exact("gelu"), num_blocks=8, tokenizer="gpt2")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"stop_strings": "x"}, r"stop_strings='x': expected a collection of texts, such as \('\\n\\n',\)"),
        ({"stop_strings": [""]}, "stop_strings: one is '': expected text of at least one character"),
        ({"stop_strings": [3]}, "stop_strings: one is 3"),
        ({"stop_strings": None}, "stop_strings=None: expected a collection"),
        ({"include_stop_str_in_output": 1}, "include_stop_str_in_output=1: expected True or False"),
    ],
)
def test_what_makes_no_sense_is_refused(fields: dict[str, Any], says: str):
    with pytest.raises(ValueError, match=says):
        _engine().add(Request([1], **fields))


def test_a_tokenizer_that_fails_ends_its_request_alone():
    class Failing:
        def decode(self, ids: list[int]) -> str:
            if poison in ids:
                raise KeyError("no such token")
            return "x" * len(ids)

    model, requests = exact("gated"), [Request([i], max_new_tokens=6) for i in range(4)]
    answers = Engine(model, num_blocks=32).generate(requests)
    poison = answers[2][3]
    hit = {i for i, answer in enumerate(answers) if poison in answer}
    assert hit < set(range(4))
    engine = Engine(model, num_blocks=32, tokenizer=Failing())
    for request in requests:
        engine.add(request)
    events = list(engine.run())
    for i, answer in enumerate(answers):
        mine = [event for event in events if event.request == i]
        length = answer.index(poison) if i in hit else len(answer)
        assert [event.token for event in mine if event.token is not None] == answer[:length]
        assert mine[-1].finish == ("error" if i in hit else "length")
        assert isinstance(mine[-1].error, KeyError) == (i in hit)
