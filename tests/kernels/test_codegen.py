"""Every shipped configuration compiles ahead of time and its machine code is fit to ship; and the check can fail."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from shardfuse.kernels.dev import codegen, codegen_report, inspection, registry, runs
from shardfuse.kernels.dev.codegen import Report, problems
from shardfuse.kernels.runtime import dispatch, fences
from shardfuse.kernels.runtime.chips import CHIPS

needs_triton = pytest.mark.skipif(dispatch.triton_version() is None, reason="Triton is not installed")

SIDE_TRITON = os.environ.get("SHARDFUSE_SIDE_TRITON") or None
SUPPORT = Path(__file__).parents[1] / "support"
CONSTRAINTS = Path(__file__).parents[2].joinpath("constraints.txt").read_text().split()
# Every n-th build of an op for a target: a sixth of those of the one that is tuned first, a few of the others, fewer
# under the side Triton.
# `make codegen-all` compiles the rest, and test_the_record_is_whole looks for what it wrote.
STEPS = {"sm_80": 32, "sm_86": 32, "sm_89": 32, "sm_90": 6, "sm_100": 32, "sm_120": 32, "gfx942": 32}
SIDE_STEPS = {"sm_80": 48, "sm_86": 96, "sm_89": 96, "sm_90": 12, "sm_100": 48, "sm_120": 96, "gfx942": 48}
# On these a block has less shared memory than on sm_80, which tiles of attention feel; other kernels are sm_80's.
SMALLER = {"sm_86", "sm_89", "sm_120"}
# Configurations are chosen by what the compilers of the record make of them. Another one allocates registers otherwise,
# and may spill a few where those just did not: a hundredth of the instructions.
RECORDED = {path.stem.removeprefix("triton-") for path in codegen_report.FOLDER.glob("triton-*.json")}
FEW_SPILLS = 8, 100  # this many in any case, and one for so many instructions
# Without both of them, what fences.py has compiled would show nothing.
PROBED = ["cp.async.wait_group", "wgmma.mma_async"]
MOST_BUILDS = 200  # compiled by the installed Triton here


def _sample(steps: dict[str, int]) -> list[registry.Build]:
    return [build for op, target in OPS_AND_TARGETS for build in registry.op(op).builds(target)[:: steps[target]]]


# fp8 has no kernels where the chip has no e4m3.
OPS_AND_TARGETS = [
    (op, target)
    for op, spec in registry.ops().items()
    for target in registry.TARGETS
    if (target not in SMALLER or op in ("paged_attention", "scaled_linear")) and spec.builds(target)
]


def _by_op_and_target(reports: list[Report]) -> dict[tuple[str, str], list[Report]]:
    grouped: dict[tuple[str, str], list[Report]] = {}
    for report in reports:
        grouped.setdefault((report.op, report.target), []).append(report)
    return grouped


@pytest.fixture(scope="module")
def installed() -> dict[tuple[str, str], list[Report]]:
    """Reports of STEPS' share of the builds, compiled by the installed Triton."""
    builds = _sample(STEPS)
    assert len(builds) <= MOST_BUILDS
    return _by_op_and_target(codegen.compile_builds(builds))


@pytest.fixture(scope="module")
def side() -> dict[tuple[str, str], list[Report]]:
    """Reports of a share of the builds, compiled by the other Triton."""
    if SIDE_TRITON is None:
        pytest.skip("SHARDFUSE_SIDE_TRITON does not name a folder with another Triton (make test sets it)")
    with fences.assumed(False):  # of the lowest Triton, which lacks them: it is given other tiles
        builds = _sample(SIDE_STEPS)
    return _by_op_and_target(codegen.compile_builds(builds, side_triton=SIDE_TRITON))


def _faults(reports: list[Report]) -> str:
    return "\n".join(f"{report.config}: {problem}" for report in reports for problem in problems(_judged(report)))


