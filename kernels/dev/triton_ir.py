"""Triton's intermediate representations as text ("TTIR", "TTGIR"), read into nested operations with their locations."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import PurePath

_LOCATION = re.compile(r" loc\((.*)\)$")
NAME = r"%[\w.$#-]+"
_NAMES = re.compile(NAME)
_RESULTS = re.compile(r"^(%[\w.$-]+)(?::(\d+))? = (.*)$")
_ALIAS = re.compile(r"^(#loc\d*) = loc\((.*)\)$")
_PLACE = re.compile(r'"([^"]*)":(\d+):\d+')
_REFERENCE = re.compile(r"#loc\d*\b")
FOR = re.compile(rf"^scf\.for (?:unsigned )?({NAME}) = ({NAME}) to {NAME} step ({NAME})(?: iter_args\((.*?)\) ->)?")


@dataclass
class Op:
    line: int  # in the text
    results: str | None
    count: int  # of results
    text: str  # from the operation's name on, without its location
    location: str = ""  # "#loc12"
    regions: list[list[Op]] = field(default_factory=list)

    @cached_property
    def name(self) -> str:
        return self.text.split(" ", 1)[0].strip('"')

    @cached_property
    def operands(self) -> list[str]:
        """The values named before the types."""
        return _NAMES.findall(self.text.partition(" : ")[0])

    @cached_property
    def result_names(self) -> list[str]:
        if self.results is None:
            return []
        return [self.results] if self.count == 1 else [f"{self.results}#{i}" for i in range(self.count)]

    def carried(self) -> list[tuple[str, str]]:
        """Of a loop: (what its body calls a value that is carried round, what that is at first)."""
        header = FOR.match(self.text)
        pairs = [pair.split(" = ") for pair in (header[4] or "").split(", ") if pair] if header else []
        return [(name, start) for name, start in pairs]


def parse(text: str) -> list[Op]:
    """The operations of a module, nested as their regions are. Labels of blocks are passed over.

    ValueError where regions do not close.
    """
    top: list[Op] = []
    open_regions = [top]
    for number, raw in enumerate(text.splitlines()):
        line, location = raw.strip(), ""
        if found := _LOCATION.search(line):
            line, location = line[: found.start()].rstrip(), found[1]
        if not line or line.startswith(("#", "^", "//")):
            continue
        if line.startswith("}"):
            open_regions.pop()
            if line.endswith("{"):  # "} else {", "} do {"
                owner = open_regions[-1][-1]
                owner.regions.append([])
                open_regions.append(owner.regions[-1])
            elif open_regions[-1]:  # a loop's place stands behind its end
                open_regions[-1][-1].location = open_regions[-1][-1].location or location
            continue
        found = _RESULTS.match(line)
        op = Op(number, found[1], int(found[2] or 1), found[3]) if found else Op(number, None, 0, line)
        op.location = location
        open_regions[-1].append(op)
        if line.endswith("{"):
            op.regions.append([])
            open_regions.append(op.regions[-1])
    if len(open_regions) != 1:
        raise ValueError("the regions of this IR do not close: is it Triton's?")
    return top


def flat(ops: list[Op]) -> Iterator[Op]:
    """Every operation, outer ones before those within."""
    for op in ops:
        yield op
        for region in op.regions:
            yield from flat(region)


def places(text: str) -> Mapping[str, str]:
    """Location -> "file.py:line" of the innermost function, for every alias of the text that has one."""
    aliases = {found[1]: found[2] for line in text.splitlines() if (found := _ALIAS.match(line))}
    resolved: dict[str, str] = {}

    def resolve(said: str) -> str:
        """The first place that the text of a location names: of a call's it is the callee's."""
        if place := _PLACE.search(said):
            reference = _REFERENCE.search(said)
            if reference is None or place.start() < reference.start():
                return f"{PurePath(place[1]).name}:{place[2]}"
        for name in _REFERENCE.findall(said):
            if name not in resolved:
                resolved[name] = ""  # for the case of a circle
                resolved[name] = resolve(aliases.get(name, ""))
            if resolved[name]:
                return resolved[name]
        return ""

    return {name: place for name in aliases if (place := resolve(name))}
