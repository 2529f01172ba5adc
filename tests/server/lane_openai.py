"""The lane of OpenAI's client against the server: completions, chats and responses, whole and streamed.

Run by the Python of an environment that has openai. The texts are compared with the model's own greedy ones, and every
answer and event is validated with the client's classes, which the client itself does not do.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
import server_case
from server_case import NAME, Server, answer, tokenizer

PROMPT, MOST = "Once upon a time", 12
KEY = "a-key"


def _own(client_prompt: str) -> str:
    tokens = tokenizer().encode(client_prompt, add_special_tokens=False)
    return answer(list(tokens), MOST)[1]


def faults(server: Server) -> list[str]:
    """What differs from the model's own text, and what the client's classes refuse."""
    import openai
    from openai.types import Completion
    from openai.types.chat import ChatCompletion, ChatCompletionChunk
    from openai.types.responses import Response, ResponseStreamEvent
    from pydantic import TypeAdapter, ValidationError

    client: Any = openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0)
    greedy = {"model": NAME, "temperature": 0}
    found: list[str] = []

    def check(what: str, said: str, wanted: str, kind: Any, *given: Any) -> None:
        if said != wanted:
            found.append(f"{what}: {said!r}, and the model says {wanted!r}")
        for each in given:
            try:
                TypeAdapter(kind).validate_python(each.to_dict())
            except ValidationError as error:
                found.append(f"{what}: {error}")

    text = _own(PROMPT)
    asked = {**greedy, "prompt": PROMPT, "max_tokens": MOST}
    whole = client.completions.create(**asked)
    check("a completion", whole.choices[0].text, text, Completion, whole)
    if whole.usage.prompt_tokens_details.cached_tokens is None:
        found.append("a completion: its usage has no cached_tokens")
    pieces = [each.choices[0].text for each in client.completions.create(**asked, stream=True)]
    check("a streamed completion", "".join(pieces), text, Completion)

    text = _own(f"<|turn|>user: {PROMPT}<|turn|>")
    asked = {**greedy, "messages": [{"role": "user", "content": PROMPT}], "max_completion_tokens": MOST}
    whole = client.chat.completions.create(**asked, logprobs=True, top_logprobs=2)
    check("a chat", whole.choices[0].message.content, text, ChatCompletion, whole)
    chunks = list(client.chat.completions.create(**asked, stream=True))
    said = "".join(each.choices[0].delta.content or "" for each in chunks)
    check("a streamed chat", said, text, ChatCompletionChunk, *chunks)

    asked = {**greedy, "input": PROMPT, "max_output_tokens": MOST, "top_logprobs": 2}
    asked["include"] = ["message.output_text.logprobs"]
    whole = client.responses.create(**asked)
    check("a response", whole.output_text, text, Response, whole)
    events = list(client.responses.create(**asked, stream=True))
    said = "".join(each.delta for each in events if each.type == "response.output_text.delta")
    check("a streamed response", said, text, ResponseStreamEvent, *events)
    if events[-1].type != "response.incomplete" or events[-1].response.output_text != text:
        found.append(f"a streamed response ends in {events[-1].type}")
    form = {"type": "json_schema", "name": "a", "schema": {"enum": ["yes"]}}
    with client.responses.stream(model=NAME, input=PROMPT, text={"format": form}) as stream:
        check("a gathered response", stream.until_done().get_final_response().output_text, '"yes"', Response)
    return found


def main() -> int:
    import openai

    with server_case.serve(api_keys=(KEY,)) as server:
        wrong = faults(server)
    print(f"openai {openai.__version__}:", "equal" if not wrong else "\n".join(wrong))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
