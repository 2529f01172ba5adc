"""A training run: model, data, optimizer and checkpoints of one RunSettings, and the loop over its steps.

Every rank runs the same steps. A rank's place in the mesh decides which sequences it reads; ``parallelize`` spreads the
model. The first rank reports.
"""

from __future__ import annotations

import dataclasses
import json
import math
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import default_collate

from ..layers.hf.folders import load_hf_weights
from ..layers.transformer import ParallelTransformer
from ..parallel.checkpoint.checkpoint import read_extra
from ..parallel.checkpoint.manager import Checkpointer
from ..parallel.core import agreement
from ..parallel.core.mesh import data_coordinate, everyone
from ..parallel.core.random import manual_seed
from ..parallel.cross_entropy import IGNORE_INDEX
from ..parallel.data import data_loader
from ..parallel.parallel_model import ParallelModel
from ..parallel.parallelize import parallelize
from .data.loading import load, needs_preparation, prepare_run
from .exporting import export
from .folders import CHECKPOINTS, EXPORT, SETTINGS
from .metrics import Progress, Recorder, chip_of, flops_per_token, peak_bytes, peak_flops, span
from .optimizer import adamw, make_scheduler
from .restart import TIME_IS_UP, Stop, check_resumable, torn_explained
from .settings import RunSettings

CHECK_DATA_EVERY = 100  # steps, beside a process's first ones


@dataclass(frozen=True)
class RunResult:
    """The result of a run."""

    steps: int  # finished, including those before a restart
    planned: int  # in all
    resumed_at: int  # the step from which this process resumed, 0 for a fresh run
    stopped_by: int  # the signal that ended it early, TIME_IS_UP for its time limit, 0 for none
    loss: float  # of the last logged step; NaN if there was none
    held_out: float | None  # nats per token of held-out text, after the last step
    tokens_per_second: float  # of all ranks, since the start of this process
    peak_bytes: int  # of this process


@dataclass(frozen=True)
class Step:
    """One step: scalars on the device, equal on all ranks, and the step's learning rate."""

    loss: torch.Tensor
    grad_norm: torch.Tensor  # before clipping
    rate: float


