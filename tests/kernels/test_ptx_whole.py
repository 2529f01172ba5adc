"""Whole models with every Triton kernel emulated: training steps and an engine's steps equal their twin in plain torch.

Through the ordinary ``impl="triton"``, in processes of their own, on small sizes; kernels run from the PTX that Triton
makes for the chip (``tests/support/emulated_models.py``). Asserted are also the kernels that ran, by name, and that
nothing fell back to torch.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator
from typing import Any

import emulated_models
import pytest
import torch
import torch.distributed as dist
from emulated_models import Emulated, Outcome, Ran

from shardfuse.kernels.dev.ptx import driver
from shardfuse.kernels.runtime.dispatch import triton_version
from shardfuse.layers.config import TransformerConfig
from shardfuse.parallel.core.mesh import Group, tp_group
from shardfuse.serving.request import Request

pytestmark = [
    pytest.mark.codegen,
    pytest.mark.skipif(triton_version() is None, reason="Triton is not installed"),
    pytest.mark.skipif(
        shutil.which("gcc") is None, reason="gcc is not installed: it compiles the stub of CUDA's driver"
    ),
]

BF16, FP16 = torch.bfloat16, torch.float16
# Loops that refill their pipelines, several tiles, the last ones ragged.
SIZES = {"vocab_size": 600, "hidden_size": 432, "intermediate_size": 448, "num_heads": 4, "num_kv_heads": 2}
SIZES |= {"head_dim": 64, "max_positions": 256, "init_std": 0.06}
FEWER = {"vocab_size": 400, "hidden_size": 304, "intermediate_size": 336, "num_layers": 1}
TINY = {"vocab_size": 104, "hidden_size": 96, "intermediate_size": 112, "num_layers": 1, "head_dim": 32}
TRAINED = {"_gemm_kernel", "_norm_fwd_kernel", "_norm_bwd_kernel", "_norm_sum_kernel", "_rope_kernel"}
TRAINED |= {"_gradient_kernel"}  # of the cross-entropy
SERVED = {"_gemm_kernel", "_norm_fwd_kernel", "_write_kv_kernel", "_plan_kernel", "_paged_attention_fwd_kernel"}
SERVED |= {"_copy_blocks_kernel"}


def _config(style: str, **options: Any) -> TransformerConfig:
    return TransformerConfig(style=style, **{**SIZES, **options})


def _mesh(world: int) -> Group | None:
    return None if world == 1 else tp_group(dist.group.WORLD)


@pytest.fixture(scope="module")
def hopper() -> Iterator[Emulated]:
    with Emulated("sm_90") as emulated:
        yield emulated


@pytest.fixture(scope="module")
def ampere() -> Iterator[Emulated]:
    with Emulated("sm_80") as emulated:
        yield emulated


def _layers(style: str) -> set[str]:
    """The ops of a layer's norms and products."""
    return {"rms_norm", "gated_linear", "linear_act"} if style == "gated" else {"layer_norm", "linear_act"}


def _nothing_fell_back(outcome: Outcome, ops: set[str]) -> None:
    """Every call of the package's ops was a kernel's, and torch computed nothing in their place."""
    assert {op for op, _ in outcome.ran.ops} - {"attention"} == ops
    assert outcome.ran.others == {}
    assert outcome.ran.stock == {}


def _twin_would_be_seen(outcome: Outcome, ops: set[str]) -> None:
    """The twin in plain torch called the same ops, and what ``_nothing_fell_back`` looks for was found in it."""
    assert {op for op, impl in outcome.plain.ops if impl == "reference"} == ops
    assert outcome.plain.stock["mm"] + outcome.plain.stock["addmm"] > 0
    assert outcome.plain.kernels == {}


# ------------------------------------------------------------------------------------------------------------- training


def _train_body(rank: int, world: int, style: str, options: dict[str, Any], call: dict[str, Any]) -> Outcome:
    emulated_models.emulate()
    return emulated_models.train_alike(_config(style, **options), BF16, mesh=_mesh(world), **call)


def _trained(outcome: Outcome, style: str, more: Iterable[str] = ()) -> None:
    assert outcome.wrong == []
    assert set(outcome.ran.kernels) >= TRAINED
    ops = {*_layers(style), "apply_rope", "linear_cross_entropy", *more}
    _nothing_fell_back(outcome, ops)
    _twin_would_be_seen(outcome, ops)


