"""Cases of ops run in the emulator with its counters on, in processes of their own: what each launch did, exactly.

The emulator takes the place of Triton's driver for the life of a process, so ``count`` starts fresh ones. ``python -m``
of this module is such a process, for one architecture. ``run_inspection.py`` prints the answers, and
``counts_report.py`` records their ratios.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from ..runtime import cache_key, device, dispatch
from ..runtime.chips import converts_e4m3
from ..runtime.names import expected
from . import registry, stub_cuda, workers
from .ptx import assembled, counted, driver, models
from .ptx.models import Small
from .ptx.settings import Settings
from .registry import OpSpec

# Of Blackwell's instructions it is not known which unit they use how long.
ARCHS = tuple(name for name, capability in driver.ARCHS.items() if capability < 100)
SLOTS = 3  # multiprocessors, so that programs have several tiles
NO_TRITON = "counting needs Triton, which is not installed here (pip install triton; Linux only)"
NO_COMPILER = "counting needs a C compiler, for the stub of CUDA's driver: install gcc"


class Question(NamedTuple):
    """A case of an op: of a model's made small, or with ``test`` one of the op's own tests."""

    op: str
    case: str
    test: bool = False


def cases(spec: OpSpec, *, deep: bool = False) -> list[tuple[Question, Small]]:
    """Those of models first, with ``deep`` as ``models.cases`` makes them."""
    found = [(Question(spec.name, small.name), small) for small in models.cases(spec, deep=deep)]
    tests = [(Question(spec.name, case.name, True), Small(case.name, case)) for case in spec.tagged("test")]
    return found + tests


def require(arch: str) -> None:
    """Raise ValueError for an ``arch`` that is not counted, RuntimeError where something is missing here."""
    if arch not in ARCHS:
        raise ValueError(f"target={arch!r}: {expected(arch, ARCHS, 'what kernels do is counted for')}")
    if dispatch.triton_version() is None:
        raise RuntimeError(NO_TRITON)
    if stub_cuda.compiler() is None:
        raise RuntimeError(NO_COMPILER)


def count(
    questions: Sequence[Question],
    arch: str,
    *,
    jobs: int | None = None,
    machine: bool = False,
    deep: bool = False,
    on_answer: Callable[[int, dict[str, Any]], None] = lambda index, answer: None,
) -> list[dict[str, Any]]:
    """An answer for each case: "launches", each a ``counted.Summary`` as a dictionary with its "ratios"; "faults" that
    the emulator reports; "seconds"; or "error". ``on_answer`` is called in this thread as they come.

    With ``machine`` each launch has "machine" too: instructions by unit and element as ptxas makes them. With ``deep``
    loops are long enough to show a steady state: twice their pipelines' stages.
    """
    require(arch)
    requests = [{**question._asdict(), "run": True, "machine": machine, "deep": deep} for question in questions]
    return _ask(requests, arch, jobs, on_answer)


def sources(questions: Sequence[Question], arch: str, *, jobs: int | None = None) -> list[dict[str, Any]]:
    """An answer for each case: "source", which changes where a kernel that the case launches, or its configuration
    does; or "error". Nothing runs.
    """
    require(arch)
    return _ask([{**question._asdict(), "run": False, "deep": False} for question in questions], arch, jobs)


def recorded(arch: str) -> list[Question]:
    """Every case of a model of every op that exists on ``arch``."""
    specs = [spec for spec in registry.ops().values() if exists(spec, arch)]
    return [question for spec in specs for question, _ in cases(spec) if not question.test]


def _ask(
    requests: list[dict[str, Any]],
    arch: str,
    jobs: int | None,
    on_answer: Callable[[int, dict[str, Any]], None] = lambda index, answer: None,
) -> list[dict[str, Any]]:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["SHARDFUSE_POISON"] = "1"
    answers: dict[int, dict[str, Any]] = {}
    command = [sys.executable, "-m", f"{__package__}.counting", arch]
    for index, answer in workers.ask_all(requests, command, env, jobs or workers.cores()):
        answers[index] = answer
        on_answer(index, answer)
    return [answers[index] for index in range(len(requests))]


# ---------------------------------------------------------------------------------------------------- in the processes


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    spec = registry.op(request["op"])
    question = Question(request["op"], request["case"], request["test"])
    small = next(small for each, small in cases(spec, deep=request["deep"]) if each == question)
    return _counted(spec, small, request["machine"]) if request["run"] else {"source": _source(spec, small)}


def exists(spec: OpSpec, arch: str) -> bool:
    """fp8 does not everywhere."""
    return spec.name != "scaled_linear" or converts_e4m3(arch)


def _counted(spec: OpSpec, small: Small, machine: bool) -> dict[str, Any]:
    begun = time.perf_counter()
    driver.log.clear()
    with models.configured(small):
        spec.run(spec.make_inputs(small.case, torch.device("cpu"), 1), small.case, "triton")
    faults = [each for result in driver.log for each in result.reports if not each.startswith("note: ")]
    launches = list(_launches(machine))
    return {"launches": launches, "faults": faults, "seconds": round(time.perf_counter() - begun, 2)}


def _launches(machine: bool) -> Iterator[dict[str, Any]]:
    arch, listed = device.architecture(torch.device("cpu")), dict[int, list[tuple[int, str]]]()
    for result in driver.log:
        assert result.counters is not None
        found, more = counted.summary(result.counters, arch), dict[str, Any]()
        if machine:
            kernel = result.counters.program.kernel
            if id(kernel) not in listed:
                listed[id(kernel)] = assembled.listing(kernel)
            made = assembled.by_unit(result.counters, listed[id(kernel)])
            more["machine"] = {unit: each / max(1, found.elements) for unit, each in sorted(made.items())}
        yield {**dataclasses.asdict(found), "ratios": found.ratios, **more}


def _source(spec: OpSpec, small: Small) -> str:
    """16 hexadecimal digits of Triton's keys of the kernels that a case launches, and of their configurations.

    Not in a process that has run kernels: those that are prepared then no longer pass ``device.launch``.
    """
    names: set[str] = set()

    def note(fn: Any, grid: Any, args: Any, *, config: Any, **others: Any) -> None:
        cache_key.settle(fn)
        names.add(f"{fn.__name__} {config} {fn.cache_key}")

    launch, device.launch = device.launch, note
    try:
        with models.configured(small):
            spec.run(spec.make_inputs(small.case, torch.device("cpu"), 1), small.case, "triton")
    finally:
        device.launch = launch
    return hashlib.sha256("\n".join(sorted(names)).encode()).hexdigest()[:16]


def distinct(launches: Iterable[dict[str, Any]]) -> list[tuple[int, dict[str, Any]]]:
    """(how often, a launch) of launches of one kernel that did as much."""
    found: dict[str, tuple[int, dict[str, Any]]] = {}
    for each in launches:
        key = repr({name: value for name, value in each.items() if name not in ("per", "lines")})
        found[key] = found.get(key, (0, each))[0] + 1, each
    return list(found.values())


def _main() -> None:
    driver.install(sys.argv[1], SLOTS)
    driver.settings = Settings(count=True)
    torch.set_num_threads(1)
    workers.serve(_answer)


if __name__ == "__main__":
    _main()
