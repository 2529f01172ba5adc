"""The clients of a scheduler: how much of each waits, whose turn it is, and which sequence yields its blocks.

Start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996), counted in answers: a client's virtual start time S grows
by n with each admission of a request of n answers, and the waiting client with the smallest S is next; of equal ones
that with the oldest head. A client of which nothing waited begins at the present virtual time V. An admission raises V
by 1 / (k + 1), where k clients wait, and at least to the S of the admitted one, so that a newcomer comes before those
that have had a turn since. Once nothing waits, V passes every S.

- Within a client, sequences are in the order of their rank (``priority``, or better after enough overtakes) and then of
  their arrival. So ``priority`` never lets one client overtake another, and one client alone has that order.
- The other answers of a request were counted with its admission; those that have to wait have the turns S + 1, S + 2,
  ..., of which S was the request's own. A preempted sequence at the head of its client comes before those of others
  that have not run, the oldest first.
- Let a client's last request have n answers. Until its next admission every other client is charged at most n answers
  and one more request, and after n * (k + 1) admissions newcomers come behind it.
- Overtaking by priority is bounded within a client: if W others of it waited when a sequence arrived, then after W +
  ``max_overtakes`` of its admissions only earlier sequences precede it, and no later one of it takes its blocks.
- Of running sequences, the first of each client come first, then the second ones, and so on, older ones first in each
  round: the client that runs most yields first. The last of all is the last of its client, so the others keep their
  order if it yields.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, insort
from dataclasses import dataclass, field

from ..kernels.runtime.checks import whole_number
from .request import MAX_ANSWERS, SequenceState

_FIRST = -math.inf  # the rank after enough overtakes


@dataclass(eq=False, slots=True)
class _Client:
    """A client of which something waits, will arrive or runs, or whose ``start`` is ahead of the virtual time."""

    name: str
    start: float
    waiting: list[SequenceState] = field(default_factory=list)  # by rank and order
    dues: list[tuple[int, float, SequenceState]] = field(default_factory=list)  # (due, order) of the same ones, sorted
    turn: tuple[float, float, str] | None = None  # its entry among the turns
    admitted: int = 0
    answers: int = 0  # that wait or will arrive, as those of Clients
    tokens: int = 0


class Clients:
    """The waiting and the running sequences of every client.

    ``answers`` and ``tokens`` (of prompts and answers) are those that wait or will arrive, of ``queueing`` clients. A
    request counts with all its answers before its first token; each of its answers counts as one after it.
    """

    def __init__(self, max_overtakes: int) -> None:
        self.answers = self.tokens = self.queueing = 0
        self.num_waiting = self.num_running = 0
        self.coming: list[tuple[int, int, SequenceState]] = []  # (step, id) of those that will arrive, sorted
        self._max_overtakes = whole_number("max_overtakes", max_overtakes, least=0)
        self._came = 0  # sequences so far
        self._clients: dict[str, _Client] = {}
        self._turns: list[tuple[float, float, str]] = []  # (start, order of the head, name) of those that wait, sorted
        self._now = self._latest = 0.0  # the virtual time, and the latest start
        self._ahead: list[tuple[float, str]] = []  # heap of (start, name), including earlier starts
        self._lanes: dict[str, list[SequenceState]] = {}  # the running sequences of each client, by rank and order
        self._running: list[SequenceState] | None = []  # None: to be merged from the lanes

    @property
    def waiting(self) -> list[SequenceState]:
        """The waiting sequences, client after client in the order of their next turns."""
        return [sequence for *_, name in self._turns for sequence in self._clients[name].waiting]

    @property
    def running(self) -> list[SequenceState]:
        """The running sequences in the order in which they are served."""
        if self._running is None:
            lanes = list(self._lanes.values())
            self._running = list(lanes[0]) if len(lanes) == 1 else _interleaved(lanes)
        return self._running

    def queued(self, name: str) -> tuple[int, int]:
        """The answers and tokens of one client that wait or will arrive."""
        client = self._clients.get(name)
        return (0, 0) if client is None else (client.answers, client.tokens)

    # --- arrival and end

    def expect(self, sequence: SequenceState, step: int) -> None:
        """Let :meth:`arrived` return ``sequence`` at ``step``, and count it from now on."""
        sequence.arrives = step
        insort(self.coming, (step, sequence.id, sequence))
        self._count(self._client(sequence), sequence)

    def arrived(self, step: int) -> list[SequenceState]:
        """Take the sequences that have arrived at ``step``; :meth:`add` or :meth:`expect` follows for each."""
        arrived = bisect_left(self.coming, (step + 1,))
        sequences = [sequence for *_, sequence in self.coming[:arrived]]
        del self.coming[:arrived]
        return sequences

    def add(self, sequence: SequenceState) -> None:
        """Let a new sequence wait after the others of its client and priority."""
        sequence.order, sequence.rank, sequence.arrives = self._came, sequence.request.priority, None
        self._came += 1
        self._limit(sequence)
        self.wait(sequence)

    def fork(self, parent: SequenceState, child: SequenceState) -> None:
        """Place ``child``, another answer to the request of ``parent``; :meth:`wait` or :meth:`run` follows."""
        child.order, child.rank = parent.order + child.index / (2 * MAX_ANSWERS), parent.rank
        child.turn = self._client(child).start - parent.request.n + child.index
        self._limit(child)

    def remove(self, sequence: SequenceState) -> None:
        """Drop a sequence that waits, will arrive or runs."""
        client = self._client(sequence)
        if not sequence.queued:
            self._stop(sequence)
            self._running = None
        elif sequence.arrives is not None:
            del self.coming[bisect_left(self.coming, (sequence.arrives, sequence.id))]
            self._uncount(client, sequence)
        else:
            self._leave(client, sequence)
            self._settle()
        self._forget(client.name)

    def wait(self, sequence: SequenceState) -> None:
        """Let a sequence wait: a new one, or another answer of a running request."""
        client = self._client(sequence)
        if not client.waiting:
            client.start = max(client.start, self._now)
        insort(client.waiting, sequence, key=_place)
        insort(client.dues, (sequence.due, sequence.order, sequence))
        self.num_waiting += 1
        self._count(client, sequence)
        self._sort(client)

    # --- admission and preemption

    def head(self) -> SequenceState | None:
        """The next sequence to admit. If another one of its client was overtaken often enough, this is that one."""
        while self._turns:
            client = self._clients[self._turns[0][-1]]
            if not self._promote(client):
                return client.waiting[0]
        return None

    def admit(self, head: SequenceState) -> None:
        """Move ``head`` to the running sequences, and charge its client unless it has run before."""
        client = self._client(head)
        turn = head.turn
        if turn is None:
            turn = client.start
            client.start += head.request.n
            self._latest = max(self._latest, client.start)
            heapq.heappush(self._ahead, (client.start, client.name))
        if turn > -math.inf:
            self._now = max(self._now + 1 / (len(self._turns) + 1), turn)
        self._leave(client, head)
        self.run(head)
        self._settle()

    def run(self, sequence: SequenceState) -> None:
        """Add a sequence to the running ones."""
        client = self._client(sequence)
        sequence.turn = -math.inf
        insort(self._lanes.setdefault(client.name, []), sequence, key=_place)
        client.admitted += 1
        self.num_running += 1
        self._running = None

    def preempt(self) -> SequenceState:
        """Let the last running sequence wait."""
        last = self.running.pop()
        self._stop(last)
        self.wait(last)
        return last

    # --- the parts

    def _client(self, sequence: SequenceState) -> _Client:
        name = sequence.request.client
        client = self._clients.get(name)
        if client is None:
            client = self._clients[name] = _Client(name, self._now)
        return client

    def _limit(self, sequence: SequenceState) -> None:
        """Bound how many of its client's admissions may precede ``sequence``."""
        client = self._client(sequence)
        sequence.due = client.admitted + len(client.waiting) + self._max_overtakes

    def _count(self, client: _Client, sequence: SequenceState) -> None:
        """Count ``sequence`` with all answers of its request before the first token, as one after it."""
        if not sequence.queued:
            whole = not sequence.index and not sequence.generated
            sequence.queued = sequence.request.n if whole else 1
            self._change(client, sequence, 1)

    def _uncount(self, client: _Client, sequence: SequenceState) -> None:
        self._change(client, sequence, -1)
        sequence.queued = 0

    def _change(self, client: _Client, sequence: SequenceState, sign: int) -> None:
        request, counted = sequence.request, client.answers > 0
        answers = sign * sequence.queued
        tokens = sign * len(request.prompt) + answers * request.max_new_tokens
        client.answers += answers
        client.tokens += tokens
        self.answers += answers
        self.tokens += tokens
        self.queueing += (client.answers > 0) - counted

    def _leave(self, client: _Client, sequence: SequenceState) -> None:
        """Take ``sequence`` from those that wait."""
        del client.waiting[bisect_left(client.waiting, _place(sequence), key=_place)]
        del client.dues[bisect_left(client.dues, (sequence.due, sequence.order))]
        self.num_waiting -= 1
        self._uncount(client, sequence)
        self._sort(client)

    def _stop(self, sequence: SequenceState) -> None:
        """Take ``sequence`` from those that run."""
        name = sequence.request.client
        lane = self._lanes[name]
        del lane[bisect_left(lane, _place(sequence), key=_place)]
        if not lane:
            del self._lanes[name]
        self.num_running -= 1

    def _sort(self, client: _Client) -> None:
        """Place ``client`` among the turns by its present head and start."""
        turn = None
        if client.waiting:
            head = client.waiting[0]
            turn = (client.start if head.turn is None else head.turn, head.order, client.name)
        if turn == client.turn:
            return
        if client.turn is not None:
            del self._turns[bisect_left(self._turns, client.turn)]
        if turn is not None:
            insort(self._turns, turn)
        client.turn = turn

    def _promote(self, client: _Client) -> bool:
        """Rank the sequence of ``client`` that is due first before all others if it was overtaken often enough, but not
        before running ones that arrived earlier; whether that changed an order.
        """
        due, order, oldest = client.dues[0]
        if due > client.admitted or oldest.rank == _FIRST:
            return False
        lane = self._lanes.get(client.name, [])
        for sequence in (oldest, *(each for each in lane if each.order < order)):
            sequence.rank = _FIRST
        client.waiting.sort(key=_place)
        lane.sort(key=_place)
        self._running = None
        self._sort(client)
        return True

    def _settle(self) -> None:
        """Forget the clients without sequences that the virtual time has reached."""
        if not self._turns:
            self._now = max(self._now, self._latest)
        while self._ahead and self._ahead[0][0] <= self._now:
            self._forget(heapq.heappop(self._ahead)[1])

    def _forget(self, name: str) -> None:
        client = self._clients.get(name)
        if client is not None and not client.answers and name not in self._lanes and client.start <= self._now:
            del self._clients[name]


def _interleaved(lanes: list[list[SequenceState]]) -> list[SequenceState]:
    """The first sequences of all lanes, then the second ones, and so on, each time in the order of arrival."""
    return [each for *_, each in sorted((i, each.order, each) for lane in lanes for i, each in enumerate(lane))]


def _place(sequence: SequenceState) -> tuple[float, float]:
    return sequence.rank, sequence.order
