"""all_gather_linear, linear_reduce_scatter, linear_all_reduce: cases in one process, then ranks that are processes."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from symmetric_case import make_pool

from shardfuse.kernels.comm import (
    Norm,
    all_gather_linear,
    all_reduce_shape,
    linear_all_reduce,
    linear_reduce_scatter,
    reduce_scatter_shape,
    transport,
)
from shardfuse.kernels.dev import accuracy, registry
from shardfuse.kernels.dev.cases import comm as cases
from shardfuse.kernels.linear import reference as linear
from shardfuse.kernels.norm import reference as norms
from shardfuse.kernels.runtime import dispatch, signals_triton
from shardfuse.kernels.runtime.signals import (
    CHUNKS,
    ExchangeTimeout,
    following,
    in_one_process,
    raise_flags,
    reached,
    rows_of,
)
from shardfuse.parallel.core.mesh import Group, everyone
from shardfuse.parallel.overlap.memory.pool import SymmetricMemoryPool

interpret = pytest.mark.interpret
IMPLS = ["reference", pytest.param("triton", marks=interpret)]
TEST_CASES = [(spec, case) for spec in cases.SPECS[:3] for case in spec.tagged("test")]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CPU = torch.device("cpu")
SLOT = 1 << 16  # bytes
PATIENCE = 2.0  # seconds that a wait may take where it is in vain: more than ranks that share cores are apart


# --- in one process ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(("spec", "case"), TEST_CASES, ids=lambda value: value.name)
def test_ranks_that_take_turns(spec: registry.OpSpec, case: registry.Case, impl: str):
    inputs = spec.make_inputs(case, DEVICE, 0)
    oracle = spec.run(registry.to_double(inputs, DEVICE), case, "reference")
    low = spec.run(inputs, case, "reference")
    for name, out in spec.run(inputs, case, impl).items():
        verdict = accuracy.judge(name, out, low[name], oracle[name], terms=spec.terms(case))
        assert verdict.ok, verdict
        if spec is not cases.REDUCE_SCATTER:  # [R, ...]: every rank has the same, bit for bit
            assert all(torch.equal(out[0], other) for other in out[1:])


def test_the_references_are_the_product_of_everything():
    """The oracles of the other tests, against one matrix product in fp64."""
    case = cases.GATHER.tagged("test")[0]
    inputs = registry.to_double(cases.GATHER.make_inputs(case, CPU, 0))
    (y,) = linear.linear_act(inputs["x"], inputs["weights"], inputs["biases"], "gelu_tanh")
    torch.testing.assert_close(cases.GATHER.run(inputs, case, "reference")["y0"][1], y)
    case = cases.REDUCE_SCATTER.tagged("test")[0]
    inputs = registry.to_double(cases.REDUCE_SCATTER.make_inputs(case, CPU, 0))
    s = torch.einsum("rtk,rnk->tn", inputs["x"], inputs["weight"]) + inputs["bias"] + inputs["residual"]
    torch.testing.assert_close(cases.REDUCE_SCATTER.run(inputs, case, "reference")["y"], s)
    torch.testing.assert_close(cases.ALL_REDUCE.run(inputs, case, "reference")["y"], s.expand(2, -1, -1))


# --- ranks that are processes -----------------------------------------------------------------------------------------


def _pool(group: Group | None = None, **options: Any) -> SymmetricMemoryPool:
    return SymmetricMemoryPool.of(group or everyone(), device="cpu", **options)


@contextlib.contextmanager
def _closing(pool: SymmetricMemoryPool) -> Iterator[SymmetricMemoryPool]:
    try:
        yield pool
    finally:
        pool.close()


def _drawn(seed: int, *shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def _check_gather(channel: Any, rank: int, world: int, T: int, seed: int, dtype: torch.dtype) -> None:
    K, N = 32, 24
    X, W, b = (_drawn(seed + i, *shape, dtype=dtype, scale=0.3) for i, shape in enumerate(((T, K), (N, K), (N,))))
    first, last = rows_of(rank, world, T)
    peers, signals = channel.begin((T, K), dtype, op="test")
    y = all_gather_linear(
        X[first:last], W, b, peers=peers, signals=signals, activation="relu", pieces=1 + seed % 3, impl="triton"
    )
    assert torch.equal(peers[rank], X)  # what arrived, for whoever reads it next
    channel.end()
    (oracle,) = linear.linear_act(X.double(), [W.double()], [b.double()], "relu")
    (low,) = linear.linear_act(X, [W], [b], "relu")
    verdict = accuracy.judge(f"gather T={T}", y, low, oracle, terms=W.shape[1])
    assert verdict.ok, verdict


def _check_reduce(
    channel: Any, rank: int, world: int, T: int, seed: int, dtype: torch.dtype, *, gather: bool, normed: bool
) -> None:
    """Against plain collectives: the product, all-reduced, and what follows it."""
    K, N = 32, 24
    xs = [_drawn(seed + r, T, K, dtype=dtype, scale=0.3) for r in range(world)]
    ws = [_drawn(seed + 50 + r, N, K, dtype=dtype, scale=0.3) for r in range(world)]
    bias, residual, weight = (
        _drawn(seed + 90 + i, *shape, dtype=dtype) for i, shape in enumerate(((N,), (T, N), (N,)))
    )
    first, last = (0, T) if gather else rows_of(rank, world, T)
    run, shape = (linear_all_reduce, all_reduce_shape) if gather else (linear_reduce_scatter, reduce_scatter_shape)
    peers, signals = channel.begin(shape(T, N, world), dtype, op="test")
    outs = run(
        xs[rank], ws[rank], bias, peers=peers, signals=signals, residual=residual[first:last],
        norm=Norm(weight) if normed else None, impl="triton",
    )  # fmt: skip
    channel.end()
    total = xs[rank].double() @ ws[rank].double().t()
    dist.all_reduce(total)
    expected = {}
    for precision, addends in (("oracle", total), ("low", sum(x @ w.t() for x, w in zip(xs, ws)))):
        wide = torch.float64 if precision == "oracle" else torch.float32
        s = (addends.to(wide) + bias.to(wide) + residual.to(wide)).to(wide if precision == "oracle" else dtype)
        expected[precision] = [norms.rms_norm(s, weight.to(s.dtype), 1e-6, 0.0, s.dtype), s] if normed else [s]
    names, outs = (("y", "s"), outs) if normed else (("s",), [outs])
    for name, out, oracle, low in zip(names, outs, expected["oracle"], expected["low"]):
        verdict = accuracy.judge(f"{name} T={T} gather={gather}", out, low[first:last], oracle[first:last], terms=64)
        assert verdict.ok, verdict
    if gather:  # all ranks hold the same bits
        everyones = [None] * world
        dist.all_gather_object(everyones, outs[-1])
        assert all(torch.equal(everyones[0], other) for other in everyones)  # type: ignore[arg-type]


def _epochs_body(rank: int, world: int, epochs: int, first_epoch: int) -> list[int]:
    """Exchanges of all kinds and sizes, each rank late at random, back to back on two channels."""
    late = random.Random(rank)
    with _closing(make_pool(first_epoch=first_epoch, rebase_every=40)) as pool:
        gather, reduce = pool.channel("gather", SLOT), pool.channel("reduce", SLOT)
        for number in range(epochs):
            same = random.Random(number)  # on all ranks
            T = same.choice([0, 1, world - 1, world, world + 1, 9, 33])
            dtype = same.choice([torch.float32, torch.float16])
            kind = same.choice(["gather", "scatter", "reduce"])
            if late.random() < 0.5:
                time.sleep(late.random() * 0.02)
            if kind == "gather":
                _check_gather(gather, rank, world, T, number, dtype)
            else:
                _check_reduce(
                    reduce, rank, world, T, number, dtype, gather=kind == "reduce", normed=same.random() < 0.5
                )
        return [gather.epoch, reduce.epoch]


@interpret
@pytest.mark.parametrize(("world", "epochs", "first"), [(2, 100, 0), (3, 12, 2**31 - 5), (4, 8, -3)])
def test_many_exchanges_with_ranks_that_come_late(ranks: Any, world: int, epochs: int, first: int):
    counts = ranks(world, _epochs_body, epochs, first)
    assert all(count == counts[0] for count in counts)
    assert sum((count - first) % 2**32 for count in counts[0]) == epochs


def _repeat_body(rank: int, world: int) -> list[torch.Tensor]:
    found = []
    with _closing(_pool()) as pool:
        channel = pool.channel("reduce", SLOT)
        for _ in range(3):
            time.sleep(random.Random(rank + len(found)).random() * 0.05)
            peers, signals = channel.begin(reduce_scatter_shape(33, 24, world), torch.float16)
            x, w = _drawn(rank, 33, 32, dtype=torch.float16), _drawn(rank + 9, 24, 32, dtype=torch.float16)
            found.append(linear_reduce_scatter(x, w, peers=peers, signals=signals, impl="triton"))
            channel.end()
    return found


@interpret
def test_sums_come_out_the_same_bits_in_whatever_order_ranks_arrive(ranks: Any):
    for found in ranks(3, _repeat_body):
        assert all(torch.equal(found[0], again) for again in found[1:])


def _subgroup_body(rank: int, world: int) -> None:
    """Ranks {0, 2} and {1, 3}, each pair with a pool of its own, and all four with a third."""
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    pair = Group(pairs[rank % 2], rank // 2, 2, None)
    with _closing(_pool(pair)) as ours, _closing(_pool()) as all_:
        mine, wide = ours.channel("gather", SLOT), all_.channel("gather", SLOT)
        for number in range(3):
            _check_gather(mine, rank // 2, 2, 20 + rank % 2, number, torch.float32)
            _check_gather(wide, rank, 4, 9, number, torch.float32)


@interpret
def test_subgroups_and_the_world_side_by_side(ranks: Any):
    ranks(4, _subgroup_body)


def _in_flight_body(rank: int, world: int) -> None:
    """Two layers' exchanges at once: what the first one gathered is read after the second one's sum."""
    with _closing(_pool()) as pool:
        gather, reduce = pool.channel("gather", SLOT), pool.channel("reduce", SLOT)
        for number in range(4):
            X = _drawn(number, 20, 32)
            first, last = rows_of(rank, world, 20)
            peers, signals = gather.begin((20, 32), torch.float32)
            all_gather_linear(X[first:last], _drawn(7, 24, 32), peers=peers, signals=signals, impl="triton")
            _check_reduce(reduce, rank, world, 33, number, torch.float32, gather=False, normed=False)
            assert torch.equal(peers[rank], X)
            gather.end()


@interpret
def test_exchanges_of_two_channels_may_overlap(ranks: Any):
    ranks(2, _in_flight_body)


# --- what goes wrong --------------------------------------------------------------------------------------------------


def _never_arrives(patch: pytest.MonkeyPatch, peer: int, piece: int) -> None:
    """``peer`` is never told of one piece of this rank's rows."""

    def raised(signals: Any, phase: int, chunk: int, to: Any) -> None:
        raise_flags(signals, phase, chunk, [other for other in to if (other, chunk) != (peer, piece)])

    patch.setattr(transport, "raise_flags", raised)


