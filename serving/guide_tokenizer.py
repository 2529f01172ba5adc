"""The tokenizer for guides: it spells a guide's text with ordinary tokens, even text that is an added token's.

llguidance takes special tokens, and all added ones with a name such as ``<tool_call>``, for no text. But where a
guide's text contains such a name, tokenizers encode it as that token, which llguidance then refuses. So in the copy for
guides these tokens have names that no text contains; :func:`by_number` lets grammars name them as before.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

_NO_TEXT = "\U0010ffff"  # a noncharacter, which text for interchange does not contain (Unicode, section 23.7)
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")  # sentencepiece's tokens of single bytes
_IN_LARK = re.compile(r'//[^\n]*|"(?:[^"\\\n]|\\.)*"|/(?:[^/\\\n]|\\.)*/|(?P<name><[^<>\s]+>)')


def spelling(tokenizer: str) -> tuple[str, dict[str, int]]:
    """``tokenizer``, the JSON of a tokenizers.Tokenizer, without added tokens in its text, and these tokens' numbers.

    A token that the model's merges can make keeps its name.
    """
    parts: dict[str, Any] = json.loads(tokenizer)
    found = {each["content"]: each for each in parts["added_tokens"] if _no_text(each)}
    model = parts["model"]
    for merge in model.get("merges") or ():
        found.pop("".join(merge.split(" ") if isinstance(merge, str) else merge), None)
    if not found:
        return tokenizer, {}
    numbers = {name: each["id"] for name, each in found.items()}
    for each in found.values():
        each.update(content=_NO_TEXT + each["content"], special=True)
    vocabulary = model.get("vocab")
    if isinstance(vocabulary, dict):
        model["vocab"] = {_renamed(name, found): number for name, number in vocabulary.items()}
    elif vocabulary is not None:  # of a unigram model, with scores
        model["vocab"] = [[_renamed(name, found), *rest] for name, *rest in vocabulary]
    if model.get("unk_token") is not None:
        model["unk_token"] = _renamed(model["unk_token"], found)
    parts["post_processor"] = None  # it names tokens, and a guide's text has none around it
    return json.dumps(parts), numbers


def by_number(lark: str, numbers: Mapping[str, int]) -> str:
    """The grammar ``lark`` with llguidance's ``<[number]>`` in the place of tokens' names."""

    def number(found: re.Match[str]) -> str:
        name = found["name"]
        return f"<[{numbers[name]}]>" if name in numbers else found[0]

    return _IN_LARK.sub(number, lark)


def _no_text(token: Mapping[str, Any]) -> bool:
    """Whether llguidance takes an added token for no text."""
    name: str = token["content"]
    return bool(token["special"] or (name.startswith("<") and name.endswith(">") and not _BYTE.fullmatch(name)))


def _renamed(name: str, found: Mapping[str, Any]) -> str:
    return _NO_TEXT + name if name in found else name
