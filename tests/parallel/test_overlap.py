"""Collectives in pieces that overlap products: the same sums, the same counts, and real overlap.

Comparisons with the plain path are in fp64 to 1e-12, or in a low precision by the budgets of accuracy.py.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from overlap_case import (
    FFN,
    KIND,
    KINDS,
    SP,
    D,
    T,
    close,
    counted_calls,
    local_dy,
    local_leaves,
    recompute_options,
    reference,
    run_backward,
    run_forward,
    whole_operands,
    world_group,
)
from products import around
from wire import recorded, slow_wire

from shardfuse.kernels.dev import accuracy
from shardfuse.kernels.linear import Product
from shardfuse.kernels.runtime.dispatch import Choice
from shardfuse.parallel.core import collectives
from shardfuse.parallel.core.mesh import Group, tp_group
from shardfuse.parallel.core.options import TPOptions
from shardfuse.parallel.linear import column_linear, row_linear
from shardfuse.parallel.overlap import policy
from shardfuse.parallel.overlap.plan import OverlapPlan

pytestmark = pytest.mark.ranks

CHUNKED = OverlapPlan("chunked", 2)
PLAIN = OverlapPlan()
REFERENCE = Choice("reference", "in plain torch")
WORLDS = pytest.mark.parametrize("world", [2, 3])


# --- operations -------------------------------------------------------------------------------------------------------


def _operands(world: int, tokens: int, dtype: torch.dtype = torch.float64) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Rows [tokens, D] of each rank and a weight [D, FFN], the same on all ranks."""
    generator = torch.Generator().manual_seed(3)
    rows = [torch.randn(tokens, D, generator=generator, dtype=torch.float64).to(dtype) for _ in range(world)]
    return rows, torch.randn(D, FFN, generator=generator, dtype=torch.float64).to(dtype)


def _operations_body(rank: int, world: int, tokens: int) -> list[str]:
    """The differences between the paths, or from the sums over all ranks' data."""
    group, wrong = world_group(), []
    rows, weight = _operands(world, tokens)
    shards, own = tokens // world, slice(rank * tokens // world, (rank + 1) * tokens // world)
    formed: list[list[int]] = []  # the rows of each product, by their first number
    for i, x in enumerate(rows):
        x[:, 0] = torch.arange(tokens) + 1000 * i

    def noted(name: str, run: Any, of: Product) -> Any:
        formed.append([int(number) % 1000 for number in of.rows[0][:, 0]])
        return run()

    gathered = Product.linear_act(rows[0][own], [weight.t(), weight[:, :2].t()], [None] * 2, "identity", REFERENCE)
    addend = Product.input_grad([rows[rank]], [weight], REFERENCE)
    total = torch.stack(rows).sum(0) @ weight
    for plan in (PLAIN, *(OverlapPlan("chunked", pieces) for pieces in (1, 2, 5, tokens + 1))):
        strategy = plan.strategy(group)
        found: dict[str, Any] = {}
        counts = []
        for name, run in {
            "gather": lambda way=strategy: way.all_gather_linear(gathered, site="s"),
            "scatter": lambda way=strategy: way.linear_reduce_scatter(addend, site="s").wait(),
            "start_reduce": lambda way=strategy: way.linear_all_reduce(addend, site="s").wait(),
            "reduce": lambda way=strategy: way.linear_all_reduce(addend, site="s", async_op=False).wait(),
        }.items():
            formed.clear()
            collectives.reset_counts()
            with around(noted):
                found[name] = run()
            counts += [*collectives.calls.items(), *collectives.payload.items()]
            if plan.kind == "chunked" and tokens:
                if sorted(row for part in formed for row in part) != list(range(tokens)):
                    wrong.append(f"{plan} {name}: rows formed: {formed}")
                place = {"gather": 0, "scatter": -1}.get(name)
                if place is not None and formed[place] != list(range(own.start, own.stop)):
                    wrong.append(f"{plan} {name}: the own rows are not where they cost nobody time: {formed}")
                pieces = {"gather": world * plan.pieces, "scatter": world * plan.pieces}.get(name, plan.pieces)
                if len(formed) > pieces:
                    wrong.append(f"{plan} {name}: {len(formed)} products")
        (y, narrow), whole = found["gather"]
        expected = [(y, rows[0] @ weight), (narrow, rows[0] @ weight[:, :2]), (whole, rows[0])]
        expected += [(found["scatter"], total[own]), (found["reduce"], total), (found["start_reduce"], total)]
        wrong += [f"{plan} {i}" for i, (ours, theirs) in enumerate(expected) if not close(ours, theirs)]
        nbytes = 8 * tokens * FFN
        if counts != [
            (("all_gather", "s"), 1), (("all_gather", "s"), 8 * shards * D),
            (("reduce_scatter", "s"), 1), (("reduce_scatter", "s"), nbytes),
            *[(("all_reduce", "s"), 1), (("all_reduce", "s"), nbytes)] * 2,
        ]:  # fmt: skip
            wrong.append(f"{plan}: counted {counts}")
    return wrong


