"""Translate the body of a request into the engine's requests."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Collection
from typing import Any

from ..guide import Guide
from ..request import Request, token_set
from ..sampling_params import SamplingParams
from . import protocol
from .errors import ApiError, invalid
from .served import Caller, Served
from .weights import check_weight

_BAD_TOKENS = 1024  # of all bad words together, vLLM's limit


class Form:
    """What all requests of one ``body`` share, checked and prepared once. Raises ApiError.

    Where the body and the model's defaults are silent, the temperature is 1, as in OpenAI's API; the default seed is
    random.
    """

    def __init__(
        self,
        served: Served,
        body: protocol.Sampled,
        caller: Caller,
        logprobs: int | None,
        guide: Guide | None,
        **more: Any,
    ) -> None:
        self._served = served
        bias: dict[int, float] | None = None
        if body.logit_bias:
            bias = _tokens("logit_bias", body.logit_bias)
        allowed = None if body.allowed_token_ids is None else tuple(sorted(set(body.allowed_token_ids)))
        if allowed == ():
            raise invalid(
                "allowed_token_ids is empty: expected one token at least, or null for all", "allowed_token_ids"
            )
        stop = frozenset(body.stop_token_ids or ())
        for name, tokens in (("allowed_token_ids", allowed), ("logit_bias", bias), ("stop_token_ids", stop)):
            served.check_tokens(tokens or (), name)
        given = {
            "temperature": body.temperature,
            "top_p": body.top_p,
            "top_k": None if body.top_k is None else max(0, body.top_k),  # vLLM's -1 means all
            "min_p": body.min_p,
            "repetition_penalty": body.repetition_penalty,
            "presence_penalty": body.presence_penalty,
            "frequency_penalty": body.frequency_penalty,
            "allowed_tokens": allowed,
            "seed": secrets.randbits(63) if body.seed is None else body.seed,
        }
        chosen = {name: value for name, value in given.items() if value is not None}
        params = {"temperature": 1.0, **served.defaults.sampling, **chosen}
        texts = served.defaults.stop_strings if body.stop is None else body.stop
        texts = (texts,) if isinstance(texts, str) else tuple(texts)
        if "" in texts:
            raise invalid("stop: a text of no character: expected at least one", "stop")
        self._min_tokens = body.min_tokens
        more = {"logit_bias": bias, "logprobs": logprobs, "guide": guide, "min_tokens": body.min_tokens, **more}
        self._fields: dict[str, Any] = {
            "stop": token_set(stop if body.ignore_eos else stop.union(served.stop_ids)),
            "sampling": SamplingParams(**params, **more),
            "priority": body.priority,
            "timeout_s": served.options.request_timeout_s,
            "cache_salt": f"{caller.tenant}/{body.cache_salt or ''}",
            "stop_strings": texts,
            "include_stop_str_in_output": body.include_stop_str_in_output,
            "n": body.n,
            "ignore_eos": body.ignore_eos,
            "client": caller.client,
        }

    def request(
        self,
        prompt: list[int],
        asked: int | None,
        usual: int | None,
        least: int = 0,
        visible: Collection[int] = (),
    ) -> Request:
        """The request for ``prompt``, with the text of ``visible`` special tokens.

        The most tokens of its answer are those ``asked`` for, or by the model's defaults, or the interface's ``usual``
        number, or all that there is room for; only the first may be too many, which raises ApiError.
        """
        if not prompt:
            raise invalid("the prompt has no token: expected one at least", "prompt")
        served = self._served
        room = max(1, served.max_model_len - len(prompt))
        length = asked
        if length is None:
            length = min(room, served.defaults.length(room if usual is None else usual, len(prompt)))
        length = max(least, length)
        if (total := len(prompt) + length) > served.max_model_len:
            limit = f"this model's context is {served.max_model_len} tokens"
            if served.max_model_len < served.max_positions:
                limit = (
                    f"this server takes {served.max_model_len} tokens of the model's context of {served.max_positions}"
                )
            raise invalid(
                f"{limit}, and {total} were asked for: {len(prompt)} of the prompt and {length} of the answer; shorten "
                "either",
                code="context_length_exceeded",
            )
        if self._min_tokens > (most := length if asked is None else asked):
            raise invalid(
                f"min_tokens={self._min_tokens}, and the answer has at most {most} tokens: lower min_tokens, or raise "
                "max_tokens",
                "min_tokens",
            )
        made = Request(prompt, max_new_tokens=length, visible_tokens=visible, **self._fields)
        try:
            made.check(served.vocab_size)
        except ValueError as error:
            raise invalid(str(error)) from None
        return made


def check(body: protocol.Sampled) -> None:
    """Raise ApiError for what no answer can have, and for parameters without the one that they belong to."""
    if body.use_beam_search:
        raise invalid(
            "use_beam_search: beam search is not supported here: leave it out; n asks for several answers",
            "use_beam_search",
        )
    if body.stream and body.prompt_logprobs is not None:
        raise invalid("prompt_logprobs are not streamed: leave them out, or set stream to false", "prompt_logprobs")
    if body.truncation_side is not None and body.truncate_prompt_tokens is None:
        raise invalid(
            "truncation_side without truncate_prompt_tokens: say how many tokens to keep, or -1", "truncation_side"
        )


async def bad_words(served: Served, body: protocol.Sampled) -> tuple[tuple[int, ...], ...]:
    """The token sequences of ``bad_words``: each text's without spaces before it, and those with one space if they are
    as many and begin differently, as in vLLM. Raises ApiError.
    """
    found: list[tuple[int, ...]] = []
    for word in dict.fromkeys(body.bad_words):
        await asyncio.sleep(0)  # lets other requests run
        bare = word.lstrip()
        try:
            first, second = [tuple(await served.encode(text, False, _BAD_TOKENS)) for text in (bare, f" {bare}")]
        except ApiError as error:
            raise invalid(f"bad_words: {error.detail}", "bad_words") from None
        if not first:
            raise invalid(f"bad_words: {word[:100]!r} has no token: expected text, not only spaces", "bad_words")
        found.append(first)
        if len(second) == len(first) and second[0] != first[0]:
            found.append(second)
        if (total := sum(map(len, found))) > _BAD_TOKENS:
            raise invalid(f"bad_words: {total} tokens or more: expected at most {_BAD_TOKENS}", "bad_words")
    for tokens in found:
        served.check_tokens(tokens, "bad_words")
    return tuple(found)


def most_encoded(served: Served, body: protocol.Sampled) -> int:
    """The most tokens that a prompt may have before it is truncated, if it is."""
    if body.truncate_prompt_tokens is None:
        return served.max_model_len
    return max(served.options.max_tokenized_tokens, served.max_model_len)


def truncated(served: Served, body: protocol.Sampled, tokens: list[int], answer: int, special: bool) -> list[int]:
    """The part of a prompt's ``tokens`` that ``truncate_prompt_tokens`` keeps; -1 leaves room for ``answer`` tokens.

    Unless ``truncation_side`` is given, this is the last part, and ``special`` first tokens stay. Raises ApiError.
    """
    asked, most = body.truncate_prompt_tokens, served.max_model_len
    if asked is None:
        return tokens
    if asked == 0 or asked > most:
        raise invalid(
            f"truncate_prompt_tokens={asked}: expected 1 to {most}, or -1 for what the answer leaves",
            "truncate_prompt_tokens",
        )
    keep = most - answer if asked == -1 else asked
    if keep < 1 or len(tokens) <= keep:  # an answer that is too long is refused with the request
        return tokens
    if body.truncation_side == "right":
        return tokens[:keep]
    first = served.first_tokens if special and body.truncation_side is None else []
    first = first if len(first) < keep and tokens[: len(first)] == first else []
    return [*first, *tokens[len(tokens) - keep + len(first) :]]


def _tokens(param: str, given: dict[str, float]) -> dict[int, float]:
    """``given`` by tokens' numbers. Raises ApiError with the first keys that are none."""
    wrong = [text for text in given if not (text.isascii() and text.isdigit()) or len(text) > 12]
    if wrong:
        named = ", ".join(repr(text[:100]) for text in wrong[:4]) + (", ..." if len(wrong) > 4 else "")
        are = "is no token: expected a whole number" if len(wrong) == 1 else "are no tokens: expected whole numbers"
        raise invalid(f"{param}: {named} {are}", param)
    return {int(text): value for text, value in given.items()}


