"""The bodies of requests: OpenAI's parameters, and those that vLLM adds to them. Unknown ones are refused.

A parameter that could change an answer but is not supported has no field, so it is refused; accepted parameters without
effect on answers are in :class:`Ignored`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from ..request import MAX_ANSWERS
from ..tools import LONGEST_NAME

T = TypeVar("T")
_MOST = 2**31  # of a number of tokens, or of a token; longer numbers are not written in errors, or not at all
_MOST_FIELDS = 64  # more than any object here has, or a template has arguments
MAX_BAD_WORDS = 128  # vLLM's limit
TEXT_ONLY = "text_only"  # the type of the error for a part of one of these types, OpenAI's and vLLM's
_MEDIA = {
    **dict.fromkeys(("image_url", "input_image", "image_embeds", "image_pil", "image"), "an image"),
    **dict.fromkeys(("input_audio", "audio_url", "audio_embeds", "audio"), "audio"),
    **dict.fromkeys(("video_url", "input_video", "video"), "a video"),
    **dict.fromkeys(("input_file", "file"), "a file"),
}


def _first_wrong(right: Callable[[Any], bool]) -> BeforeValidator:
    """Of a dictionary with a wrong value, that entry alone remains, so that the whole has one error."""

    def check(given: Any) -> Any:
        if isinstance(given, dict):
            for key, value in given.items():
                if not right(value):
                    return {key: value}
        return given

    return BeforeValidator(check)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_bias(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and -100 <= value <= 100


def _printable(value: str) -> str:
    if not value.isprintable():
        raise PydanticCustomError("printable", "expected printable characters")
    return value


# A wrong list has one error, that of its first wrong element.
Many = Annotated[list[T], Field(fail_fast=True)]
Tokens = Many[Annotated[int, Field(ge=0, lt=_MOST)]]
Count = Annotated[int, Field(ge=0, lt=_MOST)]
Positive = Annotated[int, Field(ge=1, lt=_MOST)]
Stops = str | Annotated[list[str], Field(max_length=16)]
Bias = Annotated[dict[str, Annotated[float, Field(ge=-100, le=100)]], _first_wrong(_is_bias)]
Texts = Annotated[dict[str, str], _first_wrong(_is_text)]
# -1 stands for the whole vocabulary; the server's own limit is its --max-logprobs.
Logprobs = Annotated[int, Field(ge=-1, lt=_MOST)]
Role = Annotated[str, Field(min_length=1, max_length=64), AfterValidator(_printable)]
Kwargs = Annotated[dict[str, Any], Field(max_length=_MOST_FIELDS)]
Name = Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9_-]+$")]


class Strict(BaseModel):
    """Accepts JSON's types strictly: a text that looks like a number is not one. A few errors describe any body."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _one_unknown(cls, given: Any) -> Any:
        """Of a thousand unknown fields one remains, which is refused."""
        if isinstance(given, dict) and len(given) > _MOST_FIELDS:
            known = {each.alias or name for name, each in cls.model_fields.items()}
            unknown = next(name for name in given if name not in known)
            return {name: value for name, value in given.items() if name in known or name == unknown}
        return given


class Part(Strict):
    """A part of a message's content. One that is no text is refused in one line, whatever else it holds."""

    @model_validator(mode="before")
    @classmethod
    def _is_text(cls, given: Any) -> Any:
        if isinstance(given, dict):
            kind = given.get("type", next((name for name in _MEDIA if name in given), None))  # vLLM's need no type
            if isinstance(kind, str) and kind in _MEDIA:
                told = {"what": _MEDIA[kind], "kind": kind}
                raise PydanticCustomError(TEXT_ONLY, "this server takes text only, and this is {what} ({kind})", told)
        return given


class Ignored(Strict):
    """Parameters that OpenAI's clients may send and that change no answer."""

    user: str | None = None
    store: bool | None = None
    metadata: Texts | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


class StreamOptions(Strict):
    include_usage: bool = False
    continuous_usage_stats: bool = False
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
    choice: Many[str] | None = None
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
    logit_bias: Bias | None = None
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    response_format: ResponseFormat | None = None
    # vLLM's
    top_k: int | None = Field(None, ge=-1, lt=_MOST)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0, le=10)
    stop_token_ids: Tokens | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    allowed_token_ids: Tokens | None = None
    structured_outputs: StructuredOutputs | None = None
    priority: int = Field(0, ge=-(2**31), lt=2**31)
    cache_salt: str | None = Field(None, max_length=256)
    min_tokens: Count = 0
    bad_words: Annotated[list[str], Field(max_length=MAX_BAD_WORDS, fail_fast=True)] = []
    prompt_logprobs: Logprobs | None = None
    return_token_ids: bool | None = None
    truncate_prompt_tokens: int | None = Field(None, ge=-1, lt=_MOST)
    truncation_side: Literal["left", "right"] | None = None
    use_beam_search: bool = False


class CompletionRequest(Sampled):
    """``POST /v1/completions``."""

    prompt: str | Tokens | Many[str] | Many[Tokens]
    max_tokens: Count | None = None
    echo: bool | None = None
    logprobs: Logprobs | None = None
    add_special_tokens: bool = True
    best_of: Count | None = None
    suffix: None = None


class FunctionCall(Strict):
    name: Annotated[str, Field(min_length=1, max_length=LONGEST_NAME)]  # a model may call what is no tool
    arguments: str


class ToolCall(Strict):
    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class TextPart(Part):
    type: Literal["text"]
    text: str


class Message(Strict):
    role: Role
    content: str | Many[TextPart] | None = None
    name: str | None = None
    refusal: str | None = None
    tool_calls: Many[ToolCall] | None = None
    tool_call_id: str | None = None
    # OpenAI's clients send a received message back with all of its fields.
    annotations: None = None
    audio: None = None
    function_call: None = None


Messages = Annotated[Many[Message], Field(min_length=1)]


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

    messages: Messages
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    max_tokens: Positive | None = None
    max_completion_tokens: Positive | None = None
    logprobs: bool | None = None
    top_logprobs: Logprobs | None = None
    tools: Many[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: Kwargs | None = None


class TokenizeRequest(Strict):
    """``POST /tokenize``: a text, or the messages of a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    tools: Many[Tool] | None = None
    add_special_tokens: bool | None = None  # by default those of a text, and none of a chat
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: Kwargs | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Strict):
    """``POST /detokenize``."""

    model: str | None = None
    tokens: Tokens
