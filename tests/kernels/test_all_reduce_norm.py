"""Sums over ranks with residual and norm in one kernel: ranks that are processes, and ranks that take turns in one."""

from __future__ import annotations

import hashlib
import random
import time
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from oracle import assert_matches
from symmetric_case import make_pool

from shardfuse.kernels.comm import Norm, all_reduce_rmsnorm, reduce, reduce_config, reduce_op
from shardfuse.kernels.comm import reduce_reference as reference
from shardfuse.kernels.dev import accuracy, registry
from shardfuse.kernels.norm import rms_norm
from shardfuse.kernels.runtime import dispatch
from shardfuse.kernels.runtime.signals import EPOCH, GAVE_UP, ExchangeTimeout, in_one_process, raise_flags, rows_of
from shardfuse.parallel.overlap.memory.pool import SymmetricMemoryPool

CPU = torch.device("cpu")
PROGRAMS = reduce_config.flagged_programs("interpreter")
CASES = registry.op("all_reduce_rmsnorm").tagged("test")
MODES = ("1", "2", "scattered", "gathered")  # of an exchange: one shot, two, or what follows a GEMM that sends


# ------------------------------------------------------------------------------------------ ranks that take turns


@pytest.mark.interpret
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_kernel_matches_the_oracle(case):
    spec = registry.op("all_reduce_rmsnorm")
    assert_matches(spec, case, spec.make_inputs(case, CPU, seed=1))


def test_the_reference_is_what_its_docstring_says():
    """From the definition, in fp64, in one round and in two."""
    x, residual, weight, bias = (torch.randn(*shape).double() for shape in ((3, 8, 10), (8, 10), (10,), (10,)))
    s = x.sum(0) + bias + residual
    y = s / (s.square().mean(1, keepdim=True) + 1e-3).sqrt() * (1 + weight)
    for shots in (1, 2):
        found = _take_turns(
            x, weight, bias=bias, residual=residual, eps=1e-3, weight_offset=1.0, shots=shots, impl="reference"
        )
        for ours in found:
            torch.testing.assert_close(ours, (y, s))


def _slots(x: torch.Tensor, shots: int, programs: int = PROGRAMS) -> list[torch.Tensor]:
    R, T, D = x.shape
    return [x.new_empty(reduce_config.slot_shape(T, D, R, shots, programs)) for _ in x]


def _send_all(x: torch.Tensor, peers: list[torch.Tensor], shots: int, programs: int = PROGRAMS) -> None:
    turns = programs if shots == 2 else None
    for rank in range(len(x)):
        reference.send_addend(x[rank], peers, rank, shots=shots, turns=turns)
    for rank in range(len(x) if shots == 2 else 0):
        reference.send_sums(peers, rank, x.shape[1], turns=turns)


def _take_turns(x: torch.Tensor, weight: Any, *, shots: int, programs: int = PROGRAMS, **options: Any) -> list[Any]:
    """(y, s) of every rank, whose addends are x [R, T, D]."""
    peers = _slots(x, shots, programs)
    ranks = in_one_process(peers, timeout_s=10.0)
    for pad in ranks[0].pads:
        pad.fill_(1)
    _send_all(x, peers, shots, programs)
    return [
        all_reduce_rmsnorm(
            x[signals.rank], weight, peers=peers, signals=signals, shots=shots, programs=programs, **options
        )
        for signals in ranks
    ]


@pytest.mark.interpret
@pytest.mark.parametrize("shots", [1, 2])
@pytest.mark.parametrize("programs", [1, 8])
def test_any_number_of_programs_gives_the_same_bits(shots, programs):
    x = torch.randn(2, 7, 24)
    ours = _take_turns(x, None, shots=shots, programs=programs, impl="triton")
    usual = _take_turns(x, None, shots=shots, impl="triton")
    assert all(map(torch.equal, ours[1], usual[1]))