@pytest.mark.codegen(seconds=15)
def test_a_decoder_layer_is_trained(hopper: Emulated):
    """Embedding, layer, head and loss; the gradients of two micro-batches add up in fp32."""
    (outcome,) = hopper(1, _train_body, "gated", {"num_layers": 1}, {})
    _trained(outcome, "gated")


@pytest.mark.nightly(seconds=25)
@pytest.mark.parametrize(
    ("style", "options"),
    [
        ("gelu", {"bias": True}),
        ("gelu", {"bias": False, "residual_dropout": 0.2, "embedding_dropout": 0.1}),
        ("gated", {"bias": True, "tie_embeddings": True}),
        ("gated", {"bias": False, "norm_offset": 1.0, "rope_interleaved": True}),
    ],
    ids=["gelu-bias", "gelu-dropout", "gated-bias-tied", "gated-offset-interleaved"],
)
def test_a_decoder_is_trained(hopper: Emulated, style: str, options: dict[str, Any]):
    """With enough tokens that the pipelines of weights' gradients are refilled, too."""
    call = {"shape": (2, 200), "mlp_recompute": 2 if options["bias"] else 0}
    (outcome,) = hopper(1, _train_body, style, {"num_layers": 1, **options}, call)
    _trained(outcome, style, ["dropout"] if "embedding_dropout" in options else [])


@pytest.mark.nightly(seconds=25)
def test_several_steps_of_training(hopper: Emulated):
    (outcome,) = hopper(1, _train_body, "gated", {"num_layers": 2}, {"steps": 2})
    _trained(outcome, "gated")
    assert outcome.ran.kernels["_gradient_kernel"] == 4  # one for each of two micro-batches


@pytest.mark.nightly(seconds=20)
@pytest.mark.parametrize("style", ["gelu", "gated"])
def test_a_decoder_is_trained_over_two_ranks(hopper: Emulated, style: str):
    for outcome in hopper(2, _train_body, style, {"num_layers": 2}, {}):
        _trained(outcome, style)
        assert outcome.ran.collectives["all_reduce", "mlp.out"] == 4  # two layers, two micro-batches


@pytest.mark.nightly(seconds=17)
@pytest.mark.parametrize("style", ["gelu", "gated"])
def test_two_ranks_exchange_rows_inside_their_kernels(hopper: Emulated, style: str):
    """Both emulate, over memory that they share: products wait for rows, and send them."""
    call = {"sequence_parallel": True, "overlap": "kernel", "strict": True}
    for outcome in hopper(2, _train_body, style, {"num_layers": 2}, call):
        _trained(outcome, style)
        inside = [f"{module}.{way}" for module in ("mlp", "attention") for way in ("out", "in.grad")]
        sums = sum(outcome.ran.collectives["reduce_scatter", site] for site in inside)
        assert outcome.ran.kernels["_reduce_kernel"] == sums == 16  # four a layer and micro-batch


@pytest.mark.nightly(seconds=10)
@pytest.mark.parametrize("style", ["gelu", "gated"])
def test_a_decoder_is_trained_on_sm_80(ampere: Emulated, style: str):
    (outcome,) = ampere(1, _train_body, style, {"num_layers": 1, "bias": True}, {})
    _trained(outcome, style)


def _fuse_body(rank: int, world: int, bias: bool) -> Outcome:
    import transformers

    emulated_models.emulate()
    sizes = {name: SIZES[name] for name in ("vocab_size", "hidden_size", "intermediate_size", "head_dim")}
    config = transformers.LlamaConfig(
        **sizes,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.06,
        attention_bias=bias,
        mlp_bias=bias,
    )
    model = transformers.LlamaForCausalLM(config)
    return emulated_models.fuse_alike(model, BF16, torch.randint(600, (2, 48)), terms=1344)


