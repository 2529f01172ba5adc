"""The lane of other people's clients: OpenAI's newest and litellm against the server, whole answers and streams.

Run by the Python of an environment that has both (``make test-server``). Greedy texts are compared with those of the
model's own forward; of what a client adds, only what it makes of the server's answer is.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # litellm would fetch a list of prices

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
import openai
import server_case
from server_case import NAME, Server, answer, tokenizer

KEY = "a-key"
PROMPT, MOST = "Once upon a time", 12
CHAT: list[Any] = [{"role": "user", "content": "Say something"}]
SCHEMA = {
    "type": "object",
    "properties": {"size": {"enum": [1, 2]}},
    "required": ["size"],
    "additionalProperties": False,
}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True}}
TOOLS: Any = [{"type": "function", "function": {"name": "look", "parameters": SCHEMA}}]
GREEDY: dict[str, Any] = {"max_tokens": MOST, "temperature": 0}


def chat_text() -> str:
    """The model's own answer to CHAT."""
    prompt = tokenizer().apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    return answer(list(tokenizer().encode(prompt, add_special_tokens=False)), MOST)[1]


def check(found: Any, expected: Any) -> None:
    if found != expected:
        raise AssertionError(f"{found!r} in place of {expected!r}")


# --- OpenAI's ---------------------------------------------------------------------------------------------------------


def openai_models(client: openai.OpenAI) -> None:
    check([each.id for each in client.models.list().data], [NAME])
    check(client.models.retrieve(NAME).id, NAME)


def openai_completion(client: openai.OpenAI) -> None:
    made = client.completions.create(model=NAME, prompt=PROMPT, logprobs=2, **GREEDY)
    check(made.choices[0].text, answer(PROMPT, MOST)[1])
    assert made.usage is not None
    assert made.choices[0].logprobs is not None
    check((made.usage.prompt_tokens, made.usage.completion_tokens), (len(PROMPT), MOST))
    check(len(made.choices[0].logprobs.token_logprobs or []), MOST)


def openai_completion_streamed(client: openai.OpenAI) -> None:
    parts = list(
        client.completions.create(
            model=NAME, prompt=PROMPT, stream=True, stream_options={"include_usage": True}, **GREEDY
        )
    )
    check("".join(each.choices[0].text for each in parts[:-1]), answer(PROMPT, MOST)[1])
    assert parts[-1].usage is not None
    check((parts[-1].choices, parts[-1].usage.completion_tokens), ([], MOST))


def openai_chat(client: openai.OpenAI) -> None:
    made = client.chat.completions.create(model=NAME, messages=CHAT, logprobs=True, top_logprobs=2, **GREEDY)
    check(made.choices[0].message.content, chat_text())
    assert made.choices[0].logprobs is not None
    assert made.choices[0].logprobs.content is not None
    check([len(each.top_logprobs) for each in made.choices[0].logprobs.content], [2] * MOST)


def openai_chat_streamed(client: openai.OpenAI) -> None:
    parts = list(client.chat.completions.create(model=NAME, messages=CHAT, stream=True, **GREEDY))
    check("".join(each.choices[0].delta.content or "" for each in parts), chat_text())
    check([each.choices[0].finish_reason for each in parts], [None] * (len(parts) - 1) + ["length"])


def openai_structured(client: openai.OpenAI) -> None:
    made = client.chat.completions.create(model=NAME, messages=CHAT, response_format=FORMAT, max_tokens=60)
    assert json.loads(made.choices[0].message.content or "")["size"] in (1, 2)
    more = {"structured_outputs": {"choice": ["yes", "no"]}}
    chosen = client.chat.completions.create(model=NAME, messages=CHAT, extra_body=more)
    assert chosen.choices[0].message.content in ("yes", "no")