@pytest.mark.interpret
@pytest.mark.parametrize("shots", [1, 2])
@pytest.mark.parametrize("epoch", [5, None], ids=["host", "device"])
def test_an_exchange_without_rows_is_one_all_the_same(shots, epoch):
    """Its flags are what lets the exchange after the next begin."""
    x = torch.empty(2, 0, 8)
    shape = reduce_config.slot_shape(0, 8, 2, shots, PROGRAMS)
    peers = [torch.empty(shape if epoch else (2, *shape)) for _ in x]
    ranks = in_one_process(peers, timeout_s=10.0, epoch=epoch)
    for signals in ranks:
        signals.state[EPOCH] = 4
        signals.pads[0][:, 1] = 5
        signals.pads[1][:, 0] = 5
    for signals in ranks:
        y, s = all_reduce_rmsnorm(x[0], peers=peers, signals=signals, shots=shots, impl="triton")
        assert y.shape == s.shape == (0, 8)
    own = torch.stack([signals.pads[signals.rank][:shots, signals.rank, :PROGRAMS] for signals in ranks])
    assert (own == 5).all()
    assert all(signals.state[EPOCH] == (4 if epoch else 5) for signals in ranks)


@pytest.mark.interpret
@pytest.mark.parametrize("shots", [1, 2])
def test_operands_in_any_layout(shots):
    """Strided x, residual and weight; what they are not is what gives the same result."""
    x = torch.randn(2, 24, 5)
    residual, weight = torch.randn(24, 5), torch.randn(48)
    rows, columns = x.transpose(1, 2), {"residual": residual.t(), "bias": weight[1::2]}
    ours = _take_turns(rows, weight[::2], shots=shots, impl="triton", **columns)
    near = {name: t.contiguous() for name, t in columns.items()}
    expected = _take_turns(rows.contiguous(), weight[::2].contiguous(), shots=shots, impl="triton", **near)
    assert all(map(torch.equal, ours[0], expected[0]))


@pytest.mark.interpret
@pytest.mark.parametrize("centred", [False, True], ids=["rms", "layer"])
@pytest.mark.parametrize("gather", [False, True], ids=["scattered", "gathered"])
def test_sums_of_sent_addends(gather, centred):
    """Against the reference of the same steps; ranks whose share is short, and empty."""
    T, D, R = 5, 40, 4
    x, bias, weight, shift = torch.randn(R, T, D), torch.randn(D), torch.randn(D), torch.randn(D)
    shape = reduce_config.gathered_slot_shape(T, D, R) if gather else (R, 2, D)
    peers = [x.new_empty(shape) for _ in range(R)]
    for rank in range(R):
        reference.send_addend(x[rank], peers, rank, shots=2)
    for rank in range(R if gather else 0):
        reference.send_sums(peers, rank, T)
    norm = Norm(weight, shift if centred else None, centred=centred)
    for signals in in_one_process(peers, timeout_s=10.0):
        signals.pads[signals.rank].fill_(1)
        first, last = (0, T) if gather else rows_of(signals.rank, R, T)
        residual = torch.randn(last - first, D)
        more = {"bias": bias, "residual": residual, "norm": norm}
        ours = reduce.reduce_scattered(peers, signals, T, D, x.dtype, gather=gather, **more)
        expected = reference.finish(x.double().sum(0)[first:last], bias, residual.double(), norm, torch.float64)
        found = reference.sums(peers[signals.rank], T) if gather else reference.total(peers, signals.rank, T, shots=2)
        low = reference.finish(found[: last - first], bias, residual, norm, x.dtype)
        assert all(accuracy.judge("", *three, terms=D).ok for three in zip(ours, low, expected))
        (alone,) = reduce.reduce_scattered(peers, signals, T, D, x.dtype, gather=gather)
        assert torch.equal(alone, reference.finish(found[: last - first], None, None, None, x.dtype)[0])


