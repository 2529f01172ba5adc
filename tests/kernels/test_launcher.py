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
    "linear_act": 48,
    "linear_act, forward": 57,  # these and those with autograd: one more than under torch 2.13
    "linear_act, forward + backward": 172,
    "mlp": 127,
    "mlp, forward": 118,
    "mlp, forward + backward": 225,
    "fused norm": 59,
    "fused norm, forward": 66,
    "fused norm, forward + backward": 143,
    "fused mlp": 102,
    "fused mlp, forward": 115,
    "fused mlp, forward + backward": 222,
    "eager step of ParallelTransformer": 9900,  # of 16 layers; this and the next with 8 sequences
    "replayed step": 320,
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


@pytest.fixture(scope="module")
def few(stub: Path) -> dict[str, Any]:
    return _run(stub, "--few")


def test_a_call_takes_few_steps_on_the_host(few: dict[str, Any]):
    """Counts, which no machine changes. Python 3.12 makes fewer of these calls than 3.11, and torch has its own."""
    found = few["calls"]
    assert {name: each["imports"] for name, each in found.items()} == dict.fromkeys(CALLS, 0)
    assert {name: each["calls"] for name, each in found.items() if each["calls"] > CALLS[name]} == {}


def test_a_graph_could_hold_a_fused_module(few: dict[str, Any]):
    """Forward and backward launch, and neither load a kernel nor read a tensor's values."""
    assert {name for name in few["captured"] if "backward" in name} >= {"mlp, forward + backward"}
    for name, found in few["captured"].items():
        assert len(found) == 1, (name, found)
        assert found[0].startswith("launches "), (name, found)
        assert found[0] != "launches 0", name


@pytest.mark.skipif(not SIDE, reason="there is no second Triton beside this one")
@pytest.mark.nightly(seconds=80)
@pytest.mark.parametrize("few", [True, False], ids=["few", "all"])
def test_the_other_triton(stub: Path, few: bool):
    """The oldest that is supported compiles a launcher for every signature."""
    found = _run(stub, *(["--few"] if few else []), triton=SIDE)
    assert found["triton"] != triton_version()
    assert found["faults"] == []
    assert found["counts"]["launches"] > (100 if few else 10_000)


# --- compilations -----------------------------------------------------------------------------------------------------

# The most kernels that Triton compiles for 100 numbers of tokens in one kind of call, and why it is more than one.
MOST = {
    **dict.fromkeys(("_norm_fwd_kernel", "_norm_bwd_kernel", "_norm_bwd_wide_kernel", "_norm_params_kernel"), 1),
    **dict.fromkeys(("_norm_sum_kernel", "_write_kv_kernel", "_copy_blocks_kernel", "_act_grad_kernel"), 1),
    **dict.fromkeys(("_statistics_kernel", "_plan_kernel"), 1),
    "_rope_kernel": 4,  # forward and backward, one token and several
    # Forward with the residual, backward without; one row, rows that 16 divides (in fewer registers), and others.
    "_dropout_kernel": 6,
    "_gemm_kernel": 12,  # three products, whose tiles and parts of K follow from the tokens
    "_split_sum_kernel": 2,  # of outputs in two dtypes
    "_amax_kernel": 2,  # rows that 16 divides, and others
    "_cast_kernel": 9,  # likewise; two formats, x and x^T, with and without a history
    "_cast_rows_kernel": 8,
    "_push_kernel": 2,  # with and without a history
    "_paged_attention_fwd_kernel": 2,  # tiles of few queries, and of many
    "_merge_kernel": 2,
    "_gradient_kernel": 2,  # a block of the vocabulary, and the last one
}
# For 100 vocabularies: blocks of four lengths (products: what TMA takes and does not) and what divides rows, 16 to 1.
MOST_WORDS = MOST | {"_statistics_kernel": 8, "_gradient_kernel": 20, "_gemm_kernel": 16}


def _many_lengths(*options: str, triton: str = "") -> dict[str, Any]:
    environment = {
        name: value for name, value in os.environ.items() if name not in ("TRITON_INTERPRET", "SHARDFUSE_POISON")
    }
    if triton:
        environment["PYTHONPATH"] = os.pathsep.join([triton, environment.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    command = [sys.executable, str(SUPPORT / "many_lengths.py"), *options]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert found["lengths"] == 100
    assert all(count >= 100 for count in found["launches"].values())
    return found


def _too_many(found: dict[str, Any]) -> list[str]:
    return [
        f"{kind}: {count} of {kernel}"
        for kind, kernels in found["kernels"].items()
        for kernel, count in kernels.items()
        if count > (MOST_WORDS if kind.startswith("words") else MOST)[kernel]
    ]


@pytest.mark.parametrize(
    "side",
    [
        "",
        pytest.param(
            SIDE,
            marks=[
                pytest.mark.nightly(seconds=20),
                pytest.mark.skipif(not SIDE, reason="there is no second Triton beside this"),
            ],
        ),
    ],
    ids=["installed", "side"],
)
def test_a_hundred_lengths_take_few_kernels(side: str):
    """Of every op with a kernel but those that communicate, whose kernels are the norms' and products'."""
    found = _many_lengths(triton=side)
    assert _too_many(found) == []
    assert {kernel for kernels in found["kernels"].values() for kernel in kernels} == set(MOST)


@pytest.mark.nightly(seconds=6)
@pytest.mark.parametrize("fault", ["specialised", "constant"])
def test_a_length_that_is_compiled_in_is_found(fault: str):
    kinds = ("rms_norm", "rope", "write_kv", "linear_act", "fp8 by tensor", "prefill", "loss again")
    wrong = _too_many(_many_lengths("--fault", fault, "--only", *kinds))
    assert {line.partition(":")[0] for line in wrong} == set(kinds)
    if fault == "constant":
        assert "rms_norm: 100 of _norm_fwd_kernel" in wrong


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
