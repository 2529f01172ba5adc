"""The lane of vLLM's own server: the same HTTP requests to it and to `shardfuse serve`, over the same folder on a CPU.

Run by ``make test-vllm-server``, which names the Python of an environment that has vLLM. It writes vllm_server.json, a
row for each case, of which docs/server_vs_vllm.md is made. A difference without a reason in :data:`WHY` fails, and so
does a reason without a difference; greedy texts have no reason to differ.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
import vllm_page
from http_load import serving

HOST = "127.0.0.1"
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
ANSWER_S = 120.0
_HALF = "\ufffd"  # a part of a character
START_S = 240.0
NEAR = 2e-3  # between log-probabilities of two engines in fp32
SIZES: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "num_heads": 4, "num_kv_heads": 2}
LENGTH = 512
TEMPLATE = (
    "{% for tool in tools or [] %}<|turn|>tool: {{ tool['function']['name'] }}{% endfor %}"
    "{% for message in messages %}<|turn|>{{ message['role'] }}: {{ message['content'] }}{% endfor %}<|turn|>"
)
USER = [{"role": "user", "content": "Say something"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {
            "type": "object",
            "properties": {"at": {"enum": ["here", "there"]}},
            "required": ["at"],
            "additionalProperties": False,
        },
    },
}
SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}


@dataclass(frozen=True)
class Case:
    """One request. ``greedy``: its texts have to be the same."""

    name: str
    path: str
    body: Any
    method: str = "POST"
    greedy: bool = True


def _text(name: str, *, greedy: bool = True, **more: Any) -> Case:
    body = {"model": "m", "prompt": "Once upon a time", "max_tokens": 12, "temperature": 0} | more
    return Case(name, COMPLETIONS, {key: value for key, value in body.items() if value is not ...}, greedy=greedy)


def _chat(name: str, *, greedy: bool = True, **more: Any) -> Case:
    body = {"model": "m", "messages": USER, "max_tokens": 12, "temperature": 0} | more
    return Case(f"chat: {name}", CHAT, {key: value for key, value in body.items() if value is not ...}, greedy=greedy)


USAGE = {"stream": True, "stream_options": {"include_usage": True}}
CASES = (
    _text("plain"),
    _text("no max_tokens", max_tokens=...),
    _text("no model", model=...),
    _text("tokens as the prompt", prompt=[72, 101, 108]),
    _text("several prompts", prompt=["Once", "upon a time"]),
    _text("several prompts of tokens", prompt=[[72], [101, 108]]),
    _text("n=2, greedy", n=2),
    _text("echo", echo=True),
    _text("echo, max_tokens=0", echo=True, max_tokens=0),
    _text("echo with logprobs", echo=True, logprobs=1),
    _text("echo with logprobs, max_tokens=0", echo=True, logprobs=1, max_tokens=0),
    _text("logprobs=0", logprobs=0),
    _text("logprobs=3", logprobs=3),
    _text("stop", stop="2"),
    _text("stop, included", stop=["2"], include_stop_str_in_output=True),
    _text("stop_token_ids", stop_token_ids=[50]),
    _text("ignore_eos", ignore_eos=True),
    _text("allowed_token_ids", allowed_token_ids=[97, 98, 99]),
    _text("logit_bias", logit_bias={"97": 100}),
    _text("repetition_penalty", repetition_penalty=1.3),
    _text("presence_penalty", presence_penalty=1.0),
    _text("frequency_penalty", frequency_penalty=1.0),
    _text("top_k=1", temperature=1.0, top_k=1),
    _text("top_p, min_p, seed", greedy=False, temperature=1.0, top_p=0.5, min_p=0.1, seed=7),
    _text("priority=0", priority=0),
    _text("user", user="someone"),
    _text("cache_salt", cache_salt="salt"),
    _text("prompt_logprobs", prompt_logprobs=2),
    _text("prompt_logprobs=0, echo with logprobs", prompt_logprobs=0, echo=True, logprobs=2),
    _text("return_token_ids", return_token_ids=True),
    _text("truncate_prompt_tokens", truncate_prompt_tokens=5),
    _text("truncate_prompt_tokens, right", truncate_prompt_tokens=5, truncation_side="right"),
    _text("min_tokens with a stop string", stop="2", min_tokens=8),
    _text("min_tokens with a stop token", stop_token_ids=[50], min_tokens=8),
    _text("bad_words", bad_words=["2", "ab"]),
    _text("stream with echo and logprobs", stream=True, echo=True, logprobs=2),
    _text(
        "stream with continuous usage",
        stream=True,
        stream_options={"include_usage": True, "continuous_usage_stats": True},
    ),
    _text("stream with return_token_ids", stream=True, return_token_ids=True),
    _text("structured_outputs: choice", structured_outputs={"choice": ["yes", "no"]}),
    _text("structured_outputs: regex", structured_outputs={"regex": "[ab]{4}"}, max_tokens=8),
    _text("structured_outputs: json", structured_outputs={"json": SCHEMA}, max_tokens=30),
    _text("stream", stream=True),
    _text("stream with usage", **USAGE),
    _text("stream with logprobs", stream=True, logprobs=2),
    _text("stream with echo", stream=True, echo=True),
    _text("stream, several prompts", stream=True, prompt=["Once", "upon a time"]),
    _text("stream, n=2", stream=True, n=2),
    _chat("plain"),
    _chat("several roles", messages=[{"role": "system", "content": "Be brief"}, *USER]),
    _chat("parts of text", messages=[{"role": "user", "content": [{"type": "text", "text": "Say something"}]}]),
    _chat("max_completion_tokens", max_tokens=..., max_completion_tokens=5),
    _chat("n=2, greedy", n=2),
    _chat("logprobs", logprobs=True, top_logprobs=2),
    _chat("stop", stop=["2"]),
    _chat("prompt_logprobs", prompt_logprobs=1),
    _chat("return_token_ids", return_token_ids=True),
    _chat("min_tokens, bad_words", min_tokens=4, bad_words=["a"]),
    _chat("stream with usage", **USAGE),
    _chat("stream with logprobs", stream=True, logprobs=True, top_logprobs=1),
    _chat("stream, n=2", stream=True, n=2),
    _chat("json_object", response_format={"type": "json_object"}, max_tokens=40, greedy=False),
    _chat("json_schema", response_format=FORMAT, max_tokens=40),
    _chat("json_schema, streamed", response_format=FORMAT, max_tokens=40, stream=True),
    _chat("tools, auto", tools=[TOOL]),
    _chat("tools, none", tools=[TOOL], tool_choice="none"),
    _chat("tools, required", tools=[TOOL], tool_choice="required", max_tokens=120, greedy=False),
    _chat("tools, named", tools=[TOOL], tool_choice={"type": "function", "function": {"name": "look"}}, max_tokens=120),
    _chat("tools, required, streamed", tools=[TOOL], tool_choice="required", max_tokens=120, stream=True, greedy=False),
    Case("tokenize", "/tokenize", {"model": "m", "prompt": "Once upon"}),
    Case("tokenize, strings", "/tokenize", {"model": "m", "prompt": "Once", "return_token_strs": True}),
    Case("tokenize a chat", "/tokenize", {"model": "m", "messages": USER}),
    Case("detokenize", "/detokenize", {"model": "m", "tokens": [72, 101, 108]}),
    Case("models", "/v1/models", None, "GET"),
    Case("health", "/health", None, "GET"),
    Case("version", "/version", None, "GET"),
    Case("error: no JSON", COMPLETIONS, b"{"),
    Case("error: an empty body", COMPLETIONS, b""),
    _text("error: no prompt", prompt=...),
    _text("error: an empty prompt", prompt=""),
    _text("error: a prompt of a number", prompt=7),
    _text("error: no prompt in a list", prompt=[]),
    _text("error: a token that is none", prompt=[100_000]),
    _text("error: too long", prompt="a" * 600),
    _text("error: max_tokens too large", max_tokens=600),
    _text("error: max_tokens=-1", max_tokens=-1),
    _text("error: max_tokens=0", max_tokens=0),
    _text("error: temperature=-1", temperature=-1),
    _text("error: temperature=3", temperature=3),
    _text("error: top_p=0", top_p=0),
    _text("error: n=0", n=0),
    _text("error: logprobs=1000", logprobs=1000),
    _text("error: a text for a number", max_tokens="12"),
    _text("error: an unknown parameter", beam_width=3),
    _text("error: another model", model="another"),
    _text("error: stream_options without stream", stream_options={"include_usage": True}),
    _text("error: a bad regex", structured_outputs={"regex": "("}),
    _text("error: logit_bias of a token that is none", logit_bias={"100000": 1}),
    _chat("error: no messages", messages=...),
    _chat("error: messages=[]", messages=[]),
    _chat("an unknown role", messages=[{"role": "nobody", "content": "a"}]),
    _chat("error: top_logprobs without logprobs", top_logprobs=2),
    _chat("error: required without tools", tool_choice="required"),
    Case("error: another path", "/v1/nothing", {}),
    Case("error: another method", COMPLETIONS, None, "GET"),
)

_GREEDY = "vLLM refuses several greedy answers, which are all the same; here they are given"
_END = "vLLM ends a guided answer by a token, and counts it; here it ends where nothing more may come"
_SPACE = "vLLM's grammar allows any whitespace between the parts of JSON; here there is none"
# By the case: why the two differ.
WHY: dict[str, str] = {
    "n=2, greedy": _GREEDY,
    "stream, n=2": _GREEDY,
    "chat: n=2, greedy": _GREEDY,
    "chat: stream, n=2": _GREEDY,
    "echo, max_tokens=0": "both generate a token that nobody sees; vLLM counts it",
    "echo with logprobs, max_tokens=0": "both generate a token that nobody sees; vLLM counts it",
    "structured_outputs: choice": _END,
    "structured_outputs: regex": _END,
    "structured_outputs: json": _SPACE,
    "chat: json_schema": _SPACE,
    "chat: json_schema, streamed": _SPACE,
    "chat: tools, none": "vLLM shows the model tools that it must not call; here it does not see them",
    "chat: tools, required": f"{_SPACE}; the calls did not end within the limit",
    "chat: tools, named": "vLLM says stop, here it is tool_calls, as for every answer with calls; " + _SPACE,
    "models": "vLLM adds permission, root and parent",
    "health": "here the body says ok, vLLM's is empty",
    "error: a text for a number": "vLLM takes the number that the text looks like",
    "error: an unknown parameter": "vLLM ignores it",
}
# Cases whose greedy texts differ for the reason in WHY: the model has another choice, or another prompt.
OTHER_TEXTS = {"structured_outputs: json", "chat: json_schema", "chat: json_schema, streamed", "chat: tools, none"}
# Fields that only one of the two has; these make no case differ.
EVERYWHERE: dict[str, str] = {
    "choices.prompt_logprobs": "vLLM's own form of a prompt's log-probabilities, beside OpenAI's",
    "choices.prompt_token_ids": "vLLM's, beside OpenAI's fields",
    "choices.stop_reason": "here an end-of-sequence token is a reason, too; vLLM has none for it",
    "usage.prompt_tokens_details": "vLLM has it with --enable-prompt-tokens-details, if anything was cached",
    "usage.prompt_tokens_details.cached_tokens": "the same",
}
_INSIDES = ("top_logprobs", "prompt_logprobs")  # whose names are tokens


@dataclass
class Shape:
    """What is compared of an answer."""

    status: int
    texts: list[str] = field(default_factory=list)
    finishes: list[str] = field(default_factory=list)
    usage: tuple[int, int] | None = None
    scores: list[float | None] = field(default_factory=list)
    calls: list[tuple[str, str]] = field(default_factory=list)
    done: bool = True
    keys: frozenset[str] = frozenset()
    rest: Any = None
    ranks: list[Any] = field(default_factory=list)  # of a prompt's tokens, with their numbers, and ids of tokens
    prompt_scores: list[float | None] = field(default_factory=list)

    def take_prompt(self, part: Any) -> None:
        """Take the scores, ranks and ids that vLLM's own fields have."""
        for entry in part.get("prompt_logprobs") or []:
            for token, score in sorted((entry or {}).items()):
                self.prompt_scores.append(score["logprob"])
                self.ranks.append((token, score["rank"], score["decoded_token"].replace(_HALF, "")))
        for name in ("prompt_token_ids", "token_ids"):
            self.ranks += part.get(name) or []

    def __str__(self) -> str:
        parts = [str(self.status)]
        parts += [" ".join(map(str, self.finishes))] if any(self.finishes) else []
        parts += [f"{len(self.calls)} calls"] if self.calls else []
        parts += [f"{self.usage[0]} + {self.usage[1]} tokens"] if self.usage else []
        parts += [f"{len(self.scores)} scores"] if self.scores else []
        return ", ".join(parts + ([] if self.done else ["no [DONE]"]))


