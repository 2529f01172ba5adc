"""The modules that a module needs, found in the sources: nothing is imported.

Imports in functions count, those for type checkers do not. Beside imports, ``f"{__package__}.launch"`` names a module,
as the ops do with what they import when a kernel first runs.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from pathlib import Path

Name = tuple[str, ...]  # of a module, below the root package: ("kernels", "norm", "op")


@dataclass
class Closure:
    """Modules that need no other modules of their package.

    Attributes:
        modules: the source of each, by name.
        folders: packages from which no module takes a name: only their place in the tree is needed.
        outside: for each package imported from elsewhere, the modules that import it.
    """

    modules: dict[Name, Path] = field(default_factory=dict)
    folders: set[Name] = field(default_factory=set)
    outside: dict[str, set[Name]] = field(default_factory=dict)


def closure(root: Path, start: Name) -> Closure:
    """What ``start`` needs of the package in the folder ``root``.

    Raises ValueError for an import of a module that is not there, or of a name of the root package itself.
    """
    found = Closure()
    waiting = [start]
    while waiting:
        name = waiting.pop()
        if name in found.modules:
            continue
        source = _source(root, name)
        if source is None:
            raise ValueError(
                f"closure: there is no module {'.'.join(name)} in {root}; the package's sources are expected"
            )
        found.modules[name] = source
        reader = _Reader(root, name, is_package=source.name == "__init__.py")
        reader.visit(ast.parse(source.read_bytes()))
        waiting += reader.needs
        for package in reader.outside:
            found.outside.setdefault(package, set()).add(name)
    parents = {name[:length] for name in found.modules for length in range(1, len(name))}
    found.folders = parents - found.modules.keys()
    return found


def _source(root: Path, name: Name) -> Path | None:
    """The file of a module or package; None: there is none."""
    path = root.joinpath(*name)
    for candidate in (path / "__init__.py", path.parent / f"{path.name}.py"):
        if candidate.is_file():
            return candidate
    return None


class _Reader(ast.NodeVisitor):
    """Reads one module: ``needs`` are modules of its own package, ``outside`` the names of other packages."""

    def __init__(self, root: Path, name: Name, *, is_package: bool) -> None:
        self._root = root
        self._name = name
        self._package = name if is_package else name[:-1]
        self.needs: list[Name] = []
        self.outside: set[str] = set()

    def visit_If(self, node: ast.If) -> None:
        if "TYPE_CHECKING" not in ast.unparse(node.test):
            return self.generic_visit(node)
        for statement in node.orelse:
            self.visit(statement)

    def visit_Import(self, node: ast.Import) -> None:
        self.outside.update(alias.name.partition(".")[0] for alias in node.names)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        module: Name = tuple(node.module.split(".")) if node.module else ()
        if not node.level:
            self.outside.add(module[0])
            return
        base = self._package[: len(self._package) - node.level + 1] + module
        for alias in node.names:
            inner = (*base, alias.name)
            if _source(self._root, inner) is not None:
                self.needs.append(inner)
            elif base:
                self.needs.append(base)
            else:
                raise ValueError(
                    f"closure: {'.'.join(self._name)} takes {alias.name} from the root package, whose __init__ a build "
                    "replaces; import it from the module that defines it"
                )

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        head, *rest = node.values
        if isinstance(head, ast.FormattedValue) and ast.unparse(head.value) == "__package__":
            text = "".join(str(part.value) for part in rest if isinstance(part, ast.Constant))
            self.needs.append((*self._package, *text.strip(".").split(".")))
        self.generic_visit(node)
