"""Data, configuration, schedule, gradient clipping, and the loop over one rank and two."""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shardfuse import TransformerConfig
from shardfuse.parallel.checkpoint.checkpoint import full_state_dict
from shardfuse.parallel.core.mesh import init_mesh
from shardfuse.parallel.core.sharding import local_tensor
from shardfuse.parallel.zero.clip import GradientClipper
from shardfuse.training import data, loop
from shardfuse.training.checks import Agreement, compare_with_unsharded
from shardfuse.training.config import TrainConfig
from shardfuse.training.data import Corpus, DataError, load_corpus
from shardfuse.training.folders import OutputError, output_folder, write_report

TINY = TransformerConfig(
    hidden_size=32,
    intermediate_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    max_positions=64,
    init_std=0.05,
)
CONFIG = TrainConfig(model=TINY, steps=12, batch=4, seq=32, warmup=10, eval_batches=2)


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return load_corpus(seq=32, max_bytes=1 << 19)


# --- data -------------------------------------------------------------------------------------------------------------


def test_default_corpus_is_python_source_and_always_the_same(corpus: Corpus):
    again = load_corpus(seq=32, max_bytes=1 << 19)
    assert torch.equal(corpus.train, again.train)
    assert torch.equal(corpus.held_out, again.held_out)
    assert b"def __init__(self" in bytes(corpus.train.numpy())
    assert 1 << 18 < len(corpus.train) + len(corpus.held_out) <= (1 << 19) + corpus.files
    assert len(corpus.held_out) / len(corpus.train) == pytest.approx(1 / 15, rel=0.1)


def test_held_out_text_is_not_trained_on(tmp_path: Path):
    for i in range(4):
        (tmp_path / f"{i}.txt").write_text("".join(f"<{i}{line:04}>\n" for line in range(2000)))
    corpus = load_corpus(tmp_path, seq=32)
    assert corpus.files == 4
    train, held_out = (set(re.findall(rb"<\d+>", bytes(part.numpy()))) for part in (corpus.train, corpus.held_out))
    assert train & held_out == set()
    blocks = math.ceil(4 * 2000 * 8 / data.BLOCK_BYTES) * 2
    assert 8000 - blocks <= len(train) + len(held_out) <= 8000  # lines that a block's end cut are in neither
    assert len(held_out) == pytest.approx(8000 / 16, rel=0.3)


def test_single_short_file_has_held_out_blocks_too(tmp_path: Path):
    text = "".join(f"line {i}\n" for i in range(600))
    (tmp_path / "text").write_text(text)
    corpus = load_corpus(tmp_path / "text", seq=32)
    assert len(corpus.train) + len(corpus.held_out) == len(text)
    assert len(corpus.held_out) == pytest.approx(len(text) / 16, rel=0.05)


def test_folder_leaves_out_hidden_binary_and_special_files(tmp_path: Path):
    (tmp_path / "a.txt").write_text("text " * 2000)
    (tmp_path / ".hidden").write_text("secret " * 2000)
    (tmp_path / "image").write_bytes(bytes(range(256)) * 50)
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "b.txt").write_text("history " * 2000)
    os.mkfifo(tmp_path / "pipe")
    corpus = load_corpus(tmp_path, seq=32)
    assert set(bytes(corpus.train.numpy())) == set(b"text ")


def test_size_is_capped(tmp_path: Path):
    (tmp_path / "big").write_text("some text\n" * 10_000)
    corpus = load_corpus(tmp_path / "big", seq=32, max_bytes=20_000)
    assert len(corpus.train) + len(corpus.held_out) == 20_000


def _bad_paths(folder: Path) -> dict[str, Path]:
    """One path for each way in which --data can be wrong."""
    paths = {
        name: folder / name for name in ("missing", "empty", "blank", "binary", "short", "pipe", "no-text", "loop")
    }
    paths["empty"].touch()
    paths["blank"].write_text("\n \n" * 5000)
    paths["binary"].write_bytes(np.random.default_rng(0).bytes(50_000))
    paths["short"].write_text("too short")
    os.mkfifo(paths["pipe"])
    paths["no-text"].mkdir()
    (paths["no-text"] / "image").write_bytes(bytes(10_000))
    paths["loop"].symlink_to(paths["loop"])
    paths["device"] = Path("/dev/zero")
    paths["unreadable"] = Path("/proc/self/mem")  # exists, and refuses even the superuser
    return paths


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("missing", "there is no such file or folder"),
        ("empty", "the file is empty"),
        ("blank", "the file is empty"),
        ("binary", "a binary file; text is needed"),
        ("short", "9 bytes of text, at least"),
        ("pipe", "neither a regular file nor a folder"),
        ("no-text", "no text files in this folder"),
        ("loop", "cannot be read (Too many levels of symbolic links)"),
        ("device", "neither a regular file nor a folder"),
        ("unreadable", "cannot be read (Input/output error)"),
    ],
)
def test_bad_data_is_one_clear_line(tmp_path: Path, name: str, says: str):
    path = _bad_paths(tmp_path)[name]
    with pytest.raises(DataError) as caught:
        load_corpus(path)
    assert str(caught.value).startswith(f"--data {path}: ")
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_permissions_are_respected(tmp_path: Path):
    if os.geteuid() == 0:
        pytest.skip("the superuser may read every file")
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("text " * 5000)
    for name in ("file", "folder"):
        (tmp_path / name).chmod(0)
        with pytest.raises(DataError, match=r"cannot be read \(Permission denied\)"):
            load_corpus(tmp_path / name)


