"""The shapes that tests, ahead-of-time builds and benchmarks share for the ops of this folder.

    all_gather_linear       act(X @ W_i^T + b_i), rows of X from all ranks; or gated
    linear_reduce_scatter   s = sum over ranks of x @ W^T, + bias + residual: the own rows
    linear_all_reduce       all rows of it

A case has T tokens, R ranks and one rank's GEMM, [T, K] @ [K, N] (N of each weight where ``weights`` share the gather).
The ranks are parts of one process and take turns: what the first one waits for is there. ``tests/kernels/test_comm.py``
runs ranks that are processes. ``all_reduce_norm.py`` has the rest of the folder.

What is built is what layers launch, forward and backward: the GEMM with rows that arrive under every epilogue, and
every product that is sent.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ...comm import op, reduce_reference, reference, transport
from ...runtime import device
from ...runtime.dtypes import BF16, FP16, FP32, NAMES
from ...runtime.signals import (
    CHUNKS,
    PHASES,
    REPORT,
    STATE,
    Gathered,
    Scattered,
    Signals,
    in_one_process,
    own_rows,
    raise_flags,
)
from ..registry import Build, Case, OpSpec
from .all_reduce_norm import REDUCE_SPECS
from .linear_builds import collect
from .linear_fused import SOURCES

_GATHER: dict[str, Any] = {"weights": 1, "gated": False, "activation": "identity", "bias": True, "backward": None}
_REDUCE: dict[str, Any] = {"bias": False, "residual": False, "pairs": 1, "layout": "nt"}
_RANKS = 8
_TOKENS = 8192


def _case(stock: dict[str, Any], sizes: str, dtype: torch.dtype, *tags: str, **options: Any) -> Case:
    """``sizes``: "T K N R"."""
    T, K, N, R = map(int, sizes.split())
    said = [f"{name}_{value}" for name, value in options.items() if stock[name] != value]
    name = "-".join([f"t{T}-k{K}-n{N}-r{R}-{NAMES[dtype]}", *said])
    return Case(name, dtype, {"T": T, "K": K, "N": N, "R": R}, stock | options, frozenset(tags))


def _sizes(case: Case) -> tuple[int, int, int, int]:
    return tuple(case.sizes[letter] for letter in "TKNR")  # type: ignore[return-value]


# --- all_gather_linear ------------------------------------------------------------------------------------------------

_GATHERED = (
    _case(_GATHER, "66 40 72 2", FP32, "test", activation="gelu_tanh"),
    _case(_GATHER, "40 64 48 3", BF16, "test", activation="silu", bias=False, weights=3),
    _case(_GATHER, "35 33 31 4", FP16, "test", gated=True, weights=2, activation="silu"),  # TMA impossible
    _case(_GATHER, "5 136 64 4", FP16, "test"),  # split K, a rank without rows
    _case(_GATHER, "0 16 24 2", FP32, "test", activation="relu"),
    *(
        _case(_GATHER, f"{_TOKENS} 8192 {N} {_RANKS}", BF16, "codegen", **more)
        for N, more in (
            (3584, {"activation": "gelu_tanh"}),
            (3584, {"activation": "silu", "gated": True, "weights": 2, "bias": False}),
            (1024, {"weights": 3, "bias": False}),
            (3584, {"backward": "linear"}),
            (3584, {"backward": "act", "activation": "gelu_tanh"}),
            (3584, {"backward": "gated", "activation": "silu"}),
        )
    ),
    _case(_GATHER, "4096 5120 5120 4", BF16, "codegen", activation="gelu_erf"),
    _case(_GATHER, "4096 4096 7168 2", FP16, "codegen", activation="gelu_tanh"),
    _case(_GATHER, "64 8192 3584 8", BF16, "codegen", activation="gelu_tanh"),
)


def _gather_inputs(case: Case, on: torch.device, seed: int) -> dict[str, Any]:
    T, K, N, _ = _sizes(case)
    draw = _draw(case, on, seed)
    weights = [draw(N, K, scale=K**-0.5) for _ in range(case.options["weights"])]
    biases = [draw(N) if case.options["bias"] else None for _ in weights]
    return {"x": draw(T, K), "weights": weights, "biases": biases}


def _gather_run(inputs: dict[str, Any], case: Case, impl: str) -> dict[str, torch.Tensor]:
    """The results of every rank, which are all the same: [R, T, N] each."""
    x, weights, biases = inputs["x"], inputs["weights"], inputs["biases"]
    T, K, _, R = _sizes(case)
    peers = [x.new_full((T, K), float("nan")) for _ in range(R)]
    ranks = in_one_process(peers, timeout_s=10.0)
    for signals in ranks:
        reference.push_rows(own_rows(x, signals.rank, R), peers, signals.rank)
        for piece in range(CHUNKS):
            raise_flags(signals, 0, piece, range(R))
    found = []
    for signals in ranks:
        ys = op.all_gather_linear(
            own_rows(x, signals.rank, R), weights, biases, peers=peers, signals=signals,
            activation=case.options["activation"], gated=case.options["gated"], pieces=2, impl=impl,
        )  # fmt: skip
        found.append([ys] if case.options["gated"] else ys)
    return {f"y{i}": torch.stack(ys) for i, ys in enumerate(zip(*found))}


def _gather_launch(case: Case) -> None:
    """One rank's launch: forward, or with ``backward`` the dgrad that an output gradient's gather ends in."""
    from ...linear import launch

    T, K, N, R = _sizes(case)
    options, new = case.options, _meta(case)
    remote = Gathered([new(T, K)] * R, _meta_signals(R), pieces=4)
    x, activation = remote.peers[0], options["activation"]
    biases = (new(N) if options["bias"] else None,) * options["weights"]
    weights = (new(N, K),) * options["weights"]
    if options["backward"] == "act":
        launch.linear_dgrad_act(x, new(K, N), new(T, N), activation, False, remote)
    elif options["backward"] == "gated":
        launch.linear_dgrad_gated(x, new(K, N), new(T, N), new(T, N), activation, False, remote)
    elif options["backward"] == "linear":
        launch.linear_dgrad((x,), (new(K, N),), remote)
    elif options["gated"]:
        launch.gated_linear_fwd(x, weights, biases, activation, True, remote)
    else:
        launch.linear_act_fwd(x, weights, biases, None, activation, True, remote)


def _gather_launched(target: str) -> Iterator[Build]:
    """The products, and the wait where no product of this rank's waits."""
    yield from collect("all_gather_linear", target, GATHER.tagged("codegen"), _gather_launch)
    with device.capture(target) as launches:
        transport.wait_for_rows(_meta_signals(_RANKS), pieces=4)
    (wait,) = launches
    yield Build("all_gather_linear", "wait", target, wait.fn, wait.args, wait.num_warps, wait.num_stages)


