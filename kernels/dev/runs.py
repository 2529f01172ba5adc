"""How wide the accesses to device memory of a kernel could be: the contiguous, aligned run that one thread owns.

A tile's pointers are followed through Triton's own IR before it chooses layouts ("TTIR"), to the argument that they
begin from and the dimension in which they lie one element apart. From the tensor that a build is given there comes how
far memory is contiguous and aligned, from the size of the tile how much of it falls to one thread; a kernel that says
``tl.max_contiguous`` has its reasons for less. What the compiler makes of that is not asked here: it is what is judged
by this.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from . import triton_ir
from .triton_ir import Op

WIDEST = 128  # bits of one access
_KINDS = {
    "tt.load": "load",
    **dict.fromkeys(("tt.store", "tt.descriptor_store", "tt.descriptor_reduce"), "store"),
    **dict.fromkeys(("tt.atomic_rmw", "tt.atomic_cas"), "atomic"),
}
_TENSOR = re.compile(r"tensor<((?:\d+x)+)([^<>]*(?:<[^<>]*>)?)[^<>]*>")
_POINTER = re.compile(r"!tt\.ptr<([a-zA-Z]*)(\d+)")
_FLOAT8 = re.compile(r"!tt\.ptr<f8")
_SPLAT = re.compile(r"^arith\.constant dense<(-?\d+)>")
_INTEGER = re.compile(r"^arith\.constant (-?\d+)")
_HINT = re.compile(r"tt\.contiguity = dense<(\d+)>")
_AXIS = re.compile(r"axis = (\d+)")
_ORDER = re.compile(r"order = array<i32: ([\d, ]+)>")
# "%x_ptrs_0: !tt.ptr<bf16> {tt.divisibility = 16 : i32} loc("x_ptrs"(#loc))": a tuple's members have one name
_ARGUMENT = re.compile(r'(%[\w.$-]+): (!tt\.ptr)?[^%]*? loc\("([^"]+)"')
_FAR = 1 << 40  # elements: a step that is not known, but that it is not 1
_SAME = ("arith.extsi", "arith.extui", "arith.trunci", "arith.index_cast", "tt.bitcast", "tt.broadcast")


class Run(NamedTuple):
    """Of the accesses at one place: ``bits`` that a thread could move at once, to or from ``argument``: the fewest of
    those that have this place, and the most.
    """

    argument: str
    bits: int
    elements: int  # by thread, of all the tiles there
    most: int
    of_most: str  # whose they are


class _Value(NamedTuple):
    """A tile of integers or pointers: elements that it goes up by in each dimension, None where that is not known."""

    steps: tuple[int | None, ...]
    argument: str = ""
    constant: int | None = None  # of a number, or of a tile that is one number throughout
    hint: int = WIDEST  # elements that a thread takes in a row at most, as the kernel says (tl.max_contiguous)


def runs(ttir: str, args: Mapping[str, Any], threads: int, stated: Mapping[str, int] | None = None) -> dict[str, Run]:
    """ "triton.py:29 load" -> the run there, the shortest where several accesses have one place.

    ``args`` are a build's, ``stated`` bits by argument in place of those that its tensor says, by "" of what lies at
    addresses that are loaded.
    """
    places = triton_ir.places(ttir)
    stated = stated or {}
    memory = {name: stated.get(name.partition(".")[0], contiguous(each)) for name, each in _tensors(args)}
    memory |= stated
    walk = _Walk()
    walk.run(triton_ir.parse(ttir))
    found: dict[str, Run] = {}
    for op, pointer in walk.accesses:
        key = f"{places.get(op.location, '')} {_KINDS[op.name]}"
        found[key] = _both(_run(op, pointer, memory, threads), found.get(key))
    return found


class Narrow(NamedTuple):
    """Accesses of machine code that are narrower than what a thread owns there: than the shortest run, or the widest of
    them than the longest.
    """

    kernel: str
    argument: str
    kind: str  # "load", "store", "copy"
    bits: int
    owned: int
    times: int
    source: str  # "triton.py:29"

    def __str__(self) -> str:
        return (
            f"{self.times} of {self.bits} bits at {self.source}, where a thread of {self.kernel} could {self.kind} "
            f"{self.owned} of {self.argument or 'an unknown argument'}"
        )


class Excuse(NamedTuple):
    """Why accesses to some arguments of a kernel are as narrow as ``bits``, in builds whose target and configuration
    ("sm_100 dgrad-128x128x32-...") match. Arguments that are read at one place have one name there.
    """

    build: str  # a regular expression that matches at the beginning
    kernel: str  # a regular expression, of the whole name
    kinds: str  # likewise
    arguments: str  # likewise
    bits: int
    reason: str

    def covers(self, build: str, found: Narrow) -> bool:
        return (
            re.match(self.build, build) is not None
            and re.fullmatch(self.kernel, found.kernel) is not None
            and found.bits >= self.bits
            and re.fullmatch(self.kinds, found.kind) is not None
            and re.fullmatch(self.arguments, found.argument) is not None
        )


_MFMA = "Triton stores from the layout of mfma, four numbers of a row by thread (tritonamdgpu-optimize-epilogue)"
_ALONG_K = "tcgen05 reads tf32 along K only: operands that lie otherwise are copied number by number"
_SWIZZLED = "Triton copies eight codes at once, as many as it swizzles of the numbers that they become"
_COUNT = "a number of each block or sequence, whose count is not told"
_TREE = "a mask of 64 bytes a row, read where its scores are"
_ATTENTION = "_paged_attention_fwd_kernel"
EXCUSES: tuple[Excuse, ...] = (
    Excuse("gfx", "_gemm_kernel", "store", r"target_ptrs(\.\d)?|", 64, _MFMA),
    Excuse("gfx", _ATTENTION, "store", "out_ptr|part_ptr", 64, _MFMA),
    Excuse(r"sm_100 (dgrad|wgrad)-\S*tf32", "_gemm_kernel", "copy", r"(a|b|source)_ptrs(\.\d)?", 32, _ALONG_K),
    Excuse(r"sm_(80|86|89|120) 64x\S*-over-(fp8|int8)", _ATTENTION, "copy", "[kv]_ptr", 64, _SWIZZLED),
    Excuse("", "_cast_kernel|_push_kernel", "load", "amaxes_ptr|parts_ptr", 32, _COUNT),
    Excuse("", "_plan_kernel", "load", "query_start_loc_ptr|seq_lens_ptr", 32, _COUNT),
    Excuse("", _ATTENTION, "load", "tree_ptr", 8, _TREE),
)


def excuse(target: str, config: str, found: Narrow) -> Excuse | None:
    return next((each for each in EXCUSES if each.covers(f"{target} {config}", found)), None)


def narrow(kernel: str, places: Mapping[str, int], owned: Mapping[str, Run]) -> list[Narrow]:
    """Where ``kernel``'s machine code could move more at once, excused or not.

    ``places`` counts accesses as ``machine_code.MachineCode.places`` does. What no line of Triton's IR asks for (inline
    assembly, waits on flags) is passed over.
    """
    found: list[Narrow] = []
    widest: dict[str, Narrow] = {}
    for place, count in places.items():
        source, kind, width = place.rsplit(" ", 2)
        key, bits = f"{source} {'load' if kind == 'copy' else kind}", int(width)
        run = owned.get(key)
        if run is None or kind == "atomic":
            continue
        if bits < run.bits:
            found.append(Narrow(kernel, run.argument, kind, bits, run.bits, count, source))
        if key not in widest or bits > widest[key].bits:
            widest[key] = Narrow(kernel, run.of_most, kind, bits, run.most, count, source)
    return found + [each for each in widest.values() if each.bits < min(each.owned, WIDEST) and each not in found]


def outputs(stores: Sequence[str], owned: Mapping[str, Run]) -> int:
    """Numbers that a thread stores at these lines, at the one where it stores most; 0 where it stores nothing."""
    return max((run.elements for line in stores if (run := owned.get(f"{line} store"))), default=0)


def contiguous(tensor: torch.Tensor) -> int:
    """Bits of ``tensor`` that lie together, at addresses that they divide: at most 128, at least an element's.

    Memory begins at multiples of 16 bytes, as torch allocates it; masks end with a row.
    """
    size = tensor.element_size()
    pitches = [stride for length, stride in zip(tensor.shape, tensor.stride()) if length > 1 and stride != 1]
    rows = [length for length, stride in zip(tensor.shape, tensor.stride()) if stride == 1 and length > 1]
    if not rows:
        return 8 * size
    begin = size * int(tensor.storage_offset())
    return 8 * math.gcd(WIDEST // 8, begin, *(size * each for each in (*pitches, *(rows if pitches else ()))))


def _tensors(args: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """ "a_ptrs.1": the second tensor of the argument."""
    for name, value in args.items():
        yield from ((f"{name}.{i}", each) for i, each in enumerate(_flat(value)))


def _flat(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple):
        for each in value:
            yield from _flat(each)


def _both(one: Run, other: Run | None) -> Run:
    if other is None:
        return one
    fewest = min(one, other, key=lambda each: each.bits)
    most = max(one, other, key=lambda each: each.most)
    elements = one.elements + other.elements
    return Run(fewest.argument, fewest.bits, elements, most.most, most.of_most)


def _run(op: Op, pointer: _Value | None, memory: Mapping[str, int], threads: int) -> Run:
    shape, bits = _tile(op)
    argument = pointer.argument.removesuffix(".0") if pointer else ""
    elements, run = 1, bits
    if shape:
        elements = max(1, math.prod(shape) // threads)
        run *= max(1, min(elements, WIDEST // bits, _together(pointer, shape, bits, memory) if pointer else elements))
    return Run(argument, run, elements, run, argument)


def _together(pointer: _Value, shape: tuple[int, ...], bits: int, memory: Mapping[str, int]) -> int:
    """Elements of a tile that lie together: along steps of 1 or, where there are none, along those that are not known.

    A kernel may ask for fewer by tl.max_contiguous, but not for less than 32 bits.
    """
    pairs = list(zip(shape, pointer.steps))
    lengths = [length for length, step in pairs if step == 1] or [length for length, step in pairs if step is None]
    aligned = memory.get(pointer.argument, WIDEST) // bits
    return min(math.prod(lengths), aligned, max(pointer.hint, 32 // bits))


def _tile(op: Op) -> tuple[tuple[int, ...], int]:
    """The shape of a tile of pointers, () for one pointer, and the bits of an element."""
    types = op.text.rpartition(" : ")[2]
    pointer = _POINTER.search(types)
    bits = 8 if _FLOAT8.search(types) else int(pointer[2]) if pointer else WIDEST
    tensor = _TENSOR.search(types)
    tiled = tensor is not None and ("!tt.ptr" in tensor[2] or op.name.startswith("tt.descriptor"))
    return tuple(map(int, tensor[1].strip("x").split("x"))) if tensor and tiled else (), max(8, bits)


class _Walk:
    """Follows integers and pointers through a kernel, each operation once."""

    def __init__(self) -> None:
        self.accesses: list[tuple[Op, _Value | None]] = []
        self._values: dict[str, _Value | None] = {}

    def run(self, ops: list[Op]) -> list[_Value | None]:
        """What a region yields."""
        yielded: list[_Value | None] = []
        for op in ops:
            if op.name in _KINDS:
                self.accesses.append((op, self._values.get(op.operands[0])))
            if op.name in ("scf.yield", "scf.condition"):
                yielded = [self._values.get(name) for name in op.operands]
            elif op.regions:
                self._region(op)
            else:
                self._values |= dict.fromkeys(op.result_names, self._step(op))
        return yielded

    def _region(self, op: Op) -> None:
        if op.name == "tt.func":
            seen = Counter[str]()
            for name, pointer, said in _ARGUMENT.findall(op.text):
                self._values[name] = _Value((), f"{said}.{seen[said]}" if pointer else "")
                seen[said] += bool(pointer)
        for name, start in op.carried():
            self._values[name] = self._values.get(start)
        if found := triton_ir.FOR.match(op.text):
            self._values[found[1]] = _Value(())
        results = [self.run(region) for region in op.regions]
        if op.name == "scf.for":
            results = [[self._values.get(name) for name, _ in op.carried()]]
        for i, name in enumerate(op.result_names):
            self._values[name] = results[0][i] if results and i < len(results[0]) else None

    def _step(self, op: Op) -> _Value | None:
        values = [self._values.get(name) for name in op.operands]
        known = [value for value in values if value is not None]
        shape = _shape(op)
        match op.name:
            case "tt.make_range":
                hint = _HINT.search(op.text)
                return _Value((1,), hint=int(hint[1]) if hint else WIDEST)
            case "arith.constant":
                found = _SPLAT.match(op.text) or _INTEGER.match(op.text)
                return _Value((0,) * len(shape), constant=int(found[1]) if found else None)
            case "tt.load":  # numbers, or addresses, from anywhere
                return _Value((None,) * len(shape))
            case "tt.splat":
                value = known[0] if known else _Value(())
                return value._replace(steps=(0,) * len(shape))
            case name if name in _SAME or name == "tt.expand_dims":
                return _reshaped(op, known[0], shape) if known else None
            case "tt.trans":
                order = _ORDER.search(op.text)
                if not known or order is None:
                    return None
                return known[0]._replace(steps=tuple(known[0].steps[int(i)] for i in order[1].split(",")))
        if len(known) < len(values) and not shape:
            return _Value((), "".join(value.argument for value in known))  # a number that nothing is known of
        if len(known) < len(values) or not values:
            return None
        return _combined(op, values, shape)


def _shape(op: Op) -> tuple[int, ...]:
    """Of an operation's result."""
    found = _TENSOR.findall(op.text.rpartition("-> ")[2] if "->" in op.text else op.text.rpartition(" : ")[2])
    return tuple(map(int, found[0][0].strip("x").split("x"))) if found else ()


