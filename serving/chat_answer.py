"""The answer of a chat with an engine in the same program: its text as it comes, and the message that it becomes."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .chat import AnswerReader, ChatFormat, for_template
from .request import Request, TokenEvent
from .sampling_params import SamplingParams
from .tools import Call, Tool

if TYPE_CHECKING:
    from .engine import Engine

Messages = Sequence[Mapping[str, Any]]


class ChatAnswer:
    """One answer, computed as it is read; :meth:`Engine.chat` begins it.

    Iterating yields the text in pieces, without calls of tools. After a ``break`` the rest can still be read;
    :meth:`stop` ends the answer.

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
        self._reader, self._call_id = reader, chats.tools.call_id
        self._content: list[str] = []
        self._calls: list[dict[str, Any]] = []
        self._engine, self._number = engine, engine.add(request)
        self._pieces = self._read()

    def __iter__(self) -> Iterator[str]:
        return filter(None, self._pieces)

    def steps(self) -> Iterator[str]:
        """Like iterating, with an empty piece after a step that brings no text, for a caller who may stop it."""
        return self._pieces

    def stop(self) -> None:
        """End the answer now; :attr:`message` then has what was computed so far."""
        self._pieces.close()
        self._end()  # of one that was never begun

    @property
    def text(self) -> str:
        """The whole text; this computes what is missing."""
        for _ in self._pieces:
            pass
        return "".join(self._content)

    @property
    def message(self) -> dict[str, Any]:
        """The whole answer as a message of OpenAI's form, to append to the chat; this computes what is missing."""
        said: dict[str, Any] = {"role": "assistant", "content": self.text}
        return said | ({"tool_calls": self._calls} if self._calls else {})

    def _read(self) -> Generator[str]:
        try:
            while self._engine.lives(self._number):
                if self._engine.paused:
                    raise RuntimeError("chat: the engine is paused: call resume() first")
                for event in self._engine.step():
                    if event.request == self._number:
                        yield from self._hear(event)
                yield ""
        finally:
            self._end()

    def _hear(self, event: TokenEvent) -> list[str]:
        """The pieces of text that an event brings. Raises RuntimeError for an answer that failed."""
        if event.error is not None:
            self.finish = "error"
            raise RuntimeError(f"chat: {type(event.error).__name__}: {event.error}") from event.error
        self.tokens += [] if event.token is None else [event.token]
        self.stop_reason = event.stop_reason
        return self._take(event.text, event.finish)

    def _end(self) -> None:
        """Cancel what still runs, and take the text that was held back as the possible beginning of a stop string."""
        if self._engine.lives(self._number):
            self._engine.cancel(self._number)
            for event in self._engine.step():
                if event.request == self._number:
                    self._take(event.text, event.finish)
        self.finish = self.finish or "cancelled"  # by who closed the engine

    def _take(self, text: str, finish: str | None) -> list[str]:
        """Note what ``text`` makes certain; return the new pieces of content."""
        found = self._reader.take(text, finish is not None)
        for piece in found:
            if isinstance(piece, str):
                self._content.append(piece)
            elif piece.name is not None:
                self._calls.append(self._begun(piece))
            else:
                self._calls[piece.index]["function"]["arguments"] += piece.arguments
        self.finish = self._reader.finish(finish)
        return [piece for piece in found if isinstance(piece, str)]

    def _begun(self, piece: Call) -> dict[str, Any]:
        function = {"name": piece.name, "arguments": piece.arguments}
        return {"id": self._call_id(), "type": "function", "function": function}


def begin(
    engine: Engine,
    tokenizer: Any,
    chats: ChatFormat,
    messages: Messages,
    tools: Messages | None,
    max_new_tokens: int | None,
    sampling: SamplingParams | None,
    template: Mapping[str, Any],
) -> ChatAnswer:
    """The answer that :meth:`Engine.chat` describes, begun."""
    if engine.busy:
        raise RuntimeError(
            "chat: other requests are being served; an answer of an earlier chat that was not read to its end is one: "
            "read it, or stop() it"
        )
    functions = [_tool(number, tool) for number, tool in enumerate(tools or ())]
    text = render(chats, messages, tools, template)
    prompt = list(tokenizer.encode(text, add_special_tokens=False))
    room = engine.max_model_len - len(prompt)
    if room < 1:
        raise ValueError(
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
    parser = chats.tools.parser(functions, chats.template.begun_thought(text)) if tools else None
    return ChatAnswer(engine, request, AnswerReader(parser, chats.hidden_marks), chats)


def render(chats: ChatFormat, messages: Messages, tools: Messages | None, template: Mapping[str, Any]) -> str:
    """The prompt of ``messages``. Raises ValueError."""
    if not chats.template:
        raise ValueError(
            "chat: the model's tokenizer has no chat template: load an instruct model, or give from_pretrained "
            "chat_template=FILE; add() continues plain text"
        )
    if tools and not chats.template.names_tools:
        raise ValueError("chat: tools: the model's chat template does not mention tools, so it would never see them")
    plain = [_message(number, message) for number, message in enumerate(messages)]
    if not plain:
        raise ValueError('chat: there is no message: expected [{"role": "user", "content": "..."}]')
    try:
        return chats.template.render(plain, tools or None, **{"add_generation_prompt": True, **template})
    except Exception as error:  # templates raise any error
        raise ValueError(f"chat: the model's chat template refuses these messages: {error}") from error


def _message(number: int, message: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise ValueError(f'chat: messages[{number}] is {message!r}: expected {{"role": "user", "content": "..."}}')
    given = {name: value for name, value in message.items() if value is not None}
    content = given.get("content", "")
    for at, part in enumerate(() if isinstance(content, str) else content):
        if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
            raise ValueError(f'chat: messages[{number}].content[{at}]: expected {{"type": "text", "text": "..."}}')
    return for_template(given)


def _tool(number: int, tool: Mapping[str, Any]) -> Tool:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ValueError(
            f'chat: tools[{number}]: expected {{"type": "function", "function": {{"name": "..."}}}}; '
            "get_json_schema(function) of transformers.utils makes one of a Python function"
        )
    return Tool(function["name"], function.get("parameters") or {})
