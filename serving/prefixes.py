"""The longest end of a text that is the beginning of one of some strings, letter by letter.

This is the automaton of Aho and Corasick (CACM 18, 1975): each prefix of a string is a node, with a link to its longest
proper suffix that is a prefix, too. The time is linear in the text. Nodes are made as a text first reaches them, so a
long string costs little until an answer repeats it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from itertools import accumulate
from weakref import WeakValueDictionary

import numpy as np


class Prefixes:
    """The prefixes of ``strings``, which are not empty. Answers to a request share them: see :meth:`of`.

    The strings are sorted, so those with a common prefix are neighbours. Of the first of these, that prefix's last
    letter has the number ``node`` among all letters, from 1 on; 0 is the empty prefix. The arrays hold, for each node
    so far: its string, the end of the neighbours, its link, and the length of the longest string that ends there. Their
    pages take memory when they are first written to.
    """

    def __init__(self, strings: tuple[str, ...]) -> None:
        self._given = strings
        self.begins = frozenset(each[0] for each in strings)
        self._strings = sorted(set(strings))
        self._starts = [0, *accumulate(map(len, self._strings))]
        size = self._starts[-1] + 1
        self._string, self._end, self._link, self.complete = (
            np.zeros(size, np.int32 if size < 1 << 31 else np.int64).data for _ in range(4)
        )
        self._end[0] = len(self._strings)

    @classmethod
    def of(cls, strings: tuple[str, ...]) -> Prefixes:
        """The prefixes of ``strings``, made if no other answer to the same request has them."""
        found = _SHARED.get(id(strings))  # which nothing else has while they exist, since they hold the strings
        if found is None:
            found = _SHARED[id(strings)] = cls(strings)
        return found

    def length(self, node: int) -> int:
        """The letters of a node's prefix."""
        return node - self._starts[self._string[node]] if node else 0

    def text(self, node: int, most: int | None = None) -> str:
        """A node's prefix, or its first ``most`` letters."""
        length = self.length(node)
        return self._strings[self._string[node]][: length if most is None else min(most, length)]

    def step(self, node: int, letter: str) -> int:
        """The node of the longest end of ``node``'s prefix and ``letter``."""
        while True:
            child, string = self._child(node, letter)
            if child or not node:
                break
            node = self._link[node]
        if child and not self._end[child]:
            self._make(node, child, string, letter)
        return child

    def _child(self, node: int, letter: str) -> tuple[int, int]:
        """The node of ``node``'s prefix and ``letter``, made or not, and its string; (0, 0) if there is none."""
        string, end = self._string[node], self._end[node]
        at = node - self._starts[string] if node else 0
        if self._strings[string][at : at + 1] != letter:
            if end - string == 1:
                return 0, 0
            string = bisect_left(self._strings, letter, string, end, key=lambda each: each[at : at + 1])
            if string == end or self._strings[string][at : at + 1] != letter:
                return 0, 0
        return self._starts[string] + at + 1, string

    def _make(self, parent: int, child: int, string: int, letter: str) -> None:
        """Make ``child`` and the nodes that it is linked to, the last of these first."""
        new = []
        while True:
            new.append((parent, child, string))
            link, parent = 0, self._link[parent] if parent else -1
            while parent >= 0:
                link, string = self._child(parent, letter)
                if link or not parent:
                    break
                parent = self._link[parent]
            if not link or self._end[link]:
                break
            child = link
        for parent, child, string in reversed(new):
            at, end = child - self._starts[string], self._end[parent]
            if end - string > 1:
                end = bisect_right(self._strings, letter, string, end, key=lambda each: each[at - 1 : at])
            whole = len(self._strings[string]) == at
            self._string[child], self._link[child] = string, link
            self.complete[child] = at if whole else self.complete[link]
            self._end[child] = end  # the last: another thread may read it
            link = child


_SHARED: WeakValueDictionary[int, Prefixes] = WeakValueDictionary()
