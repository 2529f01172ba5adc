"""What the documents say is so: their Python runs, their commands, targets, files and variables exist."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import shardfuse
from shardfuse.bench.gpu import plan
from shardfuse.bench.harness import stale
from shardfuse.bench.page import front
from shardfuse.cli import app
from shardfuse.kernels.linear.config import pick_config
from shardfuse.kernels.linear.gemm import Gemm
from shardfuse.kernels.runtime import cost
from shardfuse.kernels.runtime.chips import CHIPS
from shardfuse.parallel.overlap import link_model, link_profile
from shardfuse.parallel.overlap.link_model import GATHER, SCATTER, Call
from shardfuse.testing import save_tiny_hf

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
REFERENCE = (ROOT / "docs" / "reference.md").read_text()
PICTURE = (ROOT / "docs" / "overview.svg").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
SMALL = {
    **{"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4},
    "vocab_size": 256,
}
FLOORS = ("kernels", "parallel", "layers", "training", "serving", "integrations", "bench", "shardfuse")


@pytest.mark.parametrize("source", EXAMPLES, ids=range(len(EXAMPLES)))
def test_examples_run(source, tmp_path, monkeypatch, capsys):
    if "transformers" in source:
        transformers = pytest.importorskip("transformers")
        config = transformers.LlamaConfig(**SMALL)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "my-model")
    if "instruct-model" in source:
        pytest.importorskip("transformers")
        save_tiny_hf(tmp_path / "instruct-model", dtype=torch.float32)
    (tmp_path / "example.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    runpy.run_path("example.py", run_name="__main__")
    assert capsys.readouterr().out


@pytest.mark.ranks
def test_the_example_of_layers_gives_the_same_loss_over_two_processes(tmp_path):
    (tmp_path / "example.py").write_text(next(source for source in EXAMPLES if "ParallelMLP" in source))
    (alone,) = _losses([sys.executable, "example.py"], tmp_path)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    together = _losses([*torchrun, "example.py"], tmp_path)
    assert together == pytest.approx([alone, alone], abs=1.5e-4)  # the last digit that it prints, give or take one


LIMIT_S = 240.0  # for a process to import torch and train five steps, on a machine that is busy with other things
STUCK_S = 180.0  # a process that has not ended by then writes down where it stands
GRACE_S = 40.0  # for torchrun to end its workers: it gives them 30
# Python runs this in every process before anything else: torchrun's own and its workers' too.
WATCH = """
import faulthandler, os, sys
_file = open(os.path.join({folder!r}, f"standing-{{os.getpid()}}"), "w")
print("----", *sys.orig_argv, file=_file, flush=True)
faulthandler.dump_traceback_later({seconds}, file=_file)
"""


def _losses(command: list[str], folder: Path) -> list[float]:
    """What each process printed last as its loss. Fails with each one's stack where they do not come to an end."""
    (folder / "sitecustomize.py").write_text(WATCH.format(folder=str(folder), seconds=STUCK_S))
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    with subprocess.Popen(
        command,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            out, errors = process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            errors = _ended(process)
            pytest.fail(f"{command} did not end within {LIMIT_S:.0f} s\n{_standing(folder)}\nits errors:\n{errors}")
        except BaseException:
            process.terminate()
            raise
    assert process.returncode == 0, errors
    # torchrun's workers do not buffer: a text and its newline are two writes, and another's text may come between.
    return [float(loss) for loss in re.findall(r"loss (\d+\.\d{4})", out)]


def _ended(process: subprocess.Popen[str]) -> str:
    """End ``process`` and what it started; what it wrote to its standard error."""
    process.terminate()  # not kill: torchrun ends its workers when it is asked to stop
    try:
        return process.communicate(timeout=GRACE_S)[1]
    except subprocess.TimeoutExpired:
        process.kill()
        return "(it did not stop when it was asked to, or somebody else holds its pipes)"


def _standing(folder: Path) -> str:
    """The stacks that ``WATCH`` had processes write. One of which only the command is there was not stuck in Python."""
    return "\n".join(file.read_text() for file in sorted(folder.glob("standing-*")))


@pytest.mark.parametrize(("document", "lines"), front.DOCUMENTS.items(), ids=front.DOCUMENTS)
def test_the_results_are_those_of_the_committed_files(document, lines):
    text = (ROOT / document).read_text()
    assert front.renewed(text, lines(front.read_all([]))) == text, "run make front"


@pytest.mark.parametrize("document", ["README.md", "docs/comparison.md", "docs/cpu.md", "docs/server.md"])
def test_who_speaks_of_vllms_speed_says_both_figures_and_the_processor(document):
    assert front.beside_vllm(front.read_all([])) in " ".join((ROOT / document).read_text().split())


def _record(folder: Path, bench: str, case: str, metric: str, peers: dict[str, float], **origin: str) -> None:
    """File a result of an H200 below ``folder``, with rows of which ours took 100 us."""
    record = json.loads((stale.RESULTS / "nvidia-h200" / "linear_act.json").read_text())
    kept = record["rows"][0] | {"case": case, "metric": metric, "ours": 100.0}
    rows = [kept | {"peer_name": peer, "peer": us, "ratio": us / 100} for peer, us in peers.items()]
    (folder / "nvidia-h200").mkdir(exist_ok=True)
    file = folder / "nvidia-h200" / f"{bench}.json"
    file.write_text(
        json.dumps(record | {"bench": bench, "rows": rows, "sources": {}, "origin": record["origin"] | origin})
    )


def test_a_gpus_rows_take_the_place_of_the_sentence_that_there_are_none(tmp_path):
    """The training step's too, though no GPU has measured it yet."""
    on_cpus = [result for result in front.read_all([]) if not result.absolute]
    before = " ".join(front.first_screen(on_cpus, results=tmp_path))
    assert "[Counted](docs/fuse.md#what-it-gains-and-costs), not timed: no GPU has run this yet." in before
    assert "H200" not in before
    step, decode, product = front.FRONT
    (_, key), *_ = step.rows
    peers = [peer for _, (*_, peer) in step.rows]
    _record(tmp_path, *key[:2], f"{key[2]}, us", dict(zip(peers, (120.0, 110.0, 90.0), strict=True)))
    (copy, key), (flash, _) = decode.rows
    _record(tmp_path, *key[:3], {key[3]: 91.0})
    found = front.read_all([], results=tmp_path)
    after = "\n".join(front.first_screen(found, results=tmp_path))
    assert f"| {step.what} | 1.2 x stock; 1.1 x `torch.compile`; 0.9 x Liger |" in after
    assert f"| {decode.what} | 0.91 x {copy}; {flash}: not measured yet |" in after
    assert f"| {product.what} | beside {product.rows[0][0]}; eager torch: not measured yet |" in after
    assert "no GPU has run this" not in after
    assert "device time, before later changes to this code." in after
    _record(tmp_path, *decode.rows[1][1][:3], {decode.rows[1][1][3]: 110.0}, date="2031-05-01T00:00:00+00:00")
    later = front.first_screen(front.read_all([], results=tmp_path), results=tmp_path)
    assert "| in bf16 | speed on one NVIDIA H200, 2026-11-28 to 2031-05-01 |" in later


def test_the_training_step_is_a_headline_of_a_gpu_run():
    for _, (bench, case, metric, peer) in front.FRONT[0].rows:
        assert (bench, case, f"{metric}, us", peer) in plan.HEADLINES


def test_a_result_that_no_file_holds_is_refused():
    with pytest.raises(LookupError, match="no result that may be shown"):
        front.table([])


def test_a_document_without_the_marks_is_refused():
    with pytest.raises(ValueError, match="expected one"):
        front.renewed("# shardfuse\n", ["| a |"])


def test_the_first_screen_is_one():
    first, mark, rest = README.partition("<!-- end of the first screen -->\n")
    assert mark
    assert rest
    assert len(first.rstrip().splitlines()) <= 60
    assert max(len(line) for line in first.splitlines() if "|" not in line) <= 120
    scan = json.loads((ROOT / "tests" / "layers" / "model_scan.json").read_text())
    classes = sum(len(names) for names in scan.values() if isinstance(names, dict))
    assert f"{len(scan['fused'])} of transformers' {classes} causal language models completely" in first


def test_the_picture_is_what_its_script_draws():
    drawn = runpy.run_path(str(ROOT / "docs" / "overview.py"))["picture"]()
    assert drawn == PICTURE, "run make front"
    assert not re.search(r"(href|src)=|url\((?!#)", drawn)  # it loads nothing


def test_the_pictures_times_are_predictions_of_the_cost_model():
    tokens, width, hidden, ranks, bf16 = 8192, 4096, 16384, 2, torch.bfloat16
    profile = link_profile.shipped("sm_90")
    up = Call(GATHER, tokens, width, hidden // ranks, bf16, ranks)
    down = Call(SCATTER, tokens, hidden // ranks, width, bf16, ranks)
    gemm = Gemm("nt", tokens, hidden // ranks, width, bf16, bf16)
    gelu = cost.pass_bytes(cost.PASSES["forward"], tokens, hidden // ranks) / CHIPS["sm_90"].bandwidth
    plain, kernel = (
        sum(link_model.predict(profile, "node", call, kind).total_s for call in (up, down))
        for kind in ("plain", "kernel")
    )
    stock, kernel = plain + gelu, kernel + 0.0625 * link_model.gemm_seconds(profile, tokens, up)
    first_s = cost.predict(CHIPS["sm_90"], gemm, pick_config("sm_90", gemm)).time_us * 1e-6
    for seconds in (first_s, stock, kernel, stock - kernel):
        assert f">{seconds * 1e6:,.0f} µs<" in PICTURE
    assert f">GeLU {gelu * 1e6:,.0f} µs" in PICTURE
    assert f">{stock / kernel:.2f}\N{MULTIPLICATION SIGN}<" in PICTURE
    assert re.search("predicted by the project's cost model, not measured", PICTURE, re.IGNORECASE)


def test_the_first_example_is_short():
    assert len([line for line in EXAMPLES[0].splitlines() if line.strip()]) <= 20


def test_every_make_target_exists():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)) | {"test-LANE"}
    mentioned = set(re.findall(r"`make ([a-zA-Z-]+)", README)) | set(
        re.findall(r"^\$ make ([a-z-]+)", README, re.MULTILINE)
    )
    assert {"demo", "test"} <= mentioned <= targets


def test_every_command_is_in_the_table():
    import typer.main

    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    groups = [name for name, command in commands.items() if hasattr(command, "commands")]
    expected = commands.keys() - set(groups)
    expected |= {f"{group} {name}" for group in groups for name in commands[group].commands}
    mentioned = set(re.findall(rf"^\| `shardfuse ((?:(?:{'|'.join(groups)}) )?[a-z]+)", REFERENCE, re.MULTILINE))
    assert mentioned == expected


def test_every_public_name_is_mentioned():
    names = set(shardfuse.__all__) - {"__version__"}
    assert not {name for name in names if f"`{name}`" not in REFERENCE}


def test_every_variable_is_in_the_table():
    sources = [file.read_text() for floor in (*FLOORS, "src") for file in (ROOT / floor).rglob("*.py")]
    sources.append((ROOT / "Makefile").read_text())
    used = set(re.findall(r"SHARDFUSE_[A-Z_]*[A-Z]", "\n".join(sources)))
    rows = re.findall(r"^\| (`SHARDFUSE_.*?) \|", REFERENCE, re.MULTILINE)
    listed = set(re.findall(r"`(SHARDFUSE_[A-Z_]+)`", "\n".join(rows)))
    assert used == listed


@pytest.mark.parametrize("document", ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "SECURITY.md"])
def test_every_file_that_is_named_exists(document):
    text = (ROOT / document).read_text()
    named = set(re.findall(rf"`((?:{'|'.join((*FLOORS, 'tests'))})/[\w./]*)[ `]", text))
    named |= set(re.findall(r"\]\(([\w./]+)\)", text))
    assert named
    missing = {name for name in named if not (ROOT / name).exists()}
    assert missing <= {"bench/results/"}  # comes with the first run on a GPU
