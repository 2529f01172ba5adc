"""Emulate the test cases of ops, and judge their results.

python -m shardfuse.kernels.dev.ptx --op rms_norm --arch sm_90
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
from collections import Counter
from typing import Any

import torch

from ...runtime.chips import converts_e4m3
from .. import registry
from ..registry import OpSpec
from . import driver, models
from .settings import Settings

_ENDS = {"exact": 0, "up": 1, "down": -1}


def main() -> int:
    parser = _parser()
    options = parser.parse_args()
    try:
        specs = [registry.op(options.op)] if options.op else list(registry.ops().values())
        part, parts = map(int, options.part.split("/"))
    except ValueError as error:
        parser.error(str(error))
    # fp8 does not exist everywhere.
    there = [spec for spec in specs if spec.name != "scaled_linear" or converts_e4m3(options.arch)]
    if not 1 <= part <= parts:
        parser.error(f"--part {options.part}: expected I/N with 1 <= I <= N")
    os.environ.setdefault("SHARDFUSE_POISON", "1")
    driver.install(options.arch, options.slots)
    wanted = options.case or [""]
    choose = {"": _test_cases, "some": models.some, "all": _all_cases}[options.models]
    found = [(spec, small) for spec, small in choose(there) if any(part in small.name for part in wanted)]
    if not found:
        parser.error(f"no case of {options.op or 'any op'} for {options.arch} has {wanted} in its name")
    driver.settings = Settings(end=_ENDS[options.approximate])
    torch.set_num_threads(1)
    gc.set_threshold(100_000, 50, 100)  # translated kernels are many objects, and stay
    wrong = 0
    for spec, small in found[part - 1 :: parts]:
        answer = emulate(spec, small, options.vary)
        wrong += not answer["ok"]
        print(json.dumps(answer) if options.json else _line(answer), flush=True)
    return bool(wrong)


def _test_cases(specs: list[OpSpec]) -> list[tuple[OpSpec, models.Small]]:
    return [(spec, models.Small(case.name, case)) for spec in specs for case in spec.tagged("test")]


def _all_cases(specs: list[OpSpec]) -> list[tuple[OpSpec, models.Small]]:
    return [(spec, small) for spec in specs for small in models.cases(spec)]


def emulate(spec: OpSpec, small: models.Small, vary: bool = False) -> dict[str, Any]:
    """How a case went: ``ok``, ``why`` not, the largest error as a share of its budget, and every report.

    With ``vary`` it has to have the same bits under each of ``settings.VARIATIONS`` too.
    """
    case = small.case
    answer: dict[str, Any] = {"op": spec.name, "case": small.name, "ok": False, "why": "", "share": 0.0, "reports": []}
    driver.log.clear()
    begun = time.perf_counter()
    cpu = torch.device("cpu")

    def run() -> dict[str, torch.Tensor]:
        return spec.run(spec.make_inputs(case, cpu, 1), case, "triton")

    try:
        with models.configured(small):
            outputs = run()
            failed = driver.differences(run) if vary else []
    except Exception as error:
        return answer | {"why": f"{type(error).__name__}: {error}"}
    answer["seconds"] = round(time.perf_counter() - begun, 2)
    low = spec.run(spec.make_inputs(case, cpu, 1), case, "reference")
    oracle = spec.run(registry.to_double(spec.make_inputs(case, cpu, 1)), case, "reference")
    verdicts = [spec.judge(case, name, out, low[name], oracle[name], **small.rounded) for name, out in outputs.items()]
    found = Counter(report for result in driver.log for report in result.reports)
    answer["reports"] = list(found)
    answer["launches"] = Counter(result.kernel for result in driver.log)
    answer["instructions"] = sum(result.executed for result in driver.log)
    answer["emulating"] = round(sum(result.seconds for result in driver.log), 2)
    answer["share"] = max((v.error / v.budget if v.budget else float(v.error > 0) for v in verdicts), default=0.0)
    failed += [str(verdict) for verdict in verdicts if not verdict.ok]
    failed += [] if driver.log or 0 in case.sizes.values() else ["no kernel ran"]
    faults = [report for report in found if not report.startswith("note: ")]
    return answer | {"ok": not failed and not faults, "why": "; ".join(failed) or "; ".join(faults[:1])}


def _line(answer: dict[str, Any]) -> str:
    label = f"{answer['op']} {answer['case']}: {'ok' if answer['ok'] else 'WRONG'}"
    if "launches" not in answer:
        return f"{label}: {answer['why']}"
    kernels = ", ".join(f"{count} x {name}" for name, count in answer["launches"].items())
    lines = [
        f"{label}: {answer['share']:.2f} of the error allowed; {kernels}; {answer['instructions']} instructions, "
        f"{answer['seconds']:.1f} s"
    ]
    return "\n    ".join([*lines, *([] if answer["ok"] else [answer["why"]]), *answer["reports"]])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m shardfuse.kernels.dev.ptx", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--op", default="", help="default: every op")
    parser.add_argument("--case", action="append", help="cases whose name holds this (several times: or this)")
    parser.add_argument(
        "--models",
        choices=["some", "all"],
        default="",
        help="cases of models made small, in place of test cases: all, or one or more for each configuration",
    )
    parser.add_argument("--arch", choices=list(driver.ARCHS), default="sm_90")
    parser.add_argument(
        "--slots", type=int, default=3, help="multiprocessors (default: 3, so that programs have several tiles)"
    )
    parser.add_argument(
        "--approximate", choices=list(_ENDS), default="exact", help="results of approximate instructions"
    )
    parser.add_argument(
        "--vary", action="store_true", help="the same bits with other poison, order of blocks and time of copies, too"
    )
    parser.add_argument("--part", default="1/1", metavar="I/N", help="every Nth case from the Ith on")
    parser.add_argument("--json", action="store_true", help="a line of JSON for each case")
    return parser


if __name__ == "__main__":
    sys.exit(main())
