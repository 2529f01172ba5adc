"""What the engine costs beside the model: its share of a step, its growth with the load, latency, and unused memory.

Rows of the benchmark ``serve``. Two of them replace the model by results that are there already, as a replayed graph
does for the host; they time the host's work alone.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from ...kernels.dev.accuracy import Verdict
from ...layers.config import TransformerConfig
from ...layers.transformer import ParallelTransformer
from ...serving import Engine, Request
from ...serving.graphs import Graphs, Run
from ..harness.benchmark import Measurement, Settings
from ..harness.timing import Timing, keep_freed_memory

SHARE, GROWTH, REPLAY, FIRST, WASTE = (
    "engine's share of a step",
    "growth with the load",
    "host time of a replayed step",
    "time to first token",
    "unused cache",
)
TARGETS = {SHARE: 0.95, GROWTH: 0.5, REPLAY: 1.0, FIRST: 1.0, WASTE: 1.0}
_FAST = "the same without the promise"
BUDGET = 512  # tokens of a step
REPLAY_US, WASTE_PERCENT = 300.0, 4.0
LOADS = (10, 100, 1000)
RATES = (0.5, 0.8)  # of the requests per second that the engine serves when all of them are there
INVARIANT = "invariant"  # without a target
CASES = {name: name.replace(" ", "-").replace("'", "") for name in (*TARGETS, INVARIANT)}


def _model(settings: Settings) -> ParallelTransformer:
    """The Llama of 21 million parameters that ``serve`` measures; in a dry run a tiny one."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 512, "intermediate_size": 1408, "num_layers": 6, "vocab_size": 4096}
    sizes |= {"num_heads": 8, "num_kv_heads": 2, "max_positions": 1024}
    if settings.dry:
        sizes |= {"hidden_size": 32, "intermediate_size": 48, "num_layers": 1, "vocab_size": 64}
    return ParallelTransformer(TransformerConfig(style="gated", **sizes)).eval()


def _prompts(count: int, vocab_size: int, most: int = 128) -> list[list[int]]:
    drawn = torch.Generator().manual_seed(0)
    lengths = torch.randint(16, most + 1, (count,), generator=drawn).tolist()
    return [torch.randint(1, vocab_size, (length,), generator=drawn).tolist() for length in lengths]


def _decoding(engine: Engine, count: int, new: int, most: int = 16) -> None:
    """Have ``count`` requests run, all of them behind their prefill, of ``most`` tokens at most."""
    for prompt in _prompts(count, engine.model.config.vocab_size, most):
        engine.add(Request(prompt, max_new_tokens=new, ignore_eos=True))
    while engine.stats.decode_tokens < count:
        engine.step()


def _share(settings: Settings) -> tuple[Timing, Timing]:
    """Microseconds of a step of 32 running requests, and of the model in the very same steps."""
    keep_freed_memory()
    steps = 3 if settings.dry else 200
    engine = Engine(_model(settings), num_blocks=65, max_num_seqs=32)
    _decoding(engine, 32, steps + 20)
    inner: list[float] = []
    forward = engine._runner._forward

    def timed(*args: Any) -> torch.Tensor:
        began = time.perf_counter()
        try:
            return forward(*args)
        finally:
            inner.append(time.perf_counter() - began)

    engine._runner._forward = timed  # type: ignore[method-assign,assignment]
    whole = [_seconds(engine.step) for _ in range(steps)]
    shares = sorted(model / step for model, step in zip(inner, whole))
    step = statistics.median(whole) * 1e6
    return Timing(step), Timing(step * statistics.median(shares))


class _Ready:
    """Stands for CUDA graphs: a replay finds results that are there."""

    def __init__(self, rows: int, vocab_size: int) -> None:
        self._logits = torch.randn(rows, vocab_size)

    def __call__(self, compute: Run) -> tuple[torch.Tensor, Run]:
        return self._logits, lambda: self._logits


