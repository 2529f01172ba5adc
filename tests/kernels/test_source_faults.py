"""Seeded faults in the kernels' source: the emulator and the interpreter must notice those that are theirs."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import source_faults
from source_faults import FAULTS, Copy, Fault

from shardfuse.kernels.runtime.dispatch import triton_version


def test_every_fault_is_in_the_source() -> None:
    """What a fault replaces occurs once, and is replaced by something else."""
    for fault in FAULTS:
        assert fault.new != fault.old
        assert (source_faults.ROOT / "kernels" / fault.file).read_text().count(fault.old) == 1, fault.breaks


def test_a_fault_that_is_out_of_date_is_named(tmp_path: Path) -> None:
    copy = Copy(tmp_path)
    with pytest.raises(ValueError, match="'no such text' 0 times: expected once"):
        copy.with_fault(Fault("rope", "rope/triton.py", "no such text", "", "nothing"))


@pytest.mark.nightly(seconds=6)
@pytest.mark.skipif(triton_version() is None, reason="Triton is not installed")
@pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc is not installed: it compiles the stub of CUDA's driver")
@pytest.mark.parametrize("fault", FAULTS[::3], ids=lambda fault: fault.breaks)
def test_a_fault_is_noticed(fault: Fault, tmp_path: Path) -> None:
    """By whichever is said to, in the op's own cases; the same cases pass without the fault in other lanes."""
    copy = Copy(tmp_path)
    copy.with_fault(fault)
    if "emulator" not in fault.missed_by:
        assert copy.emulated(fault.op).caught
    if "interpreter" not in fault.missed_by:
        assert copy.interpreted(fault.op).caught
