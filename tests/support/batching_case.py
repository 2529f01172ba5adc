"""What transformers' continuous batching makes of a conformance folder on our kernel, and what is wrong with it.

``tests/integrations/test_transformers.py`` and ``lane_transformers.py`` share it.
"""

from __future__ import annotations

import inspect
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import torch

import shardfuse
from shardfuse.integrations import reset_stats, stats
from shardfuse.integrations import transformers as plugin
from shardfuse.integrations.conformance import models

HOST = "transformers"
BUDGET = 32  # tokens of a step: most prompts take several; with 5, chunks of 2 stand beside decodes
REQUESTS = 4  # fewer than prompts: some wait, and start while others decode
REFUSED = ("bloom", "stablelm")  # of the conformance models: see the messages of enable


class Case(NamedTuple):
    """One model, batched."""

    architecture: str
    page: int = 16  # tokens
    budget: int = BUDGET
    twice: bool = False  # with one manager, which finds the prefixes of the first time
    fused: bool = False  # by shardfuse.fuse

    @property
    def name(self) -> str:
        """What sets the case apart from an architecture's plain one."""
        parts = [f"pages of {self.page}"] if self.page != 16 else []
        parts += [f"{self.budget} tokens a step"] if self.budget != BUDGET else []
        parts += ["shared prefixes"] if self.twice else []
        return ", ".join(parts + (["a model that fuse changed"] if self.fused else []))


class Result(NamedTuple):
    """What came out."""

    wrong: int  # answers that differ
    answers: int
    ran: dict[str, int]
    layers: int
    windows: bool  # whether any layer has one
    steps: Counter[str]  # by kind, and their tokens
    tokens: int  # of all steps, if nothing were found in the cache


def load(folder: Path) -> Any:
    """The folder's model in fp32."""
    from transformers import AutoConfig, AutoModelForCausalLM

    family = AutoConfig.from_pretrained(folder).model_type
    options = {"experts_implementation": "eager"} if family == "gpt_oss" else {}  # grouped products need a GPU
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options)


def batching(page: int, **changes: Any) -> Any:
    """A configuration of continuous batching, under the names that this version has."""
    from transformers import ContinuousBatchingConfig

    taken = inspect.signature(ContinuousBatchingConfig).parameters
    values = {"max_batch_tokens": BUDGET, "max_requests_per_batch": REQUESTS, "num_blocks": 1600 // page, **changes}
    values["page_size" if "page_size" in taken else "block_size"] = page  # until 5.17
    return ContinuousBatchingConfig(**{name: value for name, value in values.items() if name in taken})


def generate(
    model: Any, prompts: list[list[int]], page: int = 16, changes: dict[str, Any] | None = None, **options: Any
) -> list[list[int]]:
    """The tokens of ``generate_batch``, greedily. ``changes``: of the configuration of batching.

    RuntimeError where a request failed or has no answer.
    """
    from transformers import GenerationConfig

    greedy = GenerationConfig(max_new_tokens=models.NEW_TOKENS, do_sample=False, eos_token_id=-1, pad_token_id=0)
    out = model.generate_batch(
        prompts, generation_config=greedy, continuous_batching_config=batching(page, **(changes or {})), **options
    ).values()
    if len(out) != len(prompts) or any(each.error for each in out):
        raise RuntimeError(f"{len(out)} answers to {len(prompts)} prompts; {[each.error for each in out]}")
    return [list(each.generated_tokens) for each in out]


def run(case: Case, folder: Path) -> Result:
    """Batch the prompts of ``folder``, which ``models.write`` made."""
    expected, model = models.read(folder), load(folder)
    if case.fused:
        shardfuse.fuse(model)
    plugin.enable(model)
    reset_stats()
    steps: Counter[str] = Counter()
    watch = model.register_forward_pre_hook(lambda _, args, given: _note(steps, given), with_kwargs=True)
    times = 2 if case.twice else 1
    found: list[list[int]] = []
    for _ in range(times):
        budget = {"max_batch_tokens": case.budget}
        found += generate(model, expected.prompts, case.page, budget, persistent_manager=case.twice)
    if case.twice:
        model.destroy_cached_continuous_batching_manager()
    watch.remove()
    ran = stats(HOST)
    plugin.disable(model)
    config = model.config.get_text_config()
    types = getattr(config, "layer_types", None) or ()
    windows = "sliding_attention" in types or (not types and bool(getattr(config, "sliding_window", None)))
    wrong = sum(one != other for one, other in zip(found, expected.tokens * times))
    tokens = times * sum(len(prompt) + models.NEW_TOKENS - 1 for prompt in expected.prompts)
    return Result(wrong, len(found), ran, config.num_hidden_layers, windows, steps, tokens)


def _note(steps: Counter[str], given: dict[str, Any]) -> None:
    lengths = given["cu_seq_lens_k"]
    keys = (lengths if isinstance(lengths, torch.Tensor) else next(iter(lengths.values()))).diff().tolist()
    queries = given["cu_seq_lens_q"].diff().tolist()
    steps["all"] += 1
    steps["tokens"] += sum(queries)
    steps["mixed"] += 1 in queries and max(queries) > 1
    steps["chunked"] += any(one > 1 and other > one for one, other in zip(queries, keys))


def faults(case: Case, result: Result) -> list[str]:
    """What is wrong with a result, a line each."""
    found = [f"{result.wrong} of {result.answers} answers differ"] if result.wrong else []
    ran, calls = result.ran, result.layers * result.steps["all"]
    if ran.get("attention") != calls or ran.get("queries") != result.layers * result.steps["tokens"]:
        found.append(f"the kernel ran {ran}: expected {calls} calls")
    if ran.get("writes", 0) + ran.get("copied_pages", 0) != calls:
        found.append(f"{ran} writes and copies: expected {calls} of both together")
    if ran.get("copied_pages") and not result.windows:
        found.append(f"{ran['copied_pages']} calls over copied pages, without a window")
    if case.twice and result.steps["tokens"] > result.tokens - 2 * models.SHARED:
        found.append("no prefix was found in the cache")
    return found + [f"no step was {kind}" for kind in ("mixed", "chunked") if not result.steps[kind]]
