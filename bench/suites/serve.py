"""The engine's rolling batch on a CPU, against other engines on the same prompts, and what its own work costs.

A random Llama of 21 million parameters, fp32, and 32 requests of 16 to 128 tokens that each get 64 more, greedily: all
sides find the same tokens before anything is timed. transformers' ``generate`` runs them all at once, padded on the
left; its ``generate_batch`` and vLLM are rolling batches like ours. vLLM runs in an environment of its own, whose
Python ``shardfuse bench serve --vllm`` names. Engines, ours and vLLM's, are made once and compute at most as many
tokens in a step as vLLM does by default; neither finds a prompt of an earlier call in its cache. With MKL's fast path
forced it is forced for both sides, each in a process of its own.
"""

from __future__ import annotations

import importlib.util
import os
import tempfile
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from logging import CRITICAL, getLogger
from pathlib import Path
from typing import Any

import torch

from ...kernels.dev.accuracy import Verdict
from ...layers.hf.folders import load_hf
from ...serving import Engine, Request
from ..harness import fast_mkl
from ..harness.benchmark import Benchmark, Measurement, Settings
from ..harness.timing import Timing, compare_rounds, keep_freed_memory
from ..harness.vllm_side import Vllm
from . import serve_cost, serve_latency

VLLM = "SHARDFUSE_BENCH_VLLM"
STATIC, BATCH, REAL = "transformers generate, left-padded", "transformers generate_batch", "vLLM, offline LLM"
OURS, FORCED = "ours", "MKL's fast path forced"
TARGETS = {STATIC: 2.0, BATCH: 8.0, REAL: 0.8}
LATENCIES = {STATIC: serve_latency.static, BATCH: serve_latency.batch}
CASE = "llama-21m-32-requests"
ROUNDS = {STATIC: 30, BATCH: 10, REAL: 30}
SIZES: dict[str, Any] = {
    **{"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 6, "vocab_size": 4096},
    **{"num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 256},
}
DRY_SIZES = SIZES | {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "vocab_size": 64}
LENGTHS = (16, 128)
REQUESTS, NEW, PAD = 32, 64, 0
BUDGET = 4096  # tokens of a step: vLLM's default for an offline LLM on a CPU


class Rig:
    """All sides, with the same weights and prompts."""

    def __init__(self, dry: bool) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM, logging

        logging.disable_progress_bar()
        getLogger("ContinuousBatchingLogger").setLevel(CRITICAL)  # it misses psutil in every call
        torch.manual_seed(0)
        sizes = DRY_SIZES if dry else SIZES
        self.stock = LlamaForCausalLM(LlamaConfig(**sizes, pad_token_id=PAD, eos_token_id=None)).eval()
        folder = tempfile.TemporaryDirectory(prefix="shardfuse-")
        weakref.finalize(self, folder.cleanup)
        self.folder = Path(folder.name)
        self.stock.save_pretrained(self.folder)
        self.ours = load_hf(self.folder).eval()
        self.new, count = (4, 3) if dry else (NEW, REQUESTS)
        lengths = torch.linspace(*LENGTHS, count).int().tolist()
        self.prompts = [torch.randint(1, sizes["vocab_size"], (length,)).tolist() for length in lengths]
        self.rolling = Engine(self.ours, num_blocks=2 * count + 1, max_num_seqs=count, max_num_batched_tokens=BUDGET)
        self._calls = 0

    def requests(self) -> list[Request]:
        """A call's requests. A salt of its own keeps the call from the last one's blocks."""
        self._calls += 1
        options: dict[str, Any] = {"max_new_tokens": self.new, "ignore_eos": True, "cache_salt": str(self._calls)}
        return [Request(prompt, **options) for prompt in self.prompts]

    def engine(self) -> list[list[int]]:
        """The tokens that the engine adds to each prompt."""
        return self.rolling.generate(self.requests())

    @torch.inference_mode()
    def static(self, **options: Any) -> list[list[int]]:
        """The tokens that transformers' ``generate`` adds."""
        longest = max(map(len, self.prompts))
        ids = torch.tensor([[PAD] * (longest - len(prompt)) + prompt for prompt in self.prompts])
        options |= {"max_new_tokens": self.new, "min_new_tokens": self.new, "do_sample": False}
        out: Any = self.stock.generate(ids, attention_mask=(ids != PAD).long(), **options)
        return out[:, longest:].tolist()

    def batch(self) -> list[list[int]]:
        """The tokens that its ``generate_batch`` adds."""
        return [each.generated_tokens for each in self.batch_outputs()]

    def batch_outputs(self, **options: Any) -> list[Any]:
        """What ``generate_batch`` returns of each prompt."""
        from transformers import GenerationConfig

        config = GenerationConfig(
            max_new_tokens=self.new, do_sample=False, eos_token_id=-1, pad_token_id=PAD, use_cuda_graph=False
        )
        found: Any = self.stock.generate_batch(self.prompts, generation_config=config, progress_bar=False, **options)
        return [found[name] for name in sorted(found, key=lambda name: int(name.rsplit("_", 1)[1]))]


@cache
def _rig(dry: bool) -> Rig:
    return Rig(dry)


def build(name: str) -> Callable[[], object]:
    """A side, for a process in which MKL's fast path is forced."""
    rig = Rig(dry=False)
    return {OURS: rig.engine, STATIC: rig.static, BATCH: rig.batch}[name]


@cache
def _forced_ours() -> fast_mkl.Forced:
    return fast_mkl.Forced(__name__, OURS)


@cache
def _vllm(dry: bool, forced: bool) -> Vllm:
    rig = _rig(dry)
    preload = fast_mkl.library() if forced else None
    return Vllm(os.environ[VLLM], rig.folder, rig.prompts, rig.new, preload=preload)


Side = Callable[[], Any]  # makes what is called, or sampled


def _peers(settings: Settings) -> dict[str, tuple[str, Side, Side]]:
    """By the row's name: the peer's name, ours, and the peer."""
    rig = partial(_rig, settings.dry)
    made: dict[str, Side] = {STATIC: lambda: rig().static, BATCH: lambda: rig().batch}
    if os.environ.get(VLLM) and not settings.dry:  # which takes no heads this small
        made[REAL] = partial(_vllm, settings.dry, False)
    found: dict[str, tuple[str, Side, Side]] = {name: (name, lambda: rig().engine, make) for name, make in made.items()}
    if fast_mkl.available() and not settings.dry:
        for name in made:
            make = partial(_vllm, False, True) if name == REAL else partial(fast_mkl.Forced, __name__, name)
            found[f"{name}, {FORCED}"] = name, _forced_ours, make
    return found


def plan(settings: Settings) -> list[Measurement]:
    rows = serve_cost.plan(settings)
    if importlib.util.find_spec("transformers") is None:
        return rows

    def run(rounds: int, ours: Side, peer: Side) -> tuple[Timing, Timing]:
        keep_freed_memory()
        sides: list[Any] = [ours(), peer()]
        for side in sides:
            for _ in range(2):  # decode steps are recorded in the first one
                side() if callable(side) else side.sample(1)
        return compare_rounds(*sides, rounds=1 if settings.dry else rounds)

    return [
        Measurement(
            CASE, "all requests, us", name, None if settings.dry else TARGETS[peer],
            partial(run, ROUNDS[peer], make_ours, make_peer),
        )
        for name, (peer, make_ours, make_peer) in _peers(settings).items()
    ] + serve_latency.plan(settings, CASE, partial(_rig, settings.dry), LATENCIES) + rows  # fmt: skip


def check(settings: Settings, names: Sequence[str]) -> Iterator[tuple[str, Verdict]]:
    """The share of tokens that differ between ours and each peer's: none."""
    yield from serve_cost.check(settings, names)
    if CASE not in names:
        return
    rig = _rig(settings.dry)
    ours = rig.engine()
    theirs = {STATIC: rig.static(), BATCH: rig.batch()}
    if os.environ.get(VLLM) and not settings.dry:
        theirs[REAL] = _vllm(settings.dry, False).tokens()
    for peer, answers in theirs.items():
        pairs = [pair for both in zip(ours, answers, strict=True) for pair in zip(*both, strict=True)]
        yield CASE, Verdict(f"tokens, {peer}", sum(mine != its for mine, its in pairs) / len(pairs), 0.0)


BENCHMARK = Benchmark(
    name="serve",
    summary="the engine on a CPU, against generate, generate_batch and vLLM; its own cost, latency and waste",
    targets=TARGETS | serve_cost.TARGETS,
    plan=plan,
    check=check,
    ops=("linear_act", "gated_linear", "paged_attention", "rms_norm", "rope"),
    sources=(
        "bench/suites/serve_latency.py",
        "serving",
        "layers/attention",
        "layers/transformer.py",
        "layers/block.py",
        "layers/mlp.py",
    ),
    devices=("cpu",),
)
