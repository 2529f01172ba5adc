"""A run's progress for people: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time

from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Bar

from .loop import Progress

LINE_EVERY = 5.0  # seconds, where there is no terminal


class ProgressDisplay:
    """A context manager to call with each step's ``Progress``."""

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