def _judged(report: Report) -> Report:
    some, share = FEW_SPILLS
    if report.triton in RECORDED or report.spills > max(some, report.instructions // share):
        return report
    return dataclasses.replace(report, spills=0)


@pytest.mark.codegen
@needs_triton
@pytest.mark.parametrize(("op", "target"), OPS_AND_TARGETS)
def test_every_build_is_fit_to_ship(installed, op, target):
    assert installed[op, target]
    assert not _faults(installed[op, target])
    assert {report.triton for report in installed[op, target]} == {dispatch.triton_version()}


@pytest.mark.codegen
@needs_triton
@pytest.mark.parametrize(("op", "target"), OPS_AND_TARGETS)
def test_builds_are_fit_to_ship_under_the_other_triton(side, op, target):
    assert side[op, target]
    assert not _faults(side[op, target])
    assert dispatch.triton_version() not in {report.triton for report in side[op, target]}


@pytest.mark.codegen
@needs_triton
def test_the_sample_is_as_recorded(installed):
    """What is read off machine code today is what the record says: its rows do not name the reader that made them."""
    version = str(dispatch.triton_version())
    rows = codegen_report.read(version)
    if not rows:
        pytest.skip(f"no record is kept of Triton {version}")
    for report in (report for reports in installed.values() for report in reports):
        row = report.row()
        found = json.loads(json.dumps([row[column] for column in codegen_report._COLUMNS]))
        assert found == rows[f"{report.op} {report.target} {report.config}"][1:], f"{report.config} on {report.target}"


@pytest.mark.codegen
@needs_triton
@pytest.mark.parametrize("where", ["installed", "side"])
def test_the_record_is_whole(where):
    """All builds, those that no test compiles too, stand in the committed record, compiled from today's sources."""
    if where == "side" and SIDE_TRITON is None:
        pytest.skip("SHARDFUSE_SIDE_TRITON does not name a folder with another Triton (make test sets it)")
    version = str(dispatch.triton_version())
    if where == "installed" and f"triton=={version}" not in CONSTRAINTS and not codegen_report.path(version).exists():
        pytest.skip(f"no record is kept of Triton {version}, only of the pinned one and of the lowest")
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    if where == "side":
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [SIDE_TRITON, env.get("PYTHONPATH")]))
    command = [sys.executable, "-m", "shardfuse.kernels.dev.codegen_report", "--check"]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, f"run `make codegen` and commit what it writes:\n{done.stdout}{done.stderr}"


TWO_OF_A_NAME = """
import dataclasses
from shardfuse.kernels.dev import codegen, registry

spec = registry.op("dropout")
build = spec.builds("sm_90")[0]
odd = {name: value + 1 if isinstance(value, int) and value > 16 else value for name, value in build.args.items()}
for changes in ({}, {"num_warps": 2 * build.num_warps}, {"args": odd}):
    launched = [build, dataclasses.replace(build, **changes)]
    registry.op = lambda name: dataclasses.replace(spec, launched=lambda target: launched)
    try:
        print(len(codegen._builds_by_config.__wrapped__("dropout", "sm_90")))
    except ValueError as error:
        print(error)
"""


