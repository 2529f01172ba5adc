"""Calls of tools in the text of an answer: by one rule in every format, and however the text is cut."""

from __future__ import annotations

import ast
import json
import sys
from typing import Any

import pytest

pytest.importorskip("transformers", reason="transformers is not installed (pip install .[hf])")

import tool_case as case
from hypothesis import given, settings
from hypothesis import strategies as st
from tool_case import FORMATS, as_json, cuts, named, read, told, tools_of

from shardfuse.serving.tools import Call, Tool
from shardfuse.serving.tools.literals import NotLiteral, value_of
from shardfuse.serving.tools.qwen_coder import types_of

PARTS = [
    *("<tool_call>", "</tool_call>", "<function=f>", "<parameter=a>", "</parameter>", "</function>", "<parameter"),
    *("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>", "<|python_start|>", "<|python_end|>", "```", "`"),
    *("<|tool_call_start|>", "<function_calls>", "</function_calls>", "<think>", "</think>", "[THINK]", "[/THINK]"),
    *('{"name": "f", "arguments": ', '{"arguments": {"a": 1}, "name": "f"}', '{"name": "f", "parameters": {"a": "'),
    *("f(a=", "f(a=1)", "f()", "[f(", "**{", "'", '"""', ")", "]", "[", "{", "}", '"', "\\", ",", ";", ":", "=", ">"),
    *("<", "tool_call>", "\n", " ", "null", "1", "x", "é", "\u2003", "x" * 40),
]


def _text(data: st.DataObject, name: str) -> tuple[str, list[Tool]]:
    """A text of calls and of parts of them, and tools."""
    calls = data.draw(case.CALLS)
    written = st.just(calls).map(lambda each: case.WRITERS[name](each, data.draw))
    text = "".join(data.draw(st.lists(st.sampled_from(PARTS) | st.text(max_size=4) | written, max_size=12)))
    return text, data.draw(st.sampled_from([[], tools_of(calls), [Tool("f")]]))


def _is_of_its_text(data: st.DataObject, name: str) -> None:
    """What is read depends on the text alone, and each piece is told as soon as the text before it tells it."""
    text, tools = _text(data, name)
    of, thought = named(name), data.draw(st.sampled_from(["", "<think>"]))
    whole = read(of, [text], tools, thought)
    assert read(of, data.draw(cuts(text)), tools, thought) == whole
    assert read(of, list(text), tools, thought) == whole
    parser, pieces = of.parser(tools, thought), list[str | Call]()
    for end in range(len(text)):
        pieces += parser.push(text[end])
        begun = of.parser(tools, thought)
        assert told(parser, pieces) == told(begun, begun.push(text[: end + 1]))


@pytest.mark.parametrize("name", FORMATS)
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_what_is_read_depends_on_the_text_alone(name: str, data: st.DataObject) -> None:
    _is_of_its_text(data, name)


@pytest.mark.nightly(seconds=60)
@pytest.mark.parametrize("name", FORMATS)
@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_what_is_read_depends_on_the_text_alone_for_long(name: str, data: st.DataObject) -> None:
    _is_of_its_text(data, name)


@pytest.mark.parametrize("name", FORMATS)
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_calls_are_those_that_were_written(name: str, data: st.DataObject) -> None:
    """With text before and after them, in their order."""
    wanted = data.draw(case.CALLS)
    before = data.draw(st.sampled_from(["", "Let me see.", "a < b [1] {2}", "<think>[f(a=1)] <tool_call></think>"]))
    after = data.draw(st.sampled_from(["", " Done."]))
    written = case.WRITERS[name](wanted, data.draw)
    found = read(named(name), data.draw(cuts(before + "\n" * bool(before) + written + after)), tools_of(wanted))
    assert (found.content, found.cut) == (before + after, False)
    assert _same(as_json(found.calls), wanted)


def _same(found: Any, wanted: Any) -> bool:
    return json.dumps(found) == json.dumps(wanted)


@pytest.mark.parametrize("name", FORMATS)
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_a_cut_answer_is_a_beginning(name: str, data: st.DataObject) -> None:
    """Its calls are the first ones, the last call's arguments are a beginning or marked as cut, and no text is lost."""
    wanted = data.draw(case.CALLS)
    written, tools = case.WRITERS[name](wanted, data.draw), tools_of(wanted)
    text = written[: data.draw(st.integers(0, len(written)))]
    found, whole = read(named(name), [text], tools), read(named(name), [written], tools)
    names = [each for each, _ in found.calls]
    assert names == [each for each, _ in whole.calls][: len(names)]
    complete = found.calls[: len(found.calls) - found.cut]
    assert complete == whole.calls[: len(complete)]
    if not found.calls:
        assert found.content == text


