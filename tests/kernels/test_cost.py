"""The cost model: its arithmetic by hand, the order it must keep, and what it is used for: ranking configurations."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardfuse.kernels.dev import codegen, inspection, registry
from shardfuse.kernels.dev.candidates import VARIANT_PENALTY, candidates, predicted_us
from shardfuse.kernels.linear.config import pick_config
from shardfuse.kernels.linear.gemm import Gemm, GemmConfig
from shardfuse.kernels.linear.tuned import fits, shared_bytes
from shardfuse.kernels.runtime import cost, device, dispatch
from shardfuse.kernels.runtime.chips import CHIPS

BF16, FP32, FP8 = torch.bfloat16, torch.float32, torch.float8_e4m3fn
H100 = CHIPS["sm_90"]
WIDE = GemmConfig(128, 256, 64, 8, 3, use_tma=True)
MB = 1e6

needs_triton = pytest.mark.skipif(dispatch.triton_version() is None, reason="Triton is not installed")


def _gemm(M: int, N: int, K: int, *, layout: str = "nt", dtype: torch.dtype = BF16, **fields: object) -> Gemm:
    return Gemm(layout, M, N, K, dtype, fields.pop("out_dtype", dtype), **fields)


# --- by hand ----------------------------------------------------------------------------------------------------------


def test_a_large_square_product_by_hand():
    found = cost.predict(H100, _gemm(8192, 8192, 8192), WIDE)
    assert found.flops == 2 * 8192**3
    assert found.bytes == 3 * 8192 * 8192 * 2  # both operands and the result, once
    # 32 columns of tiles each read A, 64 rows of tiles each read B; the result passes once.
    assert found.shared_bytes == (32 + 64 + 1) * 8192 * 8192 * 2
    assert found.tiles == 64 * 32
    assert found.waves == 16  # 2048 tiles over 132 multiprocessors: 15.5
    assert found.efficiency == 2048 / (16 * 132)
    assert found.math_us == pytest.approx(2 * 8192**3 / 989e12 * 1e6 / found.efficiency)
    assert found.memory_us == pytest.approx(402.653184 * MB / 3.35e12 * 1e6)
    assert found.flops / found.bytes == pytest.approx(2 * 8192 / 6)
    # A 128 x 256 tile takes 384 x 2 bytes for every 2 x 128 x 256 operations.
    assert found.shared_us == pytest.approx(found.shared_bytes / 9.4e12 * 1e6)
    assert found.epilogue_us == pytest.approx(132 * 128 * 256 * 2 / 3.35e12 * 1e6)
    assert found.time_us == pytest.approx(found.shared_us + found.epilogue_us + cost.LATENCY_US)
    assert found.bound == "L2"
    assert found.peak_share == pytest.approx(found.flops / (found.time_us * 1e-6) / 989e12)


def test_one_token_streams_the_weights():
    found = cost.predict(H100, _gemm(1, 14336, 4096), GemmConfig(16, 64, 128, 4, 5, use_tma=True, swap=True))
    weights = 14336 * 4096 * 2
    assert found.bytes == weights + 2 * 4096 + 2 * 14336
    assert found.bound == "memory"
    assert found.time_us == pytest.approx(found.bytes / 3.35e12 * 1e6, rel=0.1)
    assert found.flops / found.bytes == pytest.approx(1, rel=1e-3)  # two operations for every weight of two bytes


def test_few_tiles_cannot_pull_the_whole_bandwidth_and_splitting_helps():
    gemm = _gemm(16, 1024, 65536)
    whole = GemmConfig(16, 64, 64, 4, 3, use_tma=True)
    one, eight = (cost.predict(H100, gemm, dataclasses.replace(whole, split_k=parts)) for parts in (1, 8))
    # 16 programs with two stages of (16 + 64) x 64 elements under way, a microsecond each.
    in_flight = 16 * 2 * (16 + 64) * 64 * 2
    assert one.bound == "latency"
    assert one.memory_us == pytest.approx(one.bytes / (in_flight / 1e-6) * 1e6)
    assert (one.tiles, eight.tiles) == (16, 128)
    assert eight.time_us < one.time_us
    # Partial products of this size stay in the cache: written once, read once.
    assert eight.bytes == one.bytes
    assert eight.shared_bytes == one.shared_bytes + 2 * 8 * 16 * 1024 * 4


def test_partial_products_too_large_for_the_cache_go_to_memory():
    gemm = _gemm(2048, 2048, 16384, layout="tn")
    one, four = (cost.predict(H100, gemm, dataclasses.replace(WIDE, split_k=parts)) for parts in (1, 4))
    assert four.bytes == one.bytes + 2 * 4 * 2048 * 2048 * 4


def test_a_gated_product_is_two_that_share_an_operand():
    config = GemmConfig(128, 128, 64, 8, 4, use_tma=True)
    one = cost.predict(H100, _gemm(4096, 8192, 4096), config)
    both = cost.predict(H100, _gemm(4096, 8192, 4096, combine="gated", pairs=2), config)
    assert both.flops == 2 * one.flops
    assert both.bytes - one.bytes == 8192 * 4096 * 2
    assert both.tiles == one.tiles
    assert both.math_us == 2 * one.math_us


@pytest.mark.parametrize(
    ("fields", "extra"),
    [
        ({"writes": 2, "epilogue": ("gelu_tanh", "preact")}, 1000 * 2000 * 2),
        ({"reads": 1, "epilogue": ("act_grad", "silu")}, 1000 * 2000 * 2),
        ({"epilogue": ("bias",)}, 2000 * 2),
        ({"epilogue": ("row_sum",)}, 1000 * 2),
        ({"out_dtype": FP32}, 1000 * 2000 * 2),
        ({"out_dtype": FP32, "reads": 1, "epilogue": ("accumulate",)}, 1000 * 2000 * (2 + 4)),
    ],
)
def test_the_epilogue_counts_what_it_moves(fields, extra):
    plain = cost.predict(H100, _gemm(1000, 2000, 3000), WIDE)
    more = cost.predict(H100, _gemm(1000, 2000, 3000, **fields), WIDE)
    assert (more.bytes - plain.bytes, more.shared_bytes - plain.shared_bytes) == (extra, extra)
    assert more.flops == plain.flops


def test_padding_costs_time_and_is_no_work():
    full, odd = (cost.predict(H100, _gemm(M, 1024, 1024), WIDE) for M in (256, 129))
    assert odd.math_us == full.math_us
    assert odd.flops < full.flops


@pytest.mark.parametrize(
    ("dtype", "precision", "peak"), [(BF16, "ieee", 989e12), (FP32, "ieee", 67e12), (FP32, "tf32", 495e12)]
)
def test_the_peak_is_that_of_the_precision(dtype, precision, peak):
    assert cost.peak_flops(H100, _gemm(1, 1, 1, dtype=dtype, precision=precision)) == peak


def test_a_precision_that_the_chip_lacks_is_refused():
    assert cost.peak_flops(H100, _gemm(1, 1, 1, dtype=FP8)) == 1979e12
    with pytest.raises(ValueError, match="NVIDIA A100 has no rate for fp8"):
        cost.peak_flops(CHIPS["sm_80"], _gemm(1, 1, 1, dtype=FP8))


def test_the_bound_of_what_fusing_can_win():
    """Megatron's MLP at D = T = 4096, F = 4 D: six GEMMs at 750 TFLOP/s, copies at 3 TB/s."""
    T = D = 4096
    F = 4 * D
    gemm_us = 6 * 2 * T * D * F / 750e12 * 1e6
    passes = cost.PASSES["forward"] + cost.PASSES["backward"]
    assert passes == 6
    assert cost.pass_bound(gemm_us, 3e12, cost.pass_bytes(passes, T, F)) == pytest.approx(250 / D)
    both = cost.pass_bound(gemm_us, 3e12, cost.pass_bytes(passes, T, F, accumulated=2 * D * F))
    assert both == pytest.approx(250 / D + 417 / T, rel=1e-3)
    gated = cost.PASSES["gated forward"] + cost.PASSES["gated backward"]
    assert cost.pass_bound(1.5 * gemm_us, 3e12, cost.pass_bytes(gated, T, F)) == pytest.approx(0.095, rel=0.01)


