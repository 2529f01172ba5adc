"""Rivals: each is found, or skipped with its reason, and passes the gate before it is timed."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import rival_stand_ins
import torch
from typer.testing import CliRunner

from shardfuse.bench.harness import rivals
from shardfuse.bench.harness.compare import compare_implementations
from shardfuse.bench.harness.implementation import load, of_rival
from shardfuse.bench.harness.ops import find_op
from shardfuse.bench.harness.rivals import Rival, built_in, find_rival, listed
from shardfuse.bench.harness.verify import split, verify, verify_case
from shardfuse.bench.rivals import liger
from shardfuse.cli import app
from shardfuse.kernels.dev import registry

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
TORCH = importlib.metadata.version("torch")  # as its wheel says, which may leave out the build
DOCUMENT = (Path(__file__).parents[2] / "docs" / "benchmarks.md").read_text()
PROGRAM = re.search(r"```\n(import torch\nfrom shardfuse.*?)```", DOCUMENT, re.DOTALL)[1]  # type: ignore[index]


def _run(inputs: dict[str, Any], case: registry.Case) -> dict[str, torch.Tensor]:
    return registry.op("dropout").run(inputs, case, "reference")


def _rival(name: str, op: str) -> Rival:
    (found,) = (each for each in built_in() if (each.name, each.op) == (name, op))
    return found


def test_ligers_llama_leaves_others_as_they_were(monkeypatch: pytest.MonkeyPatch):
    """Liger replaces the rotation in the module of Llama's code, whichever model it is told to patch."""
    code = pytest.importorskip("transformers.models.llama.modeling_llama")
    stock, rotated = code.apply_rotary_pos_emb, []

    def apply_liger_kernel_to_llama(model: Any) -> None:
        rotate = lambda *args, **options: rotated.append(model) or stock(*args, **options)
        monkeypatch.setattr(code, "apply_rotary_pos_emb", rotate)

    name = "liger_kernel.transformers"
    rival_stand_ins.install(monkeypatch, name, apply_liger_kernel_to_llama=apply_liger_kernel_to_llama)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1}
    theirs, other = (code.LlamaForCausalLM(code.LlamaConfig(vocab_size=16, **sizes)) for _ in range(2))
    call, tokens = liger.llama(theirs), torch.arange(4)[None]
    other(tokens)
    assert code.apply_rotary_pos_emb is stock
    assert rotated == []
    call(tokens)
    assert code.apply_rotary_pos_emb is stock
    assert rotated == [theirs]


# --- found or skipped -------------------------------------------------------------------------------------------------


def test_every_built_in_rival_is_of_an_op_and_has_a_name_of_its_own():
    keys = [(each.op, each.name) for each in built_in()]
    assert len(set(keys)) == len(keys)
    assert {op for op, _ in keys} <= registry.ops().keys()


@pytest.mark.parametrize(
    ("change", "device", "reason"),
    [
        ({}, CPU, ""),
        ({"package": "no_such_package", "distribution": "no-such"}, CPU, "no-such is not installed"),
        ({"least": "99.1"}, CPU, f"torch is {TORCH}, expected 99.1 or newer"),
        ({"least": "1.10"}, CPU, ""),  # 2.x is newer than 1.10 only if they are compared as numbers
        ({"devices": ("cuda",)}, CPU, "needs the device cuda, not cpu"),
        ({"lacks": lambda device: f"no compiler for {device}"}, CPU, "no compiler for cpu"),
    ],
)
def test_a_rival_is_found_or_says_what_is_missing(change: dict[str, Any], device: torch.device, reason: str):
    rival = dataclasses.replace(Rival("planted", "dropout", _run), **change)
    assert rival.missing(device) == reason