def _pushes_late(patch: pytest.MonkeyPatch, before: Callable[[], object]) -> None:
    """A thread waits for ``before``, beside the product, and only then pushes rows to other ranks."""

    def start_push(x: torch.Tensor, *push: Any) -> Callable[[], None]:
        transport.keep(x, *push)

        def push_late() -> None:
            before()
            transport.send(*push)

        late = threading.Thread(target=push_late)
        late.start()
        return late.join

    patch.setattr(transport, "start_push", start_push)


def _dropped_body(rank: int, world: int) -> str:
    """Rank 1 keeps its second piece from rank 0."""
    with _closing(_pool(timeout_s=PATIENCE)) as pool:
        channel = pool.channel("gather", SLOT)
        _check_gather(channel, rank, world, 20, 1, torch.float32)
        peers, signals = channel.begin((20, 32), torch.float32)
        first, last = rows_of(rank, world, 20)
        arguments = {"peers": peers, "signals": signals, "pieces": 3, "impl": "triton"}
        dist.barrier()
        try:
            with pytest.MonkeyPatch.context() as patch:
                if rank == 1:
                    _never_arrives(patch, peer=0, piece=1)
                all_gather_linear(_drawn(1, last - first, 32), _drawn(2, 24, 32), **arguments)
            return "done"
        except ExchangeTimeout as error:
            return str(error)