# --- one by one: format, text, content, calls, whether the arguments are cut ------------------------------------------

H = '<tool_call>{"name": "f", "arguments": '
X = "<tool_call>\n<function=f>\n"
ODD: list[tuple[str, str, str, list[tuple[str, str]], bool]] = [
    ("hermes", "no call", "no call", [], False),
    ("hermes", " \n", " \n", [], False),
    ("hermes", "a <tool_ca", "a <tool_ca", [], False),
    ("hermes", "<tool_call> is how it begins", "<tool_call> is how it begins", [], False),
    ("hermes", "a <tool_call>{'name': 'f'}</tool_call>", "a <tool_call>{'name': 'f'}</tool_call>", [], False),
    ("hermes", '<tool_call>{"name": ""}</tool_call>', '<tool_call>{"name": ""}</tool_call>', [], False),
    ("hermes", '<tool_call>{"name": 3}</tool_call>', '<tool_call>{"name": 3}</tool_call>', [], False),
    ("hermes", f'<tool_call>{{"name": "{"n" * 257}"}}', f'<tool_call>{{"name": "{"n" * 257}"}}', [], False),
    ("hermes", '<tool_call>{"name": "no such \\u0066"}</tool_call>', "", [("no such f", "{}")], False),
    ("hermes", '<tool_call>\n{"arguments": {"a": 1}, "name": "f"}\n</tool_call>', "", [("f", '{"a": 1}')], False),
    ("hermes", '<tool_call>{"id": [1, "}"], "name": "f", "arguments": {}}</tool_call>', "", [("f", "{}")], False),
    ("hermes", '<tool_call>{"name": "f", "parameters": {"a":1}, "id": "x"}</tool_call>', "", [("f", '{"a":1}')], False),
    ("hermes", H + "null}</tool_call>", "", [("f", "{}")], False),
    ("hermes", '<tool_call>{"arguments": null, "name": "f"}</tool_call>', "", [("f", "{}")], False),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")], False),
    ("hermes", H + '"{\\"a\\": \\"\\u00e9\\"}"}</tool_call>', "", [("f", '{"a": "é"}')], False),
    ("hermes", '<tool_call>{"arguments": "{}", "name": "f"}</tool_call>', "", [("f", "{}")], False),
    ("hermes", H + '" "}</tool_call>', "", [("f", "{}")], False),
    ("hermes", H + '"{\\"a\\":\n1}"}</tool_call>', "", [("f", '{"a":\n1}')], False),
    ("hermes", H + '"{oops"}</tool_call>', "", [("f", '"{oops"')], False),
    ("hermes", '<tool_call>{"name": "\\ud800"}</tool_call>', '<tool_call>{"name": "\\ud800"}</tool_call>', [], False),
    ("hermes", H + '"Bern"}</tool_call>', "", [("f", '"Bern"')], False),  # no object: as it is written
    ("hermes", H + "[1]}</tool_call>", "", [("f", "[1]")], False),
    ("hermes", H + "12}</tool_call>", "", [("f", "12")], False),
    ("hermes", H + "nonsense}</tool_call>", H + "nonsense}</tool_call>", [], False),  # begins no value
    ("hermes", H + "}</tool_call>", H + "}</tool_call>", [], False),
    ("hermes", H + '{"a": nonsense]}</tool_call> b', " b", [("f", '{"a": nonsense]')], False),
    ("hermes", H + '{"a": nonsense</tool_call>b', "b", [("f", '{"a": nonsense')], False),
    ("hermes", H + '{"a": "</tool_call>"}}</tool_call>', "", [("f", '{"a": "</tool_call>"}')], False),
    ("hermes", H + '{"a": "x\ny"}}</tool_call>', "", [("f", '{"a": "x\ny"}')], False),
    ("hermes", H + '{"a": {"b": [1, ', "", [("f", '{"a": {"b": [1, ')], True),
    ("hermes", H + '"{\\"a', "", [("f", '"{\\"a')], True),
    ("hermes", H + "{}", "", [("f", "{}")], False),  # the arguments are complete
    ("hermes", H + "{}}\n</tool", "", [("f", "{}")], False),
    ("hermes", H + "{}}}}\n</tool_call>", "", [("f", "{}")], False),
    ("hermes", H + "{}} and so on", " and so on", [("f", "{}")], False),
    ("hermes", H + "{}}" + H + '{"a": 1}}</tool_call>', "", [("f", "{}"), ("f", '{"a": 1}')], False),  # a lost end
    ("hermes", "<tool_call>" + H + "{}}</tool_call>", "", [("f", "{}")], False),
    (
        "hermes",
        H[:11] + "[" + H[11:] + "{}}, " + H[11:] + '{"a":1}}]</tool_call>',
        "",
        [("f", "{}"), ("f", '{"a":1}')],
        False,
    ),
    ("hermes", H[:11] + "[" + H[11:] + "{}}, oops]</tool_call>", ", oops]</tool_call>", [("f", "{}")], False),
    ("hermes", f"a\n{H}{{}}}}</tool_call>\nb\n{H}[]}}</tool_call>", "a\nb", [("f", "{}"), ("f", "[]")], False),
    ("hermes", f"Say <tool_call>, then:\n{H}{{}}}}</tool_call>", "Say <tool_call>, then:", [("f", "{}")], False),
    (
        "hermes",
        f"<think>Not {H}{{}}}}</tool_call></think>{H}[]}}",
        f"<think>Not {H}{{}}}}</tool_call></think>",
        [("f", "[]")],
        False,
    ),
    ("hermes", f"<think>{H}{{}}}}</tool_call>", f"<think>{H}{{}}}}</tool_call>", [], False),  # never stops thinking
    ("hermes", f"See <think>: {H}{{}}}}", "See <think>:", [("f", "{}")], False),  # no thought
    ("llama3", '{"name": "f", "parameters": {"a": 1}}', "", [("f", '{"a": 1}')], False),
    ("llama3", '{"name": "f", "parameters": {}} ; {"name": "f", "arguments": {}}', "", [("f", "{}")] * 2, False),
    ("llama3", '<|python_tag|>{"type": "function", "name": "f", "parameters": {}}', "", [("f", "{}")], False),
    ("llama3", '<|python_start|><|python_end|>{"name": "f"}', "", [("f", "{}")], False),
    ("llama3", '{"name": "other", "parameters": {}}', '{"name": "other", "parameters": {}}', [], False),  # no tool's
    ("llama3", '{"answer": {"name": "f"}}', '{"answer": {"name": "f"}}', [], False),  # an answer in JSON
    ("llama3", '```\n{"name": "f"}\n```\n{"name": "f"}', '```\n{"name": "f"}\n```', [("f", "{}")], False),
    ("llama3", 'Write `{"name": "f"}`.', 'Write `{"name": "f"}`.', [], False),
    ("llama3", 'Now: {"name": "f"} Well?', "Now: Well?", [("f", "{}")], False),
    ("llama3", "<|python_tag|>print(1)", "<|python_tag|>print(1)", [], False),
    ("llama3", '{"name": "f", "parameters": {"a": "b', "", [("f", '{"a": "b')], True),
    ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}, "id": "x"}]', "", [("f", '{"a": 1}')], False),
    ("mistral", '[TOOL_CALLS]f{"a": 1}[TOOL_CALLS]g[ARGS]{}', "", [("f", '{"a": 1}'), ("g", "{}")], False),
    (
        "mistral",
        '[TOOL_CALLS]f[CALL_ID]a1B2c3D4e[ARGS]{"a": "[TOOL_CALLS]"} b',
        " b",
        [("f", '{"a": "[TOOL_CALLS]"}')],
        False,
    ),
    ("mistral", "[TOOL_CALLS]f[TOOL_CALLS]f[ARGS]", "", [("f", "{}"), ("f", "{}")], False),
    ("mistral", "[TOOL_CALLS]no", "[TOOL_CALLS]no", [], False),
    ("mistral", '[TOOL_CALLS]{"a": 1}', '[TOOL_CALLS]{"a": 1}', [], False),  # of no name
    ("mistral", '[TOOL_CALLS] [TOOL_CALLS] {"name": "f"}', "", [("f", "{}")], False),
    ("mistral", '[TOOL_CALLS]f{"a": x[TOOL_CALLS]g{}', "", [("f", '{"a": x'), ("g", "{}")], False),
    ("mistral", '[THINK]f[TOOL_CALLS][/THINK][TOOL_CALLS]f{"a', "[THINK]f[TOOL_CALLS][/THINK]", [("f", '{"a')], True),
    ("pythonic", "[f(a=1, b='x\\n'), g()]", ", g()]", [("f", '{"a": 1, "b": "x\\n"}')], False),  # g is no tool
    (
        "pythonic",
        "[f(a=[True, None, -1.5, {'b': (1, 2)}], b={1, 2})]",
        "",
        [("f", '{"a": [true, null, -1.5, {"b": [1, 2]}], "b": [1, 2]}')],
        False,
    ),
    (
        "pythonic",
        '[f(a=true, b={"c": null}, **{"d": 1}, **{})]',
        "",
        [("f", '{"a": true, "b": {"c": null}, "d": 1}')],
        False,
    ),
    ("pythonic", '[f(a="""x, \')""", b=\'it\\\'s\')]', "", [("f", '{"a": "x, \')", "b": "it\'s"}')], False),
    ("pythonic", "[f(a=g(1, 2), b=2)]", "", [("f", '{"a": g(1, 2), "b": 2}')], False),  # no literal
    ("pythonic", "[f(a=1, 2)]", "", [("f", '{"a": 1, 2}')], False),
    ("pythonic", "[f(**{'a': 1, 'b", "", [("f", "{'a': 1, 'b")], True),
    ("pythonic", "[f(a=1, **more)]", "", [("f", '{"a": 1, more}')], False),
    ("pythonic", "[f(a=007, b={'x': 1, 2})]", "", [("f", '{"a": 007, "b": {\'x\': 1, 2}}')], False),
    ("pythonic", "[f(1)]", "[f(1)]", [], False),
    ("pythonic", "[f]", "[f]", [], False),
    ("pythonic", "see [f()](url) `[f()]`", "see(url) `[f()]`", [("f", "{}")], False),
    (
        "pythonic",
        "<function_calls>f(a=1)\nx(b=2)</function_calls> b",
        " b",
        [("f", '{"a": 1}'), ("x", '{"b": 2}')],
        False,
    ),
    (
        "pythonic",
        "<|tool_call_start|>\n```python\nf(a=1)\n```\n<|tool_call_end|>\nb",
        "\nb",
        [("f", '{"a": 1}')],
        False,
    ),
    ("pythonic", "[f(a=1, b='x", "", [("f", '{"a": 1, "b": \'x')], True),
    ("pythonic", "[f(a=1", "", [("f", '{"a": 1')], True),
    ("pythonic", "[f(a=1)", "", [("f", '{"a": 1}')], False),
    (
        "qwen3-coder",
        X + "<parameter=a>\n<b>\n\n</parameter>\n</function>\n</tool_call>",
        "",
        [("f", '{"a": "<b>\\n"}')],
        False,
    ),
    (
        "qwen3-coder",
        X + "<parameter=a>x</parameter><parameter=n>5</parameter></function></tool_call>",
        "",
        [("f", '{"a": "x", "n": 5}')],
        False,
    ),
    ("qwen3-coder", X + "<parameter=a>\nx\n<parameter=n>\n5\n</function>", "", [("f", '{"a": "x", "n": 5}')], False),
    ("qwen3-coder", X + "</function></tool_call>", "", [("f", "{}")], False),
    ("qwen3-coder", "<function=f>\n</function> b", " b", [("f", "{}")], False),
    ("qwen3-coder", "<function=no>\n</function>", "<function=no>\n</function>", [], False),
    ("qwen3-coder", X + "<parameter=a>\nx\n</param", "", [("f", '{"a": "x')], True),
    ("qwen3-coder", X + "<parameter=n>\n5", "", [("f", '{"n": 5')], True),
    ("qwen3-coder", X + "<parameter=n>\n5\n</parameter>\n", "", [("f", '{"n": 5')], True),
    ("qwen3-coder", X + "oops</function>", "\noops</function>", [("f", "{}")], False),
    ("qwen3-coder", H + '{"n": "5"}}</tool_call>', "", [("f", '{"n": "5"}')], False),
    ("qwen3-coder", "<seed:tool_call><function=f></function></seed:tool_call>", "", [("f", "{}")], False),
]
PROPERTIES = {"a": {"type": "string"}, "n": {"type": "integer"}}
TOOL = Tool("f", {"type": "object", "properties": PROPERTIES})