def test_compile_needs_a_compiler_on_a_cpu(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert "no no-such-compiler" in _rival("compile", "rms_norm").missing(CPU)


def test_a_rival_has_one_way_to_run():
    with pytest.raises(ValueError, match="expected one of run and prepare"):
        Rival("planted", "dropout")


# --- where they come from ---------------------------------------------------------------------------------------------


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """An installed package that brings a rival, the same once more, something else, an op, and a broken entry point."""
    (tmp_path / "planted_rivals.py").write_text(
        "from shardfuse.bench.harness.rivals import Rival\n"
        "from shardfuse.kernels.dev import registry\n"
        "run = lambda inputs, case: registry.op('dropout').run(inputs, case, 'reference')\n"
        "ONE, AGAIN = Rival('planted', 'dropout', run), Rival('planted', 'dropout', run)\n"
        "OTHER = 3\n"
        "import dataclasses\n"
        "OP = dataclasses.replace(registry.op('dropout'), name='planted_op')\n"
    )
    folder = tmp_path / "planted_rivals-2.1.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: planted-rivals\nVersion: 2.1\n")
    (folder / "entry_points.txt").write_text(
        "[shardfuse.rivals]\na = planted_rivals:ONE\nb = planted_rivals:AGAIN\nc = planted_rivals:OTHER\n"
        "d = no_such_module:RIVAL\n[shardfuse.ops]\na = planted_rivals:OP\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "planted_rivals", raising=False)
    return "planted-rivals"


def test_entry_points_bring_rivals_and_ops_and_broken_ones_are_named(package: str):
    planted = [each for each in listed() if each.source.startswith(package)]
    assert planted[0].broken == ""
    assert planted[1].broken == "planted-rivals (planted_rivals:ONE) has a rival of this name, too"
    assert planted[2].broken == "is a int, expected a Rival"
    assert planted[3].broken.startswith("its import raised ModuleNotFoundError")
    assert find_rival("dropout", "planted", CPU) is planted[0].rival
    assert find_op("planted_op").name == "planted_op"


def test_the_list_shows_what_is_here_and_why_the_rest_is_not(package: str, capsys: pytest.CaptureFixture[str]):
    result = CliRunner().invoke(app, ["bench", "rivals", "rms_norm", "--device", "cpu", "--json"])
    assert result.exit_code == 0
    lines = {each["name"]: each for each in json.loads(result.stdout)["rivals"] if each["op"]}
    assert lines["eager"] == {
        "op": "rms_norm",
        "name": "eager",
        "version": TORCH,
        "source": "built in",
        "why": "",
    }
    assert lines["liger"]["why"]
    assert "planted" not in lines  # of another op
    table = CliRunner().invoke(app, ["bench", "rivals", "--device", "cpu"]).stdout
    assert "planted" in table
    assert "skipped:" in table


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["rms_norm", "--impl", "rival:fast"], "rms_norm has no such rival; it has eager, compile"),
        (["rms_norm", "--impl", "rival:liger", "--device", "cpu"], "`shardfuse bench rivals rms_norm` lists those"),
        (["paged_attention", "--impl", "rival:sdpa", "--case", "decode-g1-h32-p4-fp32"], "has no answer to the case"),
        (["dropout", "--impl", "rival:a", "--rival", "missing.py:A"], "there is no file missing.py"),
        (["dropout", "--impl", "rival:a", "--rival", "{file}:run"], "is a function, expected a Rival"),
        (["{file}:run"], "is a function, expected a shardfuse.kernels.dev.registry.OpSpec"),
    ],
)
def test_what_cannot_run_is_one_line_and_exit_code_2(arguments: list[str], message: str, tmp_path: Path):
    file = tmp_path / "kernel.py"
    file.write_text("def run(inputs, case): ...\n")
    given = [each.format(file=file) for each in arguments]
    result = CliRunner().invoke(app, ["bench", "verify", "--device", "cpu", *given])
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())


# --- a user's own -----------------------------------------------------------------------------------------------------


