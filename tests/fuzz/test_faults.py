"""A rank fails, dies, freezes or differs from the others during training: every other rank ends in time, with an error
that says so."""

from __future__ import annotations

import math
import os
import signal
import time
from datetime import timedelta
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import train_case
from fuzz import Fuzz
from programs import LOST, Server, begin, problems

from shardfuse import ParallelTransformer, TransformerConfig, parallelize
from shardfuse.parallel.core.mesh import data_coordinate
from shardfuse.parallel.core.rendezvous import init_mesh
from shardfuse.parallel.pipeline.schedules import SCHEDULES
from shardfuse.training.launch import GRACE as LAUNCH_GRACE_S
from shardfuse.training.launch import WorkerError, launch

pytestmark = [pytest.mark.nightly, pytest.mark.fuzz]

TIMEOUT_S, GRACE_S = 10.0, 5.0
LAUNCHED_S = 25.0  # the timeout under ``launch``, whose ranks import everything and so begin seconds apart
CONFIG: dict[str, Any] = {
    "style": "gated", "vocab_size": 12, "hidden_size": 12, "intermediate_size": 24, "num_layers": 8,
    "num_heads": 12, "head_dim": 2,
}  # fmt: skip
# Degrees of (dp, pp, tp).
MESHES = [(2, 1, 1), (1, 2, 1), (1, 1, 2), (3, 1, 1), (1, 3, 1), (1, 1, 3), (2, 2, 1), (2, 1, 2), (1, 2, 2), (1, 1, 4)]

# What happens to one rank, and what the others then say.
FAILED = rf"^(RuntimeError|torch\.distributed\.\w+Error|shardfuse\.\S+\.CollectiveError: \S+: \w+ failed): .*({LOST})"
KINDS = {
    "raises": FAILED,
    "killed": FAILED,
    "stopped": FAILED,
    "shapes": "^ValueError: ranks . and . differ along tp or pp alone, so they share their data, and were given",
    "tokens": "^ValueError: ranks . and . differ along tp or pp alone, so they share their data, and were given",
    "config": r"^ValueError: parallelize: config\.intermediate_size is ",
    "seed": "^ValueError: parallelize: seed is ",
    "dtype": r"^ValueError: parallelize: parameter \S+ is \[.*torch\.float(32|64), on meta on rank .* and \[",
    "variable": "^ValueError: init_mesh: SHARDFUSE_IMPL is ",
    "frozen": "",  # by ``launch``, which ends the rank and names it
}


def _program(rank: int, world: int, case: dict[str, Any], fault: str | None) -> None:
    """Train; with a ``fault`` until its step."""
    dp, pp, tp = case["degrees"]
    mesh = init_mesh(dp=dp, pp=pp, tp=tp, device_type="cpu", timeout=timedelta(seconds=TIMEOUT_S))
    config = TransformerConfig(**CONFIG | ({"intermediate_size": 12} if fault == "config" else {}))
    dtype = torch.float64 if fault == "dtype" else torch.float32
    model = ParallelTransformer(
        config, mesh=mesh, device="meta", dtype=dtype, sequence_parallel=case["sequence_parallel"]
    )
    spread = parallelize(model, mesh, zero=case["zero"], schedule=case["schedule"], seed=1 if fault == "seed" else 0)
    spread.check_data = case["checks"] or None
    optimizer = torch.optim.AdamW(spread.parameters())
    generator = torch.Generator().manual_seed(data_coordinate(mesh)[0])
    step = 0
    while True:
        tokens = torch.randint(12, (4, 13), generator=generator)  # any tp divides the 12 tokens of a row
        if step == case["step"] and fault is not None:
            begin()
            if fault == "raises":
                raise ArithmeticError("the fault")
            if fault in ("killed", "stopped"):
                os.kill(os.getpid(), signal.SIGKILL if fault == "killed" else signal.SIGSTOP)
            if fault == "shapes":
                tokens = torch.cat((tokens, tokens))
            if fault == "tokens":
                tokens = 11 - tokens
        spread.step(tokens[:, :-1], tokens[:, 1:])
        spread.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        step += 1


def _case(kind: str, draw: Random) -> dict[str, Any]:
    shares_data = [mesh for mesh in MESHES if math.prod(mesh[1:]) > 1]
    _, pp, _ = degrees = draw.choice(shares_data if kind in ("shapes", "tokens") else MESHES)
    schedule = draw.choice(list(SCHEDULES)) if pp > 1 else None
    splits = schedule is not None and SCHEDULES[schedule].splits_backward
    checks = draw.random() < 0.5
    return {
        "degrees": degrees,
        "schedule": schedule,
        "zero": draw.randrange(3 if splits else 4),
        "sequence_parallel": draw.random() < 0.5,
        "checks": checks,
        "step": draw.randrange(6 if checks or kind != "tokens" else 3),
    }


def _freeze(world: int, victim: int, step: int, folder: Path) -> None:
    """``launch`` names and ends a rank that freezes in a step."""
    folder.mkdir()
    settings = train_case.settings(
        folder / "out", world, parallel={"dp": world}, data={"batch": world}, timeout=LAUNCHED_S
    )
    error = rf"^rank \d: CollectiveError: \S+: \w+ failed.*; rank {victim} did not respond and was ended$"
    with pytest.raises(WorkerError, match=error):
        launch(
            train_case.run_and_freeze,
            settings.to_json(),
            victim,
            step,
            str(folder / "frozen"),
            LAUNCHED_S,
            processes=world,
        )
    assert time.time() - (folder / "frozen").stat().st_mtime < LAUNCHED_S + GRACE_S + LAUNCH_GRACE_S


def test_faults(fuzz: Fuzz, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(train_case.__file__).parent), prepend=os.pathsep)  # for launch's workers
    slowest: dict[str, float] = {}

    def check(number: int, draw: Random) -> str:
        kind = list(KINDS)[(fuzz.seed + number) % len(KINDS)]
        case = _case(kind, draw)
        world = math.prod(case["degrees"])
        rank = draw.randrange(world)
        if kind == "frozen":
            _freeze(world, rank, case["step"] + 1, tmp_path / str(number))
            return kind
        variables = {rank: {"SHARDFUSE_IMPL": "reference"}} if kind == "variable" else {}
        arguments = [(case, kind if each == rank else None) for each in range(world)]
        ended = server.run(_program, arguments, limit=TIMEOUT_S + GRACE_S, variables=variables)
        says = ["the fault" if each == rank and kind == "raises" else KINDS[kind] for each in range(world)]
        struck = {rank: signal.SIGKILL} if kind in ("killed", "stopped") else {}
        wrong = problems(ended, TIMEOUT_S + GRACE_S, says, struck)
        assert not wrong, "\n".join([f"{kind} on rank {rank}: {case}", *wrong])
        slowest[kind] = max(slowest.get(kind, 0.0), *(end.seconds for end in ended if not end.hung))
        return kind

    with Server() as server:
        fuzz.run(check)
    print("the slowest end of each, in seconds:", ", ".join(f"{kind} {s:.1f}" for kind, s in slowest.items()))
