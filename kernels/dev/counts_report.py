"""The committed record of what compiled kernels do when they run: ratios of sectors, wavefronts, MUFU and bytes.

An emulator counts them exactly (``ptx/counters.py``), in the cases of models' sizes made small (``ptx/models.cases``).
``make test`` checks the record against today's sources and a sample of it against the emulator; ``make codegen`` counts
again what the record lacks or has of other sources:

    python -m shardfuse.kernels.dev.counts_report --write    count what changed, write it, fail where a gate does
    python -m shardfuse.kernels.dev.counts_report --check    run nothing: is every case recorded, as it is now?
    python -m shardfuse.kernels.dev.counts_report --recount sm_90    count all of these again: are they as recorded?

``GATES`` hold for every launch, but for those that ``EXCUSES`` names with a reason; an excuse that no launch needs
fails, so that it goes when its kernel is mended.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from . import codegen, codegen_report, counting
from .counting import Question

ARCHS = ("sm_90", "sm_80")
# ``counted.Summary.ratios``
COLUMNS = ("loads", "stores", "conflicts", "mufu", "mufu_computed", "moved", "by_block", "touched")


class Launch(NamedTuple):
    """A row of the record."""

    arch: str
    op: str
    case: str
    kernel: str
    ratios: Mapping[str, float | None]

    def __str__(self) -> str:
        return f"{self.arch} {self.op} {self.case}: {self.kernel}"


class Gate(NamedTuple):
    holds: Callable[[Launch, float], bool]
    wanted: str


class Excuse(NamedTuple):
    """Why launches of a kernel need not pass a gate: those whose text holds all of ``words``."""

    gate: str
    kernel: str
    words: tuple[str, ...]
    reason: str

    def __str__(self) -> str:
        return " ".join((self.kernel, *self.words))

    def covers(self, launch: Launch) -> bool:
        named = str(launch)
        return launch.kernel == self.kernel and all(word in named for word in self.words)


_TILED = ("_gemm_kernel", "_paged_attention_fwd_kernel")  # tiles of operands, and of keys, are read for several others
GATES: dict[str, Gate] = {
    "loads": Gate(lambda launch, share: share >= 0.9, "main loads use 90 % of their sectors"),
    "stores": Gate(lambda launch, share: share >= 0.9, "main stores use 90 % of their sectors"),
    "conflicts": Gate(lambda launch, ratio: ratio == 1.0, "accesses to shared memory in loops have no bank conflicts"),
    # An exponential and a reciprocal for an activation, and at most as much as one for what a program needs itself.
    "mufu_computed": Gate(lambda launch, count: count <= 3.0, "at most three MUFU for an element that is computed"),
    # A norm's weight is read once a row, of which the small cases have few.
    "by_block": Gate(
        lambda launch, ratio: launch.kernel in _TILED or ratio <= 1.5,
        "what multiplies no matrices moves 1.5 times the necessary bytes at most",
    ),
}
_PAIRS = "a thread's 32 bytes take two requests, and each touches all their sectors; L1 serves the second"
# Of llama8b in bf16 on sm_90, cycles of a block: 1,089 of device memory, 156 of L1 with 289 of issue slots. With full
# sectors of the tables, and 8 bytes of a head in a thread, it would be 144 with 318.
_TABLES = "tables of cos and sin in fp32, shared by a token's heads: " + _PAIRS
_ODD = "rows of an odd length are not aligned: accesses of one element, and sectors that two of them share"
_ODD_LOGITS = "the product stores logits densely, so rows of an odd vocabulary begin anywhere; a padded one is aligned"
_BIAS = "sums for the bias take 11 wavefronts for one between warps: Triton's tl.sum, once a row of tiles, where n = 0"
_FP32 = (
    "FMA's operands have no swizzle in Triton: W lies along K in shared memory, rows of 64 bytes, where 16 lanes read "
    "across them; and wgmma takes tf32 along K only: dgrad's and wgrad's operands are turned through registers"
)
_FEW = "tiles of 32 rows, and fewer tokens: the rows beyond are computed too"
_MAXIMA = "row maxima and sums between warps: 3 to 4 % of a loop's wavefronts, which bind nothing"
_WEIGHTS = "exponentials change layout through shared memory, two wavefronts for one: at most 4 % of a loop's"
_WIDENED = "wgmma takes values in tf32 by columns alone: what is widened to it is stored 4 bytes at a time"
EXCUSES: tuple[Excuse, ...] = (
    Excuse("loads", "_gemm_kernel", ("sm_80 linear_cross_entropy", "bias"), "sums for the bias, in fp32: " + _PAIRS),
    *(
        Excuse("loads", "_write_kv_kernel", codes, "issue binds, and more so with 8 codes in a thread: " + _PAIRS)
        for codes in ((" write_kv", "int8"), ("sm_80 write_kv", "e4m3"))
    ),
    Excuse("loads", "_write_kv_kernel", ("norm_rope_write_kv",), _TABLES),
    Excuse("loads", "_rope_kernel", (), _TABLES),
    Excuse("loads", "_paged_attention_fwd_kernel", ("wide-fp32",), "queries, read once by a program: " + _PAIRS),
    Excuse("stores", "_rope_kernel", ("h80",), "halves of a head of 80 begin within a sector: six for five"),
    Excuse("stores", "_cast_kernel", ("training-tensor",), "rows of the small case, 784 bytes, end within a sector"),
    Excuse("loads", "_gemm_kernel", ("training-tensor",), "rows of the small case, 784 bytes, end within a sector"),
    Excuse("loads", "_gemm_kernel", ("v50257",), _ODD),
    Excuse("stores", "_gemm_kernel", ("v50257",), _ODD),
    Excuse("loads", "_act_grad_kernel", ("4095",), _ODD),
    Excuse("stores", "_act_grad_kernel", ("4095",), _ODD),
    Excuse("loads", "_gradient_kernel", ("v50257",), _ODD_LOGITS),
    Excuse("stores", "_gradient_kernel", ("v50257",), _ODD_LOGITS),
    Excuse("loads", "_gemm_kernel", ("4095",), _ODD),
    Excuse("stores", "_gemm_kernel", ("4095",), _ODD),
    Excuse("loads", "_reduce_kernel", ("4095",), _ODD),
    Excuse("stores", "_reduce_kernel", ("4095",), _ODD),
    Excuse("stores", "_plan_kernel", (), "items of the plan, 32 bytes each, are stored by halves: from one thread"),
    *(
        Excuse("conflicts", "_gemm_kernel", (op, "fp32"), _FP32)
        for op in ("linear_act", "gated_linear", "dgrad_act", "dgrad_gated", "linear_cross_entropy")
    ),
    *(
        Excuse("conflicts", "_gemm_kernel", ("linear_act", case), _BIAS)
        for case in ("gpt3-13b", "llama3-8b", "bf16-identity", "bf16-gelu", "bf16-silu")
    ),
    Excuse("conflicts", "_gemm_kernel", ("gated_linear", "bias"), _BIAS),
    Excuse("conflicts", "_gemm_kernel", ("linear_cross_entropy", "bias"), _BIAS),
    Excuse("conflicts", "_gemm_kernel", ("wgrad_accumulate",), _BIAS),
    Excuse("conflicts", "_paged_attention_fwd_kernel", ("fp32",), _FP32),
    Excuse("conflicts", "_paged_attention_fwd_kernel", ("sm_90", "llama8b-mixed"), _WIDENED),
    *(
        Excuse("conflicts", "_paged_attention_fwd_kernel", ("sm_80", heads), _MAXIMA)
        for heads in ("gemma-bf16", "gemma-full-bf16", "h160", "h192")
    ),
    *(
        Excuse("conflicts", "_paged_attention_fwd_kernel", ("sm_80", case), _WEIGHTS)
        for case in ("fp8", "int8", "tree")
    ),
    Excuse(
        "by_block", "_plan_kernel", (), "every warp reads the lengths of few sequences, and stores 4 bytes a sector"
    ),
    Excuse("by_block", "_merge_kernel", (), "where nothing is to be merged, every block reads 4 bytes that say so"),
    Excuse("by_block", "_norm_fwd_kernel", ("layer_norm t8192-d4096-bf16:",), "a row reads weight and bias, too"),
    Excuse("mufu_computed", "_paged_attention_fwd_kernel", (), "an exponential for each query with each key"),
    Excuse("mufu_computed", "_plan_kernel", (), "divisions of integers, of few items"),
    Excuse("mufu_computed", "_act_grad_kernel", ("-t1-",), "a tile's rows beyond the only one are computed too"),
    Excuse("mufu_computed", "_gemm_kernel", ("sm_80", "-t1-"), _FEW),
    Excuse("mufu_computed", "_gemm_kernel", ("sm_80", "t16-d4096"), _FEW),
    Excuse("mufu_computed", "_gradient_kernel", ("softcap",), "scores are capped by tanh, twice"),
)


def path(version: str) -> Path:
    """Where the record of one version of Triton lies."""
    return codegen_report.FOLDER / f"counts-triton-{version}.json"


def versions() -> list[str]:
    """The versions of Triton that there are records of."""
    return [file.stem.removeprefix("counts-triton-") for file in codegen_report.FOLDER.glob("counts-triton-*.json")]


def problems(launches: Sequence[Launch]) -> list[str]:
    """Launches that miss a gate without an excuse, and excuses that nothing needs; one line each."""
    found, needed = [], set[Excuse]()
    for launch in launches:
        for name, gate in GATES.items():
            value = launch.ratios[name]
            if value is None or gate.holds(launch, value):
                continue
            excuses = [each for each in EXCUSES if each.gate == name and each.covers(launch)]
            needed.update(excuses)
            if not excuses:
                found.append(f"{launch}: {name} {value}: {gate.wanted}, or counts_report.EXCUSES says why not")
    return found + [
        f"{each} is excused from {each.gate} ({each.reason}) but passes: drop the excuse"
        for each in EXCUSES
        if each not in needed
    ]


def read(version: str) -> dict[str, list[Any]]:
    """The record: "arch op case" -> [source, rows of a kernel's name and COLUMNS]; empty where there is none."""
    file = path(version)
    if not file.is_file():
        return {}
    record = json.loads(file.read_text())
    rows: dict[str, list[Any]] = record["cases"] if record["columns"] == list(COLUMNS) else {}
    return rows


def launches(rows: Mapping[str, list[Any]]) -> Iterator[Launch]:
    for name, (_, *counted) in rows.items():
        arch, op, case = name.split(" ", 2)
        for kernel, *ratios in counted:
            yield Launch(arch, op, case, kernel, dict(zip(COLUMNS, ratios)))


def rows_of(answer: Mapping[str, Any]) -> list[Any]:
    """What is recorded of ``counting.count``'s answer: launches that differ, in their order."""
    found = [[each["kernel"], *(each["ratios"][name] for name in COLUMNS)] for each in answer["launches"]]
    return [each for n, each in enumerate(found) if each not in found[:n]]


def write(jobs: int | None = None, *, everything: bool = False) -> int:
    """Count what the record lacks or has of other sources, and write it. Returns 1 where a case fails, or a gate."""
    import triton

    people, known = Console(stderr=True), read(triton.__version__)
    rows: dict[str, list[Any]] = {}
    faults: list[str] = []
    count = 0
    for arch in ARCHS:
        questions = counting.recorded(arch)
        now = _sources(questions, arch, jobs)
        stale = [each for each in questions if everything or known.get(_name(arch, each), [""])[0] != now[each]]
        rows |= {_name(arch, each): known[_name(arch, each)] for each in questions if each not in stale}

        def shown(index: int, answer: dict[str, Any], arch: str = arch, stale: list[Question] = stale) -> None:
            nonlocal count
            count += 1
            people.print(f"counted {_name(arch, stale[index])}, {count}", highlight=False, soft_wrap=True)

        for each, answer in zip(stale, counting.count(stale, arch, jobs=jobs, on_answer=shown) if stale else ()):
            wrong = [answer["error"]] if answer.get("error") else answer["faults"]
            faults += [f"{_name(arch, each)}: {fault}" for fault in wrong]
            if not wrong:
                rows[_name(arch, each)] = [now[each], *rows_of(answer)]
    faults += problems(list(launches(rows)))
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(each)}" for name, each in sorted(rows.items()))
    head = json.dumps({"triton": triton.__version__, "columns": list(COLUMNS)})[:-1]
    path(triton.__version__).write_text(f'{head}, "cases": {{\n{lines}\n}}}}\n')
    print("\n".join([*faults, f"{len(rows)} cases, {count} of them counted, {len(faults)} problems"]))
    return 1 if faults else 0


