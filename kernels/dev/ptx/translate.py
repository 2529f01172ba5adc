"""Instructions within a thread, as Python source over the registers of all threads.

A register holds bits: bool for a predicate, uint16, uint32 or uint64 elsewhere, an element for each thread. An array is
never written in place, since moves share it: each instruction makes a new one. In the source ``R`` is the list of
registers, ``S`` the launch (``machine.Launch``), ``A`` ``arithmetic.py``, and k0, k1, ... are constants.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .parse import BITS, Address, Immediate, Instruction, Kernel, Negated, Operand, Register, Symbol, Vector

_VIEW = {"f32": "f4", "f64": "f8", "f16": "f2", "s16": "i2", "s32": "i4", "s64": "i8"}
_UINT = {8: "u1", 16: "u2", 32: "u4", 64: "u8"}
_SINT = {8: "i1", 16: "i2", 32: "i4", 64: "i8"}
_WIDER = {"s16": "s32", "u16": "u32", "s32": "s64", "u32": "u64"}
_COMPARE = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_UNSIGNED = {"lo": "<", "ls": "<=", "hi": ">", "hs": ">="}
_INFIX = {"and": "&", "or": "|", "xor": "^", "add": "+", "sub": "-", "mul": "*"}
_FLOATS = {"f16", "bf16", "f32"}
_HALVES = {"f16x2": "f16", "bf16x2": "bf16"}
_APPROXIMATE = {"ex2", "lg2", "rcp", "sqrt", "rsqrt", "tanh", "sin", "cos"}
_FLOAT_MODIFIERS = {"rn", "ftz", "NaN", "full", "approx"}
_INTEGER_MODIFIERS = {"lo", "hi", "wide", "relu"}
_ROUND_TO_INTEGER = {"rzi", "rni", "rmi", "rpi"}


class Unknown(Exception):
    """An instruction, or a form of it, that is not translated."""


def dtype(kind: str) -> str:
    """The name of numpy's type for an operand's, as generated source has it."""
    return _VIEW.get(kind) or (_SINT if kind[0] == "s" else _UINT)[BITS[kind]]


class Translator:
    """Source for the instructions of one kernel. ``shared`` are the addresses of its shared variables."""

    def __init__(self, kernel: Kernel, shared: dict[str, int]) -> None:
        self.index = {name: i for i, name in enumerate(kernel.registers)}
        self.bits = kernel.registers
        self.shared = shared
        self.params = {each.name: n for n, each in enumerate(kernel.params)}
        self.constants: dict[str, Any] = {}
        self._names: dict[tuple[int, str], str] = {}

    # ------------------------------------------------------------------------------------------------------- operands

    def constant(self, value: int, kind: str) -> str:
        bits = BITS[kind]
        key = (value & ((1 << bits) - 1), kind)
        if key not in self._names:
            self._names[key] = name = f"k{len(self._names)}"
            raw = np.array(key[0], f"u{bits // 8}")
            self.constants[name] = raw.view(_numpy(kind))[()]
        return self._names[key]

    def register(self, operand: Operand) -> str:
        assert isinstance(operand, Register), operand
        return f"R[{self.index[operand.name]}]"

    def source(self, operand: Operand, kind: str) -> str:
        """An operand as an array, or a scalar constant, of ``kind``; 16-bit floats but f16 as fp32."""
        match operand:
            case Negated(of):
                return f"(~{self.source(of, kind)})"
            case Immediate(value) if kind == "pred":
                return f"np.full(S.n, {bool(value)})"
            case Immediate(value) if kind == "bf16":
                return f"A.from_bf16(np.full(S.n, {value}, u2))"
            case Immediate(value):
                return self.constant(value, kind)
            case Symbol(name) if name in self.params and BITS[kind] != 64:
                raise Unknown(f"the address of {name} as .{kind}")
            case Symbol(name):
                return self.special(name)
        text = self.register(operand)
        have, want = self.bits[operand.name], BITS[kind]  # type: ignore[union-attr]
        if want < have:
            text = f"{text}.astype({_UINT[want]})"
        if kind == "bf16":
            return f"A.from_bf16({text})"
        return f"{text}.view({_VIEW[kind]})" if kind in _VIEW else text

    def array(self, operand: Operand, kind: str) -> str:
        """Like ``source``, but never a scalar."""
        text = self.source(operand, kind)
        return f"np.full(S.n, {text})" if isinstance(operand, Immediate) and kind not in ("bf16", "pred") else text

    def special(self, name: str) -> str:
        """A special register, or the address of a shared variable or of a parameter."""
        if name in self.shared:
            return f"S.filled({self.shared[name]})"
        if name in self.params:
            return f"S.parameter_address({self.params[name]})"
        known = {"%tid.x": "S.tid", "%laneid": "S.lane", "%warpid": "S.warp_in_block", "%ntid.x": "S.filled(S.threads)"}
        known |= {"%globaltimer": "S.timer()", "%cluster_ctarank": "S.filled(0)"}
        for axis in "xyz":
            known |= {f"%ctaid.{axis}": f"S.ctaid_{axis}", f"%nctaid.{axis}": f"S.nctaid_{axis}"}
            known |= {f"%cluster_ctaid.{axis}": "S.filled(0)"}
            known.setdefault(f"%tid.{axis}", "S.filled(0)")
        if name not in known:
            raise Unknown(f"special register {name}")
        return known[name]

    def address(self, operand: Operand, kind: str = "u64") -> str:
        """An address in global memory, or with ``kind`` "u32" in shared."""
        assert isinstance(operand, Address), operand
        base = self.array(operand.base, kind)
        return f"({base} + {self.constant(operand.offset, kind)})" if operand.offset else base

    # -------------------------------------------------------------------------------------------------------- results

    def put(self, operand: Operand, expression: str, kind: str, guard: str | None) -> str:
        """Write an array of ``kind`` into a register, where ``guard`` holds."""
        if operand == Symbol("_"):
            return f"{expression}"
        target = self.register(operand)
        have, made = self.bits[operand.name], BITS[kind]  # type: ignore[union-attr]
        if kind == "bf16":
            expression = f"A.to_bf16({expression})"
        elif kind in _FLOATS or kind == "f64":
            expression = f"({expression}).view({_UINT[made]})"
        elif kind[0] == "s":
            expression = f"({expression}).astype({_SINT[have]}).view({_UINT[have]})"
        elif have > made > 1:
            expression = f"({expression}).astype({_UINT[have]})"
        if kind in _FLOATS and have > made:
            expression = f"({expression}).astype({_UINT[have]})"
        return f"{target} = {expression}" if guard is None else f"{target} = where({guard}, {expression}, {target})"

    # --------------------------------------------------------------------------------------------------- instructions

    def lines(self, i: Instruction, guard: str | None) -> list[str]:
        """Source for an instruction; Unknown for those that reach beyond a thread, and for forms not known."""
        base, kind, args = i.parts[0], i.parts[-1], i.args
        match base:
            case "mov":
                return self._mov(args, kind, guard)
            case "cvt":
                return [self._cvt(i, guard)]
            case "cvta":
                return [self.put(args[0], self.source(args[1], "u64"), "u64", guard)]
            case "setp":
                return self._setp(i, guard)
        if kind not in BITS:
            raise Unknown(i.opcode)
        if kind == "pred":
            text = f"~{self.source(args[1], kind)}"
            if base != "not":
                text = f"{self.source(args[1], kind)} {_INFIX[base]} {self.source(args[2], kind)}"
        elif kind in _HALVES:
            text = self._packed(i, _HALVES[kind])
        elif kind == "f32x2":
            return [self.put(args[0], self._pairs(i), "b64", guard)]
        elif i.parts[1:-1] == ["rn", "f32"] and kind in ("f16", "bf16"):
            return [self.put(args[0], self._mixed(i, kind), "f32", guard)]
        elif kind in _FLOATS:
            text = self._float(i, kind)
        elif kind == "f64":
            text = self._double(i)
        else:
            return [self._integer(i, kind, guard)]
        return [self.put(args[0], text, "b32" if kind in _HALVES else kind, guard)]

    def _integer(self, i: Instruction, kind: str, guard: str | None) -> str:
        base, parts, args = i.parts[0], i.parts, i.args
        if set(parts[1:-1]) - _INTEGER_MODIFIERS:
            raise Unknown(i.opcode)
        made = _WIDER[kind] if "wide" in parts else kind
        x, y, z = ((lambda n=n, k=kind: self.source(args[n], k)) for n in (1, 2, 3))
        a = self.array(args[1], kind)
        if base in ("and", "or", "xor", "add", "sub"):
            text = f"{a} {_INFIX[base]} {y()}"
        elif base in ("mul", "mad"):
            text = self._product(i, kind)
            if base == "mad":
                text = f"{text} + {self.source(args[3], made)}"
        elif base in ("shl", "shr"):
            kind = made = f"u{BITS[kind]}" if kind[0] == "b" else kind
            value, by = self.array(args[1], kind), self.array(args[2], "u32")
            text = f"A.shift_{'left' if base == 'shl' else 'right'}({value}, {by})"
            if isinstance(args[2], Immediate) and args[2].value < BITS[kind]:
                text = f"{value} {'<<' if base == 'shl' else '>>'} {self.constant(args[2].value, kind)}"
        elif base in ("min", "max"):
            text = f"np.{base}imum({a}, {y()})"
            text = f"np.maximum({text}, {self.constant(0, kind)})" if "relu" in parts else text
        elif base == "bfi" and kind != "b32":
            raise Unknown(i.opcode)
        elif base == "bfe":
            first, length = (self.array(each, "u32") for each in args[2:])
            made, signed = f"u{BITS[kind]}", kind[0] == "s"
            text = f"A.extract({self.array(args[1], made)}, {first}, {length}, signed={signed})"
        elif base == "bfi":
            first, length = (self.array(each, "u32") for each in args[3:])
            text = f"A.insert({a}, {self.array(args[2], kind)}, {first}, {length})"
        elif base == "lop3":
            b, c, (table,) = self.array(args[2], kind), self.array(args[3], kind), args[4:]
            assert isinstance(table, Immediate)
            text = f"A.logic3({a}, {b}, {c}, {table.value})"
        elif base == "selp":
            text = f"where({self.source(args[3], 'pred')}, {x()}, {y()})"
        else:
            simple = {"not": f"~{a}", "neg": f"-{a}", "abs": f"np.abs({a})"}
            if len(args) > 2:
                b = self.array(args[2], kind)
                simple |= {"div": f"A.divide({a}, {b})", "rem": f"A.remainder({a}, {b})"}
            if len(args) > 3 and parts == ["prmt", "b32"]:
                simple["prmt"] = f"A.permute({a}, {b}, {z()})"
            if base not in simple:
                raise Unknown(i.opcode)
            text = simple[base]
        return self.put(args[0], text, made, guard)

    def _product(self, i: Instruction, kind: str) -> str:
        a, b = self.array(i.args[1], kind), self.array(i.args[2], kind)
        if "wide" in i.parts:
            wide = dtype(_WIDER[kind])
            return f"{a}.astype({wide}) * {b}.astype({wide})"
        if "hi" not in i.parts:
            return f"{a} * {b}"
        if BITS[kind] == 64:
            return f"A.multiply_high({a}, {b})"
        wide = dtype(_WIDER[kind])
        return f"(({a}.astype({wide}) * {b}.astype({wide})) >> {wide}({BITS[kind]})).astype({dtype(kind)})"

    def _float(self, i: Instruction, kind: str) -> str:
        base, parts, args = i.parts[0], i.parts, i.args
        ftz = "ftz" in parts
        values = [self.array(each, kind) for each in args[1 : 3 if base == "selp" else None]]
        if ftz and base not in _APPROXIMATE:
            values = [f"A.flush({each})" for each in values]
        magnitudes = base in ("min", "max") and parts[-3:-1] == ["xorsign", "abs"] and len(values) == 2
        if set(parts[1:-1]) - _FLOAT_MODIFIERS - ({"xorsign", "abs"} if magnitudes else set()):
            raise Unknown(i.opcode)
        if base == "selp":
            return f"where({self.source(args[3], 'pred')}, {values[0]}, {values[1]})"
        if base == "neg":
            return f"(-{values[0]})"
        if base == "abs":
            return f"np.abs({values[0]})"
        if base in ("min", "max"):
            text, *others = values
            for other in others:
                options = f"nan={'NaN' in parts}, largest={base == 'max'}, magnitudes={magnitudes}"
                text = f"A.minimum({text}, {other}, {options})"
            return f"{text}.astype(f2)" if kind == "f16" else text
        if kind != "f32":
            if ftz or base not in ("add", "sub", "mul", "fma"):
                raise Unknown(i.opcode)
            given = [f"{each}.astype(f4)" for each in values] if kind == "f16" else values
            bits = f"A.half('{base}', [{', '.join(given)}], '{kind}')"
            return bits if kind == "f16" else f"A.from_bf16({bits})"
        if base in _APPROXIMATE and "rn" not in parts:
            return f"A.approximate('{base}', {values[0]}, S.end, ftz={ftz})"
        if base in ("add", "sub", "mul"):
            text = f"({values[0]} {_INFIX[base]} {values[1]})"
        elif base == "fma":
            text = f"A.fma({', '.join(values)})"
        elif base == "div":
            text = f"A.quotient({values[0]}, {values[1]}, S.end, exact={'rn' in parts})"
        elif base == "sqrt":
            text = f"np.sqrt({values[0]})"
        else:
            raise Unknown(i.opcode)
        return f"A.flush({text})" if ftz else text

    def _double(self, i: Instruction) -> str:
        """What numpy rounds as the ISA does."""
        base = i.parts[0]
        if set(i.parts[1:-1]) - {"rn"}:
            raise Unknown(i.opcode)
        if base == "selp":
            x, y = (self.array(each, "f64") for each in i.args[1:3])
            return f"where({self.source(i.args[3], 'pred')}, {x}, {y})"
        values = [self.array(each, "f64") for each in i.args[1:]]
        if len(values) == 1 and base in ("neg", "abs", "sqrt"):
            return f"(-{values[0]})" if base == "neg" else f"np.{base}({values[0]})"
        if len(values) == 2 and base in ("add", "sub", "mul", "div"):
            return f"({values[0]} {(_INFIX | {'div': '/'})[base]} {values[1]})"
        if len(values) == 2 and base in ("min", "max"):
            return f"A.minimum({values[0]}, {values[1]}, nan=False, largest={base == 'max'})"
        raise Unknown(i.opcode)

    def _packed(self, i: Instruction, half: str) -> str:
        base, registers = i.parts[0], [self.array(each, "b32") for each in i.args[1:]]
        if set(i.parts[1:-1]) - {"rn"}:
            raise Unknown(i.opcode)
        if base in ("add", "sub", "mul", "fma"):
            return f"A.packed('{base}', [{', '.join(registers)}], '{half}')"
        if base == "abs":
            return f"({registers[0]} & u4(0x7FFF7FFF))"
        if base == "neg":
            return f"({registers[0]} ^ u4(0x80008000))"
        raise Unknown(i.opcode)

    def _pairs(self, i: Instruction) -> str:
        base, registers = i.parts[0], [self.array(each, "b64") for each in i.args[1:]]
        if set(i.parts[1:-1]) - {"rn", "ftz"} or base not in ("add", "sub", "mul", "fma"):
            raise Unknown(i.opcode)
        return f"A.pairs('{base}', [{', '.join(registers)}], ftz={'ftz' in i.parts})"

    def _mixed(self, i: Instruction, half: str) -> str:
        """add and sub of a 16-bit number and fp32, fma of two and fp32."""
        base, (*halves, last) = i.parts[0], i.args[1:]
        values = [f"{self.array(each, half)}.astype(f4)" for each in halves] + [self.array(last, "f32")]
        if base == "fma" and len(values) == 3:
            return f"A.fma({', '.join(values)})"
        if base in ("add", "sub") and len(values) == 2:
            return f"({values[0]} {_INFIX[base]} {values[1]})"
        raise Unknown(i.opcode)

    def _mov(self, args: list[Operand], kind: str, guard: str | None) -> list[str]:
        into, value = args
        if isinstance(value, Vector):
            each, whole = BITS[kind] // len(value.items), _UINT[BITS[kind]]
            terms = [
                f"({self.array(item, f'b{each}')}.astype({whole}) << {whole}({each * n}))"
                for n, item in enumerate(value.items)
            ]
            return [self.put(into, " | ".join(terms), kind, guard)]
        if isinstance(into, Vector):
            each = BITS[kind] // len(into.items)
            lines = [f"t = {self.array(value, kind)}"]
            for n, item in enumerate(into.items):
                shifted = f"(t >> {_UINT[BITS[kind]]}({each * n})).astype({_UINT[each]})"
                lines.append(self.put(item, shifted, f"b{each}", guard))
            return lines
        return [self.put(into, self.array(value, kind), kind, guard)]

    def _setp(self, i: Instruction, guard: str | None) -> list[str]:
        compare, kind, args = i.parts[1], i.parts[-1], i.args
        half = _HALVES.get(kind)
        if half is not None:  # p|q, of the lower and of the upper numbers
            if len(args) != 4:
                raise Unknown(i.opcode)
            x, y = (f"A.halves({self.array(each, 'b32')}, '{half}')" for each in args[2:])
            lines = [f"t, v = {x}, {y}"]
            return lines + [self.put(args[n], _compared(i, f"t[{n}]", f"v[{n}]"), "pred", guard) for n in (0, 1)]
        if len(args) != 3:
            raise Unknown(i.opcode)
        a, b = self.array(args[1], kind), self.source(args[2], kind)
        if kind in _FLOATS or kind == "f64":
            if "ftz" in i.parts:
                a, b = f"A.flush({a})", f"A.flush({b})"
            return [self.put(args[0], _compared(i, a, b), "pred", guard)]
        operator = (_COMPARE | _UNSIGNED).get(compare)
        if operator is None:
            raise Unknown(i.opcode)
        return [self.put(args[0], f"({a} {operator} {b})", "pred", guard)]

    def _cvt(self, i: Instruction, guard: str | None) -> str:
        *mods, to, of = i.parts[1:]
        args = i.args
        if i.parts[1:] == ["rz", "f16", "f32"]:
            return self.put(args[0], f"A.truncated({self.array(args[1], of)})", "b16", guard)
        if set(mods) - {"rn", "ftz", "satfinite", *_ROUND_TO_INTEGER} or ("ftz" in mods and of != "f32"):
            raise Unknown(i.opcode)
        if to in _HALVES and of == "f32" and mods == ["rn"]:
            high, low = self.array(args[1], "f32"), self.array(args[2], "f32")
            return self.put(args[0], f"A.pair({low}, {high}, '{_HALVES[to]}')", "b32", guard)
        if to == "f16x2" and of in ("e4m3x2", "e5m2x2"):
            codes = self.array(args[1], "u16")
            low, high = (f"A.from_fp8({codes} {part}, '{of[:-2]}')" for part in ("& u2(255)", ">> u2(8)"))
            return self.put(args[0], f"A.pair({low}, {high}, 'f16')", "b32", guard)
        if to in ("e4m3x2", "e5m2x2") and "satfinite" in mods:
            values = [self.array(each, "f32") for each in args[1:]] if of == "f32" else []
            if of == "f16x2":
                values = [f"*reversed(A.halves({self.array(args[1], 'b32')}, 'f16'))"]
            if values:
                return self.put(args[0], f"A.packed_fp8({', '.join(values)}, '{to[:-2]}')", "b16", guard)
        if to not in BITS or of not in BITS or "satfinite" in mods or "f64" in (to, of):
            raise Unknown(i.opcode)
        a = self.array(args[1], of)
        if of in _FLOATS:
            mode = next((mod for mod in mods if mod in _ROUND_TO_INTEGER), None)
            a = f"A.flush({a})" if "ftz" in mods and of == "f32" else a
            if to not in _FLOATS:
                if mode is None:
                    raise Unknown(i.opcode)
                return self.put(args[0], f"A.to_integer({a}, '{mode}', {dtype(to)})", to, guard)
            if mode is not None:
                a = f"A.integral({a}, '{mode}')"
            if to == of:
                return self.put(args[0], a, to, guard)
            if to == "f32":
                return self.put(args[0], f"{a}.astype(f4)", to, guard)
            return self.put(args[0], f"A.to_half({a}, '{to}')", "b16", guard)
        if of[0] == "s" and BITS[of] == 8:
            a = f"{a}.astype(u1).view(i1)"
        if to in _FLOATS:
            wide = f"{a}.astype(f8)" if BITS[of] < 64 else None
            if wide is None and to != "f32":
                raise Unknown(i.opcode)
            if to == "f32":
                return self.put(args[0], f"{a}.astype(f4)", to, guard)
            return self.put(args[0], f"A.to_half({wide}, '{to}')", "b16", guard)
        return self.put(args[0], f"{a}.astype({dtype(to)})", to, guard)


def _compared(i: Instruction, a: str, b: str) -> str:
    """A comparison of floating-point numbers: with NaN it fails, with a "u" behind its name it holds."""
    compare = i.parts[1]
    either = f"(np.isnan({a}) | np.isnan({b}))"
    if compare in ("num", "nan"):
        return f"~{either}" if compare == "num" else either
    if compare in _COMPARE:
        text = f"({a} {_COMPARE[compare]} {b})"
        return f"({text} & ~{either})" if compare == "ne" else text
    if compare.removesuffix("u") in _COMPARE:
        return f"(({a} {_COMPARE[compare.removesuffix('u')]} {b}) | {either})"
    raise Unknown(i.opcode)


def _numpy(kind: str) -> str:
    """numpy's name for an operand's type."""
    letter = {"f": "f", "s": "i"}.get(kind[0], "u") if kind in _VIEW else "u"
    return f"{letter}{BITS[kind] // 8}"
