"""OpenAI's own client against the server: what it sends, what it makes of the answers, and its errors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

pytest.importorskip("openai", reason="openai is not installed (pip install .[dev])")

import openai
from server_case import NAME, SOON_S, Server, answer, run, serve, text_of, until

from shardfuse.serving import RanksLost

PROMPTS = ["hello", "abc", "Grüße"]
CHAT: Any = [{"role": "system", "content": "be brief"}, {"role": "user", "content": [{"type": "text", "text": "hi"}]}]
CHAT_TEXT = "<|turn|>system: be brief<|turn|>user: hi<|turn|>"


def _client(server: Server, **options: Any) -> Any:
    return openai.OpenAI(base_url=f"{server.url}/v1", **{"api_key": "none", "max_retries": 0, "timeout": 20, **options})


@pytest.fixture
def client(server: Server) -> Iterator[Any]:
    with _client(server) as client:
        yield client


def _tokens(server: Server, text: str) -> list[int]:
    return list(server.served.tokenizer.encode(text, add_special_tokens=False))


def test_models(client: Any) -> None:
    (model,) = client.models.list().data
    assert (model.id, model.object, model.owned_by) == (NAME, "model", "shardfuse")
    assert client.models.retrieve(NAME).id == NAME


# --- completions ------------------------------------------------------------------------------------------------------


def test_greedy_text_is_the_models_own(client: Any) -> None:
    """Of several prompts, as text and as tokens, whole and streamed."""
    wanted = [answer(prompt) for prompt in PROMPTS]
    asked = {"model": NAME, "max_tokens": 16, "temperature": 0}
    for prompts in (PROMPTS, [list(prompt.encode()) for prompt in PROMPTS]):
        made = client.completions.create(prompt=prompts, **asked)
        assert [choice.text for choice in made.choices] == [text for _, text in wanted]
        assert [choice.index for choice in made.choices] == [0, 1, 2]
        assert made.usage.prompt_tokens == sum(len(prompt.encode()) for prompt in PROMPTS)
        assert made.usage.completion_tokens == sum(len(tokens) for tokens, _ in wanted)
        assert made.usage.total_tokens == made.usage.prompt_tokens + made.usage.completion_tokens
    texts, usage = _joined(
        client.completions.create(prompt=PROMPTS, stream=True, stream_options={"include_usage": True}, **asked)
    )
    assert texts == {index: text for index, (_, text) in enumerate(wanted)}
    assert usage == made.usage


def _joined(stream: Any) -> tuple[dict[int, str], Any]:
    """The text of each choice, which ends once and has nothing after its end, and the usage, in the last chunk."""
    texts: dict[int, str] = {}
    ended: set[int] = set()
    chunks = list(stream)
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in chunks}) == 1
    for chunk in chunks:
        for choice in chunk.choices:
            assert choice.index not in ended
            piece = choice.text if hasattr(choice, "text") else choice.delta.content
            texts[choice.index] = texts.get(choice.index, "") + (piece or "")
            if choice.finish_reason is not None:
                ended.add(choice.index)
    assert ended == texts.keys()
    assert all(chunk.usage is None for chunk in chunks[:-1])
    return texts, chunks[-1].usage


def test_a_seed_gives_one_text_streamed_or_not(client: Any) -> None:
    asked = {"model": NAME, "prompt": "hello", "max_tokens": 24, "temperature": 0.9, "top_p": 0.95, "seed": 7, "n": 3}
    whole = [choice.text for choice in client.completions.create(**asked).choices]
    assert whole == [answer("hello", 24, temperature=0.9, top_p=0.95, seed=7 + index)[1] for index in range(3)]
    texts, usage = _joined(client.completions.create(stream=True, **asked))
    assert [texts[index] for index in range(3)] == whole
    assert usage is None
    assert len(set(whole)) == 3
    unseeded = {client.completions.create(**{**asked, "seed": None, "n": 1}).choices[0].text for _ in range(3)}
    assert len(unseeded) == 3


@pytest.mark.parametrize("streamed", [False, True])
def test_stop_strings_cut(client: Any, streamed: bool) -> None:
    _, text = answer("hello", 24)
    stop = text[9:11]
    made = client.completions.create(
        model=NAME, prompt="hello", max_tokens=24, temperature=0, stop=[stop, "zzz"], stream=streamed
    )
    if streamed:
        chunks = list(made)
        said, why = "".join(chunk.choices[0].text for chunk in chunks), chunks[-1].choices[0].finish_reason
    else:
        said, why = made.choices[0].text, made.choices[0].finish_reason
    assert (said, why) == (text[: text.index(stop)], "stop")


def test_logprobs_are_the_models(client: Any, server: Server) -> None:
    asked = {"model": NAME, "prompt": "hello", "max_tokens": 8, "temperature": 0, "logprobs": 3}
    choice = client.completions.create(**asked).choices[0]
    tokens, _ = answer("hello", 8)
    scores = _scores([*b"hello", *tokens])[4:]
    found = choice.logprobs
    assert found.tokens == [server.served.decode([token]) for token in tokens]
    assert found.token_logprobs == pytest.approx([float(row[token]) for row, token in zip(scores, tokens)])
    for row, top in zip(scores, found.top_logprobs):
        best: dict[str, float] = {}
        for token in row.topk(3).indices.tolist():
            best.setdefault(server.served.decode([token]), float(row[token]))
        assert top == pytest.approx(best)  # of tokens with one text the likeliest counts
    assert found.text_offset == [sum(map(len, found.tokens[:at])) for at in range(8)]
    parts = [chunk.choices[0].logprobs for chunk in client.completions.create(stream=True, **asked)]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [each for part in parts for each in getattr(part, name)] == getattr(found, name)


def _scores(tokens: list[int]) -> Any:
    """The model's log-probabilities [T - 1, V] of what follows each of ``tokens`` but the last."""
    import torch
    from server_case import model

    with torch.no_grad():
        return model()(torch.tensor([tokens[:-1]]))[0].log_softmax(-1)


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("most", [0, 4])
def test_echo_scores_the_prompt(client: Any, most: int, n: int) -> None:
    made = client.completions.create(
        model=NAME, prompt="hello", max_tokens=most, temperature=0, echo=True, logprobs=1, n=n
    )
    tokens = answer("hello", 4)[0][:most]
    scores = _scores([*b"hello", *tokens])
    wanted = [float(row[token]) for row, token in zip(scores, [*b"ello", *tokens])]
    assert len(made.choices) == n
    for choice in made.choices:
        assert choice.text == "hello" + text_of(tokens)
        assert choice.logprobs.token_logprobs[0] is None
        assert choice.logprobs.token_logprobs[1:] == pytest.approx(wanted)
        assert choice.logprobs.text_offset == list(range(5 + most))
        assert choice.finish_reason == "length"
    assert made.usage.completion_tokens == most * n
    if most:
        texts, _ = _joined(
            client.completions.create(model=NAME, prompt="hello", max_tokens=4, temperature=0, echo=True, stream=True)
        )
        assert texts == {0: "hello" + text_of(tokens)}