def _sources(questions: Sequence[Question], arch: str, jobs: int | None) -> dict[Question, str]:
    """RuntimeError where one cannot be told."""
    answers = counting.sources(questions, arch, jobs=jobs)
    for question, answer in zip(questions, answers):
        if answer.get("error"):
            raise RuntimeError(f"{_name(arch, question)}: {answer['error']}")
    return {question: answer["source"] for question, answer in zip(questions, answers)}


def _question(name: str) -> Question:
    _, op, case = name.split(" ", 2)
    return Question(op, case)


def _name(arch: str, question: Question) -> str:
    return f"{arch} {question.op} {question.case}"


def stale(version: str, archs: Iterable[str] = ARCHS, jobs: int | None = None) -> list[str]:
    """What the record of ``version`` lacks or holds of other sources, one line each; nothing where it is whole."""
    rows, now = read(version), dict[str, str]()
    if not rows:
        return [f"there is no {path(version).name} with the columns {', '.join(COLUMNS)}"]
    for arch in archs:
        found = _sources(counting.recorded(arch), arch, jobs)
        now |= {_name(arch, question): source for question, source in found.items()}
    lines = [f"{name} is not in it" for name in now if name not in rows]
    lines += [
        f"{name} was counted of other sources" for name, source in now.items() if rows.get(name, [source])[0] != source
    ]
    return lines + [f"{name} is no case any more" for name in rows if name not in now and name.split(" ")[0] in archs]


