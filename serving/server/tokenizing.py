"""``/tokenize`` and ``/detokenize``, vLLM's: tokens of a text or of a chat, and back."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from . import chat, protocol
from .errors import invalid
from .served import Caller, Served

_LONG = 1024  # tokens; the answer of more is written beside the event loop


async def tokenize(served: Served, body: protocol.TokenizeRequest, caller: Caller) -> list[bytes]:
    """The answer's JSON. Raises ApiError."""
    served.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise invalid("expected either prompt or messages", "prompt")
    most = max(served.options.max_tokenized_tokens, served.max_model_len)
    if body.messages is not None:
        prompt = await chat.prompt_of(
            served,
            body.messages,
            body.tools,
            body.add_generation_prompt,
            body.chat_template_kwargs,
            continue_last=body.continue_final_message,
            special=bool(body.add_special_tokens),
            large=caller.large,
            most=most,
        )
        tokens = prompt.tokens
    else:
        tokens = await served.encode(body.prompt or "", body.add_special_tokens is not False, most)
    if len(tokens) > most:
        raise invalid(f"the text has {len(tokens)} tokens: at most {most} are told at once (--max-tokenized-tokens)")
    given = (served, tokens, bool(body.return_token_strs))
    return [await served.aside(_json, *given) if len(tokens) > _LONG else _json(*given)]


def _json(served: Served, tokens: Sequence[int], with_strings: bool) -> bytes:
    strings = served.tokenizer.convert_ids_to_tokens(tokens) if with_strings else None
    found: dict[str, Any] = {"count": len(tokens), "max_model_len": served.max_model_len, "tokens": tokens}
    return json.dumps({**found, "token_strs": strings}).encode()


async def detokenize(served: Served, body: protocol.DetokenizeRequest) -> list[bytes]:
    """The answer's JSON. Raises ApiError."""
    served.check_model(body.model)
    if len(body.tokens) > (most := max(served.options.max_tokenized_tokens, served.max_model_len)):
        raise invalid(f"tokens: {len(body.tokens)} of them: expected at most {most} (--max-tokenized-tokens)", "tokens")
    served.check_tokens(body.tokens, "tokens")
    return [await served.aside(_text, served, body.tokens)]


def _text(served: Served, tokens: Sequence[int]) -> bytes:
    size = sum(len(served.piece(token)) for token in tokens)
    if size > (most := served.options.max_answer_bytes // 12):  # of which JSON takes up to twelve times as many bytes
        raise invalid(f"tokens: their text has about {size} characters: at most {most} (--max-answer-bytes)", "tokens")
    return json.dumps({"prompt": served.decode(tokens)}).encode()
