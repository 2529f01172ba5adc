"""Seeded random cases within a budget of seconds: the fixture ``fuzz`` of the tests below tests/fuzz/.

    def test_sums(fuzz):
        fuzz.run(lambda number, draw: check(draw.randint(0, 9)))

Seed and number alone decide a case, so each can run again by itself. The environment says which cases run:
SHARDFUSE_FUZZ_SEED (default: drawn from the clock), SHARDFUSE_FUZZ_SECONDS for each test (default: 60) and
SHARDFUSE_FUZZ_CASE, the number of the only case (default: all). ``make fuzz`` sets them.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random

SECONDS = 60.0


class CaseError(AssertionError):
    """A case failed. The message says which, how it runs again alone, and the failure."""


@dataclass(frozen=True)
class Fuzz:
    """Cases of the test ``name``: all from number 0 on that begin within ``seconds``, or ``only`` one."""

    name: str
    seed: int
    seconds: float = SECONDS
    only: int | None = None

    @classmethod
    def from_environment(cls, name: str, environment: Mapping[str, str] = os.environ) -> Fuzz:
        """What the variables say. Variables that are empty count as not set."""
        seed, seconds, only = (environment.get(f"SHARDFUSE_FUZZ_{each}") for each in ("SEED", "SECONDS", "CASE"))
        return cls(
            name,
            int(seed) if seed else time.time_ns() % 1_000_000,
            float(seconds) if seconds else SECONDS,
            int(only) if only else None,
        )

    def run(self, check: Callable[[int, Random], str]) -> Counter[str]:
        """Call ``check`` with each case's number and generator; returns how often it returned which word.

        At least one case runs. Prints the seed, then the number of cases of each kind and their time. Raises CaseError
        for the first case in which ``check`` raises.
        """
        print(f"\n{self.name}: seed {self.seed}, {self.seconds:.0f} s", flush=True)
        begin = time.monotonic()
        found: Counter[str] = Counter()
        slowest = (0.0, 0)
        number = self.only or 0
        while True:
            started = time.monotonic()
            try:
                found[check(number, Random(f"{self.seed}/{number}"))] += 1
            except Exception as error:
                raise CaseError(
                    f"{self.name}, seed {self.seed}: case {number} failed after {found.total()} others in "
                    f"{time.monotonic() - begin:.0f} s; again: SHARDFUSE_FUZZ_SEED={self.seed} "
                    f"SHARDFUSE_FUZZ_CASE={number}\n{error}"
                ) from error
            now = time.monotonic()
            slowest = max(slowest, (now - started, number))
            number += 1
            if self.only is not None or now - begin >= self.seconds:
                break
        kinds = ", ".join(f"{count} {kind}" for kind, count in found.most_common())
        print(
            f"{self.name}: seed {self.seed}, {found.total()} cases in {now - begin:.0f} s "
            f"(the slowest, case {slowest[1]}, in {slowest[0]:.1f} s): {kinds}",
            flush=True,
        )
        return found
