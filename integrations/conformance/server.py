"""Compare a server's answers with the known tokens of a small model.

The server has OpenAI's API, completions or chat, and serves a folder that ``models.py`` wrote. Three rounds send the
prompts: one at a time; all at once, so that they share steps; and all at once again, with cached prefixes.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from . import models

ROUNDS = {"alone": 1, "together": 0, "together, cached": 0}  # requests at a time; 0: the number that the caller chooses
APIS = ("completions", "chat/completions")


class Result(NamedTuple):
    """One answer, with the reason why it is wrong, or "" """

    round: str
    prompt: int  # tokens
    wrong: str


def check(
    url: str,
    folder: Path,
    *,
    model: str | None = None,
    api: str = "completions",
    at_once: int = 8,
    timeout_s: float = 60.0,
) -> Iterator[Result]:
    """Send every prompt of ``folder`` to the server at ``url`` (``http://127.0.0.1:8000/v1``), in each round.

    ``model`` is the model's name on the server, by default the first that it lists. Yields results as they arrive.
    Raises ValueError if the folder has no expected tokens, ConnectionError if no server answers.
    """
    expected = models.read(folder)
    if api not in APIS:
        raise ValueError(f"api={api!r}: expected one of {', '.join(APIS)}")
    model = model or _get(f"{url}/models", timeout_s)["data"][0]["id"]

    def ask(number: int) -> tuple[int, str]:
        wrong = _wrong(_ask(url, api, model, expected.prompts[number], timeout_s), expected.tokens[number])
        return len(expected.prompts[number]), wrong

    for name, workers in ROUNDS.items():
        with ThreadPoolExecutor(workers or at_once) as pool:
            for length, wrong in pool.map(ask, range(len(expected.prompts))):
                yield Result(name, length, wrong)


def _wrong(answer: str, tokens: list[int]) -> str:
    try:
        got = models.tokens_of(answer)
    except ValueError as error:
        return str(error)
    if got == tokens:
        return ""
    at = next((i for i, (a, b) in enumerate(zip(got, tokens)) if a != b), min(len(got), len(tokens)))
    if at == len(tokens) or at == len(got):
        return f"{len(got)} tokens, expected {len(tokens)}"
    return f"token {at} is {got[at]}, expected {tokens[at]}"


def _ask(url: str, api: str, model: str, prompt: list[int], timeout_s: float) -> str:
    text = models.text_of(prompt)
    asked = {"prompt": text} if api == "completions" else {"messages": [{"role": "user", "content": text}]}
    body = {"model": model, "max_tokens": models.NEW_TOKENS, "temperature": 0, "ignore_eos": True, **asked}
    choice = _get(f"{url}/{api}", timeout_s, body)["choices"][0]
    answer = choice["text"] if api == "completions" else choice["message"]["content"]
    return str(answer)


def _get(url: str, timeout_s: float, body: dict[str, Any] | None = None) -> Any:
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"{url!r} is no address of a server: expected http://host:port/v1")
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})  # noqa: S310 - the scheme is known
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as response:  # noqa: S310
            return json.load(response)
    except urllib.error.HTTPError as error:
        said = error.read().decode(errors="replace")[:200]
        raise ConnectionError(f"{url} answered {error.code}: {said}") from error
    except (urllib.error.URLError, TimeoutError, json.JSONDecodeError) as error:
        raise ConnectionError(f"{url} gives no answer: {getattr(error, 'reason', error)}; is the server up?") from error
