"""The kit that judges servers and attention functions: that it finds what is wrong, and lets pass what is right."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

import shardfuse
from shardfuse.integrations.conformance import attention, models, server

# ----------------------------------------------------------------------------------------------- an attention function
CPU = torch.device("cpu")


def _off_by_one(*args: Any, **kwargs: Any) -> Any:
    if kwargs.get("window") is not None:
        kwargs["window"] += 1
    return shardfuse.paged_attention(*args, **kwargs)


def _no_sinks(*args: Any, sinks: Any = None, **kwargs: Any) -> Any:
    if sinks is not None:
        raise NotImplementedError("no sinks here")
    return shardfuse.paged_attention(*args, **kwargs)


def _transposed(*args: Any, **kwargs: Any) -> Any:
    found = shardfuse.paged_attention(*args, **kwargs)
    return found.transpose(0, 1) if isinstance(found, torch.Tensor) else (found[0].transpose(0, 1), found[1])


def _crashes(*args: Any, **kwargs: Any) -> Any:
    raise KeyError("inside")


def _of_lse(spoil: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., Any]:
    """An attention function whose lse is spoiled."""

    def attention_function(*args: Any, **kwargs: Any) -> Any:
        found = shardfuse.paged_attention(*args, **kwargs, impl="reference")
        return found if isinstance(found, torch.Tensor) else (found[0], spoil(found[1]))

    return attention_function


def test_every_case_of_ours_is_right():
    found = list(attention.check(attention.load("shardfuse:paged_attention"), CPU))
    assert len(found) == len(attention.names()) > 50
    assert {result.verdict for result in found} == {"ok"}, [result for result in found if result.verdict != "ok"]


@pytest.mark.spoiled
@pytest.mark.parametrize(
    ("function", "feature", "verdict", "says"),
    [
        (_off_by_one, "window", "wrong", "out"),
        (_no_sinks, "sinks", "refused", "NotImplementedError: no sinks here"),
        (_transposed, "mixed", "wrong", "expected ["),
        (_crashes, "mixed", "wrong", "KeyError: 'inside'"),
    ],
)
def test_what_is_wrong_or_refused_is_told(function: Callable[..., Any], feature: str, verdict: str, says: str):
    found = list(attention.check(function, CPU, feature))
    assert found
    assert {result.verdict for result in found} == {verdict}
    assert all(says in result.why for result in found), found


@pytest.mark.spoiled
def test_an_exponential_may_be_as_short_as_its_weights():
    """If every exponential errs by 1.07e-4, as that of torch's FlashAttention may: right in 16 bits, wrong in fp32."""
    shifted = _of_lse(lambda lse: lse + math.log1p(1.07e-4))
    found = {result.case: result.verdict for result in attention.check(shifted, CPU, "lse")}
    assert set(found.values()) == {"ok", "wrong"}
    assert {name: verdict for name, verdict in found.items() if (verdict == "wrong") != ("q_fp32" in name)} == {}


@pytest.mark.spoiled
@pytest.mark.parametrize("spoil", [lambda lse: lse * math.log2(math.e), lambda lse: lse.bfloat16().float()])
def test_an_lse_in_another_base_or_precision_is_wrong(spoil: Callable[[torch.Tensor], torch.Tensor]):
    found = list(attention.check(_of_lse(spoil), CPU, "014-"))
    assert [result.verdict for result in found] == ["wrong"]
    assert found[0].why.startswith("lse: error")


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("shardfuse", "names no function"),
        ("shardfuse:gone", "cannot be imported"),
        ("no_such_package:x", "cannot be imported"),
        ("shardfuse:__all__", "is list: expected a function"),
    ],
)
def test_no_function_of_that_name(name: str, says: str):
    with pytest.raises(ValueError, match=says):
        attention.load(name)


# ------------------------------------------------------------------------------------------------------------- a server
@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "llama"
    models.write("llama", path)
    return path


def test_a_folder_says_what_its_model_does(folder: Path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    expected = models.read(folder)
    assert models.write("llama", folder) == expected  # it is there already
    assert sorted(map(len, expected.prompts)) == sorted(models.LENGTHS)
    assert len({tuple(prompt[: models.SHARED]) for prompt in expected.prompts if len(prompt) > models.SHARED}) == 1
    assert expected.margin > models.MARGIN
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    prompt = torch.tensor([expected.prompts[0]])
    made = model.generate(prompt, max_new_tokens=models.NEW_TOKENS, do_sample=False, pad_token_id=0)
    assert made[0, prompt.shape[1] :].tolist() == expected.tokens[0]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = models.text_of(expected.prompts[0])
    assert tokenizer(text)["input_ids"] == expected.prompts[0] == models.tokens_of(tokenizer.decode(prompt[0]))
    chat = tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True)
    assert (chat["input_ids"] if hasattr(chat, "keys") else chat) == expected.prompts[0]


