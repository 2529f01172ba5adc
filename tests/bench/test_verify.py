"""``shardfuse bench verify`` accepts a right implementation and finds out every way to cheat that is planted here."""

from __future__ import annotations

import dataclasses
import json
import re
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from shardfuse.bench.harness import timing
from shardfuse.bench.harness.drawn import check_drawn
from shardfuse.bench.harness.implementation import Implementation, load
from shardfuse.bench.harness.verify import verify, verify_case
from shardfuse.kernels.dev import registry

CPU = torch.device("cpu")
SPEC = registry.op("dropout")
CASE = next(case for case in SPEC.cases if case.name == "r9-c40-fp32-p0.1-residual")
DOCUMENT = (Path(__file__).parents[2] / "docs" / "benchmarks.md").read_text()
STRANGER = re.search(r"```\n(import torch\n.*?)```", DOCUMENT, re.DOTALL)[1]  # type: ignore[index]


def _right(inputs: dict[str, Any], case: registry.Case) -> dict[str, torch.Tensor]:
    return SPEC.run(inputs, case, "reference")


def _wrong(inputs: dict[str, Any], case: registry.Case) -> dict[str, torch.Tensor]:
    outputs = _right(inputs, case)
    return outputs | {"y": outputs["y"] * 1.001}


def _zeros(inputs: dict[str, Any], case: registry.Case) -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(out) for name, out in _right(inputs, case).items()}


def _rounded(inputs: dict[str, Any], case: registry.Case) -> dict[str, torch.Tensor]:
    """Right for whole numbers only."""
    outputs = _right(inputs, case)
    return outputs | {"y": outputs["y"].round()}


def _half(inputs: dict[str, Any], case: registry.Case) -> dict[str, torch.Tensor]:
    """Lower precision, and the wider budget that would come with it."""
    return {name: out.bfloat16() for name, out in _right(inputs, case).items()}


def _shifting(inputs: dict[str, Any], case: registry.Case) -> dict[str, torch.Tensor]:
    outputs = _right(inputs, case)
    inputs["residual"].detach().add_(1)
    return outputs


def _unwritten(inputs: dict[str, Any], case: registry.Case) -> dict[str, torch.Tensor]:
    outputs = _right(inputs, case)
    y = torch.empty_like(outputs["y"])
    y[:-1] = outputs["y"][:-1]
    return outputs | {"y": y}


def _recycled(inputs: dict[str, Any], case: registry.Case) -> dict[str, torch.Tensor]:
    """Memory as it comes, in the hope that somebody left the right answer there."""
    return {name: torch.empty_like(out) for name, out in _right(inputs, case).items()}


def _forward_only(inputs: dict[str, Any], case: registry.Case) -> dict[str, torch.Tensor]:
    return {"y": _right(inputs, case)["y"]}


def _raising(inputs: dict[str, Any], case: registry.Case) -> dict[str, torch.Tensor]:
    raise NotImplementedError("odd sizes")


def _lazy(inputs: dict[str, Any], case: registry.Case) -> dict[str, torch.Tensor]:
    class Lazy(torch.Tensor):
        pass

    return {name: out.as_subclass(Lazy) for name, out in _right(inputs, case).items()}


def _replaying(key: Any) -> Any:
    kept: dict[Any, dict[str, torch.Tensor]] = {}

    def run(inputs: dict[str, Any], case: registry.Case) -> dict[str, torch.Tensor]:
        return kept.setdefault(key(inputs), {name: out.clone() for name, out in _right(inputs, case).items()})

    return run


def _one_buffer() -> Any:
    """Every call returns the same memory, so that a later one changes what an earlier one returned."""
    kept: dict[str, torch.Tensor] = {}

    def run(inputs: dict[str, Any], case: registry.Case) -> dict[str, torch.Tensor]:
        return {
            name: kept.setdefault(name, torch.empty_like(out)).copy_(out) for name, out in _right(inputs, case).items()
        }

    return run


CHEATS = {
    "wrong": (_wrong, "y", ""),
    "zeros": (_zeros, "y", ""),
    "whole numbers only": (_rounded, "y", ""),
    "lower precision": (_half, "y", "is torch.bfloat16, expected torch.float32"),
    "changed input": (_shifting, "residual", "this input was changed"),
    "unwritten elements": (_unwritten, "y", ""),
    "memory that others freed": (_recycled, "y", ""),
    "no gradients": (_forward_only, "dx", "not returned"),
    "an exception": (_raising, "run", "raised NotImplementedError: odd sizes"),
    "a subclass": (_lazy, "run", "expected a plain torch.Tensor"),
    "replayed by shape": (_replaying(lambda inputs: inputs["x"].shape), "y", ""),
    "replayed by address": (_replaying(lambda inputs: inputs["x"].data_ptr()), "y", ""),
    "one buffer for all calls": (_one_buffer(), "y", "the second run changed the first one's result"),
}


def _failed(run: Any, device: torch.device = CPU) -> dict[str, str]:
    implementation = Implementation("planted", run, foreign=True)
    return {each.name: each.why for each in verify_case(SPEC, CASE, implementation, device, 0) if not each.ok}


@pytest.mark.parametrize("cheat", CHEATS)
def test_a_cheat_is_found_out(cheat: str):
    run, name, why = CHEATS[cheat]
    failed = _failed(run)
    assert why in failed[name]


def test_a_right_implementation_passes_and_leaves_torch_as_it_was():
    assert _failed(_right) == {}
    assert not torch.are_deterministic_algorithms_enabled()


