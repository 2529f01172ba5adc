"""``/v1/chat/completions``: messages by the model's chat template, tools, and formats of the answer."""

from __future__ import annotations

import asyncio
import functools
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ...kernels.runtime.names import expected
from ..chat import AnswerReader, for_template
from ..guide import Guide
from ..request import Request, TokenEvent
from ..tools import Call, Tool, ToolParser
from . import protocol, translate
from .completions import Answer, Answers
from .errors import invalid
from .growing import JsonList, body_of, size_of, with_fields
from .scores import check_prompt_bytes, finite, prompt_bytes, prompt_logprobs, written
from .served import Caller, Served
from .weights import check_weight

_MOST_CALLS = 8  # calls of a model that must call tools


class Prompt(NamedTuple):
    """A rendered chat: its ``tokens``, and the mark of the ``thought`` that it opens at its end, "" for none."""

    tokens: list[int]
    thought: str


class Asked(NamedTuple):
    """The ``request`` to the engine, and what makes a ``parser`` for each answer; None: no tool can be called."""

    request: Request
    parser: Callable[[], ToolParser] | None


async def prompt_of(
    served: Served,
    messages: Sequence[protocol.Message],
    tools: Sequence[protocol.Tool] | None,
    begin_answer: bool = True,
    more: dict[str, Any] | None = None,
    *,
    continue_last: bool = False,
    special: bool = False,
    large: bool = False,
    most: int | None = None,
) -> Prompt:
    """The prompt of ``messages`` by the model's chat template; that of ``large`` ones runs beside the event loop.

    ``begin_answer`` opens the answer's message, and ``continue_last`` leaves the last one open. ``special``: with the
    tokens that the tokenizer puts around a text. Raises ApiError if the template is missing or refuses, or for more
    than ``most`` tokens, by default the context's.
    """
    if begin_answer and continue_last:
        raise invalid(
            "continue_final_message and add_generation_prompt are both true: set add_generation_prompt to false",
            "continue_final_message",
        )
    if not served.chat.template:
        raise invalid(
            "this model has no chat template: use /v1/completions, or start the server with --chat-template FILE",
            "messages",
        )
    if tools and not served.chat.template.names_tools:
        raise invalid("the model's chat template does not mention tools, so it would never see them", "tools")
    if clash := served.chat.template.own_arguments & set(more or {}):  # such as the template itself
        raise invalid(f"chat_template_kwargs: {min(clash)} is the server's own", "chat_template_kwargs")
    most = served.max_model_len if most is None else most
    served.check_characters(sum(map(_characters, messages)), most)
    calls = [call.function.arguments for each in messages for call in each.tool_calls or ()]
    check_weight(served.most_memory, *(each.encode(errors="replace") for each in calls))
    chosen = {"add_generation_prompt": begin_answer, "continue_final_message": continue_last, **(more or {})}
    render = functools.partial(_rendered, served, messages, tools, chosen)
    text = await served.aside(render) if large else render()
    said = _text(messages[-1]) if continue_last else ""
    return Prompt(await served.encode(text, special, most), served.chat.template.begun_thought(text, said))


def _characters(message: protocol.Message) -> int:
    content = message.content or ""
    return len(content) if isinstance(content, str) else sum(len(part.text) for part in content)


def _text(message: protocol.Message) -> str:
    content = message.content
    return "".join(part.text for part in content) if isinstance(content, list) else content or ""


def _rendered(
    served: Served,
    messages: Sequence[protocol.Message],
    tools: Sequence[protocol.Tool] | None,
    chosen: dict[str, Any],
) -> str:
    try:
        shown = [each.model_dump(exclude_none=True) for each in tools] if tools else None
        return served.chat.template.render(
            [for_template(each.model_dump(exclude_none=True)) for each in messages], shown, **chosen
        )
    except Exception as error:  # templates raise any error
        raise invalid(f"the model's chat template refuses these messages: {error}", "messages") from None


def _choice_of(served: Served, body: protocol.ChatRequest) -> tuple[list[Tool], Guide | None]:
    """The tools that the model may call, and the guide that forces a call if one is required. Raises ApiError."""
    tools, choice = body.tools or [], body.tool_choice
    if choice == "none":
        return [], None
    names = [each.function.name for each in tools]
    if len(set(names)) < len(names):
        raise invalid("tools: two have the same name", "tools")
    if isinstance(choice, protocol.NamedTool):
        tools = [each for each in tools if each.function.name == choice.function.name]
        if not tools:
            named = choice.function.name
            raise invalid(
                f"tool_choice: there is no tool {named!r}: {expected(named, names, 'tools has')}", "tool_choice"
            )
    elif choice is not None and not tools:
        raise invalid(f"tool_choice={choice!r} without tools: expected tools to choose from", "tool_choice")
    callable_ = [Tool(each.function.name, each.function.parameters or {}) for each in tools]
    if choice is None or choice == "auto":
        return callable_, None
    most = 1 if body.parallel_tool_calls is False or isinstance(choice, protocol.NamedTool) else _MOST_CALLS
    try:
        return callable_, Guide.grammar(served.chat.tools.grammar(callable_, most, served.chat.added_tokens))
    except ValueError as error:
        raise invalid(str(error), "tools") from None
    except NotImplementedError:
        raise invalid(
            "tool_choice: in this model's format calls cannot be forced: set it to 'auto'", "tool_choice"
        ) from None


