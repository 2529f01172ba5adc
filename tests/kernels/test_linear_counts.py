"""What the GEMM's compiled loops do, counted in the emulator, beyond what the committed record gates."""

from __future__ import annotations

import shutil
from typing import Any

import pytest

from shardfuse.kernels.dev import counting, counts_report
from shardfuse.kernels.dev.counting import Question
from shardfuse.kernels.runtime.dispatch import triton_version

pytestmark = [
    pytest.mark.codegen,
    pytest.mark.skipif(
        triton_version() not in counts_report.versions(), reason="what this Triton makes was not counted"
    ),
    pytest.mark.skipif(
        triton_version() is None or shutil.which("gcc") is None,
        reason="Triton is not installed, or gcc, which compiles the stub of CUDA's driver",
    ),
]


def _lines(op: str, case: str, arch: str) -> list[dict[str, Any]]:
    """The accesses of the case's only launch."""
    [answer] = counting.count([Question(op, case)], arch, jobs=1)
    assert not answer.get("error"), answer["error"]
    [launch] = answer["launches"]
    return launch["lines"]


def test_turned_operands_are_copied_ahead_beside_row_sums():
    """wgrad without TMA: both operands, which lie along M and N, go to shared memory and come from it undelayed.

    A tile that is turned after its load, or that another layout reads too, would pass through registers or lose its
    swizzle; only the column of tiles at n = 0, a quarter of them here, loads dz again and adds it up.
    """
    lines = _lines("wgrad_accumulate", "t8192-d4096-f16384-bf16-bias", "sm_80")
    steps = max(line["times"] for line in lines)
    loop = [line for line in lines if line["times"] == steps]
    assert {line["unit"] for line in loop} == {"cp.async", "ldmatrix"}
    assert all(line["wavefronts"] == line["needed"] for line in loop)
    again = [line for line in lines if line["unit"] == "load" and line["on"].startswith("argument 0")]
    assert [line["times"] for line in again] == [pytest.approx(steps / 4, abs=0.01)]
    sums = [line for line in lines if line["wavefronts"] > line["needed"]]
    assert {line["times"] for line in sums} == {1.33}  # of 16 tiles for three programs, the four at n = 0
