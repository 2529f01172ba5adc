"""Cases of a fuzzer on compiled kernels, which an emulator runs on this CPU, in processes of their own.

    def _drawn(draw: Random, arch: str) -> Trial: ...

    @emulated.needed
    def test_products(fuzz: Fuzz):
        emulated.run(fuzz, _drawn)

The emulator (kernels/dev/ptx) replaces Triton's driver for the life of a process, and the tests' own process interprets
its kernels. So a worker process draws and checks the cases, one after another, as on one architecture; every
``IN_A_ROW`` cases the next architecture takes over, with a fresh worker. Seed and number still decide a case.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib.util
import inspect
import os
import shutil
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from fuzz import Fuzz

from shardfuse.kernels.dev import registry
from shardfuse.kernels.dev.ptx import driver
from shardfuse.kernels.dev.registry import Case, OpSpec
from shardfuse.kernels.dev.workers import _Worker, serve
from shardfuse.kernels.runtime import tuning
from shardfuse.kernels.runtime.dispatch import triton_version

ARCHS = ("sm_90", "sm_80", "sm_89", "sm_86")
IN_A_ROW = 20
PATIENCE_S = 300.0  # for a case; then its process ends
CPU = torch.device("cpu")

needed = pytest.mark.skipif(
    triton_version() is None or shutil.which("gcc") is None, reason="Triton or gcc is not installed"
)


class Refused(Exception):
    """What was drawn does not go together, as the package says too. The message is what it is counted as."""


@dataclass(frozen=True)
class Trial:
    """What was drawn, to be checked."""

    kind: str  # what it is counted as
    label: str  # all of it, for an error
    check: Callable[[], list[str]]  # runs kernels and returns what is wrong; may raise Refused
    empty: bool = False  # nothing is to be computed: no kernel need run
    notes: list[str] = field(default_factory=list)  # what is drawn while it runs


Drawn = Callable[[Random, str], Trial]


# ---------------------------------------------------------------------------------------------- the tests' process


def run(fuzz: Fuzz, drawn: Drawn) -> Counter[str]:
    """``fuzz.run`` of the trials that ``drawn``, a module-level function of a test file, draws for an architecture.

    Prints what ``fuzz.run`` prints, the launches, and how many draws were refused. Fails where these are the most.
    """
    launches: Counter[str] = Counter()
    with contextlib.ExitStack() as stack:
        cache = stack.enter_context(tempfile.TemporaryDirectory(prefix="shardfuse-fuzz-"))
        workers = _Workers(drawn, cache)
        stack.callback(workers.close)

        def check(number: int, draw: Random) -> str:
            arch = ARCHS[(fuzz.seed + number // IN_A_ROW) % len(ARCHS)]
            answer = workers.ask(arch, f"{fuzz.seed}/{number}")
            if answer.get("error"):
                raise AssertionError(f"{arch}: {answer['error']}")
            launches[arch] += answer["launches"]
            return str(answer["kind"])

        found = fuzz.run(check)
    refused = sum(count for kind, count in found.items() if kind.startswith("refused"))
    counts = ", ".join(f"{count} for {arch}" for arch, count in launches.items())
    print(f"{fuzz.name}: launches: {counts}; {refused} of {found.total()} draws refused", flush=True)
    assert fuzz.only is not None or refused <= 1 + found.total() / 2, found
    return found


class _Workers:
    """One worker at a time, for the architecture that was asked for last."""

    def __init__(self, drawn: Drawn, cache: str) -> None:
        self._body = inspect.getfile(drawn), drawn.__name__
        support = str(Path(__file__).parent)
        self._environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | {
            "PYTHONPATH": os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), support])),
            "SHARDFUSE_POISON": "1",
            "TRITON_CACHE_DIR": cache,
        }
        self._arch, self._running = "", contextlib.ExitStack()

    def ask(self, arch: str, case: str) -> dict[str, Any]:
        """The answer of ``arch``'s worker to a case. A worker that died is started anew for the next."""
        if arch != self._arch:
            self.close()
            command = [sys.executable, "-c", "import emulated; emulated.work()", *self._body, arch]
            self._worker = self._running.enter_context(_Worker(command, self._environment))
            self._arch = arch
        return self._worker.ask({"case": case})

    def close(self) -> None:
        self._running.close()
        self._arch = ""


# -------------------------------------------------------------------------------------------------------- a worker


def work() -> None:
    """The worker's end: answer requests with how the case of that seed went."""
    path, name, arch = sys.argv[1:]
    driver.install(arch)
    torch.set_num_threads(1)
    drawn = getattr(_loaded(path), name)
    serve(lambda request: _answer(drawn, arch, request["case"]))


def _loaded(path: str) -> Any:
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # for its dataclasses
    spec.loader.exec_module(module)
    return module


