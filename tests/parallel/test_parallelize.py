"""``parallelize``: every combination reaches the losses and the parameters of one process.

Two steps in fp64, with an uneven batch, targets that do not count, and both styles, tied or not; the budget is a
relative error of 1e-11. ``make test`` runs a selection with every schedule but the naive one, every ZeRO stage and
every kind of mesh; ``make test-all`` runs all combinations.
"""

from __future__ import annotations

import itertools
import os
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from layout_case import BUDGET, compare_spread, make_batches, train_alone

from shardfuse import ParallelTransformer, TransformerConfig
from shardfuse.parallel.core.mesh import data_coordinate
from shardfuse.parallel.core.rendezvous import init_mesh
from shardfuse.parallel.parallelize import parallelize
from shardfuse.parallel.pipeline.schedules import SCHEDULES

DOCUMENT = Path(__file__).parents[2] / "docs" / "parallelism.md"
BEGIN, END = "<!-- composes -->", "<!-- /composes -->"
LENGTH, ROWS = 6, 5  # of the whole batch: no number of readers or micro-batches divides it
CONFIG: dict[str, Any] = {
    "vocab_size": 24,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_layers": 6,
    "num_heads": 4,
    "num_kv_heads": 2,
    "max_positions": LENGTH,
}


class Combination(NamedTuple):
    """Degrees, engine and schedule."""

    dp_replicate: int = 1
    dp: int = 1
    pp: int = 1
    tp: int = 1
    zero: int = 0
    schedule: str | None = None
    recompute: bool = False
    sequence_parallel: bool = False
    style: str = "gated"
    tied: bool = False

    @property
    def world(self) -> int:
        return self.dp_replicate * self.dp * self.pp * self.tp

    def __str__(self) -> str:
        degrees = [
            f"{name}{getattr(self, name)}" for name in ("dp_replicate", "dp", "pp", "tp") if getattr(self, name) > 1
        ]
        flags = [name for name in ("recompute", "sequence_parallel", "tied") if getattr(self, name)]
        return "-".join([*degrees, f"zero{self.zero}", self.schedule or "whole", self.style, *flags])


def _config(case: Combination) -> TransformerConfig:
    return TransformerConfig(style=case.style, tie_embeddings=case.tied, **CONFIG)


def _batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    return make_batches(1, ROWS, LENGTH, CONFIG["vocab_size"], [(1, 2)])


def _spread(rank: int, world: int, fields: tuple[Any, ...], microbatches: int | None) -> list[str]:
    case = Combination(*fields)
    return compare_spread(
        _config(case),
        _batches(),
        {"dp_replicate": case.dp_replicate, "dp": case.dp, "pp": case.pp, "tp": case.tp},
        {"zero": case.zero, "schedule": case.schedule, "microbatches": microbatches, "recompute": case.recompute},
        {"sequence_parallel": case.sequence_parallel},
    )


C = Combination
CHOSEN = [
    C(dp=2, zero=0, tied=True),
    C(dp=2, zero=1, style="gelu"),
    C(pp=2, schedule="gpipe", recompute=True, style="gelu"),
    C(pp=2, schedule="1f1b", tied=True),
    C(dp=2, tp=2, zero=3),
    C(dp_replicate=2, dp=2, zero=2),
    C(dp=2, pp=2, zero=0, schedule="interleaved_zb"),
    C(dp=2, pp=2, zero=3, schedule="interleaved_1f1b", tied=True),
    C(dp=2, pp=2, zero=2, schedule="dualpipev"),
    C(pp=2, tp=2, schedule="zbv", sequence_parallel=True),
]
BESIDE = [  # features that _all() does not vary
    C(tp=2, zero=0, sequence_parallel=True),
    C(dp=2, tp=2, zero=2, sequence_parallel=True),
    C(dp=2, pp=2, tp=2, zero=3, schedule="1f1b", tied=True),
    C(dp=2, pp=2, tp=2, zero=3, schedule="interleaved_1f1b", recompute=True, sequence_parallel=True),
    C(dp=2, pp=2, tp=2, zero=1, schedule="zbv", sequence_parallel=True),
    C(dp=2, pp=2, tp=2, zero=0, schedule="dualpipev", recompute=True, tied=True),
    C(dp_replicate=2, dp=2, pp=2, zero=2, schedule="interleaved_zb", tied=True),
]
MODELS = [(style, tied) for tied in (False, True) for style in ("gated", "gelu")]