@pytest.mark.nightly(seconds=6)
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
def test_a_fused_model_of_transformers(hopper: Emulated, bias: bool):
    pytest.importorskip("transformers")
    (outcome,) = hopper(1, _fuse_body, bias)
    assert outcome.wrong == []
    assert set(outcome.ran.kernels) >= TRAINED
    ops = {*_layers("gated"), "apply_rope", "linear_cross_entropy"}
    assert {op for op, _ in outcome.ran.ops} - {"attention"} == ops
    assert outcome.ran.others == {}
    # What fuse leaves alone: attention's last product, in training and inference, and the head where logits are asked.
    assert set(outcome.ran.stock) <= {"linear", "matmul", "mm", "addmm"}
    assert outcome.ran.stock["linear"] == 3
    assert outcome.plain.kernels == {}


# -------------------------------------------------------------------------------------------------------------- serving


def _requests(config: TransformerConfig, news: int) -> list[list[Request]]:
    """Three requests that begin alike, one of them for two answers; then one that finds the beginning in the cache."""
    draw = torch.Generator().manual_seed(1)

    def tokens(count: int) -> list[int]:
        return torch.randint(config.vocab_size, (count,), generator=draw).tolist()

    head = tokens(40)
    first = [Request(head + tokens(n), max_new_tokens=news, n=2 if n == 3 else 1) for n in (3, 29, 60)]
    return [first, [Request(head + tokens(5), max_new_tokens=4)]]


def _serve_body(
    rank: int, world: int, style: str, options: dict[str, Any], news: int, dtype: torch.dtype, call: dict[str, Any]
) -> Outcome:
    emulated_models.emulate()
    config = _config(style, **options)
    call = {"num_blocks": 64, "block_size": 16, "max_num_batched_tokens": 64, **call}
    return emulated_models.serve_alike(config, dtype, _requests(config, news), mesh=_mesh(world), **call)


def _served(outcome: Outcome, style: str, more: Iterable[str] = ()) -> dict[str, Any]:
    """The engine's statistics; ``more`` are ops of several ranks."""
    _ran_the_engine(outcome, style, more)
    _twin_would_be_seen(outcome, {*_layers(style), *CACHE})
    stats: dict[str, Any] = outcome.facts["stats"]
    assert stats["shared_tokens"] >= 32
    return stats


CACHE = {"norm_rope_write_kv_", "paged_attention", "copy_blocks_"}


def _ran_the_engine(outcome: Outcome, style: str, more: Iterable[str] = ()) -> None:
    assert outcome.wrong == []
    assert set(outcome.ran.kernels) >= SERVED
    _nothing_fell_back(outcome, {*_layers(style), *CACHE, *more})


@pytest.mark.codegen(seconds=15)
def test_ten_steps_of_decoding(hopper: Emulated):
    """Prompts in chunks, four answers at a time, a prefix that is found again, keys and values in fp8."""
    (outcome,) = hopper(1, _serve_body, "gated", FEWER, 8, FP16, {"kv_dtype": "fp8"})
    stats = _served(outcome, "gated")
    assert stats["steps"] - stats["prefill_tokens"] // 64 >= 10
    # In most rows of logits no other token would have passed.
    assert outcome.facts["decisive"] > outcome.facts["tokens"] / 2


@pytest.mark.nightly(seconds=20)
@pytest.mark.parametrize(
    ("style", "options", "dtype", "call"),
    [
        ("gated", {"intermediate_size": 2080}, FP16, {}),  # long sums, in parts
        ("gelu", {"num_layers": 2, "bias": True}, BF16, {"kv_dtype": "fp8", "max_num_batched_tokens": 128}),
        ("gated", {"attention_window": 24, "attention_softcap": 20.0}, FP16, {"kv_dtype": "int8"}),
        ("gelu", {"attention_sinks": True}, FP16, {"invariant": True}),
    ],
    ids=["split", "fp8", "int8-window-softcap", "invariant-sinks"],
)
def test_twenty_steps_of_the_engine(
    hopper: Emulated, style: str, options: dict[str, Any], dtype: torch.dtype, call: dict[str, Any]
):
    (outcome,) = hopper(1, _serve_body, style, {**FEWER, **options}, 14, dtype, call)
    stats = _served(outcome, style)
    assert stats["steps"] >= 19
    if "intermediate_size" in options:
        assert outcome.ran.kernels["_split_sum_kernel"] > 0


@pytest.mark.nightly(seconds=24)
def test_answers_that_were_preempted(hopper: Emulated):
    """The cache is too small for all of them: the last one ends, and is computed anew."""
    (outcome,) = hopper(1, _serve_body, "gated", FEWER, 14, FP16, {"num_blocks": 10})
    stats = _served(outcome, "gated")
    assert stats["preemptions"] >= 1
    assert stats["recomputed_tokens"] + stats["shared_tokens"] > 64


