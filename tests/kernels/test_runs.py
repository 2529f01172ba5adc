"""The contiguous, aligned run that one thread owns, by Triton's IR and a build's tensors."""

from __future__ import annotations

import pytest
import torch

from shardfuse.kernels.dev import triton_ir
from shardfuse.kernels.dev.runs import Narrow, Run, contiguous, narrow, outputs, runs


def _meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


@pytest.mark.parametrize(
    ("tensor", "bits"),
    [
        (_meta(8, 4096), 128),
        (_meta(8, 4095), 16),  # rows begin at any element
        (_meta(8, 100), 64),
        (_meta(8, 100, dtype=torch.float32), 128),
        (_meta(8, 4096)[:, :4095], 16),  # masks end at any element
        (_meta(8, 4096)[:, ::2], 16),  # no two elements lie together
        (_meta(4096, 8).T, 128),
        (_meta(4095), 128),  # one row: the mask's length is not known
        (_meta(2, 3, 40, 128), 128),
        (_meta(8, 40, 72, dtype=torch.uint8), 64),
        (_meta(8, 2)[:, 0], 16),
        (_meta(()), 16),
        (_meta(32769)[1:].view(8, 4096), 16),  # begins behind an element
    ],
)
def test_how_far_memory_is_contiguous_and_aligned(tensor, bits):
    assert contiguous(tensor) == bits


# Of Triton 3.7.1: RMSNorm's load of x, its store of rstd, and attention's gather of keys through pages, a bit shorter.
TTIR = """
#loc = loc("/somewhere/norm/triton.py":102:0)
#loc1 = loc("/somewhere/norm/triton.py":29:19)
#loc2 = loc("/somewhere/norm/triton.py":83:57)
#loc3 = loc("/somewhere/norm/triton.py":146:9)
#loc4 = loc("/somewhere/attention/triton.py":53:30)
#loc5 = loc("/somewhere/attention/triton.py":128:4)
#loc6 = loc("s"(#loc1))
#loc7 = loc(callsite(#loc6 at #loc2))
#loc8 = loc("s"(#loc2))
#loc9 = loc(fused[#loc4, #loc5])
module {
  tt.func public @_kernel(%x_ptr: !tt.ptr<bf16> {tt.divisibility = 16 : i32} loc("x_ptr"(#loc)), %rstd_ptr: !tt.ptr<f32> loc("rstd_ptr"(#loc)), %kv_ptrs: !tt.ptr<bf16> loc("kv_ptrs"(#loc)), %kv_ptrs_0: !tt.ptr<i8> loc("kv_ptrs"(#loc)), %tables_ptr: !tt.ptr<i32> loc("tables_ptr"(#loc)), %stride: i32 loc("stride"(#loc))) attributes {noinline = false} {
    %c0 = arith.constant 0 : i32 loc(#loc)
    %c16 = arith.constant 16 : i32 loc(#loc)
    %cst = arith.constant dense<128> : tensor<64x1xi32> loc(#loc)
    %row = tt.get_program_id x : i32 loc(#loc)
    %cols = tt.make_range {end = 4096 : i32, start = 0 : i32} : tensor<4096xi32> loc(#loc)
    %at = arith.muli %row, %stride : i32 loc(#loc)
    %base = tt.addptr %x_ptr, %at : !tt.ptr<bf16>, i32 loc(#loc)
    %cols_1 = tt.expand_dims %cols {axis = 0 : i32} : tensor<4096xi32> -> tensor<1x4096xi32> loc(#loc)
    %ptrs = tt.splat %base : !tt.ptr<bf16> -> tensor<1x4096x!tt.ptr<bf16>> loc(#loc)
    %ptrs_2 = tt.addptr %ptrs, %cols_1 : tensor<1x4096x!tt.ptr<bf16>>, tensor<1x4096xi32> loc(#loc)
    %s = tt.load %ptrs_2 : tensor<1x4096x!tt.ptr<bf16>> loc(#loc7)
    %rstd = tt.addptr %rstd_ptr, %row : !tt.ptr<f32>, i32 loc(#loc)
    tt.store %rstd, %row : !tt.ptr<f32> loc(#loc3)
    %keys = tt.make_range {end = 64 : i32, start = 0 : i32} : tensor<64xi32> loc(#loc)
    %dims = tt.make_range {end = 128 : i32, start = 0 : i32} : tensor<128xi32> loc(#loc)
    %tables = tt.splat %tables_ptr : !tt.ptr<i32> -> tensor<64x!tt.ptr<i32>> loc(#loc)
    %codes = tt.splat %kv_ptrs_0 : !tt.ptr<i8> -> tensor<64x128x!tt.ptr<i8>> loc(#loc)
    %end:2 = scf.for %first = %c0 to %row step %c16 iter_args(%here = %keys, %sum = %c0) -> (tensor<64xi32>, i32)  : i32 {
      %page_ptrs = tt.addptr %tables, %here : tensor<64x!tt.ptr<i32>>, tensor<64xi32> loc(#loc)
      %page = tt.load %page_ptrs : tensor<64x!tt.ptr<i32>> loc(#loc5)
      %page_3 = tt.expand_dims %page {axis = 1 : i32} : tensor<64xi32> -> tensor<64x1xi32> loc(#loc)
      %page_4 = arith.muli %page_3, %cst : tensor<64x1xi32> loc(#loc)
      %page_5 = tt.broadcast %page_4 : tensor<64x1xi32> -> tensor<64x128xi32> loc(#loc)
      %dims_6 = tt.expand_dims %dims {axis = 0 : i32} : tensor<128xi32> -> tensor<1x128xi32> loc(#loc)
      %dims_7 = tt.broadcast %dims_6 : tensor<1x128xi32> -> tensor<64x128xi32> loc(#loc)
      %k_ptrs = tt.addptr %codes, %page_5 : tensor<64x128x!tt.ptr<i8>>, tensor<64x128xi32> loc(#loc)
      %k_ptrs_8 = tt.addptr %k_ptrs, %dims_7 : tensor<64x128x!tt.ptr<i8>>, tensor<64x128xi32> loc(#loc)
      %k = tt.load %k_ptrs_8 : tensor<64x128x!tt.ptr<i8>> loc(#loc9)
      %k_t = tt.trans %k_ptrs_8 {order = array<i32: 1, 0>} : tensor<64x128x!tt.ptr<i8>> -> tensor<128x64x!tt.ptr<i8>> loc(#loc)
      tt.store %k_t, %k : tensor<128x64x!tt.ptr<i8>> loc(#loc8)
      %next = arith.addi %here, %keys : tensor<64xi32> loc(#loc)
      scf.yield %next, %sum : tensor<64xi32>, i32 loc(#loc)
    } loc(#loc)
    tt.return loc(#loc)
  } loc(#loc)
} loc(#loc)
"""  # noqa: E501
ARGS = {
    "x_ptr": _meta(8, 4096),
    "rstd_ptr": _meta(8, dtype=torch.float32),
    "kv_ptrs": (None, (_meta(9, 128), _meta(9, 128, dtype=torch.int8))),
    "tables_ptr": _meta(4, 64, dtype=torch.int32),
    "stride": 4096,
}