def _answer(drawn: Drawn, arch: str, case: str) -> dict[str, Any]:
    """``kind``, ``launches`` and ``error``, empty where nothing is wrong."""
    draw = Random(case)
    torch.manual_seed(draw.getrandbits(60))
    faulthandler.dump_traceback_later(PATIENCE_S, exit=True)
    trial = drawn(draw, arch)
    driver.log.clear()
    kind = trial.kind
    try:
        wrong = trial.check()
        wrong += [] if driver.log or trial.empty else ["no kernel ran"]
    except Refused as refused:
        kind, wrong = f"refused: {refused}", []
    except Exception:
        wrong = [traceback.format_exc(limit=-4)]
    faulthandler.cancel_dump_traceback_later()
    reports = dict.fromkeys(report for result in driver.log for report in result.reports)
    wrong += [report for report in reports if not report.startswith("note: ")]
    error = "\n".join([trial.label, *trial.notes, *wrong]) if wrong else ""
    return {"kind": kind, "launches": len(driver.log), "error": error}


# ------------------------------------------------------------------------------------------------- what is drawn


class Views:
    """Lays tensors out anew: dense, one element into their storage, or with rows apart. The rest of it is NaN."""

    WAYS = ("dense", "dense", "offset", "pitch", "odd pitch", "offset odd pitch")

    def __init__(self, draw: Random) -> None:
        self._draw = draw
        self._ways: list[str] = []
        self._storages: list[tuple[torch.Tensor, torch.Tensor]] = []  # bytes of each element, and which are the view's

    def __str__(self) -> str:
        return ", ".join(self._ways)

    def of(self, value: Any, way: str = "") -> Any:
        """The same numbers in a storage of their own, in the order of strides; for a list, of each. Leaves stay so."""
        if isinstance(value, (list, tuple)):
            return type(value)([self.of(each, way) for each in value])
        if not isinstance(value, torch.Tensor):
            return value
        way = way or self._draw.choice(self.WAYS)
        if not value.numel() or not value.dim():
            way = "dense"
        self._ways.append(f"{list(value.shape)} {way}")
        return value if way == "dense" else self._laid_out(value, way)

    def _laid_out(self, value: torch.Tensor, way: str) -> torch.Tensor:
        order = sorted(range(value.dim()), key=value.stride, reverse=True)  # rows last but one, as they are
        shape = [value.shape[d] for d in order]
        pitch = shape[-1]
        if value.dim() > 1 and "pitch" in way:
            pitch = shape[-1] + 1 | 1 if "odd" in way else shape[-1] + 16
        offset, rows = int("offset" in way), value.numel() // shape[-1]
        size = value.itemsize
        fill = 0xFF if value.is_floating_point() else 0x7F  # NaN in every format; a large number
        bytes_ = torch.full(((rows * pitch + offset) * size,), fill, dtype=torch.uint8)
        elements = bytes_.view(value.dtype)[offset:]
        rest = torch.ones(rows * pitch + offset, dtype=torch.bool)
        views = [x.view(*shape[:-1], pitch)[..., : shape[-1]] for x in (elements, rest[offset:])]
        views[1].fill_(False)
        self._storages.append((bytes_.view(-1, size), rest))
        inverse = sorted(range(value.dim()), key=order.__getitem__)
        laid_out = views[0].permute(inverse)
        laid_out.copy_(value.detach())
        return laid_out.detach().requires_grad_(value.requires_grad)

    def spoilt(self) -> list[str]:
        """A line where something was written outside a view."""
        return [
            f"{int((was != was[0, 0]).sum())} bytes outside a view were written"
            for storage, rest in self._storages
            if rest.any() and ((was := storage[rest]) != was[0, 0]).any()
        ]


def of_op(
    draw: Random,
    spec: OpSpec,
    case: Case,
    *,
    as_they_are: tuple[str, ...] = (),
    around: contextlib.AbstractContextManager[Any] | None = None,
    notes: list[str] | None = None,
) -> Trial:
    """A case of an op on views, judged by the op's own rule; the inputs ``as_they_are`` are left so.

    Kernels run within ``around``, which may add to ``notes``.
    """
    seed, views = draw.getrandbits(31), Views(draw)
    drawn = spec.make_inputs(case, CPU, seed)
    inputs = {name: value if name in as_they_are else views.of(value) for name, value in drawn.items()}

    def check() -> list[str]:
        with around or contextlib.nullcontext():
            found = spec.run(inputs, case, "triton")
        low = spec.run(spec.make_inputs(case, CPU, seed), case, "reference")
        oracle = spec.run(registry.to_double(spec.make_inputs(case, CPU, seed)), case, "reference")
        verdicts = [spec.judge(case, name, out, low[name], oracle[name]) for name, out in found.items()]
        return [str(verdict) for verdict in verdicts if not verdict.ok] + views.spoilt()

    label = f"{spec.name} {case.dtype} {dict(case.sizes)} {dict(case.options)}, laid out: {views}"
    return Trial(spec.name, label, check, 0 in case.sizes.values(), [] if notes is None else notes)


@contextlib.contextmanager
def choosing(module: Any, name: str, choose: Callable[..., Any]) -> Iterator[None]:
    """Within the block ``module.name``, which picks configurations, is ``choose``.

    A configuration that fits by arithmetic may need more shared memory than there is once it is compiled: Refused.
    """
    from triton.runtime.errors import OutOfResources

    plain = getattr(module, name)
    setattr(module, name, choose)
    tuning.forget()  # and what was planned
    try:
        yield
    except OutOfResources as error:
        raise Refused(f"a configuration without enough {error.name}") from error
    finally:
        setattr(module, name, plain)
        tuning.forget()
