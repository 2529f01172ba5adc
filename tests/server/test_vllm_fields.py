"""The fields that vLLM adds to OpenAI's: scores of prompts, ids of tokens, truncation, usage in chunks, exclusions."""

from __future__ import annotations

import json
import types
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="fastapi is not installed (pip install .[serve])")

import torch
from server_case import Server, answer, events, model, run, serve

from shardfuse.serving.server import protocol, translate
from shardfuse.serving.server.errors import ApiError

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
GREEDY: dict[str, Any] = {"prompt": "hello", "max_tokens": 4, "temperature": 0}
ASKED: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "temperature": 0}
CHAT_TEXT = "<|turn|>user: hi<|turn|>"
USAGE = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}


def _ok(server: Server, path: str, body: Any) -> Any:
    response = server.post(path, body)
    assert response.status_code == 200, response.text
    return events(response.text) if body.get("stream") else response.json()


def _refused(server: Server, path: str, body: Any) -> tuple[str, str | None]:
    with server.http() as client:  # json.dumps also writes half of a surrogate pair
        response = client.post(path, content=json.dumps(body), headers={"Content-Type": "application/json"})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    return error["message"], error["param"]


def _tokens(server: Server, text: str) -> list[int]:
    return list(server.served.tokenizer.encode(text, add_special_tokens=False))


def _ranked(server: Server, prompt: list[int], most: int) -> list[Any]:
    """What vLLM's form has for ``prompt``, from the model's own forward."""
    with torch.no_grad():
        rows = model()(torch.tensor([prompt[:-1]]))[0].double().log_softmax(-1)
    found: list[Any] = [None]
    for row, token in zip(rows, prompt[1:]):
        ranks = {token: 1 + int((row > row[token]).sum())} | {
            int(each): rank for rank, each in enumerate(row.topk(most).indices, 1)
        }
        found.append(
            {
                str(each): {
                    "logprob": pytest.approx(float(row[each]), abs=1e-4),
                    "rank": rank,
                    "decoded_token": server.served.decode([each]),
                }
                for each, rank in ranks.items()
            }
        )
    return found


# --- prompt_logprobs --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("most", [0, 3])
def test_prompt_logprobs(server: Server, most: int) -> None:
    """In each choice of completions, at the top of a chat."""
    made = _ok(server, TEXT, {**GREEDY, "prompt": ["hello", "ab"], "n": 2, "prompt_logprobs": most})
    wanted = [_ranked(server, list(each.encode()), most) for each in ("hello", "ab")]
    assert [each["prompt_logprobs"] for each in made["choices"]] == [wanted[0], wanted[0], wanted[1], wanted[1]]
    assert [each["logprobs"] for each in made["choices"]] == [None] * 4
    made = _ok(server, CHAT, {**ASKED, "n": 2, "prompt_logprobs": most})
    assert made["prompt_logprobs"] == _ranked(server, _tokens(server, CHAT_TEXT), most)
    assert all("prompt_logprobs" not in each for each in made["choices"])


def test_a_prompt_of_one_token_has_no_score(server: Server) -> None:
    made = _ok(server, TEXT, {**GREEDY, "prompt": "a", "prompt_logprobs": 1, "echo": True, "logprobs": 1})
    assert made["choices"][0]["prompt_logprobs"] == [None]
    assert made["choices"][0]["logprobs"]["token_logprobs"][0] is None


def test_prompt_logprobs_beside_an_echo(server: Server) -> None:
    """Each form has its own number of tokens."""
    both = _ok(server, TEXT, {**GREEDY, "echo": True, "logprobs": 1, "prompt_logprobs": 3})["choices"][0]
    alone = _ok(server, TEXT, {**GREEDY, "echo": True, "logprobs": 1})["choices"][0]
    assert both.pop("prompt_logprobs") == _ranked(server, list(b"hello"), 3)
    assert alone.pop("prompt_logprobs") is None
    assert both == alone


@pytest.mark.parametrize(("path", "body"), [(TEXT, GREEDY), (CHAT, ASKED)])
def test_prompt_logprobs_are_not_streamed(server: Server, path: str, body: Any) -> None:
    said, param = _refused(server, path, {**body, "stream": True, "prompt_logprobs": 0})
    assert (param, "not streamed" in said) == ("prompt_logprobs", True)


