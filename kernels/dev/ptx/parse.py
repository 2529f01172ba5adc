"""Read the PTX that Triton writes: one entry function with its parameters, registers, shared memory and instructions.

Grammar: NVIDIA's "PTX ISA", chapters "Syntax" and "State Spaces, Types, and Variables". Labels are resolved to indices;
a scope that inline assembly opens with ``{`` is flattened, its registers and labels renamed. ``.loc`` gives each
instruction its line of Python.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

# Bits of a register or an operand by type.
BITS = {"pred": 1, "b8": 8, "u8": 8, "s8": 8, "b16": 16, "u16": 16, "s16": 16, "f16": 16, "bf16": 16}
BITS |= {"b32": 32, "u32": 32, "s32": 32, "f32": 32, "f16x2": 32, "bf16x2": 32, "tf32": 32}
BITS |= {"f32x2": 64, "b64": 64, "u64": 64, "s64": 64, "f64": 64, "b128": 128}

_INTEGER = re.compile(r"-?(0[xX][0-9a-fA-F]+|\d+)U?$")
_FLOAT = re.compile(r"0[fFdD]([0-9a-fA-F]+)$")
_TOKEN = re.compile(r"\s*(?:(?P<open>\{)|(?P<close>\})|(?P<label>[\w$]+):(?!:)|(?P<statement>[^;]*);)", re.S)
_NESTED = re.compile(r"[{\[(|]")
_WIDTH = re.compile(r"v(\d+)")


@dataclass(frozen=True)
class Register:
    name: str


@dataclass(frozen=True)
class Immediate:
    """An integer, or the bits of a floating-point number."""

    value: int


@dataclass(frozen=True)
class Symbol:
    """A special register, a shared variable, a parameter or a label."""

    name: str


@dataclass(frozen=True)
class Vector:
    items: tuple[Operand, ...]


@dataclass(frozen=True)
class Negated:
    """A predicate that is read as its opposite."""

    of: Operand


@dataclass(frozen=True)
class Address:
    """[base + offset]; a tensor copy's also has the coordinates of its box."""

    base: Operand
    offset: int = 0
    coordinates: tuple[Operand, ...] = ()


Operand = Register | Immediate | Symbol | Vector | Negated | Address


@dataclass
class Instruction:
    opcode: str  # with its modifiers
    args: list[Operand]
    predicate: str | None  # the register that guards it
    negated: bool  # it runs where that is false
    text: str
    line: int  # of the PTX, from 1
    source: str = ""  # "file.py:12"
    parts: list[str] = field(init=False)  # the opcode and its modifiers

    def __post_init__(self) -> None:
        self.parts = self.opcode.split(".")

    @property
    def count(self) -> int:
        """Elements of a vector access."""
        return next((int(found[1]) for part in self.parts if (found := _WIDTH.fullmatch(part))), 1)


class Parameter(NamedTuple):
    kind: str  # the type, "b8" of a structure
    name: str
    size: int  # bytes


@dataclass
class Kernel:
    name: str
    target: str  # "sm_90a"
    threads: int  # of a block
    params: list[Parameter]
    shared: list[str]  # the names of shared variables
    registers: dict[str, int] = field(default_factory=dict)  # name -> bits
    code: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    text: str = ""  # what was parsed


def parse(text: str) -> Kernel:
    """The kernel of a module with one entry function; ValueError where there is none."""
    whole = text
    text = re.sub(r"/\*.*?\*/", lambda found: "\n" * found[0].count("\n"), text, flags=re.S)
    text = re.sub(r"//[^\n]*", "", text)
    where = _locations(text)
    text = re.sub(r"^[ \t]*\.(loc|file|section)\b[^\n]*", "", text, flags=re.M)
    entry = re.search(r"\.entry\s+(\w+)\s*\((.*?)\)([^{]*)\{", text, flags=re.S)
    target = re.search(r"\.target\s+(\w+)", text)
    if entry is None or target is None:
        raise ValueError("expected PTX with .target and one .entry")
    threads = re.search(r"\.(?:reqntid|maxntid)\s+(\d+)", entry[3])
    kernel = Kernel(
        name=entry[1],
        target=target[1],
        threads=int(threads[1]) if threads else 1,
        params=[_parameter(each) for each in entry[2].split(",") if each.strip()],
        shared=re.findall(r"\.shared[^;]*?\.b8\s+(\w+)\[\d*\]", text),
        text=whole,
    )
    _Body(kernel, where).read(text, entry.end())
    return kernel


