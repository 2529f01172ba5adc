"""The kernels also run under the oldest Triton that the project supports, kept in a folder beside the installed one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import metadata

import numpy as np
import pytest

from shardfuse.kernels.runtime import dispatch

SIDE_TRITON = os.environ.get("SHARDFUSE_SIDE_TRITON") or None

# Runs in a process of its own: one process has one Triton. Gradients come from spec.run, beside the outputs.
_PROGRAM = """
import json, sys
import torch, triton
from shardfuse.kernels.dev import accuracy, registry
from shardfuse.kernels.runtime import dispatch

spec = registry.op(sys.argv[1])
verdicts = {}
for name in sys.argv[2:]:
    case = next(case for case in spec.cases if case.name == name)
    inputs = spec.make_inputs(case, torch.device("cpu"), 0)
    ours, low = spec.run(inputs, case, "triton"), spec.run(inputs, case, "reference")
    oracle = spec.run(registry.to_double(inputs), case, "reference")
    verdicts[name] = {
        key: [str(verdict), verdict.ok]
        for key in ours
        for verdict in [accuracy.judge(key, ours[key], low[key], oracle[key], terms=spec.terms(case))]
    }
ran = sum(n for (_, impl), n in dispatch.counts.items() if impl == "triton")
print(json.dumps({"triton": triton.__version__, "ran": ran, "verdicts": verdicts}))
"""


@pytest.mark.interpret
@pytest.mark.skipif(dispatch.triton_version() is None, reason="Triton is not installed")
@pytest.mark.skipif(
    SIDE_TRITON is None, reason="SHARDFUSE_SIDE_TRITON does not name a folder with another Triton (make test sets it)"
)
@pytest.mark.parametrize(
    ("op", "cases", "expected"),
    [
        (
            "linear_act",
            ("t33-d40-f72-fp32-gelu_erf", "t40-d48-f64-fp16-gelu_tanh", "t50-d40-f96-fp16-identity-x3"),
            {"dx", "dw0"},
        ),
        ("paged_attention", ("decode-g3-h80-p16-fp16", "mixed-g3-h32-p4-fp32"), {"out"}),
    ],
)
def test_forward_and_backward_agree_with_the_reference(op, cases, expected):
    (side,) = metadata.distributions(name="triton", path=[SIDE_TRITON])
    refused = dispatch._why_no_interpreter(side.version, np.__version__)
    if refused is not None:
        pytest.skip(refused)
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, [SIDE_TRITON, os.environ.get("PYTHONPATH")])),
        "TRITON_INTERPRET": "1",
        "SHARDFUSE_POISON": "1",
    }
    done = subprocess.run([sys.executable, "-c", _PROGRAM, op, *cases], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["triton"] != dispatch.triton_version()
    assert result["ran"] >= len(cases)
    for name in cases:
        assert expected <= result["verdicts"][name].keys()
        assert [line for line, ok in result["verdicts"][name].values() if not ok] == []