@needs_triton
def test_builds_that_differ_have_names_of_their_own():
    """The second of a name would be compiled nowhere. Not in this process, which interprets its kernels."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", TWO_OF_A_NAME], env=env, capture_output=True, text=True, check=True)
    same, *different = done.stdout.splitlines()
    assert same == "1"
    assert len(different) == 2, done.stdout
    assert all("has two different builds called" in line and "name them apart" in line for line in different)


@needs_triton
def test_a_record_with_other_columns_is_stale(monkeypatch, tmp_path):
    record = {"triton": "1.2.3", "columns": ["source_hash", "registers"], "builds": {"op sm_90 c": ["0" * 16, 40]}}
    (tmp_path / "triton-1.2.3.json").write_text(json.dumps(record))
    monkeypatch.setattr(codegen_report, "FOLDER", tmp_path)
    monkeypatch.setattr(codegen_report, "builds", lambda: iter(()))
    columns, gone = codegen_report.stale("1.2.3")
    assert columns.startswith("its columns are registers: registers, spills, ")
    assert gone == "op sm_90 c is no build any more"


@needs_triton
def test_only_what_changed_is_compiled(monkeypatch, tmp_path, capsys):
    builds = {build.config: build for build in registry.op("rms_norm").builds("sm_90")}
    hashes = dict.fromkeys(builds, "0" * 16)
    compiled: list[str] = []
    spills: dict[str, int] = {}

    def compile_them(wanted, jobs, console):
        compiled[:] = [build.config for build in wanted]
        return [
            Report(
                *(build.op, build.config, build.target),
                registers=40, blocks_per_sm=2, spills=spills.get(build.config, 0), exempt=build.exempt,
            )
            for build in wanted
        ]  # fmt: skip

    monkeypatch.setattr(runs, "EXCUSES", ())
    monkeypatch.setattr(codegen_report, "FOLDER", tmp_path)
    monkeypatch.setattr(codegen_report, "builds", lambda: iter(builds.values()))
    monkeypatch.setattr(codegen_report, "source_hash", lambda build: hashes[build.config])
    monkeypatch.setattr(codegen, "compile_with_progress", compile_them)
    monkeypatch.setattr(codegen, "require_compiler", lambda: None)
    one, other, *_ = builds
    assert (codegen_report.main(["--write"]), compiled) == (0, list(builds))
    assert (codegen_report.main(["--write"]), compiled) == (0, [])
    hashes[one] = "1" * 16
    assert (codegen_report.main(["--write"]), compiled) == (0, [one])
    builds[other] = dataclasses.replace(builds[other], exempt="a reason")
    assert (codegen_report.main(["--write"]), compiled) == (0, [other])
    hashes[one], spills[one] = "2" * 16, 3
    for _ in range(2):  # what is unfit does not get into the record
        assert (codegen_report.main(["--write"]), compiled) == (1, [one])
        assert f"rms_norm sm_90 {one}: spills: 3 instructions" in capsys.readouterr().out
    assert (codegen_report.main(["--write", "--everything"]), compiled) == (1, list(builds))
    del builds[one]
    assert (codegen_report.main(["--write"]), compiled) == (0, [])
    assert codegen_report.main(["--check"]) == 0


@needs_triton
def test_an_excuse_that_no_record_needs_is_red(monkeypatch, tmp_path):
    """What one version's record needs stays; loops survive the file, where each is said once."""
    narrow = _EXCUSED._replace(bits=64)
    for version, found in ("1.0", [list(narrow)]), ("2.0", []):
        row = Report("linear_act", "c", "gfx942", loops=["outside: a", "loop 1: b", "loop 1: b"], narrow=found).row()
        rows = {"linear_act gfx942 c": ["0" * 16, *(row[column] for column in codegen_report._COLUMNS)]}
        (tmp_path / f"triton-{version}.json").write_text(codegen_report._as_text(version, rows))
    monkeypatch.setattr(codegen_report, "FOLDER", tmp_path)
    assert codegen_report.read("1.0")["linear_act gfx942 c"][codegen_report._LOOPS] == row["loops"]
    needed, other = (each for each in runs.EXCUSES if each.build == "gfx")
    monkeypatch.setattr(runs, "EXCUSES", (needed,))
    assert codegen_report.unneeded() == []
    monkeypatch.setattr(codegen_report, "builds", lambda: iter(()))
    assert not any("narrow accesses" in line for line in codegen_report.stale("1.0"))
    monkeypatch.setattr(runs, "EXCUSES", ())  # one that is needed is gone
    assert any(f"narrow accesses: {narrow}" in line for line in codegen_report.stale("1.0"))
    monkeypatch.setattr(runs, "EXCUSES", (needed, other))
    [line] = codegen_report.unneeded()
    assert line.startswith("_paged_attention_fwd_kernel is excused from wide accesses to out_ptr|part_ptr in gfx")
    assert line in codegen_report.stale("1.0")
    (tmp_path / "triton-0.9.json").write_text('{"triton": "0.9", "columns": ["source_hash", "registers"]}')
    assert codegen_report.unneeded() == []  # of other columns: nothing is known


@needs_triton
@pytest.mark.parametrize("target", registry.TARGETS)
def test_paged_attention_has_to_pipeline(target):
    """Every build that attends, on NVIDIA's chips; of products only those are excused that convert their cache."""
    builds = [build for build in registry.op("paged_attention").builds(target) if "q_ptr" in build.args]
    assert builds
    assert {build.wants_copies for build in builds} == {target.startswith("sm_")}
    excused = [build for build in builds if build.unpipelined is not None]
    assert all(build.args["k_ptr"].dtype != build.args["q_ptr"].dtype for build in excused)


@pytest.mark.codegen
@needs_triton
def test_hopper_gemms_use_its_units(installed):
    """Not everything may hide behind an exemption."""
    gemms = [
        report
        for report in installed["linear_act", "sm_90"]
        if report.wants_wgmma and "bf16" in report.config and "tma" in report.config
    ]
    assert gemms
    assert {(report.wgmma, report.tma, report.exempt) for report in gemms} == {(True, True, None)}


