"""Three processes start, and one of them refuses or is gone: all end in time, and say which refused and why."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fuzz import Fuzz
from programs import HOST, LOST, Server, Strike, problems
from train_case import values, write_toml

from shardfuse import ParallelTransformer, TransformerConfig, cli, parallelize
from shardfuse.parallel.core.rendezvous import init_mesh

pytestmark = [pytest.mark.nightly, pytest.mark.fuzz]

WORLD, TIMEOUT_S, GRACE_S = 3, 8.0, 5.0
CONFIG: dict[str, Any] = {
    "style": "gated", "vocab_size": 12, "hidden_size": 12, "intermediate_size": 24, "num_layers": 6, "num_heads": 3,
}  # fmt: skip
OPTIONS = {"tp": {}, "dp": {}, "pp": {"schedule": "1f1b"}}

# What one rank asks for, and what all ranks then say.
MESHES = [
    ({"dp": 2}, "but 3 processes were started"),
    ({"tp": 0}, "tp=0: expected at least 1"),
    ({"pp": 3, "dp": 3}, r"dp=3 \* pp=3 .*3 processes"),
    ({"timeout": timedelta(seconds=TIMEOUT_S - 1)}, "timeout is 0:00:"),
]
LAYOUTS = [
    ({"zero": 4}, "zero=4: expected 0"),
    ({"precision": "fp8"}, "precision='fp8': expected"),
    ({"schedule": "2f2b"}, "schedule='2f2b': expected one of"),
    ({"microbatches": 0}, "microbatches=0: expected at least 1"),
    ({"overlap": "sometimes"}, "overlap='sometimes': expected one of"),
    ({"seed": 1}, "seed is 0 on rank|seed is 1 on rank"),
]
CONFIGS = [
    ({"num_layers": 7}, "config.num_layers is [67] on rank"),
    ({"style": "gelu"}, "config.style is 'g"),
    ({"tie_embeddings": True}, "config.tie_embeddings is "),
]
SETTINGS = [
    (["missing.toml"], "missing.toml"),
    (["run.toml", "--zero", "7"], "zero"),
    (["run.toml", "--tp", "2"], "processes|devices|tp"),
    (["run.toml", "--steps", "9"], "steps is "),
]
KINDS = ("mesh", "layout", "config", "settings", "gone before", "gone after", "killed")


def _program(rank: int, world: int, degrees: dict[str, Any], config: Any, options: Any, gone: str | None) -> None:
    """Train until a rank ends."""
    if gone == "gone before":
        raise ArithmeticError("gone")
    mesh = init_mesh(**{"timeout": timedelta(seconds=TIMEOUT_S), **degrees}, device_type="cpu")
    if gone == "gone after":
        raise ArithmeticError("gone")
    model = ParallelTransformer(TransformerConfig(**config), mesh=mesh, device="meta")
    spread = parallelize(model, mesh, **options)
    tokens = torch.zeros(3, 4, dtype=torch.int64)
    while True:
        spread.step(tokens, tokens)


def _train(rank: int, world: int, folder: str, words: list[str]) -> None:
    """``shardfuse train`` in ``folder``."""
    os.chdir(folder)
    sys.argv = ["shardfuse", "train", *words]
    cli.main()


def _drawn(kind: str, rank: int, draw: Random, folder: Path) -> tuple[Any, list[tuple[Any, ...]], str]:
    """A body and each rank's arguments, where ``rank`` refuses in this way; and what every other rank says."""
    along = draw.choice(list(OPTIONS))
    common: dict[str, Any] = {"degrees": {along: WORLD, **({} if along == "tp" else {"tp": 1})}, "config": CONFIG}
    common |= {"options": {"seed": 0, **OPTIONS[along]}, "gone": None}
    changes: dict[str, Any] = {}
    said = LOST
    if kind == "settings":
        write_toml(folder / "run.toml", values("out", timeout=TIMEOUT_S, parallel={"dp": WORLD}, data={"batch": 3}))
        words, said = draw.choice(SETTINGS)
        arguments = [(str(folder), words if each == rank else ["run.toml"]) for each in range(WORLD)]
        return _train, arguments, said
    if kind == "mesh":
        change, said = draw.choice(MESHES)
        changes["degrees"] = common["degrees"] | change
    elif kind == "layout":
        change, said = draw.choice(LAYOUTS)
        changes["options"] = common["options"] | change
    elif kind == "config":
        change, said = draw.choice(CONFIGS)
        changes["config"] = CONFIG | change
    elif kind.startswith("gone"):
        changes["gone"] = kind
    arguments = [tuple((common | (changes if each == rank else {})).values()) for each in range(WORLD)]
    return _program, arguments, said


@contextlib.contextmanager
def _agents_store(wanted: bool) -> Iterator[dict[str, str]]:
    """The variables of processes for which torchrun's agent keeps the store, where it is ``wanted``."""
    if not wanted:
        yield {}
        return
    store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    yield {"MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}


def test_starts(fuzz: Fuzz):
    slowest: dict[str, float] = {}

    def check(number: int, draw: Random) -> str:
        rank, kind = number % WORLD, KINDS[(fuzz.seed + number) % len(KINDS)]  # soon all pairs
        delays = [draw.choice([0.0, 0.5 * draw.random()]) for _ in range(WORLD)]
        strike = (
            Strike(rank, signal.SIGKILL, draw.choice([0.05, 0.3, 1.0]) * draw.random()) if kind == "killed" else None
        )
        with tempfile.TemporaryDirectory() as folder, _agents_store(draw.random() < 0.5) as variables:
            body, arguments, said = _drawn(kind, rank, draw, Path(folder))
            ended = server.run(
                body, arguments, limit=TIMEOUT_S + GRACE_S, variables=dict.fromkeys(range(WORLD), variables),
                delays=delays, strike=strike,
            )  # fmt: skip
        says = ["" if each == rank else said for each in range(WORLD)]
        wrong = problems(ended, TIMEOUT_S + GRACE_S, says, {rank: signal.SIGKILL} if strike else {})
        assert not wrong, "\n".join([f"{kind} on rank {rank}: {arguments}, {variables}, {delays}, {strike}", *wrong])
        slowest[kind] = max(slowest.get(kind, 0.0), *(end.seconds for end in ended))
        return kind

    with Server() as server:
        fuzz.run(check)
    print("the slowest end of each, in seconds:", ", ".join(f"{kind} {s:.1f}" for kind, s in slowest.items()))