def shape(answer: httpx.Response) -> Shape:
    found = Shape(answer.status_code)
    if not answer.headers.get("content-type", "").startswith("text/event-stream"):
        try:
            parts = [answer.json()]
        except ValueError:
            return found
    else:
        events = [line[len("data: ") :] for line in answer.text.splitlines() if line.startswith("data: ")]
        found.done = events[-1] == "[DONE]"
        parts = [json.loads(each) for each in events if each != "[DONE]"]
    if answer.status_code != 200:
        return found
    found.keys = frozenset(key for part in parts for key in _keys(part)) - {"system_fingerprint"}
    choices: dict[int, list[Any]] = {}
    for part in parts:
        if not isinstance(part, dict):
            continue
        found.take_prompt(part)
        if part.get("usage"):
            found.usage = part["usage"]["prompt_tokens"], part["usage"]["completion_tokens"]
        for choice in part.get("choices", []):
            choices.setdefault(choice["index"], []).append(choice)
        found.rest = {
            name: part[name] for name in ("tokens", "token_strs", "count", "max_model_len", "prompt") if name in part
        }
    for _, pieces in sorted(choices.items()):
        text, calls = "", {}
        for piece in pieces:
            said = piece.get("message") or piece.get("delta") or {}
            text += piece.get("text") or said.get("content") or ""
            for number, call in enumerate(said.get("tool_calls") or []):
                name, arguments = calls.get(call.get("index", number), ("", ""))
                function = call["function"]
                calls[call.get("index", number)] = (
                    name + (function.get("name") or ""),
                    arguments + (function.get("arguments") or ""),
                )
            scores = piece.get("logprobs") or {}
            found.scores += scores.get("token_logprobs") or [each["logprob"] for each in scores.get("content") or []]
            found.take_prompt(piece)
        found.texts.append(text.rstrip(_HALF))
        found.calls += [calls[each] for each in sorted(calls)]
        found.finishes += [piece["finish_reason"] for piece in pieces if piece.get("finish_reason")]
    return found


