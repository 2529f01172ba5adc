"""The answer of a chat with an engine in the same program: its text as it comes, and the message that it becomes."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .chat import AnswerReader, ChatFormat, for_template
from .request import Request, TokenEvent
from .sampling_params import SamplingParams
from .tools import Call, Tool

if TYPE_CHECKING:
    from .engine import Engine

Messages = Sequence[Mapping[str, Any]]


class ChatAnswer:
    """One answer, computed as it is read; :meth:`Engine.chat` makes it.

    Iterating yields the text in pieces, each once, without calls of tools. After a ``break`` the rest can still be
    read; :meth:`stop`, or dropping the answer, ends it. Only one answer of an engine is under way at a time.

    Attributes:
        finish: why it ended: "stop", "tool_calls", "length", "cancelled" or "error"; None before that.
        tokens: the ids of those generated so far.
        prompt_tokens: how many the rendered chat has.
        stop_reason: the token or the stop string that ended the answer; None if neither did.
    """

    def __init__(self, engine: Engine, request: Request, reader: AnswerReader, chats: ChatFormat) -> None:
        self.finish: str | None = None
        self.tokens: list[int] = []
        self.stop_reason: int | str | None = None
        self.prompt_tokens = len(request.prompt)
        self._engine, self._request = engine, request
        self._reader, self._call_id = reader, chats.tools.call_id
        self._number: int | None = None  # once the engine has the request
        self._unread: deque[str] = deque()
        self._content: list[str] = []
        self._calls: list[dict[str, Any]] = []
        self._error: Exception | None = None

    def __iter__(self) -> Iterator[str]:
        """Raises RuntimeError for an answer that fails, while another one is under way, and while the engine is paused.
        An error of the step itself loses nothing: the next piece can be asked for again.
        """
        while True:
            while self._unread:
                yield self._unread.popleft()
            if not self._step():
                return

    def steps(self) -> Iterator[str]:
        """Like iterating, with an empty piece after a step that brings no text, for a caller who may stop it."""
        more = True
        while more or self._unread:
            more = not self._unread and self._step()
            piece = "".join(self._unread)
            self._unread.clear()
            yield piece

    def stop(self) -> None:
        """End the answer now; :attr:`message` then has what was computed so far. For the thread that reads it."""
        if self._number is not None and self.finish is None:
            for event in self._engine._drop(self._number):  # with text that might have begun a stop string
                self._hear(event)
        self.finish = self.finish or "cancelled"

    @property
    def text(self) -> str:
        """The whole text; this computes what is missing."""
        while self._step():
            pass
        return "".join(self._content)

    @property
    def message(self) -> dict[str, Any]:
        """The whole answer as a message of OpenAI's form, to append to the chat; this computes what is missing."""
        said: dict[str, Any] = {"role": "assistant", "content": self.text}
        return said | ({"tool_calls": self._calls} if self._calls else {})

    def _step(self) -> bool:
        """Take a step of the engine; False if the answer has ended."""
        if self._error is not None:
            raise self._error
        if self.finish is not None:
            return False
        if self._engine.paused:
            raise RuntimeError("chat: the engine is paused: call resume() first")
        if self._number is None:
            check_idle(self._engine)
            self._number = self._engine.add(self._request)
            weakref.finalize(self, _abandon, weakref.ref(self._engine), self._number)
        if not self._engine.lives(self._number):
            self._look_for_the_end()
            return True
        others = []
        for event in self._engine.step():
            if event.request == self._number:
                self._hear(event)
            else:
                others.append(event)
        self._engine._give_back(others)
        return True

    def _look_for_the_end(self) -> None:
        """Take the end of a request that was cancelled, or whose events another step() has reported."""
        assert self._number is not None
        for event in self._engine._drop(self._number):
            self._hear(event)
        if self.finish is None and self._engine.opened:
            self.finish = "error"
            self._error = RuntimeError(
                "chat: the answer's events were read by another step() or run() of the engine: read an answer to its "
                "end, or stop() it, before these"
            )
        self.finish = self.finish or "cancelled"

    def _hear(self, event: TokenEvent) -> None:
        self.tokens += [] if event.token is None else [event.token]
        self.stop_reason = event.stop_reason
        for piece in self._reader.take(event.text, event.finish is not None):
            if isinstance(piece, str):
                self._content.append(piece)
                self._unread.append(piece)
            elif piece.name is not None:
                self._calls.append(self._begun(piece))
            else:
                self._calls[piece.index]["function"]["arguments"] += piece.arguments
        self.finish = self._reader.finish(event.finish)
        if event.error is not None:
            self._error = RuntimeError(f"chat: {type(event.error).__name__}: {event.error}")
            self._error.__cause__ = event.error

    def _begun(self, piece: Call) -> dict[str, Any]:
        function = {"name": piece.name, "arguments": piece.arguments}
        return {"id": self._call_id(), "type": "function", "function": function}