def test_unknown_architectures_and_folders_are_named(tmp_path: Path):
    with pytest.raises(ValueError, match="no architecture 'gpt9': there are llama"):
        models.write("gpt9", tmp_path / "gpt9")
    with pytest.raises(
        ValueError, match=r"has no conformance.json: `shardfuse conformance models` writes such folders"
    ):
        models.read(tmp_path)
    with pytest.raises(ValueError, match="expected words like t12 and got 'hello'"):
        models.tokens_of("hello")


class _Server(ThreadingHTTPServer):
    """Answers with the expected tokens, spoiled by ``spoil``; it counts what it is asked."""

    daemon_threads = True
    expected: models.Expected
    spoil: Callable[[str], str] = staticmethod(lambda text: text)
    status = 200
    asked = 0


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    def do_GET(self) -> None:
        self._answer({"data": [{"id": "small"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked += 1
        assert (body["model"], body["temperature"], body["max_tokens"]) == ("small", 0, models.NEW_TOKENS)
        chat = self.path.endswith("/chat/completions")
        text = body["messages"][0]["content"] if chat else body["prompt"]
        number = self.server.expected.prompts.index(models.tokens_of(text))
        answer = self.server.spoil(models.text_of(self.server.expected.tokens[number]))
        self._answer({"choices": [{"message": {"content": answer}} if chat else {"text": answer}]})

    def _answer(self, body: Any) -> None:
        self.send_response(self.server.status)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def served(folder: Path) -> Iterator[tuple[_Server, str]]:
    with _Server(("127.0.0.1", 0), _Handler) as running:
        running.expected = models.read(folder)
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield running, f"http://127.0.0.1:{running.server_address[1]}/v1"
        running.shutdown()


@pytest.mark.parametrize("api", server.APIS)
def test_a_server_that_is_right(served: tuple[_Server, str], folder: Path, api: str):
    running, url = served
    found = list(server.check(url, folder, api=api))
    assert [result.wrong for result in found] == [""] * 3 * len(models.LENGTHS)
    assert running.asked == len(found)
    assert {result.round for result in found} == {"alone", "together", "together, cached"}


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda text: text.replace("t", "t1", 1), "token 0 is"),
        (lambda text: text.rpartition(" ")[0], "19 tokens, expected 20"),
        (lambda text: "Once upon a time", "expected words like t12"),
    ],
)
def test_a_server_that_is_wrong(served: tuple[_Server, str], folder: Path, spoil: Callable[[str], str], says: str):
    running, url = served
    running.spoil = spoil  # type: ignore[method-assign]
    assert all(says in result.wrong for result in server.check(url, folder, model="small"))
    assert running.asked == 3 * len(models.LENGTHS)


def test_a_server_that_fails_or_is_not_there(served: tuple[_Server, str], folder: Path):
    running, url = served
    running.status = 503
    with pytest.raises(ConnectionError, match="/models answered 503"):
        list(server.check(url, folder))
    with pytest.raises(ConnectionError, match=r"gives no answer.*is the server up"):
        list(server.check("http://127.0.0.1:9/v1", folder, timeout_s=5))
    with pytest.raises(ValueError, match="no address of a server"):
        list(server.check("file:///etc", folder))
    with pytest.raises(ValueError, match="api='voice': expected one of completions, chat/completions"):
        list(server.check(url, folder, api="voice"))


# ---------------------------------------------------------------------------------------------------------- the command
def test_the_command(served: tuple[_Server, str], folder: Path, tmp_path: Path):
    from typer.testing import CliRunner

    from shardfuse.cli import app

    running, url = served
    right = CliRunner().invoke(app, ["conformance", "server", url, str(folder)])
    assert (right.exit_code, right.output.splitlines()[-1]) == (0, "24 of 24 answers are equal, token by token")
    running.spoil = lambda text: text.replace("t", "t1", 1)  # type: ignore[method-assign]
    assert CliRunner().invoke(app, ["conformance", "server", url, str(folder), "--chat"]).exit_code == 1
    judged = CliRunner().invoke(app, ["conformance", "attention", "shardfuse:paged_attention", "--only", "mixed"])
    assert judged.exit_code == 0
    assert "0 refused, 0 wrong" in judged.output
    assert CliRunner().invoke(app, ["conformance", "attention", "math:sqrt", "--only", "mixed"]).exit_code == 1
    made = CliRunner().invoke(app, ["conformance", "models", str(tmp_path), "--architecture", "llama"])
    assert made.exit_code == 0
    assert models.read(tmp_path / "llama") == models.read(folder)
