"""What real listings hold, loop by loop, and what fits on a chip."""

from __future__ import annotations

import dataclasses
import json

import pytest

from shardfuse.kernels.dev.machine_code import MachineCode, described, read_amdgcn, read_cubin, read_sass
from shardfuse.kernels.runtime.chips import CHIPS

# Of RMSNorm for sm_90, 4,096 of bf16 a row, under Triton 3.7.1: its accesses, and what waits for them.
NORM = """
 Function _norm_fwd_kernel:
  REG:32 STACK:0 SHARED:1024 LOCAL:0 CONSTANT[0]:616 TEXTURE:0 SURFACE:0 SAMPLER:0
_norm_fwd_kernel:
.text._norm_fwd_kernel:
	//## File "kernels/norm/triton.py", line 29
        /*0150*/              @!P1 LDG.E.128 R4, desc[UR6][R12.64] ;
        /*0180*/              @!P1 LDG.E.128 R8, desc[UR6][R12.64+0x1000] ;
        /*01d0*/                   PRMT R2, R4.reuse, 0x7632, R2 ;
        /*0260*/                   PRMT R22, R11, 0x7632, R22 ;
        /*0320*/                   FFMA R6, R6, R6, R2 ;
	//## File "standard.py", line 293
        /*0640*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;
	//## File "kernels/norm/triton.py", line 145
        /*0740*/                   MUFU.RSQ R11, R8 ;
	//## File "kernels/norm/triton.py", line 146
        /*0960*/               @P0 STG.E desc[UR6][R26.64], R25 ;
	//## File "kernels/norm/triton.py", line 43
        /*0980*/                   LDG.E.128 R8, desc[UR6][R16.64] ;
        /*0b20*/                   IMAD.U32 R3, R9, 0x10000, RZ ;
	//## File "kernels/norm/triton.py", line 34
        /*0eb0*/              @!P1 STG.E.128 desc[UR6][R28.64], R4 ;
        /*0f00*/               @P1 EXIT ;
        /*0f10*/                   STG.E.128 desc[UR6][R28.64+0x1000], R8 ;
        /*0f20*/                   EXIT ;
.L_x_6:
        /*1560*/                   BRA `(.L_x_6);
        /*1570*/                   NOP;
"""

# Of attention's loop over keys for sm_90, tiles of 128x64 in 5 stages: its products, copies, waits and barriers.
ATTENTION = """
 Function _paged_attention_fwd_kernel:
  REG:188 STACK:0 SHARED:0 LOCAL:0 CONSTANT[0]:744 TEXTURE:0 SURFACE:0 SAMPLER:0
.text._paged_attention_fwd_kernel:
	//## File "kernels/paged_attention/triton.py", line 311
        /*1250*/                   LDG.E.128 R4, desc[UR18][R2.64] ;
        /*2390*/              @!P1 BRA `(.L_x_0) ;
.L_x_1:
	//## File "kernels/paged_attention/triton.py", line 59
        /*2680*/                   DEPBAR.LE SB0, 0x4 ;
        /*2690*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;
	//## File "kernels/paged_attention/triton.py", line 46
        /*2760*/              @!PT LDS RZ, [RZ] ;
        /*28e0*/                   HGMMA.64x64x16.F32.BF16 R88, gdesc[UR8], RZ, !UPT ;
        /*29d0*/                   HGMMA.64x64x16.F32.BF16 R88, gdesc[UR4], R88, gsb0 ;
        /*2aa0*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
	//## File "kernels/paged_attention/triton.py", line 154
        /*3020*/                   FFMA R105, R112, UR45, -R175.reuse ;
        /*3490*/                   MUFU.EX2 R105, R105 ;
	//## File "kernels/paged_attention/triton.py", line 138
        /*3a70*/                   LDS R4, [R93+0x18000] ;
	//## File "kernels/paged_attention/triton.py", line 139
        /*3aa0*/                   HGMMA.64x128x16.F32.BF16 R24, R120, gdesc[UR4].tnspB, R24 ;
        /*3d30*/                   HGMMA.64x128x16.F32.BF16 R24, R132, gdesc[UR8].tnspB, R24, gsb0 ;
	//## File "kernels/paged_attention/triton.py", line 59
        /*3d40*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;
        /*3d80*/                   LDGSTS.E.BYPASS.128 [R181], desc[UR18][R4.64], !P1 ;
        /*3e00*/                   LDGSTS.E.BYPASS.128 [R181+0x800], desc[UR18][R4.64], !P1 ;
        /*4080*/                   LDGDEPBAR ;
	//## File "kernels/paged_attention/triton.py", line 138
        /*4430*/              @!P0 LDGSTS.E [R5+0x18000], desc[UR18][R94.64], !P1 ;
        /*4470*/                   LDGDEPBAR ;
	//## File "kernels/paged_attention/triton.py", line 128
        /*4520*/              @!P1 BRA `(.L_x_1) ;
.L_x_0:
        /*4540*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*4550*/                   EXIT ;
"""

