"""What kernels do with flags: wait for their own, count, report. See ``signals.py``."""

from __future__ import annotations

import time

import triton
import triton.language as tl

from .signals import CHUNKS, COUNTERS, DONE, EPOCH, GAVE_UP, LIMIT_MS, RANK, SIZE

_CHUNKS = tl.constexpr(CHUNKS)
_DONE = tl.constexpr(DONE)
_EPOCH = tl.constexpr(EPOCH)
_GAVE_UP = tl.constexpr(GAVE_UP)
_LIMIT_MS = tl.constexpr(LIMIT_MS)
_RANK = tl.constexpr(RANK)
_SIZE = tl.constexpr(SIZE)
_COUNTERS = tl.constexpr(COUNTERS)


def clock_of(arch: str) -> str:
    """Which clock a kernel on ``arch`` reads, as ``wait_flags`` takes it."""
    return "hip" if arch.startswith("gfx") else "cuda" if arch.startswith("sm_") else "host"


def _host_clock() -> int:
    time.sleep(2e-5)  # interpreted ranks share their cores with the peers they wait for
    return time.monotonic_ns()


_host_clock.__triton_builtin__ = True  # type: ignore[attr-defined]  # only the interpreter calls it


@triton.jit
def _now(CLOCK: tl.constexpr):
    """Ticks of a clock that runs everywhere on the chip at one rate: see ``_ticks``."""
    if CLOCK == "cuda":
        return tl.extra.cuda.globaltimer()
    elif CLOCK == "hip":
        return tl.extra.hip.memrealtime()
    else:
        return _host_clock()


@triton.jit
def _ticks(ms, CLOCK: tl.constexpr):
    """AMD's clock has 100 MHz, the others count nanoseconds."""
    if CLOCK == "hip":
        return ms.to(tl.int64) * 100_000
    else:
        return ms.to(tl.int64) * 1_000_000


@triton.jit
def exchange_of(state_ptr):
    """(this rank, how many there are)."""
    return tl.load(state_ptr + _RANK), tl.load(state_ptr + _SIZE)


@triton.jit
def flag_index(phase, source, chunk, size):
    """Where in a pad [PHASES, R, CHUNKS] a flag is."""
    return (phase * size + source) * _CHUNKS + chunk


@triton.jit
def wait_flags(pad_ptr, base, first, last, epoch, state_ptr, report_ptr, PIECES: tl.constexpr, CLOCK: tl.constexpr):
    """Spin until flags ``first`` to ``last`` have reached ``epoch``; what their sources wrote before is then visible.

    Each source has PIECES flags in a row, source 0's begin at word ``base`` of the pad: ``flag_index(phase, 0, chunk,
    size)``. A wait longer than the channel's limit says in the report what it was for, and it and all later ones give
    up.
    """
    limit = _ticks(tl.load(state_ptr + _LIMIT_MS), CLOCK)
    started = _now(CLOCK)
    flag = first
    while flag <= last:
        index = base + flag // PIECES * _CHUNKS + flag % PIECES
        seen = tl.atomic_cas(pad_ptr + index, epoch, epoch, sem="acquire", scope="sys")
        if seen - epoch >= 0:
            flag += 1
        else:
            if tl.load(state_ptr + _GAVE_UP, volatile=True) != 0:
                flag = last + 1
            else:
                if _now(CLOCK) - started > limit:
                    _report(index, epoch, seen, state_ptr, report_ptr)
                    flag = last + 1
    tl.debug_barrier()


