"""What no interpreter shows of the communicating kernels: memory orders in the PTX, and main loops still pipelined."""

from __future__ import annotations

import json
import os
import re
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


@pytest.mark.parametrize("op", ["all_gather_linear", "all_reduce_rmsnorm"])
def test_a_flag_is_polled_by_one_thread(compiled: dict[str, dict[str, Any]], op: str):
    """The first threads, one for each flag, look at them and say what they waited for in vain; the others go on to the
    barrier, where they hear of what these have acquired."""
    kernel = compiled[op]
    ptx, looks = kernel["ptx"], _lines(kernel, "ld.acquire.sys")
    assert looks
    assert not _lines(kernel, "atom", "cas")
    for look in looks:
        first = max(i for i in _lines(kernel, "%tid.x;") if i < look)
        last = next(i for i in _lines(kernel, "bar.warp.sync -1;") if i > look)
        barrier = next(i for i in _lines(kernel, "bar.sync") if i > look)
        flags = re.fullmatch(r"setp\.ge\.u32 p, word, (%r\d+);", ptx[first + 1])
        assert flags, ptx[first + 1]
        assert re.fullmatch(rf"mov\.b32\s+{flags[1]}, {kernel['flags']};", ptx[_lines(kernel, f"{flags[1]},")[0]])
        assert ptx[first + 2].startswith("@p bra DONE")
        again = next(i for i in _lines(kernel, "@p bra LOOK") if i > look)
        report = next(i for i in _lines(kernel, "atom.release.sys.global.exch") if i > look)
        assert first < look < again < report < last < barrier
    # So the first threads hold all flags.
    assert len(kernel["layouts"]) == len(looks)
    for layout in kernel["layouts"]:
        assert re.match(r"#ttg\.blocked<\{sizePerThread = \[1\], threadsPerWarp = \[32\], .*order = \[0\]\}>", layout)


def test_flags_are_released_to_the_system(compiled: dict[str, dict[str, Any]]):
    for op in ("linear_reduce_scatter", "all_reduce_rmsnorm"):
        raised = _lines(compiled[op], "atom", "exch", "release", "sys")
        assert raised, op
        assert not [i for i in _lines(compiled[op], "atom", "exch", ".sys") if i not in raised], op
    assert _lines(compiled["linear_reduce_scatter"], "atom", "add", "acq_rel", "gpu")  # the counters


@pytest.mark.parametrize("op", ["all_gather_linear", "linear_reduce_scatter"])
def test_main_loops_stay_pipelined(compiled: dict[str, dict[str, Any]], op: str):
    """A loop or a barrier that the compiler sees in the tiles' loop would leave it one stage, waited for each time."""
    kernel = compiled[op]
    assert kernel["shared"] >= kernel["stages"] * kernel["stage"], kernel["config"]


def test_what_is_sent_leaves_in_vectors(compiled: dict[str, dict[str, Any]]):
    """Addresses of slots come out of a table: if their alignment were not known, elements would leave one by one."""
    assert _lines(compiled["linear_reduce_scatter"], "st.global.v4")
    assert not _lines(compiled["linear_reduce_scatter"], "st.global.b16")
