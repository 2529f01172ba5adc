"""Instructions that reach beyond a thread, as Python source: calls of ``machine.Launch``'s methods.

Each call gets ``guard``, which threads take part (None: all), and the number of the instruction, which reports name.
"""

from __future__ import annotations

import re

from . import tcgen05
from .parse import BITS, Address, Immediate, Instruction, Operand, Register, Symbol, Vector
from .translate import Translator, Unknown

_BARRIERS = ("bar.sync", "barrier.sync")
_NOTHING = ("griddepcontrol", "prefetch", "discard")
_OPERATIONS = ("add", "exch", "cas", "max", "min", "and", "or")
_SUMS = {"f16": "noftz", "bf16": "noftz", "f16x2": "noftz", "bf16x2": "noftz", "f32": "", "f64": ""}


def is_barrier(i: Instruction) -> bool:
    """Whether all warps of a block meet there."""
    return i.opcode.startswith(_BARRIERS)


def lines(t: Translator, n: int, i: Instruction, guard: str | None) -> list[str] | None:
    """Source for instruction ``n``; None where it stays within a thread. Raises Unknown."""
    base = i.parts[0]
    if is_barrier(i):
        if i.args[0] != Immediate(0) or len(i.args) > 1:
            raise Unknown("a barrier of some threads")
        return [f"S.barrier({guard}, {n})"]
    if i.opcode.startswith(("bar.warp.sync", "barrier.warp.sync")):
        return [f"S.lanes_meet({guard})"]
    if i.opcode.startswith(_NOTHING):
        return ["pass"]
    if base == "createpolicy":
        return [t.put(i.args[0], "S.filled(0).astype(u8)", "b64", guard)]
    if base in ("ld", "st"):
        return _access(t, n, i, guard)
    if base in ("atom", "red"):
        return _atomic(t, n, i, guard)
    if base in ("shfl", "redux", "elect", "ldmatrix", "stmatrix", "mma"):
        return _across(t, n, i, guard)
    if base in ("membar", "fence"):
        return _fence(t, n, i, guard)
    if base == "cp":
        return _copy(t, n, i, guard)
    if base == "mbarrier":
        return _mbarrier(t, n, i, guard)
    if base == "tensormap":
        return _tensormap(t, n, i, guard)
    if base == "tcgen05":
        return tcgen05.lines(t, n, i, guard)
    return _wgmma(t, n, i, guard) if base == "wgmma" else None


def _access(t: Translator, n: int, i: Instruction, guard: str | None) -> list[str]:
    kind, loading = i.parts[-1], i.parts[0] == "ld"
    space = next((part.partition("::")[0] for part in i.parts if part.startswith(("shared", "global"))), None)
    if space is None:
        raise Unknown(f"the state space of {i.opcode}")
    place, value = (i.args[1], i.args[0]) if loading else i.args[:2]
    items = value.items if isinstance(value, Vector) else (value,)
    if BITS[kind] > 64 or len(items) != i.count:
        raise Unknown(i.opcode)
    address, size = t.address(place, "u32" if space == "shared" else "u64"), BITS[kind] // 8
    if loading:
        signed = f".view(i{size})" if kind[0] == "s" else ".view(f4)" if kind == "f32" else ""
        found = [f"t = S.load_{space}({address}, {size}, {i.count}, {guard}, {n})"]
        return found + [t.put(each, f"t[{k}]{signed}", kind, guard) for k, each in enumerate(items)]
    stored = ", ".join(t.array(each, f"b{BITS[kind]}") for each in items)
    return [f"S.store_{space}({address}, {size}, [{stored}], {guard}, {n})"]


def _atomic(t: Translator, n: int, i: Instruction, guard: str | None) -> list[str]:
    """Integers, one for each thread, and sums of floating-point numbers, which may be several: of a vector."""
    kind, floating = i.parts[-1], i.parts[-1] in _SUMS
    operation = next((part for part in i.parts if part in _OPERATIONS), None)
    if operation is None or "global" not in i.parts or BITS.get(kind, 128) > 64:
        raise Unknown(i.opcode)
    if not floating and kind[0] not in "bsu":
        raise Unknown(i.opcode)
    if floating and (operation != "add" or ("noftz" in i.parts) != (_SUMS[kind] == "noftz")):
        raise Unknown(i.opcode)
    into, (where, *values) = (i.args[0], i.args[1:]) if i.parts[0] == "atom" else (Symbol("_"), i.args)
    columns = [_items(each) for each in values]  # of each operand its elements
    if len(values) != 1 + (operation == "cas") or {len(each) for each in columns} != {i.count if floating else 1}:
        raise Unknown(i.opcode)
    read = f"b{BITS[kind]}" if floating else kind
    given = ", ".join("[" + ", ".join(t.array(each, read) for each in element) + "]" for element in zip(*columns))
    name = f"{operation}.{kind}" if floating else operation
    found = [f"t = S.atomic('{name}', {BITS[kind] // 8}, {t.address(where)}, [{given}], {guard}, {n})"]
    targets = enumerate(_items(into)) if i.parts[0] == "atom" else ()
    return found + [t.put(each, f"t[{k}]", f"b{BITS[kind]}", guard) for k, each in targets]


