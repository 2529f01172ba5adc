"""Races in shared memory are read off Triton's IR and PTX, and where a fence is missing other tiles are taken."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

from shardfuse.kernels.dev import pipelines, registry
from shardfuse.kernels.linear import config as gemms
from shardfuse.kernels.linear import tuned as gemm_tables
from shardfuse.kernels.linear.gemm import Gemm, GemmConfig
from shardfuse.kernels.paged_attention import config as tiles
from shardfuse.kernels.paged_attention import tuned as tile_tables
from shardfuse.kernels.paged_attention.config import AttentionConfig, Problem
from shardfuse.kernels.runtime import dispatch, fences
from shardfuse.kernels.runtime.chips import CHIPS, described, multiplies_asynchronously

# A loop as Triton prints it: copies run two tiles ahead, into a ring of BUFFERS; one product stays under way.
_RING = """
module attributes {{"ttg.num-warps" = 4 : i32}} {{
  tt.func public @kernel(%desc: !tt.tensordesc<64x64xbf16>, %n: i32) attributes {{noinline = false}} {{
    %zero = arith.constant 0 : i32 loc(#loc1)
    %one = arith.constant 1 : i32 loc(#loc1)
    %two = arith.constant 2 : i32 loc(#loc1)
    %buffers = arith.constant {buffers} : i32 loc(#loc1)
    %cst = arith.constant dense<0.0> : tensor<64x64xf32> loc(#loc1)
    %tile = ttg.local_alloc : () -> !ttg.memdesc<{buffers}x64x64xbf16, #shared, #smem, mutable> loc(#loc2)
    %bars = ttg.local_alloc : () -> !ttg.memdesc<2x1xi64, #shared1, #smem, mutable> loc(#loc2)
    %bar0 = ttg.memdesc_index %bars[%zero] : !ttg.memdesc<2x1xi64> -> !ttg.memdesc<1xi64> loc(#loc2)
    %acc = ttng.tmem_alloc : () -> !ttg.memdesc<64x64xf32, #tmem> loc(#loc2)
    %0 = ttg.memdesc_index %tile[%zero] : !ttg.memdesc<{buffers}x64x64xbf16> -> !ttg.memdesc<64x64xbf16> loc(#loc2)
    ttng.async_tma_copy_global_to_local %desc[%zero, %zero] %0, %bar0, %true : !tt.tensordesc<64x64xbf16> loc(#loc3)
    %1 = ttg.memdesc_index %tile[%one] : !ttg.memdesc<{buffers}x64x64xbf16> -> !ttg.memdesc<64x64xbf16> loc(#loc2)
    ttng.async_tma_copy_global_to_local %desc[%zero, %one] %1, %bar0, %true : !tt.tensordesc<64x64xbf16> loc(#loc3)
    %2:3 = scf.for %i = %zero to %n step %one iter_args({carried}) -> (i32, i32, i32)  : i32 {{
      %here = arith.remsi %i, %buffers : i32 loc(#loc1)
      %read = ttg.memdesc_index %tile[%here] : !ttg.memdesc<{buffers}x64x64xbf16> -> !ttg.memdesc<64x64xbf16> loc(#loc2)
      %turned = ttg.memdesc_trans %read {{order = array<i32: 1, 0>}} : !ttg.memdesc<64x64xbf16> loc(#loc2)
{products}
      %next = arith.addi %i, %two : i32 loc(#loc1)
      %there = arith.remsi %next, %buffers : i32 loc(#loc1)
      %write = ttg.memdesc_index %tile[%there] : !ttg.memdesc<{buffers}x64x64xbf16> -> !ttg.memdesc<64x64xbf16> loc(#loc2)
      {copy}
      %last = arith.cmpi eq, %next, %n : i32 loc(#loc1)
      scf.if %last {{
        {wait_all}
      }} loc(#loc4)
      scf.yield {yielded} : i32, i32, i32 loc(#loc4)
    }} loc(#loc4)
    tt.return loc(#loc4)
  }} loc(#loc)
}} loc(#loc)
"""  # noqa: E501 - as Triton prints it
_TMA = "ttng.async_tma_copy_global_to_local %desc[%zero, %next] %write, %bar0, %true : !tt.tensordesc<64x64xbf16>"
_CP_ASYNC = "%5 = ttg.async_copy_global_to_local %desc, %write mask %true : tensor<64x64x!tt.ptr<bf16>> -> <64x64xbf16>"


def _wgmma(buffers: int, pendings: int = 1, copy: str = _TMA, asynchronous: str = "true") -> str:
    products = f"""      %dot = ttng.warp_group_dot %read, %turned, %cst {{isAsync = {asynchronous}}} : !ttg.memdesc
      %w:3 = ttng.warp_group_dot_wait %dot, %read, %turned {{pendings = {pendings} : i32}} : tensor<64x64xf32>"""
    wait_all = "%all = ttng.warp_group_dot_wait %dot {pendings = 0 : i32} : tensor<64x64xf32>"
    carried = "%a = %zero, %b = %zero, %c = %zero"
    return _RING.format(
        buffers=buffers, products=products, copy=copy, wait_all=wait_all, carried=carried, yielded="%zero, %zero, %zero"
    )


def _tcgen05(buffers: int, waits: str) -> str:
    """Products signal on two barriers in turn; what a step waits for is the product before, or this one."""
    products = f"""      %side = arith.remsi %i, %two : i32
      %done = ttg.memdesc_index %bars[%side] : !ttg.memdesc<2x1xi64> -> !ttg.memdesc<1xi64>
      ttng.tc_gen5_mma %read, %turned, %acc, %true, %true, %done[%true] {{is_async}} : !ttg.memdesc<64x64xbf16>
      ttng.wait_barrier {waits}, %zero deps %read : !ttg.memdesc<1xi64>"""
    return _RING.format(
        buffers=buffers, products=products, copy=_TMA, wait_all="ttng.wait_barrier %done, %zero : !ttg.memdesc<1xi64>",
        carried="%before = %zero, %b = %zero, %c = %zero", yielded="%done, %zero, %zero",
    )  # fmt: skip


def _from_registers(ttgir: str) -> str:
    """Of the operands of each product the second is stored where it is then read."""
    before, turn, after = ttgir.partition("ttg.memdesc_trans %read {order = array<i32: 1, 0>} : ")
    assert turn
    return before + "ttg.local_alloc %value : (tensor<64x64xbf16>) -> " + after


@pytest.mark.parametrize(
    ("ttgir", "overwrites", "pending"),
    [
        (_wgmma(3), 0, 1),  # the copy two ahead goes to the slot of the product before, which the wait has ended
        (_wgmma(2), 1, 1),  # of the product that has just begun
        (_wgmma(2, pendings=0), 0, 0),
        (_wgmma(3, pendings=2), 1, 2),
        (_wgmma(4, pendings=2), 0, 2),
        (_wgmma(2, asynchronous="false"), 0, 0),
        (_wgmma(2, copy=_CP_ASYNC), 1, 1),
        (_wgmma(3, copy=_CP_ASYNC), 0, 1),
        (_wgmma(3).replace("%there = arith.remsi %next", "%there = arith.unknown %next"), 1, 1),  # it may be any slot
        (_wgmma(3).replace("scf.for", "scf.while"), 1, 0),  # no loop, and any slot
        (_wgmma(3).replace("ttng.warp_group_dot", "tt.dot"), 0, None),
        (_tcgen05(3, "%before"), 0, 1),
        (_tcgen05(2, "%before"), 1, 1),
        (_tcgen05(2, "%done"), 0, 0),
        (_tcgen05(3, "%before").replace("{is_async} ", ""), 0, 0),
        # An operand that comes from registers has one buffer, which each step writes.
        (_from_registers(_tcgen05(3, "%before")), 1, 1),
        (_from_registers(_tcgen05(3, "%done")), 0, 0),
        (_from_registers(_wgmma(3)), 1, 1),
        (_from_registers(_wgmma(3, pendings=0)), 0, 0),
    ],
)
def test_how_far_loops_run_ahead(ttgir, overwrites, pending):
    """Copies beneath a product that still reads, and the products that the loop goes round with."""
    assert pipelines.read(ttgir) == (overwrites, pending)


def test_what_is_no_ttgir_is_said_to_be_none():
    with pytest.raises(ValueError, match="do not close"):
        pipelines.read("ttng.warp_group_dot \nscf.for %i = %a to %b step %c {\n")


_PTX = """
    cp.async.cg.shared.global [ %r1 + 0 ], [ %rd1 + 0 ], 0x10;
    cp.async.commit_group;
    cp.async.wait_group 2;
    bar.sync 0;
    {fence}
    wgmma.fence.sync.aligned;
    wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {{%f1}}, %rd2, %rd3, 1, 1, 1, 0, 1;
    wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {{%f1}}, %rd2, %rd3, 1, 1, 1, 0, 1;
"""


def test_products_behind_a_wait_need_a_fence():
    assert fences.unfenced(_PTX.format(fence="fence.proxy.async.shared::cta;")) == 0
    assert fences.unfenced(_PTX.format(fence="")) == 2
    assert fences.unfenced(_PTX.format(fence="").replace("wgmma.mma_async", "mma.sync")) == 0
    assert fences.unfenced(_PTX.format(fence="").replace("cp.async.", "cp.async.bulk.")) == 0  # TMA's proxy


BF16 = torch.bfloat16
PREFILL = Problem(
    arch="sm_90", slots=132, tokens=8192, seqs=1, max_keys=8192, group=4, kv_heads=8, head_size=128, v_size=128,
    q_dtype=BF16, kv_dtype=BF16, causal=True, window=None, prefix=False, tree=False, invariant=False,
    min_rows=128, max_rows=None, max_seq_len=8192,
)  # fmt: skip


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("changes", [{}, {"head_size": 256, "v_size": 256}, {"tree": True}, {"kv_dtype": torch.int8}])
@pytest.mark.parametrize("arch", ["sm_90", "sm_100"])
def test_without_fences_no_tile_is_multiplied_asynchronously(arch, changes, invariant):
    problem = PREFILL._replace(arch=arch, invariant=invariant, **changes)
    assert max(each.config.block_m for each in tiles.tile_classes(problem)) >= (64 if arch == "sm_90" else 32)
    found = [each.config for each in tiles.tile_classes(problem._replace(fenced=False))]
    assert max(config.block_m for config in found) == 32


def test_without_fences_such_tiles_are_refused_by_name():
    wide, narrow, few = AttentionConfig(128, 64, 8, 3), AttentionConfig(32, 64, 4, 3), AttentionConfig(64, 16, 2, 5)
    problem = PREFILL._replace(fenced=False)
    assert tile_tables.fits(PREFILL, wide)
    assert not tile_tables.fits(problem, wide)
    for tile in narrow, few:  # mma.sync
        assert tile_tables.fits(problem, tile)
        assert tiles.pick_tile(problem._replace(forced=tile), 128) == tile
    with pytest.raises(ValueError, match=r"paged_attention: the tile 128x64-w8-s3 would be .*#9610.*Triton 3\.7"):
        tiles.pick_tile(problem._replace(forced=wide), 128)


def test_without_fences_tables_may_not_choose_products_through_pointers():
    gemm = Gemm("nt", 512, 512, 512, BF16, BF16)
    through = GemmConfig(128, 128, 64, 8, 3, use_tma=False)
    for arch, gemm_, expected in (
        ("sm_90", gemm, False),
        ("sm_100", gemm, False),
        ("sm_80", gemm, True),
        ("sm_90", Gemm("nt", 512, 512, 512, torch.float32, torch.float32), True),  # in plain multiplications
    ):
        config = through if gemm_.dtype == BF16 else GemmConfig(64, 64, 16, 8, 2, use_tma=False)
        with fences.assumed(False):
            assert gemm_tables.fits(arch, gemm_, config) is expected
        with fences.assumed(True):
            assert gemm_tables.fits(arch, gemm_, config)
    with fences.assumed(False):
        assert gemm_tables.fits("sm_90", gemm, GemmConfig(128, 128, 64, 8, 3, use_tma=True))


def test_without_fences_tf32_through_pointers_has_small_tiles():
    """Elements of 16 bits in unaligned rows are not copied ahead; those of 32 bits are."""
    for layout in "nt", "nn", "tn":
        gemm = Gemm(layout, 512, 512, 512, torch.float32, torch.float32, precision="tf32", aligned=False)
        with fences.assumed(True):
            assert gemms.pick_config("sm_90", gemm).block_m == 128
        with fences.assumed(False):
            assert gemms.pick_config("sm_90", gemm).block_m == 32
            with (
                gemms.forced(GemmConfig(128, 128, 32, 8, 3, use_tma=False)),
                pytest.raises(ValueError, match=r"a product in tiles of 128x128x32-w8-s3 would be .*#9610"),
            ):
                gemms.pick_config("sm_90", gemm)


def test_without_fences_rows_that_tma_does_not_take_have_small_tiles():
    """A transposed or expanded view has an aligned pitch: it is copied ahead."""
    gemm = Gemm("nt", 512, 512, 512, BF16, BF16, aligned=False)
    with fences.assumed(True):
        assert gemms.pick_config("sm_90", gemm).block_m == 128
    with fences.assumed(False):
        config = gemms.pick_config("sm_90", gemm)
        assert (config.block_m, gemm_tables.fits("sm_90", gemm, config)) == (32, True)
        with gemms.forced(config):
            assert gemms.pick_config("sm_90", gemm) == config


def test_only_a_product_that_needs_the_fence_asks_for_it(monkeypatch):
    def fail(arch: str) -> bool:
        raise AssertionError("a compiler ran")

    monkeypatch.setattr(fences, "_compiles_with_fences", fail)
    assert gemms.pick_config("sm_90", Gemm("nt", 512, 512, 512, BF16, BF16)).use_tma
    with pytest.raises(AssertionError, match="a compiler ran"):
        gemms.pick_config("sm_90", Gemm("nt", 512, 512, 512, BF16, BF16, aligned=False))


@pytest.mark.parametrize("ptx", ["", "wgmma.mma_async", "cp.async.wait_group 0;", None])
def test_a_probe_that_shows_nothing_leaves_it_to_the_version(monkeypatch, ptx):
    def probe(arch: str) -> str:
        if ptx is None:
            raise KeyError("ptx")
        return ptx

    monkeypatch.setitem(sys.modules, f"{fences.__package__}.fences_triton", SimpleNamespace(compile_probe=probe))
    monkeypatch.setattr(dispatch, "interpreting", lambda: False)
    for version, expected in (("3.6.0", False), ("3.7.1", True)):
        monkeypatch.setattr(dispatch, "triton_version", lambda version=version: version)
        assert fences._compiles_with_fences.__wrapped__("sm_90") is expected


@pytest.mark.parametrize("version", ["3.6.0", "3.7.1", "3.10.0", "4.0.0"])
def test_a_process_that_interprets_goes_by_the_version(monkeypatch, version):
    monkeypatch.setattr(dispatch, "triton_version", lambda: version)
    monkeypatch.setattr(dispatch, "interpreting", lambda: True)
    fences._compiles_with_fences.cache_clear()
    try:
        assert fences.fenced("sm_90") is (version != "3.6.0")
        assert fences.fenced("sm_89")  # it has nothing to fence
        assert fences.fenced("gfx942")
        assert fences.fenced("interpreter")
    finally:
        fences._compiles_with_fences.cache_clear()


@pytest.mark.parametrize(
    ("arch", "name"),
    [
        ("sm_87", "sm_86"), ("sm_88", "sm_86"), ("sm_103", "sm_100"), ("sm_121", "sm_120"), ("sm_130", "sm_86"),
        ("sm_110", "sm_86"), ("gfx950", "gfx942"), *((arch, arch) for arch in CHIPS),
    ],
)  # fmt: skip
def test_a_chip_that_nobody_listed_takes_the_nearest_that_can_do_no_more(arch, name):
    assert described(arch) is CHIPS[name]
    assert multiplies_asynchronously(arch) is (name in ("sm_90", "sm_100"))


@pytest.mark.parametrize("arch", [arch for arch in CHIPS if arch.startswith("sm_")])  # AMD's go through registers
def test_every_tile_of_attention_fits_a_block_of_the_chip(arch):
    """By arithmetic; that it is right says the record of what was compiled (test_codegen.py)."""
    fp16, fp32 = torch.float16, torch.float32
    for head, cache, options in (
        (128, BF16, {}), (256, BF16, {}), (256, torch.float8_e4m3fn, {}), (256, BF16, {"tree": True}),
        (192, BF16, {"v_size": 128}), (256, fp16, {}), (256, fp16, {"invariant": True}),
        (64, BF16, {"invariant": True}), (256, BF16, {"invariant": True}), (256, fp32, {"q_dtype": fp32}),
    ):  # fmt: skip
        problem = PREFILL._replace(arch=arch, head_size=head, **{"v_size": head, "kv_dtype": cache, **options})
        for each in tiles.tile_classes(problem._replace(min_rows=None)):
            used = tile_tables.shared_bytes(problem, each.config)
            assert used <= CHIPS[arch].shared_per_block, (problem, each.config)


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_heads_that_fit_no_block_get_the_smallest_tile(dtype):
    """Triton says then what does not fit."""
    problem = PREFILL._replace(arch="sm_86", head_size=4096, v_size=4096, q_dtype=dtype, kv_dtype=dtype)
    found = [each.config for each in tiles.tile_classes(problem)]
    assert {(config.block_m, config.block_n) for config in found} == {(16, 16)}
    assert all(config.per_sm == 1 for config in found)


def test_the_chips_are_what_builds_are_made_for():
    assert list(registry.TARGETS) == list(CHIPS)