def _reshaped(op: Op, value: _Value, shape: tuple[int, ...]) -> _Value:
    steps = value.steps
    if op.name == "tt.expand_dims":
        axis = int(_AXIS.search(op.text)[1])  # type: ignore[index]
        steps = (*steps[:axis], 0, *steps[axis:])
    if op.name == "tt.broadcast":
        before = _TENSOR.search(op.text.rpartition(" : ")[2])
        lengths = tuple(map(int, before[1].strip("x").split("x"))) if before else ()
        steps = tuple(0 if length == 1 else step for length, step in zip(lengths, steps))
    return value._replace(steps=steps)


def _combined(op: Op, values: list[Any], shape: tuple[int, ...]) -> _Value | None:
    """Of two tiles, or numbers; what an operation does to contiguous values is not known but for a few."""
    one, other = values[0], values[1] if len(values) > 1 else _Value((0,) * len(values[0].steps))
    argument = one.argument or other.argument
    pairs = list(zip(one.steps, other.steps))
    if op.name in ("tt.addptr", "arith.addi", "arith.ori"):
        steps = tuple(None if None in pair else sum(pair) for pair in pairs)
    elif op.name == "arith.subi":
        steps = tuple(None if None in pair else pair[0] - pair[1] for pair in pairs)
    elif op.name in ("arith.remsi", "arith.remui", "arith.divsi", "arith.divui") and other.constant:
        return _divided(op, one, other.constant)
    elif op.name == "arith.muli":
        steps = tuple(
            _times(a, other.constant) if b == 0 else _times(b, one.constant) if a == 0 else None for a, b in pairs
        )
    else:
        steps = tuple(0 if a == b == 0 else None for a, b in pairs)
    return _Value(steps, argument, hint=min(one.hint, other.hint)) if len(steps) == len(shape) else None


def _divided(op: Op, value: _Value, by: int) -> _Value:
    """Of numbers one apart: within runs that are a power of two long and divide ``by``, remainders are one apart, too,
    and quotients equal. Runs of fewer than four are none.
    """
    if by % 4:
        return _Value(tuple(step and _FAR for step in value.steps), value.argument)
    steps = value.steps
    if op.name.startswith("arith.div"):
        steps = tuple(0 if step in (0, 1) else None for step in steps)
    return _Value(steps, value.argument, hint=min(value.hint, by & -by))


def _times(step: int | None, factor: int | None) -> int | None:
    """A step of 0 stays so. Another by an argument that is not known is far: Triton writes an argument of 1 as one."""
    return 0 if step == 0 else None if step is None else step * (_FAR if factor is None else factor)
