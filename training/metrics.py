"""A run's reports: JSON lines, TensorBoard events, NVTX ranges, model FLOPs utilisation, a progress bar.

``metrics.jsonl`` holds one object a line, in order of steps, and each step once: a resumed run first removes the lines
of the steps that it will repeat.

Model FLOPs utilisation (Chowdhery et al., PaLM, arXiv:2204.02311, appendix B) is the model's own arithmetic, without
recomputation, over the peak arithmetic of the GPUs in the same time.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import resource
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Bar

from ..kernels.runtime.chips import CHIPS, Chip
from ..layers.config import TransformerConfig

FILE = "metrics.jsonl"
FOLDER = "tensorboard"


class MetricsFile:
    """``metrics.jsonl`` in ``folder``, continued after step ``done``.

    A line reaches the file when it is written, so a killed process leaves whole lines, except perhaps the last.
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
        """Does nothing: no file stays open between two lines."""


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects in a file of metrics; [] if the file is missing. An incomplete last line is dropped."""
    if not path.exists():
        return []
    lines: list[dict[str, Any]] = []
    for text in path.read_text(encoding="utf-8").splitlines():
        try:
            lines.append(json.loads(text))
        except ValueError:
            break
    return lines


def finite(value: Any) -> Any:
    """``value`` with None for each float that is NaN or infinite, which JSON has not; also within dicts and lists."""
    if isinstance(value, dict):
        return {name: finite(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _line(values: dict[str, Any]) -> str:
    return json.dumps(finite(values), allow_nan=False) + "\n"


class TensorBoard:
    """Scalars for TensorBoard in ``folder/tensorboard``; does nothing where it is not installed."""

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
    """Writes to ``metrics.jsonl`` and to TensorBoard. Only the reporting rank makes one."""

    def __init__(self, folder: Path, *, done: int = 0, tensorboard: bool = True) -> None:
        self._sinks: list[Any] = [MetricsFile(folder, done)]
        if tensorboard:
            self._sinks.append(TensorBoard(folder, done))

    def write(self, step: int, **values: Any) -> None:
        """Write the numbers of ``step`` (from 1), by name."""
        for sink in self._sinks:
            sink.write(step, **values)

    def close(self) -> None:
        for sink in self._sinks:
            sink.close()


@contextlib.contextmanager
def span(name: str, device: torch.device) -> Iterator[None]:
    """Mark a named range on the timeline of Nsight Systems (an NVTX range); on a CPU, do nothing."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.nvtx.range_push(name)
    try:
        yield
    finally:
        torch.cuda.nvtx.range_pop()


# parallel.precision -> the rate of products in chips.py. fp32 products use tensor cores only if torch allows TF32.
_RATES = {"bf16": "bf16", "fp16": "fp16"}


def flops_per_token(config: TransformerConfig, seq: int) -> int:
    """FLOPs of forward and backward per token of sequences of length ``seq``, from matrix products alone.

    A multiply-add counts as two, backward as twice the forward, and attention as causal: a token attends on average to
    half of the sequence, or to its window.
    """
    width, inner = config.hidden_size, config.num_heads * config.head_dim
    attention = width * (2 * inner + 2 * config.num_kv_heads * config.head_dim)
    mlp = (3 if config.gated else 2) * width * config.intermediate_size
    looked_at = min(seq / 2, config.attention_window or seq)
    scores = 2 * looked_at * inner  # q k, and weights times v
    forward = config.num_layers * (attention + mlp + scores) + width * config.vocab_size
    return int(3 * 2 * forward)


def chip_of(device: torch.device) -> Chip | None:
    """The data sheet of a GPU that ``chips.py`` lists; None for other GPUs and for CPUs."""
    if device.type != "cuda":
        return None
    names = torch.cuda.get_device_properties(device)
    if torch.version.hip is not None:
        return CHIPS.get(names.gcnArchName.split(":")[0])
    return CHIPS.get(f"sm_{names.major}{names.minor}")


def peak_flops(chip: Chip, precision: str) -> float:
    """The dense rate of ``chip`` for the products of ``precision``, FLOP/s."""
    tf32 = torch.backends.cuda.matmul.allow_tf32 and "tf32" in chip.flops
    return chip.flops[_RATES.get(precision, "tf32" if tf32 else "fp32")]


def peak_bytes(device: str) -> int:
    """This process's peak memory: resident on a CPU, allocated by torch on a GPU."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    try:  # not getrusage on Linux: its figure begins with the parent's peak
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
    except (OSError, StopIteration):
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024  # KiB, except on macOS


LINE_EVERY = 5.0  # seconds, without a terminal


@dataclass(frozen=True)
class Progress:
    """A run's progress, for a progress bar. ``done`` is the share of finished steps."""

    step: int  # steps finished
    loss: float
    done: float
    tokens_per_second: float
    seconds_left: float


class ProgressDisplay:
    """A context manager; call it with each step's ``Progress``."""

    def __init__(self, console: Console, steps: int) -> None:
        self._console = console
        self._steps = steps
        self._bar = Bar(
            TextColumn("training"),
            BarColumn(),
            TextColumn("step {task.fields[step]}/{task.fields[steps]}"),
            TextColumn("loss {task.fields[loss]:.3f}"),
            TextColumn("{task.fields[speed]:,.0f} tokens/s"),
            TextColumn("{task.fields[left]:.0f} s left"),
            console=console,
            refresh_per_second=4,
            transient=True,
        )
        self._task = self._bar.add_task("", total=1.0, step=0, steps=steps, loss=float("nan"), speed=0.0, left=0.0)
        self._next_line = time.monotonic() + LINE_EVERY

    def __enter__(self) -> ProgressDisplay:
        if self._console.is_terminal:
            self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._console.is_terminal:
            self._bar.stop()

    def __call__(self, at: Progress) -> None:
        if self._console.is_terminal:
            self._bar.update(
                self._task,
                completed=at.done,
                step=at.step,
                loss=at.loss,
                speed=at.tokens_per_second,
                left=at.seconds_left,
            )
        elif time.monotonic() >= self._next_line:
            self._next_line = time.monotonic() + LINE_EVERY
            self._console.print(
                f"  step {at.step}/{self._steps}, loss {at.loss:.3f}, {at.tokens_per_second:,.0f} tokens/s, "
                f"{at.seconds_left:.0f} s left",
                highlight=False,
            )
