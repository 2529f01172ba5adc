"""Checks test cases of ops, one after another: ``python -m shardfuse.bench.gpu.smoke FILE``, a JSON list of [op, case].

Each runs forward and backward through its Triton kernels and is compared with the fp64 oracle; one JSON event a line
tells of it. After a fault from which this process's GPU context does not recover the process ends.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from ...kernels.dev import registry
from ..harness.one import run_case
from ..harness.runner import default_device


def main(path: str) -> int:
    device = default_device()
    for op, name in json.loads(Path(path).read_text()):
        spec = registry.op(op)
        case = next(case for case in spec.cases if case.name == name)
        print(json.dumps(run_case(spec, case, device, "triton", check=True)), flush=True)
        if device.type == "cuda":
            torch.cuda.synchronize()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