def _keys(part: Any, before: str = "") -> Iterator[str]:
    """The names of what is not null, as paths."""
    if isinstance(part, dict):
        for name, value in part.items():
            if value is not None and value != []:
                yield before + name
                if name not in _INSIDES:
                    yield from _keys(value, f"{before}{name}.")
    elif isinstance(part, list):
        for each in part:
            yield from _keys(each, before)


def differences(case: Case, ours: Shape, theirs: Shape, seen: set[str]) -> list[str]:
    """What differs, a word or two each; ``seen`` collects the fields of EVERYWHERE that do."""
    found = []
    if ours.status != theirs.status:
        return ["status"]
    if case.greedy and ours.texts != theirs.texts:
        found.append("text")
    if case.greedy and ours.finishes != theirs.finishes:
        found.append("finish_reason")
    if case.greedy and ours.usage != theirs.usage:
        found.append("usage")
    if case.greedy and [name for name, _ in ours.calls] != [name for name, _ in theirs.calls]:
        found.append("calls")
    if ours.done != theirs.done:
        found.append("[DONE]")
    if not _close(ours.scores, theirs.scores):
        found.append("logprobs")
    if ours.rest != theirs.rest:
        found.append("content")
    if {"prompt_logprobs", "return_token_ids"} & set(case.body or ()):  # vLLM gives them with an echo as well
        if ours.ranks != theirs.ranks:
            found.append("ranks or ids")
        if not _close(ours.prompt_scores, theirs.prompt_scores):
            found.append("prompt_logprobs")
    for key in sorted(ours.keys ^ theirs.keys):
        if key in EVERYWHERE:
            seen.add(key)
        else:
            found.append(f"{key} {'here only' if key in ours.keys else 'there only'}")
    return found