def _host_steps(settings: Settings, running: int) -> Callable[[], float]:
    """Returns seconds of one step of ``running`` requests whose model is a replay of nothing."""
    model = _model(Settings(settings.device, dry=True))
    engine = Engine(model, num_blocks=4 * running, max_num_seqs=running, max_num_batched_tokens=20 * running)
    engine._runner.graphs = Graphs(_Ready(running, model.config.vocab_size), running, engine.max_model_len)
    _decoding(engine, running, 900)
    return partial(_seconds, engine.step)


def _growth(settings: Settings, running: int) -> tuple[Timing, Timing]:
    """Microseconds for each request of a step, of as many and of ten running ones."""
    steps = [_host_steps(settings, each) for each in (running, LOADS[0])]
    found: list[list[float]] = [[], []]
    with _without_gc():
        for _ in range(2 if settings.dry else 100):
            for each, step in zip(found, steps):
                each.append(step())
    ours, few = (statistics.median(each) * 1e6 for each in found)
    return Timing(ours / running), Timing(few / LOADS[0])


def _replay(settings: Settings) -> tuple[Timing, Timing]:
    """Microseconds of the host in a step of 32 running requests that replays a graph, without the replay itself."""
    step = _host_steps(settings, 32)
    return Timing(statistics.median(step() for _ in range(3 if settings.dry else 300)) * 1e6), Timing(REPLAY_US)


