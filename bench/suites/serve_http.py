"""Our server against vLLM's own, on a CPU: throughput, and latencies under requests that arrive at random.

Both serve the random Llama of ``serve``, fp32, each in a process of its own, to the same clients over HTTP: 32 streamed
requests at once for the throughput, then requests that arrive as a Poisson process. The sides take turns, and find the
same text before anything is timed. The clients' work comes off the same cores for both. ``shardfuse bench serve --http
--vllm PYTHON`` names the Python of vLLM's environment; without it our server is measured against itself. With --out the
latencies are drawn beside the record.
"""

from __future__ import annotations

import os
import random
import tempfile
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path

import torch

from ...kernels.dev.accuracy import Verdict
from ..harness.benchmark import Benchmark, Measurement, Settings
from ..harness.http_side import HttpServer, our_server, vllm_server
from ..harness.latency import Figure, Times, percentiles, timing, whole
from ..harness.timing import Timing
from .serve import DRY_SIZES, LENGTHS, NEW, PAD, REQUESTS, SIZES, VLLM

PEER, SELF = "vLLM's server", "the same again"
CASES = {"burst": "32-requests-at-once", "poisson": "poisson-arrivals"}
RATE, COUNT, ROUNDS = 6.0, 120, 5  # requests per second, requests of a round, rounds


class Rig:
    """Both servers over one folder, and the loads that they got."""

    def __init__(self, dry: bool) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        sizes = DRY_SIZES if dry else SIZES
        folder = tempfile.TemporaryDirectory(prefix="shardfuse-")
        weakref.finalize(self, folder.cleanup)
        self.folder = Path(folder.name)
        LlamaForCausalLM(LlamaConfig(**sizes, pad_token_id=PAD, eos_token_id=None)).save_pretrained(self.folder)
        _save_tokenizer(self.folder, sizes["vocab_size"])
        self.new, self.count, self.rounds = (3, 4, 1) if dry else (NEW, COUNT, ROUNDS)
        drawn = random.Random(0)  # noqa: S311 - prompts and times
        self.burst = _prompts(drawn, 4 if dry else REQUESTS, sizes["vocab_size"])
        self.poisson = _prompts(drawn, self.count, sizes["vocab_size"])
        self.gaps = [drawn.expovariate(RATE) for _ in self.poisson]
        length = sizes["max_position_embeddings"]
        self.ours = our_server(self.folder, max_num_seqs="32", max_num_batched_tokens="2048", log_level="error")
        python = os.environ.get(VLLM)
        self.peer_name = PEER if python and not dry else SELF
        self.peer = vllm_server(python, self.folder, length, 32) if python and not dry else self.ours

    @cache  # noqa: B019 - one rig lives as long as the process
    def loads(self, kind: str) -> tuple[list[Times], list[Times]]:
        """Of both sides, a load a round, in turns; the first round is not kept."""
        prompts = self.burst if kind == "burst" else self.poisson
        gaps = [0.0] * len(prompts) if kind == "burst" else self.gaps
        rounds = [
            [side.load(prompts, self.new, gaps) for side in (self.ours, self.peer)] for _ in range(self.rounds + 1)
        ]
        ours, peer = zip(*rounds[1:])
        return list(ours), list(peer)


@cache
def _rig(dry: bool) -> Rig:
    return Rig(dry)


def _prompts(drawn: random.Random, count: int, vocab_size: int) -> list[list[int]]:
    return [[drawn.randrange(1, vocab_size) for _ in range(drawn.randint(*LENGTHS))] for _ in range(count)]


def _save_tokenizer(folder: Path, vocab_size: int) -> None:
    """A word for each token, so that every token has a text."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {f"t{token}": token for token in range(vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="t0"))  # noqa: S106 - a word
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)


def _measure(kind: str, figure: Figure, settings: Settings) -> tuple[Timing, Timing]:
    """Microseconds of both sides, over all rounds together."""
    ours, peer = _rig(settings.dry).loads(kind)
    return timing(figure, ours), timing(figure, peer)


def plan(settings: Settings) -> list[Measurement]:
    if settings.dry and not _installed():
        return []
    peer = PEER if os.environ.get(VLLM) and not settings.dry else SELF
    figures: list[tuple[str, str, Figure]] = [("burst", "all requests, us", whole)]
    figures += [("poisson", metric, figure) for metric, figure in percentiles().items()]
    return [
        Measurement(CASES[kind], metric, peer, None, partial(_measure, kind, figure, settings))
        for kind, metric, figure in figures
    ]


def _installed() -> bool:
    from importlib.util import find_spec

    return all(find_spec(name) is not None for name in ("fastapi", "uvicorn", "prometheus_client", "transformers"))


def check(settings: Settings, names: Sequence[str]) -> Iterator[tuple[str, Verdict]]:
    """The share of requests whose text differs between the sides: none."""
    rig = _rig(settings.dry)
    ours, peer = (side.load(rig.burst, rig.new, [0.0] * len(rig.burst)).texts for side in (rig.ours, rig.peer))
    differ = sum(mine.split() != its.split() for mine, its in zip(ours, peer))
    for name in names:
        yield name, Verdict(f"texts, {rig.peer_name}", differ / len(ours), 0.0)


def draw(to: Path) -> list[Path]:
    """The distributions of both latencies under the random arrivals, as PNG and SVG beside the record ``to``."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rig = _rig(False)
    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.6), constrained_layout=True)
    picks: list[tuple[str, Callable[[Times], Sequence[float]]]] = [
        ("time to first token, ms", lambda times: times.first),
        ("time between tokens, ms", lambda times: times.between),
    ]
    for axis, (label, pick) in zip(axes, picks):
        for name, loads in zip(("shardfuse", rig.peer_name), rig.loads("poisson")):
            values = sorted(value * 1e3 for times in loads for value in pick(times))
            axis.plot(values, [(i + 1) / len(values) for i in range(len(values))], label=name)
        axis.set(xlabel=label, ylabel="share of all", ylim=(0, 1), xscale="log")
        axis.grid(alpha=0.3)
        axis.legend(loc="lower right")
    figure.suptitle(f"{COUNT} requests, {RATE:g} a second, {NEW} tokens each; {ROUNDS} rounds in turns")
    found = [to.with_suffix(suffix) for suffix in (".png", ".svg")]
    for path in found:
        figure.savefig(path, dpi=130)
    pyplot.close(figure)
    return found


BENCHMARK = Benchmark(
    name="serve_http",
    summary="our server against vLLM's on a CPU: throughput, time to first token, time between tokens",
    targets={},
    plan=plan,
    check=check,
    sources=("serving", "serving/server", "layers/attention", "layers/transformer.py"),
    devices=("cpu",),
)

__all__ = ["BENCHMARK", "HttpServer", "draw"]