@pytest.mark.parametrize(("name", "text", "content", "calls", "cut"), ODD, ids=range(len(ODD)))
def test_odd_texts(name: str, text: str, content: str, calls: list[tuple[str, str]], cut: bool) -> None:
    assert read(named(name), [text], [TOOL]) == (content, calls, cut)


@pytest.mark.parametrize(
    ("schema", "written", "value"),
    [
        ({"type": "string"}, "5", "5"),
        ({"type": "str"}, "5", "5"),
        ({"type": "string"}, "null", "null"),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": "string", "nullable": True}, "None", None),
        ({"type": "integer"}, " 5 ", 5),
        ({"type": "integer"}, "5.0", 5),
        ({"type": "integer"}, "five", "five"),
        ({"type": "number"}, "5.50", 5.5),
        ({"type": "number"}, "1e999", "1e999"),
        ({"type": "number"}, "NaN", "NaN"),
        ({"type": "boolean"}, "True", True),
        ({"type": "boolean"}, "0", False),
        ({"type": ["integer", "string"]}, "42", 42),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "8080", "8080"),
        ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, "x y", "x y"),
        ({"enum": [1, "x"]}, "1", 1),
        ({"const": True}, "true", True),
        ({"$ref": "#/$defs/list"}, "[1, 'a', None]", [1, "a", None]),
        ({"type": "object"}, '{"a": {"b": "\\u00e9"}}', {"a": {"b": "é"}}),
        ({"type": "object"}, "{'a': True}", {"a": True}),
        ({"type": "object"}, "[1]", "[1]"),
        ({"type": "array"}, "__import__('os')", "__import__('os')"),
        ({"type": "array"}, "[" * 5000, "[" * 5000),
        ({"type": "object"}, "{'a': 1e999}", "{'a': 1e999}"),
        ({"type": ["integer", "boolean"]}, "1", 1),
        ({"type": "integer"}, "007", "007"),
        ({"$ref": "#/$defs/1"}, "5", 5),
        ({"$ref": "#/$defs/a~1b~0c"}, "5", "5"),
        ({}, '{"a": 1}', {"a": 1}),
        ({}, '"quoted"', '"quoted"'),
        (True, "7", 7),
        ({"type": "interval"}, "7", 7),
    ],
)
def test_a_text_becomes_the_value_of_its_type(schema: Any, written: str, value: Any) -> None:
    chain = {str(number): {"anyOf": [{"$ref": f"#/$defs/{number + 1}"}]} for number in range(1, 9)}
    others = {"list": {"type": "array"}, "9": {"type": "integer"}, "a/b~c": {"type": "string"}}
    whole = {"properties": {"v": schema}}
    tool = Tool("f", {"$ref": "#/$defs/whole", "$defs": {"whole": whole, **chain, **others}})
    text = f"{X}<parameter=v>\n{written}\n</parameter>\n</function>\n</tool_call>"
    assert as_json(read(named("qwen3-coder"), [text], [tool]).calls) == [("f", {"v": value})]


