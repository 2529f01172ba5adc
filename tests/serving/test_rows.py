"""The rows of a step: the runner pads prefill on a CPU, and the last block drops tokens without logits."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from serving_case import build

from shardfuse.layers.attention.paged import PagedBatch, PagedKVCache, Span
from shardfuse.layers.transformer import ParallelTransformer
from shardfuse.serving import Engine, Request
from shardfuse.serving.runner import padded

REQUESTS = [Request([1 + i % 30 for i in range(length)], max_new_tokens=4) for length in (33, 1, 18, 39, 5)]


def rows_of(model: ParallelTransformer, monkeypatch: pytest.MonkeyPatch, name: str) -> list[int]:
    """The numbers of rows of the calls of ``name``, a function that ``layers/mlp.py`` uses, to be filled."""
    from shardfuse.layers import mlp

    rows: list[int] = []
    stock = getattr(mlp, name)

    def counted(x: torch.Tensor, *args: Any, **options: Any) -> Any:
        rows.append(len(x))
        return stock(x, *args, **options)

    monkeypatch.setattr(mlp, name, counted)
    return rows


@torch.no_grad()
def logits_of(model: ParallelTransformer, wanted: tuple[int, ...]) -> torch.Tensor:
    """Of a step of three sequences of six tokens, of which the last ``wanted`` ones give logits."""
    config = model.config
    cache = PagedKVCache(
        config.num_layers, 4, num_kv_heads=config.num_kv_heads, head_dim=config.head_dim, block_size=8,
        dtype=torch.float64,
    )  # fmt: skip
    batch = PagedBatch.of(cache, [Span([block], 0, 6, logits=count) for block, count in enumerate(wanted)])
    tokens = torch.arange(18) % 30
    return model(tokens, positions=batch.positions, cache=batch)


@pytest.mark.parametrize("layers", [1, 2])
def test_the_last_block_drops_tokens_without_logits(layers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("gated", num_layers=layers).eval()
    every = logits_of(model, (6, 6, 6))
    rows = rows_of(model, monkeypatch, "gated_linear")
    torch.testing.assert_close(logits_of(model, (1, 0, 2)), every[[5, 16, 17]], rtol=1e-12, atol=1e-12)
    assert rows == [18] * (layers - 1) + [3]
    rows.clear()
    assert logits_of(model, (0, 0, 0)).shape == (0, 32)
    assert rows == [18] * (layers - 1) + [0]
    rows.clear()
    logits_of(model, (6, 6, 6))
    assert rows == [18] * layers


@pytest.mark.parametrize("where", ["mlp", "self_attn", "self_attn.o_proj", "post_attention_layernorm", ""])
def test_what_has_a_hook_sees_every_token(where: str) -> None:
    model = build("gated").eval()
    every = logits_of(model, (6, 6, 6))
    last = model.model.layers[-1]
    seen: list[int] = []
    hook = last.get_submodule(where).register_forward_hook(lambda _, __, out: seen.append(len(out)))
    torch.testing.assert_close(logits_of(model, (1, 1, 0)), every[[5, 11]], rtol=1e-12, atol=1e-12)
    assert seen == [18]
    hook.remove()


def test_a_few_numbers_of_rows_stand_for_all() -> None:
    assert [padded(tokens) for tokens in (1, 15, 31, 32, 33, 63, 64, 65, 1000, 2304)] == [
        *(1, 15, 31, 32, 34, 64, 64, 68, 1024, 2304)
    ]
    for tokens in range(1, 5000):
        assert tokens <= padded(tokens) <= tokens * 17 / 16
        assert padded(padded(tokens)) == padded(tokens)
    assert len({padded(tokens) for tokens in range(1, 4097)}) <= 16 * 9


@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 40}, {"enforce_eager": True}], ids=str)
def test_prefill_is_padded_and_no_token_changes(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("gated").eval()
    alone = [Engine(model, num_blocks=8, invariant=True).generate([each])[0] for each in REQUESTS]
    rows = rows_of(model, monkeypatch, "gated_linear")
    engine = Engine(model, num_blocks=16, block_size=16, max_num_seqs=8, **options)
    assert engine.generate(REQUESTS) == alone
    prefill = [count for count in rows if count > len(REQUESTS)]
    assert prefill
    assert all(count == padded(count) for count in prefill)
    assert sum(map(len, (each.prompt for each in REQUESTS))) == 96  # as many as they are: no step had to be padded
    engine.generate([Request([1] * 33, max_new_tokens=1)])
    assert 34 in rows


@pytest.mark.nightly(seconds=50)
def test_prompts_of_ever_new_lengths_leave_memory_flat() -> None:
    """Once each of the few numbers of rows has come: oneDNN keeps the code that it makes for each of them."""
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_heads": 8, "num_kv_heads": 8, "max_positions": 1024}
    model = build("gated", dtype=torch.float32, **sizes).eval()
    engine = Engine(model, num_blocks=32, max_num_seqs=16, max_num_batched_tokens=512)
    drawn, seen = random.Random(0), []
    for _ in range(16):
        for _ in range(25):
            prompts = [[drawn.randrange(32) for _ in range(drawn.randint(1, 300))] for _ in range(16)]
            engine.generate([Request(prompt, max_new_tokens=2) for prompt in prompts])
        seen.append(int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"))
    assert max(seen[10:]) - seen[9] < 48 << 20, seen
