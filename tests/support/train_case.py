"""A very short training run, for tests with and without processes."""

from __future__ import annotations

import json
import os
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.distributed import distributed_c10d

from shardfuse.parallel.core.mesh import limit_timeout, timeout_of
from shardfuse.training import run
from shardfuse.training.layout import resolve
from shardfuse.training.metrics import FILE, read_lines
from shardfuse.training.restart import StopFile
from shardfuse.training.run import train_run
from shardfuse.training.settings import RunSettings, parse
from shardfuse.training.trainer import RunResult

STEPS = 8
VALUES: dict[str, Any] = {
    "steps": STEPS,
    "device": "cpu",
    "timeout": 60,
    "model": {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_layers": 4,
        "num_heads": 4,
        "num_kv_heads": 2,
        "max_positions": 16,
        "init_std": 0.05,
    },
    "data": {"seq": 16, "batch": 4},
    "optimizer": {"warmup": 2},
    "checkpoint": {"every": 4},
    "log": {"eval_batches": 1, "eval_every": 4, "tensorboard": False},
}


def values(out: Path | str, **sections: Any) -> dict[str, Any]:
    """VALUES with ``sections`` changed: ``parallel={"tp": 2}``; top-level values are replaced."""
    changed = {**VALUES, "out": str(out)}
    for name, value in sections.items():
        changed[name] = {**changed.get(name, {}), **value} if isinstance(value, dict) else value
    return changed


def settings(out: Path | str, processes: int, **sections: Any) -> RunSettings:
    return resolve(parse(values(out, **sections)), processes)


class StopAfter(StopFile):
    """Asks the run to stop after a number of steps; the first poll comes before the first step."""

    def __init__(self, steps: int) -> None:
        self._looks = steps + 1

    def read(self) -> int:
        self._looks -= 1
        return 0 if self._looks > 0 else signal.SIGTERM


class DieAfter(StopAfter):
    """Kills this process after a number of steps."""

    def read(self) -> int:
        if super().read():
            os.kill(os.getpid(), signal.SIGKILL)
        return 0


class FreezeAfter(StopAfter):
    """Stops this process, as SIGSTOP from outside does, after a number of steps; the time of ``mark`` tells when."""

    def __init__(self, steps: int, mark: str) -> None:
        super().__init__(steps)
        self._mark = Path(mark)

    def read(self) -> int:
        if super().read():
            self._mark.touch()
            os.kill(os.getpid(), signal.SIGSTOP)
        return 0


class HurryAfter(StopAfter):
    """Once ``mark`` exists, after a number of steps, every group of this process gives up after ``seconds``.

    So the others may take any time to come as far. Until then the groups have the run's ``timeout``.
    """

    def __init__(self, steps: int, mark: str, timeout: float, seconds: float) -> None:
        super().__init__(steps)
        self._mark, self._timeout, self._seconds = Path(mark), timedelta(seconds=timeout), timedelta(seconds=seconds)

    def read(self) -> int:
        if super().read() and self._timeout != self._seconds:
            while not self._mark.exists():
                time.sleep(0.05)
            for pg in distributed_c10d._world.pg_map:
                assert timeout_of(pg, torch.device("cpu")) == self._timeout
                limit_timeout(pg, self._seconds)
            self._timeout = self._seconds
        return 0


def run_body(rank: int, world: int, text: str, resume: bool = False, stop_after: int = 1 << 30) -> RunResult:
    """Run the settings ``text``; the last rank asks to stop."""
    stop = StopAfter(stop_after if rank == world - 1 else 1 << 30)
    with mock.patch.object(run, "BEAT", 60.0):  # no poll while data are prepared: StopAfter counts polls as steps
        return train_run(RunSettings.from_json(text), resume, stop)


def exact_body(rank: int, world: int, text: str) -> RunResult:
    """The same in fp64."""
    torch.set_default_dtype(torch.float64)
    try:
        return run_body(rank, world, text)
    finally:
        torch.set_default_dtype(torch.float32)


def run_and_die(text: str, victim: int, step: int) -> RunResult:
    """For ``launch``: a run whose rank ``victim`` is killed after ``step`` steps of its first start."""
    rank, attempt = (int(os.environ[name]) for name in ("RANK", "TORCHELASTIC_RESTART_COUNT"))
    dies = rank == victim and attempt == 0
    return train_run(RunSettings.from_json(text), False, DieAfter(step) if dies else StopAfter(1 << 30))


def run_and_freeze(text: str, victim: int, step: int, mark: str, seconds: float) -> RunResult:
    """The same, but ``victim`` is frozen, and the others then wait for it ``seconds`` long."""
    settings = RunSettings.from_json(text)
    assert settings.timeout is not None
    frozen = int(os.environ["RANK"]) == victim
    stop = FreezeAfter(step, mark) if frozen else HurryAfter(step, mark, settings.timeout, seconds)
    return train_run(settings, False, stop)


def die_once(settings: RunSettings, resume: bool, stop_file: StopFile, prepared: None) -> RunResult:
    """Replaces ``train_run``: rank 1 is killed after the second step of its first start."""
    rank, attempt = (int(os.environ[name]) for name in ("RANK", "TORCHELASTIC_RESTART_COUNT"))
    return train_run(settings, resume, DieAfter(2) if (rank, attempt) == (1, 0) else stop_file)


def write_toml(path: Path, values: dict[str, Any]) -> None:
    top = {name: value for name, value in values.items() if not isinstance(value, dict)}
    sections = {name: value for name, value in values.items() if isinstance(value, dict)}
    text = "".join(f"{name} = {json.dumps(value)}\n" for name, value in top.items())
    for section, content in sections.items():
        text += f"[{section}]\n" + "".join(f"{name} = {json.dumps(value)}\n" for name, value in content.items())
    path.write_text(text)


def lines(out: Path | str) -> list[tuple[Any, ...]]:
    """The reproducible figures of every step: number, loss, gradient norm, rate and held-out loss."""
    names = ("step", "loss", "grad_norm", "lr", "held_out")
    return [tuple(line.get(name) for name in names) for line in read_lines(Path(out) / FILE)]


def losses(out: Path | str) -> tuple[float, ...]:
    return tuple(line["loss"] for line in read_lines(Path(out) / FILE))
