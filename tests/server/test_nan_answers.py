"""Logits that are NaN: their request is told, the health is told, and every other answer is what it would have been."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import torch
from server_case import NAME, SOON_S, Server, answer, serve

PATH = "/v1/completions"
PROMPTS = ("a", "Once", "def f(x):", "日本")
MOST = 8


@contextlib.contextmanager
def spoiling(server: Server, steps: dict[int, int]) -> Iterator[None]:
    """Within it, the logits of the request with a seed of ``steps`` are NaN once it has so many tokens."""
    runner = server.engine._runner
    logits = runner.logits

    def spoilt(chunks: Any) -> torch.Tensor:
        found = logits(chunks)
        sampling = [chunk.sequence for chunk in chunks if chunk.samples]
        for row, sequence in enumerate(sampling):
            if steps.get(sequence.request.sampling.seed, -1) == sequence.generated:
                found[row, 3] = float("nan")
        return found

    runner.logits = spoilt  # type: ignore[method-assign]
    try:
        yield
    finally:
        del runner.logits  # type: ignore[method-assign]


def _body(prompt: str, seed: int, **more: Any) -> dict[str, Any]:
    return {"model": NAME, "prompt": prompt, "max_tokens": MOST, "temperature": 0, "seed": seed, **more}


@pytest.mark.parametrize("logprobs", [None, 2])
@pytest.mark.parametrize("at", [0, 3])
def test_an_answer_whose_logits_are_nan_is_an_error_that_says_where(at: int, logprobs: int | None) -> None:
    with serve() as server, spoiling(server, {1: at}):
        said = server.post(PATH, _body("Once", 1, logprobs=logprobs))
        assert said.status_code == 500
        error = said.json()["error"]
        assert error["code"] == "logits_not_finite"
        assert f"the model's logits for token {at + 1} of the answer, at position {4 + at}, are NaN" in error["message"]
        assert server.post(PATH, _body("Once", 2)).json()["choices"][0]["text"] == answer("Once", MOST)[1]
        told = server.get("/health")
        assert told.status_code == 200
        assert told.json()["logits_not_finite"] == {
            "answers": 1,
            "last_error": error["message"],
            "seconds_ago": pytest.approx(SOON_S / 2, abs=SOON_S / 2),
        }
        assert server.metrics()["shardfuse:logits_not_finite_total"] == 1


def test_a_model_that_makes_nothing_but_nan_is_unhealthy_under_load_as_well() -> None:
    with serve() as server:
        assert server.get("/health").json() == {"status": "ok"}
        bias = server.engine.model.model.norm.weight
        before = bias.detach().clone()
        with torch.no_grad():
            bias.fill_(float("nan"))
        assert server.post(PATH, _body("a", 1)).json()["error"]["code"] == "logits_not_finite"
        server.served._probed = (-1e9, "")  # the probe's result is out of date
        said = server.get("/health")
        assert said.status_code == 503
        assert "are NaN or infinite" in said.json()["error"]["message"]
        with torch.no_grad():
            bias.copy_(before)
        server.served._probed = (-1e9, "")
        assert server.get("/health").status_code == 200


async def _ask(client: httpx.AsyncClient, seed: int, prompt: str, kind: str, stream: bool) -> str:
    """What became of a request: its text, or the code of its error after the text."""
    body = _body(prompt, seed, stream=stream)
    if not stream and kind != "cancelled":
        said = (await client.post(PATH, json=body)).json()
        return str(said["choices"][0]["text"] if "choices" in said else f"|{said['error']['code']}")
    text, error = "", ""
    async with client.stream("POST", PATH, json={**body, "stream": True}) as answered:
        async for line in answered.aiter_lines():
            if kind == "cancelled":
                break
            if line.startswith("data: {"):
                event = json.loads(line[len("data: ") :])
                text += "".join(choice["text"] for choice in event.get("choices", ()))
                error += f"|{event['error']['code']}" if "error" in event else ""
    return text + error


def _load(count: int) -> None:
    chosen = random.Random(1)
    kinds = ["cancelled"] * (count // 10) + ["nan"] * (count // 10) + ["whole"] * (count - 2 * (count // 10))
    chosen.shuffle(kinds)
    steps = {seed: chosen.randrange(MOST) for seed, kind in enumerate(kinds) if kind == "nan"}
    wanted = {prompt: answer(prompt, MOST)[1] for prompt in PROMPTS}
    prompts, streams = [chosen.choice(PROMPTS) for _ in kinds], [chosen.random() < 0.5 for _ in kinds]

    async def all_of_them(server: Server) -> list[str]:
        room = asyncio.Semaphore(48)
        async with httpx.AsyncClient(base_url=server.url, timeout=SOON_S) as client:

            async def one(seed: int) -> str:
                async with room:
                    return await _ask(client, seed, prompts[seed], kinds[seed], streams[seed])

            return list(await asyncio.gather(*map(one, range(count))))

    with serve(engine={"max_num_seqs": 16}) as server, spoiling(server, steps):
        server.listener.listen(1024)  # uvicorn's number is 8, which run.py raises as well
        found = asyncio.run(all_of_them(server))
        wrong: Counter[str] = Counter()
        for seed, (kind, got) in enumerate(zip(kinds, found)):
            text, _, code = got.partition("|")
            if kind == "whole":
                wrong["another text"] += got != wanted[prompts[seed]]
            elif kind == "nan":
                wrong["not told"] += code != "logits_not_finite"
                begun = streams[seed] and bool(text)
                wrong["another beginning"] += begun and not wanted[prompts[seed]].startswith(text.rstrip("\ufffd"))
        assert not +wrong, wrong
        server.idle()
        assert server.get("/health").json()["logits_not_finite"]["answers"] == len(steps)


def test_nan_in_some_answers_changes_no_other() -> None:
    _load(300)


@pytest.mark.nightly(seconds=100)
def test_nan_in_a_thousand_of_ten_thousand_answers_changes_no_other() -> None:
    _load(10_000)