# --- order ------------------------------------------------------------------------------------------------------------

sizes = st.integers(1, 20000)
tiles = st.builds(
    GemmConfig,
    st.sampled_from([16, 64, 128]),
    st.sampled_from([64, 128, 256]),
    st.sampled_from([32, 64, 128]),
    st.sampled_from([4, 8]),
    st.integers(1, 5),
    st.just(True),
    split_k=st.integers(1, 8),
)


@given(sizes, sizes, sizes, tiles, st.sampled_from(sorted(CHIPS)))
def test_figures_keep_their_bounds(M, N, K, config, target):
    chip, gemm = CHIPS[target], _gemm(M, N, K)
    found = cost.predict(chip, gemm, config)
    assert 0 < found.efficiency <= 1
    assert 0 < found.peak_share < 1
    assert found.waves == -(-found.tiles // chip.sms)
    assert found.shared_bytes >= found.bytes
    # The roofline: no model of one chip may beat it.
    assert found.time_us > max(found.flops / chip.flops["bf16"], found.bytes / chip.bandwidth) * 1e6
    assert found.bound in ("math", "memory", "latency", "L2")
    assert max(found.math_us, found.memory_us, found.shared_us) < found.time_us


@given(sizes, sizes, sizes, tiles, st.sampled_from("MNK"))
def test_more_work_takes_no_less_time(M, N, K, config, which):
    gemm = _gemm(M, N, K)
    doubled = dataclasses.replace(gemm, **{which: 2 * getattr(gemm, which)})
    small, large = (cost.predict(H100, size, config) for size in (gemm, doubled))
    assert (large.flops, large.bytes > small.bytes) == (2 * small.flops, True)
    assert large.math_us >= small.math_us
    assert large.tiles >= small.tiles
    if large.bound == small.bound and small.bound != "latency":  # more tiles also pull more at once
        assert large.time_us >= small.time_us


@given(sizes, sizes, sizes, tiles)
def test_a_better_chip_is_no_slower(M, N, K, config):
    gemm = _gemm(M, N, K)
    faster = dataclasses.replace(
        H100, bandwidth=2 * H100.bandwidth, flops={name: 2 * rate for name, rate in H100.flops.items()}
    )
    assert cost.predict(faster, gemm, config).time_us <= cost.predict(H100, gemm, config).time_us


# --- candidates -------------------------------------------------------------------------------------------------------

GEMMS = {
    "large": _gemm(8192, 14336, 4096, epilogue=("bias", "gelu_tanh", "preact"), writes=2),
    "one token": _gemm(1, 14336, 4096, epilogue=("bias", "gelu_tanh")),
    "few tokens": _gemm(48, 4096, 14336),
    "wgrad, long K": _gemm(1024, 1024, 16384, layout="tn", epilogue=("row_sum",)),
    "dgrad, chained": _gemm(512, 4096, 6144, layout="nn", combine="chained", pairs=3),
    "gated": _gemm(4096, 14336, 4096, combine="gated", pairs=2, epilogue=("silu", "preact"), writes=3),
    "no TMA": _gemm(4096, 4095, 4095, aligned=False),
    "fp32": _gemm(512, 512, 512, dtype=FP32),
    "tf32": _gemm(512, 512, 512, dtype=FP32, precision="tf32"),
}


@pytest.mark.parametrize("target", sorted(CHIPS))
@pytest.mark.parametrize("name", GEMMS)
def test_candidates_fit_and_the_best_comes_first(name, target):
    gemm = GEMMS[name]
    found = candidates(target, gemm)
    chosen = pick_config(target, gemm)
    assert chosen in found
    assert len(set(found)) == len(found) > 3
    assert all(fits(target, gemm, config) for config in found if config != chosen)
    best = min(predicted_us(target, gemm, config) for config in found)
    assert predicted_us(target, gemm, found[0]) <= best * (1 + VARIANT_PENALTY)
    assert len({(config.block_m, config.block_n, config.split_k, config.swap) for config in found[:12]}) > 1
    if gemm.combine == "chained":
        assert {config.split_k for config in found} == {1}


def test_candidates_leave_no_multiprocessor_idle_where_k_is_long():
    best = candidates("sm_90", GEMMS["wgrad, long K"])[0]
    assert best.split_k > 1
    assert cost.predict(H100, GEMMS["wgrad, long K"], best).efficiency > 0.9


@pytest.mark.parametrize("tokens", [1, 16, 64])
def test_few_rows_are_also_loaded_through_pointers_and_in_narrow_tiles(tokens):
    """Tensor maps are built one after the other before the first load, and a split is a second launch."""
    gemm = _gemm(tokens, 4096, 4096)
    first = candidates("sm_90", gemm)[:12]
    assert {config.use_tma for config in first} == {True, False}
    assert min(config.block_n for config in first if config.split_k == 1) == (32 if tokens == 64 else 16)
    assert {config.use_tma for config in candidates("sm_90", _gemm(65, 4096, 4096))} == {True}
    assert {config.use_tma for config in candidates("sm_90", _gemm(64, 4096, 4096, layout="tn"))} == {True}
    assert {config.use_tma for config in candidates("sm_80", gemm)} == {False}


def test_row_invariant_products_are_never_split():
    gemm = dataclasses.replace(GEMMS["wgrad, long K"], layout="nn", row_invariant=True)
    assert {config.split_k for config in candidates("sm_90", gemm)} == {1}


def test_candidates_for_the_interpreter_differ():
    found = candidates(device.INTERPRETER, _gemm(40, 64, 48))
    assert found[0] == pick_config(device.INTERPRETER, _gemm(40, 64, 48))
    assert {config.split_k for config in found} == {1, 2}


def test_an_unknown_chip_has_no_candidates():
    with pytest.raises(ValueError, match="nothing is known of sm_75"):
        candidates("sm_75", GEMMS["large"])


@pytest.mark.parametrize(
    ("changes", "config"),
    [
        ({}, {"num_stages": 5}),  # 240 KB of pipeline
        ({"reads": 1}, {}),  # 144 KB of pipeline, a tile that goes out and one that comes in
        ({"combine": "gated", "pairs": 2}, {}),  # two accumulators of 128 registers
        ({}, {"block_m": 256}),  # one of 256
        ({"aligned": False}, {}),
        ({}, {"block_k": 48}),
        ({}, {"block_m": 8}),
    ],
)
def test_what_does_not_fit(changes, config):
    gemm = _gemm(8192, 8192, 8192)
    assert fits("sm_90", gemm, WIDE)
    assert not fits("sm_90", dataclasses.replace(gemm, **changes), dataclasses.replace(WIDE, **config))
    assert not fits("sm_80", gemm, WIDE)


# --- what inspect prints ----------------------------------------------------------------------------------------------


@needs_triton
@pytest.mark.parametrize("target", registry.TARGETS)
def test_every_gemm_build_is_predicted(target):
    predicted = [codegen._predict(build) for build in registry.op("linear_act").builds(target)]
    gemms = [fields for fields in predicted if fields]
    assert len(gemms) > 10
    assert all(fields.keys() == set(codegen._PREDICTED) for fields in gemms)
    assert all(0 < fields["peak_share"] < 1 for fields in gemms)
    assert len(gemms) < len(predicted)  # an elementwise kernel is none


@needs_triton
def test_inspect_prints_the_prediction(monkeypatch, capsys):
    [build] = [b for b in registry.op("linear_act").builds("sm_90") if b.gemm is not None][:1]
    report = codegen.Report(build.op, build.config, "sm_90", blocks_per_sm=1, **codegen._predict(build))
    plain = codegen.Report("linear_act", "act_grad-8x256", "sm_90", blocks_per_sm=1)
    monkeypatch.setattr(codegen, "compile_builds", lambda builds, **options: [report, plain])
    monkeypatch.setenv("COLUMNS", "200")
    assert inspection.inspect("linear_act", "sm_90", verbose=True) == 0
    out = capsys.readouterr().out
    assert "not measured" in out
    line = next(line for line in out.splitlines() if line.startswith(build.config))
    assert report.gemm in line
    assert report.bound in line
    assert report.row()["flops"] == 2 * build.gemm.M * build.gemm.N * build.gemm.K * (
        build.gemm.combine == "gated" or 1
    )
    assert plain.row()["flops"] is None


@pytest.mark.codegen
@needs_triton
@pytest.mark.parametrize(
    ("target", "blocks"), [("sm_90", (128, 256)), ("sm_90", (128, 128)), ("sm_80", (128, 128)), ("gfx942", (128, 128))]
)
def test_the_arithmetic_of_shared_memory_is_the_compilers(target, blocks):
    """What ``shared_bytes`` leaves out are barriers and the like."""
    build = next(
        build
        for build in registry.op("linear_act").builds(target)
        if build.gemm is not None
        and (build.tile.block_m, build.tile.block_n) == blocks
        and (build.gemm.layout, build.gemm.dtype, build.gemm.pairs, build.tile.split_k) == ("nt", BF16, 1, 1)
        and build.gemm.aligned
    )
    [report] = codegen.compile_builds([build])
    assert report.error is None
    counted = shared_bytes(target, build.gemm, build.tile)
    assert counted <= report.shared_bytes < counted * 1.01
    assert report.flops == 2 * build.gemm.M * build.gemm.N * build.gemm.K
    assert report.gemm == f"nt {build.gemm.M}x{build.gemm.N}x{build.gemm.K}"


@needs_triton
@pytest.mark.parametrize("target", sorted(CHIPS))
def test_what_is_built_fits_by_arithmetic(target):
    """So that an entry of a table is not refused for being like what runs without one."""
    builds = [build for spec in registry.ops().values() for build in spec.builds(target) if build.gemm is not None]
    assert [build.config for build in builds if not fits(target, build.gemm, build.tile)] == []