# --- chat -------------------------------------------------------------------------------------------------------------


def test_a_chat_is_its_template(client: Any, server: Server) -> None:
    prompt = _tokens(server, CHAT_TEXT)
    tokens, text = answer(prompt, 12)
    asked = {"model": NAME, "messages": CHAT, "temperature": 0, "max_completion_tokens": 12}
    made = client.chat.completions.create(logprobs=True, top_logprobs=2, **asked)
    (choice,) = made.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", text, "length")
    assert (made.usage.prompt_tokens, made.usage.completion_tokens) == (len(prompt), len(tokens))
    scores = _scores([*prompt, *tokens])[len(prompt) - 1 :]
    assert [each.logprob for each in choice.logprobs.content] == pytest.approx(
        [float(row[t]) for row, t in zip(scores, tokens)]
    )
    assert [[top.logprob for top in each.top_logprobs] for each in choice.logprobs.content] == [
        pytest.approx(row.topk(2).values.tolist()) for row in scores
    ]
    stream = list(client.chat.completions.create(stream=True, logprobs=True, top_logprobs=2, **asked))
    assert stream[0].choices[0].delta.role == "assistant"
    assert _joined(stream)[0] == {0: text}
    parts = [each.choices[0].logprobs for each in stream if each.choices[0].logprobs is not None]
    again = [each for part in parts for each in part.content]
    assert [each.token for each in again] == [each.token for each in choice.logprobs.content]
    assert [each.logprob for each in again] == pytest.approx([each.logprob for each in choice.logprobs.content])