# Of a flattened loop over tiles and their steps for sm_90: all but a tile's last step jump over its epilogue. Behind
# the end, a spin that the loop goes out to and comes back from.
FLATTENED = """
  REG:90 STACK:0 SHARED:0 LOCAL:0
.L_x_53:
        /*3100*/              @!P3 BRA `(.L_x_51) ;
.L_x_54:
        /*3830*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR24].tnspB, R24 ;
        /*3a40*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR24].tnspB, R24, gsb0 ;
        /*3aa0*/                   WARPGROUP.DEPBAR.LE gsb0, 0x1 ;
        /*3b00*/               @P0 BRA `(.L_x_52) ;
        /*3b10*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*3b20*/                   DEPBAR.LE SB0, 0x0 ;
        /*3b30*/                   STS.128 [R3], R4 ;
        /*3b40*/                   UTMASTG.2D [UR16], [UR14] ;
.L_x_52:
        /*4780*/             @!UP1 UTMALDG.2D [UR16], [UR14] ;
        /*47a0*/               @P0 BRA `(.L_x_53) ;
        /*47b0*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*4890*/              @!P3 EXIT ;
        /*48b0*/                   EXIT ;
.L_x_51:
        /*48c0*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR8], R4 ;
        /*48d0*/              @!P0 BRA `(.L_x_51) ;
        /*48e0*/                   BRA `(.L_x_54) ;
"""

OPCODES = """
  REG:154 STACK:16 SHARED:1024 LOCAL:0
  REG:40 STACK:0 SHARED:0 LOCAL:0
        /*0010*/              @!P0 STL [R1], R3 ;                            /* 0x0000000000027919 */
        /*0020*/                   LDL.LU.64 R4, [R1+0x8] ;                  /* LDL in a comment is no instruction */
        /*0030*/                   LDSM.16.M88.4 R8, [R3] ;
        /*0040*/                   LDSM.16.MT88.2 R8, [R3] ;
        /*0050*/                   STG.E.U16 desc[UR6][R26.64], R25 ;
        /*0060*/                   LDG.E.U8.CONSTANT R9, desc[UR6][R26.64] ;
        /*0070*/                   LD.E.64.STRONG.SYS R4, [R6.64] ;
        /*0080*/                   REDG.E.ADD.STRONG.GPU desc[UR4][R2.64], R5 ;
        /*0090*/                   FFMA2 R8, R4.F32x2.HI_LO, R4.F32x2.HI_LO, R8.F32x2.HI_LO ;
        /*00a0*/                   FSETP.GEU.AND P0, PT, |R4|, 1.1754943508222875082e-38, PT ;
        /*00b0*/                   HFMA2.MMA R5, -RZ, RZ, 0, 0 ;
        /*00c0*/                   HMMA.16816.F32.BF16 R32, R100.reuse, R4, R32 ;
        /*10080*/                  UTCHMMA gdesc[UR6], gdesc[UR8], tmem[UR23], tmem[UR50], idesc[UR51], !UPT ;
        /*10090*/                  NOP ;
"""

# Of a GEMM's loop over K for gfx942, 128x128x64 in bf16: blocks of code stand in the order in which they jump.
GCN = """
	.file	1 "kernels/linear" "triton.py"
	.file	3 "kernels/linear" "tiles.py"
gemm:
	s_load_dwordx2 s[4:5], s[0:1], 0x0
	s_branch .LBB0_23
.LBB0_22:                               ;   in Loop: Header=BB0_23 Depth=2
	.loc	1 111 41 is_stmt 1              ; triton.py:111:41 @[ triton.py:395:109 ]
	ds_read2_b64 v[120:123], v119 offset1:2
	s_waitcnt lgkmcnt(0)
	s_barrier
	ds_write2st64_b64 v105, v[36:37], v[32:33] offset1:16
	v_mfma_f32_32x32x8_bf16 v[16:31], v[120:121], v[76:77], v[16:31]
	v_mfma_f32_32x32x8_bf16 v[0:15], v[120:121], v[78:79], v[0:15]
	s_cbranch_scc0 .LBB0_32
.LBB0_23:                               ; %.lr.ph
	.loc	3 51 23                         ; tiles.py:51:23 @[ triton.py:58:67 @[ triton.py:94:78 ] ]
	s_and_saveexec_b64 s[26:27], s[50:51]
	s_cbranch_execz .LBB0_25
	global_load_dwordx4 v[36:39], v[34:35], off
.LBB0_25:                               ;   in Loop: Header=BB0_23 Depth=2
	global_load_dwordx4 v[32:35], v[32:33], off
	s_branch .LBB0_22
.LBB0_32:
	.loc	1 63 9
	v_pk_mul_f32 v[4:5], v[4:5], v[6:7]
	v_exp_f32_e32 v4, v4
	ds_bpermute_b32 v4, v5, v4
	buffer_load_ushort v6, v1, s[20:23], 0 offen
	v_add_f32_e32 v4, v4, v6
	global_store_short v[2:3], v4, off
	buffer_store_dwordx2 v[4:5], v1, s[20:23], 0 offen
	scratch_store_dwordx4 off, v[32:35], off offset:192 ; 16-byte Folded Spill
	scratch_load_dword v0, off, off offset:4 ; 4-byte Folded Reload
	s_nop 1
; scratch_load_dword in a comment
	s_endpgm
  - .agpr_count:     256
    .vgpr_count:     512
    .vgpr_spill_count: 345
"""