def _all() -> list[Combination]:
    """Every schedule with every compatible ZeRO stage, over every mesh of up to four ranks, with and without
    recomputation; each with the one of ``MODELS`` whose feature pairs are the rarest so far."""
    meshes = list(itertools.product((1, 2), repeat=4))
    found: list[Combination] = []
    met: Counter[Any] = Counter()
    for mesh, zero, schedule, recompute in itertools.product(meshes, range(4), (None, *SCHEDULES), (False, True)):
        case = C(*mesh, zero=zero, schedule=schedule, recompute=recompute)
        if not 1 < case.world <= 4 or (case.pp > 1) != (schedule is not None):
            continue
        if case.dp_replicate * case.dp == 1 and zero:
            continue
        if schedule is not None and SCHEDULES[schedule].splits_backward and zero == 3:
            continue  # refused
        models = [case._replace(style=style, tied=tied) for style, tied in MODELS]
        found.append(min(models, key=lambda each: sum(met[meeting] for meeting in _meetings(each))))
        met.update(_meetings(found[-1]))
    return found


def _meetings(case: Combination) -> list[tuple[Any, ...]]:
    """The case's feature pairs: style and embeddings with each other feature, and both with each cell of the table."""
    model = ("style", case.style), ("tied", case.tied)
    others = {"mesh": case[:4], "zero": case.zero, "schedule": case.schedule, "recompute": case.recompute}
    return [*itertools.product(others.items(), model), (case.schedule, case.zero, *model)]


def test_both_styles_tied_or_not_meet_every_other_feature():
    cases = _all()
    met = set(itertools.chain.from_iterable(map(_meetings, cases)))
    for case, (style, tied) in itertools.product(cases, MODELS):
        assert met.issuperset(_meetings(case._replace(style=style, tied=tied)))


@pytest.mark.ranks
@pytest.mark.parametrize(
    "case", [*CHOSEN, *(pytest.param(case, marks=pytest.mark.nightly) for case in BESIDE)], ids=str
)
def test_what_is_spread_trains_as_one_process_does(ranks, case):
    microbatches = 2 if case.schedule is None else None
    assert ranks(case.world, _spread, tuple(case), microbatches) == [[]] * case.world


@pytest.fixture(scope="module")
def seen() -> set[Combination]:
    """The combinations that trained as one process does."""
    return set()


@pytest.mark.nightly
@pytest.mark.ranks
@pytest.mark.parametrize("case", _all(), ids=str)
def test_every_combination(ranks, case, seen):
    microbatches = 2 if case.schedule is None else None
    assert ranks(case.world, _spread, tuple(case), microbatches) == [[]] * case.world
    seen.add(case)


@pytest.mark.nightly
@pytest.mark.ranks
def test_the_table_in_the_document_is_what_was_seen(seen):
    """SHARDFUSE_WRITE_DOCS=1 writes the table. This test needs the results of all tests before it."""
    before, _, rest = DOCUMENT.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    table = _table(seen)
    if os.environ.get("SHARDFUSE_WRITE_DOCS") == "1":
        DOCUMENT.write_text(f"{before}{BEGIN}\n{table}{END}{after}")
    assert DOCUMENT.read_text().partition(BEGIN)[2].partition(END)[0] == f"\n{table}"


