"""``shardfuse generate``: one prompt and files of them, what is said of mistakes, and what an interruption leaves."""

from __future__ import annotations

import asyncio
import importlib.util
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shardfuse import cli
from shardfuse.commands import generate, generate_batch
from shardfuse.serving import Request, SamplingParams
from shardfuse.testing import save_tiny_hf, solo_tokens, tiny_model, tiny_tokenizer

for package in ("fastapi", "prometheus_client", "transformers", "llguidance"):
    pytest.importorskip(package)

LIMIT_S = 60.0  # for what takes seconds: a test fails instead of waiting for ever
STOP = 257  # the tiny tokenizer's <|eos|>


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in fp64, whose answers do not depend on rounding."""
    return save_tiny_hf(tmp_path_factory.mktemp("model") / "tiny", max_positions=512)


@pytest.fixture
def command(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """command("--prompt", "x") -> (exit code, standard output, standard error), in this process, of ``folder``.

    One prompt is continued as it is, but with ``raw=False``.
    """
    monkeypatch.delenv("SHARDFUSE_DEBUG", raising=False)

    def run(*arguments: object, model: tuple[str, ...] = (str(folder),), raw: bool = True) -> tuple[int, str, str]:
        given = [] if not raw or {"--chat", "--input", "--output"} & set(arguments) else ["--raw"]
        monkeypatch.setattr(sys, "argv", ["shardfuse", "generate", *model, *given, *map(str, arguments)])
        with pytest.raises(SystemExit) as left:
            cli.main()
        captured = capsys.readouterr()
        code = left.value.code or 0
        assert isinstance(code, int)
        return code, captured.out, captured.err

    return run


@pytest.fixture(scope="module")
def solo(folder: Path) -> Callable[..., str]:
    """solo("text", 8, temperature=1.0, seed=3): the answer's text, computed without an engine."""
    model, tokenizer = tiny_model(max_positions=512), tiny_tokenizer()

    def answer(prompt: str, count: int, **sampling: Any) -> str:
        ids = tokenizer.encode(prompt).ids
        request = Request(ids, max_new_tokens=count, stop=[STOP], sampling=SamplingParams(**sampling))
        return tokenizer.decode(solo_tokens(model, request))

    return answer


