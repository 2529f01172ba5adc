"""Tool calls: read from text in any pieces, forced by a grammar, and carried through the server."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="fastapi is not installed (pip install .[serve])")

import server_case
from hypothesis import given, settings
from hypothesis import strategies as st
from naive_tools import NaiveToolParser
from server_case import Server, events, serve, tokenizer
from tokenizers import AddedToken

from shardfuse.serving.guide import Guide
from shardfuse.serving.guiding import Guides
from shardfuse.serving.server.tools import BEGIN, END, ToolParser, grammar
from shardfuse.testing import VOCAB_SIZE

# --- the parser -------------------------------------------------------------------------------------------------------


def _call(name: str, arguments: str) -> str:
    return f'{BEGIN}\n{{"name": "{name}", "arguments": {arguments}}}\n{END}'


def _read(pieces: Sequence[str]) -> tuple[str, list[tuple[str, str]]]:
    """The content, and each call's name and arguments. A call's pieces have its index; its name comes first."""
    parser, content = ToolParser(), ""
    calls: list[tuple[str, str]] = []
    for piece in [found for text in pieces for found in parser.push(text)] + parser.flush():
        if isinstance(piece, str):
            assert piece
            content += piece
        elif piece.name is not None:
            assert piece.index == len(calls)
            calls.append((piece.name, piece.arguments))
        else:
            assert piece.index == len(calls) - 1
            calls[-1] = (calls[-1][0], calls[-1][1] + piece.arguments)
    assert parser.calls == len(calls)
    return content, calls


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
OBJECTS = st.dictionaries(st.text('a"\\{}[]<>é日 \n', max_size=4), VALUES, max_size=4)


@st.composite
def _cut(draw: st.DrawFn, text: str) -> list[str]:
    at = sorted(draw(st.lists(st.integers(0, len(text)), max_size=8)))
    return [text[start:end] for start, end in zip([0, *at], [*at, len(text)])]


SCRAPS = [
    BEGIN,
    END,
    "<",
    "tool_call>",
    "\n",
    " ",
    '{"name": "f", "arguments": ',
    "{",
    "}",
    '"',
    "\\",
    "[",
    "é",
    "x" * 600,
]


@given(st.data())
def test_what_is_read_depends_on_the_text_alone(data: st.DataObject) -> None:
    scrap = st.sampled_from(SCRAPS) | OBJECTS.map(lambda each: _call("f", json.dumps(each))) | st.text(max_size=4)
    text = "".join(data.draw(st.lists(scrap, max_size=10)))
    assert _read(data.draw(_cut(text))) == _read([text]) == _read(list(text))


@given(st.data())
def test_arguments_are_those_that_were_written(data: st.DataObject) -> None:
    wanted = data.draw(st.lists(st.tuples(st.sampled_from(["f", "get-it", "a_9"]), OBJECTS), min_size=1, max_size=3))
    ascii_only, before = data.draw(st.booleans()), data.draw(st.sampled_from(["", "Let me see.", "a < b"]))
    written = [(name, json.dumps(each, ensure_ascii=ascii_only)) for name, each in wanted]
    text = before + "\n" * bool(before) + "\n".join(_call(*each) for each in written)
    content, calls = _read(data.draw(_cut(text)))
    assert content == before
    assert calls == written
    assert [(name, json.loads(arguments)) for name, arguments in calls] == wanted


ODD = [
    ("no call", "no call", []),
    ("", "", []),
    (" \n", " \n", []),
    ("a <tool_ca", "a <tool_ca", []),
    ("<tool_calls>", "<tool_calls>", []),
    (f"{BEGIN} is how it begins", f"{BEGIN} is how it begins", []),
    (f"a {BEGIN}{{'name': 'f'}}{END} b", f"a {BEGIN}{{'name': 'f'}}{END} b", []),
    (_call("no such name", "{}"), _call("no such name", "{}"), []),
    (_call("f", "[1]"), _call("f", "[1]"), []),  # arguments are an object
    (_call("f", "}"), _call("f", "}"), []),
    (BEGIN + "x" * 2000, BEGIN + "x" * 2000, []),
    (_call("f", "{}") + " after", " after", [("f", "{}")]),
    (f"{BEGIN}not one{END}\n{_call('g', '{}')}", f"{BEGIN}not one{END}", [("g", "{}")]),
    (f'{BEGIN}{{"name":"f","parameters":{{"a":1}}}}{END}', "", [("f", '{"a":1}')]),
    (_call("f", '{"a": {"b": [1, ')[: -len("}\n" + END)], "", [("f", '{"a": {"b": [1, ')]),  # the answer was cut
    (_call("f", "{}")[: -len(END)] + _call("g", "{}"), "", [("f", "{}"), ("g", "{}")]),  # an end was forgotten
    (_call("f", f'{{"a": "{END}"}}'), "", [("f", f'{{"a": "{END}"}}')]),
    (_call("f", '{"a": nonsense]'), "", [("f", '{"a": nonsense]')]),  # no JSON: the client is told what the model wrote
]


@pytest.mark.parametrize(("text", "content", "calls"), ODD, ids=range(len(ODD)))
def test_odd_texts(text: str, content: str, calls: list[tuple[str, str]]) -> None:
    assert _read([text]) == (content, calls)
    assert _read(list(text)) == (content, calls)


def test_pieces_come_as_soon_as_they_are_certain() -> None:
    parser = ToolParser()
    assert parser.push("Well <") == ["Well"]
    assert parser.push("b") == [" <b"]
    name, arguments = parser.push('<tool_call>{"name": "f", "arguments": {"a": "b')
    assert (name.name, name.arguments, arguments.arguments) == ("f", "", '{"a": "b')  # type: ignore[union-attr]


BEGUN = '<tool_call>{"name": "f", "arguments": '  # a call that lacks its arguments


@given(st.data())
def test_each_piece_gives_what_reading_all_again_would(data: st.DataObject) -> None:
    scraps = ["</tool_call", "<tool", "\u2003", "   ", BEGUN, BEGUN + "{}", BEGUN + '{"a": [1]}}', *SCRAPS]
    text = "".join(data.draw(st.lists(st.sampled_from(scraps), max_size=14)))
    parser, naive = ToolParser(), NaiveToolParser()
    for piece in data.draw(st.one_of(_cut(text), st.just(list(text)))):
        assert parser.push(piece) == naive.push(piece)
    assert (parser.flush(), parser.calls) == (naive.flush(), naive.calls)


@pytest.mark.parametrize("piece", ["abcd", " ", "<tool", "</tool_call", "<tool_call>", "<tool_call>{", "}", '"{'])
@pytest.mark.parametrize(
    "before", ["", BEGIN, BEGUN + "{}", BEGUN + '{"a'], ids=["content", "head", "tail", "arguments"]
)
def test_little_text_is_read_again(before: str, piece: str) -> None:
    """However long an answer is, no more than a head is kept to be read again, and text after a call is forgotten."""
    parser = ToolParser()
    parser.push(before)
    for _ in range(2000):
        parser.push(piece)
        assert len(parser._held) < 1024
    if before == BEGUN + "{}" and "<tool_call>" not in piece:
        assert parser.flush() == []
        assert not parser._space


# --- the grammar ------------------------------------------------------------------------------------------------------

SCHEMAS: list[Any] = [
    None,
    {},
    {"type": "object", "properties": {}, "additionalProperties": False},
    {
        "type": "object",
        "properties": {'a "quoted" \\ {key}': {"const": 'x"\\\n/é日'}},
        "required": ['a "quoted" \\ {key}'],
    },
    {
        "type": "object",
        "properties": {"e": {"enum": [1, "two", None, [3]]}, "p": {"type": "string", "pattern": "^[a-z]{2}$"}},
    },
    {"$defs": {"n": {"type": "object", "properties": {"next": {"$ref": "#/$defs/n"}}}}, "$ref": "#/$defs/n"},
    {
        "type": "object",
        "properties": {"a": {"anyOf": [{"type": "integer", "minimum": 3, "maximum": 5}, {"type": "array"}]}},
    },
]


@pytest.mark.parametrize("most", [1, 8])
def test_grammars_compile(most: int) -> None:
    guides = Guides(tokenizer(), VOCAB_SIZE)
    guides.check()
    source = grammar([(f"tool-{number}", schema) for number, schema in enumerate(SCHEMAS)], most)
    state = guides.start(Guide.grammar(source), ())
    state.compiled.matcher.result(timeout=60)
    assert state.begin() is None
    text = _call("tool-0", '{"a":1}') + ("\n" + _call("tool-3", r'{"a \"quoted\" \\ {key}":"x\"\\\n/é日"}')) * (
        most > 1
    )
    for byte in text.encode():
        state.advance(byte)
    assert state.done == (most == 1) or state.matcher.is_accepting()
    with pytest.raises(RuntimeError, match="is refused"):
        state.advance(ord("x"))
    guides.close()


# --- through the server -----------------------------------------------------------------------------------------------

CHAT = "/v1/chat/completions"
WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": ["Bern", "Köln"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TIME = {
    "type": "object",
    "properties": {"zone": {"enum": ["a", "b"]}},
    "required": ["zone"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "time", "parameters": TIME}},
]
ASK = {"messages": [{"role": "user", "content": "hi"}], "tools": TOOLS, "tool_choice": "required", "max_tokens": 700}
NAMED = {"tool_choice": {"type": "function", "function": {"name": "time"}}}


@pytest.fixture(scope="module")
def wide() -> Iterator[Server]:
    """A model with room for tools in a prompt of bytes, and for calls in an answer of bytes."""
    with serve(sizes={"max_positions": 2048}, engine={"num_blocks": 512}) as server:
        yield server


@pytest.fixture
def roomy(wide: Server) -> Iterator[Server]:
    yield wide
    wide.idle()


@pytest.mark.parametrize(
    "more", [{"parallel_tool_calls": False}, NAMED, {"logit_bias": {"257": -100}}], ids=["one", "named", "several"]
)
def test_a_model_that_has_to_call_tools_does(
    roomy: Server, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardfuse.serving.server.chat._MOST_CALLS", 3)
    for seed in range(1 if "logit_bias" in more else 2):
        body = {**ASK, **more, "seed": seed}
        (choice,) = roomy.post(CHAT, body).json()["choices"]
        calls = choice["message"]["tool_calls"]
        assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)
        assert len(calls) == (3 if "logit_bias" in more else 1)
        assert len({each["id"] for each in calls}) == len(calls)
        for each in calls:
            arguments = json.loads(each["function"]["arguments"])
            if each["function"]["name"] == "time":
                assert arguments["zone"] in ("a", "b")
            else:
                assert arguments["city"] in ("Bern", "Köln")
                assert 1 <= arguments["days"] <= 9
        if more is NAMED:
            assert [each["function"]["name"] for each in calls] == ["time"]
        assert _streamed(roomy, body) == [(each["function"]["name"], each["function"]["arguments"]) for each in calls]


def _streamed(server: Server, body: dict[str, Any]) -> list[tuple[str, str]]:
    """The calls of a stream: a name, an id and a type once for each, and after that arguments alone."""
    calls: list[tuple[str, str]] = []
    chunks = events(server.post(CHAT, {**body, "stream": True}).text)
    for delta in (chunk["choices"][0]["delta"] for chunk in chunks):
        for each in delta.get("tool_calls", []):
            if each["index"] == len(calls):
                assert each["id"]
                assert each["type"] == "function"
                calls.append((each["function"]["name"], each["function"]["arguments"]))
            else:
                assert each.keys() == {"index", "function"}
                assert each["function"].keys() == {"arguments"}
                assert each["index"] == len(calls) - 1
                calls[-1] = (calls[-1][0], calls[-1][1] + each["function"]["arguments"])
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
    return calls


def test_marks_that_are_added_tokens_are_written_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the tokenizers of Qwen and Hermes; a guide may not spell such a token's text."""
    added = copy.deepcopy(tokenizer())
    added.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in (BEGIN, END)])
    monkeypatch.setattr(server_case, "tokenizer", lambda: added)
    with serve(sizes={"max_positions": 2048, "vocab_size": len(added)}, engine={"num_blocks": 512}) as server:
        made = server.post(CHAT, {**ASK, **NAMED, "return_token_ids": True}).json()["choices"][0]
        (call,) = made["message"]["tool_calls"]
        assert json.loads(call["function"]["arguments"])["zone"] in ("a", "b")
        marks = [added.convert_tokens_to_ids(mark) for mark in (BEGIN, END)]
        assert (made["token_ids"][0], made["token_ids"][-1]) == tuple(marks)


