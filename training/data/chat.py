"""Chats as text: the messages of a record through a tokenizer's chat template, and where the answers stand in it."""

from __future__ import annotations

import json
import reprlib
from typing import Any, NamedTuple

from ...layers.hf.chat_template import ChatTemplate
from .items import RecordError

_EXCERPT = 60  # characters of the user's data in an error
_WORDS = 160  # characters of another library's error
_FIRST = "begin the chat with a system or user message, "
_REMEDY = (
    "train on the last answer only (as `prompt` and `completion`), use a chat template that marks the answers with "
    '{% generation %}, or set data.train_on = "all"'
)
SHAREGPT = (
    "rename `conversations` to `messages`, `from` to `role` (human: user, gpt: assistant) and `value` to `content`"
)


class Span(NamedTuple):
    """The characters ``start`` to ``end`` of a text, which the loss counts; ``of`` is what they are, in words."""

    start: int
    end: int
    of: str


class Rendered(NamedTuple):
    """A chat's ``text``, and its answers' places in it."""

    text: str
    answers: list[Span]


def shown(value: object, limit: int = _EXCERPT) -> str:
    """The repr of ``value``, cut to ``limit`` characters."""
    text = repr(value[:limit]) if isinstance(value, str) else reprlib.repr(value)
    cut = len(text) > limit or (isinstance(value, str) and len(value) > limit)
    return f"{text[: limit - 1]}…" if cut else text


def words_of(error: BaseException) -> str:
    """An error's message in one short line that can be printed, or its type where it has none."""
    words = " ".join(str(error).split()).encode("utf-8", "backslashreplace").decode()
    words = words or type(error).__name__
    return words if len(words) <= _WORDS else f"{words[: _WORDS - 1]}…"


def messages_of(value: object, key: str) -> list[dict[str, Any]]:
    """The messages of a record's column ``key``, checked, without the keys whose value is None at any depth.

    Arrow and parquet fill in None wherever a row lacks a key that another row has; templates take a key that is there
    for one that is meant. Raises RecordError that names the message, counted from 1.
    """
    if not isinstance(value, list):
        raise RecordError(f"`{key}` is {shown(value)}: expected a list of messages with `role` and `content`")
    return [_message(each, f"message {n} of `{key}`") for n, each in enumerate(value, 1)]


def tools_of(record: dict[str, Any]) -> list[dict[str, Any]] | None:
    """The record's `tools`, without keys whose value is None; None for no tools. Raises RecordError."""
    tools = _from_json(record.get("tools"))
    if tools is None or tools in ("", []):
        return None
    if not isinstance(tools, list):
        raise RecordError(f"`tools` is {shown(tools)}: expected a list of JSON schemas, or that list as a JSON string")
    tools = [_from_json(tool) for tool in tools]
    for n, tool in enumerate(tools, 1):
        if not isinstance(tool, dict):
            raise RecordError(f"tool {n} of `tools` is {shown(tool)}: expected a JSON schema")
    return _without_none(tools)


