"""``shardfuse generate``: answers one prompt, without a server. ``generate_batch.py`` answers files of prompts."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from rich.console import Console

from . import errors, opening
from .opening import Opening

if TYPE_CHECKING:
    from ..serving.engine import Engine
    from ..serving.folder import Opened
    from ..serving.guide import Guide
    from ..serving.request import Request

MOST_TOKENS = 256  # tokens of an answer, by default
_NAMED = 5  # tokens in a message
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # all control characters except tab and newline


@dataclass(frozen=True)
class GenerateOptions:
    """The options of ``shardfuse generate`` for one prompt.

    Without ``prompt`` the command reads the prompt from standard input. ``chat``: whether the prompt is a question to
    put into the model's chat template; None: if it has one. ``max_tokens`` None means the model's default, else
    MOST_TOKENS, or the model's limit if that is lower. ``sampling`` holds the given fields of SamplingParams:
    without a temperature the answer is greedy unless the model's defaults say do_sample, and without a seed the draws
    are random. ``json_schema`` is a file.
    """

    model: Opening
    prompt: str | None = None
    chat: bool | None = None
    max_tokens: int | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    stop: tuple[str, ...] = ()
    json_schema: Path | None = None
    regex: str | None = None


def run_generate(options: GenerateOptions) -> int:
    """Stream the answer to standard output, and everything else to standard error; return 130 after Ctrl-C.

    The output is the answer's text alone; a terminal shows control characters as escapes.
    """
    console = Console(highlight=False, stderr=True, soft_wrap=True)

    def say(text: str) -> None:
        console.print(text, markup=False)

    with opening.settled(options.model) as model:
        if opening.follows():
            opening.follow(model)
            return 0
        text, guide = _prompt(options), _guide(options)
        with opening.started_ranks(model):
            opened = opening.lead(model, say)
            if (
                opened.defaults.do_sample is None
                and "temperature" in opened.defaults.sampling.keys() - options.sampling
            ):
                say("the answer is greedy, because do_sample is not set there (--temperature samples)")
            with opened.engine as engine:
                return _answer(engine, _request(options, opened, text, guide, say), say, opened.tokenizer)


def _prompt(options: GenerateOptions) -> str:
    if options.prompt is not None:
        try:
            options.prompt.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"the prompt is not text in UTF-8: {error}") from None
        return options.prompt
    if sys.stdin is None or sys.stdin.isatty():
        raise ValueError(
            "there is no prompt: give a text after the folder, or on standard input, or --input IN.jsonl with --output "
            "OUT.jsonl"
        )
    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"standard input is not text in UTF-8: {error}") from None


def _guide(options: GenerateOptions) -> Guide | None:
    from ..serving.guide import Guide

    if options.regex is not None:
        return Guide.regex(options.regex)
    if options.json_schema is None:
        return None
    try:
        # Without whitespace, as on the server, because a weak model might continue with it for ever.
        return Guide.json_schema(options.json_schema.read_text(encoding="utf-8"), any_whitespace=False)
    except ValueError as error:
        raise ValueError(f"--json-schema {options.json_schema}: {error}") from None


def _request(
    options: GenerateOptions, opened: Opened, text: str, guide: Guide | None, say: Callable[[str], object]
) -> Request:
    """Raises ValueError for options that the engine does not accept."""
    from ..layers.hf.chat_template import ChatTemplate
    from ..serving.request import Request
    from ..serving.sampling_params import SamplingParams

    tokenizer, most = opened.tokenizer, opened.engine.max_model_len
    template = ChatTemplate(tokenizer)
    if options.chat and not template:
        raise ValueError(
            "--chat: this model has no chat template: give one with --chat-template FILE, or leave out --chat"
        )
    chat = bool(template) if options.chat is None else options.chat
    if chat:
        if options.chat is None:
            say("the prompt is put into the model's chat template (--raw continues it as it is)")
        text = template.render([{"role": "user", "content": text}], add_generation_prompt=True)
    prompt = list(tokenizer.encode(text, add_special_tokens=not chat))
    if not prompt:
        raise ValueError("the prompt is empty: expected text to continue")
    if len(prompt) >= most:
        raise ValueError(
            f"the prompt has {len(prompt)} tokens, and a prompt and its answer have at most {most}: shorten it"
        )
    usual = opened.defaults.length(MOST_TOKENS, len(prompt))
    return Request(
        prompt,
        max_new_tokens=min(usual, most - len(prompt)) if options.max_tokens is None else options.max_tokens,
        sampling=SamplingParams(**{**opened.defaults.usual_sampling(), **options.sampling, "guide": guide}),
        stop_strings=options.stop or opened.defaults.stop_strings,
    )


def _answer(engine: Engine, request: Request, say: Callable[[str], object], tokenizer: Any) -> int:
    began, tokens, finish, last, reason = time.monotonic(), [], "", "", None
    number = engine.add(request)
    with stdout_text() as write, asked_to_stop() as asked:
        for event in engine.run():
            if event.error is not None:
                raise RuntimeError(f"the model failed: {type(event.error).__name__}: {event.error}") from event.error
            tokens += [] if event.token is None else [event.token]
            last = event.text or last
            write(event.text)
            finish, reason = event.finish or finish, event.stop_reason
            if asked:
                engine.cancel(number)
                break
        if sys.stdout.isatty() and not last.endswith("\n"):
            write("\n")
    if asked:
        return 130
    if not last:
        say(f"the answer is empty: {why_empty(tokens, reason, tokenizer)}")
    seconds = time.monotonic() - began
    say(f"{len(tokens):,} tokens ({finish}) in {seconds:.1f} s, {len(tokens) / max(seconds, 1e-9):,.1f} tokens/s")
    return 0


def why_empty(tokens: Sequence[int], reason: int | str | None, tokenizer: Any) -> str:
    """Why an answer of ``tokens`` that ``reason`` ended, a token or a stop string, has no text."""
    if isinstance(reason, str):
        return f"it begins with the stop string {reason!r}"
    names = [errors.shown(tokenizer.convert_ids_to_tokens(token)) for token in tokens[:_NAMED]]
    if len(tokens) == 1 and reason is not None:
        return f"the model ended it at once, with {names[0]}"
    more = "" if len(tokens) <= _NAMED else f" and {len(tokens) - _NAMED:,} more"
    return f"its tokens have no text: {', '.join(names)}{more}"


@contextlib.contextmanager
def stdout_text() -> Iterator[Callable[[str], None]]:
    """A function that writes text to standard output at once. If the reader is gone, the command ends as by SIGPIPE."""
    if sys.stdout is None:
        raise ValueError("standard output is closed: the answer has nowhere to go")
    show = visible if sys.stdout.isatty() else str
    if hasattr(sys.stdout, "reconfigure"):
        # Characters outside a terminal's encoding become escapes; a file or a pipe gets the answer's own characters.
        sys.stdout.reconfigure(**({"errors": "backslashreplace"} if sys.stdout.isatty() else {"encoding": "utf-8"}))

    def write(text: str) -> None:
        sys.stdout.write(show(text))
        sys.stdout.flush()

    with ends_with_reader():
        yield write


@contextlib.contextmanager
def ends_with_reader() -> Iterator[None]:
    """Within the block, a closed standard output raises SystemExit, without Python's message at exit."""
    try:
        yield
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(128 + signal.SIGPIPE) from None


def visible(text: str) -> str:
    """``text`` with escapes instead of terminal commands, such as a colour, a cleared screen or a new title."""
    return _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


@contextlib.contextmanager
def asked_to_stop() -> Iterator[list[int]]:
    """Within the block, the first Ctrl-C goes into the list and interrupts no step; the second one raises."""
    asked: list[int] = []

    def stop(signum: int, frame: FrameType | None) -> None:
        asked.append(signum)
        signal.signal(signal.SIGINT, signal.default_int_handler)

    before = signal.getsignal(signal.SIGINT)
    if before is not signal.SIG_IGN:  # under nohup
        signal.signal(signal.SIGINT, stop)
    try:
        yield asked
    finally:
        signal.signal(signal.SIGINT, before)