def test_pieces_come_as_soon_as_they_are_certain() -> None:
    parser = named("hermes").parser([])
    assert parser.push("Well <") == ["Well"]
    assert parser.push("b") == [" <b"]
    assert parser.push('<tool_call>{"name": "f", "arguments": {"a": "b') == [
        Call(0, "f", ""),
        Call(0, None, '{"a": "b'),
    ]
    coder = named("qwen3-coder").parser([TOOL])
    assert coder.push(f'{X}<parameter=a>\nx"y') == [Call(0, "f", ""), Call(0, None, '{"a": "x\\"y')]


LONG = {
    "hermes": [
        "<tool_call>",
        '<tool_call>{":":',
        '<tool_call>{","',
        '<tool_call>{"arguments":{',
        "<tool_call>[",
        "<",
        '{"name":"f"',
    ],
    "llama3": [
        '{"arguments":',
        '{"a":',
        "[",
        '{"name": "f"',
        '{"name": "f", "parameters": {}};',
        "<|python_tag|>",
        "`",
    ],
    "mistral": ["[TOOL_CALLS]", '[TOOL_CALLS] [{"arguments":', "[", "[TOOL_CALLS]f", '[TOOL_CALLS]f{"a"'],
    "pythonic": ["[f(", "[f(a=", "[f(a='", "[f(a=[", "[", "<function_calls>", "[f(a=1),", "[f()"],
    "qwen3-coder": [
        "<tool_call>",
        X,
        X + "<parameter=a>\n",
        "<function=f>",
        "\n",
        "</parameter",
        '<tool_call>{"arguments":[',
    ],
}


