"""``/tokenize``, and the options of the chat template, which chats share with it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="fastapi is not installed (pip install .[serve])")

from server_case import Server, answer, events, serve
from tokenizers.processors import TemplateProcessing

CHAT = "/v1/chat/completions"
USER = {"role": "user", "content": "hi"}
BEGUN = {"role": "assistant", "content": "So"}
OPEN = {"add_generation_prompt": False, "continue_final_message": True}
BEGIN, BEGIN_ID = "<|bos|>", 256


@pytest.fixture(scope="module")
def beginning() -> Iterator[Server]:
    """A server whose tokenizer begins texts with a token."""
    with serve() as server:
        processor = TemplateProcessing(single=f"{BEGIN} $A", special_tokens=[(BEGIN, BEGIN_ID)])
        server.served.tokenizer.backend_tokenizer.post_processor = processor
        yield server


def _text(server: Server, **asked: Any) -> str:
    tokens = server.post("/tokenize", asked).json()["tokens"]
    return str(server.post("/detokenize", {"tokens": tokens}).json()["prompt"])


def test_strings_are_the_vocabulary_s() -> None:
    with serve() as server:
        found = server.post("/tokenize", {"prompt": "a é", "return_token_strs": True}).json()
    assert found["token_strs"] == ["a", "Ġ", "Ã", "©"]  # each byte's letter


@pytest.mark.parametrize(
    ("asked", "begins"),
    [
        ({"prompt": "hi"}, True),
        ({"prompt": "hi", "add_special_tokens": True}, True),
        ({"prompt": "hi", "add_special_tokens": False}, False),
        ({"messages": [USER]}, False),
        ({"messages": [USER], "add_special_tokens": True}, True),
        ({"messages": [USER], "add_special_tokens": False}, False),
    ],
    ids=lambda each: "-".join(map(str, each)) if isinstance(each, dict) else "",
)
def test_special_tokens(beginning: Server, asked: dict[str, Any], begins: bool) -> None:
    assert (beginning.post("/tokenize", asked).json()["tokens"][0] == BEGIN_ID) is begins


def test_the_last_message_stays_open(server: Server) -> None:
    assert _text(server, messages=[USER, BEGUN]) == "<|turn|>user: hi<|turn|>assistant: So<|turn|>"
    assert _text(server, messages=[USER, BEGUN], **OPEN) == "<|turn|>user: hi<|turn|>assistant: So"


def test_arguments_reach_the_template(server: Server) -> None:
    server.served.tokenizer.chat_template, before = "{{ mood }}", server.served.tokenizer.chat_template
    try:
        assert _text(server, messages=[USER], chat_template_kwargs={"mood": "glad"}) == "glad"
    finally:
        server.served.tokenizer.chat_template = before


def test_a_chat_continues_its_last_message(server: Server) -> None:
    body = {"messages": [USER, BEGUN], "max_tokens": 6, "temperature": 0, **OPEN}
    said = server.post(CHAT, body).json()["choices"][0]["message"]["content"]
    prompt = server.post("/tokenize", {"messages": [USER, BEGUN], **OPEN}).json()["tokens"]
    assert said == answer(prompt, 6)[1]


def test_a_chat_begins_with_special_tokens(beginning: Server) -> None:
    body = {"messages": [USER], "max_tokens": 1}
    plain, special = (
        beginning.post(CHAT, {**body, "add_special_tokens": each}).json()["usage"]["prompt_tokens"]
        for each in (False, True)
    )
    assert special == plain + 1


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
def test_an_echo_is_the_text_that_was_given(beginning: Server, streamed: bool) -> None:
    """Without the token that the tokenizer puts before it; tokens have no other text than theirs."""
    prompts = ["hi", "Grüße"]
    for asked, texts in ((prompts, prompts), ([BEGIN_ID, *b"hi"], [f"{BEGIN}hi"])):
        body = {"prompt": asked, "echo": True, "max_tokens": 0, "stream": streamed}
        answered = beginning.post("/v1/completions", body)
        parts = events(answered.text) if streamed else [answered.json()]
        found = [choice["text"] for part in parts for choice in part["choices"] if choice["text"]]
        assert sorted(found) == sorted(texts)


@pytest.mark.parametrize("path", ["/tokenize", CHAT])
def test_a_message_is_continued_or_begun(server: Server, path: str) -> None:
    error = server.post(path, {"messages": [USER], "continue_final_message": True})
    assert (error.status_code, error.json()["error"]["param"]) == (400, "continue_final_message")
    assert "set add_generation_prompt to false" in error.json()["error"]["message"]
