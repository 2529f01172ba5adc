"""A process that checks test cases of ops: {"op", "case"} -> {"ok", "detail"}, a JSON object a line.

Each runs forward and backward through its Triton kernels and is compared with the fp64 oracle. A fault from which this
process's GPU context does not recover ends the process. With ``--emulate ARCH`` the kernels are compiled for that chip
and emulated on this CPU.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
from typing import Any

import torch

from ...kernels.dev import registry, workers
from ...kernels.dev.ptx import driver
from ...kernels.dev.ptx.models import Small
from ...kernels.dev.registry import Case, OpSpec
from ..harness import stand_in
from ..harness.one import run_case
from ..harness.runner import default_device


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m shardfuse.bench.gpu.smoke", description="Check test cases of ops.")
    parser.add_argument("--emulate", metavar="ARCH", help="emulate the kernels on this CPU, compiled for ARCH")
    parser.add_argument("--start", type=float, default=0.0, help="of a rehearsal: seconds until this process starts")
    options = parser.parse_args()
    if options.start:
        time.sleep(max(0.0, options.start - stand_in.age()))
    workers.end_with_the_parent()
    check = _emulated if options.emulate else _on_gpu
    if not options.emulate and default_device().type != "cuda":
        sys.exit("error: this process sees no GPU that torch can use")
    if options.emulate:
        driver.install(options.emulate)
        torch.set_num_threads(1)

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        spec = registry.op(request["op"])
        return check(spec, next(case for case in spec.cases if case.name == request["case"]))

    workers.serve(answer)


def _on_gpu(spec: OpSpec, case: Case) -> dict[str, Any]:
    found = run_case(spec, case, default_device(), "triton", check=True)
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        print(found["detail"], traceback.format_exc(), sep="\n", file=sys.stderr, flush=True)
        os._exit(1)
    return {name: found[name] for name in ("ok", "detail")}


def _emulated(spec: OpSpec, case: Case) -> dict[str, Any]:
    from ...kernels.dev.ptx.__main__ import emulate  # what a GPU does not need

    found = emulate(spec, Small(case.name, case))
    return {"ok": found["ok"], "detail": found["why"], "launches": sum(found.get("launches", {}).values())}


if __name__ == "__main__":
    main()
