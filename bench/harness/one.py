"""Runs one op on one of its cases and nothing else, for profilers and sanitizers.

    python -m shardfuse.bench.harness.one OP [CASE ...] [--tag TAG] [--check] [--json]

Runs forward and backward through the Triton kernels on the GPU, or interpreted on a CPU (TRITON_INTERPRET=1).
"""

from __future__ import annotations

import argparse
import json
import sys
import traceback
from collections.abc import Iterator
from typing import Any

import torch

from ...kernels.dev import registry
from ...kernels.dev.registry import Case, OpSpec
from ...kernels.runtime.names import expected
from .gate import check_case
from .runner import default_device


def run_case(spec: OpSpec, case: Case, device: torch.device, impl: str, *, check: bool) -> dict[str, Any]:
    """Run one case; returns the result as a JSON object. ``check`` compares every output with the fp64 oracle."""
    said: dict[str, Any] = {"op": spec.name, "case": case.name, "impl": impl}
    try:
        if check:
            verdicts = check_case(spec, case, device, impl)
            return said | {"ok": all(v.ok for v in verdicts), "detail": "; ".join(str(v) for v in verdicts if not v.ok)}
        spec.run(spec.make_inputs(case, device, 0), case, impl)
        if device.type == "cuda":
            torch.cuda.synchronize()
        return said | {"ok": True, "detail": ""}
    except Exception:  # report on every case: one that cannot run is a finding
        return said | {"ok": False, "detail": traceback.format_exc(limit=-3).strip()}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m shardfuse.bench.harness.one", description="Run one op's cases once."
    )
    parser.add_argument("op", help=f"one of {', '.join(sorted(registry.ops()))}")
    parser.add_argument("case", nargs="*", help="cases by name; without any, those with --tag")
    parser.add_argument("--tag", default="short", help="which cases, if none is named (default: short)")
    parser.add_argument("--limit", type=int, default=None, help="at most so many cases")
    parser.add_argument("--impl", default="triton", help="triton, reference or auto (default: triton)")
    parser.add_argument("--check", action="store_true", help="compare with the fp64 oracle")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    options = parser.parse_args(argv)
    try:
        spec = registry.op(options.op)
        chosen = list(_choose(spec, options.case, options.tag))[: options.limit]
    except ValueError as error:
        parser.error(str(error))

    good = True
    for case in chosen:
        said = run_case(spec, case, default_device(), options.impl, check=options.check)
        good = good and said["ok"]
        if options.json:
            print(json.dumps(said), flush=True)
        else:
            print(f"{spec.name} {case.name}: {'ok' if said['ok'] else said['detail']}", flush=True)
    return 0 if good else 1


def _choose(spec: OpSpec, names: list[str], tag: str) -> Iterator[Case]:
    by_name = {case.name: case for case in spec.cases}
    unknown = [name for name in names if name not in by_name]
    if unknown:
        raise ValueError(
            f"{spec.name} has no case called {', '.join(unknown)}; {expected(unknown[0], by_name, 'it has')}"
        )
    yield from (by_name[name] for name in names) if names else spec.tagged(tag)


if __name__ == "__main__":
    sys.exit(main())