@pytest.mark.codegen
@needs_triton
def test_activations_cost_few_instructions():
    """On the largest tile, under the GPU runs' compiler: all instructions against those with the plain epilogue."""
    if SIDE_TRITON is None:
        pytest.skip("SHARDFUSE_SIDE_TRITON does not name a folder with another Triton (make test sets it)")
    named = {build.config: build for build in registry.op("linear_act").builds("sm_90")}
    builds = [named[f"fwd-128x256x64-w8-s4-tma-bf16{act}-bias"] for act in ("", "-gelu_tanh", "-gelu_erf")]
    plain, tanh, erf = codegen.compile_builds(builds, side_triton=SIDE_TRITON)
    assert plain.instructions > 1000
    assert tanh.instructions <= 1.6 * plain.instructions
    assert erf.instructions <= 2.2 * plain.instructions
    elements = 128 * 256 // (32 * plain.num_warps)  # of a thread; the epilogue has no second copy for them
    assert tanh.instructions - plain.instructions <= 8 * elements
    assert erf.instructions - plain.instructions <= 12 * elements


@pytest.fixture(scope="module")
def samples() -> dict[str, tuple[Report, list[str]]]:
    """What codegen says of kernels made to be faulted, by configuration."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = SUPPORT / "codegen_samples.py"
    done = subprocess.run([sys.executable, str(script)], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    named = json.loads(done.stdout)
    assert named.pop("fenced")["sm_90"] is fences.fenced("sm_90")  # what is compiled, and what the version says
    assert named.pop("probed") == PROBED
    return {name: (Report(**report), found) for name, (report, found) in named.items()}


@pytest.mark.codegen
@needs_triton
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("good", []),
        ("spills", ["spills", "every matrix product"]),
        ("too-much-shared", ["shared memory"]),
        ("short-blocks", ["without wgmma"]),
        ("pointers", ["without TMA"]),
        ("exempt", []),
        ("old-chip", []),
        ("blackwell", []),
        ("blackwell-waits", ["every matrix product"]),
        ("spills-on-amd", ["spills", "could store 128 of c_ptr"]),  # the excuse is for shipped kernels
        ("prefill", []),
        ("prefill-waits", ["a loop waits for every copy"]),
        ("prefill-excused", ["is excused from pipelining (no reason) but pipelines"]),
        ("over-fp8", []),
        ("over-fp8-unexcused", ["every matrix product"]),
        ("copy", []),
        ("copy-narrow", ["of 16 bits at codegen_samples.py", "could store 128 of y_ptr"]),
        ("copy-of-odd-rows", []),
        ("copy-on-amd", []),
        ("copy-narrow-on-amd", ["of 32 bits at codegen_samples.py", "could store 128 of y_ptr"]),
        ("gated", []),
        ("gated-unexcused", ["every matrix product"]),
        ("row-sum", []),
        ("row-sum-not-reloaded", ["copies go to where a product under way still reads"]),
    ],
)
def test_faulty_kernels_are_found_out(samples, name, expected):
    if name.startswith(("prefill", "over-fp8")) and not fences.fenced("sm_90"):
        pytest.skip("this Triton leaves out the fences that the sample needs")
    report, found = samples[name]
    assert len(found) == len(expected), found
    assert all(words in problem for words, problem in zip(expected, found))
    assert 0 < report.registers <= CHIPS[report.target].registers_per_thread
    local = [loop for loop in report.loops if loop.startswith("loop") and "local load" in loop]
    assert bool(local) is name.startswith("spills")


@pytest.mark.codegen
@needs_triton
def test_the_lowest_triton_is_not_given_what_it_leaves_unfenced():
    """The tile that the others run prefill in, compiled by it, is found out; the fence is looked for, not a version."""
    if SIDE_TRITON is None:
        pytest.skip("SHARDFUSE_SIDE_TRITON does not name a folder with another Triton (make test sets it)")
    asked = "prefill"
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [SIDE_TRITON, env.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, str(SUPPORT / "codegen_samples.py"), asked], env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    report, problems_found = found[asked]
    assert report["triton"] != dispatch.triton_version()
    assert report["unfenced"] > 0
    assert any("without fence.proxy.async" in problem for problem in problems_found)
    assert found["fenced"] == {"sm_80": True, "sm_90": False}
    assert found["probed"] == PROBED


@pytest.mark.codegen
@needs_triton
def test_a_good_kernel_reads_as_it_was_written(samples):
    report, _ = samples["good"]
    # Three stages of 128x64 and 128x64 bf16 tiles, and a few barriers.
    assert 3 * 2 * 128 * 64 * 2 <= report.shared_bytes < 3 * 2 * 128 * 64 * 2 + 1024
    assert (report.wgmma, report.tma, report.num_warps, report.spills) == (True, True, 8, 0)


@pytest.mark.codegen
@needs_triton
def test_a_build_that_cannot_be_made_becomes_a_report(capsys):
    build = registry.op("linear_act").builds("sm_90")[0]
    unknown = dataclasses.replace(build, config="nonesuch")
    [report] = codegen.compile_builds([unknown, unknown])
    assert "nonesuch" in report.error
    assert problems(report) == [f"does not compile: {report.error}"]
    assert report.row() == {
        "op": "linear_act", "config": "nonesuch", "target": "sm_90", "registers": None, "spills": None,
        "shared_bytes": None, "instructions": None, "wgmma": None, "tma": None, "occupancy": None,
        "copies_pending": None, "wgmma_pending": None, "products_pending": None, "overwrites": None,
        "unfenced": None, "loops": None,
        "narrow": None, "exempt": None, "unpipelined": None, "gemm": None, "flops": None, "bytes": None,
        "waves": None, "predicted_us": None, "peak_share": None, "bound": None,
    }  # fmt: skip


@pytest.mark.codegen
@needs_triton
def test_inspect_ends_with_one_line_of_json(installed, capfd):
    assert inspection.inspect("rms_norm", "sm_90", json=True) == 0
    out, err = capfd.readouterr()
    rows = json.loads(out)
    assert out.count("\n") == 1
    assert len(rows) == len(registry.op("rms_norm").builds("sm_90"))
    assert all(report.row() in rows for report in installed["rms_norm", "sm_90"])
    assert all(tuple(row) == codegen.FIELDS for row in rows)
    assert f"{len(rows)} builds, no problems" in err


_NARROW = runs.Narrow("_kernel", "x_ptr", "load", 16, 128, 4, "triton.py:29")
_EXCUSED = runs.Narrow("_gemm_kernel", "target_ptrs.1", "store", 64, 128, 4, "tiles.py:63")
_SPILLED = Report("linear_act", "fwd-128", "sm_90", registers=255, spills=46, shared_bytes=1024, blocks_per_sm=1)
_BROKEN = Report("linear_act", "fwd-256", "sm_90", error="CompilationError: no")
_MODELLED = Report(
    "linear_act", "fwd-64", "sm_90", registers=90, shared_bytes=232448, blocks_per_sm=1, occupancy=0.25,
    wgmma=True, wants_wgmma=True, wgmma_pending=1, gemm="nt 16x64x32", flops=65536, bytes=9216, waves=1,
    predicted_us=3.25, peak_share=0.5, bound="memory",
)  # fmt: skip


@pytest.fixture
def compiled(monkeypatch):
    """compiled(report, ...): the reports that inspect gets in place of compiling."""

    def put(*reports: Report) -> None:
        def compile_builds(builds, *, jobs, on_report):
            for report in reports:
                on_report(report)
            return list(reports)

        monkeypatch.setattr(codegen, "compile_builds", compile_builds)

    return put


@needs_triton
def test_inspect_prints_a_table_and_fails_on_problems(compiled, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "160")
    compiled(_SPILLED, _BROKEN)
    assert inspection.inspect("linear_act", "sm_90", verbose=True) == 1
    out, err = capsys.readouterr()
    assert "linear_act on sm_90 (NVIDIA H100)" in out
    assert _line_with("linear_act on sm_90", out).split()[3:6] == ["2", "2", "0"]  # builds, unfit ones, exemptions
    cells = out[out.index("(NVIDIA H100)") :]
    assert _line_with("fwd-128", cells).split()[:4] == ["fwd-128", "255", "46", "1.0"]
    assert "failed" in _line_with("fwd-256", cells)
    assert "linear_act fwd-128 on sm_90: spills: 46 instructions" in err
    assert "linear_act fwd-256 on sm_90: does not compile: CompilationError: no" in err
    assert "2 builds, 2 problems" in err


@needs_triton
def test_inspect_begins_with_ten_lines(compiled, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "160")
    compiled(_SPILLED, _BROKEN, _MODELLED)
    assert inspection.inspect("linear_act", "sm_90") == 1
    out, err = capsys.readouterr()
    summary, _, table = out.partition("\n\n")
    lines = [line.split(maxsplit=1) for line in summary.splitlines() if line.strip()]
    assert len(lines) <= 10
    said = " ".join(out.split())
    for line in (
        "kernels 3 of linear_act, for sm_90",
        "verdict 2 unfit to ship; what fails: spills (1), compilation (1)",
        "registers 255 of 255 per thread at most: fwd-128; 46 spills at most: fwd-128",
        "shared memory 227.0 of 227.0 KiB per block at most: fwd-64",
        "matrix units wgmma in 1 of 1 that multiply matrices on sm_90; 0 exempt; 1 of 1 loops",
        "prediction 50% of peak; slowest 3.2 us, nt 16x64x32, bound by memory: fwd-64 (modelled, not measured)",
    ):
        assert line in said
    assert "fwd-256" not in table  # --verbose lists every kernel
    assert "--verbose lists every kernel" in err


@needs_triton
def test_every_problem_belongs_to_a_budget():
    wants = {"wants_wgmma": True, "wants_tma": True, "wants_copies": True}
    faults = (
        _SPILLED, _BROKEN,
        Report("linear_act", "a", "sm_90", shared_bytes=1 << 20),
        Report("linear_act", "b", "sm_90", registers=255),
        Report("linear_act", "c", "sm_90", blocks_per_sm=1, **wants),
        Report("linear_act", "d", "sm_90", blocks_per_sm=1, exempt="of wgmma", wgmma=True, wants_wgmma=True),
        Report("linear_act", "e", "sm_90", blocks_per_sm=1, unpipelined="it waits"),
        dataclasses.replace(_MODELLED, wgmma_pending=0),
        dataclasses.replace(_MODELLED, unfenced=2, overwrites=1),
        dataclasses.replace(_MODELLED, narrow=[_NARROW]),
    )  # fmt: skip
    said = inspection._verdict(faults)
    assert said.startswith("10 unfit to ship; what fails: ")
    assert set(said.partition("fails: ")[2].split(", ")) == {
        *("pipelining (2)", "exemptions (2)", "spills (1)", "compilation (1)", "shared memory (1)", "registers (1)"),
        *("wgmma (1)", "TMA (1)", "races (2)", "narrow accesses (1)"),
    }


@needs_triton
@pytest.mark.parametrize("columns", [60, 80, 120])
def test_inspect_fits_the_terminal(compiled, monkeypatch, capsys, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    compiled(_SPILLED, _BROKEN, _MODELLED)
    inspection.inspect("linear_act", "sm_90", verbose=True)
    out, _ = capsys.readouterr()
    assert max(map(len, out.splitlines())) <= columns
    assert all(word in out for word in ("fwd-128", "fwd-256", "fwd-64", "227.0", "nt 16x64x32", "failed"))


def _line_with(words: str, text: str) -> str:
    return next(line for line in text.splitlines() if words in line)


@needs_triton
@pytest.mark.parametrize(
    ("question", "complaint"),
    [
        ({"op": "nonesuch"}, "no op called 'nonesuch': known are all_gather_linear, all_reduce_rmsnorm, copy_blocks"),
        ({"op": "linear_act", "target": "sm_91"}, "no target called 'sm_91': known are sm_80, sm_86"),
        ({}, "name one op (all_gather_linear, all_reduce_rmsnorm, copy_blocks"),
        ({"op": "linear_act", "all_ops": True}, "name one op (all_gather_linear, all_reduce_rmsnorm, copy_blocks"),
        ({"op": "linear_act", "jobs": 0}, "jobs=0: expected at least 1"),
    ],
)
def test_inspect_refuses_what_makes_no_sense(question, complaint, capsys):
    assert inspection.inspect(**question) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"error: {complaint}")
    assert err.count("\n") == 1


def test_inspect_without_triton_says_what_to_do(monkeypatch, capsys):
    monkeypatch.setattr(dispatch, "triton_version", lambda: None)
    assert inspection.inspect("linear_act") == 2
    assert "pip install triton" in capsys.readouterr().err


_TCGEN05 = {"target": "sm_100", "wgmma": False, "wgmma_pending": None}


def test_a_process_that_interprets_does_not_compile(monkeypatch):
    monkeypatch.setattr(dispatch, "triton_version", lambda: "3.7.1")
    monkeypatch.setattr(dispatch, "interpreting", lambda: True)
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET is set"):
        codegen.require_compiler()


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, []),
        ({"wgmma": False}, ["without wgmma"]),
        ({"tma": False}, ["without TMA"]),
        ({"wgmma": False, "tma": False}, ["without wgmma", "without TMA"]),
        ({"tma": False, "exempt": "rows of 66 bytes"}, []),
        ({"tma": False, "exempt": "rows of 66 bytes", "spills": 1}, ["spills"]),  # no exemption covers spills
        ({"exempt": "rows of 66 bytes"}, ["needs no exemption"]),  # excuses do not outlive their reason
        ({"target": "sm_80", "wgmma": False, "tma": False}, []),
        ({"shared_bytes": 227 * 1024}, []),
        ({"shared_bytes": 227 * 1024 + 1}, ["shared memory"]),
        ({"blocks_per_sm": 0}, ["no block fits"]),
        ({"error": "no"}, ["does not compile"]),
        ({"wants_copies": True}, ["waits for every copy"]),
        ({"wants_copies": True, "copies_pending": 0, "target": "sm_80"}, ["waits for every copy"]),
        ({"wants_copies": True, "copies_pending": 4}, []),
        ({"wants_copies": True, "copies_pending": 0, "unpipelined": "a reason"}, ["every copy", "but pipelines"]),
        ({"gemm": "nt 8x8x8", "wgmma_pending": 0}, ["every matrix product"]),
        ({"gemm": "nt 8x8x8", "wgmma_pending": 1}, []),
        ({"gemm": "nt 8x8x8", "wgmma_pending": 0, "tma": False, "exempt": "rows of 66 bytes"}, []),
        ({"overwrites": 1}, ["races: 1 copies"]),
        ({"unfenced": 36, "overwrites": 3, "target": "sm_100"}, ["races: 3 copies", "races: 36 asynchronous"]),
        ({"wgmma_pending": 0}, ["every matrix product"]),
        ({"wgmma_pending": 0, "unpipelined": "a reason"}, []),
        ({"wgmma_pending": None}, ["every matrix product"]),  # no loop was found around them
        ({"wgmma_pending": None, "wgmma": False, "exempt": "rows of 66 bytes"}, []),
        ({"wgmma_pending": 1, "unpipelined": "a reason"}, ["but pipelines"]),
        ({"wgmma_pending": 0, "products_pending": 1}, ["every matrix product"]),  # ptxas waits where Triton does not
        ({**_TCGEN05, "products_pending": 0}, ["every matrix product"]),
        ({**_TCGEN05, "products_pending": 0, "unpipelined": "a reason"}, []),
        ({**_TCGEN05, "products_pending": 2}, []),
        ({**_TCGEN05, "products_pending": 2, "unpipelined": "a reason"}, ["but pipelines"]),
        ({**_TCGEN05, "products_pending": None, "unpipelined": "a reason"}, ["but pipelines"]),  # other instructions
        (
            {"narrow": [_NARROW]},
            ["narrow accesses: 4 of 16 bits at triton.py:29, where a thread of _kernel could load 128 of x_ptr"],
        ),
        ({"narrow": [_EXCUSED], "target": "gfx942"}, []),
        ({"narrow": [_EXCUSED]}, ["narrow accesses"]),  # excused on other chips only
        ({"narrow": [_EXCUSED._replace(bits=32)], "target": "gfx942"}, ["narrow accesses"]),  # narrower yet
    ],
)
def test_problems(changes, expected):
    fine = Report(
        *("op", "config", "sm_90"),
        wgmma=True, tma=True, blocks_per_sm=1, wants_wgmma=True, wants_tma=True, wgmma_pending=1,
    )  # fmt: skip
    found = problems(dataclasses.replace(fine, **changes))
    assert len(found) == len(expected), found
    assert all(words in problem for words, problem in zip(expected, found))
