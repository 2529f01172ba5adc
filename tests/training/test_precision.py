"""Training in 16 bits, end to end: 16-bit products over fp32 parameters, and fp32 copies of bf16 parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from train_case import settings

from shardfuse import ParallelTransformer, attach_main_grads, init_mesh, main_grads_to_grads, zero_main_grads
from shardfuse.training.rates import rate
from shardfuse.training.settings import RunSettings
from shardfuse.training.trainer import Trainer

STEPS = 30


def _settings(out: Path, processes: int = 1, **sections: Any) -> RunSettings:
    return settings(
        out,
        processes,
        **{"model": {"num_layers": 2, "style": "gated", "max_positions": 64, "init_std": 0.02}, **sections},
        steps=STEPS,
        data={"seq": 32, "batch": 4},
        optimizer={"lr": 2e-3, "schedule": "linear", "warmup": 10, "beta2": 0.98},
        log={"eval_batches": 4},
    )


# Of the loss in fp16. No gradient overflows: that would cost a step, on one processor and not on another.
FACTOR = 2.0**10


def _train(run: RunSettings, mesh: Any = None, steps: int = STEPS) -> tuple[list[float], float]:
    """The losses of the first steps, and the held-out loss afterwards."""
    trainer = Trainer(run, mesh)
    scale = trainer.model.loss_scale
    if scale is not None:
        scale.factor = FACTOR
    losses = [float(trainer.train_step().loss) for _ in range(steps)]
    held_out = trainer.evaluate()
    trainer.close()
    assert held_out is not None
    assert scale is None or scale.factor == FACTOR
    return losses, held_out


@pytest.fixture(scope="module")
def in_fp32(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[float], float]:
    return _train(_settings(tmp_path_factory.mktemp("fp32")))


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("style", ["gated", "gelu"])
def test_learns_what_fp32_learns(tmp_path: Path, in_fp32: Any, precision: str, style: str):
    model = {"num_layers": 2, "style": style, "max_positions": 64, "init_std": 0.02}
    plain = in_fp32 if style == "gated" else _train(_settings(tmp_path, model=model))
    losses, held_out = _train(_settings(tmp_path, model=model, parallel={"precision": precision}))
    # The first loss comes from a forward alone: it differs by a few of the format's roundings.
    eps = torch.finfo({"bf16": torch.bfloat16, "fp16": torch.float16}[precision]).eps
    assert abs(losses[0] - plain[0][0]) < 4 * eps * plain[0][0]
    assert losses != plain[0]
    assert plain[1] < plain[0][0] - 0.5  # nats: the model learns; the text is this Python's library
    assert held_out == pytest.approx(plain[1], rel=0.02)


def _two_ranks_body(rank: int, world: int, run: RunSettings) -> tuple[list[float], float]:
    return _train(run, init_mesh(tp=world), steps=10)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_two_ranks_learn_what_one_does(ranks: Any, tmp_path: Path, precision: str):
    alone, _ = _train(_settings(tmp_path, parallel={"precision": precision}), steps=10)
    first, second = ranks(2, _two_ranks_body, _settings(tmp_path, 2, parallel={"precision": precision, "tp": 2}))
    assert first == second
    # Over ranks, sums are also rounded to 16 bits, and so are norms and residuals, which autocast leaves in fp32.
    assert first[0] == pytest.approx(alone, rel=0.01)


def test_bf16_parameters_with_fp32_masters_learn_what_fp32_learns(tmp_path: Path, in_fp32: Any):
    """The products accumulate gradients in fp32; the optimizer updates fp32 copies."""
    run = _settings(tmp_path)
    trainer = Trainer(run, None)  # for its batches, and to evaluate
    model = ParallelTransformer(run.model, dtype=torch.bfloat16, fuse_wgrad_accumulation=True)
    model.init_weights(run.seed)
    attach_main_grads(model)
    masters = [torch.nn.Parameter(param.detach().float()) for param in model.parameters()]
    lr = run.optimizer.lr
    optimizer = torch.optim.AdamW(masters, lr=lr, betas=(run.optimizer.beta1, run.optimizer.beta2), weight_decay=0.0)
    for step in range(STEPS):
        tokens, targets = next(trainer._batches)
        for half in (slice(0, 2), slice(2, 4)):  # two micro-batches
            (model(tokens[half], targets[half]) / 2).backward()
        main_grads_to_grads(model)
        for master, param in zip(masters, model.parameters()):
            buffer = getattr(param, "main_grad", None)
            master.grad = buffer.clone() if buffer is not None else param.grad.float()
        torch.nn.utils.clip_grad_norm_(masters, 1.0)
        optimizer.param_groups[0]["lr"] = lr * rate(step, steps=STEPS, shape="linear", warmup=10)
        optimizer.step()
        zero_main_grads(model)
        model.zero_grad()
        with torch.no_grad():
            for master, param in zip(masters, model.parameters()):
                param.copy_(master)
    with torch.no_grad():
        for param, master in zip(trainer.model.module.parameters(), masters):
            param.copy_(master)
    assert trainer.evaluate() == pytest.approx(in_fp32[1], rel=0.03)
    trainer.close()
