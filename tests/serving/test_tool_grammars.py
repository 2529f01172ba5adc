"""Grammars that make a model write calls: in every format, what they allow is read as calls of their tools."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

pytest.importorskip("llguidance", reason="llguidance is not installed (pip install .[guided])")
pytest.importorskip("transformers", reason="transformers is not installed (pip install .[hf])")
pytest.importorskip("jsonschema_rs", reason="jsonschema-rs is not installed (pip install .[test])")

import jsonschema_rs
import numpy as np
from tokenizers import AddedToken
from tool_case import as_json, named, read

from shardfuse.serving import Guide
from shardfuse.serving.guiding import Guides, fill
from shardfuse.serving.tools import Tool
from shardfuse.testing import tiny_tokenizer

END = 257
LIKED = frozenset(b'"}])<\n/>')  # they end something
NEXT: Any = {"type": "object", "properties": {"next": {"$ref": "#/$defs/n"}}, "additionalProperties": False}
SCHEMAS: list[Any] = [
    {},
    {"type": "object", "properties": {}, "additionalProperties": False},
    {"properties": {'a "q" \\ {key}': {"const": 'x"\\/é日'}}, "required": ['a "q" \\ {key}']},
    {"properties": {"e": {"enum": [1, "two", None, [3]]}, "p": {"type": "string", "pattern": "^[a-z]{2}$"}}},
    {"properties": {"b": {"type": "boolean"}, "c": {"type": "integer"}, "d": {"enum": ["x", "yy"]}}, "required": ["c"]},
    {"$defs": {"n": NEXT}, "$ref": "#/$defs/n"},
    {"$defs": {"n": NEXT}, "properties": {"n": {"$ref": "#/$defs/n"}}, "required": ["n"]},
    {"properties": {"a": {"anyOf": [{"type": "integer", "minimum": 3, "maximum": 5}, {"type": "null"}]}}},
    {
        "properties": {
            "o": {"anyOf": [{"const": "x"}, {"type": "null"}]},
            "e": {"type": ["string", "null"], "enum": ["B"]},
        }
    },
    {"properties": {"e": {"$ref": "#/definitions/e"}}, "definitions": {"e": {"enum": ["x", "y"]}}, "required": ["e"]},
    {"properties": {"b": {"type": "boolean", "const": True}, "l": {"type": ["string", "null"], "maxLength": 1}}},
]
SAMPLES = [
    ("hermes", ""),
    ("llama3", ""),
    ("mistral", ""),
    ("mistral", "[TOOL_CALLS]f[ARGS]{}"),
    ("mistral", "[TOOL_CALLS]f[CALL_ID]abcDEF123[ARGS]{}"),
    ("pythonic", ""),
    ("pythonic", "<|tool_call_start|>[f()]<|tool_call_end|>"),
    ("pythonic", "<function_calls>f()</function_calls>"),
    ("qwen3-coder", ""),
    ("qwen3-coder", "<seed:tool_call>"),
]


def _tokenizer(marks: tuple[str, ...]) -> Any:
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens([AddedToken(each, special=False, normalized=False) for each in marks])
    return tokenizer


@pytest.mark.parametrize("added", [False, True], ids=["spelled", "tokens"])
@pytest.mark.parametrize(("name", "sample"), SAMPLES)
def test_what_a_grammar_allows_are_calls_of_its_tools(name: str, sample: str, added: bool) -> None:
    """The answers of a model that writes at random, but likes to end."""
    of = named(name, sample)
    tokenizer = _tokenizer(of.marks if added else ())
    tools = [Tool(f"tool-{number}", {"additionalProperties": False, **each}) for number, each in enumerate(SCHEMAS)]
    guides = Guides(tokenizer, tokenizer.get_vocab_size())
    rng, complete = random.Random(0), 0
    try:
        for tool in [*tools, None]:
            given = tools if tool is None else [tool]
            source = of.grammar(given, 3, tokenizer.get_vocab())
            for _ in range(2):
                text = _answer(guides, Guide.grammar(source), rng, tokenizer)
                if text is None:  # some text has not ended
                    continue
                complete += 1
                found = read(of, [text], given)
                assert (found.content, found.cut) == ("", False)
                assert 1 <= len(found.calls) <= 3
                for called, arguments in as_json(found.calls):
                    schema = next(each.parameters for each in given if each.name == called)
                    free = "pattern" in json.dumps(schema) or "maxLength" in json.dumps(schema)
                    if name != "qwen3-coder" or not free:  # its texts have no form
                        jsonschema_rs.validate(schema, arguments)
    finally:
        guides.close()
    assert complete > 2 * len(SCHEMAS) // 3


def _answer(guides: Guides, guide: Guide, rng: random.Random, tokenizer: Any) -> str | None:
    state = guides.start(guide, [END])
    state.compiled.matcher.result(timeout=60)
    assert state.begin() is None
    made: list[int] = []
    while not state.done and len(made) < 600:
        allowed = np.flatnonzero(np.unpackbits(fill([state]).numpy().view(np.uint8)[0], bitorder="little"))
        liked = [each for each in allowed if each == END] or [each for each in allowed if each in LIKED]
        made.append(int(rng.choice(liked if liked and rng.random() < 0.8 else allowed)))
        state.advance(made[-1])
    return tokenizer.decode([each for each in made if each != END]) if state.done else None


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ({"properties": {"a>b": {}}}, "with a property 'a>b'"),
        ({"properties": {" a": {}}}, "with a property ' a'"),
        ({"properties": {"": {}}}, "with a property ''"),
        ({"properties": {"a": {"enum": ["x</parameter>y"]}}}, "with the value 'x</parameter>y'"),
        ({"properties": {"a": {}}, "required": ["b"]}, "that requires 'b'"),
        ({"properties": {"a": {}}, "anyOf": []}, "with 'anyOf' outside of its properties"),
        ({"properties": {"a": {"$ref": "#/properties/b"}}}, r"that refers to more than its \$defs"),
    ],
)
def test_what_a_format_cannot_write_is_refused(schema: Any, says: str) -> None:
    with pytest.raises(ValueError, match=f"tools: f has a schema {says}.*calls cannot be forced"):
        named("qwen3-coder").grammar([Tool("f", schema)], 1, {})


@pytest.mark.parametrize(
    "schema",
    [{"properties": {"a": {}}, "required": ["b"]}, {"properties": {"a": {"$ref": "#/properties/a"}}}, {"anyOf": []}],
)
def test_pythons_format_takes_any_schema_as_one_object(schema: Any) -> None:
    assert '"f(" "**"' in named("pythonic").grammar([Tool("f", schema)], 1, {})


def test_a_few_alternatives_of_very_many_are_no_choice() -> None:
    few, many = ({"anyOf": [{"const": f"v{number}"} for number in range(count)]} for count in (3, 1000))
    short, long = (
        named("qwen3-coder").grammar([Tool("f", {"properties": {"a": each}})], 1, {}) for each in (few, many)
    )
    assert '("v2" | "v1" | "v0")' in short
    assert "v0" not in long


def test_a_grammar_has_a_limit() -> None:
    """Where each property needs a schema's definitions by itself."""
    shared = {f"d{number}": {"type": "integer", "description": "x" * 60} for number in range(1000)}
    schema = {"properties": {f"p{number}": {"$ref": "#/$defs/d1"} for number in range(300)}, "$defs": shared}
    for name in ("pythonic", "qwen3-coder"):
        with pytest.raises(ValueError, match="more than 8 MiB in this model's format"):
            named(name).grammar([Tool("f", schema)], 1, {})
    assert len(named("hermes").grammar([Tool("f", schema)], 1, {})) < 1 << 20


def test_mistrals_spelling_is_the_samples() -> None:
    listed, plain, with_id = (
        named("mistral", sample).grammar([Tool("f")], 1, {})
        for sample in ("", "[TOOL_CALLS]f[ARGS]{}", "[TOOL_CALLS]f[CALL_ID]a[ARGS]{}")
    )
    assert ["[ARGS]" in each for each in (listed, plain, with_id)] == [False, True, True]
    assert ["[CALL_ID]" in each for each in (listed, plain, with_id)] == [False, False, True]


def test_marks_that_are_added_tokens_are_written_as_such() -> None:
    """As in the tokenizers of Qwen and Hermes; a guide may not spell such a token's text."""
    of = named("hermes")
    tokenizer = _tokenizer(of.marks)
    guides = Guides(tokenizer, tokenizer.get_vocab_size())
    source = of.grammar([Tool("f", {"additionalProperties": False})], 1, tokenizer.get_vocab())
    state = guides.start(Guide.grammar(source), [END])
    state.compiled.matcher.result(timeout=60)
    assert state.begin() is None
    for token in tokenizer.encode('<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>').ids:
        state.advance(token)
    assert state.done
    guides.close()