def _abandon(engine: weakref.ref[Engine], number: int) -> None:
    """Cancel the request of an answer that Python has deleted."""
    if (there := engine()) is not None:
        there._drop(number)


def check_idle(engine: Engine) -> None:
    """RuntimeError while the engine serves other requests."""
    if engine.busy:
        raise RuntimeError(
            "chat: other requests are being served; an answer of an earlier chat that was not read to its end is one: "
            "read it, or stop() it"
        )


def begin(
    engine: Engine,
    tokenizer: Any,
    chats: ChatFormat,
    messages: Messages,
    tools: Messages | None,
    max_new_tokens: int | None,
    sampling: SamplingParams | None,
    variables: Mapping[str, Any],
) -> ChatAnswer:
    """The answer that :meth:`Engine.chat` describes."""
    check_idle(engine)
    functions = [_tool(number, tool) for number, tool in enumerate(tools or ())]
    text = _render(chats, messages, tools, variables)
    prompt = list(tokenizer.encode(text, add_special_tokens=False))
    room = engine.max_model_len - len(prompt)
    if room < 1:
        raise ChatTooLong(
            f"chat: the messages have {len(prompt):,} tokens, and a chat and its answer have at most "
            f"{engine.max_model_len:,}: leave out earlier messages"
        )
    defaults = engine.generation
    request = Request(
        prompt,
        max_new_tokens=min(room, defaults.length(room, len(prompt))) if max_new_tokens is None else max_new_tokens,
        sampling=SamplingParams(**defaults.usual_sampling()) if sampling is None else sampling,
        stop_strings=defaults.stop_strings,
        visible_tokens=chats.marks if tools else (),
    )
    engine.check(request)
    parser = chats.tools.parser(functions, chats.template.begun_thought(text)) if tools else None
    return ChatAnswer(engine, request, AnswerReader(parser, chats.hidden_marks), chats)


class ChatTooLong(ValueError):
    """The messages leave no room for an answer."""


class ChatRefused(ValueError):
    """The model's chat template refuses the messages."""


def _render(chats: ChatFormat, messages: Messages, tools: Messages | None, variables: Mapping[str, Any]) -> str:
    """The prompt of ``messages``. Raises ValueError."""
    if not chats.template:
        raise ValueError(
            "chat: the model's tokenizer has no chat template: load an instruct model, or give from_pretrained "
            "chat_template=FILE; add() continues plain text"
        )
    if tools and not chats.template.names_tools:
        raise ValueError("chat: tools: the model's chat template does not mention tools, so it would never see them")
    if clash := chats.template.own_arguments.intersection(variables):
        raise ValueError(f"chat: chat_template_kwargs: {min(clash)} is no variable of a template: leave it out")
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise ValueError(f'chat: messages={messages!r}: expected [{{"role": "user", "content": "..."}}]')
    plain = [_message(number, message) for number, message in enumerate(messages)]
    try:
        text = chats.template.render(plain, tools or None, add_generation_prompt=True, **variables)
    except Exception as error:  # templates raise any error
        raise ChatRefused(f"chat: the model's chat template refuses these messages: {error}") from error
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"chat: the messages are no text in Unicode: {error}") from None
    return text


def _message(number: int, message: Any) -> dict[str, Any]:
    """The message for the template. Raises ValueError for one that is not of OpenAI's form."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise ValueError(f'chat: messages[{number}] is {message!r}: expected {{"role": "user", "content": "..."}}')
    given = {name: value for name, value in message.items() if value is not None}
    content, calls = given.get("content", ""), given.get("tool_calls", ())
    if not isinstance(content, str | list | tuple):
        raise ValueError(f"chat: messages[{number}].content={content!r}: expected a text, or parts of one")
    for at, part in enumerate(() if isinstance(content, str) else content):
        text = isinstance(part, Mapping) and isinstance(part.get("text"), str) and part.get("type", "text") == "text"
        if not text:
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise ValueError(
                f'chat: messages[{number}].content[{at}] is {kind!r}: expected {{"type": "text", "text": "..."}}'
            )
    for at, call in enumerate(calls if isinstance(calls, list | tuple) else [calls]):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise ValueError(
                f'chat: messages[{number}].tool_calls[{at}] is {call!r}: expected {{"type": "function", "function": '
                '{"name": "...", "arguments": "..."}}'
            )
    return for_template(given)


def _tool(number: int, tool: Any) -> Tool:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    parameters = function.get("parameters") if isinstance(function, Mapping) else None
    known = isinstance(function, Mapping) and isinstance(function.get("name"), str)
    if not known or not isinstance(parameters, Mapping | None):
        raise ValueError(
            f'chat: tools[{number}]: expected {{"type": "function", "function": {{"name": "...", "parameters": '
            "{...}}}; get_json_schema(function) of transformers.utils makes one of a Python function"
        )
    assert isinstance(function, Mapping)
    return Tool(function["name"], parameters or {})
