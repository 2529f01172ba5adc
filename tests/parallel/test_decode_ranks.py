"""Decoding over ranks with all-reduces deferred to the next norm (overlap/partial_sum.py), interpreted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardfuse
from shardfuse import Engine, ParallelTransformer, Request, TransformerConfig
from shardfuse.kernels.dev import accuracy
from shardfuse.kernels.norm import rms_norm
from shardfuse.kernels.runtime import dispatch
from shardfuse.layers import norm
from shardfuse.layers.block import can_defer
from shardfuse.parallel.core import collectives
from shardfuse.parallel.core.mesh import tp_group
from shardfuse.parallel.core.sharding import local_tensor
from shardfuse.parallel.overlap import partial_sum, policy
from shardfuse.parallel.overlap.memory import channel
from shardfuse.parallel.overlap.memory.pool import SymmetricMemoryPool
from shardfuse.parallel.overlap.memory.sizes import DECODE_TOKENS

pytestmark = [pytest.mark.ranks, pytest.mark.interpret]

CONFIG = TransformerConfig(
    style="gated", vocab_size=32, hidden_size=16, intermediate_size=24, num_layers=2, num_heads=2, max_positions=128,
    init_std=0.3, bias=True,
)  # fmt: skip
SHORT = TransformerConfig(**vars(CONFIG) | {"num_layers": 1})
KERNEL: dict[str, Any] = {"overlap": "kernel", "strict": True, "impl": "triton"}
PLAIN: dict[str, Any] = {"overlap": "none", "impl": "triton"}
TERMS = 256  # the chained sums of two layers
TOKENS = torch.randint(32, (1, 3), generator=torch.Generator().manual_seed(1))
SITES = {"attention.out": 2, "mlp.out": 2}
NORM, BRANCHES = partial_sum.OP, 4


def _model(config: TransformerConfig = CONFIG, **options: Any) -> ParallelTransformer:
    torch.manual_seed(0)
    model = ParallelTransformer(config, mesh=tp_group(dist.group.WORLD), **options).eval()
    generator = torch.Generator().manual_seed(2)  # new biases are 0, so a missing one would not show
    for name, param in model.named_parameters():
        if name.endswith(("o_proj.bias", "down_proj.bias")):
            local_tensor(param).detach().copy_(torch.randn(param.shape, generator=generator, dtype=torch.float64) * 0.2)
    return model


@contextmanager
def _counted() -> Iterator[Counter[str]]:
    """Count the runs of each op in the block."""
    before, found = dispatch.counts.copy(), Counter[str]()
    yield found
    for (op, _), count in (dispatch.counts - before).items():
        found[op] += count


def _sums() -> dict[str, tuple[int, int]]:
    """Calls and bytes of the counted all-reduces, by site."""
    found = {site: (count, collectives.payload[kind, site]) for (kind, site), count in collectives.calls.items()}
    return {site: found[site] for site in SITES if site in found}


def _step_body(rank: int, world: int) -> tuple[list[str], Any, Any, Any]:
    """The errors of the logits; counts and launches with and without deferred sums."""
    with torch.no_grad():
        oracle = _model(dtype=torch.float64, overlap="none")(TOKENS)
        low, counted, ran = None, [], []
        for options in (PLAIN, KERNEL):
            model = _model(**options)
            collectives.reset_counts()
            with _counted() as launches:
                logits = model(TOKENS)
            counted.append(_sums())
            ran.append(launches)
            low = logits if low is None else low
    verdict = accuracy.judge("logits", logits, low, oracle, terms=TERMS)
    return [] if verdict.ok else [str(verdict)], counted, ran[0], ran[1]


def test_a_step_gives_what_the_plain_one_does_and_counts_the_same(ranks: Any):
    for wrong, (plain, late), before, after in ranks(2, _step_body):
        assert not wrong
        assert plain == late == {site: (calls, calls * TOKENS.numel() * 16 * 4) for site, calls in SITES.items()}
        # Each branch's norm kernel sums it, and no other kernel is launched.
        assert after[NORM] == BRANCHES
        assert before["rms_norm"] - after["rms_norm"] == BRANCHES
        assert sum(after.values()) == sum(before.values())


@contextmanager
def _own_addends(site: str) -> Iterator[None]:
    """In the block, the norm with the deferred sum of ``site`` uses this rank's addend alone."""
    fused = norm.fused_allreduce_norm

    def alone(partial: Any, residual: torch.Tensor, weight: torch.Tensor, **options: Any) -> Any:
        if partial.site != site:
            return fused(partial, residual, weight, **options)
        rows = partial.rows if partial.bias is None else partial.rows + partial.bias
        return rms_norm(rows, weight, residual=residual, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(norm, "fused_allreduce_norm", alone)
        yield


def _omit_body(rank: int, world: int) -> dict[str, tuple[bool, int]]:
    """By omitted site, whether the logits are still right, and the number of deferred sums."""
    with torch.no_grad():
        oracle, low = (_model(dtype=dtype, overlap="none")(TOKENS) for dtype in (torch.float64, torch.float32))
        model, found = _model(**KERNEL), {}
        for site in SITES:
            with _own_addends(site), _counted() as launches:
                right = accuracy.judge("logits", model(TOKENS), low, oracle, terms=TERMS).ok
            found[site] = right, launches[NORM]
    return found


def test_a_sum_that_is_left_out_is_noticed(ranks: Any):
    for found in ranks(2, _omit_body):
        assert found == dict.fromkeys(SITES, (False, BRANCHES // 2))


# --- which sums are deferred ------------------------------------------------------------------------------------------


class Adapter(nn.Module):
    """Replaces a layer."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor, **options: Any) -> Any:
        return self.inner(x, **options)


def _hooked(path: str) -> Callable[[ParallelTransformer], None]:
    return lambda model: model.get_submodule(path).register_forward_hook(lambda *_: None) and None


def _replaced(path: str) -> Callable[[ParallelTransformer], None]:
    outer, _, name = path.rpartition(".")
    return lambda model: setattr(model.get_submodule(outer), name, Adapter(model.get_submodule(path)))


# A change of the model, and the number of its four sums that are still deferred.
LOOKED_AT: dict[str, tuple[list[Callable[[ParallelTransformer], None]], int]] = {
    "hooks on a projection and on a norm, an inner layer replaced": (
        [
            _hooked("model.layers.0.self_attn.o_proj"),
            _hooked("model.layers.1.input_layernorm"),
            _replaced("model.layers.1.mlp.up_proj"),
        ],
        2,
    ),
    "hooks on a block": ([_hooked("model.layers.1")], 2),
    "an MLP and the last norm replaced": ([_replaced("model.layers.0.mlp"), _replaced("model.norm")], 2),
}


def _looked_at_body(rank: int, world: int) -> list[str]:
    """The cases in which the logits or the number of deferred sums are wrong."""
    wrong = []
    with torch.no_grad():
        oracle, low = (_model(dtype=dtype, overlap="none")(TOKENS) for dtype in (torch.float64, torch.float32))
        for name, (changes, expected) in LOOKED_AT.items():
            model = _model(**KERNEL)
            for change in changes:
                change(model)
            with _counted() as launches:
                verdict = accuracy.judge("logits", model(TOKENS), low, oracle, terms=TERMS)
            if not verdict.ok or launches[NORM] != expected:
                wrong.append(f"{name}: {launches[NORM]} waited, {verdict}")
    return wrong


def test_where_somebody_looks_on_a_sum_does_not_wait(ranks: Any):
    assert ranks(2, _looked_at_body) == [[], []]


def _unsuited_body(rank: int, world: int) -> dict[str, bool]:
    """The reasons against deferring, and whether a sum is deferred all the same."""

    def asked(tokens: int = 3, **options: Any) -> bool:
        model = _model(SHORT, **KERNEL | {"strict": False} | options)
        norm, last = model.deferred_sums()[0]
        return can_defer(last, norm, torch.zeros(tokens, 8, dtype=last.weight.dtype))

    found = {"gradients": asked()}
    with torch.no_grad():
        found["few tokens"], found["the most"] = asked(), asked(DECODE_TOKENS)
        found["many tokens"], found["no tokens"] = asked(DECODE_TOKENS + 1), asked(0)
        with dispatch.row_invariance():
            found["a token's result is its own"] = asked()
        with torch.autocast("cpu", torch.bfloat16):
            found["autocast"] = asked()
        for overlap in ("none", "chunked", "auto"):  # "auto" has no measurement here
            found[f"overlap={overlap}"] = asked(overlap=overlap)
        found["no kernel runs"] = asked(impl="auto")
        found["no kernel has it"] = asked(dtype=torch.float64, impl="auto")
        for name, config, options in (
            ("sequence parallelism", SHORT, {"sequence_parallel": True}),
            ("LayerNorm", TransformerConfig(**vars(SHORT) | {"style": "gelu"}), {}),
        ):
            found[name] = bool(_model(config, **KERNEL, **options).deferred_sums())
        dropping = _model(TransformerConfig(**vars(SHORT) | {"residual_dropout": 0.1}), **KERNEL).train()
        with _counted() as launches:
            dropping(TOKENS)
        found["dropout"] = bool(launches[NORM])
    return found


def test_it_is_for_few_tokens_without_gradients(ranks: Any):
    for found in ranks(2, _unsuited_body):
        assert {name for name, late in found.items() if late} == {"few tokens", "the most"}


# --- serving ----------------------------------------------------------------------------------------------------------


def _serve_body(rank: int, world: int) -> list[tuple[list[list[int]], float]]:
    """Answers and the number of deferred sums in a step, without and with deferral."""
    found = []
    for options in ({"overlap": "none"}, KERNEL):
        engine = Engine(_model(**options), num_blocks=8, block_size=8, max_num_seqs=2)
        requests = [Request([1, 2, 3], max_new_tokens=3), Request([9, 8], max_new_tokens=2, arrival=1)]
        if rank:
            engine.follow()
            continue
        with _counted() as launches:
            answers = engine.generate(requests)
        engine.dismiss()
        found.append((answers, launches[NORM] / engine.stats.steps))
    return found


def test_the_engine_answers_alike(ranks: Any):
    ((plain, none), (late, all_of_them)), _ = ranks(2, _serve_body)
    assert plain == late
    assert len({token for answer in plain for token in answer}) > 2  # not a model that repeats itself
    assert (none, all_of_them) == (0, BRANCHES)


# --- memory -----------------------------------------------------------------------------------------------------------


def _capture_body(rank: int, world: int) -> list[int]:
    """The deferred sums in a capture before an eager run, in that run, and in a capture after it."""
    group = tp_group(dist.group.WORLD)
    model, found = _model(SHORT, overlap="kernel", impl="triton"), []
    policy.select(
        NORM, group, tokens=3, features_in=8, features_out=16, dtype=torch.float32, device=TOKENS.device,
        overlap="kernel", impl="triton", device_counted=True,
    )  # fmt: skip
    with torch.no_grad():
        for inside in (True, False, True):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(partial_sum, "capturing", lambda inside=inside: inside)
                with _counted() as launches:
                    model(TOKENS)
            found.append(launches[NORM])
    return found


def test_a_capture_needs_a_run_before_it(ranks: Any):
    assert ranks(2, _capture_body) == [[0, 2, 2]] * 2


def _growth_body(rank: int, world: int) -> tuple[bool, bool, str]:
    """Another channel grows between two steps; then once more, when a graph holds addresses."""
    model = _model(SHORT, **KERNEL)
    more = torch.arange(10).view(1, 10)
    with torch.no_grad():
        before = model(TOKENS)
    pool = SymmetricMemoryPool.existing(model.group)
    assert pool is not None
    buffer = pool.settle()
    with _counted() as launches:
        model(more)
    assert not launches[NORM]  # with gradients
    moved = pool.settle() is not buffer
    with torch.no_grad():
        same = torch.equal(model(TOKENS), before)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(channel, "capturing", lambda: True)
            pool.channel(partial_sum.decode_channel(1), 0).device_counted((1,), torch.float32)
    with pytest.raises(RuntimeError) as caught:
        model(more.repeat(4, 1))
    return moved, same, str(caught.value)


def test_memory_grows_between_steps_but_not_under_a_graph(ranks: Any):
    for moved, same, error in ranks(2, _growth_body):
        assert moved
        assert same
        assert "captured graphs may hold its addresses; request all channels at their full size before" in error


def _reserve_body(rank: int, world: int) -> tuple[str, str, str, bool, list[str]]:
    """explain's text before and after reserving memory, and the budget; whether it sufficed; refused calls."""
    model, x = _model(SHORT, **KERNEL), torch.arange(2 * DECODE_TOKENS).view(2, DECODE_TOKENS) % 32
    before = shardfuse.explain(model, x).memory
    budget = shardfuse.reserve_symmetric_memory(model, x.numel())
    after = shardfuse.explain(model, x).memory
    pool = SymmetricMemoryPool.existing(model.group)
    assert pool is not None
    buffer = pool.settle()
    with torch.no_grad():
        model(TOKENS)
        model.model.layers[0].mlp(torch.zeros(x.numel(), 16))
    enough = pool.settle() is buffer
    refused = []
    for tokens in (0, 1):
        try:
            refused.append(shardfuse.reserve_symmetric_memory(_model(**PLAIN), tokens))
        except ValueError as error:
            refused.append(str(error))
    return before, budget, after, enough, refused


def test_memory_is_reserved_for_a_whole_model(ranks: Any):
    for before, budget, after, enough, (zero, none) in ranks(2, _reserve_body):
        rows = {line.split()[0]: line.split()[1:] for line in budget.splitlines()}
        # [2 * ceil(T/2) + T, D] in fp32; two-shot for 64 rows in up to 64 programs.
        assert rows["reduce"][:4] == ["2", "x", "16.0", "KiB"]
        assert rows["decode"][:4] == ["2", "x", "8.0", "KiB"]
        assert rows["decode2"][:4] == ["2", "x", "12.0", "KiB"]
        assert before.splitlines() == after.splitlines() == budget.splitlines()
        assert enough
        assert zero.startswith("reserve_symmetric_memory: tokens=0")
        assert none == "no symmetric memory: no layer of this model exchanges rows in it"


# --- explain ----------------------------------------------------------------------------------------------------------


def _explain_body(rank: int, world: int) -> tuple[list[tuple[str, int, str]], str, list[str]]:
    """The deferred sums in explain: (module, count, mode); the text; and those for many tokens."""
    model = _model(overlap="kernel", impl="triton")
    told = shardfuse.explain(model, TOKENS)
    deferred = [
        (row.path, row.layers, info.plan.kind)
        for row in told.rows
        for info in row.collectives
        if info.op == NORM and info.when == "decoding"
    ]
    many = torch.zeros(2, DECODE_TOKENS, dtype=torch.int64)
    ops = [info.op for row in shardfuse.explain(model, many).rows for info in row.collectives]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "200")
        return deferred, str(told), ops


def test_explain_tells_which_norms_take_sums(ranks: Any):
    for deferred, text, ops in ranks(2, _explain_body):
        # The first block's first norm follows the embedding.
        assert sorted(deferred) == [
            ("model.layers.*.input_layernorm", 1, "kernel"),
            ("model.layers.*.post_attention_layernorm", 2, "kernel"),
            ("model.norm", 1, "kernel"),
        ]
        assert "all_reduce_rmsnorm" in text
        assert "symmetric memory, on each of 2 ranks" in text
        assert NORM not in ops
        assert "linear_all_reduce" in ops