@pytest.mark.interpret
@pytest.mark.parametrize("shots", [1, 2])
def test_slots_far_apart(shots):
    """Two slots 2^31 elements from each other: only the touched pages exist."""
    x, stride = torch.randn(2, 4, 16).half(), 2**31 + 16
    shape = _slots(x, shots)[0].shape
    rows = [step * shape[-1] for step in ((shape[1], 1) if shots == 1 else (1,))]
    storage = [torch.empty(stride + 4096, dtype=torch.float16) for _ in x]
    peers = [t.as_strided((2, *shape), (stride, *rows, 1)) for t in storage]
    _send_all(x, [peer[1] for peer in peers], shots)
    ranks = in_one_process(peers, timeout_s=10.0, epoch=None)
    for signals in ranks:
        signals.pads[signals.rank].fill_(1)
    far = [all_reduce_rmsnorm(x[s.rank], peers=peers, signals=s, shots=shots, impl="triton") for s in ranks]
    near = _take_turns(x, None, shots=shots, impl="triton")
    assert all(map(torch.equal, far[0], near[0]))
    assert [int(signals.state[EPOCH]) for signals in ranks] == [1, 1]


# ------------------------------------------------------------------------------------------ ranks that are processes


class Call(NamedTuple):
    """One exchange: what all ranks derive from its seed."""

    seed: int
    mode: str
    T: int
    D: int
    dtype: torch.dtype
    device_counted: bool

    def operands(self, world: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(self.seed)

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator).to(self.dtype)

        given = {"x": draw(world, self.T, self.D), "weight": draw(self.D)}
        given["residual"] = draw(self.T, self.D) if self.seed % 3 else None
        given["bias"] = draw(self.D) if self.seed % 2 else None
        return given


def _plan(count: int, world: int) -> list[Call]:
    chosen = random.Random(world)
    calls = []
    for seed in range(count):
        mode = MODES[seed % 4]
        T, D = chosen.choice([0, 1, 2, 4, 7]), chosen.choice([16, 33])
        dtype = chosen.choice([torch.float32, torch.float16, torch.bfloat16])
        calls.append(Call(seed, mode, T, D, dtype, mode in "12" and chosen.random() < 0.5))
    return calls