def test_calls_and_results_come_back_to_the_model(roomy: Server) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "time", "arguments": '{"zone": "a"}'}}
    answered = {"role": "assistant", "content": None, "tool_calls": [call], "annotations": None, "audio": None}
    messages = [*ASK["messages"], answered, {"role": "tool", "tool_call_id": "a", "content": "noon"}]  # type: ignore[misc]
    tokens = roomy.post("/tokenize", {"messages": messages, "tools": TOOLS}).json()["tokens"]
    text = roomy.post("/detokenize", {"tokens": tokens}).json()["prompt"]
    assert '<tool_call>\n{"name": "time", "arguments": {"zone": "a"}}\n</tool_call>' in text
    assert "tool: noon" in text
    assert '"name": "weather"' in text
    assert roomy.post(CHAT, {"messages": messages, "tools": TOOLS, "max_tokens": 2}).status_code == 200


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"tool_choice": {"type": "function", "function": {"name": "tide"}}}, "there is no tool 'tide'"),
        ({"tools": None}, "without tools"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "two have the same name"),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs asks for another answer"),
        ({"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "chat_template is the server's own"),
    ],
    ids=["unknown", "none", "twice", "both", "template"],
)
def test_what_cannot_be_is_refused(roomy: Server, more: dict[str, Any], message: str) -> None:
    answer = roomy.post(CHAT, {**ASK, **more})
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]