def _close(ours: list[float | None], theirs: list[float | None]) -> bool:
    return len(ours) == len(theirs) and all(
        mine is its or (mine is not None and its is not None and abs(mine - its) <= NEAR)
        for mine, its in zip(ours, theirs)
    )


@contextlib.contextmanager
def vllm_server(python: str, folder: Path, template: Path) -> Iterator[tuple[int, str]]:
    """Its port and version, once it is up."""
    port = _free_port()
    # The folder's plug-in is not asked for: this is vLLM as it is.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "VLLM_PLUGINS": ""}
    environment |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR", "TMPDIR": str(folder.parent)}
    options = {
        **{"model": folder, "served-model-name": "m", "dtype": "float32", "max-model-len": LENGTH},
        **{"host": HOST, "port": port, "tool-call-parser": "hermes", "chat-template": template},
        "generation-config": "vllm",
    }
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager", "--enable-auto-tool-choice"]
    command += [part for name, value in options.items() for part in (f"--{name}", str(value))]
    log = folder / "vllm-server.log"
    with log.open("w") as out:
        running = subprocess.Popen(command, env=environment, stdout=out, stderr=out, cwd=folder)
    try:
        until = time.monotonic() + START_S
        while not _up(port):
            if running.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"vLLM's server did not come up:\n{log.read_text(errors='replace')[-3000:]}")
            time.sleep(0.5)
        version = httpx.get(f"http://{HOST}:{port}/version", timeout=10).json()["version"].partition("+")[0]
        yield port, version
    finally:
        running.terminate()
        try:
            running.wait(60)
        except subprocess.TimeoutExpired:
            running.kill()
            running.wait()