def openai_tools(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {
        **{"model": NAME, "messages": CHAT, "tools": TOOLS, "parallel_tool_calls": False, "max_tokens": 120},
        **{"tool_choice": "required", "seed": 1},
    }
    made = client.chat.completions.create(**asked)
    with client.chat.completions.stream(**asked) as stream:
        for _ in stream:
            pass
        streamed = stream.get_final_completion()
    for each in (made, streamed):
        (call,) = each.choices[0].message.tool_calls or []
        assert call.type == "function"
        check((call.function.name, each.choices[0].finish_reason), ("look", "tool_calls"))
        assert json.loads(call.function.arguments)["size"] in (1, 2)


def openai_errors(client: openai.OpenAI) -> None:
    wrong: list[tuple[type[openai.APIStatusError], Callable[[], Any]]] = [
        (openai.NotFoundError, lambda: client.completions.create(model="another", prompt="a")),
        (openai.BadRequestError, lambda: client.completions.create(model=NAME, prompt="a" * 600)),
        (openai.BadRequestError, lambda: client.chat.completions.create(model=NAME, messages=CHAT, temperature=3)),
        (openai.AuthenticationError, lambda: client.with_options(api_key="wrong").models.list()),
    ]
    for kind, call in wrong:
        try:
            call()
        except kind:
            continue
        raise AssertionError(f"no {kind.__name__}")


# --- litellm ----------------------------------------------------------------------------------------------------------


def _litellm(server: Server) -> dict[str, Any]:
    return {"api_base": f"{server.url}/v1", "api_key": KEY, **GREEDY}


def litellm_chat(server: Server) -> None:
    import litellm

    made = litellm.completion(model=f"openai/{NAME}", messages=CHAT, **_litellm(server))
    check(made.choices[0].message.content, chat_text())
    check(made.usage.completion_tokens, MOST)


def litellm_chat_streamed(server: Server) -> None:
    import litellm

    parts = list(litellm.completion(model=f"openai/{NAME}", messages=CHAT, stream=True, **_litellm(server)))
    check("".join(each.choices[0].delta.content or "" for each in parts), chat_text())
    check(parts[-1].choices[0].finish_reason, "length")


def litellm_text(server: Server) -> None:
    import litellm

    asked = {"model": f"text-completion-openai/{NAME}", "prompt": PROMPT, **_litellm(server)}
    check(litellm.text_completion(**asked).choices[0].text, answer(PROMPT, MOST)[1])
    parts = list(litellm.text_completion(**asked, stream=True))
    check("".join(each.choices[0].text or "" for each in parts), answer(PROMPT, MOST)[1])


def litellm_tools(server: Server) -> None:
    import litellm

    asked = {**_litellm(server), "tools": TOOLS, "tool_choice": "required", "max_tokens": 120}
    made = litellm.completion(model=f"openai/{NAME}", messages=CHAT, parallel_tool_calls=False, **asked)
    (call,) = made.choices[0].message.tool_calls
    check((call.function.name, made.choices[0].finish_reason), ("look", "tool_calls"))


def litellm_errors(server: Server) -> None:
    import litellm

    litellm.suppress_debug_info = True
    try:
        litellm.completion(model="openai/another", messages=CHAT, **_litellm(server))
    except litellm.NotFoundError:
        return
    raise AssertionError("no NotFoundError")


OPENAI = (
    openai_models,
    openai_completion,
    openai_completion_streamed,
    openai_chat,
    openai_chat_streamed,
    openai_structured,
    openai_tools,
    openai_errors,
)
LITELLM = (litellm_chat, litellm_chat_streamed, litellm_text, litellm_tools, litellm_errors)


def main() -> int:
    from importlib.metadata import version

    wrong = 0
    with server_case.serve(api_keys=(KEY,), sizes={"max_positions": 512}) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0)
        cases = [(case, client) for case in OPENAI] + [(case, server) for case in LITELLM]
        for case, subject in cases:
            began = time.monotonic()
            try:
                case(subject)  # type: ignore[operator]
                said = "ok"
            except Exception as error:
                said = f"FAILED: {type(error).__name__}: {error}"
                wrong += 1
            library, _, what = case.__name__.partition("_")
            seconds = time.monotonic() - began
            print(f"{library} {version(library)}, {what.replace('_', ' ')}: {said} ({seconds:.1f} s)")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
