"""The kernels' launches through Triton's own binder, driver and launcher, over a CUDA driver that runs nothing."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shardfuse.kernels.dev import carried, codegen, registry, stub_cuda
from shardfuse.kernels.runtime.dispatch import triton_version

SUPPORT = Path(__file__).parents[1] / "support"
# The most calls that our modules make, of Python's functions and C's, in one call of an op or layer whose launches are
# prepared.
CALLS = {
    "linear_act": 87,
    "linear_act, forward": 99,
    "linear_act, forward + backward": 307,
    "mlp": 191,
    "mlp, forward": 235,  # under torch 2.14; one less before
    "mlp, forward + backward": 560,
    "fused norm": 93,
    "fused norm, forward": 102,
    "fused norm, forward + backward": 258,
    "fused mlp": 226,
    "fused mlp, forward": 262,
    "fused mlp, forward + backward": 586,
}
SIDE = os.environ.get("SHARDFUSE_SIDE_TRITON", "")

pytestmark = [
    pytest.mark.codegen,
    pytest.mark.skipif(triton_version() is None, reason="Triton is not installed"),
    pytest.mark.skipif(
        shutil.which("gcc") is None, reason="gcc is not installed: it compiles the stub of CUDA's driver"
    ),
]


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the stub of CUDA's driver."""
    folder = tmp_path_factory.mktemp("stub")
    stub_cuda.build(folder)
    return folder


def _run(stub: Path, *options: str, triton: str = "", **variables: str) -> dict[str, Any]:
    unwanted = ("TRITON_INTERPRET", "SHARDFUSE_POISON")
    environment = {name: value for name, value in os.environ.items() if name not in unwanted} | variables
    if triton:
        environment["PYTHONPATH"] = os.pathsep.join([triton, environment.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    command = [sys.executable, str(SUPPORT / "stub_driver.py"), str(stub), *options]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert found["ops"] == list(registry.ops())
    return found


def test_every_argument_arrives_as_it_was_passed(stub: Path):
    found = _run(stub)
    assert found["faults"] == []
    assert found["counts"]["arguments"] > 10 * found["counts"]["launches"] > 10_000
    assert found["counts"]["past the binder"] > found["counts"]["first"] > 100


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("aligned", "another kernel"),
        ("number", "another arguments"),
        ("dtype", "another kernel"),
        ("shape", "_gemm_kernel: T is"),
        ("shape", "_act_grad_kernel: T is"),
        ("strides", "_gemm_kernel: a_strides is"),
        ("strides", "_gemm_kernel: b_strides is"),
        ("strides", "_act_grad_kernel: dy_strides is"),
    ],
)
def test_what_a_launch_forgets_is_found(stub: Path, fault: str, says: str):
    assert any(says in each for each in _run(stub, "--few", "--fault", fault)["faults"])


def test_a_call_takes_few_steps_on_the_host(stub: Path):
    """Counts, which no machine changes. Python 3.12 makes fewer of these calls than 3.11, and torch has its own."""
    found = _run(stub, "--few")["calls"]
    assert {name: each["imports"] for name, each in found.items()} == dict.fromkeys(CALLS, 0)
    assert {name: each["calls"] for name, each in found.items() if each["calls"] > CALLS[name]} == {}


@pytest.mark.skipif(not SIDE, reason="there is no second Triton beside this one")
@pytest.mark.nightly(seconds=80)
@pytest.mark.parametrize("few", [True, False], ids=["few", "all"])
def test_the_other_triton(stub: Path, few: bool):
    """The oldest that is supported compiles a launcher for every signature."""
    found = _run(stub, *(["--few"] if few else []), triton=SIDE)
    assert found["triton"] != triton_version()
    assert found["faults"] == []
    assert found["counts"]["launches"] > (100 if few else 10_000)


# --- compiled ahead of time -------------------------------------------------------------------------------------------

TRITONS = [
    "",
    pytest.param(
        SIDE,
        marks=[
            pytest.mark.nightly(seconds=40),
            pytest.mark.skipif(not SIDE, reason="there is no second Triton beside this"),
        ],
    ),
]


@pytest.mark.parametrize("side", TRITONS, ids=["installed", "side"])
def test_what_is_compiled_ahead_is_not_compiled_again(stub: Path, tmp_path: Path, monkeypatch, side: str):
    """Each op's first build, carried into another cache; and the keys of all."""
    here, there, archive = tmp_path / "here", tmp_path / "there", tmp_path / "kernels.zip"
    monkeypatch.setenv("TRITON_CACHE_DIR", str(here))
    builds = [build for spec in registry.ops().values() for build in spec.builds("sm_90")[:1]]
    reports = codegen.compile_builds(builds, side_triton=side or None)
    assert [report.error for report in reports if report.error] == []
    monkeypatch.setattr(carried, "_triton", lambda: {"version": "", "key": "", "sources": ""})
    carried.pack(here, archive)
    shutil.rmtree(here)
    assert carried.unpack(archive, there).kernels == len(builds)
    found = _run(stub, "--compiled", triton=side, TRITON_CACHE_DIR=str(there))
    assert found["faults"] == []
    assert (found["counts"].get("compiled", 0), found["counts"]["found"]) == (0, len(builds))
    assert found["counts"]["builds"] > 10 * len(builds)
