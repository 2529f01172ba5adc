"""``shardfuse chat``: a conversation with an instruct model in the terminal."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rich.console import Console

from . import errors, opening
from .generate import asked_to_stop, stdout_text, why_empty
from .opening import Opening

if TYPE_CHECKING:
    from ..serving.engine import Engine
    from ..serving.folder import Opened
    from ..serving.sampling_params import SamplingParams

HELP = "Ctrl-C stops an answer, Ctrl-D leaves; /new begins a new chat, /help shows this line"
_ASK = "> "


@dataclass(frozen=True)
class ChatOptions:
    """The options of ``shardfuse chat``: those of GenerateOptions, and the text of a ``system`` message."""

    model: Opening
    system: str | None = None
    max_tokens: int | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)


def run_chat(options: ChatOptions) -> int:
    """Read questions from standard input, one a line, and stream the answers to standard output; all else goes to
    standard error. Returns 0 at the end of the input.
    """
    console = Console(highlight=False, stderr=True, soft_wrap=True)

    def say(text: str) -> None:
        console.print(text, markup=False)

    with opening.settled(options.model) as model:
        if opening.follows():
            opening.follow(model)
            return 0
        with opening.started_ranks(model):
            opened = opening.lead(model, say)
            with opened.engine as engine:
                _talk(engine, opened, options, say)
    return 0


def _check(engine: Engine, opened: Opened, options: ChatOptions) -> None:
    """Raise ValueError for a model without a template, and for options out of range, before the first question."""
    from ..layers.hf.chat_template import ChatTemplate
    from ..serving.request import Request

    if not ChatTemplate(opened.tokenizer):
        raise ValueError(
            "this model has no chat template: give one with --chat-template FILE, or continue a text with shardfuse "
            "generate"
        )
    if sys.stdin is None:
        raise ValueError("standard input is closed: there is nobody to talk with")
    engine.check(Request([0], max_new_tokens=options.max_tokens or 1, sampling=_sampling(engine, options)))


def _sampling(engine: Engine, options: ChatOptions) -> SamplingParams:
    """How an answer's tokens are chosen, with a seed of its own unless one is given."""
    from ..serving.sampling_params import SamplingParams

    return SamplingParams(**{**engine.generation.usual_sampling(), **options.sampling})


def _talk(engine: Engine, opened: Opened, options: ChatOptions, say: Callable[[str], object]) -> None:
    _check(engine, opened, options)
    first = [] if options.system is None else [{"role": "system", "content": options.system}]
    messages: list[dict[str, Any]] = [*first]
    if sys.stdin.isatty():
        say(HELP)
    with stdout_text() as write:
        for line in _questions():
            if line == "/new":
                messages = [*first]
                say("a new chat")
            elif line == "/help":
                say(HELP)
            elif line:
                asked = [*messages, {"role": "user", "content": line}]
                if (answer := _answer(engine, opened, options, asked, write, say)) is not None:
                    messages = [*asked, answer]


def _answer(
    engine: Engine,
    opened: Opened,
    options: ChatOptions,
    messages: list[dict[str, Any]],
    write: Callable[[str], None],
    say: Callable[[str], object],
) -> dict[str, Any] | None:
    """Stream the answer, and return it as a message; None if there is none, for a reason that the user was told."""
    from ..serving.chat_answer import ChatRefused, ChatTooLong

    began, last = time.monotonic(), ""
    with asked_to_stop() as stop:
        try:
            answer = engine.chat(messages, max_new_tokens=options.max_tokens, sampling=_sampling(engine, options))
        except (ChatRefused, ChatTooLong) as error:
            say(f"{errors.shown(error)}; /new begins a new chat")
            return None
        for piece in answer.steps():
            write(piece)
            last = piece or last
            if stop:
                answer.stop()
    if not last.endswith("\n"):
        write("\n")
    seconds = time.monotonic() - began
    finish = "stopped" if answer.finish == "cancelled" else answer.finish
    count = len(answer.tokens)
    say(f"({count:,} tokens, {finish}, {count / max(seconds, 1e-9):,.1f} tokens/s)")
    if not answer.text:
        say(f"the answer is empty: {why_empty(answer.tokens, answer.stop_reason, opened.tokenizer)}")
    return answer.message


def _questions() -> Iterator[str]:
    """The lines of standard input. In a terminal they can be edited, and Ctrl-C drops the one that is being written."""
    if hasattr(sys.stdin, "reconfigure"):
        sys.stdin.reconfigure(errors="replace")  # bytes that are no text in its encoding
    if not sys.stdin.isatty():
        yield from (line.strip() for line in sys.stdin)
        return
    with contextlib.suppress(ImportError):  # input() then edits lines and remembers them
        import readline  # noqa: F401
    while True:
        try:
            yield input(_ASK).encode(errors="replace").decode().strip()
        except KeyboardInterrupt:
            print()
        except EOFError:
            print()
            return
