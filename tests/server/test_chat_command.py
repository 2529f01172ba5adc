"""``shardfuse chat``: a conversation in the terminal, in this process."""

from __future__ import annotations

import builtins
import contextlib
import importlib
import io
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shardfuse import Request, cli
from shardfuse.commands import chat
from shardfuse.testing import save_tiny_hf, solo_tokens, tiny_model, tiny_tokenizer

pytest.importorskip("transformers", reason="transformers is not installed (pip install .[serve])")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in fp64, whose answers do not depend on rounding."""
    return save_tiny_hf(tmp_path_factory.mktemp("model") / "tiny", max_positions=512)


@pytest.fixture
def command(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """command("one\ntwo\n", "--seed", 1) -> (exit code, standard output, standard error) of that standard input."""
    monkeypatch.delenv("SHARDFUSE_DEBUG", raising=False)

    def run(typed: str | bytes | None, *arguments: object) -> tuple[int, str, str]:
        stdin: Any = io.StringIO(typed) if isinstance(typed, str) else None
        if isinstance(typed, bytes):
            stdin = io.TextIOWrapper(io.BytesIO(typed), "utf-8")
        monkeypatch.setattr(sys, "argv", ["shardfuse", "chat", str(folder), *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", stdin)
        with pytest.raises(SystemExit) as left:
            cli.main()
        captured = capsys.readouterr()
        code = left.value.code or 0
        assert isinstance(code, int)
        return code, captured.out, captured.err

    return run


def _solo(text: str, count: int) -> list[int]:
    """The tokens that follow a rendered chat, computed without an engine."""
    prompt = tiny_tokenizer().encode(text).ids
    return solo_tokens(tiny_model(max_positions=512), Request(prompt, max_new_tokens=count, stop=[257]))


def _said(tokens: list[int]) -> str:
    return tiny_tokenizer().decode(tokens)


def test_a_conversation_has_a_history(command: Callable[..., tuple[int, str, str]]):
    first = _said(_solo("<|turn|>system: Be kind<|turn|>user: Hi<|turn|>", 7))
    turns = f"<|turn|>system: Be kind<|turn|>user: Hi<|turn|>assistant: {first}<|turn|>user: And?<|turn|>"
    second = _said(_solo(turns, 7))
    code, out, err = command("Hi\nAnd?\n\n/new\nHi\n", "--max-tokens", 7, "--system", "Be kind")
    assert code == 0
    assert out == "".join(said if said.endswith("\n") else f"{said}\n" for said in (first, second, first))
    assert err.count("(7 tokens, length, ") == 3
    assert err.count("a new chat") == 1


def test_an_answer_that_ends_its_line_gets_no_empty_one(command: Callable[..., tuple[int, str, str]]):
    tokens = _solo("<|turn|>user: Hi<|turn|>", 80)
    count = tokens.index(ord("\n")) + 1
    assert command("Hi\n", "--max-tokens", count)[1] == _said(tokens[:count])


def test_sampling(command: Callable[..., tuple[int, str, str]]):
    outs = [command("Hi\n", "--max-tokens", 9, "--temperature", 3, "--seed", seed)[1] for seed in (1, 1, 2)]
    assert outs[0] == outs[1] != outs[2]
    answers = command("Hi\n/new\n" * 4, "--max-tokens", 40, "--temperature", 3)[1]
    assert len(answers) > 4 * 20
    assert (
        len({answers[at : at + 10] for at in range(0, len(answers) - 10)}) > len(answers) // 2
    )  # each has its own seed


def test_ctrl_c_stops_an_answer_and_not_the_program(
    command: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
):
    pieces: list[str] = []

    @contextlib.contextmanager
    def writer() -> Iterator[Callable[[str], None]]:
        def write(text: str) -> None:
            pieces.append(text)
            if len(pieces) == 5:
                signal.raise_signal(signal.SIGINT)

        yield write

    monkeypatch.setattr(chat, "stdout_text", writer)
    code, _, err = command("Hi\nAnd?\n", "--max-tokens", 40)
    assert code == 0
    stopped, _, rest = "".join(pieces).partition("\n")
    whole = _solo("<|turn|>user: Hi<|turn|>", 40)
    count = next(count for count in range(1, 9) if f"({count} tokens, stopped, " in err)
    assert stopped == _said(whole[:count])
    history = f"<|turn|>user: Hi<|turn|>assistant: {stopped}<|turn|>user: And?<|turn|>"
    assert rest.rstrip("\n") == _said(_solo(history, 40)).rstrip("\n")
    assert "(40 tokens, length, " in err


def test_a_terminal(command: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch):
    typed = iter([KeyboardInterrupt(), "/help", "Hi", EOFError()])

    def ask(prompt: str) -> str:
        assert prompt == "> "
        given = next(typed)
        if isinstance(given, BaseException):
            raise given
        return given

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(builtins, "input", ask)
    monkeypatch.setattr(io, "StringIO", Terminal)
    code, out, err = command("", "--max-tokens", 3)
    assert code == 0
    assert out.strip("\n") == _said(_solo("<|turn|>user: Hi<|turn|>", 3)).strip("\n")
    assert err.count(chat.HELP) == 2


def test_a_chat_beyond_the_context_goes_on_without_the_last_question(command: Callable[..., tuple[int, str, str]]):
    code, out, err = command(f"{'x' * 600}\nHi\n", "--max-tokens", 4)
    assert code == 0
    assert "the messages have 608 tokens, and a chat and its answer have at most 512" in err
    assert "/new begins a new chat" in err
    assert out.rstrip("\n") == _said(_solo("<|turn|>user: Hi<|turn|>", 4)).rstrip("\n")


def test_an_empty_answer_says_why(command: Callable[..., tuple[int, str, str]], tmp_path: Path):
    first = _solo("<|turn|>user: Hi<|turn|>", 1)
    (tmp_path / "generation_config.json").write_text(f'{{"stop_strings": {_said(first)!a}}}'.replace("'", '"'))
    code, out, err = command("Hi\n", "--generation-config", tmp_path)
    assert (code, out) == (0, "\n")
    assert "the answer is empty: it begins with the stop string" in err


@pytest.mark.parametrize(
    ("options", "message"), [(("--top-p", 7), "top_p=7"), (("--temperature", -1), "temperature=-1")]
)
def test_options_out_of_range(command: Callable[..., tuple[int, str, str]], options: tuple[object, ...], message: str):
    code, out, err = command("Hi\n", *options)
    assert (code, out) == (1, "")
    assert err.splitlines()[-1].startswith(f"error: {message}")


def test_bytes_that_are_no_text(command: Callable[..., tuple[int, str, str]]):
    code, out, err = command(b"h\xff\n", "--max-tokens", 4)
    assert code == 0
    assert out.rstrip("\n") == _said(_solo("<|turn|>user: h\ufffd<|turn|>", 4)).rstrip("\n")
    assert "Traceback" not in err


def test_a_closed_input(command: Callable[..., tuple[int, str, str]]):
    code, out, err = command(None)
    assert (code, out) == (1, "")
    assert err.splitlines()[-1] == "error: standard input is closed: there is nobody to talk with"


MODEL_OPTIONS = {
    "--device": ("device", "cpu"),
    "--dtype": ("dtype", "bf16"),
    "--cache-gib": ("cache_gib", 0.5),
    "--kv-dtype": ("kv_dtype", "int8"),
    "--max-model-len": ("max_model_len", 99),
    "--max-num-batched-tokens": ("max_num_batched_tokens", 77),
    "--chat-template": ("chat_template", Path("some.jinja")),
    "--generation-config": ("generation_config", "vllm"),
    "--invariant": ("invariant", True),
}


@pytest.mark.parametrize("name", ["serve", "generate", "chat"])
def test_every_option_of_a_model_reaches_it(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch):
    seen: list[Any] = []
    module = importlib.import_module(f"shardfuse.commands.{name}")
    monkeypatch.setattr(module, f"run_{name}", lambda options: seen.append(options.model) or 0)
    words = [name, str(folder), "--tp", "3"]
    for option, (_, value) in MODEL_OPTIONS.items():
        words += [option] if value is True else [option, str(value)]
    monkeypatch.setattr(sys, "argv", ["shardfuse", *words])
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert not left.value.code
    [opening] = seen
    assert (opening.tp, opening.tiny, opening.folder.folder) == (3, False, folder)
    assert {field: getattr(opening.folder, field) for field, _ in MODEL_OPTIONS.values()} == dict(
        MODEL_OPTIONS.values()
    )


def test_a_model_without_a_template(command: Callable[..., tuple[int, str, str]], tmp_path: Path):
    (tmp_path / "none").write_text("")
    code, out, err = command("Hi\n", "--chat-template", os.fspath(tmp_path / "none"))
    assert (code, out) == (1, "")
    assert err.splitlines()[-1] == (
        "error: this model has no chat template: give one with --chat-template FILE, or continue a text with shardfuse "
        "generate"
    )