_COMMON = (
    *SOURCES,
    "runtime/copies.py",
    "runtime/signals.py",
    "runtime/signals_triton.py",
    "comm/op.py",
    "comm/transport.py",
    "comm/wait_triton.py",
)

GATHER: OpSpec = OpSpec(
    name="all_gather_linear",
    summary="act(X @ W^T + b) while the rows of X arrive from all ranks",
    cases=_GATHERED,
    make_inputs=_gather_inputs,
    run=_gather_run,
    launched=_gather_launched,
    sources=_COMMON,
)

# --- linear_reduce_scatter, linear_all_reduce -------------------------------------------------------------------------

_REDUCED = (
    _case(_REDUCE, "66 40 72 2", FP32, "test", bias=True, residual=True),
    _case(_REDUCE, "40 64 48 3", BF16, "test"),
    _case(_REDUCE, "35 33 31 4", FP16, "test", bias=True),  # TMA impossible, short and odd rows
    _case(_REDUCE, "5 136 64 4", FP16, "test", residual=True),  # a rank without rows
    _case(_REDUCE, "0 16 24 2", FP32, "test"),
)
_SENT = (
    _case(_REDUCE, f"{_TOKENS} 3584 8192 {_RANKS}", BF16, "codegen"),
    *(
        _case(_REDUCE, f"{_TOKENS} 3584 8192 {_RANKS}", BF16, "codegen", layout="nn", pairs=pairs)
        for pairs in (1, 2, 3)
    ),
    _case(_REDUCE, "4096 5120 5120 4", FP16, "codegen"),
    _case(_REDUCE, "64 3584 8192 8", BF16, "codegen"),
    _case(_REDUCE, "4096 4095 4095 3", BF16, "codegen"),
)


