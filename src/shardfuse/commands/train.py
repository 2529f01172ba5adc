"""``shardfuse train``: a run from a TOML file and flags, over processes that it or torchrun starts."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shlex
import signal
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from ..layers.hf.tokenizers import holds_tokenizer
from ..training.data.loading import needs_preparation, prepare_run
from ..training.folders import EXPORT, RunFolder
from ..training.launch import Stopped, WorkerError, launch, stop_signals
from ..training.layout import check_gpus, remarks, resolve
from ..training.restart import TIME_IS_UP, StopFile
from ..training.run import settle_together, train_run
from ..training.settings import RunSettings, parse_assignment, read_settings
from ..training.trainer import RunResult
from . import errors

# Flag -> the setting that it changes.
FLAGS = {
    "steps": "steps",
    "seed": "seed",
    "out": "out",
    "start": "start",
    "device": "device",
    "data": "data.path",
    "seq": "data.seq",
    "batch": "data.batch",
    "lr": "optimizer.lr",
    "dp_replicate": "parallel.dp_replicate",
    "dp": "parallel.dp",
    "pp": "parallel.pp",
    "tp": "parallel.tp",
    "zero": "parallel.zero",
    "schedule": "parallel.schedule",
    "microbatches": "parallel.microbatches",
    "precision": "parallel.precision",
    "recompute": "parallel.recompute",
    "offload": "parallel.offload",
    "overlap": "parallel.overlap",
    "sequence_parallel": "parallel.sequence_parallel",
}


@dataclass(frozen=True)
class TrainOptions:
    """The options of ``shardfuse train``.

    ``file`` is the TOML file, ``flags`` the given values of :data:`FLAGS`, ``assignments`` "SETTING=VALUE" for all
    other settings. ``processes`` is the number of processes to start (None: the product of the degrees; torchrun starts
    its own), ``port`` their rendezvous port (None: any free one), ``restarts`` the limit of restarts after a failure.
    ``resume`` continues the run in the folder.
    """

    file: Path | None = None
    flags: dict[str, Any] = field(default_factory=dict)
    assignments: tuple[str, ...] = ()
    processes: int | None = None
    port: int | None = None
    restarts: int = 3
    resume: bool = False
    json: bool = False

    def settings(self) -> RunSettings:
        """The file's settings, overridden by the flags. Raises the errors of ``read_settings``."""
        changes = dict(map(parse_assignment, self.assignments))
        changes |= {FLAGS[flag]: value for flag, value in self.flags.items()}
        return read_settings(self.file, changes)


def run_train(options: TrainOptions) -> int:
    """Train; return 0 if the run is complete or a signal stopped it cleanly, 130 after Ctrl-C, 1 on an error."""
    if _started_by_torchrun():
        return _take_part(options)
    console = Console(highlight=False)
    try:
        with stop_signals():
            settings, processes = _resolved(options)
            result = _train(options, settings, processes, console)
    except Stopped as stop:
        errors.restore(console)
        print(f"stopped by {stop}; --resume continues from the newest checkpoint", file=sys.stderr)
        return 128 + stop.signum
    except WorkerError as error:
        errors.restore(console)
        return errors.report(error)
    _show_result(result, settings, console, options)
    return _exit_code(result)


def _started_by_torchrun() -> bool:
    """Whether torchrun's environment variables are set; ValueError if only some are and WORLD_SIZE is above 1."""
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in names if name not in os.environ]
    world = os.environ.get("WORLD_SIZE", "1")
    if missing and world != "1":
        raise ValueError(
            f"WORLD_SIZE = {world}: this process is one of several, and {' and '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} not set; start the processes with torchrun, or set what it sets"
        )
    return not missing


def _take_part(options: TrainOptions) -> int:
    """Take part in a run as one of its ranks."""
    world = int(os.environ["WORLD_SIZE"])
    if options.processes not in (None, world):
        raise ValueError(f"--processes {options.processes}: torchrun has already started {world}; omit the option")
    settings = settle_together(lambda: resolve(options.settings(), world))
    console = Console(highlight=False)
    first = os.environ["RANK"] == "0"
    if first:
        _show_remarks(settings, console)
    result = train_run(settings, options.resume)
    if first:
        _show_result(result, settings, console, options)
    return _exit_code(result)


