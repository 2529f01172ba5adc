"""Counting instructions in listings, and what fits on a chip."""

from __future__ import annotations

import pytest

from shardfuse.kernels.dev.machine_code import MachineCode, read_amdgcn, read_cubin, read_sass
from shardfuse.kernels.runtime.chips import CHIPS

SASS = """
Resource usage:
 Function gemm:
  REG:154 STACK:16 SHARED:1024 LOCAL:0 CONSTANT[0]:592 TEXTURE:0 SURFACE:0 SAMPLER:0
 Function helper:
  REG:40 STACK:0 SHARED:0 LOCAL:0 CONSTANT[0]:592 TEXTURE:0 SURFACE:0 SAMPLER:0

	code for sm_90a
		Function : gemm
        /*0000*/                   LDC R1, c[0x0][0x28] ;                    /* 0x00000a00ff017b82 */
                                                                             /* 0x000e620000000800 */
        /*0010*/              @!P0 STL [R1], R3 ;                            /* 0x0000000000027919 */
        /*0020*/                   LDL.LU.64 R4, [R1+0x8] ;                  /* 0x0000000000027919 */
        /*0030*/               @P2 LDL R5, [R1] ;                            /* 0x0000000000027919 */
        /*0040*/             @!UP1 UTMALDG.2D [UR16], [UR14] ;               /* 0x00000000000479c3 */
        /*0050*/                   HGMMA.64x256x16.F32.BF16 R24, gdesc[UR8], R24 ;
        /*0060*/                   HGMMA.64x256x16.F32.BF16 R24, gdesc[UR8], R24, gsb0 ;
        /*0070*/                   LDGSTS.E.BYPASS.128 [R9], [R2.64] ;       /* HGMMA in a comment is no instruction */
        /*10080*/                  UTMASTG.2D [UR16], [UR14] ;               /* 0x0000000000027919 */
        /*10090*/                  NOP ;                                     /* 0x0000000000007918 */
"""

# A loop that holds three: two that ask for copies, of which one multiplies too, and a spin. Behind the end, a spin that
# the last loop with copies goes out to and comes back from.
LOOPS = """
  REG:154 STACK:0 SHARED:1024 LOCAL:0
        Function : gemm
        /*0000*/                   DEPBAR.LE SB0, 0x0 ;                      /* before any loop */
        /*0010*/                   LDGSTS.E.BYPASS.128 [R9], [R2.64] ;
        /*0020*/                   DEPBAR.LE SB0, 0x4 ;
        /*0030*/                   HGMMA.64x256x16.F32.BF16 R24, gdesc[UR8], R24, gsb0 ;
        /*0040*/                   WARPGROUP.DEPBAR.LE gsb0, 0x1 ;
        /*0050*/                   DEPBAR.LE SB0, 0x0 ;
        /*0060*/              @!P0 BRA 0x10 ;
        /*0070*/                   DEPBAR.LE SB0, 0x2 ;
        /*0080*/                   LDGSTS.E.BYPASS.128 [R9], [R2.64] ;
        /*0090*/               @P1 BRA 0x70 ;
        /*00a0*/                   LD.E.STRONG.SYS R4, [R6.64] ;
        /*00b0*/               @P2 BRA 0xa0 ;
        /*00c0*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*00d0*/               @P3 BRA 0x0 ;
        /*00e0*/                   EXIT ;
        /*00f0*/              @!P4 BRA 0xf0 ;
        /*0100*/                   BRA 0x80 ;
        /*0110*/                   BRA 0x110 ;
"""

GCN = """
gemm:
	s_load_dwordx2 s[4:5], s[0:1], 0x0
	v_mfma_f32_32x32x8_bf16 a[0:15], v[0:1], v[2:3], a[0:15]
	scratch_store_dwordx4 off, v[32:35], off offset:192 ; 16-byte Folded Spill
	scratch_load_dword v0, off, off offset:4 ; 4-byte Folded Reload
	s_nop 1
; scratch_load_dword in a comment
  - .agpr_count:     256
    .vgpr_count:     512
    .vgpr_spill_count: 345
"""


def test_sass_is_counted_by_opcode():
    assert read_sass(SASS) == MachineCode(registers=154, spills=3, wgmma=2, tma=1, instructions=9)


def test_how_far_innermost_loops_run_ahead():
    """The first wait of each counts, the worst of them; what stands outside, and loops of other things, do not."""
    code = read_sass(LOOPS)
    assert (code.copies_pending, code.wgmma_pending) == (2, 1)
    waits = read_sass(LOOPS.replace("SB0, 0x2", "SB0, 0x0"))
    assert (waits.copies_pending, waits.wgmma_pending) == (0, 1)
    assert read_sass(LOOPS.replace("DEPBAR.LE SB0, 0x2", "NOP")).copies_pending == 0  # copies that nothing waits for
    assert read_sass(LOOPS.replace("@!P0 BRA 0x10", "NOP")).wgmma_pending == 1  # the outer loop's, then
    unlooped = read_sass(LOOPS.replace("BRA", "NOP"))
    assert (unlooped.copies_pending, unlooped.wgmma_pending) == (None, None)


def test_gcn_is_counted_by_opcode():
    assert read_amdgcn(GCN) == MachineCode(registers=512, spills=2, wgmma=0, tma=0, instructions=4)


@pytest.mark.parametrize("text", ["", "nothing of the kind", "  REG:154 STACK:16", SASS.replace("REG:", "R:")])
def test_a_listing_in_another_format_is_an_error_not_zero_spills(text):
    with pytest.raises(RuntimeError, match="found in"):
        read_sass(text)


def test_a_failing_disassembler_is_an_error():
    with pytest.raises(RuntimeError, match="could not read a cubin of 5 bytes"):
        read_cubin(b"bytes", "false")


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