def test_accesses_to_device_memory_have_their_width_and_place():
    code = read_sass(NORM)
    assert (code.registers, code.spills, code.instructions) == (32, 0, 15)
    assert code.places == {
        "triton.py:29 load 128": 2, "triton.py:146 store 32": 1, "triton.py:43 load 128": 1,
        "triton.py:34 store 128": 2,
    }  # fmt: skip
    assert code.accesses == {"load 128": 3, "store 32": 1, "store 128": 2}
    outside, *loops = code.regions
    assert not any(loop.busy for loop in loops)  # what stands behind the end goes nowhere
    assert (outside.depth, outside.mufu, outside.fp32, outside.barriers) == (0, 1, 1, 1)
    assert outside.in_flight == 32  # two loads of 16 bytes, before the first of them is needed
    assert outside.stores == ["triton.py:146", "triton.py:34"]
    assert described(outside, outputs=16) == (
        "outside: global load 3x128, store 2x128, store 1x32; 32 B in flight; MUFU 0.062 an output; "
        "FP32 0.062 an output; 1 barrier"
    )


def test_a_load_is_in_flight_until_any_of_its_registers_is_named():
    first = "        /*01d0*/                   PRMT R2, R4.reuse, 0x7632, R2 ;\n"
    assert first in NORM
    early = NORM.replace("/*0180*/", "/*0178*/                   FADD R20, R7, R7 ;\n        /*0180*/")
    assert read_sass(early).regions[0].in_flight == 16