def _first(settings: Settings, rate: float) -> tuple[Timing, Timing]:
    """The 99th percentile of the microseconds until a request's first token, and twice a full step's time.

    Requests come at ``rate`` times the rate at which the engine serves them when it has all of them at once.
    """
    keep_freed_memory()
    count, new = (4, 2) if settings.dry else (400, 16)
    engine = Engine(_model(settings), num_blocks=200, max_num_seqs=64, max_num_batched_tokens=BUDGET)
    prompts = _prompts(count, engine.model.config.vocab_size)
    requests = [Request(prompt, max_new_tokens=new, ignore_eos=True) for prompt in prompts]
    engine.generate(requests[:32])
    between = _seconds(lambda: engine.generate(requests[: min(count, 128)])) / min(count, 128) / rate
    drawn = torch.Generator().manual_seed(1)
    gaps = (-torch.rand(count, generator=drawn, dtype=torch.float64).clamp_min(1e-9).log() * between).tolist()
    budget = []
    for i in range(3 if settings.dry else 15):  # such prompts, as many as one step has room for
        for prompt in prompts[: BUDGET // 16]:
            engine.add(Request(prompt, max_new_tokens=1, cache_salt=f"budget {i}"))
        budget.append(_seconds(engine.step))
        for _ in engine.run():
            pass
    for salt in ("first", "again"):  # sizes of steps that come for the first time want memory and oneDNN's code
        waited = _under_load(engine, list(zip(gaps, prompts)), new, salt)
    p99 = sorted(waited)[int(len(waited) * 0.99)]
    return Timing(p99 * 1e6), Timing(2e6 * statistics.median(budget))


def _under_load(engine: Engine, coming: list[tuple[float, list[int]]], new: int, salt: str) -> list[float]:
    """How many seconds each request, by its gap to the one before and its prompt, waits for its first token."""
    due, waited = time.perf_counter(), []
    added: dict[int, float] = {}
    coming = coming[::-1]
    while coming or engine.busy:
        now = time.perf_counter()
        while coming and due + coming[-1][0] <= now:
            gap, prompt = coming.pop()
            due += gap
            added[
                engine.add(Request(prompt, max_new_tokens=new, ignore_eos=True, cache_salt=f"{salt} {len(coming)}"))
            ] = due
        for event in engine.step():
            if event.request in added:
                waited.append(time.perf_counter() - added.pop(event.request))
    return waited


def _waste(settings: Settings) -> tuple[Timing, Timing]:
    """Percent of the cache's allocated slots that held no token, over a mixed load, in pages of 16."""
    count, new = (4, 4) if settings.dry else (64, 128)
    engine = Engine(_model(settings), num_blocks=1024, block_size=16, max_num_seqs=32)
    prompts = _prompts(count, engine.model.config.vocab_size, most=512)
    engine.generate([Request(prompt, max_new_tokens=new, ignore_eos=True) for prompt in prompts])
    return Timing(100 * engine.stats.kv_waste), Timing(WASTE_PERCENT)


def _invariant_step(settings: Settings, running: int) -> tuple[Timing, Timing]:
    """Microseconds of a step of ``running`` requests at different positions, in invariant mode and without."""
    steps, found = 3 if settings.dry else 50, []
    for invariant in (True, False):
        engine = Engine(_model(settings), num_blocks=65, max_num_seqs=32, invariant=invariant)
        _decoding(engine, running, 4 * steps, most=128)
        found.append(Timing(statistics.median(_seconds(engine.step) for _ in range(steps)) * 1e6))
    return found[0], found[1]


def _invariant_prompt(settings: Settings) -> tuple[Timing, Timing]:
    """Microseconds of a prompt of the token budget, in invariant mode and without."""
    prompt = torch.randint(1, 60, (BUDGET,), generator=torch.Generator().manual_seed(0)).tolist()
    found = []
    for invariant in (True, False):
        engine = Engine(_model(settings), num_blocks=65, invariant=invariant, prefix_caching=False)
        call = partial(engine.generate, [Request(prompt, max_new_tokens=1)])
        found.append(Timing(statistics.median(_seconds(call) for _ in range(2 if settings.dry else 9)) * 1e6))
    return found[0], found[1]


def _seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


class _without_gc:
    def __enter__(self) -> None:
        gc.collect()
        gc.disable()

    def __exit__(self, *_: object) -> None:
        gc.enable()


def plan(settings: Settings) -> list[Measurement]:
    def row(what: str, metric: str, peer: str, run: Callable[[], tuple[Timing, Timing]]) -> Measurement:
        return Measurement(CASES[what], metric, peer, None if settings.dry else TARGETS.get(what), run)

    rows = [
        row(SHARE, "a step of 32 running, us", "the model in that step", partial(_share, settings)),
        row(REPLAY, "a step of 32 running, us of the host", f"{REPLAY_US:.0f} us", partial(_replay, settings)),
        row(WASTE, "% of allocated slots, pages of 16", f"{WASTE_PERCENT:.0f} %", partial(_waste, settings)),
    ]
    rows += [
        row(
            FIRST,
            f"99th percentile at {rate:.0%} of the capacity, us",
            "two steps of the token budget",
            partial(_first, settings, rate),
        )
        for rate in RATES
    ]
    rows += [
        row(GROWTH, f"{running} running, us of the host for each", "10 running", partial(_growth, settings, running))
        for running in LOADS[1:]
    ]
    rows += [
        row(INVARIANT, f"a step of {running} running, us", _FAST, partial(_invariant_step, settings, running))
        for running in (1, 32)
    ]
    rows.append(row(INVARIANT, f"a prompt of {BUDGET} tokens, us", _FAST, partial(_invariant_prompt, settings)))
    return rows


def check(settings: Settings, names: Sequence[str]) -> Iterator[tuple[str, Verdict]]:
    """The engine's tokens against those of one forward for each token: none differs."""
    for name in set(names) & set(CASES.values()):
        model = _model(settings)
        engine, prompts = Engine(model, num_blocks=64, max_num_seqs=2), _prompts(3, model.config.vocab_size, most=20)
        wrong = 0
        for prompt, answer in zip(
            prompts, engine.generate([Request(each, max_new_tokens=4, ignore_eos=True) for each in prompts])
        ):
            with torch.no_grad():
                logits = model(torch.tensor([prompt + answer]))[0, len(prompt) - 1 : -1]
            wrong += int((logits.argmax(-1) != torch.tensor(answer)).sum())
        yield name, Verdict("tokens", wrong / 12, 0.0)