async def request_of(served: Served, body: protocol.ChatRequest, caller: Caller) -> Asked:
    """What the engine is asked. Raises ApiError."""
    translate.check(body)
    tools, forced = await served.aside(_choice_of, served, body) if caller.large else _choice_of(served, body)
    guide = translate.guide(served, body)
    if forced is not None and body.structured_outputs is not None:
        raise invalid("a tool has to be called, and structured_outputs asks for another answer", "structured_outputs")
    if body.top_logprobs is not None and not body.logprobs:
        raise invalid("top_logprobs without logprobs: set logprobs to true", "top_logprobs")
    if body.max_tokens is not None and body.max_completion_tokens not in (None, body.max_tokens):
        raise invalid("max_tokens and max_completion_tokens differ: give one of them", "max_tokens")
    served.check_answers(body.n)
    scores = (served.logprobs(body.top_logprobs, "top_logprobs") or 0) if body.logprobs else None
    scored = served.logprobs(body.prompt_logprobs, "prompt_logprobs")
    words = await translate.bad_words(served, body)
    form = translate.Form(served, body, caller, scores, forced or guide, prompt_logprobs=scored, bad_words=words)
    shown = body.tools if body.tool_choice != "none" else None
    asked, most = body.max_completion_tokens or body.max_tokens, translate.most_encoded(served, body)
    prompt = await prompt_of(
        served,
        body.messages,
        shown,
        body.add_generation_prompt,
        body.chat_template_kwargs,
        continue_last=body.continue_final_message,
        special=body.add_special_tokens,
        large=caller.large,
        most=most,
    )
    tokens = translate.truncated(served, body, prompt.tokens, asked or 1, False)
    check_prompt_bytes(served, prompt_bytes(len(tokens), None, scored), "prompt_logprobs")
    visible = served.chat.marks.difference(body.stop_token_ids or ()) if tools else ()
    request = form.request(tokens, asked, None, visible=visible)
    thought = prompt.thought if forced is None else ""  # a forced call is no thought, though the prompt begins one
    return Asked(request, functools.partial(served.chat.tools.parser, tools, thought) if tools else None)


@dataclass
class _Message:
    """The progress of one choice."""

    reader: AnswerReader
    call_id: Callable[[], str]
    content: list[str] = field(default_factory=list)
    calls: list[tuple[Call, list[str]]] = field(default_factory=list)  # each with the pieces of its arguments
    scores: JsonList = field(default_factory=JsonList)
    ids: JsonList = field(default_factory=JsonList)

    def take(self, event: TokenEvent) -> list[str | Call]:
        """The new pieces of content and of calls."""
        return self.reader.take(event.text, event.finish is not None)

    def begun(self, piece: Call) -> dict[str, Any]:
        """A call whose first piece is ``piece``."""
        function = {"name": piece.name, "arguments": piece.arguments}
        return {"id": self.call_id(), "type": "function", "function": function}

    def delta(self, piece: str | Call) -> dict[str, Any]:
        """The change that a chunk of a stream tells."""
        if isinstance(piece, str):
            return {"content": piece}
        if piece.name is not None:
            return {"tool_calls": [{"index": piece.index, **self.begun(piece)}]}
        return {"tool_calls": [{"index": piece.index, "function": {"arguments": piece.arguments}}]}


def _messages(served: Served, body: protocol.ChatRequest, asked: Asked, answers: Answers) -> list[_Message]:
    most = 1 if body.parallel_tool_calls is False else None
    readers = [AnswerReader(asked.parser and asked.parser(), served.chat.hidden_marks, most) for _ in answers.all]
    return [_Message(reader, served.chat.tools.call_id) for reader in readers]