def test_an_answer_without_a_limit_fills_the_context(client: Any, server: Server) -> None:
    made = client.chat.completions.create(model=NAME, messages=CHAT, temperature=0, extra_body={"ignore_eos": True})
    assert made.usage.total_tokens == server.served.max_model_len


def test_async_streams_side_by_side(server: Server) -> None:
    async def main() -> list[str]:
        import asyncio

        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:

            async def one(prompt: str) -> str:
                stream = await client.completions.create(
                    model=NAME, prompt=prompt, max_tokens=16, temperature=0, stream=True
                )
                return "".join([chunk.choices[0].text async for chunk in stream])

            return list(await asyncio.gather(*map(one, PROMPTS * 4)))

    assert run(main) == [answer(prompt)[1] for prompt in PROMPTS] * 4


def test_leaving_a_stream_ends_its_request(client: Any, server: Server) -> None:
    aborted = "vllm:request_success_total{abort}"
    before = server.metrics()[aborted]
    with server.slow(0.1):
        with client.completions.create(
            model=NAME, prompt="hello", max_tokens=200, stream=True, extra_body={"ignore_eos": True}
        ) as stream:
            next(iter(stream))
        until(lambda: not server.served.open_requests)
        server.idle()
    assert server.metrics()[aborted] == before + 1


SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["Bern", "Köln"]}, "size": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["name", "size"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("streamed", [False, True])
def test_json_of_a_schema(client: Any, streamed: bool) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "town", "strict": True, "schema": SCHEMA}}
    for seed in range(3):
        made = client.chat.completions.create(
            model=NAME, messages=CHAT, seed=seed, response_format=form, stream=streamed
        )
        text = _joined(made)[0][0] if streamed else made.choices[0].message.content
        found = json.loads(text)
        assert found.keys() == {"name", "size"}
        assert found["name"] in ("Bern", "Köln")
        assert 1 <= found["size"] <= 9


def test_tools_as_clients_gather_them(client: Any) -> None:
    """openai's own helper for streams puts the pieces together; whole and streamed are the same."""
    size = {
        "type": "object",
        "properties": {"size": {"enum": [1, 2]}},
        "required": ["size"],
        "additionalProperties": False,
    }
    tool = {"type": "function", "function": {"name": "f", "parameters": size}}
    asked = {"model": NAME, "messages": CHAT[1:], "tools": [tool], "tool_choice": "required", "seed": 3}
    asked |= {"parallel_tool_calls": False, "max_tokens": 80}
    with serve(sizes={"max_positions": 512}, engine={"num_blocks": 128}) as server, _client(server) as client:
        whole = client.chat.completions.create(**asked).choices[0]
        with client.chat.completions.stream(**asked) as stream:
            stream.until_done()
            gathered = stream.get_final_completion().choices[0]
    assert whole.finish_reason == gathered.finish_reason == "tool_calls"
    (one,), (other,) = whole.message.tool_calls, gathered.message.tool_calls
    assert (one.type, one.function.name) == (other.type, other.function.name) == ("function", "f")
    assert one.function.arguments == other.function.arguments
    assert json.loads(one.function.arguments)["size"] in (1, 2)


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "param", "said"),
    [
        ({"prompt": "a" * 300}, None, "context is 256 tokens"),
        ({"prompt": [[]]}, "prompt", "no token"),
        ({"prompt": "a", "temperature": 3}, "temperature", "less than or equal to 2; 3 was given"),
        ({"prompt": "a", "n": 0}, "n", "greater than or equal to 1"),
        ({"prompt": "a", "logit_bias": {"999": 1}}, "logit_bias", "token 999 is out of vocabulary: .* 0 to 259"),
        ({"prompt": "a", "logit_bias": {"b": 1, "c": 2, "1": 1}}, "logit_bias", "'b', 'c' are no tokens"),
        ({"prompt": "a", "logit_bias": dict.fromkeys("bcdefg", 1)}, "logit_bias", "'b', 'c', 'd', 'e', ... are no"),
        ({"prompt": "a", "extra_body": {"use_beam_search": True}}, "use_beam_search", "not supported"),
        ({"prompt": "a", "stream_options": {"include_usage": True}}, "stream_options", "set stream to true"),
        ({"prompt": "a", "best_of": 3}, "best_of", "beam search is not supported: omit best_of"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens", "without echo"),
        ({"prompt": "a", "extra_body": {"structured_outputs": {"regex": "("}}}, None, "cannot be compiled"),
        ({"prompt": "a", "stream": True, "extra_body": {"structured_outputs": {"regex": "("}}}, None, "be compiled"),
    ],
    ids=lambda each: next(reversed(each)) if isinstance(each, dict) else "",
)  # fmt: skip
def test_what_is_wrong_is_a_bad_request(client: Any, asked: dict[str, Any], param: str | None, said: str) -> None:
    with pytest.raises(openai.BadRequestError, match=said) as raised:
        client.completions.create(model=NAME, **asked)
    assert raised.value.param == param
    assert raised.value.type == "invalid_request_error"


