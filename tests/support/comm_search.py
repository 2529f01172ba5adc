"""The semantics of comm_model.py's steps, and a search through every interleaving of them.

**Memory** is as weak as PTX's (Lustig, Sahasrabuddhe, Giroux, "A Formal Analysis of the NVIDIA PTX Memory Consistency
Model", ASPLOS 2019). A rank's writes reach its peers in any order, and a read may be satisfied early, with the memory's
contents of that time. Of a write and a read in two programs, only *happens before* is certain (Lamport, "Time, Clocks,
and the Ordering of Events in a Distributed System", CACM 1978): it holds within a program, from a release store to the
acquire load that gets its value, and along chains of both, so that a release also passes on the writes that the program
has acquired (cumulativity). A vector clock records it: the number of steps of each program that happen before a
program's next one. A release stores the clock in the flag, an acquire joins it to its own; relaxed ones do neither.

So a read gets the right value in every execution if the write happens before it, and if it happens before the next
write to the same place. If one of the two is missing, some execution fails, whichever order the search explores: that
is the violation, and the model needs no stale values. Flags race on purpose. A load may get any value of a flag, except
those that a later value known to the reader has replaced.

**The properties**, checked at every step of every order:

- *early read*: each write of a chunk happens before every read of it, which thus gets (source, this exchange);
- *reuse before consumption*: a write into a slot happens after all reads and writes of its last exchange there;
- *epochs disagree*: an exchange has the same number in every program of every rank;
- *stuck*: every order ends with all exchanges finished, or, where ranks may die and waits may time out, with every
  other rank finished or given up: there is no wait without a timeout.

After a wait times out a program "stops". A "silent" program continues with its exchange and with those already
launched: it reads in vain and writes, perhaps into slots that other programs still read, but raises no flag. Then
*wrong unnoticed* means that a rank whose slot was overwritten too early finished without an error. A program that "goes
on" also raises flags; a read of its later writes, which may depend on data that it should have read, is an early read.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from comm_model import Model, Step, reached

Clock = tuple[int, ...]  # the number of steps of each program that happen before an event
FlagKey = tuple[int, int, int, int]  # owner of the pad, phase, source, chunk
NEVER = 10**9
DEAD = -1


class Message(NamedTuple):
    """A value that a flag holds or held."""

    value: int
    clock: Clock  # an acquire joins it
    writer: int
    position: int  # of the store among the writer's steps


class State(NamedTuple):
    """Everything that determines the next steps."""

    at: tuple[int, ...]  # each program's next step; DEAD
    clocks: tuple[Clock, ...]  # the steps of other programs that happen before it
    flags: tuple[tuple[Message, ...], ...]  # each flag's values, in order, that a reader may still get
    counters: tuple[tuple[int, Clock], ...]  # arrivals, and the joined clocks of the arrived programs
    devices: tuple[tuple[int, int, Clock], ...]  # of each rank: epoch, finished kernels, their clock
    gave_up: tuple[int, ...]  # the step at which each program gave up, or NEVER
    robbed: frozenset[int]  # ranks whose slot a program that gave up overwrote too early


class Violation(Exception):
    """A step that breaks a property."""

    def __init__(self, rule: str, text: str) -> None:
        super().__init__(f"{rule}: {text}")
        self.rule = rule


class Machine:
    """The steps that a state allows, and the next states."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.programs = len(model.steps)
        self.rank_of = [i // model.programs for i in range(self.programs)]
        self._flag: dict[FlagKey, int] = {}
        self._counter: dict[tuple[int, str, int, int], int] = {}  # (owner, kind, phase, peer)
        for who, steps in enumerate(model.steps):
            for step in steps:
                self._place(self.rank_of[who], step)
        self._needs = [[self._needed(who, step) for step in steps] for who, steps in enumerate(model.steps)]

    def start(self) -> State:
        """The initial state: no program has begun; flags hold the epoch before the first."""
        nothing = (0,) * self.programs
        before = Message(self._value(0), nothing, 0, 0)
        return State(
            at=nothing,
            clocks=(nothing,) * self.programs,
            flags=((before,),) * len(self._flag),
            counters=((0, nothing),) * len(self._counter),
            devices=((0, 0, nothing),) * self.model.world,
            gave_up=(NEVER,) * self.programs,
            robbed=frozenset(),
        )

    def following(self, state: State, who: int) -> State | None:
        """The state after program ``who``'s next step, None if it must wait. Raises Violation."""
        if not self.alive(state, who):
            return None
        step = self.model.steps[who][state.at[who]]
        return getattr(self, f"_{step.kind}")(state, who, step)

    def alive(self, state: State, who: int) -> bool:
        """Whether a program has steps left and can still make them."""
        stopped = self.model.after_timeout == "stops" and state.gave_up[who] != NEVER
        return state.at[who] != DEAD and not stopped and state.at[who] < len(self.model.steps[who])

    def check_end(self, state: State) -> None:
        """Raise Violation unless a state without successors is a valid end."""
        stuck = [self.next_step(state, who) for who in range(self.programs) if self.alive(state, who)]
        if stuck:
            raise Violation("stuck", f"for ever {', and '.join(stuck)}")
        for who, steps in enumerate(self.model.steps):
            if self.rank_of[who] in state.robbed and state.at[who] == len(steps) and state.gave_up[who] == NEVER:
                raise Violation("wrong unnoticed", f"{self.name(who)} finished without what it should have read")

    def is_local(self, state: State, who: int) -> bool:
        """Whether the next step affects no other program: see :func:`explore`."""
        if not self.alive(state, who):
            return False
        step = self.model.steps[who][state.at[who]]
        if step.kind in ("arrive", "end"):
            count, _ = state.counters[self._counter[self.rank_of[who], step.kind, step.phase, step.peer]]
            return count == self.model.programs - 1
        return step.kind in ("write", "read", "wait") or (step.kind == "begin" and self.model.programs == 1)

    def giving_up(self, state: State, who: int) -> State | None:
        """The state after program ``who``'s wait timed out, None where it cannot."""
        if not self.alive(state, who):
            return None
        at = state.at[who]
        step, stops = self.model.steps[who][at], self.model.after_timeout == "stops"
        # No kernel is launched after one that gave up, so a program that waits for its end cannot continue.
        mates = [i for i in range(self.programs) if self.rank_of[i] == self.rank_of[who]]
        unlaunched = stops and step.kind == "begin" and any(state.gave_up[i] != NEVER for i in mates)
        if not (step.timeout or unlaunched):
            return None
        gave_up = _put(state.gave_up, who, min(at, state.gave_up[who]))
        return state._replace(gave_up=gave_up, at=state.at if stops else _put(state.at, who, at + 1))

    def dying(self, state: State, rank: int) -> State:
        """The state after ``rank`` has died, with all its programs."""
        return state._replace(at=tuple(DEAD if self.rank_of[i] == rank else at for i, at in enumerate(state.at)))

    # ---- data: only the program advances; the checks use happens-before

    def _write(self, state: State, who: int, step: Step) -> State:
        missing = self._missing(state, who)
        if missing and state.gave_up[who] != NEVER:
            state = state._replace(robbed=state.robbed | {step.peer})
        elif missing:
            raise Violation(
                "reuse before consumption", f"nothing makes {missing} happen before {self._tell(who, step)}"
            )
        return self._past(state, who)

    def _read(self, state: State, who: int, step: Step) -> State:
        if state.gave_up[who] == NEVER:
            needs = self._needs[who][state.at[who]]
            missing = self._missing(state, who)
            if not needs:
                raise Violation("early read", f"nobody writes what {self._tell(who, step)}")
            if missing:
                raise Violation("early read", f"nothing makes {missing} happen before {self._tell(who, step)}")
            for other, position in needs:
                if state.gave_up[other] < position:
                    told = self._tell(other, self.model.steps[other][position])
                    raise Violation("early read", f"{self._tell(who, step)}, but {told} after it gave up")
        return self._past(state, who)

    # ---- flags

    def _raise(self, state: State, who: int, step: Step) -> State:
        if self.model.after_timeout == "silent" and state.gave_up[who] != NEVER:
            return self._past(state, who)
        key = (step.peer, step.phase, self.rank_of[who], step.chunk)
        return self._past(self._stored(state, who, key, step, self._value(step.epoch)), who)

    def _reset(self, state: State, who: int, step: Step) -> State:
        key = (self.rank_of[who], step.phase, step.peer, step.chunk)
        return self._past(self._stored(state, who, key, step, 0), who)

    def _fill(self, state: State, who: int, step: Step) -> State:
        for key in self._flag:
            if key[0] == self.rank_of[who]:
                state = self._stored(state, who, key, step, self._value(step.epoch))
        return self._past(state, who)

    def _wait(self, state: State, who: int, step: Step) -> State | None:
        # A load may get any value that no later value known to the reader has replaced (coherence). The search takes
        # the first that ends the wait: a later one would only add to the happens-before of the following steps.
        messages = state.flags[self._flag[self.rank_of[who], step.phase, step.peer, step.chunk]]
        for message, later in zip(messages, (*messages[1:], None)):
            stale = later is not None and self._before(state, who, later.writer, later.position)
            if not stale and reached(message.value, self._value(step.epoch), self.model.modulus):
                return self._past(state, who, message.clock if step.order == "acquire" else None)
        return None

    # ---- a rank's own programs, and the host that launches them

    def _begin(self, state: State, who: int, step: Step) -> State | None:
        epoch, kernels, clock = state.devices[self.rank_of[who]]
        if kernels + 1 < step.epoch:
            return None
        if epoch + 1 != step.epoch:
            raise Violation("epochs disagree", f"{self._tell(who, step)}, which it takes for exchange {epoch + 1}")
        return self._past(state, who, clock)

    def _arrive(self, state: State, who: int, step: Step) -> State:
        state, arrivals = self._count(state, who, step)
        past = self._past(state, who)
        # A program that is not the last to arrive skips the next step.
        return past if arrivals == step.of else past._replace(at=_put(past.at, who, past.at[who] + 1))

    def _end(self, state: State, who: int, step: Step) -> State:
        state, arrivals = self._count(state, who, step._replace(order="acq_rel"))
        rank = self.rank_of[who]
        epoch, kernels, known = state.devices[rank]
        if arrivals == step.of:
            epoch += 1
        if arrivals == self.model.programs:
            kernels, known = kernels + 1, self._released(state, who, Step("end", step.epoch, order="release"))
            state = self._without_old_news(state, rank, known)
        # The counter holds the program's clock, and the next kernel's programs begin with all such clocks.
        clocks = _put(state.clocks, who, (0,) * self.programs)
        return self._past(
            state._replace(devices=_put(state.devices, rank, (epoch, kernels, known)), clocks=clocks), who
        )

    def _barrier(self, state: State, who: int, step: Step) -> State | None:
        steps = [self.model.steps[i][at : at + 1] if at >= 0 else [] for i, at in enumerate(state.at)]
        if any(not found or found[0].kind != "barrier" for found in steps):
            return None
        known = tuple(state.at)
        return state._replace(at=tuple(at + 1 for at in state.at), clocks=(known,) * self.programs)

    # ---- helpers

    def _count(self, state: State, who: int, step: Step) -> tuple[State, int]:
        """Add one to a counter, which restarts when all programs have: the new state, and the arrivals so far."""
        index = self._counter[self.rank_of[who], step.kind, step.phase, step.peer]
        count, known = state.counters[index]
        if step.order == "acq_rel":
            known = _join(known, self._released(state, who, Step("arrive", step.epoch, order="release")))
            state = state._replace(clocks=_put(state.clocks, who, _join(state.clocks[who], known)))
        count += 1
        entry = (0, (0,) * self.programs) if count == self.model.programs else (count, known)
        return state._replace(counters=_put(state.counters, index, entry)), count

    def _stored(self, state: State, who: int, key: FlagKey, step: Step, value: int) -> State:
        """The state with a flag's next value."""
        clock = _news(self._released(state, who, step), state.devices[key[0]][2])
        flag = self._flag[key]
        new = (*state.flags[flag], Message(value, clock, who, state.at[who]))
        return state._replace(flags=_put(state.flags, flag, new))

    def _without_old_news(self, state: State, rank: int, known: Clock) -> State:
        """Remove from a rank's flags the clocks that all its programs will know, to merge otherwise equal states."""
        flags = list(state.flags)
        for key, i in self._flag.items():
            if key[0] == rank:
                readable = [
                    message
                    for message, later in zip(flags[i], (*flags[i][1:], None))
                    if later is None or known[later.writer] <= later.position
                ]
                flags[i] = tuple(message._replace(clock=_news(message.clock, known)) for message in readable)
        return state._replace(flags=tuple(flags))

    def _released(self, state: State, who: int, step: Step) -> Clock:
        """The clock that an acquire gets from a store of program ``who``: all that happens before it, or nothing."""
        if step.order != "release":
            return (0,) * self.programs
        return _put(state.clocks[who], who, state.at[who])

    @staticmethod
    def _past(state: State, who: int, learned: Clock | None = None) -> State:
        clocks = state.clocks
        if learned is not None:
            clocks = _put(clocks, who, _join(clocks[who], learned))
        return state._replace(at=_put(state.at, who, state.at[who] + 1), clocks=clocks)

    @staticmethod
    def _before(state: State, who: int, other: int, position: int) -> bool:
        """Whether ``other``'s step happens before ``who``'s next one."""
        return position < (state.at[who] if other == who else state.clocks[who][other])

    def _missing(self, state: State, who: int) -> str:
        """The first access that must happen before ``who``'s next step but is not ordered; "" if there is none."""
        for other, position in self._needs[who][state.at[who]]:
            if not self._before(state, who, other, position):
                return f"'{self._tell(other, self.model.steps[other][position])}'"
        return ""

    def _needed(self, who: int, step: Step) -> list[tuple[int, int]]:
        """The accesses, as (program, position), that must happen before a read or a write; [] for other steps."""
        if step.kind == "read":
            made = step._replace(kind="write", peer=self.rank_of[who])
            return [
                (other, position)
                for other, steps in enumerate(self.model.steps)
                for position, found in enumerate(steps)
                if self.rank_of[other] == step.peer and found == made
            ]
        if step.kind == "write":
            last = {}  # of each program: program order covers its earlier ones
            for other, steps in enumerate(self.model.steps):
                for position, found in enumerate(steps):
                    earlier = found.epoch < step.epoch and (step.epoch - found.epoch) % self.model.slots == 0
                    if earlier and self._touches(other, found) == step.peer:
                        last[other] = position
            return list(last.items())
        return []

    def _touches(self, who: int, step: Step) -> int | None:
        """The rank whose slot a step reads or writes."""
        return {"read": self.rank_of[who], "write": step.peer}.get(step.kind)

    def _place(self, rank: int, step: Step) -> None:
        if step.kind == "raise":
            self._flag.setdefault((step.peer, step.phase, rank, step.chunk), len(self._flag))
        elif step.kind in ("wait", "reset"):
            self._flag.setdefault((rank, step.phase, step.peer, step.chunk), len(self._flag))
        elif step.kind in ("arrive", "end"):
            self._counter.setdefault((rank, step.kind, step.phase, step.peer), len(self._counter))

    def _value(self, epoch: int) -> int:
        return (self.model.first_epoch + epoch - 1) % self.model.modulus

    def _tell(self, who: int, step: Step) -> str:
        return f"{self.name(who)} {step}"

    def name(self, who: int) -> str:
        rank, part = divmod(who, self.model.programs)
        return f"rank {rank}" + (f", program {part}," if self.model.programs > 1 else "")

    def describe(self, before: State, after: State) -> str:
        """Describe the step from one state to the next."""
        moved = [
            i for i in range(self.programs) if (before.at[i], before.gave_up[i]) != (after.at[i], after.gave_up[i])
        ]
        if after.at[moved[0]] == DEAD:
            return f"rank {self.rank_of[moved[0]]} dies"
        if before.gave_up != after.gave_up:
            return f"{self.name(moved[0])} gives up: {self.model.steps[moved[0]][before.at[moved[0]]]}"
        return "; ".join(self.next_step(before, who) for who in moved)

    def next_step(self, state: State, who: int) -> str:
        return self._tell(who, self.model.steps[who][state.at[who]])


def _put(items: tuple, index: int, item: object) -> tuple:
    return (*items[:index], item, *items[index + 1 :])


def _news(clock: Clock, known: Clock) -> Clock:
    """The entries of ``clock`` beyond the known ones: joined to a clock that has those, both give the same."""
    return tuple(new if new > old else 0 for new, old in zip(clock, known))


def _join(one: Clock, other: Clock) -> Clock:
    return tuple(map(max, one, other))


# ------------------------------------------------------------------------------------------------------- the search


class Result(NamedTuple):
    """The result of a search."""

    states: int
    rule: str = ""  # the violated property, "" if all hold
    trace: str = ""  # the shortest path there: a line for each step, then the fault


def explore(model: Model, *, timeouts: bool = False, dies: int | None = None, reduced: bool = True) -> Result:
    """Explore every order of all programs' steps, breadth first, until a property fails.

    timeouts: any wait may time out, at once or later, whether the peer is dead or slow
    dies: a rank that may die before any of its steps
    reduced: where a program's next step is *local*, explore no other program's. A local step and the other programs'
        steps do not affect each other: a read or a write depends only on its happens-before, which is the program's own
        past; a wait that can end takes the same value however often the flag is raised again; the last to arrive at a
        counter finds the same count, and no other program reads it before this exchange is over. So each order can be
        rearranged to make that step first, with the same effect for all programs. No step is postponed for ever,
        because no state occurs twice in an order; and a rank's death has the same effect before the step and after it
        (ample sets; Clarke, Grumberg, Peled, "Model Checking", 1999, ch. 10). Without the reduction the counterexample
        is the shortest possible.
    """
    machine = Machine(model)
    start = machine.start()
    came_from: dict[State, State | None] = {start: None}
    queue = deque([start])
    while queue:
        state = queue.popleft()
        try:
            found = _successors(machine, state, timeouts, dies, reduced)
            if not found:
                machine.check_end(state)
        except Violation as violation:
            return Result(len(came_from), violation.rule, _trace(machine, came_from, state, str(violation)))
        for new in found:
            if new not in came_from:
                came_from[new] = state
                queue.append(new)
    return Result(len(came_from))


def _successors(machine: Machine, state: State, timeouts: bool, dies: int | None, reduced: bool) -> list[State]:
    everyone = range(machine.programs)
    if reduced:
        for who in everyone:
            if machine.is_local(state, who):
                new = machine.following(state, who)
                late = machine.giving_up(state, who) if timeouts else None
                if new is not None:
                    return [new] if late is None else [new, late]
    found = [new for who in everyone if (new := machine.following(state, who)) is not None]
    if timeouts:
        found += [new for who in everyone if (new := machine.giving_up(state, who)) is not None]
    if dies is not None and state.at[dies * machine.model.programs] != DEAD:
        found.append(machine.dying(state, dies))
    return found


def _trace(machine: Machine, came_from: dict[State, State | None], state: State, wrong: str) -> str:
    lines = [wrong]
    before = came_from[state]
    while before is not None:
        lines.append(machine.describe(before, state))
        state, before = before, came_from[before]
    steps = [f"{i:3}  {line}" for i, line in enumerate(reversed(lines[1:]), 1)]
    return "\n".join([*steps, "  => " + lines[0]])
