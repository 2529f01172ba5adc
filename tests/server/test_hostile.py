"""One request never costs another: hostile bodies beside a second client, and a load of which a fifth is hostile."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="fastapi is not installed (pip install .[serve])")

import httpx
from hostile import BODIES, COMPLETIONS, KEYS, MIB, MORE, OTHER, Hostile, Meter, Seen, Sender, metered
from http_load import PATIENCE_S, PROMPTS, Process, serving

from shardfuse.testing import save_tiny_hf

SILENCE_S = 0.1  # of the event loop
SMALL_BYTES = 32 * MIB  # that any body may take: the memory of its values, and what the allocator rounds up
TIMES_ITS_BYTES = 10
GUIDE_BYTES = 256 * MIB  # the share of a guide, by --guide-memory-mib
FLAT_BYTES = 48 * MIB
CALM = 3  # by this factor a silence may follow the machine's own delays


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_hf(tmp_path_factory.mktemp("tiny") / "tiny", max_positions=2048)


@contextmanager
def served(folder: Path, *options: str) -> Iterator[Process]:
    with serving(str(folder), "--no-warmup", "--debug-endpoints", "--log-level", "error", *KEYS, *options) as process:
        yield process
        assert not process.said().count("ERROR"), process.said()


@pytest.fixture(scope="module")
def process(folder: Path) -> Iterator[Process]:
    """A server that reads every one of the bodies."""
    with served(folder, "--max-body-bytes", str(8 * MIB), "--max-logprobs", "64") as process:
        yield process


@pytest.fixture(scope="module")
def meter(process: Process) -> Iterator[Meter]:
    if not Path(f"/proc/{process.popen.pid}/clear_refs").exists():
        pytest.skip("the peak of a process's memory is read by Linux's /proc")
    with metered(process) as meter:
        yield meter


def check(hostile: Hostile, seen: Seen, times: int = 1) -> None:
    print(seen)
    assert seen.status in hostile.statuses or (seen.status == 429 and times > 1), seen
    assert seen.status < 400 or seen.answer <= 4096, seen
    assert seen.silence <= SILENCE_S + CALM * seen.machine, seen
    assert seen.peak <= times * (TIMES_ITS_BYTES * seen.sent + SMALL_BYTES) + hostile.guide * GUIDE_BYTES, seen


@pytest.mark.parametrize("hostile", BODIES, ids=lambda each: each.name)
def test_a_hostile_body_costs_others_nothing(meter: Meter, hostile: Hostile) -> None:
    check(hostile, _alone(meter, hostile))


def _alone(meter: Meter, hostile: Hostile) -> Seen:
    """With an empty queue, which takes a request of any size: the meter's own may wait in it for a step."""
    for _ in range(5):
        seen = meter.measure(hostile)
        if seen.status != 429:
            break
        check(hostile, seen, 2)  # costs nothing either
    return seen


@pytest.mark.nightly(seconds=60)
def test_more_hostile_bodies_and_three_of_each_at_once(process: Process, meter: Meter) -> None:
    for hostile in MORE:
        check(hostile, _alone(meter, hostile))
    held = [_resident(process)]
    for _ in range(2):
        for hostile in BODIES + MORE:
            check(hostile, meter.measure(hostile, 3), 3)
        held.append(_resident(process))
    assert held[2] - held[1] < FLAT_BYTES, held


# --- a load -----------------------------------------------------------------------------------------------------------

_NEW = 4
RATE = 20.0  # requests a second
SLOWER = 2  # by this factor at most


def _key(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def _resident(process: Process) -> int:
    """Bytes of the server's memory, once it serves nothing."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        found = httpx.get(f"{process.url}/debug/leaks", timeout=PATIENCE_S, headers=_key(OTHER)).json()
        if not (found["running"] or found["waiting"] or found["open_requests"]):
            return int(found["resident_bytes"])
        assert time.monotonic() < deadline, found
        time.sleep(0.1)


class _Load:
    """Good requests that arrive as a Poisson process; ``run`` returns the seconds until each answer.

    Each must have the tokens that it has alone.
    """

    def __init__(self, process: Process, seed: int) -> None:
        self._url, self._draw = process.url, random.Random(seed)
        with httpx.Client(base_url=process.url, timeout=PATIENCE_S, headers=_key(OTHER)) as client:
            self._alone = {
                prompt: client.post(COMPLETIONS, json=self._body(prompt)).json()["choices"][0]["text"]
                for prompt in PROMPTS
            }

    def _body(self, prompt: str) -> dict[str, Any]:
        return {"prompt": prompt, "max_tokens": _NEW, "temperature": 0, "ignore_eos": True}

    def run(self, count: int, rate: float) -> list[float]:
        return asyncio.run(asyncio.wait_for(self._run(count, rate), PATIENCE_S + 4 * count / rate))

    async def _run(self, count: int, rate: float) -> list[float]:
        seconds: list[float] = []
        limits = httpx.Limits(max_connections=256, max_keepalive_connections=64)
        async with httpx.AsyncClient(
            base_url=self._url, timeout=PATIENCE_S, limits=limits, headers=_key(OTHER)
        ) as client:
            tasks = []
            due = time.monotonic()
            for _ in range(count):
                due += self._draw.expovariate(rate)
                await asyncio.sleep(max(0.0, due - time.monotonic()))
                tasks.append(asyncio.create_task(self._one(client, self._draw.choice(PROMPTS), seconds)))
            await asyncio.gather(*tasks)
        return seconds

    async def _one(self, client: httpx.AsyncClient, prompt: str, seconds: list[float]) -> None:
        began = time.monotonic()
        answer = await client.post(COMPLETIONS, json=self._body(prompt))
        seconds.append(time.monotonic() - began)
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["text"] == self._alone[prompt]


def _refused() -> list[Hostile]:
    """Bodies that are refused, those of more than 2 MiB by their size alone."""
    refused = [each for each in BODIES if min(each.statuses) >= 400 and not each.chunk]
    return [replace(each, statuses=(*each.statuses, 413)) for each in refused]


def _p99(seconds: list[float]) -> float:
    return sorted(seconds)[int(0.99 * len(seconds))]


def test_a_load_with_hostile_requests_gets_the_right_tokens(process: Process) -> None:
    sender = Sender(process, BODIES, 10.0, seed=1)
    assert len(_Load(process, 1).run(150, 40.0)) == 150
    count, wrong = sender.stop()
    assert count > 10
    assert not wrong, wrong


@pytest.mark.nightly(seconds=660)
def test_ten_thousand_requests_of_which_a_fifth_is_hostile(folder: Path) -> None:
    """In turns with a load without them: others hardly wait longer, and memory stays flat."""
    with served(folder) as process:
        _ten_thousand(process)


def _ten_thousand(process: Process) -> None:
    load, with_hostile, without, hostile = _Load(process, 2), list[float](), list[float](), 0
    resident, bodies = [], _refused()
    for turn in range(10):
        sender = Sender(process, bodies, RATE / 5, seed=turn)
        with_hostile += load.run(800, RATE * 4 / 5)
        count, wrong = sender.stop()
        assert not wrong, wrong
        hostile += count
        if turn % 3 == 1:
            without += load.run(800, RATE * 4 / 5)
        resident.append(_resident(process))
    figures = {"with": _p99(with_hostile), "without": _p99(without), "hostile": hostile, "resident": resident}
    print(json.dumps(figures))
    assert hostile > 1500, figures
    assert resident[-1] - resident[4] < FLAT_BYTES, figures
    assert _p99(with_hostile) <= SLOWER * _p99(without), figures
