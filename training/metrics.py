"""What a run writes about itself: JSON lines always, TensorBoard's events where it is installed, NVTX ranges on a GPU.

``metrics.jsonl`` holds one object a line, in order of their steps, and each step once: a run that goes on from a
checkpoint first removes the lines of steps that it is going to repeat.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

FILE = "metrics.jsonl"
FOLDER = "tensorboard"


class MetricsFile:
    """``metrics.jsonl`` in ``folder``, to go on with after step ``done``.

    A line reaches the file when it is written, so whatever ends the process leaves whole lines, but for the last.
    """

    def __init__(self, folder: Path, done: int = 0) -> None:
        path = folder / FILE
        kept = [line for line in read_lines(path) if line.get("step", 0) <= done] if done else []
        text = "".join(_line(values) for values in kept)
        beside = path.with_name(f".{path.name}.writing")
        beside.write_text(text, encoding="utf-8")
        os.replace(beside, path)
        self._path = path

    def write(self, step: int, **values: Any) -> None:
        with open(self._path, "a", encoding="utf-8") as file:
            file.write(_line({"step": step, **values}))

    def close(self) -> None:
        """Nothing is held open between two lines."""


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects in a file of metrics; [] where there is none. A last line that was cut short is left out."""
    if not path.exists():
        return []
    lines: list[dict[str, Any]] = []
    for text in path.read_text(encoding="utf-8").splitlines():
        try:
            lines.append(json.loads(text))
        except ValueError:
            break
    return lines


def _line(values: dict[str, Any]) -> str:
    # JSON knows no NaN, and a reader should not stumble over the very line that shows it.
    clean = {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in values.items()
    }
    return json.dumps(clean) + "\n"


class TensorBoard:
    """Scalars for TensorBoard in ``folder/tensorboard``; nothing where it is not installed."""

    def __init__(self, folder: Path, done: int = 0) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            self._writer: Any = None
            return
        self._writer = SummaryWriter(str(folder / FOLDER), purge_step=done + 1 if done else None)

    @property
    def installed(self) -> bool:
        return self._writer is not None

    def write(self, step: int, **values: Any) -> None:
        if self._writer is not None:
            for name, value in values.items():
                if isinstance(value, (int, float)):
                    self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class Recorder:
    """Both at once. Only the rank that reports has one."""

    def __init__(self, folder: Path, *, done: int = 0, tensorboard: bool = True) -> None:
        self._sinks: list[Any] = [MetricsFile(folder, done)]
        if tensorboard:
            self._sinks.append(TensorBoard(folder, done))

    def write(self, step: int, **values: Any) -> None:
        """Numbers of ``step`` (from 1), by name."""
        for sink in self._sinks:
            sink.write(step, **values)

    def close(self) -> None:
        for sink in self._sinks:
            sink.close()


@contextlib.contextmanager
def span(name: str, device: torch.device) -> Iterator[None]:
    """A named stretch of the timeline that Nsight Systems shows (an NVTX range); on a CPU, nothing."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.nvtx.range_push(name)
    try:
        yield
    finally:
        torch.cuda.nvtx.range_pop()