def test_the_bytes_of_a_prompts_scores_are_limited() -> None:
    """By the number that is asked for, before the model runs; a form that is longer than estimated, by its bytes."""
    with serve(max_answer_bytes=6000) as server:
        steps = server.engine.stats.steps
        for path, body in (
            (TEXT, {**GREEDY, "prompt": "a" * 5, "n": 20, "prompt_logprobs": 0}),
            (CHAT, {**ASKED, "prompt_logprobs": 20}),
        ):
            assert _refused(server, path, body)[1] == "prompt_logprobs"
        assert server.engine.stats.steps == steps
        response = server.post(TEXT, {**GREEDY, "prompt": "a" * 90, "prompt_logprobs": 0})
        assert response.json()["error"]["code"] == "answer_too_large"
        assert server.engine.stats.steps > steps


# --- the number of log-probabilities ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (TEXT, {**GREEDY, "logprobs": 21}, "logprobs"),
        (TEXT, {**GREEDY, "logprobs": -1}, "logprobs"),
        (TEXT, {**GREEDY, "prompt_logprobs": 21}, "prompt_logprobs"),
        (CHAT, {**ASKED, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        (CHAT, {**ASKED, "prompt_logprobs": -1}, "prompt_logprobs"),
    ],
)
def test_at_most_20_log_probabilities(server: Server, path: str, body: Any, param: str) -> None:
    said, named = _refused(server, path, body)
    assert (named, said) == (param, f"{param}={body[param]}: expected at most 20 (--max-logprobs)")


def test_max_logprobs() -> None:
    with serve(max_logprobs=0) as server:
        assert _ok(server, TEXT, {**GREEDY, "logprobs": 0})["choices"][0]["logprobs"]["tokens"]
        assert _refused(server, TEXT, {**GREEDY, "logprobs": 1})[1] == "logprobs"
    with serve(max_logprobs=-1) as server:
        size = server.served.vocab_size
        made = _ok(server, CHAT, {**ASKED, "logprobs": True, "top_logprobs": -1, "prompt_logprobs": -1})
        assert {len(each["top_logprobs"]) for each in made["choices"][0]["logprobs"]["content"]} == {size}
        assert {len(each) for each in made["prompt_logprobs"][1:]} == {size}
        assert _refused(server, TEXT, {**GREEDY, "logprobs": size + 1})[1] == "logprobs"


# --- ids --------------------------------------------------------------------------------------------------------------


def test_token_ids(server: Server) -> None:
    tokens = [answer(each, 4)[0] for each in ("hello", "abc")]
    body = {**GREEDY, "prompt": ["hello", "abc"], "return_token_ids": True}
    made = _ok(server, TEXT, body)["choices"]
    assert [each["token_ids"] for each in made] == tokens
    assert [each["prompt_token_ids"] for each in made] == [list(b"hello"), list(b"abc")]
    chunks = [each["choices"][0] for each in _ok(server, TEXT, {**body, "stream": True})]
    for index, prompt in enumerate((b"hello", b"abc")):
        mine = [each for each in chunks if each["index"] == index]
        assert [each["token_ids"] for each in mine] == [[token] for token in tokens[index]]
        assert [each.get("prompt_token_ids") for each in mine] == [list(prompt), None, None, None]
    (choice,) = _ok(server, TEXT, {**GREEDY, "max_tokens": 0, "echo": True, "return_token_ids": True})["choices"]
    assert (choice["text"], choice["token_ids"]) == ("hello", [])


def test_token_ids_of_a_chat(server: Server) -> None:
    prompt = _tokens(server, CHAT_TEXT)
    tokens = answer(prompt, 4)[0]
    made = _ok(server, CHAT, {**ASKED, "n": 2, "return_token_ids": True})
    assert made["prompt_token_ids"] == prompt
    assert [each["token_ids"] for each in made["choices"]] == [tokens, tokens]
    assert all("prompt_token_ids" not in each for each in made["choices"])
    chunks = _ok(server, CHAT, {**ASKED, "n": 2, "return_token_ids": True, "stream": True})
    assert [each.get("prompt_token_ids") for each in chunks[:3]] == [prompt, prompt, None]
    for index in range(2):
        mine = [each["choices"][0] for each in chunks if each["choices"][0]["index"] == index]
        assert [token for each in mine for token in each.get("token_ids", [])] == tokens