def _table(seen: set[Combination]) -> str:
    """A row for each schedule, a column for each ZeRO stage: the number of meshes that trained, and of all."""
    rows = ["| schedule | " + " | ".join(f"zero={zero}" for zero in range(4)) + " |", "|---" * 5 + "|"]
    for schedule in (None, *SCHEDULES):
        cells = []
        for zero in range(4):
            tried = {case[:4] for case in _all() if (case.schedule, case.zero) == (schedule, zero)}
            bad = {case[:4] for case in set(_all()) - seen if (case.schedule, case.zero) == (schedule, zero)}
            refused = schedule is not None and SCHEDULES[schedule].splits_backward and zero == 3
            cells.append("refused" if refused else f"{len(tried - bad)} of {len(tried)} meshes")
        rows.append(f"| {'no pipeline' if schedule is None else f'`{schedule}`'} | {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def _out_of_order(rank: int, world: int, zero: int) -> list[str]:
    """Evaluations, failures and uneven shares between the steps of a model over ``world`` readers."""
    case = Combination(dp=world, zero=zero)
    expected, _, _ = train_alone(_config(case), _batches())
    mesh = init_mesh(dp=world, tp=1)
    torch.manual_seed(rank)  # replicas differ in their random numbers, not in their weights
    drawn = parallelize(ParallelTransformer(_config(case), mesh=mesh, device="meta"), mesh, zero=zero)
    same = [float(drawn.evaluate(*_batches()[0]))]
    given = ParallelTransformer(_config(case), mesh=mesh, dtype=torch.float64)
    given.init_weights(3 + rank)  # the first reader's count
    spread = parallelize(given, mesh, zero=zero, microbatches=2)
    found = []
    spread.evaluate(*_batches()[0])
    with torch.no_grad():
        spread(*_batches()[0])
    optimizer = torch.optim.SGD(spread.parameters(), lr=0.1, momentum=0.9)
    shares = [(5, 0), (2, 3)]  # the second reader's first share is empty
    losses = []
    for (tokens, targets), (mine, others) in zip(_batches(), shares):
        part = slice(None, mine) if rank == 0 else slice(mine, mine + others)
        bad = tokens[part].clone()
        if rank == 0:
            bad[-1, -1] = 10**6
        try:
            spread.step(bad, targets[part])
        except ValueError as error:
            said = "is outside the vocabulary" if rank == 0 else "1 of 2 ranks that read data refused their batch"
            found += [] if said in str(error) else [str(error)]
        else:
            found.append("a token outside the vocabulary was taken")
        with pytest.MonkeyPatch.context() as patch:  # fails in the second micro-batch, on every rank
            patch.setattr(spread, "_loss", _failing_second(spread._loss))
            try:
                spread.step(tokens[part], targets[part])
            except ArithmeticError:
                pass
            else:
                found.append("nothing failed")
        optimizer.zero_grad()
        losses.append(float(spread.step(tokens[part], targets[part])))
        spread.evaluate(tokens[part], targets[part])
        spread.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    losses.append(float(spread.evaluate(*(part.tensor_split(world)[rank] for part in _batches()[0]))))
    if max(abs(a - b) / b for a, b in zip(losses, expected, strict=True)) > BUDGET:
        found.append(f"losses {losses} instead of {expected}")
    everyones: list[Any] = [None] * world
    dist.all_gather_object(everyones, same)
    return found + ([] if everyones[0] == everyones[-1] else [f"other weights: {everyones}"])


def _failing_second(loss: Any) -> Any:
    calls = itertools.count(1)

    def failing(*args: Any) -> torch.Tensor:
        if next(calls) == 2:
            raise ArithmeticError
        return loss(*args)

    return failing


@pytest.mark.ranks
@pytest.mark.parametrize("zero", [0, 2, 3])
def test_what_comes_between_steps_leaves_nothing_behind(ranks, zero):
    assert ranks(2, _out_of_order, zero) == [[], []]


def _low(rank: int, world: int, case: tuple[Any, ...], options: dict[str, Any]) -> list[float]:
    """Losses and a norm in low precision, accumulated over two steps, and those of one process in fp32."""
    combination = Combination(*case)
    mesh = init_mesh(dp=combination.dp, pp=combination.pp)
    model = ParallelTransformer(_config(combination), mesh=mesh, device="meta")
    low = parallelize(model, mesh, zero=combination.zero, schedule=combination.schedule, seed=3, **options)
    share, readers = data_coordinate(mesh)
    batch = [part.tensor_split(readers)[share] for part in _batches()[0]]
    losses = [float(low.step(*batch)) for _ in range(2)]  # gradients add up
    alone = ParallelTransformer(_config(combination))
    alone.init_weights(3)
    exact = alone(*_batches()[0])
    (2 * exact).backward()
    norm = float(torch.nn.utils.clip_grad_norm_(alone.parameters(), float("inf")))
    return [abs(loss - float(exact.detach())) for loss in losses] + [abs(float(low.clip_grad_norm_(9.0)) / norm - 1)]


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("case", "options"),
    [
        (C(dp=2, zero=2), {"precision": "fp16"}),
        (C(dp=2, zero=3), {"precision": "bf16", "offload": True, "microbatches": 2}),
        (C(dp=2, pp=2, zero=2, schedule="zbv", tied=True), {"precision": "fp16", "recompute": True}),
    ],
    ids=str,
)
def test_low_precision_and_offloading(ranks, case, options):
    for errors in ranks(case.world, _low, tuple(case), options):
        assert max(errors) < 0.02, errors