def _across(t: Translator, n: int, i: Instruction, guard: str | None) -> list[str]:
    base, parts, args = i.parts[0], i.parts, i.args
    if base == "shfl":
        value, lane, clamp = (t.array(each, "b32") for each in args[-4:-1])
        found = [f"t = S.shuffle('{parts[2]}', {value}, {lane}, {clamp}, {guard}, {n})"]
        found.append(t.put(args[0], "t[0]", "b32", guard))
        return found + ([t.put(args[1], "t[1]", "pred", guard)] if len(args) == 6 else [])
    if base == "redux":
        whole = isinstance(args[2], Immediate) and args[2].value & 0xFFFFFFFF == 0xFFFFFFFF
        call = f"S.reduce('{parts[2]}', {t.array(args[1], parts[-1])}, {whole}, {guard}, {n})"
        if parts[-1] == "f32":
            if set(parts[3:-1]) - {"abs", "NaN"} or parts[2] not in ("min", "max"):
                raise Unknown(i.opcode)
            options = f"nan={'NaN' in parts}, magnitudes={'abs' in parts}, whole={whole}"
            call = f"S.reduce_numbers('{parts[2]}', {t.array(args[1], 'f32')}, {guard}, {n}, {options})"
        return [t.put(args[0], call, parts[-1], guard)]
    if base == "elect":
        found = [f"t = S.elect({guard})", t.put(args[0], "t[0]", "b32", guard)]
        return [*found, t.put(args[1], "t[1]", "pred", guard)]
    turned = "trans" in parts
    if base == "ldmatrix":
        into = _items(args[0])
        found = [f"t = S.ldmatrix({t.address(args[1], 'u32')}, {len(into)}, {turned}, {guard}, {n})"]
        return found + [t.put(each, f"t[{k}]", "b32", guard) for k, each in enumerate(into)]
    if base == "stmatrix":
        values = ", ".join(t.array(each, "b32") for each in _items(args[1]))
        return [f"S.stmatrix({t.address(args[0], 'u32')}, [{values}], {turned}, {guard}, {n})"]
    if parts[4:6] != ["row", "col"] or parts[6] != "f32":
        raise Unknown(i.opcode)
    a, b, c = ("[" + ", ".join(t.array(each, "b32") for each in _items(operand)) + "]" for operand in args[1:])
    found = [f"t = S.mma('{parts[3]}', '{parts[7]}', '{parts[8]}', {a}, {b}, {c}, {guard}, {n})"]
    return found + [t.put(each, f"t[{k}]", "b32", guard) for k, each in enumerate(_items(args[0]))]


def _fence(t: Translator, n: int, i: Instruction, guard: str | None) -> list[str]:
    if i.opcode in ("fence.proxy.async", "fence.proxy.async.shared::cta"):
        of_global = [f"S.fence_global({guard})"] if i.opcode == "fence.proxy.async" else []
        return [f"S.fence_proxy({guard})", *of_global]
    if i.opcode == "fence.proxy.async.global":
        return [f"S.fence_global({guard})"]
    if i.opcode.startswith("fence.mbarrier_init"):
        return [f"S.fence_barriers({guard})"]
    if i.opcode.startswith("fence.proxy.tensormap::generic.acquire"):
        return [f"S.acquire_descriptor({t.address(i.args[0])}, {guard})"]
    if i.opcode.startswith(("fence.acq_rel", "fence.sc", "membar")):
        return [f"S.fence_memory({guard}, {n})"]
    if i.opcode.startswith("fence.proxy.tensormap"):
        return ["pass"]  # a descriptor is read when it is used
    raise Unknown(i.opcode)