def test_each_token_has_a_chunk_if_ids_are_asked_for(server: Server) -> None:
    """Also a token that completes no character, or that may begin a stop string."""
    body = {**GREEDY, "logit_bias": {"195": 100}, "stream": True}
    assert [each["choices"][0]["text"] for each in _ok(server, TEXT, body)] == ["\ufffd\ufffd\ufffd\ufffd"]
    chunks = _ok(server, TEXT, {**body, "return_token_ids": True})
    assert [each["choices"][0]["token_ids"] for each in chunks] == [[195]] * 4
    chunks = _ok(server, CHAT, {**ASKED, "logit_bias": {"195": 100}, "stream": True, "return_token_ids": True})
    assert [each["choices"][0].get("token_ids") for each in chunks] == [None, *[[195]] * 4, None]


# --- truncation -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "kept"),
    [
        ({"truncate_prompt_tokens": 3}, b"llo"),
        ({"truncate_prompt_tokens": 3, "truncation_side": "left"}, b"llo"),
        ({"truncate_prompt_tokens": 3, "truncation_side": "right"}, b"hel"),
        ({"truncate_prompt_tokens": 5}, b"hello"),
        ({"truncate_prompt_tokens": 6}, b"hello"),
        ({"truncate_prompt_tokens": -1}, b"hello"),
    ],
)
@pytest.mark.parametrize("prompt", ["hello", list(b"hello")], ids=["text", "tokens"])
def test_a_prompt_is_truncated(server: Server, prompt: Any, more: Any, kept: bytes) -> None:
    made = _ok(server, TEXT, {**GREEDY, "prompt": prompt, "return_token_ids": True, **more})
    assert made["choices"][0]["prompt_token_ids"] == list(kept)
    assert made["choices"][0]["text"] == answer(list(kept), 4)[1]
    assert made["usage"]["prompt_tokens"] == len(kept)


def test_a_chat_is_truncated(server: Server) -> None:
    made = _ok(server, CHAT, {**ASKED, "truncate_prompt_tokens": 3, "return_token_ids": True})
    assert made["prompt_token_ids"] == _tokens(server, CHAT_TEXT)[-3:]


@pytest.mark.parametrize(
    ("path", "asked", "room"),
    [(TEXT, {"max_tokens": 7}, 7), (TEXT, {}, 16), (CHAT, {"max_tokens": 7}, 7), (CHAT, {}, 1)],
)
def test_minus_one_leaves_room_for_the_answer(server: Server, path: str, asked: Any, room: int) -> None:
    """A text longer than the context is taken then."""
    text, context = "ab" * 400, server.served.max_model_len
    body = {"prompt": text} if path == TEXT else {"messages": [{"role": "user", "content": text}]}
    made = _ok(server, path, {**body, **asked, "truncate_prompt_tokens": -1, "ignore_eos": True})
    assert (made["usage"]["prompt_tokens"], made["usage"]["completion_tokens"]) == (context - room, room)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"truncate_prompt_tokens": 0}, "expected 1 to 256, or -1"),
        ({"truncate_prompt_tokens": 257}, "expected 1 to 256, or -1"),
        ({"truncate_prompt_tokens": -2}, "greater than or equal to -1"),
        ({"truncation_side": "left"}, "without truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": 254, "prompt": "a" * 254}, "258 were asked for"),
        ({"truncate_prompt_tokens": 8, "prompt": "a" * 140_000}, "at most 131072 are taken"),
    ],
)
def test_a_truncation_that_cannot_be(server: Server, more: Any, said: str) -> None:
    assert said in _refused(server, TEXT, {**GREEDY, **more})[0]