def test_alternatives_that_refer_to_themselves_are_read_once() -> None:
    many = {"anyOf": [{"$ref": "#/$defs/a"}] * 30 + [{"type": "integer"}]}
    assert types_of({"properties": {"v": many}, "$defs": {"a": many}}, "v") == {"integer"}
    wide = {"anyOf": [{"const": 1}, *[5] * 100_000]}  # and few of very many
    assert types_of({"properties": {"v": wide}}, "v") == set()


PYTHONS = [
    *("1", "-1.5e3", "0x1F", ".5", "'a'", '"a\\"b"', "'''x'\ny'''", r"'\x41'", "(1)", "(1,)", "()", "('a')"),
    *("[1, [2], ]", "{'a': (1, 2), 'b': {'c': None}}", "{}", "'a\\\nb'", r"'\u00e9'", "True", "[]", "-0.0"),
]


@pytest.mark.parametrize("source", PYTHONS)
def test_literals_are_pythons(source: str) -> None:
    assert json.dumps(value_of(source)) == json.dumps(ast.literal_eval(source))


@pytest.mark.parametrize(
    ("source", "value"), [("{1, 2}", [1, 2]), (r'"\/\ud83d\ude00"', "/😀"), ("'a\nb'", "a\nb"), ("null", None)]
)
def test_literals_beyond_pythons(source: str, value: Any) -> None:
    """Sets, JSON's escapes and names, and line breaks, which models write."""
    assert value_of(source) == value