def test_a_format_of_the_text_has_no_effect_on_a_forced_call(roomy: Server) -> None:
    plain, formatted = (
        roomy.post(CHAT, {**ASK, "temperature": 0, **more}).json()["choices"][0]["message"]["tool_calls"][0]["function"]
        for more in ({}, {"response_format": {"type": "json_object"}})
    )
    assert formatted == plain


def test_a_template_without_tools_refuses_them(roomy: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roomy.served.tokenizer, "chat_template", "{{ messages[0]['content'] }}")
    assert "does not mention tools" in roomy.post(CHAT, ASK).json()["error"]["message"]
    monkeypatch.setattr(roomy.served.tokenizer, "chat_template", None)
    assert "no chat template" in roomy.post(CHAT, ASK).json()["error"]["message"]


@settings(max_examples=30)
@given(st.data())
def test_only_one_call_where_calls_are_not_parallel(data: st.DataObject) -> None:
    """Also of a model that may call as it likes."""
    from shardfuse.serving.request import TokenEvent
    from shardfuse.serving.server.chat import _Message

    message = _Message(ToolParser(), most_calls=1)
    pieces = data.draw(_cut(_call("f", '{"a": 1}') + "\n" + _call("g", '{"b": 2}')))
    found = [each for piece in pieces for each in message.take(TokenEvent(0, 1, text=piece))]
    assert {each.index for each in found} == {0}  # type: ignore[union-attr]
    assert "".join(each.arguments for each in found) == '{"a": 1}'  # type: ignore[union-attr]
