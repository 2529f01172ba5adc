"""The training loop: a ParallelTransformer on a corpus, over one tensor-parallel group.

Every rank runs the same steps on the same batch; what they have to agree on beyond that (the gradient's norm, the
clock) goes through ``parallel.collectives``.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from ..layers.transformer import ParallelTransformer
from ..parallel.core import collectives
from ..parallel.core.mesh import Group, MeshLike
from ..parallel.core.random import manual_seed
from ..parallel.zero.clip import GradientClipper
from .config import TrainConfig
from .data import Corpus
from .optimizer import adamw
from .precision import Precision

CLOCK_EVERY = 5  # steps between two looks at rank 0's clock


@dataclass(frozen=True)
class Progress:
    """Where a run stands, for a progress bar. ``done`` is the fraction of the run, in steps or time."""

    step: int  # steps finished
    loss: float
    done: float
    tokens_per_second: float
    seconds_left: float


@dataclass(frozen=True)
class TrainResult:
    """What a run did. ``losses`` and ``grad_norms`` are those of its first ``config.recorded_steps`` steps."""

    losses: list[float]
    grad_norms: list[float]
    held_out: float | None  # nats per byte; None if not asked for
    steps: int
    seconds: float
    tokens_per_second: float
    peak_bytes: int  # of this process
    timed_out: bool  # the time cap came before the last step


def build_model(
    config: TrainConfig, mesh: MeshLike = None, *, dtype: torch.dtype = torch.float32
) -> ParallelTransformer:
    """The run's model with its first weights, which depend on ``config.seed`` alone."""
    with torch.random.fork_rng(devices=[]):
        model = ParallelTransformer(
            config.model,
            mesh=mesh,
            sequence_parallel=config.sequence_parallel,
            dtype=dtype,
            device=config.device,
        )
    model.init_weights(config.seed)
    return model


def build_optimizer(model: ParallelTransformer, config: TrainConfig) -> torch.optim.AdamW:
    """The run's AdamW."""
    return adamw(model, lr=config.lr, betas=(config.beta1, config.beta2), weight_decay=config.weight_decay)


def learning_rate(config: TrainConfig, step: int, done: float) -> float:
    """The rate of ``step`` (from 0) when the fraction ``done`` of the run is over.

    During warm-up it depends on the step alone, so the first steps of a run repeat exactly whatever the clock says.
    """
    return config.lr * float(np.minimum((step + 1) / config.warmup, 1.0 - done))  # keeps NaN: see _Clock


def train(
    model: ParallelTransformer,
    optimizer: torch.optim.Optimizer,
    corpus: Corpus,
    config: TrainConfig,
    *,
    steps: int | None = None,
    evaluate_after: bool = True,
    on_step: Callable[[Progress], None] | None = None,
) -> TrainResult:
    """Train ``model`` in place. ``steps`` ends the run early without changing its schedule."""
    clipper = GradientClipper(model.parameters(), config.clip, model.group)
    rates = config.model.embedding_dropout, config.model.residual_dropout, config.model.attention_dropout
    dropout = max(rates) > 0
    precision = Precision(config.precision, optimizer, config.device)
    clock = _Clock(config, model.group)
    losses: list[torch.Tensor] = []
    norms: list[torch.Tensor] = []
    model.train()
    step = 0
    for step in range(min(config.steps, steps or config.steps)):
        done = clock.done(step)
        if done >= 1.0:
            break
        tokens, targets = corpus.batch(step, seed=config.seed, batch=config.batch, seq=config.seq)
        if dropout:  # by the step's number, so that a run can be repeated from any step, on any number of ranks
            manual_seed(config.seed, step=step)
        with precision.autocast():
            loss = model(tokens.to(config.device), targets.to(config.device))
        precision.backward(loss)
        for param_group in optimizer.param_groups:
            param_group["lr"] = learning_rate(config, step, done)
        norm = precision.step(clipper.clip)
        optimizer.zero_grad()
        if step < config.recorded_steps:
            losses.append(loss.detach())
            norms.append(norm)
        if on_step is not None:
            on_step(clock.progress(step + 1, float(loss.detach())))
    else:
        step += 1
    if config.device == "cuda":
        torch.cuda.synchronize()
    seconds = clock.elapsed()
    return TrainResult(
        losses=[float(loss) for loss in losses],
        grad_norms=[float(norm) for norm in norms],
        held_out=evaluate(model, corpus, config) if evaluate_after else None,
        steps=step,
        seconds=seconds,
        tokens_per_second=step * config.tokens_per_step / seconds,
        peak_bytes=peak_bytes(config.device),
        timed_out=step < min(config.steps, steps or config.steps),
    )


@torch.no_grad()
def evaluate(model: ParallelTransformer, corpus: Corpus, config: TrainConfig) -> float:
    """Mean loss over ``config.eval_batches`` batches of held-out text, in nats per token."""
    model.eval()
    total = torch.zeros((), dtype=torch.float64)
    count = 0
    for tokens, targets in corpus.held_out_batches(batch=config.batch, seq=config.seq, limit=config.eval_batches):
        loss = model(tokens.to(config.device), targets.to(config.device))
        total += loss.double().cpu() * len(tokens)
        count += len(tokens)
    return float(total / count)


def peak_bytes(device: str) -> int:
    """The most memory this process has held: resident on a CPU, allocated by torch on a GPU."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    try:  # not getrusage's on Linux: that begins with the peak of the process that started this one
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
    except (OSError, StopIteration):
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024  # in KiB but for macOS


class _Clock:
    """How much of a run is over, the same on every rank: rank 0's clock, looked at every few steps."""

    def __init__(self, config: TrainConfig, group: Group) -> None:
        self._config = config
        self._group = group
        self._start = time.monotonic()
        self._agreed = 0.0

    def elapsed(self) -> float:
        return time.monotonic() - self._start

    def done(self, step: int) -> float:
        """The fraction of the run that is over before ``step``: in steps or in time, whichever is more."""
        by_steps = step / self._config.steps
        if self._config.time_cap is None:
            return by_steps
        if step % CLOCK_EVERY == 0:
            self._agreed = self._ask_rank_0(0.0 if step == 0 else self.elapsed())
        return float(np.maximum(by_steps, self._agreed / self._config.time_cap))

    def _ask_rank_0(self, seconds: float) -> float:
        # The others have no clock of their own: without the broadcast NaN would reach the very next loss.
        mine = seconds if self._group.rank == 0 else float("nan")
        clock = torch.tensor(mine, dtype=torch.float64, device=self._config.device)
        return float(collectives.broadcast(clock, self._group, site="train.clock"))

    def progress(self, step: int, loss: float) -> Progress:
        elapsed = self.elapsed()
        by_steps = step / self._config.steps
        left = elapsed / by_steps - elapsed
        done = by_steps
        if self._config.time_cap is not None:
            left = min(left, max(0.0, self._config.time_cap - elapsed))
            done = max(by_steps, min(1.0, elapsed / self._config.time_cap))
        return Progress(step, loss, done, step * self._config.tokens_per_step / elapsed, left)
