"""Seeded faults in PTX: which there are in a text, and that the emulator catches them in launches of its own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from typing import Any

import pytest

from shardfuse.kernels.dev.ptx import faults
from shardfuse.kernels.runtime.dispatch import triton_version

TEXT = """
.version 8.7
.target sm_90a
.address_size 64
.visible .entry kernel(.param .u64 kernel_param_0)
.reqntid 128
{
	.reg .pred %p<3>;
	.reg .b32 %r<9>;
	.reg .b64 %rd<3>;
	@%p1 ld.global.b32 { %r1 }, [ %rd1 + 0 ];
	cp.async.cg.shared.global [ %r2 + 0 ], [ %rd1 + 0 ], 0x10, %r3;
	cp.async.cg.shared.global [ %r2 + 16 ], [ %rd1 + 16 ], 0x10;
	cp.async.commit_group;
	cp.async.wait_group 1;
	bar.sync 	0;
{
	.reg .pred complete;
	waitLoop:
	mbarrier.try_wait.parity.shared::cta.b64 complete, [%r4], %r5;
	@!complete bra.uni waitLoop;
}
	@%p2 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r4], 128;
	fence.proxy.async.shared::cta;
	@%p1 bra 	$L_end;
	st.shared.b32 [ %r2 + 0 ], %r1;
$L_end:
	ret;
}
"""
LINES = TEXT.split("\n")


def _line(of: str) -> int:
    return next(n for n, line in enumerate(LINES, 1) if of in line)


def test_every_fault_of_a_text() -> None:
    """One for each instruction that synchronises and each guard or size of an access; branches have none."""
    assert [(site.kind, site.instruction.line) for site in faults.sites(TEXT)] == [
        ("guard", _line("ld.global")),
        ("size", _line("0x10, %r3")),
        ("commit", _line("commit_group")),
        ("wait", _line("wait_group")),
        ("barrier", _line("bar.sync")),
        ("wait", _line("try_wait")),
        ("mbarrier", _line("arrive")),
        ("guard", _line("arrive")),
        ("fence", _line("fence.proxy")),
    ]


@pytest.mark.parametrize(
    ("fault", "left"),
    [
        (0, {"@%p1 ld.global": "	ld.global.b32 { %r1 }, [ %rd1 + 0 ];"}),
        (1, {"0x10, %r3": "	cp.async.cg.shared.global [ %r2 + 0 ], [ %rd1 + 0 ], 0x10;"}),
        (4, {"bar.sync": "	"}),
        (5, {"try_wait": "	", "@!complete": ""}),  # with its loop, which would never end
    ],
)
def test_a_fault_changes_its_instruction_alone(fault: int, left: dict[str, str]) -> None:
    changed = {_line(of) - 1: text for of, text in left.items()}
    wanted = [changed.get(n, line) for n, line in enumerate(LINES)]
    assert faults.sites(TEXT)[fault].apply(TEXT).split("\n") == wanted


def _answers(*options: str) -> list[dict[str, Any]]:
    unwanted = ("TRITON_INTERPRET", "SHARDFUSE_POISON")
    environment = {name: value for name, value in os.environ.items() if name not in unwanted}
    command = [sys.executable, "-m", "shardfuse.kernels.dev.ptx.faults", "--json", *options]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


needs_triton = pytest.mark.skipif(triton_version() is None, reason="Triton is not installed")
needs_gcc = pytest.mark.skipif(
    shutil.which("gcc") is None, reason="gcc is not installed: it compiles the stub of CUDA's driver"
)


@pytest.mark.codegen
@needs_triton
@needs_gcc
def test_every_barrier_of_a_norm_is_missed_when_it_is_not_there() -> None:
    """Forward, backward and the sum of its parts: each barrier alone, by a race that follows from its absence."""
    answers = _answers("--case", "rms_norm", "--kind", "barrier")
    kernels = ["_norm_fwd_kernel", "_norm_bwd_kernel", "_norm_sum_kernel"]
    assert list(dict.fromkeys(each["kernel"] for each in answers)) == [f"{n} {k}" for n, k in enumerate(kernels, 1)]
    assert [each for each in answers if not each["caught"].startswith("race: ")] == []


@pytest.mark.codegen
@needs_triton
@needs_gcc
def test_every_wait_of_a_product_is_missed_when_it_is_not_there() -> None:
    """For the copies of the main loop, and for those of a tile before the next tile's."""
    answers = _answers("--case", "linear_act", "--kernel", "1", "--kind", "wait", "--arch", "sm_80")
    assert [each["caught"].partition(": ")[0] for each in answers] == [
        "shared write to a copy's target before its wait",
        "shared read of a copy before its wait",
    ]
