"""Seeded models of some thousand parameters, engines for them, and their expected answers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from ..layers.config import TransformerConfig
from ..layers.hf.folders import export_hf
from ..layers.transformer import ParallelTransformer
from ..parallel.core.mesh import MeshLike
from ..serving.engine import Engine, ServableModel
from ..serving.generation import eos_token_ids
from ..serving.request import Request, SequenceState
from ..serving.sampling import sample
from .tokenizer import SPECIAL_TOKENS, VOCAB_SIZE, save_tokenizer

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "max_positions": 256,
    "init_std": 0.3,  # large: with small weights a model repeats its last token
}


def tiny_model(
    style: str = "gated",
    seed: int = 0,
    *,
    dtype: torch.dtype = torch.float64,
    mesh: MeshLike = None,
    **config: Any,
) -> ParallelTransformer:
    """A model with random weights that follow from ``seed`` alone, whose greedy answers vary.

    ``style`` and ``config`` are :class:`TransformerConfig`'s. The vocabulary is that of :func:`tiny_tokenizer`; torch's
    global generator does not advance. Raises ValueError for sizes that cannot make a model.
    """
    sizes = {**_SIZES, **config}
    if sizes["vocab_size"] == VOCAB_SIZE:
        ids = {f"{name}_token_id": 256 + index for index, name in enumerate(SPECIAL_TOKENS)}
        sizes = {"bos_token_id": ids["bos_token_id"], "eos_token_id": ids["eos_token_id"], **sizes}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return ParallelTransformer(TransformerConfig(style=style, **sizes), mesh=mesh, dtype=dtype).eval()


def tiny_engine(model: ServableModel | None = None, **options: Any) -> Engine:
    """An engine of ``model``, by default :func:`tiny_model`, with ``options`` of :class:`Engine`.

    By default it has 64 blocks of 8 tokens: few and small, so that a test reaches shared prefixes and preemptions.
    """
    return Engine(tiny_model() if model is None else model, **{"num_blocks": 64, "block_size": 8, **options})


@torch.no_grad()
def solo_tokens(model: ParallelTransformer, request: Request) -> list[int]:
    """The answer to ``request`` without an engine or a cache: every token recomputes the whole sequence.

    Requests may be greedy or sampled. ``stop`` and the model's end-of-sequence tokens end the answer; ``priority``,
    ``arrival`` and ``timeout_s`` have no effect. Raises ValueError for a request that no engine would accept, and the
    errors of choosing a token.
    """
    request.check(model.config.vocab_size)
    device = next(model.parameters()).device
    stop = request.stops(eos_token_ids(model))
    sequence = SequenceState(0, request, list(request.prompt), stop=stop)
    while sequence.finish() is None:
        logits = model.gather_logits(model(torch.tensor([sequence.tokens], device=device))[:, -1])
        (found,) = sample(logits, [sequence])
        if isinstance(found, Exception):
            raise found
        sequence.tokens.append(found.token)
    return sequence.tokens[len(request.prompt) :]


def save_tiny_hf(
    folder: str | os.PathLike[str], style: str = "gated", seed: int = 0, *, tokenizer: bool = True, **options: Any
) -> Path:
    """Write :func:`tiny_model`, made with ``options``, in the form that ``load_hf``, transformers and other servers
    read.

    With ``tokenizer`` the folder holds :func:`tiny_tokenizer` and a chat template too; raises ImportError without the
    package tokenizers. Returns the folder.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    if tokenizer:
        save_tokenizer(folder)
    export_hf(tiny_model(style, seed, **options), folder)
    return folder


def assert_idle(engine: Engine) -> None:
    """Raise AssertionError if ``engine`` has a live request, or a block with an owner but no live request."""
    allocator, live = engine._allocator, sorted(engine._live)
    if live:
        raise AssertionError(
            f"{len(live)} requests live in the engine, such as number {live[0]}: read run() to its end, or cancel() "
            "what is not wanted"
        )
    if allocator.used_blocks:
        raise AssertionError(
            f"{allocator.used_blocks} of {allocator.num_blocks} blocks are leaked: no request lives that could own them"
        )