def _copy(t: Translator, n: int, i: Instruction, guard: str | None) -> list[str]:
    op, args = i.opcode, i.args
    waits = args[0] if args else None
    if op.startswith(("cp.async.ca.shared", "cp.async.cg.shared")):
        size = args[2]
        assert isinstance(size, Immediate), i.text
        given = t.array(args[3], "u32") if len(args) > 3 else f"S.filled({size.value})"
        return [f"S.copy({t.address(args[0], 'u32')}, {t.address(args[1])}, {size.value}, {given}, {guard}, {n})"]
    if op == "cp.async.commit_group":
        return [f"S.commit({guard})"]
    if op == "cp.async.wait_group" and isinstance(waits, Immediate):
        return [f"S.wait({waits.value}, {guard})"]
    if op == "cp.async.wait_all":
        return [f"S.wait(-1, {guard})"]
    if op == "cp.async.bulk.commit_group":
        return [f"S.commit_stores({guard})"]
    if op.startswith("cp.async.bulk.wait_group") and isinstance(waits, Immediate):
        return [f"S.wait_stores({waits.value}, {guard})"]
    if op.startswith("cp.async.bulk.tensor") and re.search(r"\.shared::(cta|cluster)\.global\.", op):
        box = _corner(t, args[1])
        mbarrier = t.address(args[2], "u32")
        return [f"S.load_tensor({t.address(args[0], 'u32')}, {t.address(args[1])}, {box}, {mbarrier}, {guard}, {n})"]
    if op.startswith("cp.async.bulk.tensor") and ".global.shared::cta." in op:
        box = _corner(t, args[0])
        return [f"S.store_tensor({t.address(args[0])}, {box}, {t.address(args[1], 'u32')}, {guard}, {n})"]
    raise Unknown(op)


def _corner(t: Translator, operand: Operand) -> str:
    assert isinstance(operand, Address)
    return "[" + ", ".join(t.array(each, "s32") for each in _items(operand.coordinates[0])) + "]"


def _mbarrier(t: Translator, n: int, i: Instruction, guard: str | None) -> list[str]:
    op, args = i.opcode, i.args
    if op.startswith("mbarrier.init"):
        return [f"S.init_barrier({t.address(args[0], 'u32')}, {t.array(args[1], 'u32')}, {guard}, {n})"]
    if op.startswith("mbarrier.inval"):
        return [f"S.end_barrier({t.address(args[0], 'u32')}, {guard}, {n})"]
    if op.startswith("mbarrier.arrive"):
        given = t.array(args[2], "u32") if "expect_tx" in op else "S.filled(0)"
        if len(args) > 2 and "expect_tx" not in op:
            raise Unknown("arrivals counted otherwise than one by one")
        return [f"S.arrive({t.address(args[1], 'u32')}, {given}, {guard}, {n})"]
    if op.startswith("mbarrier.try_wait.parity"):
        call = f"S.try_wait({t.address(args[1], 'u32')}, {t.array(args[2], 'u32')}, {guard}, {n})"
        return [t.put(args[0], call, "pred", guard)]
    raise Unknown(op)


def _tensormap(t: Translator, n: int, i: Instruction, guard: str | None) -> list[str]:
    op, args = i.opcode, i.args
    if op.startswith("tensormap.replace.tile."):
        ordinal = args[1].value if len(args) == 3 and isinstance(args[1], Immediate) else 0
        value = t.array(args[-1], i.parts[-1])
        return [f"S.set_descriptor({t.address(args[0], 'u32')}, '{i.parts[3]}', {ordinal}, {value}, {guard}, {n})"]
    if op.startswith("tensormap.cp_fenceproxy.global.shared::cta"):
        return [f"S.publish_descriptor({t.address(args[0])}, {t.address(args[1], 'u32')}, {guard}, {n})"]
    raise Unknown(op)


def _wgmma(t: Translator, n: int, i: Instruction, guard: str | None) -> list[str]:
    if i.opcode.startswith("wgmma.fence"):
        return ["pass"]  # whether one is missing is known from the text
    if i.opcode.startswith("wgmma.commit_group"):
        return [f"S.commit_products({guard})"]
    if i.opcode.startswith("wgmma.wait_group") and isinstance(i.args[0], Immediate):
        return [f"S.wait_products({i.args[0].value}, {guard})"]
    shape = re.fullmatch(r"m64n(\d+)k(\d+)", i.parts[4]) if i.opcode.startswith("wgmma.mma_async") else None
    if shape is None or i.parts[5] != "f32":
        raise Unknown(i.opcode)
    into, a, b, scale, *rest = i.args
    flags = [each.value for each in rest if isinstance(each, Immediate)]  # signs of A and B, then what is transposed
    if flags[:2] != [1, 1] or len(flags) != len(rest):
        raise Unknown("a wgmma with a factor other than 1")
    turned_b = flags[-1] if len(flags) > 2 else 0
    turned_a = flags[2] if len(flags) == 4 else 0
    registers = [t.index[each.name] for each in _items(into) if isinstance(each, Register)]
    if isinstance(a, Vector):
        operand = str([t.index[each.name] for each in a.items if isinstance(each, Register)])
    else:
        operand = t.source(a, "u64")
    factor = t.source(scale, "pred")
    return [
        f"S.multiply({shape[1]}, {shape[2]}, {i.parts[6:8]}, {registers}, {operand}, {t.source(b, 'u64')}, {factor}, "
        f"{turned_a}, {turned_b}, {guard}, {n})"
    ]


def _items(operand: Operand) -> tuple[Operand, ...]:
    return operand.items if isinstance(operand, Vector) else (operand,)