def _write(path: Path, lines: list[Any]) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def _read(path: Path) -> dict[str, Any]:
    """The answers by custom_id, each of which is there once."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    found = {line["custom_id"]: line for line in lines}
    assert len(found) == len(lines)
    assert all(line.keys() == {"id", "custom_id", "response", "error"} for line in lines)
    return found


def _text(answer: Any) -> str:
    assert answer["response"]["status_code"] == 200
    (choice,) = answer["response"]["body"]["choices"]
    return choice["text"] if "text" in choice else choice["message"]["content"]


@pytest.fixture
def start(folder: Path) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """start("--input", "in.jsonl"): the command in a process of its own, which does not outlive the test."""
    started: list[subprocess.Popen[bytes]] = []

    def run(*arguments: object, **options: Any) -> subprocess.Popen[bytes]:
        words = [sys.executable, "-m", "shardfuse", "generate", str(folder), *map(str, arguments)]
        started.append(subprocess.Popen(words, stderr=subprocess.PIPE, **options))
        return started[-1]

    yield run
    for process in started:
        process.kill()
        process.communicate()


def _until(there: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + LIMIT_S
    while not there():
        if process.poll() is not None or time.monotonic() > end:
            process.kill()
            pytest.fail(f"exit code {process.poll()}: {process.communicate()[1].decode()}")
        time.sleep(0.01)


# --- one prompt


def test_one_prompt_is_greedy_and_alone_on_stdout(command, solo):
    code, out, err = command("--prompt", "Once", "--max-tokens", 20)
    assert (code, out) == (0, solo("Once", 20))
    assert "20 tokens (length)" in err


def test_draws_follow_the_seed(command, solo):
    drawn = {"temperature": 0.9, "top_p": 0.95, "top_k": 40}
    options = [word for name, value in drawn.items() for word in (f"--{name.replace('_', '-')}", value)]
    asked = ("--prompt", "Once", "--max-tokens", 12, *options)
    assert command(*asked, "--seed", 5)[1] == solo("Once", 12, **drawn, seed=5)
    assert command(*asked)[1] != command(*asked)[1]  # without one they are random


@pytest.mark.parametrize(
    ("generation", "options", "sampling"),
    [
        pytest.param({"temperature": 0.9, "top_k": 9}, (), {}, id="greedy unless it says do_sample"),
        pytest.param({"do_sample": False, "temperature": 0.9}, (), {}, id="greedy where it says so"),
        pytest.param({"do_sample": True, "top_k": 9}, (), {"temperature": 1.0, "top_k": 9}, id="sampled"),
        pytest.param({"do_sample": True, "top_k": 9}, ("--temperature", 0), {"top_k": 9}, id="an option overrides"),
        pytest.param({"do_sample": True}, ("--generation-config", "vllm"), {}, id="without the file"),
        pytest.param({}, ("--generation-config", "."), {"temperature": 0.9}, id="another folder's"),
    ],
)
def test_the_folders_settings_for_generation(
    generation, options, sampling, command, solo, folder, tmp_path, monkeypatch
):
    """The defaults are transformers': what ``generate`` does with the file."""
    model = shutil.copytree(folder, tmp_path / "model")
    (model / "checksums.json").unlink()
    (model / "generation_config.json").write_text(json.dumps({"max_new_tokens": 9, **generation}))
    other = {"do_sample": True, "temperature": 0.9, "max_new_tokens": 9}
    (tmp_path / "generation_config.json").write_text(json.dumps(other))
    monkeypatch.chdir(tmp_path)
    count = 256 if "vllm" in options else 9
    code, out, _ = command("--prompt", "Once", "--seed", 5, *options, model=(str(model),))
    assert (code, out) == (0, solo("Once", count, **sampling, seed=5))


def test_the_text_of_stdin(command, solo, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("Größe\n".encode())))
    assert command("--max-tokens", 6)[:2] == (0, solo("Größe\n", 6))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff\xfe")))
    code, out, err = command()
    assert (code, out) == (1, "")
    assert err.count("\n") == 1
    assert err.startswith("error: standard input is not text in UTF-8")


def test_a_terminal_for_stdin_is_no_prompt(command, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    code, out, err = command()
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert "give a text after the folder" in err


def test_the_chat_template(command, solo, tmp_path):
    (tmp_path / "chat.txt").write_text("{% for message in messages %}<{{ message['content'] }}>{% endfor %}")
    template = ("--chat-template", tmp_path / "chat.txt")
    assert command("--prompt", "hi", "--chat", "--max-tokens", 6, *template)[1] == solo("<hi>", 6)
    (tmp_path / "chat.txt").write_text("")
    code, _, err = command("--prompt", "hi", "--chat", *template)
    assert code == 1
    assert "this model has no chat template" in err


def test_a_question_gets_the_template_unless_it_is_raw(command, solo, folder, tmp_path, monkeypatch):
    asked = solo("<|turn|>user: Once<|turn|>", 6)
    code, out, err = command("Once", "--max-tokens", 6, raw=False)
    assert (code, out) == (0, asked)
    assert "put into the model's chat template (--raw continues it as it is)" in err
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"Once")))
    assert command("--max-tokens", 6, raw=False)[1] == asked
    code, out, err = command("--prompt", "Once", "--max-tokens", 6, "--chat")
    assert (code, out, "template" in err) == (0, asked, False)
    assert command("Once", "--max-tokens", 6)[1] == solo("Once", 6)
    (tmp_path / "none.txt").write_text("")
    code, out, err = command("Once", "--max-tokens", 6, "--chat-template", tmp_path / "none.txt", raw=False)
    assert (code, out, "the prompt" in err) == (0, solo("Once", 6), False)
    for twice in (("Once", "--prompt", "Once"), ("--chat", "--raw", "Once")):
        code, out, err = command(*twice, raw=False)
        assert (code, out) == (2, "")
        assert "leave one of them out" in err or "expected one of them" in err


