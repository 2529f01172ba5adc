"""What no interpreter shows of the communicating kernels: memory orders in the PTX, and main loops still pipelined."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shardfuse.kernels.runtime import dispatch

pytestmark = [
    pytest.mark.codegen,
    pytest.mark.skipif(dispatch.triton_version() is None, reason="compiling kernels needs Triton"),
]


@pytest.fixture(scope="module")
def compiled() -> dict[str, dict[str, Any]]:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = Path(__file__).parents[1] / "support" / "comm_codegen.py"
    done = subprocess.run([sys.executable, str(script)], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def _lines(kernel: dict[str, Any], *words: str) -> list[int]:
    """Where in the PTX lines stand that have all ``words``."""
    return [i for i, line in enumerate(kernel["ptx"]) if all(word in line for word in words)]


def test_waits_acquire_before_the_tma_may_read(compiled: dict[str, dict[str, Any]]):
    """Every wait of a tile is followed by a barrier and a fence between the proxies before anything is loaded; behind
    the last wait, for all ranks, nothing is."""
    gather = compiled["all_gather_linear"]
    loads = _lines(gather, "cp.async.bulk.tensor", "mbarrier")
    *waits, last = _lines(gather, "ld.acquire.sys")
    fences = _lines(gather, "fence.proxy.async.global")
    assert loads
    assert waits
    for wait in waits:
        first_load = next((load for load in loads if load > wait), last)
        assert any(wait < fence < first_load for fence in fences)
    assert last > max(loads)
    assert all("bar.sync" in gather["ptx"][fence] for fence in fences)


def test_flags_are_released_to_the_system(compiled: dict[str, dict[str, Any]]):
    for op in ("linear_reduce_scatter", "all_reduce_rmsnorm"):
        raised = _lines(compiled[op], "atom", "exch", "release", "sys")
        assert raised, op
        assert not [i for i in _lines(compiled[op], "atom", "exch", ".sys") if i not in raised], op
    assert _lines(compiled["linear_reduce_scatter"], "atom", "add", "acq_rel", "gpu")  # the counters
    assert _lines(compiled["all_reduce_rmsnorm"], "atom", "cas", "acquire", "sys")  # its waits


@pytest.mark.parametrize("op", ["all_gather_linear", "linear_reduce_scatter"])
def test_main_loops_stay_pipelined(compiled: dict[str, dict[str, Any]], op: str):
    """A loop or a barrier that the compiler sees in the tiles' loop would leave it one stage, waited for each time."""
    kernel = compiled[op]
    assert kernel["shared"] >= kernel["stages"] * kernel["stage"], kernel["config"]


def test_what_is_sent_leaves_in_vectors(compiled: dict[str, dict[str, Any]]):
    """Addresses of slots come out of a table: if their alignment were not known, elements would leave one by one."""
    assert _lines(compiled["linear_reduce_scatter"], "st.global.v4")
    assert not _lines(compiled["linear_reduce_scatter"], "st.global.b16")
