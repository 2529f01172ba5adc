"""Who runs next, and how late what ranks store is seen: each schedule is one way in which GPUs may run."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from ....runtime.names import expected


class Actor(Protocol):
    """A rank, or one of its streams of copies."""

    rank: int
    copies: bool
    turn: int  # the number of its last turn


Some = TypeVar("Some", bound=Actor)


@dataclass(frozen=True)
class Schedule:
    """What a GPU leaves open. No result may depend on it."""

    order: str = "turns"  # of the actors: "turns", "reversed" (the highest rank as far as it can) or "random"
    late: int | None = None  # the rank that runs only when no other can; -1 is the last
    copies: str = "turns"  # the copy engines: "turns" with their ranks, "first" or "last"
    blocks: str = "together"  # of a launch; "first" or "last": one runs as far as it can; "random"
    resident: int = 0  # blocks that have begun and not ended, at most; 0: all
    flags: str = "now"  # when peers see a raised flag: "now", "late" (when nothing else can go on) or "random"
    stores: float = 0.0  # the share of stores under way that get there at each turn, though no release asks for it
    seed: int = 0

    def choice(self) -> Callable[[Sequence[Some]], Some]:
        """A function that chooses among actors that may go on."""
        draw = random.Random(self.seed)  # noqa: S311 - repeated by its seed

        def chosen(actors: Sequence[Some]) -> Some:
            if self.late is not None:
                last = self.late if self.late >= 0 else max(each.rank for each in actors)
                actors = [each for each in actors if each.rank != last] or actors
            if self.copies != "turns":
                actors = [each for each in actors if each.copies == (self.copies == "first")] or actors
            if self.order == "random":
                return draw.choice(list(actors))
            if self.order == "reversed":
                return max(actors, key=lambda each: (each.rank, each.copies))
            return min(actors, key=lambda each: each.turn)

        return chosen


SCHEDULES: dict[str, Schedule] = {
    "turns": Schedule(),
    "reversed": Schedule(order="reversed"),
    "first-late": Schedule(late=0),
    "last-late": Schedule(late=-1),
    "blocks-first": Schedule(blocks="first"),
    "blocks-last": Schedule(blocks="last", order="reversed"),
    "one-resident": Schedule(resident=1, late=0),
    "flags-late": Schedule(flags="late"),
    "copies-first": Schedule(copies="first", late=0),
    "copies-last": Schedule(copies="last"),
    "random": Schedule(order="random", blocks="random", flags="random", stores=0.3),
}


def schedule(name: str, seed: int = 0) -> Schedule:
    """The schedule called ``name``; "random" with a seed of its own. ValueError lists the known ones."""
    if name not in SCHEDULES:
        raise ValueError(f"no schedule called {name!r}: {expected(name, SCHEDULES, 'known are')}")
    found = SCHEDULES[name]
    return Schedule(**{**found.__dict__, "seed": seed}) if name == "random" else found
