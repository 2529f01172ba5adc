"""Documents packed in rows: step, evaluate and forward are those of one document per row, in every layout."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from documents_case import (
    BUDGET,
    LENGTH,
    POSITIONS,
    SEED,
    apart,
    batch,
    config,
    differences,
    grads_of,
    one_process,
)

from shardfuse import GridTransformer, ParallelTransformer
from shardfuse.kernels.runtime import dispatch
from shardfuse.layers.attention.sdpa import attend
from shardfuse.parallel.core.mesh import data_coordinate
from shardfuse.parallel.core.rendezvous import init_mesh
from shardfuse.parallel.documents import Documents, cu_seqlens, pad_rows
from shardfuse.parallel.parallelize import parallelize
from shardfuse.parallel.pipeline.pipeline import SCHEDULES

MODELS: dict[str, dict[str, Any]] = {
    "gelu": {"style": "gelu"},
    "gated": {"style": "gated"},
    "window": {"attention_window": 2},
    "softcap and sinks": {"attention_softcap": 4.0, "attention_sinks": True},
}
SHARED = POSITIONS[0]  # [S], for all rows


def _model(settings: dict[str, Any], mesh: Any = None, **options: Any) -> ParallelTransformer:
    model = ParallelTransformer(config(**settings), mesh=mesh, dtype=torch.float64, **options)
    model.init_weights(SEED)
    return model


def _close(ours: torch.Tensor, expected: float) -> bool:
    return abs(float(ours.detach()) - expected) <= BUDGET * abs(expected)


# ------------------------------------------------------------------------------------------------------- the documents


def test_the_bounds_of_documents():
    assert Documents.of(POSITIONS, POSITIONS.shape) == Documents(5, 8)
    assert Documents.of(POSITIONS[[0, 2, 3]], (3, LENGTH)) == Documents(5, 5)
    assert Documents.of(SHARED.int(), (3, LENGTH)) == Documents(2, 5)
    assert Documents.of(POSITIONS[4:, :4], (1, 4)) is None  # gaps
    assert Documents.of(torch.arange(LENGTH), (2, LENGTH)) is None
    assert Documents.of(torch.zeros(0, LENGTH, dtype=torch.int64), (0, LENGTH)) is None
    assert Documents.of(torch.zeros(3, 1, dtype=torch.int64), (3, 1)) is None
    assert Documents.of(None, (3, LENGTH)) is None
    assert Documents.of(POSITIONS.to("meta"), POSITIONS.shape) == Documents(LENGTH, LENGTH)


def test_cu_seqlens_of_one_size():
    documents = Documents(6, 8)
    first, last = (cu_seqlens(rows, documents) for rows in (POSITIONS[:2], POSITIONS[3:]))
    assert first.dtype == torch.int32
    assert first.tolist() == [0, 3, 8, *[16] * 10]
    assert last.tolist() == [0, 1, 2, 3, 5, 8, 12, 14, 15, *[16] * 4]


@pytest.mark.parametrize("path", ["loop", "mask", "math", "flex"])
@pytest.mark.parametrize("window", [None, 2])
def test_documents_that_are_empty_change_nothing(path: str, window: int | None):
    q, k, v = (torch.randn(2 * LENGTH, heads, 8, dtype=torch.float64) for heads in (4, 2, 2))
    filled = cu_seqlens(POSITIONS[:2], Documents(6, 8))
    with torch.no_grad():
        ours, exact = (
            attend(q, k, v, cu_seqlens=each, window=window, max_seqlen=8, path=path) for each in (filled, filled[:4])
        )
    assert torch.equal(ours, exact)


def test_rows_are_added_within_the_bounds():
    rows = POSITIONS[[0, 2, 3]]
    assert Documents.of(pad_rows(rows, 4), (7, LENGTH)) == Documents.of(rows, rows.shape)
    assert pad_rows(rows[:0], 2).tolist() == [list(range(LENGTH))] * 2
    assert pad_rows(rows, 0) is rows


# --------------------------------------------------------------------------------------------------------- one process


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("microbatches", [1, 2, 7])
def test_packed_rows_are_one_document_per_row(name: str, microbatches: int):
    expected = one_process(config(**MODELS[name]), *batch())
    spread = parallelize(_model(MODELS[name]), microbatches=microbatches, device="cpu")
    tokens, targets, positions = batch()
    before = dispatch.counts["attention", "loop"]
    loss = spread.step(tokens, targets, positions=positions)
    assert dispatch.counts["attention", "loop"] - before == 2 * microbatches  # for each layer and micro-batch
    assert not differences((float(loss), grads_of(spread)), expected)
    assert _close(spread.evaluate(tokens, targets, positions=positions), expected[0])
    assert _close(spread(tokens, targets, positions=positions), expected[0])


def test_attention_across_documents_would_show():
    (tokens, targets, positions), (exact, _) = batch(), one_process(config(), *batch())
    spread = parallelize(_model({}), device="cpu")
    (stage,) = spread.stages
    across = stage(tokens, targets, positions=positions, scale=1 / int((targets != -100).sum()))  # as one document
    assert abs(float(across.detach()) - exact) > 1e-4
    assert not _close(spread.evaluate(tokens, targets), exact)


def test_the_bare_model_agrees():
    tokens, targets, positions = batch()
    exact, grads = one_process(config(), tokens, targets, positions)
    model = _model({}, recompute=True)
    loss = model(tokens, targets, positions=positions)
    loss.backward()
    assert not differences((float(loss.detach()), grads_of(model)), (exact, grads))
    alone, _, places = apart(tokens, targets, positions)
    logits, theirs = model(tokens, positions=positions), model(alone, positions=places)
    assert logits.shape == (*tokens.shape, config().vocab_size)
    torch.testing.assert_close(logits[0, 3:], theirs[1, :5], rtol=BUDGET, atol=BUDGET)
    assert torch.equal(parallelize(model, device="cpu")(tokens, positions=positions), logits)


def test_positions_that_all_rows_share():
    tokens, targets, _ = batch()
    exact, grads = one_process(config(), tokens, targets, SHARED.expand(tokens.shape))
    for microbatches in (1, 7):
        spread = parallelize(_model({}), microbatches=microbatches, device="cpu")
        loss = spread.step(tokens, targets, positions=SHARED)
        assert not differences((float(loss), grads_of(spread)), (exact, grads))
        assert _close(spread(tokens, targets, positions=SHARED), exact)


@pytest.mark.parametrize("positions", [torch.arange(LENGTH) * 3 + 1, POSITIONS[1:2].repeat(5, 1)])
def test_without_restarts_nothing_is_packed(positions: torch.Tensor):
    (tokens, targets, _), spread = batch(), parallelize(_model({}), microbatches=7, device="cpu")
    before = dispatch.counts["attention", "sdpa"]
    loss = spread.step(tokens, targets, positions=positions)
    assert dispatch.counts["attention", "sdpa"] - before == 2 * 7
    parts = zip(tokens, targets, positions.expand(tokens.shape))
    (stage,) = spread.stages
    each = [stage(*(x[None] for x in part[:2]), positions=part[2][None], scale=1.0) for part in parts]
    torch.testing.assert_close(loss, torch.cat(each).sum() / (targets != -100).sum(), rtol=BUDGET, atol=0)


def test_dropout_within_documents():
    """Attention weights are dropped document by document; with a rate of nearly 0 nothing is."""
    tokens, targets, positions = batch()
    losses = []
    for rate in (0.0, 1e-12, 0.5):
        spread = parallelize(_model({"attention_dropout": rate}), device="cpu")
        losses.append(float(spread.step(tokens, targets, positions=positions)))
    assert losses[1] == pytest.approx(losses[0], rel=1e-10)
    assert losses[2] != pytest.approx(losses[0], rel=1e-6)


@pytest.mark.parametrize("shape", [(7,), (5, 7), (4, 8), (5, 8, 1)])
def test_positions_of_another_shape(shape: tuple[int, ...]):
    (tokens, targets, _), spread = batch(), parallelize(_model({}), device="cpu")
    for call in (spread.step, spread.evaluate, spread, _model({})):
        with pytest.raises(ValueError, match=r"positions \[.*\]: expected \[8\] or \[5, 8\]"):
            call(tokens, targets, positions=torch.zeros(shape, dtype=torch.int64))


def test_a_compiled_forward():
    model, (tokens, targets, positions) = _model({"attention_window": 3, "num_layers": 1}), batch()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    for rows in (positions, positions.flip(0), SHARED):
        exact = float(model(tokens, targets, positions=rows).detach())
        assert _close(compiled(tokens, targets, positions=rows), exact)


def test_compiled_stages():
    settings = {"num_layers": 1}
    spread, expected = parallelize(_model(settings), device="cpu"), one_process(config(**settings), *batch())
    for stage in spread.stages:
        stage.compile(fullgraph=True, backend="aot_eager")
    tokens, targets, positions = batch()
    loss = spread.step(tokens, targets, positions=positions)
    assert not differences((float(loss), grads_of(spread)), expected)


# -------------------------------------------------------------------------------------------------------- over ranks


@dataclasses.dataclass(frozen=True)
class Layout:
    """Degrees, and options of ``parallelize`` and of the model."""

    degrees: dict[str, int]
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    layers: dict[str, Any] = dataclasses.field(default_factory=dict)
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __str__(self) -> str:
        parts = [f"{name}{size}" for name, size in self.degrees.items()]
        for name, value in (self.options | self.layers | self.settings).items():
            said = value if isinstance(value, str) else name if value is True else f"{name}{value}"
            parts += [] if value is None else [said]
        return "-".join(parts)

    @property
    def world(self) -> int:
        size = 1
        for degree in self.degrees.values():
            size *= degree
        return size


def _pipeline(schedule: str, microbatches: int | None = None, **others: Any) -> dict[str, Any]:
    return {"schedule": schedule, "microbatches": microbatches, **others}


WINDOW, SEQUENCE, RECOMPUTE = {"attention_window": 3}, {"sequence_parallel": True}, {"recompute": True}
OFTEN = [
    *(Layout({"dp": 2}, {"zero": zero, "microbatches": 1 + zero}) for zero in range(4)),
    Layout({"tp": 2}, settings=WINDOW),
    Layout({"tp": 2}, {"microbatches": 3}, layers=SEQUENCE),
    Layout({"pp": 2}, _pipeline("1f1b", 2)),
    Layout({"pp": 2}, _pipeline("zbv"), settings=WINDOW),  # more micro-batches than rows
]
REST = [
    *(Layout({"pp": 2}, _pipeline(name), RECOMPUTE, {"style": "gelu"}) for name in SCHEDULES),
    *(Layout({"pp": 2}, _pipeline(name, 8), settings=WINDOW) for name in SCHEDULES if name != "zbv"),
    *(Layout({"dp": 2, "tp": 2}, {"zero": zero}, SEQUENCE | RECOMPUTE, WINDOW) for zero in range(4)),
    Layout({"pp": 2, "tp": 2}, _pipeline("1f1b", 2), SEQUENCE),
    Layout({"pp": 2, "tp": 2}, _pipeline("dualpipev"), SEQUENCE | RECOMPUTE),
    Layout({"dp": 2, "pp": 2}, _pipeline("interleaved_zb", 4, zero=2), RECOMPUTE),
    Layout({"dp": 2, "pp": 2}, _pipeline("zbv", zero=1), settings={"tie_embeddings": True}),
    Layout({"dp_replicate": 2, "dp": 2}, {"zero": 3, "microbatches": 2}, RECOMPUTE),
    Layout({"dp": 4}, {"zero": 3, "microbatches": 3}),
]


def _body(rank: int, world: int, fields: dict[str, Any]) -> list[str]:
    layout = Layout(**fields)
    mesh = init_mesh(**layout.degrees, device_type="cpu")
    whole = batch()
    expected = one_process(config(**layout.settings), *whole)
    with torch.device("meta"):
        model = ParallelTransformer(config(**layout.settings), mesh=mesh, dtype=torch.float64, **layout.layers)
    spread = parallelize(model, mesh, seed=SEED, **layout.options)
    share, readers = data_coordinate(mesh)
    tokens, targets, positions = (part.tensor_split(readers)[share] for part in whole)
    loss = float(spread.step(tokens, targets, positions=positions))
    found = differences((loss, grads_of(spread)), expected)
    evaluated = float(spread.evaluate(tokens, targets, positions=positions))
    shared = float(spread.evaluate(tokens, targets, positions=SHARED))
    exact, _ = one_process(config(**layout.settings), *whole[:2], SHARED.expand(whole[0].shape))
    found += [f"evaluation: {evaluated}"] * (not abs(evaluated / expected[0] - 1) <= BUDGET)
    found += [f"shared positions: {shared}"] * (not abs(shared / exact - 1) <= BUDGET)
    plain = float(spread.evaluate(tokens, targets))
    return found + ["positions do not matter"] * (abs(plain / loss - 1) < 1e-6)


@pytest.mark.parametrize("layout", [*OFTEN, *(pytest.param(each, marks=pytest.mark.nightly) for each in REST)], ids=str)
def test_layouts(ranks: Any, layout: Layout):
    assert ranks(layout.world, _body, dataclasses.asdict(layout)) == [[]] * layout.world


def _one_sided(rank: int, world: int) -> list[str]:
    """Steps in which only one rank's rows restart, and in which a rank has no rows."""
    mesh = init_mesh(dp=world, device_type="cpu")
    tokens, targets, positions = batch()
    found = []
    for rows in (slice(1, 2), slice(1, 1)):
        spread = parallelize(_model({}, mesh), mesh, seed=SEED, zero=2, microbatches=2)
        mine = rows if rank else slice(2, 5)
        loss = spread.step(tokens[mine], targets[mine], positions=positions[mine])
        both = [*range(2, 5), *range(5)[rows]]
        expected = one_process(config(), *(x[both] for x in (tokens, targets, positions)))
        found += differences((float(loss), grads_of(spread)), expected)
    return found


