"""Seed faults into the kernels' Triton source, one at a time, and see which op's cases notice: emulated, interpreted.

python tests/support/source_faults.py            # a table of all faults
python tests/support/source_faults.py --only 3 12

Each fault is applied to a copy of the kernels in a temporary folder. The op's test cases then run there until one is
wrong: by ``python -m shardfuse.kernels.dev.ptx`` for sm_90, and by Triton's interpreter as in ``tests/kernels``.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from shardfuse.kernels.dev import registry
from shardfuse.kernels.dev.ptx import models

ROOT = Path(__file__).parents[2]
_LIMIT = 600  # seconds for all cases of an op


class Fault(NamedTuple):
    op: str
    file: str  # below kernels/
    old: str  # which occurs there once
    new: str
    breaks: str
    missed_by: tuple[str, ...] = ()  # "emulator", "interpreter": the op's cases do not show it there


class Outcome(NamedTuple):
    caught: str  # case and what was wrong; "" if all cases passed
    cases: int
    seconds: float


_POINTERS = "ptrs = ptr + offs_row.to(tl.int64)[:, None] * stride_row + offs_col.to(tl.int64)[None, :] * stride_col"
_DOT = "acc = tl.dot(a_tile, b_tile, acc, input_precision=PRECISION, max_num_imprecise_acc=MAX_IMPRECISE_ACC)"
_UP = "up_tile = load_operand(b_up, k, n, K, N, b_up_strides"

FAULTS = (
    # GEMM
    Fault("linear_act", "linear/triton.py", _DOT, _DOT + ".to(tl.float16).to(tl.float32)", "the accumulator is fp16"),
    Fault(
        "linear_act",
        "linear/triton.py",
        "part = tl.cdiv(tl.cdiv(K, BLOCK_K), splits) * BLOCK_K",
        "part = K // BLOCK_K // splits * BLOCK_K",
        "split K: the last part of K is dropped",
    ),
    Fault(
        "linear_act",
        "linear/tiles.py",
        "for split in range(splits):\n        acc +=",
        "for split in range(1, splits):\n        acc +=",
        "split K: the first part is not added",
    ),
    Fault(
        "linear_act",
        "linear/triton.py",
        "z += tl.load(bias_ptr + offs_n, mask=offs_n < N, other=0.0)",
        "z += tl.load(bias_ptr + offs_n)",
        "the bias is loaded without a mask",
        ("interpreter",),
    ),
    Fault(
        "linear_act",
        "linear/tiles.py",
        "mask = (offs_m < M) & wanted",
        "mask = offs_m < M",
        "every column of tiles writes the row sums",
    ),
    Fault("linear_act", "linear/tiles.py", "(offs_row < rows)", "(offs_row <= rows)", "a tile has a row too many"),
    Fault(
        "linear_act",
        "linear/tiles.py",
        _POINTERS,
        _POINTERS.replace("stride_row", "stride")
        .replace("stride_col", "stride_row")
        .replace("stride +", "stride_col +"),
        "strides of rows and columns are swapped",
    ),
    Fault(
        "linear_act",
        "linear/tiles.py",
        "cols, (strides[1], strides[0])",
        "cols, strides",
        "pointers of a turned operand step along its rows",
    ),
    Fault(
        "linear_act",
        "linear/triton.py",
        "    if wanted:\n        total",
        "    if not wanted:\n        total",
        "the column of tiles that has the row sums leaves them out",
    ),
    Fault(
        "dgrad_act",
        "linear/activations.py",
        '"mov.b32 $0, $1;"',
        '"mov.b32 $0, $2;"',
        "the activation is that of the product",
        ("interpreter",),
    ),
    Fault(
        "linear_act",
        "linear/tiles.py",
        "rows = min(tiles_m - first_m, GROUP_M)",
        "rows = GROUP_M",
        "the last group of tiles is taken for a whole one",
    ),
    Fault("gated_linear", "linear/triton.py", _UP, _UP.replace("b_up, k", "b, k"), "both products multiply the gate"),
    Fault(
        "dgrad_act",
        "linear/activations.py",
        "slope = z * gate * rest",
        "slope = gate * rest",
        "the activation's derivative lacks a factor",
    ),
    Fault(
        "wgrad_accumulate",
        "linear/triton.py",
        "tl.store(ptrs, (tl.load(ptrs, mask=mask, other=0.0).to(tl.float32) + acc).to(DTYPE), mask=mask)",
        "tl.store(ptrs, acc.to(DTYPE), mask=mask)",
        "the gradient replaces what it should add to",
    ),
    # Paged attention
    Fault(
        "paged_attention",
        "paged_attention/triton.py",
        "l = l * correction + tl.sum(p, 1)",
        "l = l + tl.sum(p, 1)",
        "softmax: the sum is not rescaled",
    ),
    Fault(
        "paged_attention",
        "paged_attention/triton.py",
        "acc = acc * correction[:, None]\n",
        "acc = acc * 1.0\n",
        "softmax: the accumulator is not rescaled",
    ),
    Fault(
        "paged_attention",
        "paged_attention/scores_triton.py",
        "before = keys <= position[:, None]",
        "before = keys < position[:, None]",
        "a row does not see its own key",
    ),
    Fault(
        "paged_attention",
        "paged_attention/triton.py",
        "free_end = first_position + 1\n",
        "free_end = first_position + 2\n",
        "the stretch without a mask ends a key late",
        ("emulator", "interpreter"),
    ),
    Fault(
        "paged_attention",
        "paged_attention/triton.py",
        "tl.load(table_ptr + offs_n // PAGE_SIZE, mask=mask_n, other=0)",
        "tl.load(table_ptr + (offs_n + 1) // PAGE_SIZE, mask=mask_n, other=0)",
        "a page's last slot is looked for in the next page",
    ),
    Fault(
        "paged_attention",
        "paged_attention/triton.py",
        "mask_n = offs_n < kv_end",
        "mask_n = offs_n <= kv_end",
        "a key and a value behind the last are loaded",
    ),
    Fault(
        "paged_attention",
        "paged_attention/triton.py",
        "mask = (first + offs_p < parts)",
        "mask = (first + offs_p <= parts)",
        "the merge takes a part too many",
    ),
    Fault(
        "paged_attention",
        "paged_attention/triton.py",
        "mask_m = row < q_len * GROUP\n",
        "mask_m = row < q_len * GROUP - 1\n",
        "a sequence's last row is not written",
    ),
    Fault(
        "paged_attention",
        "paged_attention/plan_triton.py",
        "parts = tl.maximum(tl.cdiv(tl.cdiv(high, unit) - begin, tl.maximum(chunk, 1)), 1)",
        "parts = tl.maximum((tl.cdiv(high, unit) - begin) // tl.maximum(chunk, 1), 1)",
        "a sequence's last, shorter part is dropped",
    ),
    # Norms
    Fault(
        "rms_norm",
        "norm/triton.py",
        "tl.sqrt_rn(squares / D + eps)",
        "tl.sqrt_rn(squares / BLOCK_D + eps)",
        "the mean divides by the block's width",
    ),
    Fault(
        "layer_norm",
        "norm/triton.py",
        "            tl.debug_barrier()  # s was written by other threads of this program\n",
        "            pass\n",
        "a missing barrier between a program's writes and reads of global memory",
        ("emulator", "interpreter"),
    ),
    Fault(
        "rms_norm",
        "norm/triton.py",
        "s = _load(s_ptr, rows, cols, mask, stride_st, ALIGN, EVICT)",
        "s = _load(s_ptr, rows, cols, mask, stride_dyt, ALIGN, EVICT)",
        "a row stride of another tensor",
        ("emulator", "interpreter"),
    ),
    Fault(
        "rms_norm",
        "norm/triton.py",
        "mask = (part < parts)[:, None] & (cols < D)[None, :]",
        "mask = (part <= parts)[:, None] & (cols < D)[None, :]",
        "a row behind the partial sums is added",
    ),
    Fault(
        "layer_norm",
        "norm/triton.py",
        "away = tl.where(mask, s - tile_mean[:, None], 0.0)",
        "away = s - tile_mean[:, None]",
        "columns behind the last count in the variance",
    ),
    Fault(
        "wgrad_accumulate",
        "linear/triton.py",
        "            if RELOAD:",
        "            if not RELOAD:",
        "row sums read the buffer of a product under way",
        ("interpreter",),
    ),
    Fault(
        "paged_attention",
        "paged_attention/launch.py",
        "or _copied(k_cache) or not _copied(v_cache)",
        "or True",
        "asynchronous products read values that no fence follows",
        ("interpreter",),
    ),
    Fault(
        "norm_rope_write_kv",
        "runtime/sums_triton.py",
        "return tl.fma(a, b, 0.0)",
        "return a * b",
        "lanes that share a sum round it differently",
        ("interpreter", "emulator"),  # where no case has lanes that share one
    ),
    # Cross entropy
    Fault(
        "linear_cross_entropy",
        "cross_entropy/triton.py",
        "exps = exps * _exp(peaks - shift) + _exp(z - shift)",
        "exps = exps + _exp(z - shift)",
        "softmax: the sum is not rescaled from block to block",
    ),
    Fault(
        "linear_cross_entropy",
        "cross_entropy/triton.py",
        "            tl.debug_barrier()  # every thread has the target's score before the row is written\n",
        "            pass\n",
        "a missing barrier between a program's reads and writes of global memory",
        ("emulator", "interpreter"),
    ),
    Fault(
        "linear_cross_entropy",
        "cross_entropy/triton.py",
        "tl.store(row + offs, dz.to(row.dtype.element_ty), mask=offs < width)",
        "tl.store(row + offs, dz.to(row.dtype.element_ty), mask=offs < columns)",
        "the gradient of padding columns is not written",
    ),
    # Rotary embedding and the cache
    Fault(
        "rope",
        "rope/triton.py",
        "mask_r = ((token < T) & (head < heads))[:, None]",
        "mask_r = (token < T)[:, None]",
        "heads behind the last are rotated",
    ),
    Fault("rope", "rope/triton.py", "        sin = -sin\n", "        sin = sin\n", "backward rotates forwards"),
    Fault(
        "write_kv",
        "kv_cache/triton.py",
        "where = page * scale_strides[0] + head * scale_strides[1] + offset * scale_strides[2]",
        "where = page * scale_strides[0] + head * scale_strides[2] + offset * scale_strides[1]",
        "strides of heads and slots are swapped",
    ),
    Fault(
        "write_kv",
        "kv_cache/triton.py",
        "mask_r = slot >= 0  # others are padding",
        "mask_r = slot >= -1",
        "padding is written before the cache's beginning",
    ),
    Fault(
        "copy_blocks",
        "kv_cache/triton.py",
        "mask = element < COUNT",
        "mask = element < COUNT - 1",
        "a block's last element is not copied",
    ),
    # fp8 and dropout
    Fault(
        "scaled_linear",
        "linear/triton.py",
        "of_col = tl.load(scale_ptrs[1] + offs_n, mask=offs_n < N, other=0.0)",
        "of_col = tl.load(scale_ptrs[0] + offs_n, mask=offs_n < N, other=0.0)",
        "columns take the rows' scales",
    ),
    Fault(
        "scaled_linear",
        "scaled_linear/triton.py",
        "tl.store(scale_ptr + offs_r, scale, mask=offs_r < R)",
        "tl.store(scale_ptr + offs_r, scale)",
        "scales are written behind the last row",
    ),
    Fault(
        "dropout",
        "dropout/triton.py",
        "y = tl.where(keep, x * scale, 0.0)",
        "y = tl.where(keep, x, 0.0)",
        "what is kept is not scaled",
    ),
    Fault(
        "dropout",
        "dropout/triton.py",
        "quads = (first_col // 4 + tl.arange(0, COLS // 4))",
        "quads = tl.arange(0, COLS // 4)",
        "every block of columns draws the same mask",
    ),
)


class Copy:
    """The package in a temporary folder: its kernels copied, the rest linked."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        ignored = shutil.ignore_patterns("__pycache__")
        for name in ("src", "kernels"):
            shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=ignored)
        for link in (ROOT / "src" / "shardfuse").iterdir():
            if link.is_symlink() and link.name != "kernels":
                (folder / link.name).symlink_to(ROOT / link.name)

    def with_fault(self, fault: Fault) -> None:
        """Raises ValueError where ``fault.old`` does not occur once."""
        text = (ROOT / "kernels" / fault.file).read_text()
        if (count := text.count(fault.old)) != 1:
            raise ValueError(f"{fault.file} has {fault.old!r} {count} times: expected once; bring FAULTS up to date")
        (self.folder / "kernels" / fault.file).write_text(text.replace(fault.old, fault.new))

    def without_fault(self, fault: Fault) -> None:
        shutil.copy(ROOT / "kernels" / fault.file, self.folder / "kernels" / fault.file)

    def emulated(self, op: str) -> Outcome:
        """By its test cases; where they pass, by its cases of models."""
        command = ["-m", "shardfuse.kernels.dev.ptx", "--json", "--arch", "sm_90", "--op", op]
        changes = {"TRITON_INTERPRET": None, "SHARDFUSE_POISON": "1"}
        small = self._first_wrong(command, changes)
        if small.caught or not models.cases(registry.op(op)):
            return small
        large = self._first_wrong([*command, "--models", "some"], changes)
        return Outcome(large.caught, small.cases + large.cases, small.seconds + large.seconds)

    def interpreted(self, op: str) -> Outcome:
        return self._first_wrong([__file__, "--interpret", op], {"TRITON_INTERPRET": "1", "SHARDFUSE_POISON": "1"})

    def _first_wrong(self, command: Sequence[str], changes: dict[str, str | None]) -> Outcome:
        """Of a process that prints a line of JSON for each case, until one is wrong."""
        paths = {"PYTHONPATH": os.pathsep.join([str(self.folder / "src"), str(Path(__file__).parent)])}
        environment = {name: value for name, value in {**os.environ, **changes, **paths}.items() if value is not None}
        begun, cases = time.perf_counter(), 0
        with subprocess.Popen(
            [sys.executable, *command], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as process:
            previous = signal.signal(signal.SIGALRM, lambda *_: process.kill())
            signal.alarm(_LIMIT)
            try:
                caught = ""
                assert process.stdout is not None
                assert process.stderr is not None
                for line in process.stdout:
                    answer, cases = json.loads(line), cases + 1
                    if not answer["ok"]:
                        caught = f"{answer['case']}: {answer['why']}"
                        break
                else:
                    last = process.stderr.read().strip().split("\n")[-1]
                    if process.wait() != 0:
                        caught = f"after {cases} cases: {last or f'ended with {process.returncode}'}"
            finally:
                signal.alarm(0)
                signal.signal(signal.SIGALRM, previous)
                process.kill()
        return Outcome(caught, cases, time.perf_counter() - begun)


def interpret(op: str) -> Iterator[dict[str, object]]:
    """What Triton's interpreter makes of an op's test cases, as ``assert_matches`` judges it in tests."""
    import interpreter

    interpreter.install()
    interpreter.allow()
    import torch
    from oracle import assert_matches

    torch.set_num_threads(1)
    spec = registry.op(op)
    for case in spec.tagged("test"):
        try:
            assert_matches(spec, case, spec.make_inputs(case, torch.device("cpu"), 1))
            why = ""
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
        yield {"case": case.name, "ok": not why, "why": why}


def outcomes(faults: Sequence[Fault]) -> Iterator[tuple[Fault, Outcome, Outcome]]:
    """(fault, emulated, interpreted) of each."""
    with tempfile.TemporaryDirectory(prefix="shardfuse-faults-") as folder:
        copy = Copy(Path(folder))
        for fault in faults:
            copy.with_fault(fault)
            yield fault, copy.emulated(fault.op), copy.interpreted(fault.op)
            copy.without_fault(fault)


def _cell(outcome: Outcome) -> str:
    """For a table: the first thing that is wrong, and the seconds."""
    parts = " ".join(outcome.caught.split()).replace("AssertionError: ", "").split("; ")
    wrong = next((part for part in parts if "> budget" in part), parts[0])
    case = outcome.caught.partition(":")[0]
    what = wrong if wrong.startswith(case) else f"{case}: {wrong}"
    return f"{what[:130] if outcome.caught else f'MISSED by {outcome.cases} cases'} | {outcome.seconds:.0f}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", type=int, nargs="+", metavar="N", help="faults by their number, from 1")
    parser.add_argument("--list", action="store_true", help="the faults, without running them")
    parser.add_argument("--interpret", metavar="OP", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.interpret:
        for answer in interpret(options.interpret):
            print(json.dumps(answer), flush=True)
        return 0
    numbers = options.only or range(1, len(FAULTS) + 1)
    if not all(1 <= n <= len(FAULTS) for n in numbers):
        parser.error(f"--only: expected numbers from 1 to {len(FAULTS)}")
    if options.list:
        for n in numbers:
            print(f"{n}. {FAULTS[n - 1].op}, {FAULTS[n - 1].file}: {FAULTS[n - 1].breaks}")
        return 0
    print("| | op | fault | emulated for sm_90 | s | interpreted | s |\n|---|---|---|---|---|---|---|", flush=True)
    for n, (fault, emulated, interpreted) in zip(numbers, outcomes([FAULTS[n - 1] for n in numbers])):
        print(f"| {n} | {fault.op} | {fault.breaks} | {_cell(emulated)} | {_cell(interpreted)} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