def test_stripped_standard_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(data.sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(DataError, match=r"no Python sources in .*; pass text with --data PATH"):
        load_corpus()


def test_batches_depend_on_seed_and_step_alone(corpus: Corpus):
    sizes = {"batch": 4, "seq": 32}
    tokens, targets = corpus.batch(3, seed=1, **sizes)
    torch.manual_seed(7)
    again, _ = corpus.batch(3, seed=1, **sizes)
    assert torch.equal(tokens, again)
    assert tokens.shape == targets.shape == (4, 32)
    assert tokens.dtype == targets.dtype == torch.int64
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    for other in (corpus.batch(4, seed=1, **sizes)[0], corpus.batch(3, seed=2, **sizes)[0]):
        assert not torch.equal(tokens, other)


def test_batches_reach_both_ends(tmp_path: Path):
    corpus = Corpus(torch.arange(34, dtype=torch.uint8), torch.arange(66, dtype=torch.uint8), "", 1)
    tokens, targets = (torch.cat(parts) for parts in zip(*(corpus.batch(i, seed=0, batch=8, seq=32) for i in range(8))))
    assert set(tokens[:, 0].tolist()) == {0, 1}
    assert targets.max() == 33
    windows = [tokens for tokens, _ in corpus.held_out_batches(batch=1, seq=32, limit=9)]
    assert [int(window[0, 0]) for window in windows] == [0, 33]


def test_entropies_of_known_text():
    rng = np.random.default_rng(0)
    uniform = torch.from_numpy(rng.integers(0, 256, 200_000, dtype=np.uint8))
    assert data.unigram_nats(Corpus(uniform, uniform, "", 1)) == pytest.approx(math.log(256), abs=0.01)
    cycle = torch.arange(4, dtype=torch.uint8).repeat(20_000)
    corpus = Corpus(cycle, cycle, "", 1)
    assert data.unigram_nats(corpus) == pytest.approx(math.log(4), abs=0.01)
    assert data.bigram_nats(corpus) == pytest.approx(0.0, abs=0.001)


def test_entropies_of_python_source():
    corpus = load_corpus()
    assert data.unigram_nats(corpus) == pytest.approx(3.1, abs=0.15)
    assert data.bigram_nats(corpus) == pytest.approx(2.4, abs=0.15)


# --- configuration and schedule ---------------------------------------------------------------------------------------


def test_config_survives_json():
    config = dataclasses.replace(CONFIG, data="x.txt", time_cap=1.5)
    assert TrainConfig.from_json(config.to_json()) == config


def test_unknown_settings_are_refused():
    text = CONFIG.to_json().replace('"lr"', '"learning_rate"')
    with pytest.raises(ValueError, match="unknown settings learning_rate"):
        TrainConfig.from_json(text)


@pytest.mark.parametrize(
    "change",
    [{"steps": 0}, {"batch": 0}, {"lr": 0.0}, {"clip": -1.0}, {"time_cap": 0.0}, {"seq": 65}, {"device": "tpu"}],
    ids=lambda change: next(iter(change)),
)
def test_impossible_settings_are_refused(change: dict[str, Any]):
    (name,) = change
    with pytest.raises(ValueError, match=f"^{name}="):
        dataclasses.replace(CONFIG, **change)


def test_learning_rate_rises_then_falls_to_zero():
    config = dataclasses.replace(CONFIG, steps=100, warmup=10, lr=1.0)
    rates = [loop.learning_rate(config, step, step / 100) for step in range(100)]
    assert rates[:10] == pytest.approx([0.1 * (i + 1) if i < 9 else 0.91 for i in range(10)])
    assert all(after < before for before, after in itertools.pairwise(rates[9:]))
    assert rates[-1] == pytest.approx(0.01)
    assert loop.learning_rate(config, 3, 0.4) == rates[3]  # a slow start does not change the first steps
    assert loop.learning_rate(config, 50, 0.9) == pytest.approx(0.1)  # a slow machine ends earlier, just as low


def test_clock_without_an_answer_shows():
    assert math.isnan(loop.learning_rate(CONFIG, 0, float("nan")))


# --- gradient clipping ------------------------------------------------------------------------------------------------


def _gradients(mesh: Any, sequence_parallel: bool, max_norm: float) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The norm that clipping reports, and every clipped gradient, whole."""
    config = dataclasses.replace(CONFIG, sequence_parallel=sequence_parallel)
    model = loop.build_model(config, mesh)
    tokens, targets = load_corpus(seq=32, max_bytes=1 << 17).batch(0, seed=0, batch=4, seq=32)
    model(tokens, targets).backward()
    norm = GradientClipper(model.parameters(), max_norm, model.group).clip()
    with torch.no_grad():
        for param in model.parameters():  # so that full_state_dict gathers them
            assert param.grad is not None
            local_tensor(param).copy_(local_tensor(param.grad))
    return norm, full_state_dict(model)


def _clip_body(rank: int, world: int, sequence_parallel: bool, max_norm: float) -> Any:
    return _gradients(init_mesh(device_type="cpu"), sequence_parallel, max_norm)


@pytest.mark.parametrize("max_norm", [0.1, 1e9], ids=["clips", "leaves"])
def test_clipping_equals_torch(max_norm: float):
    model = loop.build_model(CONFIG)
    tokens, targets = load_corpus(seq=32, max_bytes=1 << 17).batch(0, seed=0, batch=4, seq=32)
    model(tokens, targets).backward()
    norm, ours = _gradients(None, False, max_norm)
    expected = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    torch.testing.assert_close(norm, expected)
    for name, param in model.named_parameters():
        torch.testing.assert_close(ours[name], param.grad)


@pytest.mark.ranks
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp", "sp"])
def test_clipping_is_the_same_on_every_rank_and_degree(ranks: Any, sequence_parallel: bool):
    norm, alone = _gradients(None, False, 0.1)
    assert norm > 1.0  # so that clipping does something
    results = ranks(2, _clip_body, sequence_parallel, 0.1)
    assert results[0][0] == results[1][0]
    for rank_norm, gradients in results:
        torch.testing.assert_close(rank_norm, norm)
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, alone[name], rtol=1e-4, atol=1e-6)


# --- the loop ---------------------------------------------------------------------------------------------------------


def _train_body(rank: int, world: int, config: TrainConfig) -> loop.TrainResult:
    mesh = init_mesh(device_type="cpu")
    model = loop.build_model(config, mesh)
    return loop.train(model, loop.build_optimizer(model, config), load_corpus(seq=32, max_bytes=1 << 19), config)


@pytest.mark.ranks
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp", "sp"])
@pytest.mark.parametrize("seed", [0, 1])
def test_two_ranks_train_as_one_does(ranks: Any, corpus: Corpus, sequence_parallel: bool, seed: int):
    config = dataclasses.replace(CONFIG, sequence_parallel=sequence_parallel, seed=seed)
    first, second = ranks(2, _train_body, config)
    agreement = compare_with_unsharded(first.losses, config, corpus)
    assert agreement.ok, agreement
    assert (first.losses, first.held_out) == (second.losses, second.held_out)
    assert first.losses[0] == pytest.approx(math.log(256), abs=0.5)
    assert first.losses[-1] < first.losses[0] - 0.1


def test_held_out_loss_is_the_mean_over_its_tokens(corpus: Corpus):
    config = dataclasses.replace(CONFIG, steps=1, eval_batches=3, batch=3)
    model = loop.build_model(config, dtype=torch.float64)
    batches = corpus.held_out_batches(batch=3, seq=32, limit=3)
    losses = [model(tokens, targets).detach() for tokens, targets in batches]
    assert loop.evaluate(model, corpus, config) == pytest.approx(float(torch.stack(losses).mean()), rel=1e-12)


def test_what_a_run_reports(corpus: Corpus):
    seen: list[loop.Progress] = []
    model = loop.build_model(CONFIG)
    result = loop.train(model, loop.build_optimizer(model, CONFIG), corpus, CONFIG, on_step=seen.append)
    assert [at.step for at in seen] == list(range(1, 13))
    assert [at.loss for at in seen[:8]] == result.losses
    assert seen[-1].done == 1.0
    assert seen[-1].seconds_left == pytest.approx(0.0)
    assert len(result.losses) == len(result.grad_norms) == CONFIG.recorded_steps
    assert (result.steps, result.timed_out) == (12, False)
    assert result.tokens_per_second == pytest.approx(12 * 128 / result.seconds)
    assert result.peak_bytes > 2**20


def _wrong_clock_body(rank: int, world: int, config: TrainConfig) -> loop.TrainResult:
    """Rank 0's clock ticks once a look; rank 1's says that the time is long over."""
    ticks = iter(range(10**6))
    original = loop._Clock.elapsed
    loop._Clock.elapsed = lambda clock: float(next(ticks)) if rank == 0 else 1e9  # type: ignore[method-assign]
    try:
        return _train_body(rank, world, config)
    finally:
        loop._Clock.elapsed = original  # type: ignore[method-assign]


@pytest.mark.ranks
def test_ranks_stop_together_by_the_clock_of_rank_0(ranks: Any):
    config = dataclasses.replace(CONFIG, steps=1000, time_cap=2.5)
    first, second = ranks(2, _wrong_clock_body, config)
    # Looks at steps 5, 10, ...: 0, 1, 2 and 3 seconds, of which the last is past the cap.
    assert first.steps == second.steps == 4 * loop.CLOCK_EVERY
    assert first.timed_out
    assert second.timed_out
    assert first.held_out == second.held_out


def test_agreement_needs_numbers():
    losses = (5.5, 5.0, 4.5)
    eps = torch.finfo(torch.float32).eps
    assert Agreement(losses, losses, losses).ok
    assert Agreement(losses, losses, losses).budget == 8 * eps
    assert not Agreement((5.5, 5.0, float("nan")), losses, losses).ok
    assert not Agreement((5.5, 5.0, 4.5 * (1 + 9 * eps)), losses, losses).ok
    rounded = tuple(loss * (1 + 2 * eps) for loss in losses)
    assert Agreement((5.5, 5.0, 4.5 * (1 + 9 * eps)), losses, rounded).ok


# --- the output folder ------------------------------------------------------------------------------------------------

_OUT: dict[str, Any] = {"maker": "a test", "names": ("data",), "need_bytes": 0}


def _write(path: Path, content: str) -> None:
    with output_folder(path, **_OUT) as folder:
        (folder / "data").write_text(content)
        write_report(folder, "a test", {})


def test_output_appears_when_complete_and_replaces_its_own(tmp_path: Path):
    out = tmp_path / "deep" / "out"
    _write(out, "one")
    _write(out, "two")
    assert (out / "data").read_text() == "two"
    assert [entry.name for entry in out.parent.iterdir()] == ["out"]


def test_failure_keeps_the_earlier_output(tmp_path: Path):
    _write(tmp_path / "out", "one")
    with pytest.raises(FileNotFoundError), output_folder(tmp_path / "out", **_OUT) as folder:
        (folder / "data").write_text((tmp_path / "missing").read_text())
    assert (tmp_path / "out" / "data").read_text() == "one"
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]


def test_leftovers_of_the_dead_go_and_those_of_the_living_stay(tmp_path: Path):
    dead = tmp_path / ".out.writing-dead"
    dead.mkdir()
    (dead / "data").touch()
    with output_folder(tmp_path / "out", **_OUT) as living:
        assert not dead.exists()
        _write(tmp_path / "out", "by another run meanwhile")
        assert living.exists()


@pytest.mark.parametrize("kind", ["file", "foreign", "extra", "mount"])
def test_what_is_not_ours_is_not_touched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str):
    out = tmp_path / "out"
    if kind == "file":
        out.write_text("precious")
    else:
        _write(out, "one")
    if kind == "foreign":
        (out / "report.json").write_text('{"made_by": "somebody else"}')
    if kind == "extra":
        (out / "thesis.tex").write_text("precious")
    if kind == "mount":
        monkeypatch.setattr(os.path, "ismount", lambda path: str(path) == str(out))
    before = sorted(str(path) for path in tmp_path.rglob("*"))
    with pytest.raises(OutputError, match=rf"^--out {out}: .*choose "):
        _write(out, "two")
    assert sorted(str(path) for path in tmp_path.rglob("*")) == before


def test_empty_folder_is_taken(tmp_path: Path):
    (tmp_path / "out").mkdir()
    _write(tmp_path / "out", "one")
    assert (tmp_path / "out" / "data").read_text() == "one"


def test_unwritable_place_and_full_disk(tmp_path: Path):
    with pytest.raises(OutputError, match="--out /proc/out: cannot be written to"):
        _write(Path("/proc/out"), "one")
    with (
        pytest.raises(OutputError, match=r"MiB are free on that disk and .* MiB are needed"),
        output_folder(tmp_path / "out", **{**_OUT, "need_bytes": 1 << 60}),
    ):
        pytest.fail("there was room")
    assert list(tmp_path.iterdir()) == []