def test_another_model_is_not_found(client: Any) -> None:
    for call in (
        lambda: client.models.retrieve("gpt"),
        lambda: client.completions.create(model="gpt", prompt="a"),
        lambda: client.chat.completions.create(model="gpt", messages=CHAT),
    ):
        with pytest.raises(openai.NotFoundError, match="only 'tiny'") as raised:
            call()
        assert raised.value.code == "model_not_found"


def test_keys() -> None:
    with serve(api_keys=("right", "other")) as server:
        assert _client(server, api_key="right").completions.create(model=NAME, prompt="a", max_tokens=1).choices
        with pytest.raises(openai.AuthenticationError, match="is not right") as raised:
            _client(server, api_key="wrong").models.list()
        assert raised.value.code == "invalid_api_key"
        assert _client(server, api_key="other").models.list().data


def test_a_large_body(server: Server) -> None:
    with serve(max_body_bytes=1000) as small, pytest.raises(openai.APIStatusError, match="1000") as raised:
        _client(small).completions.create(model=NAME, prompt="a" * 1000)
    assert raised.value.status_code == 413


def test_a_full_queue_and_its_retry() -> None:
    """429 with Retry-After, which the client follows by itself where it may retry; 400 for what can never wait."""
    with serve(engine={"max_num_seqs": 1, "max_queued_requests": 2}) as server, _client(server) as client:
        with ThreadPoolExecutor(1) as pool:
            with server.paused():
                first = pool.submit(client.completions.create, model=NAME, prompt="a", max_tokens=4, n=2)
                until(lambda: server.engine._live)
                with pytest.raises(openai.RateLimitError, match="max_queued_requests=2") as raised:
                    client.completions.create(model=NAME, prompt="b", max_tokens=1)
                assert raised.value.response.headers["retry-after"] == "1"
                with pytest.raises(openai.RateLimitError, match="2 prompts, which wait together or not at all"):
                    client.completions.create(model=NAME, prompt=["b", "c"], max_tokens=1, stream=True)
                with pytest.raises(openai.BadRequestError, match=r"4 answers .* at most 2 may wait"):
                    client.completions.create(model=NAME, prompt=["b", "c"], n=2)
            assert first.result(SOON_S).choices
        made = _client(server, max_retries=3).completions.create(model=NAME, prompt="b", max_tokens=1)
        assert made.choices


def test_draining_and_lost_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    with serve() as server, _client(server) as client:
        with (
            server.failing(RanksLost("rank 1 has ended")),
            pytest.raises(openai.InternalServerError, match="rank 1 has ended") as raised,
        ):
            client.completions.create(model=NAME, prompt="a")
        assert (raised.value.status_code, raised.value.code) == (503, "ranks_lost")
        server.served.draining = True
        with pytest.raises(openai.InternalServerError, match="shutting down") as raised:
            client.completions.create(model=NAME, prompt="a")
        assert (raised.value.status_code, raised.value.code) == (503, "draining")
        assert raised.value.response.headers["retry-after"] == "5"


def test_an_error_within_a_stream_is_raised(server: Server, client: Any) -> None:
    stream = client.completions.create(
        model=NAME, prompt="a", max_tokens=50, stream=True, extra_body={"ignore_eos": True}
    )
    with (
        pytest.raises(openai.APIError, match="failed on this request: ArithmeticError"),
        server.failing(ArithmeticError("a defect")),
    ):
        list(stream)
    assert isinstance(client.completions.create(model=NAME, prompt="a", max_tokens=1).choices, list)
