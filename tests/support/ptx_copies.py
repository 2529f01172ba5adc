"""PTX of Hopper's tensor copies, as Triton emits it: mbarriers, and descriptors that the kernel makes."""

from __future__ import annotations

import random

import numpy as np

ELEMENTS = {0x0: "u1", 0x6: "u2", 0x7: "u4", 0xA: "u2"}  # .u8, .f16, .f32 and .bf16 in a tensor map
ROWS, COLUMNS, TALL, REGION = 21, 150, 12, 2048


def arriving(guard: str, count: int = 0, space: str = "shared::cta", barrier: str = "%r1") -> str:
    return f"@{guard} mbarrier.arrive.expect_tx.{space}.b64 _, [{barrier}], {count};"


def waiting(parity: int, space: str = "shared::cta", barrier: str = "%r1") -> str:
    text = f"mov.b32 %r40, {parity}; {{ .reg .pred complete; waitLoop: mbarrier.try_wait.parity.{space}.b64"
    return text + f" complete, [{barrier}], %r40; @!complete bra.uni waitLoop; }}"


def tensor_map(kind: int, width: int, swizzle: int) -> str:
    """Write the map of array 0 to array 1, by way of shared memory; what is numbered 0 is the innermost dimension."""
    part = "@%p2 tensormap.replace.tile."
    text = "setp.lt.u32 %p1, %r0, 32; setp.eq.b32 %p2, %r0, 0; mov.b32 %r3, 0; mad.lo.s32 %r4, %r0, 4, %r1;"
    text += "@%p1 st.shared.b32 [ %r4 + 0 ], %r3; bar.warp.sync -1; cvt.u64.u32 %rd9, %r1;"
    text += f"{part}global_address.shared::cta.b1024.b64 [ %rd9 + 0 ], %rd0;"
    for dimension, sizes in enumerate([(width, COLUMNS, 1), (TALL, ROWS, 1)]):
        for name, size in zip(("box_dim", "global_dim", "element_stride"), sizes):
            text += f"mov.b32 %r7, {size}; {part}{name}.shared::cta.b1024.b32 [ %rd9 + 0 ], {dimension:#x}, %r7;"
    text += f"mov.b64 %rd8, {160 * np.dtype(ELEMENTS[kind]).itemsize};"
    text += f"{part}global_stride.shared::cta.b1024.b64 [ %rd9 + 0 ], 0x0, %rd8;"
    modes = {"rank": 1, "elemtype": kind, "interleave_layout": 0, "swizzle_mode": swizzle, "fill_mode": 0}
    text += "".join(f"{part}{name}.shared::cta.b1024.b32 [ %rd9 + 0 ], {value:#x};" for name, value in modes.items())
    text += "@%p1 tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned"
    text += " [ %rd1 + 0 ], [ %rd9 + 0 ], 0x80; @%p1 fence.proxy.tensormap::generic.acquire.gpu [ %rd1 + 0 ], 0x80;"
    text += "@%p1 cp.async.bulk.commit_group; @%p1 cp.async.bulk.wait_group.read 0; bar.sync 0;"
    return text + "cvta.global.u64 %rd5, %rd1; elect.sync %r5|%p3, -1; and.pred %p3, %p3, %p1;"


def tensor_arrays(kind: int) -> list[np.ndarray]:
    """A matrix whose rows are 160 apart, room for its map, an image of shared memory; all at multiples of 128 bytes."""
    made = []
    for size in (ROWS * 160 * np.dtype(ELEMENTS[kind]).itemsize, 128, REGION * 8):
        room = np.frombuffer(random.randbytes(size + 128), "u1").copy()
        made.append(room[-room.ctypes.data % 128 :][:size])
    return made
