"""The bodies of requests: OpenAI's parameters, and those that vLLM adds to them. Unknown ones are refused.

A parameter that could change an answer but is not supported has no field, so it is refused; accepted parameters without
effect on answers are in :class:`Ignored`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from ..request import MAX_ANSWERS
from ..sampling_params import MAX_LOGPROBS

Tokens = list[Annotated[int, Field(ge=0)]]
Stops = str | Annotated[list[str], Field(max_length=16)]
Name = Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9_-]+$")]


class Strict(BaseModel):
    """Accepts JSON's types strictly: a text that looks like a number is not one."""

    model_config = ConfigDict(extra="forbid", strict=True)


class Ignored(Strict):
    """Parameters that OpenAI's clients may send and that change no answer."""

    user: str | None = None
    store: bool | None = None
    metadata: dict[str, str] | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


class StreamOptions(Strict):
    include_usage: bool = False
    include_obfuscation: bool = False


class JsonSchema(Strict):
    name: Name
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    description: str | None = None
    strict: bool | None = None


class TextFormat(Strict):
    type: Literal["text"]


class JsonObjectFormat(Strict):
    type: Literal["json_object"]


class JsonSchemaFormat(Strict):
    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]


class StructuredOutputs(Strict):
    """vLLM's structured outputs: exactly one field is set."""

    json_: dict[str, Any] | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None


class Sampled(Ignored):
    """The parameters of both kinds of completions."""

    model: str | None = None
    n: int = Field(1, ge=1, le=MAX_ANSWERS)
    stop: Stops | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    response_format: ResponseFormat | None = None
    # vLLM's
    top_k: int | None = Field(None, ge=-1)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0, le=10)
    stop_token_ids: Tokens | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    allowed_token_ids: Tokens | None = None
    structured_outputs: StructuredOutputs | None = None
    priority: int = Field(0, ge=-(2**31), lt=2**31)
    cache_salt: str | None = Field(None, max_length=256)


class CompletionRequest(Sampled):
    """``POST /v1/completions``."""

    prompt: str | Tokens | list[str] | list[Tokens]
    max_tokens: int | None = Field(None, ge=0)
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    add_special_tokens: bool = True
    best_of: int | None = None
    suffix: None = None


class FunctionCall(Strict):
    name: Name
    arguments: str


class ToolCall(Strict):
    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class TextPart(Strict):
    type: Literal["text"]
    text: str


class Message(Strict):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    refusal: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    # OpenAI's clients send a received message back with all of its fields.
    annotations: None = None
    audio: None = None
    function_call: None = None


class Function(Strict):
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Strict):
    type: Literal["function"] = "function"
    function: Function


class FunctionName(Strict):
    name: Name


class NamedTool(Strict):
    type: Literal["function"]
    function: FunctionName


class ChatRequest(Sampled):
    """``POST /v1/chat/completions``."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class TokenizeRequest(Strict):
    """``POST /tokenize``: a text, or the messages of a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    tools: list[Tool] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    return_token_strs: bool | None = None


class DetokenizeRequest(Strict):
    """``POST /detokenize``."""

    model: str | None = None
    tokens: Tokens