@pytest.mark.parametrize(
    ("first", "special", "side", "kept"),
    [
        ([1], True, None, [1, 6, 7]),
        ([1], True, "left", [5, 6, 7]),
        ([1], False, None, [5, 6, 7]),
        ([1, 2], True, None, [5, 6, 7]),  # of which some end the text
        ([1, 4, 5], True, None, [5, 6, 7]),  # which would leave no other token
        ([], True, None, [5, 6, 7]),
    ],
)
def test_special_tokens_stay_at_a_texts_beginning(first: Any, special: bool, side: Any, kept: list[int]) -> None:
    served: Any = types.SimpleNamespace(max_model_len=8, first_tokens=first)
    body = protocol.CompletionRequest(prompt="a", truncate_prompt_tokens=3, truncation_side=side)
    assert translate.truncated(served, body, [1, 4, 5, 6, 7], 1, special) == kept


# --- usage in chunks, streamed echoes ---------------------------------------------------------------------------------


def test_usage_in_each_chunk(server: Server) -> None:
    def usage(prompt: int, made: int) -> dict[str, Any]:
        told = {"prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made}
        return {**told, "prompt_tokens_details": {"cached_tokens": 0}}

    *chunks, last = _ok(server, TEXT, {**GREEDY, **USAGE, "prompt": ["hello", "abc"], "logprobs": 0})
    for index, size in ((0, 5), (1, 3)):
        mine = [each["usage"] for each in chunks if each["choices"][0]["index"] == index]
        assert mine == [usage(size, made) for made in (1, 2, 3, 4)]
    assert last["usage"] == usage(8, 8)
    size = len(_tokens(server, CHAT_TEXT))
    *chunks, last = _ok(server, CHAT, {**ASKED, **USAGE, "logprobs": True})
    assert [each["usage"] for each in chunks] == [usage(size, made) for made in (0, 1, 2, 3, 4, 4)]
    assert last["usage"] == usage(size, 4)


def test_usage_in_chunks_comes_with_usage_alone(server: Server) -> None:
    """As in vLLM, whose clients send both fields."""
    body = {**GREEDY, "stream": True, "stream_options": {"continuous_usage_stats": True, "include_usage": False}}
    assert all("usage" not in each for each in _ok(server, TEXT, body))


@pytest.mark.parametrize("most", [0, 4])
def test_an_echo_with_logprobs_is_streamed(server: Server, most: int) -> None:
    """The first chunk of a choice has the prompt's text and scores, and those of the first token."""
    body = {**GREEDY, "max_tokens": most, "prompt": ["hello", "ab"], "n": 2, "echo": True, "logprobs": 2}
    whole = _ok(server, TEXT, body)["choices"]
    chunks = [each["choices"][0] for each in _ok(server, TEXT, {**body, "stream": True})]
    for choice, prompt in zip(whole, ("hello", "hello", "ab", "ab")):
        mine = [each for each in chunks if each["index"] == choice["index"]]
        assert len(mine) == (most or 1)
        assert len(mine[0]["logprobs"]["tokens"]) == len(prompt) + (most > 0)
        assert mine[0]["text"].startswith(prompt)
        assert "".join(each["text"] for each in mine) == choice["text"]
        for name, values in choice["logprobs"].items():
            assert [value for each in mine for value in each["logprobs"][name]] == values
        assert mine[-1]["finish_reason"] == choice["finish_reason"] == "length"


# --- min_tokens, bad_words, beams -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("path", "body"), [(TEXT, GREEDY), (CHAT, ASKED)])
def test_min_tokens(server: Server, path: str, body: Any) -> None:
    """Neither a stop token nor a stop string ends an answer before."""
    short = {**body, "max_tokens": 12, "logit_bias": {"257": 50}}
    assert _ok(server, path, short)["usage"]["completion_tokens"] == 1
    assert _ok(server, path, {**short, "min_tokens": 5})["usage"]["completion_tokens"] == 6
    short = {**body, "max_tokens": 12, "allowed_token_ids": [97], "stop": "a"}
    made = _ok(server, path, {**short, "min_tokens": 5})
    assert made["usage"]["completion_tokens"] == 6
    assert made["choices"][0]["stop_reason"] == "a"
    assert _refused(server, path, {**body, "min_tokens": 5})[1] == "min_tokens"


def test_bad_words(server: Server) -> None:
    """Each word, and the word after a space where that is another beginning of as many tokens."""
    body = {**GREEDY, "max_tokens": 6, "logit_bias": {"97": 60, "98": 50, "32": 40}}
    assert _ok(server, TEXT, body)["choices"][0]["text"] == "aaaaaa"
    assert _ok(server, TEXT, {**body, "bad_words": ["a"]})["choices"][0]["text"] == "bbbbbb"
    assert _ok(server, TEXT, {**body, "bad_words": ["aa", " b"]})["choices"][0]["text"] == "a a a "
    chat = {**ASKED, "logit_bias": {"97": 60, "98": 50, "99": 40}, "bad_words": ["aa", "bb", "aba"]}
    assert _ok(server, CHAT, chat)["choices"][0]["message"]["content"] == "abca"
    assert _ok(server, TEXT, {**GREEDY, "bad_words": []})["choices"][0]["text"] == answer("hello", 4)[1]


def test_a_word_after_a_space_is_one_token() -> None:
    """As in a tokenizer with tokens that begin with a space."""
    known = {
        "cat": [7],
        " cat": [8],
        "cats": [7, 9],
        " cats": [8, 9],
        "x": [1],
        " x": [2, 1],
        "y": [4],
        " y": [4],
        "": [],
        " ": [2],
    }

    async def encode(text: str, special: bool, most: int) -> list[int]:
        return known[text]

    served: Any = types.SimpleNamespace(encode=encode, check_tokens=lambda tokens, param: None)
    body = protocol.CompletionRequest(prompt="a", bad_words=["cat", " cats", "x", "y", "cat"])
    assert run(lambda: translate.bad_words(served, body)) == ((7,), (8,), (7, 9), (8, 9), (1,), (4,))
    with pytest.raises(ApiError, match="has no token"):
        run(lambda: translate.bad_words(served, protocol.CompletionRequest(prompt="a", bad_words=["  "])))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["a"] * 129, "at most 128 items"),
        (["a" * 700, "b" * 700], "expected at most 1024"),
        (["a" * 100_000], "at most 1024 are taken"),
        ([""], "has no token"),
        (["\ud800"], "surrogate"),
        ("a", "valid list"),
    ],
    ids=["many", "long", "one long", "empty", "half a pair", "text"],
)
def test_wrong_bad_words(server: Server, words: Any, said: str) -> None:
    message, param = _refused(server, TEXT, {**GREEDY, "bad_words": words})
    assert said in message
    assert param == "bad_words"