def _run(argument: str, bits: int, elements: int) -> Run:
    return Run(argument, bits, elements, bits, argument)


def test_runs_by_place_argument_and_share_of_a_thread():
    assert runs(TTIR, ARGS, 256) == {
        "triton.py:29 load": _run("x_ptr", 128, 16),
        "triton.py:146 store": _run("rstd_ptr", 32, 1),
        "triton.py:128 load": _run("tables_ptr", 32, 1),  # 256 threads share 64 pages
        "triton.py:53 load": _run("kv_ptrs.1", 128, 32),  # keys are anywhere, dimensions of one lie together
        "triton.py:83 store": _run("kv_ptrs.1", 128, 32),
    }


@pytest.mark.parametrize(
    ("threads", "changes", "place", "bits"),
    [
        (1024, {}, "triton.py:29 load", 64),  # four elements by thread
        (32, {}, "triton.py:128 load", 64),
        (256, {"x_ptr": _meta(8, 4100)}, "triton.py:29 load", 64),
        (256, {"x_ptr": _meta(8, 4095)}, "triton.py:29 load", 16),
        (256, {"kv_ptrs": (_meta(9, 128), _meta(9, 126, dtype=torch.int8))}, "triton.py:53 load", 16),
    ],
)
def test_a_run_ends_where_memory_or_a_threads_share_does(threads, changes, place, bits):
    assert runs(TTIR, ARGS | changes, threads)[place].bits == bits


def test_a_place_has_its_shortest_run_and_its_longest():
    """Elements add up."""
    twice = TTIR.replace("%cols_1 = ", "%t = tt.load %tables_ptr : !tt.ptr<i32> loc(#loc7)\n    %cols_1 = ")
    found = runs(twice, ARGS, 256)
    assert found["triton.py:29 load"] == Run("tables_ptr", 32, 17, 128, "x_ptr")
    assert narrow("_kernel", {"triton.py:29 load 32": 1, "triton.py:29 load 128": 2}, found) == []
    assert narrow("_kernel", {"triton.py:29 load 32": 9}, found) == [
        Narrow("_kernel", "x_ptr", "load", 32, 128, 9, "triton.py:29")
    ]


