"""Seed faults into the PTX of test cases, one at a time, and say which the emulator catches.

python -m shardfuse.kernels.dev.ptx.faults --case linear_act --arch sm_90

A fault is one wait, barrier, fence, mbarrier operation or commit that is left out, or the guard of one access to memory
(also the source size of a cp.async). It is tried on the first launch of its kernel in the case, whose memory is put
back each time, then on the later ones. A fault is caught by a report, by a launch that does not end, or by a result
that is judged wrong; where a launch with the fault leaves the same bits and no report, it is missed.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import gc
import itertools
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from .. import registry
from ..registry import Case, OpSpec
from . import driver, launch, units
from .memory import Allocation, Reports
from .parse import Immediate, Instruction, Kernel, Register, parse
from .program import Program
from .settings import Settings

# Name -> op, test case, and what makes it deep enough: each loop refills its stages, programs have several tiles.
_DEEP: dict[str, tuple[str, str, dict[str, int], dict[str, Any]]] = {
    "linear_act": ("linear_act", "t40-d48-f64-bf16-gelu_tanh", {"T": 200, "D": 512, "F": 136}, {}),
    "dgrad": ("linear_act", "t100-d64-f64-bf16-identity-nobias", {"T": 200, "D": 136, "F": 512}, {}),
    "wgrad": ("wgrad_accumulate", "t100-d40-f48-bf16-bias-fp32", {"T": 400, "D": 136, "F": 136}, {}),
    "gated_linear": ("gated_linear", "t40-d64-f64-bf16-silu", {"T": 200, "D": 512, "F": 136}, {}),
    "dgrad_act": ("dgrad_act", "t40-d64-f48-bf16-gelu_tanh", {"T": 200, "D": 512, "F": 136}, {}),
    "decode": ("paged_attention", "decode-g8-h128-p32-bf16", {}, {"context": (331, 464, 595)}),
    "prefill": ("paged_attention", "prefill-g2-h32-p16-bf16", {}, {"context": (300, 0), "queries": (137, 164)}),
    "rms_norm": ("rms_norm", "t6-d1000-bf16-residual_same", {"T": 60}, {}),
    "cross_entropy": (
        "linear_cross_entropy",
        "t20-d16-v71-bf16-again-chunk12-smoothing0.1-z_loss0.01-softcap5-bias",
        {"T": 72, "D": 512, "V": 264},
        {"chunk": 64},
    ),
    "cross_entropy_once": (
        "linear_cross_entropy",
        "t20-d16-v71-bf16-once-chunk12-smoothing0.1-z_loss0.01-softcap5-bias",
        {"T": 40, "D": 64, "V": 9232},
        {"chunk": 32},
    ),
    "layer_norm": ("layer_norm", "t6-d1000-bf16-residual_same", {"T": 3, "D": 32776}, {}),
}
_ACCESSES = ("ld", "st", "atom", "red", "cp", "mbarrier", "tensormap", "tcgen05")
_KINDS = ("wait", "barrier", "fence", "mbarrier", "commit", "guard", "size")
_USUAL = Settings()
_LEAST_SECONDS, _SLOWER = 20.0, 10  # what a launch with a fault may take; times as long as without


def case_named(name: str) -> tuple[OpSpec, Case]:
    op, of, sizes, options = _DEEP[name]
    spec = registry.op(op)
    [case] = [each for each in spec.tagged("test") if each.name == of]
    return spec, dataclasses.replace(case, sizes={**case.sizes, **sizes}, options={**case.options, **options})


# ---------------------------------------------------------------------------------------------------------------- sites


@dataclasses.dataclass
class Site:
    """One fault: what stands in ``text[start:end]`` is replaced by ``instead``, which has as many lines."""

    kind: str  # of _KINDS
    number: int  # of the instruction
    instruction: Instruction
    start: int
    end: int
    instead: str = ""
    caught: str = ""  # by what; "" as long as it is missed
    differs: bool = False  # bits of memory after the launch

    def apply(self, text: str) -> str:
        left_out = text[self.start : self.end]
        return text[: self.start] + self.instead + "\n" * left_out.count("\n") + text[self.end :]


def sites(text: str) -> list[Site]:
    """Every fault of a kernel, in the order of its instructions."""
    code, begins, found = parse(text).code, [0], []
    begins += itertools.accumulate(len(line) + 1 for line in text.split("\n"))
    for n, i in enumerate(code):
        start = text.index(i.text, begins[i.line - 1])
        end = start + len(i.text) + 1
        if kind := _kind(i):
            if i.parts[:2] == ["mbarrier", "try_wait"]:  # with the loop around it
                after = code[n + 1]
                end = text.index(after.text, end) + len(after.text) + 1
            found.append(Site(kind, n, i, start, end))
        if i.predicate is not None and i.parts[0] in _ACCESSES:
            at = text.index(i.opcode, start)
            found.append(Site("guard", n, i, start, at))
        if _is_sized(i):
            at = text.rindex(",", start, end)
            found.append(Site("size", n, i, at, end - 1))
    return found


def _is_sized(i: Instruction) -> bool:
    """Whether a cp.async says how much of its size it reads."""
    return len(i.args) == 4 and i.opcode.startswith("cp.async.c") and isinstance(i.args[3], Register)


def _kind(i: Instruction) -> str:
    """Of the fault that leaves the instruction out; "" for one that is not left out."""
    if units.is_barrier(i) or i.opcode.startswith("bar.warp.sync"):
        return "barrier"
    if "wait_group" in i.opcode or "wait_all" in i.opcode or "try_wait" in i.parts:
        return "wait"
    if i.parts[0] in ("fence", "membar") or i.opcode.startswith(("wgmma.fence", "tensormap.cp_fenceproxy")):
        return "fence"
    if i.parts[0] == "mbarrier":
        return "mbarrier"
    if i.parts[0] == "tcgen05":
        return {"wait::ld": "wait", "wait::st": "wait", "commit": "commit"}.get(i.parts[1], "")
    return "commit" if "commit_group" in i.opcode else ""


def _thinned(found: list[Site], most: int) -> list[Site]:
    """At most ``most`` (0: all), evenly chosen, of the guards and sizes of one opcode at one line of Python."""
    alike: dict[tuple[str, str, str], list[Site]] = {}
    for site in found:
        alike.setdefault((site.kind, site.instruction.opcode, site.instruction.source), []).append(site)
    kept = [
        each
        if not most or kind not in ("guard", "size")
        else [each[k] for k in range(0, len(each), -(-len(each) // most))]
        for (kind, *_), each in alike.items()
    ]
    return sorted(itertools.chain(*kept), key=lambda site: site.number)


# --------------------------------------------------------------------------------------------------------------- trials


class _Found(BaseException):
    """The first report."""


class _Reports(Reports):
    def add(self, kind: str, where: int, count: int = 1, first: str = "") -> None:
        super().add(kind, where, count, first)
        if not kind.startswith("note: "):
            raise _Found(self.lines()[-1])


class _Watched(Program):
    """Notes which guards are ever false, and which copies ever read less than their size."""

    def __init__(self, kernel: Kernel) -> None:
        self.used: set[tuple[str, int]] = set()  # (kind of fault, instruction)
        super().__init__(kernel)
        self._names["_used"] = self.used

    def _lines(self, n: int, masked: bool) -> list[str]:
        lines, i = super()._lines(n, masked), self.kernel.code[n]
        threads = "m" if masked else "True"
        if guarded := i.predicate is not None and lines[0].startswith("g = "):
            lines.insert(1, f"if ({threads} & ~g).any(): _used.add(('guard', {n}))")
        if _is_sized(i) and isinstance(full := i.args[2], Immediate):
            less = f"{self.translator.array(i.args[3], 'u32')} < {full.value}"
            lines.insert(2 * guarded, f"if (({less}) & {'g' if guarded else threads}).any(): _used.add(('size', {n}))")
        return lines

    def ran(self, n: int) -> bool:
        return any(self.ranges[number][0] <= n < self.ranges[number][1] for number, _ in self._steps)


@dataclasses.dataclass
class Trial:
    """The faults of one kernel of a case."""

    text: str
    sites: list[Site]
    program: _Watched
    launches: int = 0

    def why_missed(self, site: Site) -> str:
        """What the run shows of a fault that was missed."""
        if not self.program.ran(site.number):
            return "never runs"
        if site.kind in ("guard", "size") and (site.kind, site.number) not in self.program.used:
            return f"its {site.kind} never matters"
        return "other bits, within the budget" if site.differs else "same bits"


class Seeder:
    """Tries the faults of every kernel that a case launches."""

    def __init__(
        self, spec: OpSpec, case: Case, kinds: Sequence[str], most: int, kernels: Sequence[int], progress: bool
    ) -> None:
        self.spec, self.case, self.kinds, self.most, self.progress = spec, case, kinds, most, progress
        self.kernels = kernels  # by their numbers, in the order of their first launches; none: all
        self.trials: dict[str, Trial] = {}
        self.text = ""

    def run(self) -> list[Trial]:
        """Raises RuntimeError where the case is not right without a fault."""
        gc.freeze()
        self.low = self._results("reference", double=False)
        self.oracle = self._results("reference", double=True)
        before = driver.execute
        driver.mutate, driver.execute = self._note, self._launched
        try:
            if wrong := self._wrong(self._results("triton", double=False)):
                raise RuntimeError(f"{self.spec.name} {self.case.name} without a fault: {wrong}")
        finally:
            driver.mutate, driver.execute = (lambda text: text), before
        for trial in self.trials.values():
            for site in trial.sites:
                if site.differs and not site.caught:
                    self._judge(trial, site)
        return list(self.trials.values())

    def _results(self, impl: str, double: bool) -> dict[str, torch.Tensor]:
        inputs = self.spec.make_inputs(self.case, torch.device("cpu"), 1)
        return self.spec.run(registry.to_double(inputs) if double else inputs, self.case, impl)

    def _wrong(self, outputs: dict[str, torch.Tensor]) -> str:
        verdicts = [self.spec.judge(self.case, k, out, self.low[k], self.oracle[k]) for k, out in outputs.items()]
        return "; ".join(str(verdict) for verdict in verdicts if not verdict.ok)

    def _note(self, text: str) -> str:
        self.text = text
        return text

    def _launched(
        self,
        program: Program,
        grid: tuple[int, int, int],
        parameters: list[int],
        allocations: Sequence[Allocation],
        shared: int,
        settings: Settings = _USUAL,
        reports: Reports | None = None,
    ) -> launch.Result:
        """A launch without a fault, after one with each fault that is still to be caught."""
        if self.text not in self.trials:
            chosen = not self.kernels or len(self.trials) + 1 in self.kernels
            wanted = _thinned([site for site in sites(self.text) if chosen and site.kind in self.kinds], self.most)
            self.trials[self.text] = Trial(self.text, wanted, _Watched(parse(self.text)))
        trial, allocations = self.trials[self.text], list(allocations)
        trial.launches += 1
        before, begun = _bytes(allocations), time.perf_counter()
        result = launch.execute(trial.program, grid, parameters, allocations, shared, settings, reports)
        limit = max(_LEAST_SECONDS, _SLOWER * (time.perf_counter() - begun))
        after, settings = _bytes(allocations), dataclasses.replace(settings, seconds=limit)
        left = [site for site in trial.sites if not site.caught and trial.program.ran(site.number)]
        for n, site in enumerate(left):
            self._say(f"{trial.program.kernel.name}: launch {trial.launches}, fault {n + 1} of {len(left)}")
            _put(allocations, before)
            gc.collect()  # of the launch before this one: it refers to itself
            site.caught = _caught_by(site.apply(trial.text), grid, parameters, allocations, shared, settings)
            site.differs |= not site.caught and _bytes(allocations) != after
        _put(allocations, after)
        return result

    def _judge(self, trial: Trial, site: Site) -> None:
        """The whole case with a fault that changed memory without a report."""
        self._say(f"{trial.program.kernel.name}: judging PTX line {site.instruction.line}")
        harmed = site.apply(trial.text)
        driver.mutate = lambda text: harmed if text == trial.text else text
        try:
            wrong = self._wrong(self._results("triton", double=False))
        except Exception as error:
            wrong = f"{type(error).__name__}: {error}"
        finally:
            driver.mutate = lambda text: text
        site.caught = f"wrong result: {wrong}" if wrong else ""

    def _say(self, what: str) -> None:
        if self.progress:
            print(f"\r{what[:110]:110}", end="", file=sys.stderr, flush=True)


def _caught_by(
    text: str,
    grid: tuple[int, int, int],
    parameters: list[int],
    allocations: list[Allocation],
    shared: int,
    settings: Settings,
) -> str:
    """What ends a launch of a kernel with a fault, or says that it is wrong; "" for nothing."""
    try:
        program = Program(parse(text))
        launch.execute(program, grid, parameters, allocations, shared, settings, _Reports(program.kernel))
    except _Found as found:
        return str(found)
    except TimeoutError as error:
        return f"no end: {error}"
    except RuntimeError as error:
        if isinstance(error.__cause__, TimeoutError):
            return f"no end: {error}"
        return f"deadlock: {error}" if "deadlock" in str(error) else f"RuntimeError: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _bytes(allocations: list[Allocation]) -> list[bytes]:
    return [ctypes.string_at(each.address, each.size) for each in allocations]


def _put(allocations: list[Allocation], contents: list[bytes]) -> None:
    for each, content in zip(allocations, contents, strict=True):
        ctypes.memmove(each.address, content, each.size)


# -------------------------------------------------------------------------------------------------------------- answers


def answers(name: str, arch: str, trials: list[Trial]) -> Iterator[dict[str, Any]]:
    """One for each fault: where it is, and what caught it, or what is known of why it was missed."""
    for number, trial in enumerate(trials, 1):
        for site in trial.sites:
            i = site.instruction
            yield {
                "case": name,
                "arch": arch,
                "kernel": f"{number} {trial.program.kernel.name}",
                "kind": site.kind,
                "line": i.line,
                "source": i.source,
                "text": i.text,
                "caught": site.caught,
                "missed": "" if site.caught else trial.why_missed(site),
            }


def _table(found: list[dict[str, Any]]) -> Iterator[str]:
    """Lines: for each kernel and kind how many were caught and by what, then each fault that was missed."""
    for kernel in dict.fromkeys(each["kernel"] for each in found):
        yield f"{found[0]['case']} {found[0]['arch']}, kernel {kernel}"
        for kind in _KINDS:
            of = [each for each in found if each["kernel"] == kernel and each["kind"] == kind]
            by = Counter(
                each["caught"].partition(": ")[0] if each["caught"] else f"MISSED: {each['missed']}" for each in of
            )
            if of:
                named = "; ".join(f"{count} {what}" for what, count in by.most_common())
                yield f"  {kind}: {sum(bool(each['caught']) for each in of)} of {len(of)} caught ({named})"
        for each in found:
            if each["kernel"] == kernel and not each["caught"] and each["missed"] == "same bits":
                yield f"    missed {each['kind']}: PTX line {each['line']}, {each['source']}, `{each['text'][:90]}`"


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m shardfuse.kernels.dev.ptx.faults", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--case", choices=list(_DEEP), help="default: all, one after another")
    parser.add_argument("--arch", choices=list(driver.ARCHS), default="sm_90")
    parser.add_argument("--slots", type=int, default=2, help="multiprocessors (default: 2, for several tiles each)")
    parser.add_argument("--kind", choices=_KINDS, action="append", help="default: every kind of fault")
    parser.add_argument(
        "--most", type=int, default=0, help="guards of one opcode at one line of Python (default: all of them)"
    )
    parser.add_argument(
        "--kernel", type=int, action="append", help="of the case's kernels, by the order in which they are launched"
    )
    parser.add_argument("--json", action="store_true", help="a line of JSON for each fault instead of the table")
    options = parser.parse_args()
    os.environ.setdefault("SHARDFUSE_POISON", "1")
    driver.install(options.arch, options.slots)
    torch.set_num_threads(1)
    for name in [options.case] if options.case else _DEEP:
        seeder = Seeder(
            *case_named(name), options.kind or _KINDS, options.most, options.kernel or (), progress=sys.stderr.isatty()
        )
        found = list(answers(name, options.arch, seeder.run()))
        if not found:
            parser.error(f"{name} has no such fault: expected --kernel from 1 to {len(seeder.trials)}, another --kind")
        for line in map(json.dumps, found) if options.json else _table(found):
            print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