@pytest.mark.nightly(seconds=13)
@pytest.mark.parametrize(("style", "overlap"), [("gelu", "none"), ("gated", "kernel")])
def test_the_engine_over_two_ranks(hopper: Emulated, style: str, overlap: str):
    call = {"kv_dtype": "fp8", "layers": {"overlap": overlap}}
    more = {"all_reduce_rmsnorm"} if overlap == "kernel" else set()
    first, second = hopper(2, _serve_body, style, FEWER, 8, FP16, call)
    _served(first, style, more)
    _ran_the_engine(second, style, more)
    assert first.ran.kernels == second.ran.kernels
    assert (first.ran.kernels["_reduce_kernel"] > 0) is (overlap == "kernel")


@pytest.mark.nightly(seconds=8)
def test_the_engine_on_sm_80(ampere: Emulated):
    (outcome,) = ampere(1, _serve_body, "gated", FEWER, 8, FP16, {"kv_dtype": "int8"})
    _served(outcome, "gated")


# ------------------------------------------------------------------------------------------ faults that must be noticed


def _with_a_fault(kernel: str, old: str, new: str) -> None:
    """From now on each ``old`` in the text of that kernel is ``new``."""

    def planted(text: str) -> str:
        if f".entry {kernel}(" not in text:
            return text
        if old not in text:
            raise ValueError(f"{kernel} has no {old}: plant another fault")
        return text.replace(old, new)

    driver.mutate = planted


def _faulty_train_body(rank: int, world: int, *fault: str) -> Outcome:
    emulated_models.emulate()
    _with_a_fault(*fault)
    try:
        return emulated_models.train_alike(_config("gated", **TINY), BF16, shape=(2, 9))
    finally:
        driver.mutate = lambda text: text


def _faulty_serve_body(rank: int, world: int, *fault: str) -> Outcome:
    emulated_models.emulate()
    _with_a_fault(*fault)
    try:
        config = _config("gated", **TINY)
        rounds = [[Request(list(range(20)), max_new_tokens=3)]]
        return emulated_models.serve_alike(config, FP16, rounds, num_blocks=8, block_size=16, kv_dtype="fp8")
    finally:
        driver.mutate = lambda text: text


# One kind of instruction of a kernel each.
FAULTS = [
    pytest.param("train", "_rope_kernel", "neg.f32", "mov.b32", id="a pair is rotated the other way"),
    pytest.param("train", "_norm_bwd_kernel", "neg.f32", "mov.b32", id="a norm's backward adds for subtracts"),
    pytest.param("train", "_gradient_kernel", "ex2.approx.ftz.f32", "mov.b32", id="logits for their exponentials"),
    pytest.param("serve", "_paged_attention_fwd_kernel", "div.full.f32", "mul.f32", id="rows are not normalised"),
    pytest.param("serve", "_paged_attention_fwd_kernel", "cp.async.wait_group", "// ", id="copies are not waited for"),
]


@pytest.mark.spoiled
@pytest.mark.nightly(seconds=2)
@pytest.mark.parametrize(("what", "kernel", "old", "new"), FAULTS)
def test_a_fault_in_one_kernel_is_noticed(hopper: Emulated, what: str, kernel: str, old: str, new: str):
    (outcome,) = hopper(1, {"train": _faulty_train_body, "serve": _faulty_serve_body}[what], kernel, old, new)
    assert outcome.wrong


def _fallback_body(rank: int, world: int) -> Ran:
    emulated_models.emulate()
    model = emulated_models.build(_config("gated", **TINY), "triton", BF16)
    model.model.norm.impl = "reference"
    with torch.no_grad(), emulated_models.watched("triton") as ran:
        model(torch.arange(6).view(1, 6))
    return ran


@pytest.mark.nightly(seconds=1)
def test_a_module_that_falls_back_is_noticed(hopper: Emulated):
    (ran,) = hopper(1, _fallback_body)
    assert ran.others == {("rms_norm", "reference"): 1}
    assert "rms_norm" in ran.stock
    assert "mm" not in ran.stock
