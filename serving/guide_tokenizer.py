"""The tokenizer for guides: it spells a guide's text with ordinary tokens, even text that is an added token's.

llguidance takes special tokens, and all added ones with a name such as ``<tool_call>``, for no text. But where a
guide's text contains such a name, tokenizers encode it as that token, which llguidance then refuses. So in the copy for
guides these tokens have names that no text contains; :func:`by_number` lets grammars name them as before.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from typing import Any

_NO_TEXT = "\U0010ffff"  # a noncharacter, which text for interchange does not contain (Unicode, section 23.7)
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")  # sentencepiece's tokens of single bytes
_ADDED = '"added_tokens":'
# What a grammar in Lark is read for: comments, the beginnings of texts and patterns, and names.
_IN_LARK = re.compile(r"""//[^\n]*|["/]|(?P<name><[^<>\s]+>)""")
# The inside of a text or a pattern. A match is bounded, because Python remembers every repetition until its end.
_INSIDE = {
    '"': re.compile(r"""[^"\\\n]*(?:\\.[^"\\\n]*){0,4096}""", re.DOTALL),
    "/": re.compile(r"""[^/\\]*(?:\\.[^/\\]*){0,4096}""", re.DOTALL),
}


def spelling(tokenizer: str) -> tuple[str, dict[str, int]]:
    """``tokenizer``, the JSON of a tokenizers.Tokenizer, without added tokens in its text, and these tokens' numbers.

    A token keeps its name if the model's merges make it, or make others of it.
    """
    start = tokenizer.index(_ADDED) + len(_ADDED)
    added, end = json.JSONDecoder().raw_decode(tokenizer, start)
    found = {each["content"]: each for each in added if _no_text(each)}
    rest = tokenizer[end:]
    if any(json.dumps(name, ensure_ascii=False) in rest for name in found):  # the model's vocabulary has it
        parts = json.loads("{" + rest.lstrip().removeprefix(","))
        _rename(parts["model"], found)
        rest = "," + json.dumps(parts).removeprefix("{")
    if not found:
        return tokenizer, {}
    numbers = {name: each["id"] for name, each in found.items()}
    for each in found.values():
        each.update(content=_NO_TEXT + each["content"], special=True)
    return tokenizer[:start] + json.dumps(added) + rest, numbers


def by_number(lark: str, numbers: Mapping[str, int]) -> str:
    """The grammar ``lark`` with llguidance's ``<[number]>`` in the place of tokens' names."""
    parts, copied, at = [], 0, 0
    while (found := _IN_LARK.search(lark, at)) is not None:
        at = found.end()
        if found[0] in _INSIDE:
            at = _end_of(lark, at, found[0])
        elif found["name"] in numbers:
            parts += [lark[copied : found.start()], f"<[{numbers[found['name']]}]>"]
            copied = at
    return "".join([*parts, lark[copied:]])


def _end_of(lark: str, at: int, mark: str) -> int:
    """Where the text or pattern whose inside begins ``at`` ends: behind its ``mark``, if it has one."""
    while (inside := _INSIDE[mark].match(lark, at)) is not None and inside.end() > at:
        at = inside.end()
    return at + lark.startswith(mark, at)


def _no_text(token: Mapping[str, Any]) -> bool:
    """Whether llguidance takes an added token for no text; one of a single letter may be needed to spell others."""
    name: str = token["content"]
    named = name.startswith("<") and name.endswith(">") and not _BYTE.fullmatch(name)
    return len(name) > 1 and bool(token["special"] or named)


def _rename(model: dict[str, Any], found: dict[str, Any]) -> None:
    """Rename the tokens of ``found`` in a model's vocabulary, and drop those from it that merges need."""
    for merge in model.get("merges") or ():
        left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
        for name in (left, right, left + right):
            found.pop(name, None)
    vocabulary = model.get("vocab")
    if isinstance(vocabulary, dict):
        model["vocab"] = {_renamed(name, found): number for name, number in vocabulary.items()}
    elif vocabulary is not None:  # of a unigram model, with scores
        model["vocab"] = [[_renamed(name, found), *rest] for name, *rest in vocabulary]
    if model.get("unk_token") is not None:
        model["unk_token"] = _renamed(model["unk_token"], found)


def _renamed(name: str, found: Collection[str]) -> str:
    return _NO_TEXT + name if name in found else name
