"""The engine's rolling batch on a CPU, against transformers' ``generate`` on the same prompts, padded to one length.

A random Llama of 21 million parameters, fp32, and 32 requests of 16 to 128 tokens that each get 64 more, greedily: both
sides find the same tokens before anything is timed. ``generate`` runs them all at once, from the longest prompt on; the
engine computes no padding.
"""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import torch

from ...kernels.dev.accuracy import Verdict
from ...kernels.runtime import processor
from ...layers.hf.folders import load_hf
from ...serving import Engine, Request
from ..harness.benchmark import Benchmark, Measurement, Settings
from ..harness.timing import Timing, compare_rounds, keep_freed_memory

AMD = 1.3
TARGETS = {"AMD, against generate": AMD}
CASE, PEER = "llama-21m-32-requests", "transformers generate, left-padded"
ROUNDS = 30
SIZES: dict[str, Any] = {
    **{"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 6, "vocab_size": 4096},
    **{"num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 256},
}
DRY_SIZES = SIZES | {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "vocab_size": 64}
LENGTHS = (16, 128)
REQUESTS, NEW, PAD = 32, 64, 0


class Rig:
    """Both sides, with the same weights and prompts."""

    def __init__(self, settings: Settings) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        sizes = DRY_SIZES if settings.dry else SIZES
        self.stock = LlamaForCausalLM(LlamaConfig(**sizes, pad_token_id=PAD, eos_token_id=None)).eval()
        with tempfile.TemporaryDirectory() as folder:
            self.stock.save_pretrained(folder)
            self.ours = load_hf(folder).eval()
        self.new, count = (4, 3) if settings.dry else (NEW, REQUESTS)
        lengths = torch.linspace(*LENGTHS, count).int().tolist()
        self.prompts = [torch.randint(1, sizes["vocab_size"], (length,)).tolist() for length in lengths]

    def engine(self) -> list[list[int]]:
        """The tokens that the engine adds to each prompt."""
        engine = Engine(self.ours, num_blocks=2 * len(self.prompts) + 1, max_num_seqs=len(self.prompts))
        return engine.generate([Request(prompt, max_new_tokens=self.new) for prompt in self.prompts])

    @torch.inference_mode()
    def generate(self) -> list[list[int]]:
        """The tokens that transformers adds."""
        longest = max(map(len, self.prompts))
        ids = torch.tensor([[PAD] * (longest - len(prompt)) + prompt for prompt in self.prompts])
        out: Any = self.stock.generate(
            ids, attention_mask=(ids != PAD).long(), max_new_tokens=self.new, min_new_tokens=self.new, do_sample=False
        )
        return out[:, longest:].tolist()


@cache
def _rig(dry: bool) -> Rig:
    return Rig(Settings(torch.device("cpu"), dry=dry))


def plan(settings: Settings) -> list[Measurement]:
    if importlib.util.find_spec("transformers") is None:
        return []

    def run() -> tuple[Timing, Timing]:
        keep_freed_memory()
        rig = _rig(settings.dry)
        sides: list[Callable[[], object]] = [rig.engine, rig.generate]
        return compare_rounds(*sides, rounds=1 if settings.dry else ROUNDS)

    target = AMD if "-amd-" in processor.architecture() and not settings.dry else None
    return [Measurement(CASE, "all requests, us", PEER, target, run)]


def check(settings: Settings, names: Sequence[str]) -> Iterator[tuple[str, Verdict]]:
    """The share of tokens that differ: none."""
    if CASE in names:
        rig = _rig(settings.dry)
        pairs = [pair for both in zip(rig.engine(), rig.generate()) for pair in zip(*both, strict=True)]
        yield CASE, Verdict("tokens", sum(ours != theirs for ours, theirs in pairs) / len(pairs), 0.0)


BENCHMARK = Benchmark(
    name="engine",
    summary="the engine's rolling batch on a CPU, against transformers' generate",
    targets=TARGETS,
    plan=plan,
    check=check,
    ops=("linear_act", "gated_linear", "paged_attention", "rms_norm", "rope"),
    sources=("serving", "layers/attention", "layers/transformer.py", "layers/block.py", "layers/mlp.py"),
    devices=("cpu",),
)