class ChatRenderer:
    """Chats through the chat template of ``tokenizer``.

    ``messages`` and ``tools`` are those of :func:`messages_of` and :func:`tools_of`; every method raises RecordError
    for a chat that the template refuses.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._template = ChatTemplate(tokenizer)
        self._marks: dict[bool, bool] = {}  # whether the template for chats with or without tools marks the answers

    def text(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> str:
        """The whole chat, as ``apply_chat_template(messages, tools, tokenize=False)`` gives it."""
        self._marked_by_template(tools)
        try:
            return self._template.render(messages, tools)
        except Exception as error:  # a template can raise anything
            raise RecordError(f"the chat template cannot render the messages: {words_of(error)}") from None

    def answers(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, first: int = 0) -> Rendered:
        """The whole chat and the assistant's answers among the messages from index ``first`` on.

        A template that marks answers with {% generation %} says where they are. Of another template, an answer is what
        its message adds to the messages before it and the generation prompt, if the whole chat begins with both.
        """
        marked = self._marked_by_template(tools)
        rendered = self._marked(messages, tools, first) if marked else self._added(messages, tools, first)
        if not any(start < end for start, end, _ in rendered.answers):
            roles = shown(", ".join(dict.fromkeys(message["role"] for message in messages[first:])))
            why = "the chat template marks none with {% generation %}" if marked else "none has the role 'assistant'"
            raise RecordError(f"no answer to learn from in messages of the roles {roles}: {why}, or all are empty")
        return rendered

    def _marked_by_template(self, tools: list[dict[str, Any]] | None) -> bool:
        """Whether the template marks the answers of chats with or without tools."""
        found = self._marks.get(tools is not None)
        if found is None:
            if not self._template:
                raise RecordError(
                    "messages need a chat template, and the tokenizer has none: name a tokenizer with one "
                    "(data.tokenizer), or give the chat as `text`"
                )
            try:
                found = self._marks[tools is not None] = self._template.marks_answers(tools)
            except ValueError as error:  # named templates, without the one that is needed
                raise RecordError(f"the tokenizer has no chat template for the record: {words_of(error)}") from None
        return found

    def _marked(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, first: int) -> Rendered:
        try:
            text, marks = self._template.render_marked(messages, tools)
        except Exception as error:
            raise RecordError(f"the chat template cannot render the messages: {words_of(error)}") from None
        begin = 0
        if first:
            prompt = self._part(messages[:first], tools, "`prompt`")
            if not text.startswith(prompt):
                raise RecordError(f"`prompt`: its text changes when `completion` follows: {_parting(prompt, text)}")
            begin = len(prompt)
        return Rendered(text, [Span(start, end, "a marked answer") for start, end in marks if start >= begin])

    def _added(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, first: int) -> Rendered:
        whole = self.text(messages, tools)
        answers = []
        for at in range(first, len(messages)):
            if messages[at]["role"] != "assistant":
                continue
            of = f"message {at + 1 - first}{' of `completion`' if first else ''} (assistant)"
            before = self._part(messages[:at], tools, of, prompt=True)
            upto = whole if at + 1 == len(messages) else self._part(messages[: at + 1], tools, of)
            if not upto.startswith(before):
                why = "the chat template does not begin it with the prompt for an answer"
                raise RecordError(f"{of}: {why}: {_parting(before, upto)}; {'' if at else _FIRST}{_REMEDY}")
            if not whole.startswith(upto):
                why = "the chat template renders it differently when later messages follow"
                raise RecordError(f"{of}: {why}: {_parting(upto, whole)}; {_REMEDY}")
            answers.append(Span(len(before), len(upto), of))
        return Rendered(whole, answers)

    def _part(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, of: str, *, prompt: bool = False
    ) -> str:
        """The text of a chat's first messages, which is needed to find ``of``."""
        try:
            return self._template.render(messages, tools, add_generation_prompt=prompt)
        except Exception as error:
            what = "the messages before it alone" if prompt else "the messages up to it alone"
            why = f"the chat template cannot render {what if messages else 'a prompt without messages'}"
            remedy = _REMEDY if messages else _FIRST + _REMEDY
            raise RecordError(f"{of}: {why}: {words_of(error)}; {remedy}") from None


def _message(value: object, of: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise RecordError(f"{of} is {shown(value)}: expected `role` and `content`")
    message = _without_none(value)
    role, content = message.get("role"), message.get("content")
    if "role" not in message and "from" in message:
        raise RecordError(f"{of} has no `role`: {SHAREGPT}")
    if not isinstance(role, str) or not role:
        given = f"the role {shown(role)}" if "role" in message else f"no `role`, only {names_of(value)}"
        raise RecordError(f"{of} has {given}: expected `role` (such as user, assistant) and `content`")
    spoken = role in ("system", "developer", "user", "assistant")  # others, such as a tool's results, may be any value
    if spoken and content is not None and not isinstance(content, str | list):
        raise RecordError(f"{of} ({role}) has the content {shown(content)}: expected text, or a list of parts")
    rest = (
        each for key, each in message.items() if key not in ("role", "name") and isinstance(each, str | list | dict)
    )
    if content is None and not any(rest):
        raise RecordError(f"{of} ({shown(role)}) is empty: expected `content`, or `tool_calls`")
    return message


def names_of(record: dict[str, Any]) -> str:
    """The keys of ``record``, and which have no value: eight at most, each cut short."""
    names = [shown(key, 24) + (" (null)" if record[key] is None else "") for key in list(record)[:8]]
    return ", ".join(names) + (f" and {len(record) - 8} more" if len(record) > 8 else "") or "nothing"


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(each) for key, each in value.items() if each is not None}
    if isinstance(value, list):
        return [_without_none(each) for each in value]
    return value


def _from_json(value: Any) -> Any:
    if not isinstance(value, str) or not value:
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise RecordError(f"`tools` is {shown(value)}, which is not JSON: {words_of(error)}") from None


def _parting(one: str, other: str) -> str:
    """Where two texts part, in words."""
    differing = (n for n, (left, right) in enumerate(zip(one, other)) if left != right)
    at = next(differing, min(len(one), len(other)))
    return f"at character {at}, {shown(one[at:])} against {shown(other[at:])}"
