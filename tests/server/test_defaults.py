"""What a folder's settings for generation, and the room in its cache, mean for requests that do not say."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="fastapi is not installed (pip install .[dev])")
pytest.importorskip("prometheus_client", reason="prometheus_client is not installed (pip install .[dev])")
pytest.importorskip("transformers", reason="transformers is not installed (pip install .[dev])")

from starlette.testclient import TestClient

from shardfuse.serving import Request
from shardfuse.serving.folder import open_folder
from shardfuse.serving.folder_options import FolderOptions
from shardfuse.serving.server import Served, ServerOptions, create_app
from shardfuse.testing import save_tiny_hf

END = 257  # of the tiny tokenizer
Client = tuple[Callable[..., Any], list[Request]]


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Client]]:
    """serve(generation, max_position_embeddings=8192) -> ask and the requests that reached the engine.

    ask("completions", prompt="ab") -> the choice, or the error's message; a stream's choices are joined.
    """
    opened = []

    def start(generation: Any = None, choice: str = "auto", **config: Any) -> Client:
        folder = save_tiny_hf(tmp_path / f"tiny {len(opened)}")
        (folder / "checksums.json").unlink()
        (folder / "config.json").write_text(json.dumps(json.loads((folder / "config.json").read_text()) | config))
        if generation is not None:
            (folder / "generation_config.json").write_text(json.dumps(generation))
        made = open_folder(FolderOptions(folder, cache_gib=0.002, block_size=16, generation_config=choice))
        app = create_app(Served(made.engine, made.tokenizer, made.stop_ids, ServerOptions(name="tiny")))
        client = TestClient(app)
        client.__enter__()
        opened.append((client, made.engine))
        seen: list[Request] = []
        add = made.engine.add_all

        def watched(requests: Any) -> Any:
            seen.extend(requests)
            return add(requests)

        made.engine.add_all = watched  # type: ignore[method-assign]

        def ask(what: str, **body: Any) -> Any:
            if what == "models":
                return client.get("/v1/models").json()["data"][0]
            answer = client.post(f"/v1/{what}", json=body)
            if answer.status_code != 200:
                return answer.json()["error"]["message"]
            if not body.get("stream"):
                return answer.json()["choices"][0]
            found: dict[str, Any] = {}
            for line in answer.text.splitlines():
                if line.startswith("data: {"):
                    for choice in json.loads(line[6:])["choices"]:
                        found |= {name: value for name, value in choice.items() if value is not None}
            return found

        return ask, seen

    yield start
    for client, engine in opened:
        client.__exit__(None, None, None)
        engine.close()


CHAT = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize("body", [{"prompt": "ab"}, {"messages": CHAT}], ids=["completions", "chat"])
def test_the_folders_defaults_hold_and_a_request_overrides(serve: Any, body: dict[str, Any]) -> None:
    what = "completions" if "prompt" in body else "chat/completions"
    given = {"temperature": 0.01, "top_k": 1, "top_p": 0.8, "min_p": 0.1, "repetition_penalty": 1.3}
    ask, seen = serve({**given, "do_sample": True, "max_new_tokens": 6, "stop_strings": ["@@"], "eos_token_id": END})
    texts = {json.dumps(ask(what, **body).get("text") or ask(what, **body)["message"]) for _ in range(3)}
    assert len(texts) == 1  # of the likeliest token alone
    for request in seen:
        assert {name: getattr(request.sampling, name) for name in given} == given
        assert (request.max_new_tokens, request.stop_strings) == (6, ("@@",))
    mine = {"temperature": 0.5, "top_k": -1, "top_p": 1, "min_p": 0, "repetition_penalty": 1}
    ask(what, **body, **mine, max_tokens=9, stop=[])
    request = seen[-1]
    assert {name: getattr(request.sampling, name) for name in mine} == {**mine, "top_k": 0}
    assert (request.max_new_tokens, request.stop_strings) == (9, ())


@pytest.mark.parametrize(
    ("generation", "choice", "temperature"),
    [
        (None, "auto", 1.0),
        ({"top_p": 0.5}, "auto", 1.0),
        ({"do_sample": False, "temperature": 0.7}, "auto", 0.0),
        ({"temperature": 0.7}, "auto", 0.7),
        ({"do_sample": True, "temperature": 0.7}, "vllm", 1.0),
    ],
)
def test_the_temperature_of_a_silent_request(serve: Any, generation: Any, choice: str, temperature: float) -> None:
    ask, seen = serve(generation, choice)
    ask("completions", prompt="ab", max_tokens=2)
    assert seen[0].sampling.temperature == temperature


def test_lengths_follow_max_length_and_the_context(serve: Any) -> None:
    ask, seen = serve({"max_length": 40})
    ask("completions", prompt="x" * 10)
    ask("completions", prompt="x" * 30)
    ask("completions", prompt="x" * 60)
    assert [request.max_new_tokens for request in seen] == [16, 10, 16]
    ask, seen = serve({"max_new_tokens": 100_000})
    ask("completions", prompt="x" * 200)  # the default gives way to the context of 256
    assert [request.max_new_tokens for request in seen] == [56]
    assert "256 tokens, and 257 were asked for" in ask("completions", prompt="x" * 200, max_tokens=57)


def test_a_chat_fills_a_cache_smaller_than_the_context(serve: Any) -> None:
    ask, seen = serve(max_position_embeddings=131072)
    limit = ask("models")["max_model_len"]
    assert 256 < limit < 131072
    choice = ask("chat/completions", messages=CHAT, stop_token_ids=list(range(256)))  # ends at once
    assert choice["finish_reason"] == "stop"
    assert seen[0].max_new_tokens == limit - len(seen[0].prompt)
    told = ask("chat/completions", messages=CHAT, max_tokens=limit)
    assert f"this server takes {limit} tokens of the model's context of 131072" in told


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("body", [{"prompt": "ab"}, {"messages": CHAT}], ids=["completions", "chat"])
def test_what_ended_the_answer(serve: Any, body: dict[str, Any], stream: bool) -> None:
    what = "completions" if "prompt" in body else "chat/completions"
    ask, _ = serve({"do_sample": False})
    body = {**body, "stream": stream, "max_tokens": 24, "ignore_eos": True}
    free = ask(what, **{**body, "stream": False}, logprobs=1 if "prompt" in body else True)
    scores = free["logprobs"]
    words = scores["tokens"] if "prompt" in body else [each["token"] for each in scores["content"]]
    assert (free["finish_reason"], free["stop_reason"]) == ("length", None)
    text = next(word for word in words if word.isascii() and word.isprintable())
    ended = ask(what, **body, stop=["never there", text])
    assert (ended["finish_reason"], ended["stop_reason"]) == ("stop", text)
    ended = ask(what, **body, stop_token_ids=[ord(text)])
    assert (ended["finish_reason"], ended["stop_reason"]) == ("stop", ord(text))
    ask, _ = serve({"do_sample": False, "eos_token_id": [END, ord(text)]})
    assert ask(what, **{**body, "ignore_eos": False})["stop_reason"] == ord(text)
    assert ask(what, **body)["finish_reason"] == "length"