def test_misuse_is_one_clear_error():
    model = ParallelTransformer(TransformerConfig(**CONFIG), dtype=torch.float64)
    plain = torch.nn.Linear(4, 4)
    refused = {
        "microbatches=0: expected at least 1": lambda: parallelize(model, microbatches=0),
        "precision='fp8': expected None or one of bf16, fp16": lambda: parallelize(model, precision="fp8"),
        "schedule='2f2b': expected one of naive, gpipe": lambda: parallelize(model, schedule="2f2b"),
        "zero=4: expected 0": lambda: parallelize(model, zero=4),
        "recompute=True: Linear has no configure": lambda: parallelize(plain, recompute=True),
        "overlap='sometimes': expected one of": lambda: parallelize(model, overlap="sometimes"),
    }
    for message, call in refused.items():
        with pytest.raises(ValueError, match=message):
            call()
    with torch.device("meta"):
        empty = torch.nn.Linear(4, 4)
    with pytest.raises(ValueError, match=r"Linear has parameters on the meta device and no init_weights"):
        parallelize(empty)
    tokens = torch.zeros(2, LENGTH, dtype=torch.int64)
    model.model.norm.to("meta")
    with pytest.raises(ValueError, match=r"model.norm.weight is on the meta device and model.embed_tokens"):
        parallelize(model)
    model = ParallelTransformer(TransformerConfig(**CONFIG), dtype=torch.float64, fuse_wgrad_accumulation=True)
    with pytest.raises(ValueError, match="precision='fp16' with fuse_wgrad_accumulation=True"):
        parallelize(model, precision="fp16")
    model = ParallelTransformer(TransformerConfig(**CONFIG), dtype=torch.float64)
    with pytest.raises(ValueError, match="no target of this step is valid"):
        parallelize(model).step(tokens, tokens - 100)
    spread = parallelize(_Mean(), microbatches=3)
    with pytest.raises(ValueError, match=r"a batch of 2 for microbatches=3: pass more at a time"):
        spread.step(torch.ones(2, 4), torch.ones(2, dtype=torch.int64))


class _Mean(torch.nn.Module):
    """Any module that returns a mean loss."""

    def __init__(self) -> None:
        super().__init__()
        self.head = torch.nn.Linear(4, 3, dtype=torch.float64)

    def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(self.head(x), targets)


def test_any_module_that_returns_its_mean_loss():
    torch.manual_seed(0)
    model, x = _Mean(), torch.randn(5, 4, dtype=torch.float64)
    targets = torch.tensor([0, -100, 2, 1, 0])
    expected = model(x, targets)
    (grad,) = torch.autograd.grad(expected, model.head.weight)
    spread = parallelize(model, microbatches=2)
    torch.testing.assert_close(spread.step(x, targets), expected.detach())
    torch.testing.assert_close(model.head.weight.grad, grad)
    torch.testing.assert_close(spread.evaluate(x, targets), expected.detach())
    torch.testing.assert_close(spread(x, targets), expected)
    assert parallelize(_Mean().float()).step(x.float(), targets).dtype == torch.float32
    halves = parallelize(_Mean(), microbatches=2)
    halves.module.load_state_dict(model.state_dict())
    valid = torch.tensor([-100, -100, -100, 1, 0])  # none in the first micro-batch
    torch.testing.assert_close(halves.step(x, valid), model(x, valid).detach())
    assert halves.module.head.weight.grad.isfinite().all()


def test_a_process_alone_is_cast_and_keeps_its_forward():
    torch.manual_seed(0)
    model = ParallelTransformer(TransformerConfig(**CONFIG))
    tokens, targets = _batches()[0]
    logits, loss = model(tokens), model(tokens, targets)
    spread = parallelize(model, recompute=True)
    torch.testing.assert_close(spread(tokens), logits)
    torch.testing.assert_close(spread(tokens, targets), loss)
    assert all(block.recompute for block in model.model.layers)
    low = parallelize(model, precision="bf16")
    assert low(tokens).dtype == torch.bfloat16
    assert low.step(tokens, targets).dtype == torch.float32
    assert abs(float(low.step(tokens, targets)) - float(loss.detach())) < 0.02


def test_an_overflow_in_fp16_leaves_no_gradients_and_halves_the_scale():
    model = parallelize(_Mean().float(), precision="fp16")
    assert model.loss_scale is not None
    x, targets = torch.ones(2, 4), torch.tensor([0, 1])
    expected = float(model.evaluate(x, targets))
    model.loss_scale.factor = 2.0**40  # the gradient of fp16 logits overflows
    assert float(model.step(x, targets)) == pytest.approx(expected, rel=1e-3)
    assert model.loss_scale.factor == 2.0**39
    assert all(param.grad is None for param in model.parameters())
    model.loss_scale.factor = 2.0**10
    model.step(x, targets)
    params = list(model.module.parameters())
    exact = torch.autograd.grad(model.module(x, targets), params)
    torch.testing.assert_close([param.grad for param in params], list(exact), atol=1e-3, rtol=1e-2)