def test_an_element_that_is_never_written_holds_nan():
    """Even where the memory, recycled, would hold the right answer."""

    def run(inputs: dict[str, Any], case: registry.Case) -> dict[str, torch.Tensor]:
        found = torch.empty(4096)
        seen.append(bool(found.isnan().all()))
        return _right(inputs, case)

    seen: list[bool] = []
    _failed(run)
    assert seen[-1]


def test_work_left_to_another_thread_is_found_out():
    """Where there is no stream to leave it on: the answers arrive after the call has returned."""
    judged, late = threading.Event(), []

    def run(inputs: dict[str, Any], case: registry.Case) -> dict[str, torch.Tensor]:
        outputs = _right(inputs, case)
        empty = {name: torch.zeros_like(out) for name, out in outputs.items()}

        def write() -> None:
            judged.wait()
            for name, out in outputs.items():
                empty[name].copy_(out)

        late.append(threading.Thread(target=write))
        late[-1].start()
        return empty

    failed = _failed(run)
    judged.set()
    for thread in late:
        thread.join()
    assert "y" in failed


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x, seed: torch.zeros_like(x), "whole numbers only"),
        (lambda x, seed: x.round(), "whole numbers only"),
        (lambda x, seed: torch.linspace(0.1, 0.9, x.numel()).view_as(x), "the same numbers for every seed"),
    ],
    ids=["zeros", "integers", "one draw"],
)
def test_an_op_whose_inputs_prove_nothing_is_refused(change: Any, message: str):
    def make_inputs(case: registry.Case, device: torch.device, seed: int) -> dict[str, Any]:
        return {"x": change(torch.randn(8, 8, generator=torch.Generator().manual_seed(seed)), seed)}

    case = registry.Case("case", torch.float32, {"T": 8})
    spec = registry.OpSpec("planted", "", (case,), make_inputs, lambda inputs, case, impl: {"y": inputs["x"] * 2})
    with pytest.raises(ValueError, match=message):
        check_drawn(spec, case, CPU, 0)


@pytest.mark.parametrize("name", registry.ops())
def test_our_own_inputs_pass_that_check(name: str):
    spec = registry.op(name)
    for case in spec.tagged("test"):
        check_drawn(spec, case, CPU, 0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_work_left_on_another_stream_is_found_out():
    side = torch.cuda.Stream()

    def run(inputs: dict[str, Any], case: registry.Case) -> dict[str, torch.Tensor]:
        outputs = _right(inputs, case)
        late = {name: torch.empty_like(out) for name, out in outputs.items()}
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(100_000_000)
            for name, out in outputs.items():
                late[name].copy_(out)
                out.record_stream(side)
        return late

    assert _failed(run, torch.device("cuda"))


def test_an_implementation_that_replaces_the_clock_changes_no_timing(monkeypatch):
    import time

    def frozen() -> float:
        return 0.0

    monkeypatch.setattr(time, "perf_counter", frozen)
    ours, _ = timing.compare_fixed(lambda: sum(range(1000)), lambda: None, rounds=3, calls=3)
    assert ours.value > 0


@pytest.mark.parametrize("name", ["write_kv", "norm_rope_write_kv", "copy_blocks"])
def test_only_declared_inputs_may_change(name: str):
    spec, undeclared = registry.op(name), dataclasses.replace(registry.op(name), mutates=())
    run = load(spec, "reference")
    for case in spec.tagged("test")[:3]:
        assert all(each.ok for each in verify_case(spec, case, run, CPU, 7))
        assert not all(each.ok for each in verify_case(undeclared, case, run, CPU, 7))


def test_a_strangers_file_is_judged_and_its_defect_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "kernel.py"
    cases = ["t9-d80-fp32", "t33-d1-fp32-eps_0.5-residual_same"]
    for source, code in ((STRANGER, 0), (STRANGER.replace(".mean(", ".sum("), 1)):
        file.write_text(source)
        assert verify("rms_norm", f"{file}:norm", cases=cases, seed=3, device="cpu", json=True) == code
        said = json.loads(capsys.readouterr().out)
        assert said["ok"] == (code == 0)
        assert said["seed"] == 3
        assert {each["case"] for each in said["findings"]} == set(cases)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("no_such_op",), "no op called 'no_such_op'"),
        (("dropout", "fast"), "expected one of auto, triton, onednn, reference, rival:NAME, or PATH:NAME"),
        (("dropout", "missing.py:run"), "there is no file missing.py"),
        (("dropout", "{file}:other"), "defines no function other"),
        (("dropout", "{broken}:run"), "its import raised ZeroDivisionError"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_what_cannot_run_is_one_line_and_exit_code_2(arguments, message: str, tmp_path: Path, capsys):
    file, broken = tmp_path / "kernel.py", tmp_path / "broken.py"
    file.write_text("def run(inputs, case): ...\n")
    broken.write_text("1 / 0\n")
    assert verify(*(each.format(file=file, broken=broken) for each in arguments), device="cpu") == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in " ".join(error.split())


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_gpu_that_is_not_there_is_refused(capsys: pytest.CaptureFixture[str]):
    assert verify("dropout", device="cuda") == 2
    assert "no GPU that torch can use" in " ".join(capsys.readouterr().err.split())


def test_an_unknown_case_is_named_with_the_known_ones(capsys: pytest.CaptureFixture[str]):
    assert verify("dropout", cases=["r1"], device="cpu") == 2
    assert "no case called r1; it has r9-c40-fp32-p0.1-residual" in " ".join(capsys.readouterr().err.split())