def _resolved(options: TrainOptions) -> tuple[RunSettings, int]:
    """The settings and their number of processes. Raises ValueError if they cannot work on this machine."""
    settings = options.settings()
    parallel = settings.parallel
    processes = options.processes or parallel.dp_replicate * (parallel.dp or 1) * parallel.pp * parallel.tp
    settings = resolve(settings, processes)
    check_gpus(settings, processes)
    needs_preparation(settings)  # refuses text that nothing can read
    return settings, processes


def _train(options: TrainOptions, settings: RunSettings, processes: int, console: Console) -> RunResult:
    """Start the processes and wait for them; the first signal asks them to stop after the current step."""

    def ask(signum: int) -> None:
        stop_file.write(signum)
        console.print("\nstopping after this step; repeat the signal to stop at once", markup=False)

    with (
        RunFolder(Path(settings.out), resume=options.resume),
        tempfile.TemporaryDirectory(prefix="shardfuse-") as folder,
    ):
        stop_file = StopFile(Path(folder) / "stop")
        prepared = prepare_run(settings, console) if needs_preparation(settings) else None
        console.print(_heading(settings, processes), markup=False, soft_wrap=True)
        _show_remarks(settings, console)
        results = launch(
            train_run,
            settings,
            options.resume,
            stop_file,
            prepared,
            processes=processes,
            port=options.port,
            max_restarts=options.restarts,
            on_stop=ask,
        )
    return results[0]


def _heading(settings: RunSettings, processes: int) -> str:
    parallel, model = settings.parallel, settings.model
    degrees = {
        name: getattr(parallel, name) for name in ("dp_replicate", "dp", "pp", "tp") if getattr(parallel, name) > 1
    }
    spread = ", ".join(f"{name}={degree}" for name, degree in degrees.items()) or "alone"
    more = f", ZeRO {parallel.zero}" if parallel.zero else ""
    more += f", {parallel.schedule}" if parallel.pp > 1 else ""
    more += f", {parallel.microbatches} micro-batches" if parallel.microbatches else ""
    length = f"{settings.steps} steps" if settings.epochs is None else f"{settings.epochs} epochs in steps"
    return (
        f"{processes} process{'es' if processes > 1 else ''} ({spread}{more}) on {settings.device}, "
        f"{parallel.precision}: {model.num_layers} layers of width {model.hidden_size}, {length} of "
        f"{settings.tokens_per_step:,} tokens, into {settings.out}"
    )


def _show_remarks(settings: RunSettings, console: Console) -> None:
    for remark in remarks(settings):
        console.print(f"warning: {remark}", markup=False, soft_wrap=True)


def _show_result(result: RunResult, settings: RunSettings, console: Console, options: TrainOptions) -> None:
    held_out = "" if result.held_out is None else f", held out {result.held_out:.4f}"
    loss = "" if math.isnan(result.loss) else f", loss {result.loss:.4f}{held_out}"
    speed = f", {result.tokens_per_second:,.0f} tokens/s" if result.tokens_per_second else ""
    console.print(f"step {result.steps} of {result.planned}{loss}{speed}", markup=False)
    if result.stopped_by and result.steps < result.planned:
        by = "its time limit" if result.stopped_by == TIME_IS_UP else signal.Signals(result.stopped_by).name
        console.print(f"stopped by {by}; --resume continues from here", markup=False)
    elif settings.checkpoint.export:
        console.print(_next(settings), markup=False, soft_wrap=True)
    if options.json:
        values = dataclasses.asdict(result)
        print(json.dumps({name: None if value != value else value for name, value in values.items()}))


def _next(settings: RunSettings) -> str:
    """What to do with the model of a complete run."""
    model = Path(settings.out) / EXPORT
    if not holds_tokenizer(model):
        return f"the model is in {model}; it has no tokenizer, as shardfuse serve needs"
    return f"the model is in {model}; to serve it: shardfuse serve {shlex.quote(str(model))}"


def _exit_code(result: RunResult) -> int:
    """130 (128 + SIGINT) after Ctrl-C; 0 after another signal, because a scheduler that stops a run expects success."""
    return 130 if result.stopped_by == signal.SIGINT else 0