def _parameter(text: str) -> Parameter:
    """Of ``.param .u64 .ptr .global .align 1 name``, or ``.param .align 64 .b8 name[128]``."""
    found = re.fullmatch(r"\s*\.param\s(.*?)([\w$]+)\s*(?:\[(\d+)\])?\s*", text, re.S)
    kind = found and next((each for each in re.findall(r"\.(\w+)", found[1]) if each in BITS), None)
    if not found or not kind:
        raise ValueError(f"expected a parameter of a known type, not {text.strip()!r}")
    return Parameter(kind, found[2], BITS[kind] // 8 * int(found[3] or 1))


def registers_of(operand: object) -> set[str]:
    """The names of all registers in an operand, or in a list of them."""
    match operand:
        case Register(name):
            return {name}
        case Vector(items) | list(items) | tuple(items):
            return set().union(*map(registers_of, items))
        case Negated(of):
            return registers_of(of)
        case Address(base, _, coordinates):
            return registers_of(base) | registers_of(coordinates)
    return set()


def _locations(text: str) -> Callable[[int], str]:
    """PTX line -> "file.py:12", after the last .loc at or before it."""
    files = dict(re.findall(r'\.file\s+(\d+)\s+"([^"]*)"', text))
    lines, sources = [0], [""]
    for number, line in enumerate(text.split("\n"), 1):
        if found := re.match(r"\s*\.loc\s+(\d+)\s+(\d+)", line):
            lines.append(number)
            sources.append(f"{files.get(found[1], '?').rpartition('/')[2]}:{found[2]}")
    return lambda number: sources[bisect.bisect_right(lines, number) - 1]


class _Body:
    """The statements of an entry function."""

    def __init__(self, kernel: Kernel, where: Callable[[int], str]) -> None:
        self.kernel, self.where = kernel, where
        self.scopes: list[dict[str, str]] = [{}]  # of each open scope, names in the text -> unique ones
        self.opened: list[tuple[int, dict[str, str]]] = []  # of each inner scope, its first instruction and its labels
        self.count = 0  # of inner scopes so far
        self.known: dict[str, Operand] = {}  # operands by their text, in these scopes

    def read(self, text: str, at: int) -> None:
        line = text.count("\n", 0, at) + 1
        while found := _TOKEN.match(text, at):
            kind = str(found.lastgroup)
            begun = found.start(kind)
            line += text.count("\n", at, begun)
            if kind == "open":
                self.known.clear()
                self.count += 1
                self.scopes.append({})
                self.opened.append((len(self.kernel.code), {}))
            elif kind == "close":
                self.known.clear()
                self.scopes.pop()
                if not self.scopes:
                    return
                self._close(*self.opened.pop())
            elif kind == "label":
                self._label(found[kind])
            else:
                self._statement(found[kind].strip(), line)
            at = found.end()
            line += text.count("\n", begun, at)
        raise ValueError(f"PTX line {line}: expected a statement, a label or the end of the function")

    def _close(self, first: int, labels: dict[str, str]) -> None:
        for instruction in self.kernel.code[first:]:
            target = instruction.args[-1] if instruction.args else None
            if instruction.parts[0] == "bra" and isinstance(target, Symbol):
                instruction.args[-1] = Symbol(labels.get(target.name, target.name))

    def _label(self, label: str) -> None:
        if self.opened:
            self.opened[-1][1][label] = label = f"{label}@{self.count}"
        self.kernel.labels[label] = len(self.kernel.code)

    def _statement(self, statement: str, line: int) -> None:
        if statement.startswith(".reg"):
            self._declare(statement)
        elif statement and not statement.startswith((".pragma", ".shared", ".extern")):
            self.kernel.code.append(self._instruction(statement, line))

    def _declare(self, statement: str) -> None:
        found = re.match(r"\.reg\s+\.(\w+)\s+(.*)", statement, re.S)
        if found is None:
            raise ValueError(f"expected a declaration of registers, not {statement!r}")
        self.known.clear()
        for each in found[2].split(","):
            name = each.strip()
            ranged = re.match(r"(.*)<(\d+)>$", name)
            for one in [f"{ranged[1]}{i}" for i in range(int(ranged[2]))] if ranged else [name]:
                unique = one if len(self.scopes) == 1 else f"{one}@{self.count}"
                self.scopes[-1][one] = unique
                self.kernel.registers[unique] = BITS[found[1]]

    def _instruction(self, statement: str, line: int) -> Instruction:
        predicate, negated, rest = None, False, statement
        if guard := re.match(r"@(!?)\s*([%\w$]+)\s+", statement):
            named = self._name(guard[2])
            assert isinstance(named, Register), statement
            predicate, negated, rest = named.name, bool(guard[1]), statement[guard.end() :]
        opcode, _, rest = " ".join(rest.split()).partition(" ")
        args = list(map(self._operand, _split(rest)))
        return Instruction(opcode, args, predicate, negated, statement, line, self.where(line))

    def _name(self, name: str) -> Operand:
        unique = next((scope[name] for scope in reversed(self.scopes) if name in scope), None)
        return Symbol(name) if unique is None else Register(unique)

    def _operand(self, text: str) -> Operand:
        found = self.known.get(text)
        if found is None:
            found = self.known[text] = self._parsed(text)
        return found

    def _parsed(self, text: str) -> Operand:
        if text[0] in "{(":
            return Vector(tuple(map(self._operand, _split(text[1:-1]))))
        if text[0] == "[":
            base, *coordinates = _split(text[1:-1])
            offset = 0
            if found := re.match(r"(.*?)\s*\+\s*(-?\w+)$", base):
                base, offset = found[1], int(found[2], 0)
            return Address(self._operand(base), offset, tuple(map(self._operand, coordinates)))
        if text[0] == "!":
            return Negated(self._operand(text[1:].strip()))
        if _INTEGER.match(text):
            return Immediate(_integer(text.removesuffix("U")))
        if found := _FLOAT.match(text):
            return Immediate(int(found[1], 16))
        return self._name(text)


def _split(text: str) -> list[str]:
    """At commas outside brackets, and at | between two destinations."""
    if not _NESTED.search(text):
        return [part.strip() for part in text.split(",")] if text else []
    parts, depth, current = [], 0, ""
    for char in text:
        depth += (char in "{[(") - (char in "}])")
        if char in ",|" and depth == 0:
            parts.append(current.strip())
            current = ""
        else:
            current += char
    return [*parts, current.strip()] if current.strip() else parts


def _integer(text: str) -> int:
    """C's rules: a leading 0 means octal, which Python's int() refuses."""
    sign, digits = (-1, text[1:]) if text.startswith("-") else (1, text)
    return sign * int(digits, 8 if re.fullmatch(r"0\d+", digits) else 0)