WRONG = [
    "007",
    "1 2",
    "1.2.3",
    "\uff11\uff12",
    "{'a': 1, 2}",
    "{1: 2}",
    "f'a'",
    "b'a'",
    "g()",
    "x",
    "[1",
    "--1",
    "1_000",
    "'a",
    "",
]


@pytest.mark.parametrize("source", [*WRONG, "[" * 100 + "]" * 100, "(" * 100_000], ids=range(len(WRONG) + 2))
def test_what_is_no_literal_is_refused(source: str) -> None:
    with pytest.raises(NotLiteral):
        value_of(source)


REPEATED = [(name, each, "") for name, texts in LONG.items() for each in texts] + [
    ("hermes", '<tool_call>{"a":[\\"', ""),
    ("qwen3-coder", '<tool_call>{"a":[\\"', ""),
    ("mistral", '[TOOL_CALLS]{"a":[\\"', ""),
    ("llama3", '{"name":"f","parameters":{},"x":[', "]!}"),
    ("llama3", '[{"name":"f"},{"x":', "}]"),
    ("hermes", '<tool_call>[{"name":"f"},{"x":"', '"}'),
]


@pytest.mark.parametrize(("name", "scrap", "tail"), REPEATED)
@pytest.mark.parametrize("begun", ["", '<tool_call>{"arguments": ["', '[TOOL_CALLS]f{"a": "', "[f(a=1, b='"])
@pytest.mark.parametrize("size", [1, 1 << 20], ids=["by letters", "at once"])
def test_the_work_is_linear_in_the_text(name: str, scrap: str, tail: str, begun: str, size: int) -> None:
    """Counted in calls of Python's functions, of which no clock tells the time."""
    few, many = (_work(name, begun + scrap * count + tail * count, size) for count in (50, 200))
    assert many < 5 * few + 200


def _work(name: str, text: str, size: int) -> int:
    counted = 0

    def count(*_: object) -> None:
        nonlocal counted
        counted += 1

    parser = named(name).parser([TOOL])
    before = sys.getprofile()
    sys.setprofile(count)
    try:
        for at in range(0, len(text), size):
            parser.push(text[at : at + size])
        parser.flush()
    finally:
        sys.setprofile(before)
    return counted


@pytest.mark.parametrize("name", FORMATS)
def test_little_text_is_kept(name: str) -> None:
    """What was told is not kept, however long an answer is."""
    parser = named(name).parser([TOOL])
    for scrap in (
        "abcd <b> [1] ",
        '<tool_call>{"name": "f", "arguments": {"a": "',
        "x" * 100,
        X,
        "<parameter=a>",
        "xyz",
    ):
        for _ in range(500):
            parser.push(scrap)
            assert len(parser._text.held) < 200  # type: ignore[attr-defined]
