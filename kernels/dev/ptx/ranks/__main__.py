"""Emulate the communicating kernels on several virtual ranks under adversarial schedules, and judge their results.

python -m shardfuse.kernels.dev.ptx.ranks --ranks 4 --op linear_all_reduce --schedule first-late
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch

from ....runtime import dispatch
from .. import driver
from . import seeds
from .programs import Outcome, Program, Setup, fewer, kernels_of, programs, run
from .schedules import SCHEDULES, schedule

OPS = ("all_gather_linear", "linear_reduce_scatter", "linear_all_reduce", "all_reduce_rmsnorm")


def main() -> int:
    parser = _parser()
    options = parser.parse_args()
    try:
        first, step = map(int, options.part.split("/"))
    except ValueError:
        first, step = 0, 0
    if not 1 <= first <= step:
        parser.error(f"--part {options.part}: expected I/N with 1 <= I <= N")
    if options.ranks < 2:
        parser.error(f"--ranks {options.ranks}: expected 2 or more; one rank has no peer")
    if options.absent is not None and not 0 <= options.absent < options.ranks:
        parser.error(f"--absent {options.absent}: expected one of the ranks 0 to {options.ranks - 1}")
    if dispatch.triton_version() is None:
        parser.error("Triton is not installed here: pip install triton (Linux)")
    os.environ.setdefault("SHARDFUSE_POISON", "1")
    try:
        driver.install(options.arch, options.slots)
    except RuntimeError as error:
        parser.error(str(error))
    torch.set_num_threads(1)
    gc.set_threshold(100_000, 50, 100)  # translated kernels are many objects, and stay
    part = slice(first - 1, None, step)
    jobs = [*([] if options.faults else _programs(options, part)), *_faults(options, part)]
    if not jobs:
        parser.error(f"nothing has {options.case or options.fault or options.op} in its name")
    failed = 0
    for job in jobs:
        begun = time.perf_counter()
        answer = job() | {"seconds": round(time.perf_counter() - begun, 2)}
        failed += not answer["ok"]
        print(json.dumps(answer) if options.json else _line(answer), flush=True)
    return bool(failed)


def _programs(options: argparse.Namespace, part: slice) -> Iterator[Any]:
    """A job for each program of the part under each schedule."""
    setup = Setup(exchanges=options.exchanges, seed=options.seed, first_epoch=options.first_epoch)
    if options.absent is not None:
        setup = dataclasses.replace(setup, absent=options.absent, pace_ns=10**8, timeout_s=20.0)
    wanted = options.case or [""]
    found = [each for each in programs(options.ranks, options.op or ()) if any(text in each.label for text in wanted)]
    for n, program in enumerate(found[part]):
        program = fewer(program, options.blocks) if options.blocks else program
        names = options.schedule or list(SCHEDULES)
        names = names if options.absent is None else ["turns"]  # in others a rank that is late may be taken for it
        for name in [names[(n + k) % len(names)] for k in range(options.in_turn)] if options.in_turn else names:
            yield lambda program=program, name=name: _answer(program, name, setup)


def _answer(program: Program, name: str, setup: Setup) -> dict[str, Any]:
    """How one program went under one schedule."""
    found, kernels = run(program, schedule(name, setup.seed), setup), kernels_of(program)
    if setup.absent is not None:
        return _given_up(program, name, found, setup.absent)
    ran = list(enumerate(found.launches))
    missing = [
        f"rank {r}: {kernels - set(launched)} did not run" for r, launched in ran if not kernels <= set(launched)
    ]
    why = [*found.wrong, *found.reports, *([] if found.wrong else missing)]
    return {
        "program": program.label,
        "schedule": name,
        "ok": not why,
        "why": why,
        "share": found.share,
        "launches": found.launches,
        "turns": found.turns,
        **found.counted,
    }


def _given_up(program: Program, name: str, found: Outcome, absent: int) -> dict[str, Any]:
    """Whether the first rank to give up says for which it has waited. What it then reads is void: no race counts."""
    good = [line for line in found.wrong if f"waited in vain for data from rank {absent} " in line]
    ok = bool(good) and good == found.wrong
    answer = {"program": program.label, "schedule": name, "ok": ok, "why": found.wrong or ["no rank gave up"]}
    return answer | {"share": 0.0, "launches": found.launches, "turns": found.turns, **found.counted}


def _faults(options: argparse.Namespace, part: slice) -> Iterator[Any]:
    """A job for each fault that is asked for, or of the part of all; it went well if the fault is found."""
    wanted = options.fault or []
    found = [each for each in seeds.seeds(options.arch) if options.faults or any(text in each.label for text in wanted)]
    for seed in found[part] if options.faults else found:
        yield lambda seed=seed: _found(seed, options.ranks)


def _found(seed: seeds.Seed, ranks: int) -> dict[str, Any]:
    finding = seeds.find(seed, ranks)
    answer = {"fault": seed.label, "model": seed.model, "ok": bool(finding.schedule)}
    return answer | {**dataclasses.asdict(finding), "kinds": sorted(finding.kinds)}


def _line(answer: dict[str, Any]) -> str:
    if "fault" in answer:
        how = f"found under {answer['schedule']!r}: {', '.join(answer['kinds'])}" if answer["ok"] else "MISSED"
        return "\n    ".join([f"{answer['fault']}: {how}, {answer['seconds']} s", *answer["lines"][:1]])
    label = f"{answer['program']}, {answer['schedule']}: {'ok' if answer['ok'] else 'WRONG'}"
    of_ranks = "; ".join(
        f"rank {r}: " + ", ".join(f"{count} x {name}" for name, count in ran.items())
        for r, ran in enumerate(answer["launches"])
    )
    line = f"{label}: {answer['share']:.2f} of the error allowed; {of_ranks}; {answer['turns']} turns, "
    return "\n    ".join([f"{line}{answer['checked reads']} reads checked, {answer['seconds']:.1f} s", *answer["why"]])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m shardfuse.kernels.dev.ptx.ranks", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--ranks", type=int, default=2, help="virtual ranks (default: 2)")
    parser.add_argument("--op", action="append", choices=OPS, help="default: every one; several times: or this")
    parser.add_argument("--case", action="append", help="programs whose name holds this (several times: or this)")
    parser.add_argument(
        "--schedule", action="append", choices=list(SCHEDULES), help="default: every one; several times: or this"
    )
    parser.add_argument(
        "--in-turn", type=int, default=0, metavar="N", help="N of the schedules for each program, which take turns"
    )
    parser.add_argument("--exchanges", type=int, default=3, help="one after another on two slots (default: 3)")
    parser.add_argument(
        "--first-epoch", type=int, default=2**31 - 2, help="the exchange before the first (default: epochs soon wrap)"
    )
    parser.add_argument("--seed", type=int, default=1, help="of the inputs and of the schedule 'random'")
    parser.add_argument(
        "--blocks", type=int, default=4, help="of kernels whose blocks have flags of their own; 0: as usual, 64"
    )
    parser.add_argument(
        "--absent", type=int, metavar="RANK", help="this rank never comes: the others have to give up and say so"
    )
    parser.add_argument("--arch", choices=list(driver.ARCHS), default="sm_90")
    parser.add_argument("--slots", type=int, default=3, help="multiprocessors of each rank (default: 3)")
    parser.add_argument(
        "--faults", action="store_true", help="seeded faults of the protocol, each of which has to be found, instead"
    )
    parser.add_argument("--fault", action="append", help="faults whose label holds this, too (several times: or this)")
    parser.add_argument(
        "--part",
        default="1/1",
        metavar="I/N",
        help="every Nth program, or with --faults every Nth fault, from the Ith on",
    )
    parser.add_argument("--json", action="store_true", help="a line of JSON for each")
    return parser


if __name__ == "__main__":
    sys.exit(main())