@WORLDS
@pytest.mark.parametrize("tokens", [0, 6, 24])
def test_every_path_gives_the_same_and_counts_the_same(ranks: Any, world: int, tokens: int):
    assert ranks(world, _operations_body, tokens) == [[]] * world


def _few_rows_body(rank: int, world: int) -> list[str]:
    """Sums of fewer rows than ranks or pieces, and of an indivisible number of rows."""
    wrong = []
    for tokens in (1, 2, 7):
        rows, weight = _operands(world, tokens)
        addend = Product.input_grad([rows[rank]], [weight], REFERENCE)
        in_four = OverlapPlan("chunked", 4).strategy(world_group())
        total = in_four.linear_all_reduce(addend, site="s", async_op=False).wait()
        if not close(total, torch.stack(rows).sum(0) @ weight):
            wrong.append(f"{tokens} rows")
        if tokens % world:
            with pytest.raises(ValueError, match=rf"s: {tokens} rows do not divide by the group's {world} ranks"):
                CHUNKED.strategy(world_group()).linear_reduce_scatter(addend, site="s")
    return wrong


@WORLDS
def test_fewer_rows_than_ranks(ranks: Any, world: int):
    assert ranks(world, _few_rows_body) == [[]] * world


def _rounding_body(rank: int, world: int) -> list[float]:
    x = torch.full((world, 1), 256.0 if rank == 0 else 1.0, dtype=torch.bfloat16)
    addend = Product.input_grad([x], [torch.ones(1, 1, dtype=torch.bfloat16)], REFERENCE)
    return CHUNKED.strategy(world_group()).linear_reduce_scatter(addend, site="s").wait().flatten().tolist()


def test_a_sum_in_pieces_rounds_once(ranks: Any):
    # bf16 holds 256 and 258 but not 257: adding ones one by one would stay at 256.
    assert ranks(3, _rounding_body) == [[258.0]] * 3


def _in_flight_body(rank: int, world: int, members: list[list[int]]) -> list[str]:
    """Many concurrent collectives of all kinds, finished in different orders, in groups that run at the same time."""
    groups = [dist.new_group(ranks) for ranks in members]
    (group,) = [tp_group(pg) for pg, ranks in zip(groups, members) if rank in ranks]
    size, wrong, started = group.size, [], []
    first = members[[rank in ranks for ranks in members].index(True)][0]  # tells the groups' data apart
    rows = [torch.randn(4 * size, 3, generator=torch.Generator().manual_seed(10 * first + s)) for s in range(size)]
    total, mine = torch.stack(rows).double().sum(0), rows[group.rank]
    own = slice(4 * group.rank, 4 * group.rank + 4)
    letter = torch.full((2,), float(group.rank))  # the caller's own message, around all of ours
    posted = dist.isend(letter, group=group.pg, group_dst=(group.rank + 1) % size)
    for i in range(6):
        scaled = Product.input_grad([mine], [torch.eye(3) * (i + 1)], REFERENCE)
        strategy = (CHUNKED, OverlapPlan("chunked", 3), PLAIN)[i % 3].strategy(group)
        start = (strategy.linear_reduce_scatter, strategy.linear_all_reduce)[i % 2]
        started.append((i, start(scaled, site=f"s{i}").wait))
        twice = Product.input_grad([rows[0][own] + i], [torch.eye(3) * 2], REFERENCE)
        (doubled,), whole = CHUNKED.strategy(group).all_gather_linear(twice, site=f"g{i}")
        small = collectives.all_reduce(torch.tensor([1.0]), group, site="small")  # by exchange between two ranks
        if small.item() != size or not torch.equal(whole, rows[0] + i) or not torch.equal(doubled, whole * 2):
            wrong.append(f"gather {i}")
        if i == 3:
            wrong += _finished(started[1:3], total, own)
            del started[1:3]
    wrong += _finished(started[::-1], total, own)
    received = torch.empty(2)
    dist.recv(received, group=group.pg, group_src=(group.rank - 1) % size)
    posted.wait()
    return wrong if received.tolist() == [(group.rank - 1) % size] * 2 else [*wrong, "the caller's message"]