class Trainer:
    """The state of a run that changes from step to step.

    ``settings`` are resolved (``layout.resolve``); the attribute of that name also has the steps of its epochs.
    ``prepared`` are the folders of prepared data, which the first rank otherwise prepares. A collective.
    """

    def __init__(self, settings: RunSettings, mesh: DeviceMesh | None, prepared: list[Path] | None = None) -> None:
        if prepared is None and needs_preparation(settings):
            prepared = agreement.on_first(everyone(), lambda: prepare_run(settings))
        self.tokens = load(settings, prepared)
        if settings.epochs is not None:
            steps = settings.epochs * (len(self.tokens.train) // settings.data.batch)
            settings = dataclasses.replace(settings, steps=max(1, steps))
        self.settings = settings
        self.mesh = mesh
        self.device = _device(settings)
        self.step = 0
        self.tokens_seen = 0  # tokens in these steps, whose batch sizes may differ
        data = settings.data
        self._rank, self._data_parallel_size = data_coordinate(mesh)
        self._share = settings.share(self._data_parallel_size)
        if len(self.tokens.train) < data.batch:
            raise ValueError(
                f"data.batch = {data.batch}: {self.tokens.source} gives {len(self.tokens.train)} sequences of "
                f"{data.seq} tokens; use a smaller batch, shorter sequences (data.seq) or more data"
            )
        self._loader = data_loader(
            self.tokens.train,
            mesh,
            batch_size=self._share,
            shuffle=data.shuffle,
            seed=settings.seed,
            drop_last=True,
            pin_memory=self.device.type == "cuda",
        )
        self._batches = self._read()
        self.model = build_model(settings, mesh)
        optimizer = settings.optimizer
        assert optimizer.lr is not None  # resolve() filled it in
        self.optimizer = adamw(
            self.model,
            lr=optimizer.lr,
            betas=(optimizer.beta1, optimizer.beta2),
            weight_decay=optimizer.weight_decay,
            eps=optimizer.eps,
        )
        self.checkpointer = Checkpointer(Path(settings.out) / CHECKPOINTS, keep=settings.checkpoint.keep, mesh=mesh)
        self._scheduler = self._make_scheduler()

    def resume(self) -> bool:
        """Load the newest checkpoint; False if there is none.

        Raises ValueError if it does not belong to this run, is past the run's last step, or cannot be read; the message
        names the remedy.
        """
        checkpoints = self.checkpointer
        with torn_explained(checkpoints.folder, everyone()):
            latest = checkpoints.latest()
            if latest is None:
                return False
            extra = agreement.on_first(everyone(), lambda: read_extra(checkpoints.path(latest)))
        check_resumable(checkpoints.path(latest), latest, extra, self.settings, self.tokens.digest)
        states = self._states()
        if extra["settings"]["parallel"]["precision"] != self.settings.parallel.precision:
            states.pop("loss_scale", None)  # another format has none, or one that does not fit
        with torn_explained(checkpoints.folder, everyone()):
            checkpoints.load(self.model.module, self.optimizer, step=latest, states=states)
        self.step = latest
        self.tokens_seen = extra["tokens"]
        self._batches = self._read()
        self._scheduler = self._make_scheduler()
        return True

    def save(self, *, asynchronous: bool = False) -> None:
        """Save a checkpoint of the run's current state, including torch's random states."""
        extra = {
            "settings": json.loads(self.settings.to_json()),
            "tokens": self.tokens_seen,
            "data": self.tokens.digest,
        }
        with span("save", self.device):
            self.checkpointer.save(
                self.step,
                self.model.module,
                self.optimizer,
                extra,
                states=self._states(),
                asynchronous=asynchronous,
            )

    def _states(self) -> dict[str, Any]:
        """A checkpoint's state beside model and optimizer. The learning rate follows from the step."""
        states: dict[str, Any] = {"sampler": self._loader.sampler}
        if self.model.loss_scale is not None:
            states["loss_scale"] = self.model.loss_scale
        return states

    def train_step(self) -> Step:
        """Take one step on the next batch."""
        with span("data", self.device):
            tokens, targets, *more = (part.to(self.device, non_blocking=True) for part in next(self._batches))
        manual_seed(self.settings.seed, self.mesh, step=self.step)  # dropout: resuming does not change it
        self.model.check_data = self.step % CHECK_DATA_EVERY == 0
        with span("forward and backward", self.device):
            loss = self.model.step(tokens, targets, positions=more[0] if more else None)
        with span("optimizer", self.device):
            clip = self.settings.optimizer.clip
            norm = self.model.clip_grad_norm_(math.inf if clip is None else clip)
            rate = float(self._scheduler.get_last_lr()[0])
            self.optimizer.step()
            self._scheduler.step()
            self.optimizer.zero_grad()
        self.step += 1
        self.tokens_seen += self.settings.tokens_per_step
        return Step(loss, norm, rate)

    @torch.no_grad()
    def evaluate(self) -> float | None:
        """The mean loss of a held-out target, over the same windows at every call.

        None if the settings turn it off, or nothing is held out.
        """
        held_out, size = self.tokens.held_out, self.settings.data.batch
        count = len(held_out)
        most = self.settings.log.eval_batches
        count_read = count if most is None else min(most * size, count)
        if not count_read:
            return None
        spread = [i * count // count_read for i in range(count_read)]
        spread += [spread[-1]] * (-count_read % size)  # repeated windows, whose targets do not count
        total, targets_seen = 0.0, 0
        self.model.eval()
        with span("evaluate", self.device):
            for first in range(0, len(spread), size):
                batch = [held_out[i] for i in spread[first : first + size]]
                end = count_read - first
                batch = batch[:end] + [(w[0], torch.full_like(w[1], IGNORE_INDEX), *w[2:]) for w in batch[end:]]
                counted = sum(int((window[1] != IGNORE_INDEX).sum()) for window in batch)
                mine = batch[self._rank * self._share : (self._rank + 1) * self._share]
                tokens, targets, *more = (part.to(self.device) for part in default_collate(mine))
                loss = self.model.evaluate(tokens, targets, positions=more[0] if more else None)
                total += float(loss) * counted
                targets_seen += counted
        self.model.train()
        return total / targets_seen

    def close(self) -> None:
        """Wait for a pending checkpoint."""
        self.checkpointer.close()

    def _make_scheduler(self) -> torch.optim.lr_scheduler.LRScheduler:
        """A scheduler from the current settings and step: it has no saved state that could override the settings."""
        optimizer = self.settings.optimizer
        assert optimizer.lr is not None
        for group, decay in zip(self.optimizer.param_groups, (optimizer.weight_decay, 0.0)):
            group.update(
                lr=optimizer.lr,
                initial_lr=optimizer.lr,
                betas=(optimizer.beta1, optimizer.beta2),
                eps=optimizer.eps,
                weight_decay=decay,
            )
        return make_scheduler(
            self.optimizer,
            steps=self.settings.steps,
            shape=optimizer.schedule,
            warmup=optimizer.warmup,
            floor=optimizer.min_lr / optimizer.lr,
            done=self.step,
        )

    def _read(self) -> Iterator[list[torch.Tensor]]:
        """This rank's share of each step's batch, epoch after epoch."""
        while True:
            yield from self._loader


def build_model(settings: RunSettings, mesh: DeviceMesh | None) -> ParallelModel:
    """The run's model, spread over ``mesh``, with initial weights from ``settings.seed`` or a folder."""
    parallel, costs = settings.parallel, None
    if parallel.partition == "measured" and parallel.pp > 1 and parallel.schedule is not None:
        from .stages import part_costs  # imports torch's pipelining, which takes seconds

        costs = part_costs(settings, parallel.schedule, mesh=mesh)
    model = ParallelTransformer(
        settings.model,
        mesh=mesh,
        sequence_parallel=parallel.sequence_parallel,
        mlp_recompute=parallel.mlp_recompute,
        device="meta",
    )
    spread = parallelize(
        model,
        mesh,
        zero=parallel.zero,
        schedule=parallel.schedule,
        microbatches=parallel.microbatches,
        costs=costs,
        offload=parallel.offload,
        precision=None if parallel.precision == "fp32" else parallel.precision,
        recompute=parallel.recompute,
        overlap=parallel.overlap,
        seed=settings.seed,
        device=_device(settings) if mesh is None else None,
    )
    if settings.start is not None:
        load_hf_weights(settings.start, model)
    return spread


def train(
    trainer: Trainer,
    stop: Stop,
    *,
    on_step: Callable[[Progress], None] | None = None,
    on_remark: Callable[[str], None] = warnings.warn,
) -> RunResult:
    """Run ``trainer`` to its last step, its time limit or ``stop``, and save a checkpoint in each case.

    The first rank calls ``on_step`` after each logged step, and ``on_remark`` with what a user should know.
    """
    settings = trainer.settings
    folder = Path(settings.out)
    report = Report(trainer, folder, on_step) if everyone().rank == 0 else None
    began, signum = trainer.step, stop.agreed()
    while trainer.step < settings.steps and not signum:
        step = trainer.train_step()
        if report is not None and trainer.step == 1 and (doubt := doubtful_start(trainer, float(step.loss))):
            on_remark(doubt)
        signum = stop.agreed()
        last = trainer.step == settings.steps or signum == TIME_IS_UP
        due = _Due.at(trainer.step, settings, last=last, stopped=bool(signum) and not last)
        if report is not None and due.log:
            report.measure(step)
        held_out = trainer.evaluate() if due.evaluate else None
        if report is not None and due.log:
            report.write(held_out)
        if due.save:
            trainer.save(asynchronous=settings.checkpoint.asynchronous and not (last or signum))
    trainer.close()
    if settings.checkpoint.export and (trainer.step == settings.steps or signum == TIME_IS_UP):
        export(cast(ParallelTransformer, trainer.model.module), settings, trainer.tokens, folder / EXPORT)
    if report is not None:
        report.close()
    return RunResult(
        steps=trainer.step,
        planned=settings.steps,
        resumed_at=began,
        stopped_by=signum,
        loss=math.nan if report is None else report.loss,
        held_out=None if report is None else report.held_out,
        tokens_per_second=0.0 if report is None else report.tokens_per_second,
        peak_bytes=peak_bytes(trainer.device.type),
    )


def doubtful_start(trainer: Trainer, loss: float) -> str | None:
    """What a first loss of a trained model may mean that is no better than that of a model without context."""
    start, entropy = trainer.settings.start, trainer.tokens.entropy
    if start is None or entropy is None or loss <= entropy:
        return None
    return (
        f"the first loss is {loss:.2f}, and a model that knew only how often each token occurs in this data would lose "
        f"{entropy:.2f}: the model in {start} may not have been trained with this tokenizer or chat template, or its "
        "weights are fresh"
    )


@dataclass(frozen=True)
class _Due:
    """The actions due after a step."""

    log: bool
    evaluate: bool
    save: bool

    @classmethod
    def at(cls, step: int, settings: RunSettings, *, last: bool, stopped: bool) -> _Due:
        log, save = settings.log, settings.checkpoint.every
        evaluate = not stopped and (last or (log.eval_every is not None and step % log.eval_every == 0))
        return cls(
            log=last or stopped or evaluate or step % log.every == 0,
            evaluate=evaluate and log.eval_batches != 0,
            save=last or stopped or (save is not None and step % save == 0),
        )


class Report:
    """The first rank's report of a run: metrics to files, progress to a callback."""

    def __init__(self, trainer: Trainer, folder: Path, on_step: Callable[[Progress], None] | None) -> None:
        settings = trainer.settings
        folder.mkdir(parents=True, exist_ok=True)
        (folder / SETTINGS).write_text(settings.to_json() + "\n", encoding="utf-8")
        self._recorder = Recorder(folder, done=trainer.step, tensorboard=settings.log.tensorboard)
        self._trainer = trainer
        self._on_step = on_step
        self._flops = flops_per_token(settings.model, settings.data.seq)
        chip = chip_of(trainer.device)
        self._peak = None if chip is None else everyone().size * peak_flops(chip, settings.parallel.precision)
        self._values: dict[str, Any] = {}
        self._began_at = self._measured_at = trainer.step
        self._seconds = 0.0  # in steps, without evaluations
        self._last = time.monotonic()
        self.loss = math.nan
        self.held_out: float | None = None

    @property
    def tokens_per_second(self) -> float:
        """The rate of all ranks together, since the start."""
        steps = self._measured_at - self._began_at
        return steps * self._trainer.settings.tokens_per_step / self._seconds if steps else 0.0

    def measure(self, step: Step) -> None:
        """Record the figures of the step that just ended; its speed is the mean since the last report."""
        settings, done = self._trainer.settings, self._trainer.step
        self.loss = float(step.loss)  # on a GPU this waits for the step
        seconds = max(time.monotonic() - self._last, 1e-9)
        speed = (done - self._measured_at) * settings.tokens_per_step / seconds
        self._measured_at, self._seconds = done, self._seconds + seconds
        self._values = {
            "loss": self.loss,
            "grad_norm": float(step.grad_norm),
            "lr": step.rate,
            "tokens": self._trainer.tokens_seen,
            "tokens_per_second": speed,
            "peak_bytes": peak_bytes(self._trainer.device.type),
        }
        if self._peak is not None:
            self._values["mfu"] = speed * self._flops / self._peak

    def write(self, held_out: float | None) -> None:
        """Report the figures, with the held-out loss if there is a new one."""
        if held_out is not None:
            self._values["held_out"] = self.held_out = held_out
        step, settings = self._trainer.step, self._trainer.settings
        self._recorder.write(step, **self._values)
        if self._on_step is not None:
            left = (settings.steps - step) * settings.tokens_per_step / max(self.tokens_per_second, 1e-9)
            if settings.time_limit is not None:
                left = min(left, max(0.0, settings.time_limit - self._seconds))
            speed = self._values["tokens_per_second"]
            self._on_step(Progress(step, self.loss, step / settings.steps, speed, left))
        self._last = time.monotonic()

    def close(self) -> None:
        self._recorder.close()


def _device(settings: RunSettings) -> torch.device:
    assert settings.device is not None  # resolve() chose one
    if settings.device == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device(settings.device)