def test_remainders_lie_together_within_a_divisor():
    """Of elements that are counted through rows, as blocks are copied: quotients are equal within one, too."""
    through = TTIR.replace(
        "%cols_1 = ",
        """%by = arith.constant dense<{by}> : tensor<4096xi32> loc(#loc)
    %row_of = arith.divsi %cols, %by : tensor<4096xi32> loc(#loc)
    %in_row = arith.remsi %cols, %by : tensor<4096xi32> loc(#loc)
    %both = arith.addi %row_of, %in_row : tensor<4096xi32> loc(#loc)
    %cols_1 = """,
    ).replace("tt.expand_dims %cols {", "tt.expand_dims %both {")
    for by, bits in ((64, 128), (4, 64), (72, 128), (100, 64), (99, 16)):
        assert runs(through.replace("{by}", str(by)), ARGS, 256)["triton.py:29 load"].bits == bits


def test_what_a_build_states_goes_before_its_tensors():
    assert runs(TTIR, ARGS, 256, {"x_ptr": 32})["triton.py:29 load"].bits == 32


def test_a_kernel_says_how_much_a_thread_takes():
    """By tl.max_contiguous, which Triton prints so; less than 32 bits need an excuse."""
    hint = ", tt.contiguity = dense<4> : tensor<1xi32>} : tensor<"
    for length, place, bits in (("4096", "triton.py:29 load", 64), ("128", "triton.py:53 load", 32)):
        told = TTIR.replace(
            f"{{end = {length} : i32, start = 0 : i32}} : tensor<", f"{{end = {length} : i32, start = 0 : i32{hint}"
        )
        assert told != TTIR
        assert runs(told, ARGS, 256)[place].bits == bits
        assert runs(told.replace("dense<4>", "dense<1>"), ARGS, 256)[place].bits == 32


def test_pointers_that_are_lost_count_as_contiguous():
    lost = TTIR.replace("tt.addptr %ptrs, %cols_1", "tt.unheard_of %ptrs_9, %cols_1")
    assert runs(lost, ARGS, 256)["triton.py:29 load"] == _run("", 128, 16)


@pytest.mark.parametrize(
    ("index", "bits"),
    [
        ("tt.load %tables : tensor<64x!tt.ptr<i32>>", 128),  # gathered
        ("arith.unheard_of %here, %here : tensor<64xi32>", 128),
        ("arith.muli %here, %strides : tensor<64xi32>", 32),  # an argument apart, which is none of 1
        ("arith.muli %here, %here : tensor<64xi32>", 128),
    ],
)
def test_steps_that_are_not_known_count_as_one(index, bits):
    """16 threads read 64 pages."""
    lines = f"%strides = tt.splat %stride : i32 -> tensor<64xi32>\n      %index = {index}\n      %page_ptrs = "
    ttir = TTIR.replace("%page_ptrs = ", lines).replace("%tables, %here :", "%tables, %index :")
    assert runs(ttir, ARGS, 16)["triton.py:128 load"].bits == bits
    assert runs(ttir, ARGS, 64)["triton.py:128 load"].bits == 32


def test_narrow_accesses_are_found_by_their_place():
    owned = {"triton.py:29 load": _run("x_ptr", 128, 16), "triton.py:53 load": _run("k_ptr", 64, 8)}
    places = {
        "triton.py:29 load 128": 2, "triton.py:29 load 16": 8, "triton.py:53 copy 32": 1, "triton.py:53 copy 64": 1,
        "triton.py:99 load 8": 1, " store 8": 1, "triton.py:29 atomic 32": 1,
    }  # fmt: skip
    assert narrow("_kernel", places, owned) == [
        Narrow("_kernel", "x_ptr", "load", 16, 128, 8, "triton.py:29"),
        Narrow("_kernel", "k_ptr", "copy", 32, 64, 1, "triton.py:53"),
    ]


def test_outputs_are_those_of_the_place_that_stores_most():
    owned = {"triton.py:34 store": _run("y_ptr", 128, 16), "triton.py:146 store": _run("rstd_ptr", 32, 1)}
    assert outputs(["triton.py:146", "triton.py:34", "triton.py:99"], owned) == 16
    assert outputs([], owned) == 0


def test_regions_that_do_not_close_are_refused():
    with pytest.raises(ValueError, match="do not close"):
        triton_ir.parse(TTIR[:-40])
