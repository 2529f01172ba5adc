"""What the steps of comm_model.py may come to, and a search through every order in which they can be made.

**Memory** is as weak as PTX's (Lustig, Sahasrabuddhe, Giroux, "A Formal Analysis of the NVIDIA PTX Memory Consistency
Model", ASPLOS 2019). What a rank writes reaches its peers in any order, and a read may be answered early, with what the
memory held then. All that is certain about a write and a read in two programs is whether one *happens before* the other
(Lamport, "Time, Clocks, and the Ordering of Events in a Distributed System", CACM 1978): within a program, from a
release store to the acquire load that gets its value, and along chains of both, so that what a program has heard of
goes along with what it says (cumulativity). A vector clock keeps that: how many steps of each program happen before a
program's next one. A release puts the clock into the flag, an acquire joins it to its own; relaxed ones do neither.

So a read gets what it should in every execution if the write happens before it, and if it happens before the write that
comes into the same place next. Where one of the two is missing, some execution goes wrong, whatever order was looked
at: that is the violation, and no stale values need to be made up. Flags are read and written in a race, on purpose. A
load gets any value whose place no later one that the reader knows of has taken.

**The properties**, checked at every step of every order:

- *early read*: each write of a chunk happens before every read of it, which thus gets (source, this exchange);
- *reuse before consumption*: a write into a slot happens after all reads and writes of its last exchange there;
- *epochs disagree*: an exchange has the same number in every program of every rank;
- *stuck*: every order ends with all exchanges finished, or, where ranks may die and waits run out of time, with every
  other rank finished or given up: there is no wait without a timeout.

After a wait that ran out of time a program "stops". One that is "silent" goes on, with its exchange and with those that
have been launched already: it reads, for nothing, and writes, perhaps into slots that are still being read, but raises
no flag. Then *wrong unnoticed* says that a rank whose slot was written into too early finished all the same. One that
"goes on" raises flags, too; who reads what it wrote since, which may be made of what it should have read, reads early.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from comm_model import Model, Step, reached

Clock = tuple[int, ...]  # steps of each program that happen before something
FlagKey = tuple[int, int, int, int]  # whose pad, phase, source, chunk
NEVER = 10**9
DEAD = -1


class Message(NamedTuple):
    """A value that a flag holds or held."""

    value: int
    clock: Clock  # what is known to whoever acquires it
    writer: int
    position: int  # of the store among the writer's steps


class State(NamedTuple):
    """Everything that the future depends on."""

    at: tuple[int, ...]  # each program's next step; DEAD
    clocks: tuple[Clock, ...]  # what happens before it, in other programs
    flags: tuple[tuple[Message, ...], ...]  # the values of each, in order, that a reader may still get
    counters: tuple[tuple[int, Clock], ...]  # arrivals, and what those who arrived knew
    devices: tuple[tuple[int, int, Clock], ...]  # of each rank: its epoch, the kernels it finished, what they knew
    gave_up: tuple[int, ...]  # the step at which each program gave up, or NEVER
    robbed: frozenset[int]  # ranks whose slot somebody who gave up wrote into too early


class Violation(Exception):
    """A step that breaks a property."""

    def __init__(self, rule: str, text: str) -> None:
        super().__init__(f"{rule}: {text}")
        self.rule = rule


class Machine:
    """The steps that a state allows, and the states they lead to."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.programs = len(model.steps)
        self.rank_of = [i // model.programs for i in range(self.programs)]
        self._flag: dict[FlagKey, int] = {}
        self._counter: dict[tuple[int, str, int, int], int] = {}  # (whose, kind, phase, peer)
        for who, steps in enumerate(model.steps):
            for step in steps:
                self._place(self.rank_of[who], step)
        self._needs = [[self._needed(who, step) for step in steps] for who, steps in enumerate(model.steps)]

    def start(self) -> State:
        """Nobody has begun; flags stand at the epoch before the first."""
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
        """The state after ``who``'s next step, None if it has to wait. Raises Violation."""
        if not self.alive(state, who):
            return None
        step = self.model.steps[who][state.at[who]]
        return getattr(self, f"_{step.kind}")(state, who, step)

    def alive(self, state: State, who: int) -> bool:
        """Whether a program has steps to make and nothing that keeps it from ever making them."""
        stopped = self.model.after_timeout == "stops" and state.gave_up[who] != NEVER
        return state.at[who] != DEAD and not stopped and state.at[who] < len(self.model.steps[who])

    def check_end(self, state: State) -> None:
        """Raise Violation unless a state that nothing follows is a good end."""
        stuck = [self.next_step(state, who) for who in range(self.programs) if self.alive(state, who)]
        if stuck:
            raise Violation("stuck", f"for ever {', and '.join(stuck)}")
        for who, steps in enumerate(self.model.steps):
            if self.rank_of[who] in state.robbed and state.at[who] == len(steps) and state.gave_up[who] == NEVER:
                raise Violation("wrong unnoticed", f"{self.name(who)} finished without what it should have read")

    def is_local(self, state: State, who: int) -> bool:
        """Whether the next step concerns nobody else: see :func:`explore`."""
        if not self.alive(state, who):
            return False
        step = self.model.steps[who][state.at[who]]
        if step.kind in ("arrive", "end"):
            count, _ = state.counters[self._counter[self.rank_of[who], step.kind, step.phase, step.peer]]
            return count == self.model.programs - 1
        return step.kind in ("write", "read", "wait") or (step.kind == "begin" and self.model.programs == 1)

    def giving_up(self, state: State, who: int) -> State | None:
        """The state after ``who``'s wait ran out of time, None where it cannot."""
        if not self.alive(state, who):
            return None
        at = state.at[who]
        step, stops = self.model.steps[who][at], self.model.after_timeout == "stops"
        # A kernel is not launched after one that gave up, so what waits for that one has no other end.
        mates = [i for i in range(self.programs) if self.rank_of[i] == self.rank_of[who]]
        unlaunched = stops and step.kind == "begin" and any(state.gave_up[i] != NEVER for i in mates)
        if not (step.timeout or unlaunched):
            return None
        gave_up = _put(state.gave_up, who, min(at, state.gave_up[who]))
        return state._replace(gave_up=gave_up, at=state.at if stops else _put(state.at, who, at + 1))

    def dying(self, state: State, rank: int) -> State:
        """The state after ``rank`` has died, with all its programs."""
        return state._replace(at=tuple(DEAD if self.rank_of[i] == rank else at for i, at in enumerate(state.at)))

    # ---- data: nothing moves but the program itself; what counts is what happens before

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
        # A load gets any value whose place no later one that the reader knows of has taken (coherence). Of those that
        # end the wait the first is taken: a later one would only let more happen before what follows.
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
        # Who is not the one to act on it skips the step that follows.
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
        # What the program knows is in the counter, and the next kernel's programs begin with all of that.
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

    # ---- what these are made of

    def _count(self, state: State, who: int, step: Step) -> tuple[State, int]:
        """Add one to a counter, which starts again when all programs have: the state, and how many had by then."""
        index = self._counter[self.rank_of[who], step.kind, step.phase, step.peer]
        count, known = state.counters[index]
        if step.order == "acq_rel":
            known = _join(known, self._released(state, who, Step("arrive", step.epoch, order="release")))
            state = state._replace(clocks=_put(state.clocks, who, _join(state.clocks[who], known)))
        count += 1
        entry = (0, (0,) * self.programs) if count == self.model.programs else (count, known)
        return state._replace(counters=_put(state.counters, index, entry)), count

    def _stored(self, state: State, who: int, key: FlagKey, step: Step, value: int) -> State:
        """With a flag's next value."""
        clock = _news(self._released(state, who, step), state.devices[key[0]][2])
        flag = self._flag[key]
        new = (*state.flags[flag], Message(value, clock, who, state.at[who]))
        return state._replace(flags=_put(state.flags, flag, new))

    def _without_old_news(self, state: State, rank: int, known: Clock) -> State:
        """Strike out of a rank's flags what all its programs will know: states that differ in nothing else are one."""
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
        """What an acquire learns from a store of ``who``'s: everything that happens before it, or nothing."""
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
        """The first access that should happen before ``who``'s next step and need not; "" if there is none."""
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
            last = {}  # of each program: program order has its earlier ones happen before
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
        """What happened between two states, one of which follows the other."""
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
    """What ``clock`` adds to what is known: joined to a clock that has all of that, the two do the same."""
    return tuple(new if new > old else 0 for new, old in zip(clock, known))


def _join(one: Clock, other: Clock) -> Clock:
    return tuple(map(max, one, other))


# ------------------------------------------------------------------------------------------------------- the search


class Result(NamedTuple):
    """What a search found."""

    states: int
    rule: str = ""  # the property that does not hold, "" if all do
    trace: str = ""  # the shortest way there: a line for each step, then what is wrong


def explore(model: Model, *, timeouts: bool = False, dies: int | None = None, reduced: bool = True) -> Result:
    """Every order of all programs' steps, breadth first, until a property fails.

    timeouts: any wait may run out of time, at once or later, be the peer dead or slow
    dies: a rank that may die before any of its steps
    reduced: where a program's next step is *local*, look at no other program's. What a local step does no other
        program's step can change or prevent, and it changes nothing that another's step does: a read or a write asks
        only what happens before it, which is the program's own past; a wait that can end takes the same value however
        often the flag is raised again; the last to arrive at a counter finds the same count, and nobody else asks for
        it before this exchange is over. So each order can be rearranged to make that step first and is the same to
        everybody; no step is put off for ever, because no state comes twice in an order; and a rank that dies is as
        dead before the step as after it (ample sets; Clarke, Grumberg, Peled, "Model Checking", 1999, ch. 10).
        Without the reduction a counterexample is the shortest there is.
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
