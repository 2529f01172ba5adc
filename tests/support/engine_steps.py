"""Steps of an engine, so small that only the host's part of a GPU's work counts: run over the stub of CUDA's driver."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from foreign import foreign
from torch import nn

from shardfuse import Engine, ParallelTransformer, Request, TransformerConfig, fuse
from shardfuse.serving import sampling
from shardfuse.serving.foreign import served
from shardfuse.serving.graphs import Graphs

LAYERS, WIDTH, HEADS, KV_HEADS, HEAD, POSITIONS = 16, 32, 4, 2, 8, 4096
SEQUENCES = 8


def steps() -> Iterator[tuple[str, Callable[[], object], int]]:
    """("eager step", its call, for how many layers its time is given): each decodes a token of ``SEQUENCES`` sequences.

    Of a replayed step it is everything but the graph's launch.
    """
    yield "eager step of ParallelTransformer, per layer", _step(_own(), eager=True), LAYERS
    yield "replayed step", _step(_own(), eager=False), 1
    yield "eager step of a fused Llama, per layer", _step(_llama(), eager=True), LAYERS


def _own() -> nn.Module:
    torch.manual_seed(0)
    config = TransformerConfig(
        style="gated", vocab_size=64, hidden_size=WIDTH, intermediate_size=48, num_heads=HEADS, num_kv_heads=KV_HEADS,
        num_layers=LAYERS, max_positions=POSITIONS,
    )  # fmt: skip
    return ParallelTransformer(config).eval()


def _llama() -> nn.Module:
    return fuse(foreign("llama", num_hidden_layers=LAYERS, max_position_embeddings=POSITIONS))


def _step(model: nn.Module, *, eager: bool) -> Callable[[], object]:
    served.compare = lambda *_, **__: None  # where no kernel runs there are no logits to compare, and no tokens
    sampling._to_host = _first_tokens
    engine = Engine(model, num_blocks=2048, block_size=16, max_num_seqs=SEQUENCES, enforce_eager=eager)
    if not eager:
        engine._runner.graphs = Graphs(_capture, SEQUENCES, engine.max_model_len - 1)

    def step() -> object:
        if not engine.busy:
            prompts = [[1] * (1 + 2 * number) for number in range(SEQUENCES)]  # every other step one begins a block
            engine.add_all([Request(each, max_new_tokens=POSITIONS - 16, ignore_eos=True) for each in prompts])
        return engine.step()

    return step


def _first_tokens(tokens: torch.Tensor, best: torch.Tensor) -> list[float]:
    """Token 0 for each sequence, after the work for what the memory held."""
    _to_host(tokens, best)
    return _FIRST[: tokens.shape[0]]


_to_host, _FIRST = sampling._to_host, [0.0] * SEQUENCES


def _capture(compute: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Callable[[], torch.Tensor]]:
    """In place of a CUDA graph, one whose launch takes no time."""
    first, out = compute(), compute()
    return first, lambda: out