def test_documents_of_one_rank_alone(ranks: Any):
    assert ranks(2, _one_sided) == [[], []]


def _on_a_grid(rank: int, world: int, pp: int) -> str:
    """The loss with positions that do not restart."""
    mesh = init_mesh(grid=(1, 2, 1), pp=pp, device_type="cpu")
    with torch.device("meta"):
        model = GridTransformer(config(), mesh=mesh, dtype=torch.float64)
    spread = parallelize(model, mesh, seed=SEED, schedule=None if pp == 1 else "1f1b", microbatches=pp)
    tokens, targets, positions = (part[:4] for part in batch())
    calls = [spread.step, spread.evaluate, *([spread, model] if pp == 1 else [])]
    for call in calls:
        for places in (positions, SHARED):
            with pytest.raises(ValueError, match=r"positions that restart start documents.*over a grid.*one document"):
                call(tokens, targets, positions=places)
    return f"{float(spread.evaluate(tokens, targets, positions=POSITIONS[1] + 1)):.12f}"


@pytest.mark.parametrize("pp", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_a_grid_refuses_documents(ranks: Any, pp: int):
    tokens, targets, _ = batch()
    expected = float(_model({})(tokens[:4], targets[:4], positions=POSITIONS[1] + 1).detach())
    assert ranks(2 * pp, _on_a_grid, pp) == [f"{expected:.12f}"] * 2 * pp
