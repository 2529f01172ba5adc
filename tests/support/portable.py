"""``make test-portable``: run the tests that compare numbers as on other processors.

Each of four runs selects kernels of OpenBLAS (numpy, hence interpreted products), torch, oneDNN and MKL, and a number
of threads, other than this machine's. The report at the end shows each kind of comparison's largest share of its
budget. A budget counts as derived from arithmetic, rather than fitted to one machine, while every error stays below
half of it.

    python tests/support/portable.py [--run 1 --run 2] [arguments for pytest]
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import NamedTuple

LOGS = Path(os.environ.get("SHARDFUSE_MARGINS", ".portable")).resolve()
HALF = 0.5
SHOWN = 12
AT_ONCE = 2  # processes, each with its own threads
PARTS = {None: ("1/2", "2/2"), 1: ("1/4", "2/4"), 2: ("3/4", "4/4")}  # of a run, or of one of its halves
LANES = "not (codegen or packaging or demo or nightly or gpu or multigpu)"

# The variables of each run. The values act on different libraries, so four runs cover all.
RUNS: tuple[dict[str, str], ...] = (
    {"OPENBLAS_CORETYPE": "Haswell", "ATEN_CPU_CAPABILITY": "default", "OMP_NUM_THREADS": "1"},
    {"OPENBLAS_CORETYPE": "SkylakeX", "MKL_CBWR": "COMPATIBLE", "OMP_NUM_THREADS": "2"},
    {
        "OPENBLAS_CORETYPE": "Sandybridge",
        "ATEN_CPU_CAPABILITY": "avx2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "OMP_NUM_THREADS": "4",
    },
    {"OPENBLAS_CORETYPE": "Prescott", "ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE"},
)
# The instructions that a value needs; without them the process would crash.
NEEDS = {
    "Haswell": ("avx2", "fma"),
    "SkylakeX": ("avx512f", "avx512bw", "avx512dq", "avx512vl"),
    "Sandybridge": ("avx",),
    "Nehalem": ("sse4_2",),
    "Prescott": ("pni",),
    "avx2": ("avx2", "fma"),
    "AVX2": ("avx2", "fma"),
}


def lacking(value: str) -> list[str]:
    """The instructions that ``value`` needs and this processor lacks; all, if the system lists none."""
    cpu = Path("/proc/cpuinfo")
    found = re.search(r"^flags\s*:(.*)$", cpu.read_text(), re.M) if cpu.exists() else None
    has = set(found[1].split()) if found else set()
    return [name for name in NEEDS.get(value, ()) if name not in has]


class Margin(NamedTuple):
    """One comparison and its error as a share of its budget."""

    ratio: float
    kind: str
    test: str
    name: str


def margins(folder: Path) -> Iterator[Margin]:
    """The comparisons that tests/support/margins.py wrote there."""
    for path in folder.glob("*.jsonl"):
        for line in path.read_text().splitlines():
            entry = json.loads(line)
            yield Margin(entry["ratio"], entry["kind"], entry["test"], entry["name"])


def run_part(number: int, part: str, settings: dict[str, str], arguments: list[str]) -> tuple[bool, list[str]]:
    """Run one process of a run: (whether all passed, the failures and pytest's last line)."""
    folder = LOGS / str(number)
    log = folder / f"part-{part.replace('/', '-of-')}.log"
    # Passive: two multi-threaded processes share the cores, so idle threads must not spin.
    environment = {**os.environ, **settings, "SHARDFUSE_MARGINS": str(folder), "OMP_WAIT_POLICY": "PASSIVE"}
    command = [sys.executable, "-m", "pytest", "-q", "--numeric", "-m", LANES, "--part", part, *arguments]
    with log.open("w") as output:
        code = subprocess.run(command, env=environment, stdout=output, stderr=subprocess.STDOUT).returncode
    lines = log.read_text().splitlines()
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    said = [f"run {number}, part {part}: {line}" for line in failed + lines[-1:]]
    return code in (0, 5), said  # 5: no test was selected


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0], allow_abbrev=False)
    numbers = range(1, len(RUNS) + 1)
    parser.add_argument("--half", type=int, choices=(1, 2), help="of each run, this half (default: both)")
    parser.add_argument("--run", type=int, action="append", choices=numbers, help="this run (default: all)")
    options, others = parser.parse_known_args(arguments)
    shutil.rmtree(LOGS, ignore_errors=True)
    processes = []
    for number in options.run or numbers:
        wanted = RUNS[number - 1]
        settings = {name: value for name, value in wanted.items() if not lacking(value)}
        print(f"run {number}: " + " ".join(f"{name}={value}" for name, value in settings.items()))
        for name in wanted.keys() - settings.keys():
            value = wanted[name]
            print(f"  skipped: {name}={value}, which needs {', '.join(lacking(value))}: not on this processor")
        (LOGS / str(number)).mkdir(parents=True)
        processes += [(number, part, settings) for part in PARTS[options.half]]
    start, green = time.monotonic(), True
    # Two at a time, from any run: no core waits for a run's longer part.
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for job in as_completed([pool.submit(run_part, *process, others) for process in processes]):
            passed, said = job.result()
            green = green and passed
            print(f"{time.monotonic() - start:6.0f} s  " + "\n          ".join(said), flush=True)
    every = [margin for number in options.run or numbers for margin in margins(LOGS / str(number))]
    return 0 if report(every) and green else 1


def report(every: list[Margin]) -> bool:
    """Print the comparisons nearest to their budgets; returns whether all stayed below half of them."""
    worst: dict[str, Margin] = {}
    for margin in every:
        test = margin.test.partition("[")[0]
        # A ratio above 1 comes from a test that expects the refusal; any other test would have failed.
        if margin.ratio <= 1 and (test not in worst or margin.ratio > worst[test].ratio):
            worst[test] = margin
    print(f"\nthe largest error over its budget, of {len(every)} comparisons in {len(worst)} tests:")
    for margin in sorted(worst.values(), reverse=True)[:SHOWN]:
        print(f"  {margin.ratio:.2f}  {margin.test} {margin.name}".rstrip())
    near = sum(round(margin.ratio, 2) > HALF for margin in worst.values())  # 0.5: the reference's own arithmetic
    print(f"{near} tests came nearer than {HALF:g} to a budget")
    refused = [margin for margin in every if margin.ratio > 1]
    if refused:
        least = min(refused)
        print(f"the smallest error that was refused, of {len(refused)}: {least.ratio:.2f}  {least.test} {least.name}")
    return bool(every) and not near


if __name__ == "__main__":
    sys.exit(main())
