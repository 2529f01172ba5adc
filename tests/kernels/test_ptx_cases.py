"""The ops' test cases on compiled code: ``kernels/dev/ptx`` runs on this CPU the PTX that Triton makes for a GPU.

In processes of their own, since they replace Triton's driver and this one interprets its kernels.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from typing import Any

import pytest

from shardfuse.kernels.dev import registry
from shardfuse.kernels.runtime.dispatch import triton_version

SIDE = os.environ.get("SHARDFUSE_SIDE_TRITON", "")
FP8_ONLY = "scaled_linear"  # sm_80 has no fp8

pytestmark = [
    pytest.mark.codegen,
    pytest.mark.skipif(triton_version() is None, reason="Triton is not installed"),
    pytest.mark.skipif(
        shutil.which("gcc") is None, reason="gcc is not installed: it compiles the stub of CUDA's driver"
    ),
]


def _emulated(*options: str, triton: str = "") -> list[dict[str, Any]]:
    """The answers of ``python -m shardfuse.kernels.dev.ptx``, one for each case."""
    unwanted = ("TRITON_INTERPRET", "SHARDFUSE_POISON")
    environment = {name: value for name, value in os.environ.items() if name not in unwanted}
    if triton:
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [triton, environment.get("PYTHONPATH", "")]))
    command = [sys.executable, "-m", "shardfuse.kernels.dev.ptx", "--json", *options]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def _ran_and_are_right(answers: list[dict[str, Any]]) -> None:
    wrong = [f"{each['op']} {each['case']}: {each['why']}" for each in answers if not each["ok"]]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("part", ["1/4", "2/4", "3/4", "4/4"])
def test_every_case_for_sm_90(part: str):
    number, parts = map(int, part.split("/"))
    cases = [(name, case.name) for name, spec in registry.ops().items() for case in spec.tagged("test")]
    answers = _emulated("--arch", "sm_90", "--part", part)
    assert [(each["op"], each["case"]) for each in answers] == cases[number - 1 :: parts]
    _ran_and_are_right(answers)


def test_a_sample_for_sm_80():
    answers = _emulated("--arch", "sm_80", "--part", "2/9")
    assert len(answers) >= 20
    _ran_and_are_right([each for each in answers if each["op"] != FP8_ONLY])


@pytest.mark.skipif(
    not SIDE, reason="SHARDFUSE_SIDE_TRITON does not name a folder with another Triton (make test sets it)"
)
def test_a_sample_under_another_triton():
    answers = _emulated("--arch", "sm_90", "--part", "3/9", triton=SIDE)
    assert len(answers) >= 20
    _ran_and_are_right(answers)


@pytest.mark.parametrize(
    ("arch", "opcode", "fault"),
    [
        ("sm_80", "cp.async.wait_group", "shared read of a copy before its wait"),
        ("sm_90", "bar.sync", "race: "),
        ("sm_90", "mbarrier.arrive", ""),  # no phase ends: a deadlock
    ],
)
def test_a_missing_instruction_is_found(arch: str, opcode: str, fault: str):
    case = ("--arch", arch, "--op", "linear_act", "--case", "t100-d64-f64-bf16-identity-nobias")
    [answer] = _emulated(*case, "--remove", opcode)
    assert not answer["ok"]
    assert any(fault in report for report in answer["reports"]) or (not fault and "deadlock" in answer["why"])
