"""The parts of a host's sources that a plug-in relies on, and the differences of a version from them.

This module parses sources and does not import them. It can therefore compare a version that cannot be installed here,
from its unpacked wheel, and a registration can check before an import that may fail.
``tests/integrations/contracts.json`` records the findings in the tested versions, which ``make test`` compares where no
host is installed.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

Facts = Any  # JSON; None: the source lacks it


class Takes(NamedTuple):
    """A function or method ("Class.method") whose parameters are exactly these, ``self`` left out."""

    file: str
    name: str
    parameters: tuple[str, ...]

    def facts(self, tree: ast.Module) -> Facts:
        found = _find(tree, self.name)
        if not isinstance(found, ast.FunctionDef | ast.AsyncFunctionDef):
            return None
        return [name for name in _parameters(found) if name not in ("self", "cls")]

    def wrong(self, facts: Facts) -> str | None:
        if tuple(facts) == self.parameters:
            return None
        return f"{self.name} takes ({', '.join(facts)}), expected ({', '.join(self.parameters)})"


class Has(NamedTuple):
    """A class, or a file (""), in which these names are bound: fields, members, methods, attributes of ``self``."""

    file: str
    name: str
    members: tuple[str, ...]

    def facts(self, tree: ast.Module) -> Facts:
        found = _find(tree, self.name) if self.name else tree
        return None if found is None else sorted(_bound(found) & set(self.members))

    def wrong(self, facts: Facts) -> str | None:
        missing = [member for member in self.members if member not in facts]
        return f"{self.name or self.file} has no {', '.join(missing)}" if missing else None


class Abstract(NamedTuple):
    """A class that requires exactly these methods of its subclasses."""

    file: str
    name: str
    methods: tuple[str, ...]

    def facts(self, tree: ast.Module) -> Facts:
        found = _find(tree, self.name)
        if not isinstance(found, ast.ClassDef):
            return None
        return [
            each.name
            for each in found.body
            if isinstance(each, ast.FunctionDef)
            and any(ast.unparse(decorator).endswith("abstractmethod") for decorator in each.decorator_list)
        ]

    def wrong(self, facts: Facts) -> str | None:
        more = [method for method in facts if method not in self.methods]
        return f"{self.name} asks for {', '.join(more)}, which the plug-in lacks" if more else None


class Says(NamedTuple):
    """A function or class ("" for the file) whose code contains this text, as ``ast.unparse`` writes it; for facts that
    no signature shows.
    """

    file: str
    name: str
    text: str

    def facts(self, tree: ast.Module) -> Facts:
        found = _find(tree, self.name) if self.name else tree
        return None if found is None else self.text in ast.unparse(found)

    def wrong(self, facts: Facts) -> str | None:
        return None if facts else f"{self.name or self.file} no longer says {self.text!r}"


Expectation = Takes | Has | Abstract | Says


def key(expected: Expectation) -> str:
    """The name of an expectation in a record."""
    text = f" {expected.text!r}" if isinstance(expected, Says) else ""
    return f"{type(expected).__name__} {expected.file} {expected.name}{text}".rstrip()


def read(root: Path, contract: Sequence[Expectation]) -> dict[str, Facts]:
    """The findings for ``contract``, by :func:`key`, in the sources below ``root``, the package's folder."""
    found: dict[str, Facts] = {}
    for expected in contract:
        path = root / expected.file
        found[key(expected)] = expected.facts(_parsed(path)) if path.is_file() else None
    return found


def differences(facts: dict[str, Facts], contract: Sequence[Expectation]) -> list[str]:
    """The violations of ``contract``, one line each."""
    wrong: list[str] = []
    for expected in contract:
        found = facts[key(expected)]
        missing = f"{expected.file} has no {expected.name}" if expected.name else f"there is no {expected.file}"
        wrong.append(missing if found is None else expected.wrong(found) or "")
    return list(dict.fromkeys(filter(None, wrong)))


@functools.cache
def _parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


_Scope = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def _find(tree: ast.AST, name: str) -> ast.AST | None:
    """The last definition of a dotted name, also inside conditions and blocks."""
    found: ast.AST | None = tree
    for part in name.split("."):
        assert found is not None
        found = next((each for each in reversed(_definitions(found)) if each.name == part), None)
        if found is None:
            return None
    return found


def _definitions(scope: ast.AST) -> list[Any]:
    """The functions and classes of a scope, without those nested in others."""
    return _collect(scope, lambda node: [node] if isinstance(node, _Scope) else [])


def _bound(scope: ast.AST) -> set[str]:
    names: set[str] = {each.name for each in _definitions(scope)}
    names.update(_collect(scope, _assigned))
    for method in _definitions(scope) if isinstance(scope, ast.ClassDef) else ():
        names.update(name[5:] for name in _collect(method, _assigned) if name.startswith("self."))
    return names


def _assigned(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Assign):
        parts = [each for target in node.targets for each in getattr(target, "elts", [target])]
        return [ast.unparse(part) for part in parts]
    if isinstance(node, ast.AnnAssign):
        return [ast.unparse(node.target)]
    if isinstance(node, ast.ImportFrom | ast.Import):
        return [(alias.asname or alias.name).partition(".")[0] for alias in node.names]
    return []


def _collect(scope: ast.AST, take: Callable[[ast.AST], list[Any]]) -> list[Any]:
    found: list[Any] = []
    for child in ast.iter_child_nodes(scope):
        found += take(child)
        if not isinstance(child, _Scope):
            found += _collect(child, take)
    return found


def _parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    args = function.args
    names = [each.arg for each in (*args.posonlyargs, *args.args)]
    names += [f"*{args.vararg.arg}"] if args.vararg else []
    names += [each.arg for each in args.kwonlyargs]
    return names + ([f"**{args.kwarg.arg}"] if args.kwarg else [])
