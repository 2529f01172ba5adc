"""The demo's serving: it streams more requests than run at once, then checks them against a forward without a cache."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ..kernels.dev.accuracy import FACTOR
from ..kernels.runtime import dispatch
from ..layers.transformer import ParallelTransformer
from ..serving.engine import Engine
from ..serving.request import Request, TokenEvent
from ..serving.sampling import uniform
from ..serving.sampling_params import SamplingParams
from ..serving.stats import EngineStats
from ..training.data.corpus import Corpus

REQUESTS = 8
MAX_NUM_SEQS = 3
BLOCK_SIZE = 16
NEW_TOKENS = 64
TEMPERATURE = 0.7
ARRIVAL_STEPS = 10  # between one request and the next


@dataclass(frozen=True)
class Served:
    """A request in engine steps, which count from 1: it arrives after ``arrival``, and ``tokens[i]`` gives token i."""

    prompt_tokens: int
    arrival: int
    tokens: tuple[int, ...]
    finish: str


@dataclass(frozen=True)
class DemoServing:
    """The result of serving. ``equal`` counts the answers that agree with a solo forward."""

    requests: tuple[Served, ...]
    max_num_seqs: int
    equal: int
    stats: EngineStats
    calls: dict[tuple[str, str], int]  # of each (op, implementation), in the engine's steps


def serve(model: ParallelTransformer, corpus: Corpus, console: Console, *, seed: int) -> DemoServing:
    """Continue pieces of held-out text with the engine, streaming to ``console``."""
    model.eval()
    requests = make_requests(corpus, seed)
    longest = max(len(request.prompt) + request.max_new_tokens for request in requests)
    blocks = MAX_NUM_SEQS * -(-longest // BLOCK_SIZE)
    engine = Engine(model, num_blocks=blocks, block_size=BLOCK_SIZE, max_num_seqs=MAX_NUM_SEQS, max_model_len=longest)
    answers: list[list[int]] = [[] for _ in requests]
    steps: list[list[int]] = [[] for _ in requests]  # of each token
    finish = ["" for _ in requests]
    for request in requests:
        engine.add(request)
    before = dispatch.counts.copy()
    with _streaming(console, requests, answers) as show:
        for step in itertools.count(1):
            if not engine.busy:
                break
            events = engine.step()
            for event in events:
                if event.error is not None:
                    raise event.error
                if event.token is not None:
                    answers[event.request].append(event.token)
                    steps[event.request].append(step)
                finish[event.request] = event.finish or ""
            show(events)
    calls = dict(dispatch.counts - before)
    exact = copy.deepcopy(model).double()
    equal = sum(agrees(model, exact, request, answer) for request, answer in zip(requests, answers))
    served = (
        Served(len(request.prompt), request.arrival, tuple(tokens), reason)
        for request, tokens, reason in zip(requests, steps, finish)
    )
    return DemoServing(tuple(served), MAX_NUM_SEQS, equal, engine.stats, calls)


def make_requests(corpus: Corpus, seed: int) -> list[Request]:
    """Prompts of different lengths from the held-out text, which start at a line and arrive one after another.

    Every fourth request is greedy; the rest sample, each with its own seed.
    """
    text = bytes(corpus.held_out.numpy())
    requests = []
    for i in range(REQUESTS):
        length = 16 + 5 * i
        start = text.find(b"\n", len(text) * i // REQUESTS) + 1
        start = min(start, len(text) - length)
        requests.append(
            Request(
                prompt=list(text[start : start + length]),
                max_new_tokens=NEW_TOKENS - 4 * i,
                ignore_eos=True,
                sampling=SamplingParams(temperature=TEMPERATURE if i % 4 else 0.0, seed=seed + i),
                arrival=ARRIVAL_STEPS * (i // 2),
            )
        )
    return requests


@torch.no_grad()
def agrees(model: ParallelTransformer, exact: ParallelTransformer, request: Request, answer: list[int]) -> bool:
    """Whether one forward without a cache, over this request alone, picks the tokens of ``answer`` after its prefixes.

    The first token depends only on the prompt, and each later one also on the tokens before it. So the model could have
    given an agreeing answer to this request alone. A batch of another size rounds the logits differently, which can
    decide between tokens of nearly equal probability. ``exact`` is the model in fp64; its distance from ``model``
    bounds that difference.
    """
    prompt = list(request.prompt)
    tokens = torch.tensor([prompt + answer[:-1]], device=next(model.parameters()).device)
    low, logits = (each.gather_logits(each(tokens))[0, len(prompt) - 1 :].double().cpu() for each in (model, exact))
    error = FACTOR * (low - logits).abs().max().item()
    sampling = request.sampling
    drawn = uniform([sampling.seed] * len(answer), range(len(answer))).tolist()
    rows = zip(logits, answer, drawn)
    return all(could_pick(row, token, error, sampling.temperature, number) for row, token, number in rows)


def could_pick(logits: torch.Tensor, token: int, error: float, temperature: float, drawn: float) -> bool:
    """Whether ``sample`` could pick ``token`` with the random number ``drawn``.

    ``logits`` [V] are in fp64. The logits that ``sample`` saw may differ from them by at most ``error``.
    """
    if temperature == 0:
        return bool(logits[token] >= logits.max() - 2 * error)
    cumulative = torch.softmax(logits / temperature, dim=-1).cumsum(dim=-1)
    # Every probability, and the sum on either side of it, may change by a factor of exp(2 error / temperature).
    slack = math.expm1(2 * error / temperature) / 2
    below = cumulative[token - 1].item() if token else 0.0
    return below - slack <= drawn <= cumulative[token].item() + slack


class _Streams:
    """On a terminal a table of all requests that grows with their tokens; elsewhere a line at each start and end."""

    def __init__(self, console: Console, requests: list[Request], answers: list[list[int]], live: Live | None) -> None:
        self._console = console
        self._requests = requests
        self._answers = answers
        self._live = live
        self._steps = 0

    def __call__(self, events: list[TokenEvent]) -> None:
        self._steps += 1
        if self._live is not None:
            self._live.update(self.table())
            return
        for event in events:
            if len(self._answers[event.request]) == 1:
                self._line(f"step {self._steps:3}: request {event.request} starts")
            if event.finish is not None:
                text = self._text(event.request, width=64)
                self._line(f"step {self._steps:3}: request {event.request} ends: {text.plain}")

    def table(self) -> Table:
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
        table.add_column("request", justify="right")
        table.add_column("tokens", justify="right")
        table.add_column("prompt, and what follows", no_wrap=True)
        width = max(20, self._console.width - 24)
        for number, (request, answer) in enumerate(zip(self._requests, self._answers)):
            state = f"{len(answer)}/{request.max_new_tokens}" if answer else "waits"
            table.add_row(str(number), state, self._text(number, width))
        return table

    def _text(self, number: int, width: int) -> Text:
        """The last ``width`` characters of prompt and answer."""
        text = Text()
        text.append(printable(self._requests[number].prompt), style="dim")
        text.append(printable(self._answers[number]))
        return text[max(0, len(text) - width) :]

    def _line(self, text: str) -> None:
        self._console.print(f"  {text}", markup=False, soft_wrap=True)


@contextmanager
def _streaming(console: Console, requests: list[Request], answers: list[list[int]]) -> Iterator[_Streams]:
    if not console.is_terminal:
        yield _Streams(console, requests, answers, None)
        return
    with Live(console=console, refresh_per_second=10) as live:
        yield _Streams(console, requests, answers, live)


def printable(tokens: Sequence[int]) -> str:
    """Bytes as ASCII that is safe on a terminal: a line end as ``\\n``, any other unprintable byte as a dot."""
    return "".join("\\n" if byte == 10 else chr(byte) if 32 <= byte < 127 else "." for byte in tokens)