def _finished(started: list[Any], total: torch.Tensor, own: slice) -> list[str]:
    wrong = []
    for i, finish in started:
        expected = total * (i + 1)
        if accuracy.relative_error(finish(), expected if i % 2 else expected[own]) > 1e-6:
            wrong.append(f"sum {i}")
    return wrong


@pytest.mark.parametrize("members", [[[0, 1]], [[0, 1, 2]], [[0, 2], [1, 3]]], ids=["2", "3", "pairs-of-4"])
def test_several_in_flight_do_not_mix(ranks: Any, members: list[list[int]]):
    world = sum(map(len, members))
    assert ranks(world, _in_flight_body, members) == [[]] * world


# --- layers -----------------------------------------------------------------------------------------------------------


def _layers_body(rank: int, world: int, kind: str, sequence_parallel: bool) -> list[str]:
    """The errors of chunked layers: results against one process, and counts against plain layers."""
    whole, group, wrong = whole_operands(), world_group(), []
    expected = reference(whole, kind, rank, world, sequence_parallel)
    again = [("all_gather", {"layers": "in.again"}.get(kind, "mlp.in.again"))] if sequence_parallel else []
    for options in recompute_options(kind):
        counted = {}
        for way in ("none", "chunked"):
            leaves = local_leaves(whole, kind, rank, world, sequence_parallel)
            collectives.reset_counts()
            y = run_forward(
                leaves, kind, group, sequence_parallel=sequence_parallel, overlap=way, strict=True, **options
            )
            found = run_backward(y, local_dy(whole, leaves, rank, sequence_parallel), leaves)
            wrong += [f"{way} {options} {name}" for name, value in found.items() if not close(value, expected[name])]
            counted[way] = counted_calls()
        plain = counted["none"] | dict.fromkeys(again, (1, T // world * D * 8))
        if counted["chunked"] != plain:
            wrong.append(f"{options}: counted {counted['chunked']}, not {plain}")
    return wrong


@WORLDS
@KIND
@SP
def test_layers_in_pieces_give_what_one_process_does(ranks: Any, world: int, kind: str, sequence_parallel: bool):
    assert ranks(world, _layers_body, kind, sequence_parallel) == [[]] * world


def _precision_body(rank: int, world: int, autocast: bool) -> list[str]:
    wrong = []
    for kind in KINDS:
        low = torch.float32 if autocast else torch.bfloat16
        whole, oracle = whole_operands(low), whole_operands(low)
        oracle = {name: x.double() for name, x in oracle.items()}
        context: Callable[[], Any] = lambda: torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext()
        leaves = local_leaves(whole, kind, rank, world, True)
        with context():
            y = run_forward(leaves, kind, world_group(), sequence_parallel=True, overlap="chunked")
            budget = reference(whole, kind, rank, world, True)
        assert y.dtype == torch.bfloat16
        found = run_backward(y, local_dy(whole, leaves, rank, True), leaves)
        assert all(leaf.grad.dtype == low for leaf in leaves.values())
        exact = reference(oracle, kind, rank, world, True)
        verdicts = [
            accuracy.judge(name, value, budget[name], exact[name], terms=FFN, roundings=4, computed=torch.bfloat16)
            for name, value in found.items()
        ]
        wrong += [f"{kind} {verdict}" for verdict in verdicts if not verdict.ok]
    return wrong


@pytest.mark.parametrize("autocast", [False, True], ids=["bf16", "autocast"])
def test_layers_in_pieces_are_as_accurate_in_bf16(ranks: Any, autocast: bool):
    assert ranks(2, _precision_body, autocast) == [[], []]


def _shapes_body(rank: int, world: int) -> None:
    """Tokens of several dimensions, one token, no tokens; frozen operands."""
    whole, group = whole_operands(), world_group()
    for sequence_parallel, shapes in (
        (False, ((2, 3, D), (D,), (0, D), (2, 0, D))),
        (True, ((2, 3, D), (1, D), (0, D))),
    ):
        for shape, kind in ((shape, kind) for shape in shapes for kind in KINDS):
            leaves = local_leaves(whole, kind, rank, world, False)
            found = {}
            for way in ("none", "chunked"):
                generator = torch.Generator().manual_seed(rank if sequence_parallel else 0)
                leaves["x"] = torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_()
                y = run_forward(leaves, kind, group, sequence_parallel=sequence_parallel, overlap=way)
                assert y.shape == shape
                y.add_(1.0)  # a result that is not a view may be changed in place
                found[way] = run_backward(y, torch.ones_like(y), leaves)
            for name, value in found["none"].items():
                assert close(found["chunked"][name], value), (shape, kind, name)
    for kind in KINDS:
        expected = reference(whole, kind, rank, world, True)
        for wanted in (name for name in expected if name != "y"):
            leaves = local_leaves(whole, kind, rank, world, True)
            for name, leaf in leaves.items():
                leaf.requires_grad_(name == wanted)
            collectives.reset_counts()
            y = run_forward(leaves, kind, group, sequence_parallel=True, overlap="chunked")
            y.backward(local_dy(whole, leaves, rank, True))
            gathered = sum(calls for (what, site), calls in collectives.calls.items() if site.endswith(".again"))
            assert gathered == (wanted in ("w1", "w3")), (kind, wanted)  # no unneeded collective
            assert close(leaves[wanted].grad, expected[wanted]), (kind, wanted)


def test_shapes_and_frozen_operands(ranks: Any):
    ranks(2, _shapes_body)


# --- overlap ----------------------------------------------------------------------------------------------------------


def _spans(events: list[Any], kind: str, site: str) -> list[tuple[float, float]]:
    """The begin and end of each piece of a collective, and of each product beside it."""
    times = {what: [when for w, k, s, when in events if (w, k, s) == (what, kind, site)] for what in ("start", "end")}
    assert len(times["start"]) == len(times["end"]), (kind, site, events)
    return list(zip(times["start"], times["end"]))


def _order_body(rank: int, world: int, kind: str, sequence_parallel: bool) -> dict[str, Any]:
    """The spans of pieces and products in one step, by site."""
    whole, group = whole_operands(), world_group()
    leaves = local_leaves(whole, kind, rank, world, sequence_parallel)
    with recorded() as events:
        y = run_forward(leaves, kind, group, sequence_parallel=sequence_parallel, overlap="chunked")
        y.backward(local_dy(whole, leaves, rank, sequence_parallel))
    keys = {(what, site) for _, what, site, _ in events if what not in ("product", "gather_objects")}
    return {site: (what, _spans(events, what, site), _spans(events, "product", site)) for what, site in keys}


def _under(piece: tuple[float, float], product: tuple[float, float]) -> bool:
    return piece[0] <= product[0] and product[1] <= piece[1]


@WORLDS
@KIND
@SP
def test_pieces_travel_under_the_products(ranks: Any, world: int, kind: str, sequence_parallel: bool):
    for spans in ranks(world, _order_body, kind, sequence_parallel):
        again = {"in.again", "mlp.in.again"} & set(spans)
        assert len(spans) - len(again) == (4 if sequence_parallel else 2)
        for site, (what, pieces, products) in spans.items():
            if site in again:  # it is there before the weights' gradients, and began before dx was formed
                dx = spans[site.replace("again", "grad")][2]
                assert _under(pieces[0], dx[0])
            elif what == "all_gather":
                assert len(pieces) == len(products) - 1
                assert all(_under(piece, products[0]) for piece in pieces)  # the product of the own rows
                assert all(piece[1] <= product[0] for piece, product in zip(pieces, products[1:]))
            elif what == "reduce_scatter" or site.endswith(".grad"):
                # The product of the own rows is the sum's last; in backward the weights' gradients follow.
                assert all(_under(piece, products[-1]) for piece in pieces)
            else:
                assert all(_under(piece, product) for piece, product in zip(pieces, products[1:]))


DELAY, PRODUCT = 0.08, 0.09  # seconds: of the wire, and of each product that should hide it


@contextmanager
def _steady_products(seconds: float) -> Iterator[None]:
    """Every product takes a fixed time, as on a separate device: the same on a busy machine as on an idle one, without
    occupying a core that another rank needs.
    """

    def steady(name: str, run: Any, of: Any) -> Any:
        end = time.monotonic() + seconds
        result = run()
        time.sleep(max(0.0, end - time.monotonic()))
        return result

    select = policy.select
    # Few pieces, hence few products.
    policy.select = lambda *_, **options: OverlapPlan(options["overlap"])  # type: ignore[assignment]
    try:
        with around(steady):
            yield
    finally:
        policy.select = select


def _delay_body(rank: int, world: int, sequence_parallel: bool) -> dict[str, float]:
    """The time that a slow wire adds to a step, in units of its delay; the best of several tries."""
    whole, group = whole_operands(), world_group()
    leaves = local_leaves(whole, "layers", rank, world, sequence_parallel)
    w1, b1, w2, b2 = (leaves[name] for name in ("w1", "b1", "w2", "b2"))

    def timed(**options: Any) -> float:
        dist.barrier()
        start = time.monotonic()
        (y,) = column_linear(leaves["x"], [w1], [b1], TPOptions(group, site="in", **options))
        if sequence_parallel:  # else no product hides a row layer's last piece
            y = row_linear(y, w2, b2, TPOptions(group, site="out", **options))
        y.sum().backward()
        return time.monotonic() - start

    grown = {}
    for way, tries in (("none", 2), ("chunked", 3)):
        options = {"overlap": way, "sequence_parallel": sequence_parallel}
        timed(**options)  # the first run has more to do
        with _steady_products(PRODUCT):
            best = {0.0: float("inf"), DELAY: float("inf")}
            for _ in range(tries):
                for seconds in best:
                    with slow_wire(seconds):
                        best[seconds] = min(best[seconds], timed(**options))
            grown[way] = (best[DELAY] - best[0.0]) / DELAY
    return grown


@SP
def test_a_slow_wire_is_hidden(ranks: Any, sequence_parallel: bool):
    for grown in ranks(2, _delay_body, sequence_parallel):
        assert grown["chunked"] < 0.3
        if sequence_parallel:  # four collectives, of which the plain path hides only dx's
            assert grown["none"] > 2.5


# --- errors -----------------------------------------------------------------------------------------------------------


def _refused_body(rank: int, world: int) -> None:
    """Operands that do not fit are refused before any message is sent: the group keeps working."""
    whole, group = whole_operands(), world_group()
    for kind in KINDS:
        leaves = local_leaves(whole, kind, rank, world, True)
        bad = leaves | {"x": leaves["x"][:, :-1]}
        with pytest.raises(ValueError, match="weight 0 has shape"):
            run_forward(bad, kind, group, sequence_parallel=True, overlap="chunked")
        y = run_forward(leaves, kind, group, sequence_parallel=True, overlap="chunked")
        assert close(y.detach(), reference(whole, kind, rank, world, True)["y"])


def test_operands_that_do_not_fit_leave_nothing_behind(ranks: Any):
    ranks(2, _refused_body)


def _exchange(kind: str, group: Group) -> None:
    x = torch.ones(2 * group.size, 4)
    same = Product.input_grad([x], [torch.eye(4)], REFERENCE)
    strategy = CHUNKED.strategy(group)
    if kind == "gather":
        strategy.all_gather_linear(same, site="mlp.in")
    elif kind == "plain":
        collectives.all_gather(x, group, site="mlp.in")
    else:
        start = strategy.linear_reduce_scatter if kind == "scatter" else strategy.linear_all_reduce
        start(same, site="mlp.in").wait()


def _gone_body(rank: int, world: int, kind: str) -> str:
    """The remaining ranks' errors when the last rank exits; they then exit as well."""
    group = tp_group(dist.new_group(range(world)))  # torch may hold the default group elsewhere
    _exchange(kind, group)
    message = "goes first"
    if rank < world - 1:
        try:
            _exchange(kind, group)
        except RuntimeError as error:
            message = str(error)
    dist.destroy_process_group()
    del group
    gc.collect()  # connections close with the last reference to a group
    return message


@WORLDS
@pytest.mark.parametrize("kind", ["gather", "scatter", "reduce", "plain"])
def test_who_loses_a_peer_says_where(ranks: Any, world: int, kind: str):
    *messages, _ = ranks(world, _gone_body, kind)
    what = {"gather": "all_gather", "scatter": "reduce_scatter", "reduce": "all_reduce", "plain": "all_gather"}[kind]
    for message in messages:
        assert f"mlp.in: {what} failed: has another rank of the group ended" in message
