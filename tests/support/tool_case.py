"""Calls of tools as models write them, in every format, and what a parser reads."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from hypothesis import strategies as st

from shardfuse.serving.tools import Call, Tool, ToolFormat, ToolParser, tool_format

FORMATS = ["hermes", "llama3", "mistral", "pythonic", "qwen3-coder"]
ANY: dict[str, Any] = {"type": "object", "properties": {}}
NAMES = ["f", "get-it", "a_9"]


class Told(NamedTuple):
    """An answer: its content, the name and the arguments of each call, and whether it ends within the last ones."""

    content: str
    calls: list[tuple[str, str]]
    cut: bool


def told(parser: ToolParser, pieces: Iterable[str | Call]) -> Told:
    """What ``pieces`` are together. A call's pieces have its index, and its name comes first."""
    content, calls = "", list[tuple[str, str]]()
    for piece in pieces:
        if isinstance(piece, str):
            assert piece
            content += piece
        elif piece.name is not None:
            assert piece.index == len(calls)
            calls.append((piece.name, piece.arguments))
        else:
            assert piece.index == len(calls) - 1
            assert piece.arguments
            calls[-1] = (calls[-1][0], calls[-1][1] + piece.arguments)
    return Told(content, calls, parser.cut)


def read(of: ToolFormat, pieces: Sequence[str], tools: Sequence[Tool] = (), thought: str = "") -> Told:
    parser = of.parser(tools, thought)
    found = told(parser, [*(each for text in pieces for each in parser.push(text)), *parser.flush()])
    assert parser.calls == len(found.calls)
    return found


# --- writing calls ----------------------------------------------------------------------------------------------------

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
KEYS = st.from_regex(re.compile(r"[a-z_][a-z0-9_]{0,6}", re.ASCII), fullmatch=True)
OBJECTS = st.dictionaries(KEYS, VALUES | st.text("a\"\\{}[]<>é日 \n'`,)", max_size=6), max_size=4)
CALLS = st.lists(st.tuples(st.sampled_from(NAMES), OBJECTS), min_size=1, max_size=3)
Calls = list[tuple[str, dict[str, Any]]]


def tools_of(calls: Calls) -> list[Tool]:
    """Tools with the types that ``calls`` need: one tool for each name, and one type for each key of it."""
    tools: dict[str, dict[str, Any]] = {}
    for name, arguments in calls:
        for key, value in arguments.items():
            kinds = tools.setdefault(name, {}).setdefault(key, {"type": []})["type"]
            kinds.append(_kind(value))
        tools.setdefault(name, {})
    return [Tool(name, {"type": "object", "properties": keys}) for name, keys in tools.items()]


def _kind(value: Any) -> str:
    kinds = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    return kinds.get(type(value), "null")


def _objects(calls: Calls, key: str, name_first: bool, ascii_only: bool) -> list[str]:
    found = []
    for name, arguments in calls:
        members = {"name": name, key: arguments}
        ordered = members if name_first else dict(reversed(list(members.items())))
        found.append(json.dumps(ordered, ensure_ascii=ascii_only))
    return found


def hermes(calls: Calls, draw: Callable[[Any], Any]) -> str:
    objects = _objects(
        calls, draw(st.sampled_from(["arguments", "parameters"])), draw(st.booleans()), draw(st.booleans())
    )
    if draw(st.booleans()):
        return f"<tool_call>[{', '.join(objects)}]</tool_call>"
    line = draw(st.sampled_from(["\n", ""]))
    return line.join(f"<tool_call>{line}{each}{line}</tool_call>" for each in objects)


def llama3(calls: Calls, draw: Callable[[Any], Any]) -> str:
    objects = _objects(calls, "parameters", draw(st.booleans()), draw(st.booleans()))
    return draw(st.sampled_from(["", "<|python_tag|>"])) + draw(st.sampled_from(["; ", ";", "\n", ", "])).join(objects)


def mistral(calls: Calls, draw: Callable[[Any], Any]) -> str:
    if draw(st.booleans()):
        objects = _objects(calls, "arguments", draw(st.booleans()), draw(st.booleans()))
        return f"[TOOL_CALLS]{draw(st.sampled_from(['', ' ']))}[{', '.join(objects)}]"
    between = draw(st.sampled_from(["", "[ARGS]", "[CALL_ID]abcDEF123[ARGS]"]))
    return "".join(f"[TOOL_CALLS]{name}{between}{json.dumps(arguments)}" for name, arguments in calls)


def pythonic(calls: Calls, draw: Callable[[Any], Any]) -> str:
    literal = draw(st.sampled_from([repr, json.dumps]))
    written = [f"{name}({', '.join(f'{key}={literal(value)}' for key, value in of.items())})" for name, of in calls]
    begin, end = draw(
        st.sampled_from(
            [("", ""), ("<|python_start|>", "<|python_end|>"), ("<|tool_call_start|>", "<|tool_call_end|>")]
        )
    )
    if not begin or draw(st.booleans()):
        return f"{begin}[{', '.join(written)}]{end}"
    return begin + "\n".join(written) + end


def qwen_coder(calls: Calls, draw: Callable[[Any], Any]) -> str:
    ended = draw(st.booleans())
    found = []
    for name, arguments in calls:
        elements = "".join(
            f"<parameter={key}>\n{value if isinstance(value, str) else json.dumps(value)}\n" + "</parameter>\n" * ended
            for key, value in arguments.items()
        )
        found.append(f"<tool_call>\n<function={name}>\n{elements}</function>\n</tool_call>")
    return "\n".join(found)


WRITERS = {"hermes": hermes, "llama3": llama3, "mistral": mistral, "pythonic": pythonic, "qwen3-coder": qwen_coder}


@st.composite
def cuts(draw: st.DrawFn, text: str) -> list[str]:
    at = sorted(draw(st.lists(st.integers(0, len(text)), max_size=8)))
    return [text[start:end] for start, end in zip([0, *at], [*at, len(text)])]


def as_json(calls: Sequence[tuple[str, str]]) -> Calls:
    return [(name, json.loads(arguments)) for name, arguments in calls]


def named(name: str, sample: str = "") -> ToolFormat:
    """The format called ``name``, in the spelling of ``sample``."""
    return type(tool_format(name))(sample)