def _slot_shape(call: Call, world: int) -> tuple[int, ...]:
    if call.mode in "12":
        return reduce_config.slot_shape(call.T, call.D, world, int(call.mode), PROGRAMS)
    if call.mode == "gathered":
        return reduce_config.gathered_slot_shape(call.T, call.D, world)
    return world, -(-call.T // world), call.D


def _exchange(call: Call, rank: int, world: int, pool: SymmetricMemoryPool) -> list[torch.Tensor]:
    given, shape = call.operands(world), _slot_shape(call, world)
    if call.device_counted:
        channel = pool.channel("decode", 2**14)
        peers, signals = channel.device_counted(shape, call.dtype)
    else:
        channel = pool.channel("reduce", 2**14)
        peers, signals = channel.begin(shape, call.dtype)
    more = {"residual": given["residual"], "bias": given["bias"]}
    if call.mode in "12":
        x = given["x"][rank]
        options = {"peers": peers, "signals": signals, "shots": int(call.mode), "impl": "triton"}
        found = list(all_reduce_rmsnorm(x, given["weight"], **options, **more))
    else:
        reference.send_addend(given["x"][rank], peers, rank, shots=2)
        raise_flags(signals, 0, 0, range(world))
        gather = call.mode == "gathered"
        if more["residual"] is not None and not gather:
            more["residual"] = more["residual"][slice(*rows_of(rank, world, call.T))]
        norm = Norm(given["weight"])
        found = reduce.reduce_scattered(peers, signals, call.T, call.D, call.dtype, norm=norm, gather=gather, **more)
    if not call.device_counted:
        channel.end()
    return found


def _by_collectives(call: Call, rank: int, world: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """y and s by an all-reduce and a norm, in the call's precision and in fp64."""
    results = []
    for dtype in (call.dtype, torch.float64):
        given = {name: t if t is None else t.to(dtype) for name, t in call.operands(world).items()}
        s = given["x"][rank].clone()
        dist.all_reduce(s)
        for addend in (given["bias"], given["residual"]):
            s = s if addend is None else s + addend
        results.append([rms_norm(s, given["weight"], impl="reference"), s])
    if call.mode == "scattered":
        mine = slice(*rows_of(rank, world, call.T))
        return [t[mine] for t in results[0]], [t[mine] for t in results[1]]
    return results[0], results[1]


def _exchange_all(rank: int, world: int, count: int, first_epoch: int) -> list[str]:
    """Twice, back to back and each rank in its own time: nothing but flags keeps them apart. Digests of the results."""
    pool = make_pool(first_epoch=first_epoch)
    for name in ("decode", "reduce"):
        pool.channel(name, 2**14)
    delays = random.Random(rank)
    plan = _plan(count, world)
    rounds = []
    for _ in range(2):
        rounds.append([])
        for call in plan:
            time.sleep(delays.choice([0, 0, 0, 0.002, 0.01]))
            rounds[-1].append(_exchange(call, rank, world, pool))
    for call, found, again in zip(plan, *rounds):
        low, oracle = _by_collectives(call, rank, world)
        assert all(map(torch.equal, found, again)), call
        verdicts = [accuracy.judge(f"{call}", *three, terms=call.D) for three in zip(found, low, oracle)]
        assert all(v.ok for v in verdicts), "; ".join(map(str, verdicts))
    return [_digest(found) for call, found in zip(plan, rounds[0]) if call.mode != "scattered"]


def _digest(tensors: list[torch.Tensor]) -> str:
    return hashlib.sha256(b"".join(t.view(torch.uint8).numpy().tobytes() for t in tensors)).hexdigest()


@pytest.mark.interpret
@pytest.mark.parametrize(
    ("world", "count", "first_epoch"),
    [(2, 20, 2**31 - 5), (3, 16, 0), (4, 14, -3)],
)
def test_exchanges_against_the_plain_collectives(ranks, world, count, first_epoch):
    """100 exchanges in all, in every mode, counted by host and device, past the wrap of 32 bits and past zero."""
    digests = ranks(world, _exchange_all, count, first_epoch)
    assert all(theirs == digests[0] for theirs in digests)


# ------------------------------------------------------------------------------------------------- peers that fail


@pytest.mark.interpret
@pytest.mark.parametrize(
    ("shots", "missing", "complaint"),
    [
        (1, (0, 2, 1), "waited in vain for data from rank 2 (chunk 1, exchange 5; its flag stands at 4)"),
        (2, (0, 0, 0), "waited in vain for data from rank 0 (chunk 0, exchange 5; its flag stands at 4)"),
        (2, (1, 2, 2), "waited in vain for sums from rank 2 (chunk 2, exchange 5; its flag stands at 4)"),
    ],
)
def test_a_peer_that_never_comes(shots, missing, complaint):
    """The kernel gives up within the limit, says what for, and vouches for nothing from then on."""
    x = torch.randn(3, 6, 16)
    peers = [slot.zero_() for slot in _slots(x, shots)]
    signals = in_one_process(peers, timeout_s=0.2, epoch=5)[1]
    signals.pads[1].fill_(5)[missing] = 4
    started = time.monotonic()
    with pytest.raises(ExchangeTimeout) as caught:
        all_reduce_rmsnorm(x[1], peers=peers, signals=signals, shots=shots, impl="triton")
    assert 0.2 <= time.monotonic() - started < 30
    assert str(caught.value).startswith("all_reduce_rmsnorm of [6, 16]: rank 1 ")
    assert complaint in str(caught.value)
    assert signals.state[GAVE_UP] == 1
    phase, _, chunk = missing
    raised = signals.pads[2][:, 1, :PROGRAMS]
    assert (raised[phase, : chunk + 1] == 5).all()  # as far as it came before
    assert not raised[phase, chunk + 1 :].any()
    assert phase == 1 or not raised[1, chunk:].any()


# ------------------------------------------------------------------------------------------------ options and refusals


def _one_rank(**changes: Any) -> Any:
    x = changes.pop("x", torch.randn(2, 8))
    peers = changes.pop("peers", None) or [torch.empty(2, 2, 8), torch.empty(2, 2, 8)]
    signals = in_one_process(peers, timeout_s=1.0)[0]
    return all_reduce_rmsnorm(x, peers=peers, signals=signals, **{"shots": 1, **changes})


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"x": torch.randn(8)}, "x is torch.float32 [8]: expected floating-point rows [T, D]"),
        ({"weight": torch.randn(7)}, "weight is torch.float32 [7] on cpu but x torch.float32 [2, 8]"),
        ({"residual": torch.randn(8)}, "residual is torch.float32 [8]"),
        ({"shots": 3}, "shots=3: expected 1, 2 or None"),
        ({"programs": 65}, "programs=65: expected 1 to 64"),
        ({"eps": -1.0}, "eps=-1.0"),
        ({"shots": 2}, "peers[0] is torch.float32 [2, 2, 8]: expected contiguous torch.float32 [8, 8] for 2 shots"),
        ({"x": torch.randn(2, 8).half()}, "expected contiguous torch.float16 [2, 2, 8]"),
    ],
)
def test_what_does_not_fit_is_refused(changes, complaint):
    with pytest.raises(ValueError) as caught:
        _one_rank(**changes)
    assert complaint in str(caught.value)