def test_a_rendered_question_gets_no_second_bos(command, solo, folder, tmp_path):
    from tokenizers import Tokenizer, processors

    bos = shutil.copytree(folder, tmp_path / "bos")
    tokenizer = Tokenizer.from_file(str(bos / "tokenizer.json"))
    tokenizer.post_processor = processors.TemplateProcessing(single="<|bos|> $A", special_tokens=[("<|bos|>", 256)])
    tokenizer.save(str(bos / "tokenizer.json"))
    (bos / "checksums.json").unlink()
    assert command("Once", "--max-tokens", 6, model=(str(bos),))[1] == solo("<|bos|>Once", 6)
    assert command("Once", "--max-tokens", 6, model=(str(bos),), raw=False)[1] == solo("<|turn|>user: Once<|turn|>", 6)


def test_an_empty_answer_says_why(command, solo):
    _, out, err = command("Once", "--stop", solo("Once", 1))
    assert (out, "the answer is empty: it begins with the stop string '@'" in err) == ("", True)


def test_a_prompt_that_is_no_text(command):
    code, out, err = command("a\udcffb")
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert err.startswith("error: the prompt is not text in UTF-8: ")


def test_a_closed_output(command, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdout", None)
    code, _, err = command("Once")
    assert code == 1
    assert err.splitlines()[-1] == "error: standard output is closed: the answer has nowhere to go"


def test_why_there_is_no_text():
    names = type("Names", (), {"convert_ids_to_tokens": staticmethod(lambda token: f"<{token}>")})
    assert generate.why_empty([5], 5, names) == "the model ended it at once, with <5>"
    assert generate.why_empty([5], None, names) == "its tokens have no text: <5>"
    assert generate.why_empty([*range(8)], 7, names) == "its tokens have no text: <0>, <1>, <2>, <3>, <4> and 3 more"


def test_stops_and_formats(command, tmp_path, solo):
    whole = solo("Once", 20)
    assert command("--prompt", "Once", "--max-tokens", 20, "--stop", "never there", "--stop", whole[5])[1] in (
        whole[: whole.index(whole[5])],
    )
    code, out, _ = command("--prompt", "x", "--regex", "[a-f]{4}")
    assert (code, len(out), set(out) <= set("abcdef")) == (0, 4, True)
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    (tmp_path / "schema.json").write_text(json.dumps({**schema, "additionalProperties": False}))
    code, out, _ = command("--prompt", "x", "--json-schema", tmp_path / "schema.json")
    assert (code, json.loads(out).keys()) == (0, {"a"})


def test_a_terminal_gets_no_control_characters(command, monkeypatch):
    plain = command("--prompt", "Once", "--max-tokens", 200)[1]
    assert any(ord(letter) < 32 and letter not in "\n\t" for letter in plain)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    shown = command("--prompt", "Once", "--max-tokens", 200)[1]
    assert shown == generate.visible(plain) + "\n"
    assert generate.visible("a\x1b[31m\x9b\x7f\r\tä\n") == "a\\x1b[31m\\x9b\\x7f\\x0d\tä\n"


def test_ctrl_c_ends_an_answer_between_two_steps(command, monkeypatch, solo):
    shown: list[str] = []

    def show(text: str) -> str:
        shown.append(text)
        if len(shown) == 1:
            signal.raise_signal(signal.SIGINT)
        return text

    monkeypatch.setattr(generate, "visible", show)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    code, out, err = command("--prompt", "Once", "--max-tokens", 100)
    assert code == 130
    assert solo("Once", 100).startswith(out.rstrip("\n"))
    assert len(out) < 10
    assert "Traceback" not in err


def test_one_prompt_needs_no_package_of_the_server(command, monkeypatch, solo):
    from shardfuse.serving import server

    for name in ("fastapi", "prometheus_client", *(name for name in sys.modules if name.startswith(server.__name__))):
        monkeypatch.setitem(sys.modules, name, None)
    assert command("--prompt", "Once", "--max-tokens", 4)[:2] == (0, solo("Once", 4))


def test_a_reader_that_has_gone_ends_it(command, monkeypatch):
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        code, _, err = command("--prompt", "Once", "--max-tokens", 100)
    assert code == 128 + signal.SIGPIPE
    assert "error" not in err
    assert "Traceback" not in err


def test_the_tiny_model(command):
    assert command("--prompt", "x", "--max-tokens", 2, "--tiny", model=())[0] == 0


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (("--prompt", ""), 1, "the prompt is empty"),
        (("--prompt", "x" * 600), 1, "a prompt and its answer have at most 512"),
        (("--prompt", "x", "--max-tokens", "600"), 1, "expected at most max_model_len=512"),
        (("--prompt", "x", "--temperature", "-1"), 1, "temperature=-1.0"),
        (("--prompt", "x", "--regex", "("), 1, "regex"),
        (("--prompt", "x", "--json-schema", "missing.json"), 1, "missing.json"),
        (("--prompt", "x", "--dtype", "fp5"), 1, "expected one of fp32"),
        (("--prompt", "x", "--regex", "a", "--json-schema", "s"), 2, "expected one of them"),
        (("--prompt", "x", "--tiny"), 2, "expected the folder of a model, or --tiny"),
        (("--input", "in.jsonl"), 2, "expected --output OUT.jsonl too"),
        (("--output", "out.jsonl"), 2, "expected --input IN.jsonl too"),
        (("--input", "a", "--output", "b", "--top-k", "3"), 2, "--top-k belongs to a single prompt"),
        (("--input", "missing.jsonl", "--output", "out.jsonl"), 1, "missing.jsonl"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, tuple) else "",
)
def test_mistakes(command, arguments, code, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found, out, err = command(*arguments)
    assert (found, out) == (code, "")
    assert says in " ".join(err.replace("│", " ").split())
    assert "Traceback" not in err
    if code == 1:
        assert err.splitlines()[-1].startswith("error: ")


# --- files of them


def test_every_form_of_a_line(command, solo, tmp_path):
    body = {"max_tokens": 6, "temperature": 0}
    lines = [
        {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "Once", **body}},
        {"prompt": "Once", "max_tokens": 6, "temperature": 0.8, "seed": 7},
        "",
        {"custom_id": "b", "prompt": "Twice", **body},
        {"messages": [{"role": "user", "content": "hi"}], **body},
        {"custom_id": "c", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": [], **body}},
        "{broken",
        "[1]",
        {"prompt": "x", "nonsense": 1},
        {"prompt": "x", "stream": True},
        {"prompt": "x", "model": "another"},
        {"prompt": "x" * 600},
        {"custom_id": 5, "prompt": "x"},
        {"method": "POST", "url": "/v1/embeddings", "body": {}},
        {"max_tokens": 3},
        {"prompt": "\ud800"},
    ]
    out = tmp_path / "out.jsonl"
    code, printed, err = command("--input", _write(tmp_path / "in.jsonl", lines), "--output", out)
    assert (code, printed) == (1, "")
    assert f"15 lines: 4 answered, 11 failed, in {out}" in err
    found = _read(out)
    assert _text(found["a"]) == solo("Once", 6)
    assert _text(found["line-2"]) == solo("Once", 6, temperature=0.8, seed=7)
    assert _text(found["b"]) == solo("Twice", 6)
    assert _text(found["line-5"]) == solo("<|turn|>user: hi<|turn|>", 6)
    wrong = {name: each["response"] for name, each in found.items() if each["response"]["status_code"] != 200}
    said = {name: each["body"]["error"]["message"] for name, each in wrong.items()}
    assert {name: each["status_code"] for name, each in wrong.items()} == {
        **{f"line-{number}": 400 for number in (7, 8, 9, 10, 12, 13, 14, 15, 16)},
        **{"c": 400, "line-11": 404},
    }
    assert said["line-7"].startswith("line 7 is no JSON")
    assert said["line-9"].startswith("nonsense: there is no such parameter")
    assert said["line-13"].startswith("line 13: custom_id")
    assert said["c"].startswith("messages: ")
    assert all(each["error"] is None for each in found.values())

    # Once all is done, no model is loaded, and the exit code stays.
    assert command("--input", tmp_path / "in.jsonl", "--output", out, model=("missing",))[0] == 1


def test_it_goes_on_after_a_half_written_answer(command, tmp_path):
    lines = [{"custom_id": f"r{i}", "prompt": f"{i}", "max_tokens": 3, "seed": i} for i in range(8)]
    file, out = _write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    assert command("--input", file, "--output", out)[0] == 0
    whole = _read(out)
    answers = out.read_bytes().splitlines(keepends=True)
    out.write_bytes(b"".join(answers[:3]) + answers[3][:-20])
    code, _, err = command("--input", file, "--output", out)
    assert code == 0
    assert "3 of 8 lines are done, and a half-written one will be repeated" in err
    assert out.read_bytes().startswith(b"".join(answers[:3]))
    assert {name: _text(each) for name, each in _read(out).items()} == {
        name: _text(each) for name, each in whole.items()
    }
    out.write_bytes(answers[0][:5])  # of the first answer
    assert command("--input", file, "--output", out)[0] == 0
    assert len(_read(out)) == 8


def test_what_is_refused_before_anything_is_written(command, tmp_path):
    file, out = _write(tmp_path / "in.jsonl", [{"custom_id": "a", "prompt": "x"}]), tmp_path / "out.jsonl"
    (tmp_path / "config.json").write_text("{}")  # where there is no model
    (tmp_path / "model.safetensors").touch()

    def refused(*arguments: object) -> str:
        before = out.read_bytes() if out.exists() else None
        code, printed, err = command(*arguments, model=(str(tmp_path),))
        assert (code, printed, err.count("\n")) == (1, "", 1)
        assert (out.read_bytes() if out.exists() else None) == before
        return err

    twice = _write(tmp_path / "twice.jsonl", [{"custom_id": "a", "prompt": "x"}] * 2)
    assert "line 2: custom_id 'a' was used before" in refused("--input", twice, "--output", out)
    assert "is the --input" in refused("--input", file, "--output", file)
    answer = '{"id": "batch_req_1", "custom_id": "other", "response": {"status_code": 200}, "error": null}\n'
    out.write_text(answer)
    assert "belongs to another input: it answers 'other'" in refused("--input", file, "--output", out)
    out.write_text(answer * 2)
    assert "line 2 answers 'other' again" in refused("--input", file, "--output", out)
    for foreign in ("a diary", "a diary\n", '{"id": "batch_req_1"}\n', '{"id": "batch_req_\n' + answer):
        out.write_text(foreign)
        assert "line 1 is not an answer of this command" in refused("--input", file, "--output", out)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full here")
def test_a_full_disk_is_one_line(command, tmp_path):
    file = _write(tmp_path / "in.jsonl", [{"prompt": "x"}] * 40)
    code, out, err = command("--input", file, "--output", "/dev/full")
    assert (code, out) == (1, "")
    assert err.splitlines()[-1] == "error: [Errno 28] No space left on device"
    assert err.count("error") == 1


def test_the_packages_of_the_server_are_named(command, tmp_path, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "fastapi" else find(name))
    code, _, err = command("--input", "in.jsonl", "--output", "out.jsonl")
    assert (code, err) == (1, "error: generate --input needs fastapi: pip install 'shardfuse[serve]'\n")


@pytest.mark.parametrize("style", ["gelu", "gated"])
def test_a_folder_without_a_tokenizer_is_refused(command, folder, tmp_path, style):
    bare = save_tiny_hf(tmp_path / "bare", style=style)
    for file in bare.glob("tokenizer*"):
        file.unlink()
    code, out, err = command("--prompt", "hi", model=(str(bare),))
    assert (code, out) == (1, "")
    assert re.search(rf"^error: {bare}: .*tokenizer.*tokenizer\.save_pretrained\(folder\)", err, re.MULTILINE)


def test_lines_are_read_as_they_are_needed(monkeypatch):
    from shardfuse.serving.server import batch

    read = ended = most = 0

    async def lines() -> Any:
        nonlocal read, most
        for number in range(1, 101):
            read += 1
            most = max(most, read - ended)
            yield batch.read_line(b'{"prompt": "x"}', number)

    async def answer(served: Any, line: batch.Line) -> dict[str, Any]:
        nonlocal ended
        for _ in range(line.number % 5):
            await asyncio.sleep(0)
        ended += 1
        return {"custom_id": line.name, "response": {"status_code": 200}}

    monkeypatch.setattr(batch, "answer", answer)
    written: list[bytes] = []
    tally = generate_batch.Tally(100)
    run: Any = generate_batch._Run(None, tally, {"line-3"}, written.append, window=4)  # type: ignore[arg-type]
    asyncio.run(run._each(lines()))
    assert sorted(json.loads(each)["custom_id"] for each in written) == sorted(
        f"line-{number}" for number in range(1, 101) if number != 3
    )
    assert most <= 4 + 2  # one that was skipped, and one that waits
    assert tally.answered == 99


def test_a_killed_run_goes_on(command, start, solo, tmp_path):
    lines = [
        {"custom_id": f"r{i}", "prompt": f"{i}", "max_tokens": 24, "temperature": i % 2 * 0.9, "seed": i}
        for i in range(160)
    ]
    file, out = _write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    process = start("--input", file, "--output", out, "--max-num-seqs", 4)
    _until(lambda: out.exists() and out.read_bytes().count(b"\n") >= 20, process)
    code, _, err = command("--input", file, "--output", out)
    assert (code, err.count("\n")) == (1, 1)
    assert "is being written by another process" in err
    process.send_signal(signal.SIGKILL)
    process.wait(LIMIT_S)
    done = out.read_bytes().count(b"\n")
    assert 20 <= done < 160
    code, _, err = command("--input", file, "--output", out)
    assert code == 0
    assert f"{done} of 160 lines are done" in err
    found = _read(out)
    assert found.keys() == {line["custom_id"] for line in lines}
    for line in lines[::16] + lines[1::16]:
        expected = solo(line["prompt"], 24, temperature=line["temperature"], seed=line["seed"])
        assert _text(found[line["custom_id"]]) == expected


def test_a_pipe_is_answered_line_by_line_until_ctrl_c(start):
    process = start("--input", "-", "--output", "-", stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    asked = [{"custom_id": "a", "prompt": "x", "max_tokens": 2}, {"custom_id": "a", "prompt": "x"}, {"prompt": "x"}]
    process.stdin.write("".join(json.dumps(each) + "\n" for each in asked).encode())
    process.stdin.flush()  # and it stays open
    found = {answer["custom_id"]: answer for answer in (json.loads(process.stdout.readline()) for _ in asked)}
    assert {name: each["response"]["status_code"] for name, each in found.items()} == {
        "a": 200,
        "line-2": 400,
        "line-3": 200,
    }
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=LIMIT_S)
    assert (process.returncode, out) == (130, b"")
    assert b"can be read only once" in err
    assert err.endswith(b"stopped by SIGINT: 3 lines are done\n")
    assert b"Traceback" not in err


def test_a_pipe_to_its_end(command, monkeypatch, tmp_path, solo):
    read, write = os.pipe()
    os.write(write, b'{"prompt": "Once", "max_tokens": 5, "temperature": 0}')  # with no newline at its end
    os.close(write)
    out = tmp_path / "out.jsonl"
    try:
        code, _, err = command("--input", f"/dev/fd/{read}", "--output", out)
        assert (code, _text(_read(out)["line-1"])) == (0, solo("Once", 5))
        assert "1 line: 1 answered" in err
        code, _, err = command("--input", f"/dev/fd/{read}", "--output", out)
        assert (code, err.count("\n")) == (1, 1)
        assert "can be read only once" in err
    finally:
        os.close(read)