def test_the_documented_program_brings_an_op_and_a_rival(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "softmax.py"
    rivals, case = [f"{file}:RIVAL"], "t300-d33-fp32"
    for source, right in ((PROGRAM, True), (PROGRAM.replace(".exp()", ".exp2()"), False)):
        file.write_text(source)
        code = verify(f"{file}:OP", "rival:exp", rivals=rivals, device="cpu", seed=3, json=True)
        said = json.loads(capsys.readouterr().out)
        assert (code, said["impl"], said["ok"]) == (not right, "rival:exp", right)
        (row,) = compare_implementations(f"{file}:OP", "impl:reference", "rival:exp", [case], CPU, 0, rivals=rivals)
        assert row.key == ("softmax", case)
        assert (row.verdict == "refused") == (not right)


def test_only_the_prepared_call_is_timed(monkeypatch: pytest.MonkeyPatch):
    prepared: list[str] = []
    called: list[str] = []

    def prepare(inputs: dict[str, Any], case: registry.Case) -> rivals.Prepared:
        prepared.append(case.name)
        return rivals.Prepared(lambda: called.append(case.name) or _run(inputs, case), lambda found: found)

    case = "r9-c40-fp32-p0.1-residual"
    planted = Rival("prepared", "dropout", prepare=prepare)
    monkeypatch.setattr(rivals, "built_in", lambda: (planted,))
    (row,) = compare_implementations("dropout", "impl:reference", "rival:prepared", [case], CPU, 0)
    assert row.verdict != "refused"
    assert len(prepared) == 3  # twice by the gate, once for the timing
    assert len(called) > 20


# --- the built-in ones ------------------------------------------------------------------------------------------------


def _judged(rival: Rival, names: tuple[str, ...] = ()) -> set[str]:
    """The names of the cases of tests that the rival takes; fails unless the gate is green on each."""
    spec = registry.op(rival.op)
    cases = [case for case in spec.tagged("test") if not names or case.name in names]
    taken, _ = split(cases, of_rival(rival), named=False)
    findings = [each for case in taken for each in verify_case(spec, case, of_rival(rival), CPU, 5)]
    assert [each for each in findings if not each.ok] == []
    return {case.name for case in taken}


@pytest.mark.parametrize("op", ["rms_norm", "layer_norm", "rope", "linear_act", "gated_linear"])
def test_eager_is_right_wherever_it_has_an_answer(op: str):
    assert len(_judged(_rival("eager", op))) >= 7


@pytest.mark.parametrize("name", ["sdpa", "sdpa-flash", "sdpa-math"])
def test_sdpa_is_right_on_dense_steps(name: str):
    assert _judged(_rival(name, "paged_attention")) == {"prefill-g1-h64-p1-fp16", "prefill-g4-h80-p4-fp32"}


@pytest.mark.nightly
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
@pytest.mark.parametrize(
    ("name", "op", "case"),
    [
        ("compile", "rms_norm", "t6-d1000-bf16-residual_same"),
        ("compile", "rope", "t6-n4-k2-h16-bf16-interleaved-fused"),
        ("compile", "gated_linear", "t33-d40-f72-fp32-silu-bias"),
        ("flex", "paged_attention", "prefill-g4-h80-p4-fp32"),
    ],
)
def test_compiled_rivals_are_right(name: str, op: str, case: str):
    assert _judged(_rival(name, op), (case,)) == {case}


@pytest.mark.parametrize(
    ("library", "op", "least"),
    [
        ("liger", "rms_norm", 7),
        ("liger", "layer_norm", 3),
        ("liger", "gated_linear", 6),
        ("quack", "rms_norm", 7),
        ("flashinfer", "paged_attention", 9),
        ("vllm", "paged_attention", 9),
        ("sglang", "paged_attention", 9),
    ],
)
def test_adapters_pass_their_arguments_as_the_libraries_name_them(
    library: str, op: str, least: int, monkeypatch: pytest.MonkeyPatch
):
    getattr(rival_stand_ins, library)(monkeypatch)
    assert len(_judged(_rival(library, op))) >= least


def test_ligers_rotation_leaves_the_gradients_as_they_were(monkeypatch: pytest.MonkeyPatch):
    """Liger rotates in place, forward and backward. The tests have no such case of halves: one of pairs becomes it."""
    rival_stand_ins.liger(monkeypatch)
    spec = registry.op("rope")
    name = "b2-s4-n4-k2-h16-fp16-p12-interleaved-inplace"
    (interleaved,) = (case for case in spec.tagged("test") if case.name == name)
    halves = dataclasses.replace(interleaved, options={**interleaved.options, "interleaved": False})
    rival = _rival("liger", "rope")
    assert rival.refuses(interleaved)
    assert not rival.refuses(halves)
    assert [each for each in verify_case(spec, halves, of_rival(rival), CPU, 5) if not each.ok] == []


def test_loading_a_rival_without_a_device_takes_a_cpu():
    assert load(registry.op("rms_norm"), "rival:eager").name == "rival:eager"