def test_what_a_loop_leaves_under_way():
    code = read_sass(ATTENTION)
    outside, loop = code.regions
    assert (outside.depth, loop.depth) == (0, 1)
    assert loop.accesses == {"global copy 128": 2, "global copy 32": 1, "shared load 32": 1}
    assert loop.units == {"wgmma": 4}
    assert (code.wgmma, loop.barriers, loop.mufu) == (4, 2, 1)
    # The first wait leaves four groups of copies, of 36 bytes in two groups a step; the second product is waited for in
    # the next step.
    assert (code.copies_pending, loop.in_flight) == (4, 4 * 36 // 2)
    assert code.wgmma_pending == 1
    assert described(loop) == (
        "loop 1: global copy 2x128, copy 1x32; shared load 1x32; 4 wgmma; 1 pending; 72 B in flight; MUFU 1; FP32 1; "
        "2 barriers"
    )


@pytest.mark.parametrize(
    ("written", "instead", "copies", "products"),
    [
        ("DEPBAR.LE SB0, 0x4", "DEPBAR.LE SB0, 0x0", 0, 1),
        ("DEPBAR.LE SB0, 0x4", "NOP", 0, 1),  # copies that nothing waits for
        ("R132, gdesc[UR8].tnspB, R24, gsb0 ;", "R132, gdesc[UR8].tnspB, R24, gsb0 ;\n /*3d38*/ {wait} ;", 4, 0),
        ("R88, gdesc[UR4], R88, gsb0", "R88, gdesc[UR4], R88", 4, 1),
        ("@!P1 BRA `(.L_x_1)", "NOP", None, None),  # no loop
    ],
)
def test_a_wait_for_everything_is_seen(written, instead, copies, products):
    assert ATTENTION.count(written) == 1
    code = read_sass(ATTENTION.replace(written, instead.format(wait="WARPGROUP.DEPBAR.LE gsb0, 0x0")))
    assert (code.copies_pending, code.wgmma_pending) == (copies, products)


def test_a_loop_that_ends_by_a_guarded_exit_is_one():
    """ptxas closes loops so whose end is the kernel's."""
    closed = ATTENTION.replace("@!P1 BRA `(.L_x_1) ;", "@P1 EXIT ;\n        /*4528*/                   BRA `(.L_x_1) ;")
    code = read_sass(closed)
    assert (len(code.regions), code.wgmma_pending, code.copies_pending) == (2, 1, 4)


def test_an_epilogue_that_is_jumped_over_may_wait():
    code = read_sass(FLATTENED)
    outside, loop, spin = code.regions
    assert (loop.depth, loop.pending, loop.units) == (1, 1, {"wgmma": 2, "TMA store": 1, "TMA load": 1})
    assert (code.wgmma_pending, code.tma, outside.units, spin.busy) == (1, 1, {}, False)
    assert read_sass(FLATTENED.replace("gsb0, 0x1", "gsb0, 0x0")).wgmma_pending == 0
    always = FLATTENED.replace("               @P0 BRA `(.L_x_52) ;", "                   NOP ;")
    assert read_sass(always).wgmma_pending == 0


def test_opcodes_of_sass():
    code = read_sass(OPCODES)
    assert (code.registers, code.spills, code.instructions) == (154, 2, 13)
    [region] = code.regions
    assert region.accesses == {
        "global atomic 32": 1, "global load 64": 1, "global load 8": 1, "global store 16": 1, "local load 64": 1,
        "local store 32": 1, "shared load 128": 1, "shared load 64": 1,
    }  # fmt: skip
    assert region.units == {"mma": 1, "tcgen05": 1}
    assert region.fp32 == 3


def test_loops_and_opcodes_of_gcn():
    code = read_amdgcn(GCN)
    assert (code.registers, code.spills, code.wgmma, code.tma, code.instructions) == (512, 2, 0, 0, 24)
    outside, loop = code.regions
    assert loop.accesses == {"global load 128": 2, "shared load 128": 1, "shared store 128": 1}
    assert (loop.units, loop.barriers, loop.in_flight) == ({"mfma": 2}, 1, 32)
    assert outside.accesses == {
        "global load 16": 1, "global store 16": 1, "global store 64": 1, "local load 32": 1, "local store 128": 1,
    }  # fmt: skip
    assert (outside.mufu, outside.fp32) == (1, 3)
    assert code.places == {
        "tiles.py:51 load 128": 2, "triton.py:63 load 16": 1, "triton.py:63 store 16": 1, "triton.py:63 store 64": 1,
    }  # fmt: skip


@pytest.mark.parametrize("text", ["", "nothing of the kind", "  REG:154 STACK:16", OPCODES.replace("REG:", "R:")])
def test_a_listing_in_another_format_is_an_error_not_zero_spills(text):
    with pytest.raises(RuntimeError, match="found in"):
        read_sass(text)


def test_a_failing_disassembler_is_an_error():
    with pytest.raises(RuntimeError, match="could not read a cubin of 5 bytes"):
        read_cubin(b"bytes", "false", "true")
    with pytest.raises(RuntimeError, match="could not read a cubin of 5 bytes"):
        read_cubin(b"bytes", "true", "false")


def test_what_was_read_survives_the_cache():
    code = read_sass(ATTENTION)
    assert MachineCode.of(json.loads(json.dumps(dataclasses.asdict(code)))) == code


@pytest.mark.parametrize(
    ("target", "registers", "shared_bytes", "num_warps", "blocks"),
    [
        ("sm_90", 32, 0, 4, 16),  # every warp slot taken
        ("sm_90", 32, 0, 1, 32),  # the most blocks that an SM tracks
        ("sm_90", 128, 0, 8, 2),
        ("sm_90", 129, 0, 8, 1),  # 136 after rounding up: 15 warps
        ("sm_90", 255, 0, 8, 1),
        ("sm_90", 255, 0, 16, 0),  # 512 threads of 256 registers: twice the register file
        ("sm_90", 64, 113 * 1024, 4, 2),
        ("sm_90", 64, 113 * 1024 + 1, 4, 1),  # each block pays 1 KiB more than it asked for
        ("sm_90", 64, 227 * 1024, 4, 1),
        ("sm_90", 64, 227 * 1024 + 1, 4, 0),
        ("sm_80", 64, 100 * 1024, 4, 1),
        ("gfx942", 146, 16 * 1024, 4, 3),  # 3 wavefronts per SIMD, as LLVM says
        ("gfx942", 512, 0, 4, 1),
        ("gfx942", 64, 64 * 1024, 4, 1),
        ("gfx942", 64, 64 * 1024 + 1, 4, 0),
    ],
)
def test_blocks_per_sm(target, registers, shared_bytes, num_warps, blocks):
    chip = CHIPS[target]
    assert chip.blocks_per_sm(registers, shared_bytes, num_warps) == blocks
    assert chip.occupancy(registers, shared_bytes, num_warps) == blocks * num_warps / chip.max_warps_per_sm