def differences(version: str, names: Sequence[str], jobs: int | None = None) -> list[str]:
    """Count these cases of the record, and say where they are not as recorded, one line each."""
    rows, found = read(version), []
    for arch in dict.fromkeys(name.split(" ")[0] for name in names):
        some = [name for name in names if name.startswith(f"{arch} ")]
        for name, answer in zip(some, counting.count([_question(name) for name in some], arch, jobs=jobs)):
            found += compared(name, rows[name][1:], answer)
    return found


def compared(name: str, recorded: Sequence[Any], answer: Mapping[str, Any]) -> list[str]:
    """Where ``counting.count``'s answer to a case is not what is recorded of it, one line each."""
    if answer.get("error"):
        return [f"{name}: {answer['error']}"]
    now, what = rows_of(answer), ("kernel", *COLUMNS)
    found = [
        f"{name}: {dict(zip(what, each))}, recorded as {was}: make codegen"
        for was, each in zip(recorded, now)
        if was != each
    ]
    if len(now) != len(recorded):
        found.append(f"{name}: {len(now)} different launches, {len(recorded)} recorded: make codegen")
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m shardfuse.kernels.dev.counts_report", description=__doc__)
    choice = parser.add_mutually_exclusive_group(required=True)
    choice.add_argument("--write", action="store_true", help="count what changed and write the record")
    choice.add_argument("--check", action="store_true", help="say what of the record is stale or fails a gate; exit 1")
    choice.add_argument("--recount", choices=ARCHS, help="count all again, and say what is not as recorded; exit 1")
    parser.add_argument("--everything", action="store_true", help="with --write: also what the record has already")
    parser.add_argument("--jobs", type=int, help="processes (default: one per core)")
    options = parser.parse_args(arguments)
    codegen.require_compiler()
    if options.write:
        return write(options.jobs, everything=options.everything)
    import triton

    version, rows = triton.__version__, read(triton.__version__)
    if options.recount:
        lines = stale(version, [options.recount], options.jobs)
        lines += differences(version, [name for name in rows if name.startswith(f"{options.recount} ")], options.jobs)
    else:
        lines = stale(version, jobs=options.jobs) + problems(list(launches(rows)))
    print("\n".join(lines) or "the record is whole")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