@interpret
def test_a_piece_that_never_comes_is_named(ranks: Any):
    told, *others = ranks(3, _dropped_body)
    assert "all_gather_linear of [7, 32]: rank 0 waited in vain for data from rank 1 (chunk 1, exchange 2" in told
    assert others == ["done", "done"]


def _absent_body(rank: int, world: int, gather: bool) -> str:
    """Rank 2 does not take part in the second exchange."""
    with _closing(_pool(timeout_s=PATIENCE)) as pool:
        channel = pool.channel("reduce", SLOT)
        for number in range(2):
            dist.barrier()
            if number == 1 and rank == 2:
                break
            try:
                _check_send(channel, rank, world, gather)
            except ExchangeTimeout as error:
                return str(error)
        dist.barrier()
        return "done"


def _check_send(channel: Any, rank: int, world: int, gather: bool) -> None:
    shape, run = (all_reduce_shape, linear_all_reduce) if gather else (reduce_scatter_shape, linear_reduce_scatter)
    peers, signals = channel.begin(shape(20, 24, world), torch.float32)
    run(_drawn(rank, 20, 32), _drawn(9, 24, 32), peers=peers, signals=signals, impl="triton")
    channel.end()


def _absent_then_barrier(rank: int, world: int, gather: bool) -> str:
    said = _absent_body(rank, world, gather)
    if rank != 2:
        dist.barrier()  # the one that rank 2 waits at
    return said