def _reduce_inputs(case: Case, on: torch.device, seed: int) -> dict[str, Any]:
    """Operands of all ranks: x [R, T, K], weight [R, N, K]."""
    T, K, N, R = _sizes(case)
    draw = _draw(case, on, seed)
    return {
        "x": draw(R, T, K),
        "weight": draw(R, N, K, scale=(R * K) ** -0.5),
        "bias": draw(N) if case.options["bias"] else None,
        "residual": draw(T, N) if case.options["residual"] else None,
    }


def _reduce_run(inputs: dict[str, Any], case: Case, impl: str, *, gather: bool) -> dict[str, torch.Tensor]:
    """The rows of all ranks, [T, N], or with ``gather`` [R, T, N]."""
    x, weight, residual = inputs["x"], inputs["weight"], inputs["residual"]
    T, _, N, R = _sizes(case)
    shape = op.all_reduce_shape(T, N, R) if gather else op.reduce_scatter_shape(T, N, R)
    peers = [x.new_full(shape, float("nan")) for _ in range(R)]
    ranks = in_one_process(peers, timeout_s=10.0)
    for signals in ranks:
        reduce_reference.send_addend(x[signals.rank] @ weight[signals.rank].t(), peers, signals.rank, shots=2)
        for phase in range(PHASES):
            for chunk in range(CHUNKS):
                raise_flags(signals, phase, chunk, range(R))
    run = op.linear_all_reduce if gather else op.linear_reduce_scatter
    found: list[Any] = []
    # The second time the products of all ranks are the op's own, the third time the sums that they send are, too.
    for _ in range(3 if gather else 2):
        found = [
            run(
                x[signals.rank], weight[signals.rank], inputs["bias"], peers=peers, signals=signals,
                residual=residual if gather or residual is None else own_rows(residual, signals.rank, R), impl=impl,
            )
            for signals in ranks
        ]  # fmt: skip
    return {"y": torch.stack(found) if gather else torch.cat(found)}


def _send_launch(case: Case) -> None:
    from ...linear import launch

    T, K, N, R = _sizes(case)
    new, layout = _meta(case), case.options["layout"]
    weight = new(N, K) if layout == "nt" else new(K, N)
    remote = Scattered([new(*op.reduce_scatter_shape(T, N, R))] * R, _meta_signals(R))
    launch.send_product(layout, (new(T, K),) * case.options["pairs"], (weight,) * case.options["pairs"], remote)


REDUCE_SCATTER: OpSpec = OpSpec(
    name="linear_reduce_scatter",
    summary="x @ W^T summed over ranks, each tile sent as it is finished: the own rows",
    cases=(*_REDUCED, *_SENT),
    make_inputs=_reduce_inputs,
    run=lambda inputs, case, impl: _reduce_run(inputs, case, impl, gather=False),
    launched=lambda target: collect("linear_reduce_scatter", target, REDUCE_SCATTER.tagged("codegen"), _send_launch),
    sources=(*_COMMON, *REDUCE_SPECS[0].sources),
)
ALL_REDUCE: OpSpec = OpSpec(
    name="linear_all_reduce",
    summary="the same: all rows, on every rank",
    cases=_REDUCED,
    make_inputs=_reduce_inputs,
    run=lambda inputs, case, impl: _reduce_run(inputs, case, impl, gather=True),
    launched=lambda target: [],  # the product is linear_reduce_scatter's, what follows all_reduce_rmsnorm's
    sources=REDUCE_SCATTER.sources,
)

SPECS = (GATHER, REDUCE_SCATTER, ALL_REDUCE, *REDUCE_SPECS)

# --- parts ------------------------------------------------------------------------------------------------------------


def _draw(case: Case, on: torch.device, seed: int) -> Any:
    generator = torch.Generator(on).manual_seed(seed)

    def draw(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=on).mul(scale).to(case.dtype)

    return draw


def _meta(case: Case) -> Any:
    return lambda *shape: torch.empty(shape, dtype=case.dtype, device="meta")


def _meta_signals(ranks: int) -> Signals:
    def words(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    pads = [words(PHASES, ranks, CHUNKS)] * ranks
    return Signals(0, 1, pads, words(2, ranks, dtype=torch.int64), words(STATE), words(REPORT), 1.0)
