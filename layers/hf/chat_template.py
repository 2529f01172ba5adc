"""The chat template of a tokenizer: the one owner of its source, of rendering, and of what it does with tools."""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

_GENERATION = re.compile(r"{%[-+]?\s*generation\s*[-+]?%}")
_COMMENT = re.compile(r"{#.*?#}", re.DOTALL)
THOUGHTS = {"<think>": "</think>", "[THINK]": "[/THINK]"}  # the marks around a model's thoughts
PROBE_TOOL = "probe_tool"
_PROBE_SCHEMA = {
    "type": "function",
    "function": {
        "name": PROBE_TOOL,
        "description": "A tool.",
        "parameters": {
            "type": "object",
            "properties": {"probe_argument": {"type": "string", "description": "A text."}},
            "required": ["probe_argument"],
        },
    },
}


class Marked(NamedTuple):
    """A chat's ``text``, and the places of its answers, (start, end) in characters."""

    text: str
    answers: list[tuple[int, int]]


class ChatTemplate:
    """The template of ``tokenizer``, one of transformers. It is read where it is used, so one that is set later counts.

    Rendering raises whatever the template raises.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def __bool__(self) -> bool:
        """Whether there is one."""
        return bool(getattr(self._tokenizer, "chat_template", None))

    def replace(self, file: Path) -> None:
        """Take the template in ``file`` instead. Raises OSError."""
        self._tokenizer.chat_template = file.read_text(encoding="utf-8")

    def source(self, tools: Sequence[Any] | None = None) -> str:
        """The template for chats with or without ``tools``. Raises ValueError if there is none for them."""
        return str(self._tokenizer.get_chat_template(tools=None if tools is None else list(tools)))

    @property
    def names_tools(self) -> bool:
        """Whether the model sees tools."""
        try:
            return "tools" in self.source([_PROBE_SCHEMA])
        except ValueError:
            return False

    def marks_answers(self, tools: Sequence[Any] | None = None) -> bool:
        """Whether the template marks answers with ``{% generation %}``."""
        return bool(_GENERATION.search(_COMMENT.sub("", self.source(tools))))

    @property
    def own_arguments(self) -> frozenset[str]:
        """Names that are no variables of the template, since rendering has arguments of these names."""
        return frozenset(inspect.signature(self._tokenizer.apply_chat_template).parameters) | {"messages"}

    def render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None, **more: Any
    ) -> str:
        """The text of a chat. ``more`` are arguments of ``apply_chat_template`` and variables of the template."""
        # As a batch of one, because transformers refuses a single chat without messages.
        [text] = self._tokenizer.apply_chat_template(
            [list(messages)], tools=None if tools is None else list(tools), tokenize=False, **more
        )
        return str(text)

    def render_marked(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> Marked:
        """The text of a chat, and the answers that the template marks in it."""
        # apply_chat_template itself gives marks as tokens only, of one chat at a time, and loses those whose border
        # lies in a character without a token of its own.
        from transformers.utils import chat_template_utils

        render: Any = chat_template_utils.render_jinja_template  # its annotation leaves the marks out
        [text], [marks] = render(
            conversations=[list(messages)],
            tools=None if tools is None else list(tools),
            chat_template=self.source(tools),
            return_assistant_tokens_mask=True,
            **self._tokenizer.special_tokens_map,
        )
        return Marked(text, list(marks))

    @staticmethod
    def begun_thought(prompt: str, said: str = "") -> str:
        """The mark of the thought that a rendered ``prompt`` opens at its end; "" if it does not.

        ``said`` is the content of the message that the answer continues, if it does.
        """
        prompt, said = prompt.rstrip(), said.lstrip()
        begun = (
            each
            for each, end in THOUGHTS.items()
            if prompt.endswith(each) or (said.startswith(each) and end not in said)
        )
        return next(begun, "")

    def sample_call(self) -> str:
        """What the template adds to a chat for a call of PROBE_TOOL; "" if it refuses."""
        call = {"name": PROBE_TOOL, "arguments": {"probe_argument": "probe value"}}
        asked = {"role": "user", "content": "question"}
        called = {"id": "probe0001", "type": "function", "function": call}  # Mistral's templates want nine characters
        for content in ("", None):
            answer = {"role": "assistant", "content": content, "tool_calls": [called]}
            try:
                before = self.render([asked], [_PROBE_SCHEMA])
                after = self.render(copy.deepcopy([asked, answer]), [_PROBE_SCHEMA])
            except Exception:  # noqa: S112 - templates raise any error
                continue
            same = next((at for at, (one, two) in enumerate(zip(before, after)) if one != two), len(before))
            return after[same:]
        return ""