@interpret
@pytest.mark.parametrize("gather", [False, True], ids=["reduce-scatter", "all-reduce"])
def test_a_rank_that_never_comes_is_named_by_all_others(ranks: Any, gather: bool):
    said = ranks(3, _absent_then_barrier, gather)
    for rank in (0, 1):
        assert f"rank {rank} waited in vain for data from rank 2 (chunk 0, exchange 2" in said[rank]
    assert said[2] == "done"


# --- overlap, shown by order ------------------------------------------------------------------------------------------


def _own_rows_first_body(rank: int, world: int) -> int:
    """No rows leave before the kernel spins, which it does when it has multiplied all rows that it has."""
    T, K, N = 128 * world, 32, 32
    X, W = _drawn(0, T, K), _drawn(1, N, K)
    first, last = rows_of(rank, world, T)
    tiles, looks, spinning = (last - first) // 32, [], threading.Event()
    clock = signals_triton._host_clock

    def looked() -> int:  # once when a wait begins, once for each flag that is not up yet
        looks.append(None)
        if len(looks) > tiles + 3:
            spinning.set()
        return clock()

    looked.__triton_builtin__ = True  # type: ignore[attr-defined]
    with _closing(_pool()) as pool, pytest.MonkeyPatch.context() as patch:
        _pushes_late(patch, lambda: spinning.wait(60.0))
        channel = pool.channel("gather", T * K * 4)
        peers, signals = channel.begin((T, K), torch.float32)
        signals_triton._host_clock = looked
        try:
            y = all_gather_linear(X[first:last], W, peers=peers, signals=signals, impl="triton")
        finally:
            signals_triton._host_clock = clock
        channel.end()
    torch.testing.assert_close(y, X @ W.t())
    return spinning.is_set()


@interpret
def test_own_rows_are_multiplied_before_others_arrive(ranks: Any):
    """The all-gather starts before and ends after the product of the rows that hide it."""
    assert ranks(2, _own_rows_first_body) == [True, True]


