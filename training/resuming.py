"""Whether a run can go on from a checkpoint, and what to do where it cannot."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..parallel.checkpoint import storage
from ..parallel.core.mesh import Group
from .settings import RunSettings


def check_resumable(path: Path, step: int, extra: dict[str, Any], settings: RunSettings) -> None:
    """ValueError unless the checkpoint at ``path``, with its ``extra``, is one that the run can go on from."""
    saved = extra.get("settings")
    if not isinstance(saved, dict) or "precision" not in saved.get("parallel", {}):
        raise ValueError(
            f"{path}: not a checkpoint that shardfuse train wrote, and --resume goes on from no other; choose another "
            "--out, with --start if the model is to begin as an exported one"
        )
    if step > settings.steps:
        raise ValueError(
            f"steps = {settings.steps}: the run in {settings.out} is past that, at step {step}; pass --steps with more "
            "than that to go on, or choose another --out"
        )


@contextlib.contextmanager
def torn_explained(folder: Path, ranks: Group) -> Iterator[None]:
    """Where the newest checkpoint in ``folder`` is torn, its ValueError also says how to go on from one before it.

    Every rank enters, and all leave it with an error or none does.
    """
    try:
        yield
    except ValueError as error:
        torn, whole = _newest(folder, ranks)
        if not torn:
            raise
        if whole is None:
            advice = "there is no other one: choose another --out to start from the first step"
        else:
            away = " and ".join(f"{folder / name} (mv {folder / name} {folder / name}.torn)" for name in torn)
            advice = f"--resume takes {whole} once {away} is out of the way"
        raise ValueError(f"{error}; {advice}") from error


def _newest(folder: Path, ranks: Group) -> tuple[list[str], str | None]:
    """The checkpoints that are torn, from the highest step down to the first that is whole; and that one."""
    torn: list[str] = []
    for name in storage.on_first(ranks, lambda: storage.names(folder, "step-*"))[::-1]:
        if name.removeprefix("step-").isdigit():
            if _is_whole(folder / name, ranks):
                return torn, name
            torn.append(name)
    return torn, None


def _is_whole(path: Path, ranks: Group) -> bool:
    try:
        target, manifest = storage.on_first(ranks, lambda: storage.open_checkpoint(path))
        storage.check_files(target, manifest, ranks)
    except (ValueError, FileNotFoundError):
        return False
    return True