async def complete(served: Served, body: protocol.ChatRequest, caller: Caller) -> list[bytes]:
    """The whole answer, in pieces of its JSON."""
    asked = await request_of(served, body, caller)
    request = asked.request
    ids = json.dumps(request.prompt).encode() if body.return_token_ids else b"null"
    more = {"prompt_token_ids": ids, "prompt_logprobs": b"null"}
    async with Answers(served, [request]) as answers:
        answers.keep(sum(map(len, more.values())))
        found = _messages(served, body, asked, answers)
        async for answer, event in answers:
            message = found[answer.index]
            if event.prompt_logprobs is not None:
                scored, most = event.prompt_logprobs, request.sampling.prompt_logprobs or 0
                more["prompt_logprobs"] = await written(served, prompt_logprobs, request.prompt, scored, most)
                answers.keep(len(more["prompt_logprobs"]))
            answers.keep(size_of(event.text))
            if body.return_token_ids and event.token is not None:
                answers.keep(message.ids.add(event.token))
            for piece in message.take(event):
                if isinstance(piece, str):
                    message.content.append(piece)
                elif piece.name is not None:
                    message.calls.append((piece, [piece.arguments]))
                else:
                    message.calls[piece.index][1].append(piece.arguments)
            if body.logprobs:
                answers.keep(sum(map(message.scores.add, scores_of(served, event))))
    choices = []
    for answer, message in zip(answers.all, found):
        await asyncio.sleep(0)
        choices.append(_choice(body, answer, message))
    return body_of(_head(served, caller.name, "chat.completion"), choices, answers.usage.json(), **more)


def _choice(body: protocol.ChatRequest, answer: Answer, message: _Message) -> bytes:
    content = "".join(message.content)
    said: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if message.calls:
        calls = [message.begun(Call(call.index, call.name, "".join(pieces))) for call, pieces in message.calls]
        said |= {"content": content or None, "tool_calls": calls}
    choice = {
        "index": answer.index,
        "message": said,
        "finish_reason": message.reader.finish(answer.finish),
        "stop_reason": answer.stop_reason,
    }
    more = {
        "logprobs": b'{"content":%b,"refusal":null}' % message.scores.json() if body.logprobs else b"null",
        "token_ids": message.ids.json() if body.return_token_ids else b"null",
    }
    return with_fields(choice, **more)


async def stream(served: Served, body: protocol.ChatRequest, caller: Caller) -> AsyncIterator[dict[str, Any] | None]:
    """The chunks of a stream. The first is None, sent once the request itself is known to be valid."""
    asked = await request_of(served, body, caller)
    request = asked.request
    head = _head(served, caller.name, "chat.completion.chunk")
    options = body.stream_options or protocol.StreamOptions()
    with_usage, continuous = options.include_usage, options.include_usage and options.continuous_usage_stats
    rest: dict[str, Any] = {"usage": None} if with_usage else {}
    prompt = {"prompt_token_ids": request.prompt} if body.return_token_ids else {}

    def chunk(index: int, delta: dict[str, Any], finish: str | None = None, **more: Any) -> dict[str, Any]:
        answer = answers.all[index]
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": None,
            "finish_reason": finish,
            "stop_reason": None if finish is None else answer.stop_reason,
            **more,
        }
        usage = {"usage": answers.usage_of(answer).json()} if continuous else rest
        return {**head, "choices": [choice], **usage}

    def of_token(event: TokenEvent) -> dict[str, Any]:
        """What a chunk has of an event's token beside its text."""
        more: dict[str, Any] = {}
        if event.token is not None and body.logprobs:
            more["logprobs"] = {"content": scores_of(served, event), "refusal": None}
        if event.token is not None and body.return_token_ids:
            more["token_ids"] = [event.token]
        return more

    async with Answers(served, [request]) as answers:
        yield None
        found = _messages(served, body, asked, answers)
        for answer in answers.all:
            yield {**chunk(answer.index, {"role": "assistant", "content": ""}), **prompt}
        async for answer, event in answers:
            message = found[answer.index]
            more = of_token(event)
            for piece in message.take(event):
                yield chunk(answer.index, message.delta(piece), **more)
                more = {}
            if more:
                yield chunk(answer.index, {}, **more)
            if event.finish is not None:
                yield chunk(answer.index, {}, message.reader.finish(event.finish))
    if with_usage:
        yield {**head, "choices": [], "usage": answers.usage.json()}


def scores_of(served: Served, event: TokenEvent) -> list[dict[str, Any]]:
    """A token's log-probability as OpenAI's object."""
    if event.token is None:
        return []
    top = [_score(served, token, score) for token, score in event.top_logprobs]
    return [{**_score(served, event.token, event.logprob), "top_logprobs": top}]


def _score(served: Served, token: int, logprob: float | None) -> dict[str, Any]:
    text = served.piece(token)
    return {"token": text, "logprob": finite(logprob), "bytes": list(text.encode())}


def _head(served: Served, name: str, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{name}", "object": kind, "created": int(time.time()), "model": served.options.name}
