"""The body of ``POST /v1/responses``, in its plain text form: no tools, no images, nothing stored."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from .protocol import Ignored, JsonObjectFormat, JsonSchema, Logprobs, Many, Part, Positive, Strict, TextFormat


class InputPart(Part):
    type: Literal["input_text", "output_text"]
    text: str
    # OpenAI's clients send a received part back with all of its fields.
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    logprobs: list[Any] | None = None


class InputMessage(Strict):
    type: Literal["message"] | None = None
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Many[InputPart]
    id: str | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None
    phase: None = None


class NamedSchemaFormat(JsonSchema):
    type: Literal["json_schema"]


class TextConfig(Strict):
    format: Annotated[TextFormat | JsonObjectFormat | NamedSchemaFormat, Field(discriminator="type")] | None = None
    verbosity: None = None


class Reasoning(Strict):
    effort: None = None
    summary: None = None
    generate_summary: None = None


class ResponseStreamOptions(Strict):
    include_obfuscation: Literal[False] = False


class ResponseRequest(Ignored):
    """``POST /v1/responses``."""

    model: str | None = None
    input: str | Annotated[Many[InputMessage], Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: Positive | None = None
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    text: TextConfig | None = None
    include: Many[Literal["message.output_text.logprobs"]] | None = None
    top_logprobs: Logprobs | None = None
    reasoning: Reasoning | None = None
    truncation: Literal["disabled"] | None = None
    # These are refused unless they ask for nothing.
    tools: list[Any] | None = None
    background: bool | None = None
    previous_response_id: str | None = None
    # Without tools and stored responses these change nothing.
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: Positive | None = None
    prompt_cache_retention: str | None = None
    conversation: None = None
    prompt: None = None
    # vLLM's
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    top_k: int | None = Field(None, ge=-1, lt=2**31)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0, le=10)
    ignore_eos: bool = False
    priority: int = Field(0, ge=-(2**31), lt=2**31)
    cache_salt: str | None = Field(None, max_length=256)
