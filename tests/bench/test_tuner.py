"""The tuner: the launches that it finds, its gate, what it times, and the tables that it writes."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tuning_case import BF16, CPU, FP32, entry_of, look_up, shipped_tables, table_of

from shardfuse.bench import attention_workload, tune, workload
from shardfuse.bench.gpu.journal import Journal
from shardfuse.kernels.dev import registry
from shardfuse.kernels.linear import schemas
from shardfuse.kernels.linear.config import pick_config
from shardfuse.kernels.linear.gemm import Gemm, GemmConfig
from shardfuse.kernels.linear.tuned import OP, SOURCES, bucket
from shardfuse.kernels.paged_attention.config import AttentionConfig
from shardfuse.kernels.runtime import device, dispatch, tuning

interprets = pytest.mark.skipif(not dispatch.interpreting(), reason="kernels are not interpreted in this process")


@pytest.fixture
def shipped(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    with shipped_tables(tmp_path / "shipped") as write:
        yield write


# --- launches, as the tuner sees them ---------------------------------------------------------------------------------


def _calls(tag: str = "test", arch: str = device.INTERPRETER) -> list[workload.Call]:
    found: dict[str, workload.Call] = {}
    for name in workload.ops():
        spec = registry.op(name)
        for case in spec.tagged(tag):
            found |= {call.bucket: call for call in workload.calls(spec, case, CPU, arch)}
    return list(found.values())


@interprets
@pytest.mark.interpret
def test_every_op_that_multiplies_has_a_reference():
    """A new op in schemas.py is tuned too, or is known not to be a GEMM."""
    names = {op.name().partition("::")[2] for op in vars(schemas).values() if isinstance(op, torch._ops.OpOverload)}
    assert names - {"act_grad", "gated_act_grad"} == set(workload.REFERENCES)


@interprets
@pytest.mark.interpret
def test_launches_are_found_without_running_them(monkeypatch):
    monkeypatch.setattr(device, "launch", _fail_unless_meta(device.launch))
    calls = {call.bucket: call for call in _calls()}
    assert {"nt", "nn", "tn"} == {call.gemm.layout for call in calls.values()}
    forward = calls["nt-t64-n72-k40-fp32-bias-gelu_tanh-preact"]
    assert forward.gemm == Gemm(
        "nt", 33, 72, 40, FP32, FP32, epilogue=("bias", "gelu_tanh", "preact"), writes=2
    )  # fmt: skip
    assert "nt-t64-n72-k40-fp32-bias-gelu_tanh" in calls  # the same without a backward to come
    assert all(call.gemm.K for call in calls.values())


def _fail_unless_meta(launch: Any) -> Any:
    def checked(*args: Any, on: torch.Tensor, **options: Any) -> None:
        assert on.is_meta, "a kernel ran"
        launch(*args, on=on, **options)

    return checked


def _meta(*shape: int) -> torch.Tensor:
    return torch.empty(shape, device="meta")


# Arguments of every op that has a reference: T = 5, D = 33, F = 40.
ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "linear_act_fwd": (_meta(5, 33), [_meta(40, 33)], [_meta(40)], _meta(5, 40), "silu", True),
    "gated_linear_fwd": (_meta(5, 33), [_meta(40, 33), _meta(40, 33)], [None, _meta(40)], "gelu_tanh", True),
    "linear_dgrad": ([_meta(5, 40), _meta(5, 20)], [_meta(40, 33), _meta(20, 33)]),
    "linear_dgrad_act": (_meta(5, 33), _meta(33, 40), _meta(5, 40), "gelu_erf", True),
    "linear_dgrad_gated": (_meta(5, 33), _meta(33, 40), _meta(5, 40), _meta(5, 40), "silu", True),
    "linear_wgrad": ([_meta(5, 40), _meta(5, 20)], _meta(5, 33), [True, False]),
    "linear_wgrad_": ([_meta(5, 40)], _meta(5, 33), [_meta(40, 33)], [_meta(40)]),
}


@interprets
@pytest.mark.interpret
@pytest.mark.parametrize("op", workload.REFERENCES)
def test_every_launch_passes_its_gate_and_a_wrong_one_does_not(op):
    gemm = workload.gemm_of(op, ARGUMENTS[op], device.INTERPRETER)
    call = workload.Call(op, ARGUMENTS[op], gemm, bucket(gemm))
    config = pick_config(device.INTERPRETER, gemm)
    gate = tune._Gate(call, call.draw(CPU, 0))
    assert gate.faults(config) == ""
    for name in gate._oracle:  # each result is looked at: what it is compared with is moved away from it
        for side in (gate._low, gate._oracle):
            side[name].mul_(1.01)
        assert gate.faults(config).startswith(f"{name}: error")
        for side in (gate._low, gate._oracle):
            side[name].div_(1.01)


@interprets
@pytest.mark.interpret
def test_drawn_operands_have_the_launchs_own_strides():
    """x of the case whose columns are contiguous."""
    columns = next(
        call for call in _calls() if call.op == "linear_act_fwd" and call.args[0].stride() == (1, call.gemm.M)
    )
    drawn = columns.draw(CPU, 0)
    assert drawn[0].stride() == columns.args[0].stride()
    assert torch.equal(drawn[0], columns.draw(CPU, 0)[0])
    assert not torch.equal(drawn[0], columns.draw(CPU, 1)[0])


def test_arguments_cross_to_another_process():
    args = (torch.empty(3, 4, device="meta").t(), [torch.empty(2, dtype=BF16, device="meta"), None], "relu", True)
    there = workload._from_json(json.loads(json.dumps(workload._to_json(args))))
    assert workload._to_json(there) == workload._to_json(args)
    assert there[0].stride() == (1, 4)
    assert there[1][1] is None
    assert there[2:] == ("relu", True)


@pytest.mark.codegen
@pytest.mark.skipif(dispatch.triton_version() is None, reason="Triton is not installed")
def test_candidates_are_compiled_elsewhere_and_judged(monkeypatch):
    """What the tuner does before it times anything, for a GPU that is not there."""
    x, w, b = (torch.empty(*shape, dtype=BF16, device="meta") for shape in ((4096, 4096), (4096, 4096), (4096,)))
    args = (x, [w], [b], None, "gelu_tanh", True)
    gemm = workload.gemm_of("linear_act_fwd", args, "sm_90")
    call = workload.Call("linear_act_fwd", args, gemm, bucket(gemm))
    good = GemmConfig(128, 128, 64, 8, 3, use_tma=True)
    bad = GemmConfig(128, 256, 64, 4, 3, use_tma=True)  # 256 accumulators per thread
    case = next(each for each in registry.op("paged_attention").cases if each.name == "decode-llama8b-bf16")
    [tile] = attention_workload.calls(case, "sm_90")
    crowded = AttentionConfig(128, 128, 4, 3)
    pairs = [(call, good), (call, bad), (tile, tile.now("sm_90")), (tile, crowded)]
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    problems = dict(workload.compile_all(pairs, "sm_90", jobs=2))
    assert problems[0] is problems[2] is None
    assert "spills" in problems[1]
    assert "spills" in problems[3]


# --- the tuner --------------------------------------------------------------------------------------------------------

CASE = "t33-d40-f72-fp32-relu"


def _options(out: Path, **changes: Any) -> tune.Options:
    return tune.Options(**({"op": "linear_act", "cases": (CASE,), "out": out, "top": 3, "dry": True} | changes))


def _events(out: Path, event: str) -> list[dict[str, Any]]:
    lines = out.with_name(out.name + ".events.jsonl").read_text().splitlines()
    return [entry for entry in map(json.loads, lines) if entry["event"] == event]


@interprets
@pytest.mark.interpret
def test_a_dry_run_goes_the_whole_way(shipped, tmp_path, monkeypatch, capfd):
    out = tmp_path / "tuned.json"
    assert tune.tune(_options(out)) == 0
    table = tuning.read(out)
    keys = {
        "nt-t64-n72-k40-fp32-bias-relu-preact",
        "nt-t64-n72-k40-fp32-bias-relu",
        "nn-t64-n40-k72-fp32",
        "tn-t64-m72-n40-fp32-row_sum",
    }
    assert {entry.bucket for entry in table.entries} == keys
    assert all(entry.measured["tried"] == 3 and entry.stock_wins is None for entry in table.entries)
    assert {event["bucket"] for event in _events(out, "tried")} == keys
    shown = capfd.readouterr()
    assert all(key in shown.out for key in keys)
    assert "mean nothing" in shown.out
    assert "4 launches to tune for interpreter, 0 done before" in shown.err
    # The loader refuses it.
    monkeypatch.setenv(tuning.VARIABLE, str(out))
    tuning.forget()
    with pytest.raises(ValueError, match="written by a dry run"):
        look_up()
    monkeypatch.delenv(tuning.VARIABLE)
    tuning.forget()
    # And a second call has nothing left to do.
    tried = len(_events(out, "tried"))
    assert tune.tune(_options(out)) == 0
    assert len(_events(out, "tried")) == tried
    assert tuning.read(out).entries == table.entries


@interprets
@pytest.mark.interpret
def test_a_dry_run_tunes_the_tiles_of_paged_attention(shipped, tmp_path, capfd):
    """Into the table that holds GEMMs already."""
    out, op = tmp_path / "tuned.json", "paged_attention"
    assert tune.tune(_options(out)) == 0
    options = _options(out, op=op, cases=("decode-g3-h80-p16-fp16", "mixed-g4-h64-p128-bf16"), top=9)
    assert tune.tune(options) == 0
    table = tuning.read(out)
    [entry] = [entry for entry in table.entries if entry.op == op]
    assert len(table.entries) == 5
    assert set(table.sources) == {OP, op}
    assert not any(each.stale for each in table.entries)
    assert entry.bucket == "r4-h80-fp16"  # the other case's sequences run in two tiles
    assert entry.measured.keys() == {"us", "now_us", "tried"}
    assert tuning.config_of(entry, AttentionConfig).block_m == 4
    tried = [event["config"] for event in _events(out, "tried") if event["bucket"] == entry.bucket]
    assert len(tried) == entry.measured["tried"] - 1 == 3
    assert any(name.startswith("4x32") for name in tried)
    assert "r4-h80-fp16" in capfd.readouterr().out


@interprets
@pytest.mark.interpret
@pytest.mark.parametrize("rows", [4, 16])
def test_a_tile_passes_its_gate_in_every_size_and_a_wrong_one_does_not(rows):
    case = next(each for each in registry.op("paged_attention").cases if each.name == "decode-g8-h128-p32-bf16")
    [call] = attention_workload.calls(case, device.INTERPRETER)
    gate = tune._Gate(call, call.draw(CPU, 0))
    config = dataclasses.replace(call.now(device.INTERPRETER), block_m=rows)
    assert gate.faults(config) == ""
    for side in (gate._low, gate._oracle):
        side["out"].mul_(1.1)
    assert gate.faults(config).startswith("out: error")


@interprets
@pytest.mark.interpret
def test_a_stopped_run_goes_on_where_it_was(shipped, tmp_path, monkeypatch, capfd):
    out = tmp_path / "tuned.json"
    compare, calls = tune.compare, []

    def stop_at_the_second(*args: Any, **options: Any) -> Any:
        calls.append(args)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return compare(*args, **options)

    monkeypatch.setattr(tune, "compare", stop_at_the_second)
    assert tune.tune(_options(out)) == 130
    assert "the same command resumes" in capfd.readouterr().err
    first = _events(out, "tried")
    assert len(first) == 1
    assert tune.tune(_options(out)) == 0
    keys = [(event["bucket"], event["config"]) for event in _events(out, "tried")]
    assert len(keys) == len(set(keys)) == 8  # two candidates beside the usual one, four launches, none timed twice
    assert len(tuning.read(out).entries) == 4


@interprets
@pytest.mark.interpret
def test_what_took_the_process_down_is_not_tried_again(shipped, tmp_path):
    out = tmp_path / "tuned.json"
    calls = {call.bucket: call for call in _calls()}
    key = "nn-t64-n40-k72-fp32"
    candidate = calls[key].candidates(device.INTERPRETER)[1]
    journal = Journal(out.with_name(out.name + ".events.jsonl"))
    named = {"bucket": key, "config": tune.str_of(candidate), "source_hash": tuning.source_hash(SOURCES), "dry": True}
    journal.add("trying", **named)
    journal.close()
    assert tune.tune(_options(out)) == 0
    assert tune.str_of(candidate) not in {e["config"] for e in _events(out, "tried") if e["bucket"] == key}
    assert len([e for e in _events(out, "tried") if e["bucket"] == key]) == 1


@interprets
@pytest.mark.interpret
def test_a_wrong_candidate_is_refused_and_a_wrong_kernel_is_not_tuned(shipped, tmp_path, monkeypatch, capfd):
    right = workload.Call.__call__

    def wrong_where(spoils: Any) -> Any:
        def call(self: workload.Call, args: Any) -> Any:
            out = right(self, args)
            if self.op == "linear_dgrad" and spoils(pick_config(device.INTERPRETER, self.gemm)):
                out["0"].mul_(1.5)
            return out

        return call

    key = "nn-t64-n40-k72-fp32"
    monkeypatch.setattr(workload.Call, "__call__", wrong_where(lambda config: config.block_m == 16))
    out = tmp_path / "candidates.json"
    assert tune.tune(_options(out)) == 0
    refused = _events(out, "refused")
    assert {event["bucket"] for event in refused} == {key}
    assert all("> budget" in event["why"] for event in refused)
    [entry] = [entry for entry in tuning.read(out).entries if entry.bucket == key]
    assert entry.config["block_m"] == 32

    monkeypatch.setattr(workload.Call, "__call__", wrong_where(lambda config: True))
    out = tmp_path / "kernel.json"
    assert tune.tune(_options(out)) == 1
    assert key not in {entry.bucket for entry in tuning.read(out).entries}
    assert "> budget" in capfd.readouterr().err


@interprets
@pytest.mark.interpret
def test_the_fastest_wins_and_a_faster_stock_path_is_named(shipped, tmp_path, monkeypatch):
    """With invented times: what is chosen, and what is claimed."""
    out = tmp_path / "tuned.json"

    def invented(ours: Any, peer: Any, *args: Any, **options: Any) -> Any:
        def us(side: Any) -> float:
            if side[0].func is not tune._run_forced:
                return 6.0  # the stock path
            return 5.0 if side[0].args[1].block_m == 16 and side[0].args[1].split_k == 2 else 9.0

        return tune.Timing(us(ours), 0.01), tune.Timing(us(peer), 0.01)

    monkeypatch.setattr(tune, "compare", invented)
    assert tune.tune(_options(out, top=9)) == 0
    for entry in tuning.read(out).entries:
        assert (entry.config["block_m"], entry.config["split_k"]) == (16, 2)
        assert (entry.measured["us"], entry.measured["now_us"], entry.measured["stock_us"]) == (5.0, 9.0, 6.0)
    run = tune.Run(_options(tmp_path / "claims.json"), tune.console(stderr=True))
    run.options = dataclasses.replace(run.options, dry=False)
    now = pick_config(device.INTERPRETER, run.calls[0].gemm)
    entry = run._entry(run.calls[0], [run.calls[0].draw(CPU, 0)], now, {})
    assert GemmConfig(**entry.config) == now
    assert entry.stock_wins == "plain torch took 6.0 us where the kernel took 9.0 us"
    assert entry.source.startswith("claims.json: bench tune at commit ")
    run.journal.close()


@interprets
@pytest.mark.interpret
def test_what_the_compiler_refuses_is_not_timed(shipped, tmp_path, monkeypatch, capfd):
    """As on a GPU, where candidates are compiled first; with an invented compiler."""
    out = tmp_path / "tuned.json"
    run = tune.Run(_options(out), tune.console(stderr=True))
    run.options = dataclasses.replace(run.options, dry=False)
    run.journal.close()
    run.journal = Journal(tmp_path / "tuned.json.events.jsonl")
    asked: list[tuple[str, GemmConfig]] = []

    def invented(pairs: Any, arch: str, jobs: int | None) -> Any:
        asked.extend((call.bucket, config) for call, config in pairs)
        yield from ((i, "spills: 9 instructions" if i % 2 else None) for i in range(len(pairs)))

    monkeypatch.setattr(workload, "compile_all", invented)
    ready = run._compile(run.calls, until=float("inf"))
    assert [(key, config) for key, configs in ready.items() for config in configs] == asked[::2]
    assert {event["why"] for event in _events(out, "refused")} == {"spills: 9 instructions"}
    assert "spills: 9 instructions" in capfd.readouterr().err
    # What was refused is not compiled again; launches whose candidates were not all compiled in time wait.
    kept = asked[::2]
    asked.clear()
    assert run._compile(run.calls, until=0.0) == {kept[0][0]: [kept[0][1]]}
    assert asked == kept
    run.journal.close()


@interprets
@pytest.mark.interpret
def test_time_that_runs_out_keeps_what_is_done(shipped, tmp_path, monkeypatch, capfd):
    out = tmp_path / "tuned.json"
    clock = iter(range(0, 10_000))
    monkeypatch.setattr(tune.time, "monotonic", lambda: float(next(clock)))
    assert tune.tune(_options(out, budget_s=5)) == 0
    assert "out of time" in capfd.readouterr().err
    assert len(tuning.read(out).entries) < 4
    monkeypatch.undo()
    assert tune.tune(_options(out)) == 0
    assert len(tuning.read(out).entries) == 4


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"op": "nonesuch"}, "no op called 'nonesuch'"),
        ({"op": "rms_norm", "cases": ()}, "nothing to tune: no GEMM"),
        ({"op": "paged_attention", "cases": ("decode-g1-h32-p4-fp32",)}, "nothing to tune: no GEMM and no tile"),
        ({"cases": ("nonesuch",)}, "linear_act has no case and no tag called 'nonesuch'"),
        ({"top": 0}, "top=0: expected at least 1"),
        ({"budget_s": 0}, "budget=0: expected seconds"),
    ],
    ids=str,
)
@interprets
@pytest.mark.interpret
def test_questions_that_make_no_sense(shipped, tmp_path, changes, complaint, capfd):
    assert tune.tune(_options(tmp_path / "tuned.json", **changes)) == 2
    assert complaint in " ".join(capfd.readouterr().err.split())
    assert not (tmp_path / "tuned.json").exists()


@interprets
@pytest.mark.interpret
def test_a_dry_run_leaves_measurements_alone(shipped, tmp_path, capfd):
    out = tmp_path / "tuned.json"
    content = json.dumps(table_of(entry_of()))
    out.write_text(content)
    assert tune.tune(_options(out)) == 2
    assert "holds measurements for sm_90: choose another file with --out" in " ".join(capfd.readouterr().err.split())
    assert out.read_text() == content


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_there_is_nothing_to_tune(tmp_path, capfd):
    assert tune.tune(_options(tmp_path / "tuned.json", dry=False)) == 2
    assert "no GPU that torch can use; --dry does the same" in " ".join(capfd.readouterr().err.split())


def test_other_ranks_leave_it_to_rank_0(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("RANK", "1")
    assert tune.tune(_options(tmp_path / "tuned.json")) == 0
    assert "rank 0 tunes" in capfd.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.nightly
@pytest.mark.interpret
@pytest.mark.skipif(dispatch.triton_version() is None, reason="Triton is not installed")
def test_the_command_interprets_by_itself(tmp_path):
    """From a shell: no TRITON_INTERPRET is needed."""
    env = {name: value for name, value in os.environ.items() if name not in ("TRITON_INTERPRET", tuning.VARIABLE)}
    out = tmp_path / "tuned.json"
    command = ["bench", "tune", "linear_act", "--cases", "t1-d64-f96-bf16-silu", "--out", str(out), "--top", "1"]
    done = subprocess.run(
        [sys.executable, "-m", "shardfuse", *command, "--dry"], env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert "tuned for interpreter" in done.stdout
    assert tuning.read(out).dry