# --- bad input --------------------------------------------------------------------------------------------------------


def _one(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    peers = [torch.zeros(shape, dtype=dtype)]
    (signals,) = in_one_process(peers, timeout_s=1.0)
    return {"peers": peers, "signals": signals}


X, W = torch.zeros(5, 8), torch.zeros(4, 8)
BAD = [
    (all_gather_linear, (X[:3], W), ValueError, r"x is torch.float32 \[3, 8\]: expected .* \[5, 8\]"),
    (all_gather_linear, (X.half(), W), ValueError, "x is torch.float16"),
    (all_gather_linear, (X, torch.zeros(4, 9)), ValueError, r"expected \[F, 8\]"),
    (all_gather_linear, (X, torch.zeros(4, 8, requires_grad=True)), RuntimeError, "has no gradient"),
    (linear_reduce_scatter, (X, W), ValueError, r"peers\[0\] is .* expected contiguous .* \[1, 5, 4\]"),
    (linear_all_reduce, (X, W), ValueError, r"expected contiguous .* \[10, 4\]"),
]


@pytest.mark.parametrize(("run", "arguments", "error", "message"), BAD)
def test_bad_input_is_refused(run: Any, arguments: tuple[Any, ...], error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        run(*arguments, **_one((5, 8)))


def test_pieces_without_flags_are_refused():
    with pytest.raises(ValueError, match=rf"pieces=65: expected 1 to {CHUNKS}"):
        all_gather_linear(torch.zeros(5, 8), torch.zeros(4, 8), pieces=CHUNKS + 1, **_one((5, 8)))


def test_a_residual_has_the_results_rows():
    with pytest.raises(ValueError, match=r"residual is \[4, 4\]: expected \[5, 4\]"):
        linear_reduce_scatter(torch.zeros(5, 8), torch.zeros(4, 8), residual=torch.zeros(4, 4), **_one((1, 5, 4)))


def test_epochs_survive_their_wrap():
    assert following(2**31 - 1) == -(2**31)
    assert reached(-(2**31), 2**31 - 1)
    assert not reached(2**31 - 1, -(2**31))


def test_what_ran_is_counted_and_the_reference_waits_for_nobody():
    before, exchange = dispatch.counts["all_gather_linear", "reference"], _one((5, 8))
    with pytest.raises(RuntimeError, match="waits for nobody, and nothing has come from rank 0 in exchange 1"):
        all_gather_linear(X, W, impl="reference", **exchange)
    raise_flags(exchange["signals"], 0, 0, [0])
    all_gather_linear(X, W, impl="reference", **exchange)
    assert dispatch.counts["all_gather_linear", "reference"] == before + 2


def test_what_follows_a_sum_has_to_fit():
    for more, error in (
        ({"norm": Norm(torch.ones(3))}, ValueError),
        ({"residual": torch.zeros(5, 4).long()}, ValueError),
        ({"norm": Norm(torch.ones(4, requires_grad=True))}, RuntimeError),
    ):
        with pytest.raises(error, match=r"norm's weight|residual"):
            linear_reduce_scatter(X, W, **more, **_one((1, 5, 4)))


def _invariant_body(rank: int, world: int) -> None:
    """Rows whose pitch no TMA takes: the product has to wait for them, whatever else it promises."""
    with _closing(_pool()) as pool, dispatch.row_invariance():
        channel = pool.channel("gather", SLOT)
        time.sleep(0.2 * rank)
        whole = _drawn(1, 20, 33)
        peers, signals = channel.begin((20, 33), torch.float32)
        first, last = rows_of(rank, world, 20)
        y = all_gather_linear(whole[first:last], _drawn(2, 24, 33), peers=peers, signals=signals, impl="triton")
        channel.end()
        torch.testing.assert_close(y, whole @ _drawn(2, 24, 33).t())


@interpret
def test_row_invariance_does_not_read_ahead(ranks: Any):
    ranks(2, _invariant_body)