def test_no_gradient():
    x = torch.randn(2, 8, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"has no gradient.*RowParallelLinear"):
        _one_rank(x=x)
    with torch.no_grad(), pytest.raises(RuntimeError, match="waits for nobody"):
        _one_rank(x=x, impl="reference")


def test_the_reference_counts_exchanges_as_the_device_does():
    x = torch.randn(2, 3, 8)
    peers = [x.new_empty(2, 2, 3, 8) for _ in x]
    signals = in_one_process(peers, timeout_s=1.0, epoch=None)[0]
    signals.state[EPOCH] = 2**31 - 1
    signals.pads[0].fill_(-(2**31))
    _send_all(x, [peer[0] for peer in peers], 1)
    _, s = all_reduce_rmsnorm(x[0], peers=peers, signals=signals, shots=1, impl="reference")
    assert torch.equal(s, x[0] + x[1])
    assert signals.state[EPOCH] == -(2**31)


def test_rows_too_wide_have_no_kernel():
    choice = reduce_op.all_reduce_choice(torch.device("cuda"), 16385)
    assert not choice.triton
    if dispatch.triton_version() is not None:
        assert "up to 16384" in choice.reason
        assert reduce_op.all_reduce_choice(torch.device("cuda"), 16384).triton


def test_few_bytes_take_one_round():
    """What two rounds save grows with the bytes and the ranks; between two ranks they save nothing."""
    picked = [reduce_config.pick_shots(T, 8192, 2, 8) for T in (1, 8, 16, 64)]
    assert picked == sorted(picked)
    assert (picked[0], picked[-1]) == (1, 2)
    assert reduce_config.pick_shots(2**20, 8192, 2, 2) == 1
    shape = reduce_op.all_reduce_rmsnorm_shape(64, 8192, torch.bfloat16, 2, CPU)
    assert shape == (2, 64, 8192)


@pytest.mark.parametrize("programs", [1, 3, 64])
@pytest.mark.parametrize("ranks", [1, 3, 8])
def test_every_row_has_one_owner_and_a_place(ranks, programs):
    for tokens in (0, 1, 63, 200):
        room = reduce_config.rows_per_owner(tokens, ranks, programs)
        rows, places = zip(*(reference.owned(rank, tokens, ranks, programs) for rank in range(ranks)))
        assert sorted(torch.cat(rows).tolist()) == list(range(tokens))
        assert all(len(set(at.tolist())) == len(at) and (at < room).all() for at in places)
