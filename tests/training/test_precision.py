"""Training in 16 bits, end to end: autocast over fp32 parameters, loss scaling, and fp32 copies of bf16 parameters."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from shardfuse import (
    ParallelTransformer,
    TransformerConfig,
    attach_main_grads,
    init_mesh,
    main_grads_to_grads,
    zero_main_grads,
)
from shardfuse.parallel.core.sharding import local_tensors
from shardfuse.training import loop
from shardfuse.training.config import TrainConfig
from shardfuse.training.data import Corpus, load_corpus
from shardfuse.training.precision import Precision

MODEL = TransformerConfig(
    style="gated", hidden_size=32, intermediate_size=64, num_layers=2, num_heads=4, num_kv_heads=2, max_positions=64
)
CONFIG = TrainConfig(model=MODEL, steps=30, batch=4, seq=32, warmup=10, eval_batches=4)


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return load_corpus(seq=32, max_bytes=1 << 19)


def _train(config: TrainConfig, corpus: Corpus, mesh: Any = None) -> loop.TrainResult:
    model = loop.build_model(config, mesh)
    return loop.train(model, loop.build_optimizer(model, config), corpus, config)


@pytest.fixture(scope="module")
def in_fp32(corpus: Corpus) -> loop.TrainResult:
    return _train(CONFIG, corpus)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("style", ["gated", "gelu"])
def test_learns_what_fp32_learns(corpus: Corpus, in_fp32: loop.TrainResult, precision: str, style: str):
    config = dataclasses.replace(CONFIG, precision=precision, model=dataclasses.replace(MODEL, style=style, bias=None))
    plain = in_fp32 if style == "gated" else _train(dataclasses.replace(config, precision="fp32"), corpus)
    found = _train(config, corpus)
    # The first loss is a forward alone: off by the format's rounding, not by more than a few of it, and not equal.
    eps = torch.finfo({"bf16": torch.bfloat16, "fp16": torch.float16}[precision]).eps
    assert 0 < abs(found.losses[0] - plain.losses[0]) < 4 * eps * plain.losses[0]
    assert plain.held_out < plain.losses[0] - 0.5  # nats: it has learnt; the text is this Python's library
    assert found.held_out == pytest.approx(plain.held_out, rel=0.02)


def _two_ranks_body(rank: int, world: int, precision: str) -> tuple[list[float], float]:
    config = dataclasses.replace(CONFIG, precision=precision, steps=10, recorded_steps=10)
    result = _train(config, load_corpus(seq=32, max_bytes=1 << 19), init_mesh(tp=world))
    return result.losses, result.held_out


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_two_ranks_learn_what_one_does(ranks: Any, corpus: Corpus, precision: str):
    config = dataclasses.replace(CONFIG, precision=precision, steps=10, recorded_steps=10)
    alone = _train(config, corpus)
    first, second = ranks(2, _two_ranks_body, precision)
    assert first == second
    # Sums over ranks are rounded to 16 bits once more.
    assert first[0] == pytest.approx(alone.losses, rel=0.01)


def _overflow_body(rank: int, world: int) -> list[tuple[float, float, list[bool]]]:
    """(scale before, scale after, whether each parameter moved) of steps, the first from a scale that overflows."""
    mesh = init_mesh(tp=world)
    model = loop.build_model(CONFIG, mesh)
    optimizer = loop.build_optimizer(model, CONFIG)
    precision = Precision("fp16", optimizer, "cpu")
    # A gradient that overflows on one rank only: every rank must leave the step out.
    weight = model.model.layers[0].mlp.down_proj.weight
    tokens = torch.arange(64).view(2, 32)
    found = []
    for step in range(2):
        with precision.autocast():
            loss = model(tokens, tokens)
        precision.backward(loss)
        if step == 0 and rank == 1:
            (local,) = local_tensors(weight.grad)
            local[0, 0] = float("inf")
        before = [param.detach().clone() for param in local_tensors(*model.parameters())]
        scale = precision._scaler.get_scale()
        precision.step(lambda: torch.zeros(()))
        optimizer.zero_grad()
        moved = [not torch.equal(a, b) for a, b in zip(before, local_tensors(*model.parameters()))]
        found.append((scale, precision._scaler.get_scale(), moved))
    return found


def test_ranks_leave_out_a_step_together(ranks: Any):
    for first, second in ranks(2, _overflow_body):
        scale, after, moved = first
        assert after == scale / 2
        assert not any(moved)
        scale, after, moved = second
        assert after == scale
        assert all(moved)


def test_bf16_parameters_with_fp32_masters_learn_what_fp32_learns(corpus: Corpus, in_fp32: loop.TrainResult):
    """Gradients are added up in fp32 by the products themselves; the optimizer steps fp32 copies."""
    model = ParallelTransformer(MODEL, dtype=torch.bfloat16, fuse_wgrad_accumulation=True)
    model.init_weights(CONFIG.seed)
    attach_main_grads(model)
    masters = [torch.nn.Parameter(param.detach().float()) for param in model.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=CONFIG.lr, betas=(CONFIG.beta1, CONFIG.beta2), weight_decay=0.0)
    for step in range(CONFIG.steps):
        tokens, targets = corpus.batch(step, seed=CONFIG.seed, batch=CONFIG.batch, seq=CONFIG.seq)
        for micro in range(2):  # two micro-batches
            half = slice(micro * CONFIG.batch // 2, (micro + 1) * CONFIG.batch // 2)
            (model(tokens[half], targets[half]) / 2).backward()
        main_grads_to_grads(model)
        for master, param in zip(masters, model.parameters()):
            buffer = getattr(param, "main_grad", None)
            master.grad = buffer.clone() if buffer is not None else param.grad.float()
        torch.nn.utils.clip_grad_norm_(masters, CONFIG.clip)
        optimizer.param_groups[0]["lr"] = loop.learning_rate(CONFIG, step, step / CONFIG.steps)
        optimizer.step()
        zero_main_grads(model)
        model.zero_grad()
        with torch.no_grad():
            for master, param in zip(masters, model.parameters()):
                param.copy_(master)
    assert loop.evaluate(model, corpus, CONFIG) == pytest.approx(in_fp32.held_out, rel=0.03)


def test_unknown_precisions_are_refused():
    with pytest.raises(ValueError, match=r"precision='fp8': expected one of fp32, bf16, fp16"):
        dataclasses.replace(CONFIG, precision="fp8")
