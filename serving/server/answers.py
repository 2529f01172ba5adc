"""The bodies of answers, for ``/openapi.json``. The endpoints build them as dictionaries."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel

Finish = Literal["stop", "length", "tool_calls"]


class PromptDetails(BaseModel):
    cached_tokens: int


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


class Logprobs(BaseModel):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class Ranked(BaseModel):
    """vLLM's form of a token's log-probability in a prompt."""

    logprob: float | None
    rank: int
    decoded_token: str


# One for each token of a prompt, from tokens to log-probabilities; null for its first token.
PromptLogprobs = list[dict[str, Ranked] | None]


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: Logprobs | None
    finish_reason: Finish
    stop_reason: int | str | None
    prompt_logprobs: PromptLogprobs | None
    token_ids: list[int] | None
    prompt_token_ids: list[int] | None


class Completion(BaseModel):
    """The answer of ``/v1/completions``; in a stream, each event is such an object with the new text alone."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class CalledFunction(BaseModel):
    name: str
    arguments: str


class Called(BaseModel):
    id: str
    type: Literal["function"]
    function: CalledFunction


class Said(BaseModel):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: list[Called] = []


class Score(BaseModel):
    token: str
    logprob: float
    bytes: list[int]


class TokenScore(Score):
    top_logprobs: list[Score]


class ChatLogprobs(BaseModel):
    content: list[TokenScore]
    refusal: None


class ChatChoice(BaseModel):
    index: int
    message: Said
    logprobs: ChatLogprobs | None
    finish_reason: Finish
    stop_reason: int | str | None
    token_ids: list[int] | None


class Chat(BaseModel):
    """The answer of ``/v1/chat/completions``; in a stream, each event has a ``delta`` instead of the message."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | None
    prompt_token_ids: list[int] | None


class OutputText(BaseModel):
    type: Literal["output_text"]
    text: str
    annotations: list[str]
    logprobs: list[TokenScore]


class OutputMessage(BaseModel):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    status: Literal["completed", "incomplete"]
    content: list[OutputText]


class InputDetails(BaseModel):
    cached_tokens: int
    cache_write_tokens: int


class OutputDetails(BaseModel):
    reasoning_tokens: int


class ResponseUsage(BaseModel):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class IncompleteDetails(BaseModel):
    reason: Literal["max_output_tokens"]


class ResponseObject(BaseModel):
    """The answer of ``/v1/responses``; in a stream, each event has a ``type`` and a ``sequence_number``."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["completed", "incomplete"]
    error: None
    incomplete_details: IncompleteDetails | None
    model: str
    output: list[OutputMessage]
    usage: ResponseUsage
    instructions: str | None
    max_output_tokens: int | None
    temperature: float
    top_p: float
    top_logprobs: int
    text: dict[str, Any]
    tools: list[str]
    tool_choice: Literal["none", "auto"]
    parallel_tool_calls: bool
    reasoning: dict[str, None]
    truncation: Literal["disabled"]
    background: bool
    store: bool
    previous_response_id: None
    metadata: dict[str, str]
    user: str | None


class Model(BaseModel):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class Models(BaseModel):
    object: Literal["list"]
    data: list[Model]


class Tokens(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Text(BaseModel):
    prompt: str


class NotFinite(BaseModel):
    answers: int
    last_error: str
    seconds_ago: float


class Health(BaseModel):
    status: Literal["ok"]
    logits_not_finite: NotFinite | None = None


class Version(BaseModel):
    version: str


class Leaks(BaseModel):
    running: int
    waiting: int
    used_blocks: int
    open_requests: int
    tasks: int
    threads: int
    files: int | None
    resident_bytes: int | None


def described(model: type[BaseModel], *kinds: str) -> dict[int | str, dict[str, Any]]:
    """FastAPI's ``responses`` of a route that answers with ``model``, or with other ``kinds`` of content."""
    return {200: {"model": model, **({"content": {kind: {} for kind in kinds}} if kinds else {})}}
