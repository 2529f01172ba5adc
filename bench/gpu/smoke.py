"""Checks test cases of ops, one after another: ``python -m shardfuse.bench.gpu.smoke FILE``, a JSON list of [op, case].

Each runs forward and backward through its Triton kernels and is compared with the fp64 oracle; one JSON event a line
tells of it. After a fault from which this process's GPU context does not recover the process ends. With ``--emulate
ARCH`` the kernels are compiled for that chip and emulated on this CPU.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ...kernels.dev import registry
from ...kernels.dev.registry import Case, OpSpec
from ..harness.one import run_case
from ..harness.runner import default_device


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m shardfuse.bench.gpu.smoke", description="Check test cases of ops.")
    parser.add_argument("--emulate", metavar="ARCH", help="emulate the kernels on this CPU, compiled for ARCH")
    parser.add_argument("file", type=Path, help="JSON: a list of [op, case]")
    options = parser.parse_args()
    device = default_device()
    check = (
        _emulator(options.emulate)
        if options.emulate
        else lambda spec, case: run_case(spec, case, device, "triton", check=True)
    )
    for op, name in json.loads(options.file.read_text()):
        spec = registry.op(op)
        case = next(case for case in spec.cases if case.name == name)
        print(json.dumps(check(spec, case)), flush=True)
        if device.type == "cuda":
            torch.cuda.synchronize()
    return 0


def _emulator(arch: str) -> Callable[[OpSpec, Case], dict[str, Any]]:
    from ...kernels.dev.ptx import driver
    from ...kernels.dev.ptx.__main__ import emulate
    from ...kernels.dev.ptx.models import Small

    driver.install(arch)
    torch.set_num_threads(1)

    def check(spec: OpSpec, case: Case) -> dict[str, Any]:
        found = emulate(spec, Small(case.name, case))
        launches = sum(found.get("launches", {}).values())
        said = {"op": spec.name, "case": case.name, "impl": "triton", "launches": launches}
        return said | {"ok": found["ok"], "detail": found["why"]}

    return check


if __name__ == "__main__":
    sys.exit(main())