# The waits of a program's first threads, one flag each; the others hold copies of these flags and pass. A loop that the
# compiler sees, or its barrier, would keep it from pipelining the loop around it: the tiles of a product that waits.
# The first to give up says in here why it did (as ``_report`` does): outside, all threads would compute that each time.
# Operands: 1 pad, 2 index of the flag, 3 epoch, 4 state, 5 report, 6 the number of flags.
_SPIN = tl.constexpr(f"""
{{
    .reg .pred p;
    .reg .b32 seen, word, size;
    .reg .b64 flag, limit, started, now;
    mov.u32 word, %tid.x;
    setp.ge.u32 p, word, $6;
    @p bra DONE_${{:uid}};
    mad.wide.s32 flag, $2, 4, $1;
    ld.global.b32 word, [$4+{4 * LIMIT_MS}];
    mul.wide.s32 limit, word, 1000000;
    mov.u64 started, %globaltimer;
LOOK_${{:uid}}:
    ld.acquire.sys.global.b32 seen, [flag];
    sub.s32 word, seen, $3;
    setp.ge.s32 p, word, 0;
    @p bra DONE_${{:uid}};
    ld.volatile.global.b32 word, [$4+{4 * GAVE_UP}];
    setp.ne.b32 p, word, 0;
    @p bra DONE_${{:uid}};
    mov.u64 now, %globaltimer;
    sub.u64 now, now, started;
    setp.lt.u64 p, now, limit;
    @p bra LOOK_${{:uid}};
    atom.acq_rel.gpu.global.exch.b32 word, [$4+{4 * GAVE_UP}], 1;
    setp.ne.b32 p, word, 0;
    @p bra DONE_${{:uid}};
    st.global.b32 [$5+20], seen;
    st.global.b32 [$5+16], $3;
    rem.u32 word, $2, {CHUNKS};
    st.global.b32 [$5+12], word;
    ld.global.b32 size, [$4+{4 * SIZE}];
    div.u32 seen, $2, {CHUNKS};
    rem.u32 word, seen, size;
    st.global.b32 [$5+8], word;
    div.u32 word, seen, size;
    st.global.b32 [$5+4], word;
    atom.release.sys.global.exch.b32 word, [$5], 1;
DONE_${{:uid}}:
    bar.warp.sync -1;
    mov.b32 $0, 0;
}}
""")


@triton.jit
def spin_on_flags(pad_ptr, index, epoch, state_ptr, report_ptr):
    """``wait_flags`` on NVIDIA, without a loop: a thread spins on each flag, those ``index`` [LANES] of the pad.

    :func:`barrier`, or another one, has to follow: the other threads wait there.
    """
    pad, state, report = (
        pad_ptr.to(tl.int64, bitcast=True),
        state_ptr.to(tl.int64, bitcast=True),
        report_ptr.to(tl.int64, bitcast=True),
    )
    lanes: tl.constexpr = index.shape[0]
    operands = [pad, index, epoch, state, report, lanes]
    tl.inline_asm_elementwise(_SPIN, "=r,l,r,r,l,l,r", operands, dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def barrier(m, CLOCK: tl.constexpr, FENCE: tl.constexpr):
    """Have the program's threads wait for each other; returns ``m``, which what is to come after may be made of.

    With FENCE, data that was written and flags that were read outside the proxy of the TMA are visible inside.
    """
    if CLOCK == "cuda":  # not as tl.debug_barrier: see _SPIN
        if FENCE:
            return tl.inline_asm_elementwise(
                "bar.sync 0; fence.proxy.async.global; mov.b32 $0, $1;", "=r,r", [m], tl.int32, False, 1
            )
        else:
            return tl.inline_asm_elementwise("bar.sync 0; mov.b32 $0, $1;", "=r,r", [m], tl.int32, False, 1)
    else:
        tl.debug_barrier()
        return m


@triton.jit
def _report(index, epoch, seen, state_ptr, report_ptr):
    """The first to give up says why."""
    if tl.atomic_cas(state_ptr + _GAVE_UP, 0, 1) == 0:
        size = tl.load(state_ptr + _SIZE)
        source = index // _CHUNKS
        tl.store(report_ptr + 1, source // size)
        tl.store(report_ptr + 2, source % size)
        tl.store(report_ptr + 3, index % _CHUNKS)
        tl.store(report_ptr + 4, epoch)
        tl.store(report_ptr + 5, seen)
        tl.atomic_xchg(report_ptr, 1, sem="release", scope="sys")


@triton.jit
def arrived_last(counter_ptr, expected):
    """Count this program's arrival; true for the last of ``expected``, which has then heard of all the others' writes.

    It leaves the counter at zero for the next exchange.
    """
    tl.debug_barrier()
    before = tl.atomic_add(counter_ptr, 1, sem="acq_rel", scope="gpu")
    last = before == expected - 1
    if last:
        tl.store(counter_ptr, 0)
    return last