def test_options_that_exclude_every_token_are_the_clients_error(server: Server) -> None:
    body = {**GREEDY, "allowed_token_ids": [97], "bad_words": ["a"]}
    assert "bad_words and what else excludes tokens leave none" in _refused(server, TEXT, body)[0]


@pytest.mark.parametrize(("path", "body"), [(TEXT, GREEDY), (CHAT, ASKED)])
def test_beam_search_is_refused_by_name(server: Server, path: str, body: Any) -> None:
    said, param = _refused(server, path, {**body, "use_beam_search": True})
    assert param == "use_beam_search"
    assert said.startswith("use_beam_search: beam search is not supported")
    assert _ok(server, path, {**body, "use_beam_search": False})["usage"]["completion_tokens"] == 4


# --- roles ------------------------------------------------------------------------------------------------------------


def test_the_template_decides_which_roles_there_are(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    messages = [{"role": "critic 1", "content": "hm"}]
    found = _ok(server, "/tokenize", {"messages": messages})["tokens"]
    assert found == _tokens(server, "<|turn|>critic 1: hm<|turn|>")
    assert _ok(server, CHAT, {**ASKED, "messages": messages})["usage"]["prompt_tokens"] == len(found)
    monkeypatch.setattr(server.served.tokenizer, "chat_template", "{{ raise_exception('no such role') }}")
    assert "no such role" in _refused(server, CHAT, {**ASKED, "messages": messages})[0]


@pytest.mark.parametrize("role", ["", "a" * 65, "a\nb", "\ud800", 3, None])
def test_a_role_is_a_short_text(server: Server, role: Any) -> None:
    body = {**ASKED, "messages": [{"role": role, "content": "hm"}]}
    assert _refused(server, CHAT, body)[1] == "messages.0.role"
    assert _refused(server, "/tokenize", {"messages": body["messages"]})[1] == "messages.0.role"