def guide(served: Served, body: protocol.Sampled) -> Guide | None:
    """The guide from ``response_format`` or ``structured_outputs``. Raises ApiError for both at once."""
    wanted, given = body.response_format, body.structured_outputs
    found: list[Guide] = []
    try:
        if isinstance(wanted, protocol.JsonObjectFormat):
            found.append(json_guide({"type": "object"}))
        if isinstance(wanted, protocol.JsonSchemaFormat):
            found.append(json_guide(wanted.json_schema.schema_ or {}))
        if given is not None:
            if given.json_ is not None:
                if isinstance(given.json_, str):
                    check_weight(served.most_memory, given.json_.encode(errors="replace"))
                found.append(json_guide(given.json_))
            if given.regex is not None:
                found.append(Guide.regex(given.regex))
            if given.choice is not None:
                found.append(Guide.choice(given.choice))
            if given.grammar is not None:
                found.append(Guide.grammar(given.grammar))
    except ValueError as error:
        raise invalid(str(error), "response_format" if given is None else "structured_outputs") from None
    if len(found) > 1 or (given is not None and not found):
        raise invalid(
            f"structured_outputs and response_format ask for {len(found)} formats: expected one of json, regex, choice "
            "and grammar, and no response_format beside it",
            "structured_outputs",
        )
    return found[0] if found else None


def json_guide(schema: dict[str, Any] | str) -> Guide:
    """A guide without whitespace between the parts, with which a weak model might continue for ever."""
    return Guide.json_schema(schema, any_whitespace=False)
