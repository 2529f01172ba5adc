"""How a model's chats are written and read: its template, its format for calls of tools, and the marks in its answers.

The server and :meth:`Engine.chat` share this module.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ..layers.hf.chat_template import THOUGHTS, ChatTemplate
from .request import TokenSet
from .tools import Call, ToolParser, format_of, tool_format


class ChatFormat:
    """The format of chats with the model of ``tokenizer``, one of transformers.

    Args:
        vocab_size: the model's; tokens beyond it never come.
        stop_ids: tokens that end an answer, which no text shows.
        tool_call_parser: the name of the format of calls; ``"auto"``: the one that the template shows, else Hermes's.

    Raises ValueError for an unknown format of calls.
    """

    def __init__(
        self, tokenizer: Any, vocab_size: int, stop_ids: Collection[int] = (), tool_call_parser: str = "auto"
    ) -> None:
        self.template = ChatTemplate(tokenizer)
        self._tokenizer, self._vocab_size, self._stop_ids = tokenizer, vocab_size, frozenset(stop_ids)
        self._shown = format_of(self.template)  # by the template
        name = (self._shown or "hermes") if tool_call_parser == "auto" else tool_call_parser
        self.tools = tool_format(name, self.template)

    def words(self) -> str:
        """How calls of tools are read, in words; "" if the model never sees tools."""
        if not self.template or not self.template.names_tools:
            return ""
        said = f"calls of tools are read in the format {self.tools.name}"
        if self._shown is None:
            return f"{said}, because the chat template shows none (--tool-call-parser sets it)"
        if self._shown != self.tools.name:
            return f"warning: {said}, and the chat template writes them in {self._shown}"
        return f"{said}, that of the chat template"

    @functools.cached_property
    def added_tokens(self) -> dict[str, int]:
        """The numbers of the tokenizer's added tokens that the model has."""
        found: dict[str, int] = self._tokenizer.get_added_vocab()
        return {text: token for text, token in found.items() if token < self._vocab_size}

    @functools.cached_property
    def marks(self) -> TokenSet:
        """The tokens by which calls of tools and thoughts are found, and which the text of an answer therefore has."""
        marks = (*self.tools.marks, *THOUGHTS, *THOUGHTS.values())
        return TokenSet({self.added_tokens[each] for each in marks if each in self.added_tokens} - self._stop_ids)

    @functools.cached_property
    def hidden_marks(self) -> list[str]:
        """The marks of thoughts that are special tokens, which content does not show."""
        special = set(self._tokenizer.all_special_tokens)
        special |= {each.content for each in self._tokenizer.added_tokens_decoder.values() if each.special}
        return [each for each in (*THOUGHTS, *THOUGHTS.values()) if each in special]


class AnswerReader:
    """Splits the text of one answer into content and calls of tools, as it arrives.

    Args:
        parser: a new one of the format; None: no tool can be called, and all is content.
        hidden: marks that content does not show.
        most_calls: later calls are left out; None: no limit.
    """

    def __init__(self, parser: ToolParser | None, hidden: Sequence[str] = (), most_calls: int | None = None) -> None:
        self._parser, self._hidden, self._most_calls = parser, hidden, most_calls

    def take(self, text: str, ended: bool) -> list[str | Call]:
        """The new pieces of content and of calls."""
        if self._parser is None:
            return [text] if text else []
        found: list[str | Call] = []
        for piece in [*self._parser.push(text), *(self._parser.flush() if ended else ())]:
            if not isinstance(piece, str):
                found += [piece] if self._most_calls is None or piece.index < self._most_calls else []
            elif shown := functools.reduce(lambda rest, mark: rest.replace(mark, ""), self._hidden, piece):
                found.append(shown)
        return found

    def finish(self, why: str | None) -> str | None:
        """The finish reason in OpenAI's terms: ``why`` also of an answer that ends within a call's arguments."""
        if why != "stop" or self._parser is None or not self._parser.calls:
            return why
        shown = self._most_calls is None or self._parser.calls <= self._most_calls
        return why if self._parser.cut and shown else "tool_calls"


def for_template(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message of OpenAI's form in templates' form: text in one piece, and arguments of calls as an object."""
    plain = dict(message)
    if not isinstance(content := plain.get("content"), str):
        plain["content"] = "".join(part["text"] for part in content or ())
    if plain.get("tool_calls"):
        plain["tool_calls"] = [_call_for_template(call) for call in plain["tool_calls"]]
    return plain


def _call_for_template(call: Mapping[str, Any]) -> dict[str, Any]:
    function = dict(call["function"])
    if isinstance(given := function.get("arguments"), str):
        with contextlib.suppress(ValueError):  # what is no JSON stays text
            function["arguments"] = json.loads(given)
    return {**call, "function": function}