def _up(port: int) -> bool:
    try:
        return httpx.get(f"http://{HOST}:{port}/health", timeout=10).status_code == 200
    except httpx.HTTPError:
        return False


def ask(case: Case, port: int) -> Shape:
    """What the server on ``port`` makes of ``case``."""
    sent = (
        {"content": case.body} if isinstance(case.body, bytes) else {"json": case.body} if case.body is not None else {}
    )
    headers = {"Content-Type": "application/json"}
    return shape(
        httpx.request(case.method, f"http://{HOST}:{port}{case.path}", headers=headers, timeout=ANSWER_S, **sent)  # type: ignore[arg-type]
    )


def _free_port() -> int:
    with socket.socket() as found:
        found.bind((HOST, 0))
        return int(found.getsockname()[1])


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--vllm", required=True, help="the Python of an environment that has vLLM")
    parser.add_argument("--only", default="", help="cases whose name holds this; nothing is written then")
    options = parser.parse_args()
    import torch

    from shardfuse.testing import save_tiny_hf

    chosen = [case for case in CASES if options.only in case.name]
    wrong: list[str] = []
    rows: list[dict[str, str]] = []
    seen: set[str] = set()
    with tempfile.TemporaryDirectory(prefix="shardfuse-") as place:
        folder = save_tiny_hf(Path(place) / "m", dtype=torch.float32, max_positions=LENGTH, **SIZES)
        template = Path(place) / "template.jinja"
        template.write_text(TEMPLATE)
        arguments = (str(folder), "--name", "m", "--chat-template", str(template), "--log-level", "warning")
        # vLLM's Python may be relative to where this was started.
        python = str(Path(options.vllm).absolute())
        with vllm_server(python, folder, template) as (theirs, version), serving(*arguments) as server:
            for case in chosen:
                ours, its = ask(case, server.port), ask(case, theirs)
                found = differences(case, ours, its, seen)
                why = WHY.get(case.name, "")
                if found and not why:
                    wrong.append(f"{case.name}: {'; '.join(found)} differ without a reason: {ours}\n  {its}")
                if why and not found:
                    wrong.append(f"{case.name}: nothing differs, and there is a reason: {why}")
                if case.greedy and "text" in found and ours.status == 200 and case.name not in OTHER_TEXTS:
                    wrong.append(f"{case.name}: greedy texts differ: {ours.texts} and {its.texts}")
                row = {"case": case.name, "ours": str(ours), "theirs": str(its)}
                rows.append({**row, "differs": "; ".join(found) or "same", "why": why})
                print(f"{case.name:45} {'; '.join(found) or 'same'}", flush=True)
    if not options.only:
        wrong += [f"{key}: no case differs in it" for key in sorted(EVERYWHERE.keys() - seen)]
    if wrong:
        print("\n" + "\n".join(wrong))
        return 1
    if not options.only:
        vllm_page.write_requests(version, NEAR, EVERYWHERE, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
