"""What goes wrong between the parts of a step, and what the engine makes of it: nothing is lost, no token is wrong."""

from __future__ import annotations

import asyncio
import copy
from typing import Any

import pytest
import torch
from serving_case import build, exact

from shardfuse.kernels.runtime import onednn
from shardfuse.kernels.runtime.sealing import SealBroken
from shardfuse.parallel.core.rendezvous import init_mesh
from shardfuse.serving import Engine, QueueFull, RanksLost, Request, SamplingParams
from shardfuse.serving.aio import AsyncEngine
from shardfuse.serving.graphs import Graphs, Run
from shardfuse.serving.inputs import Change, Kind, Part, StepInputs
from shardfuse.testing import assert_idle, solo_tokens, tiny_model

HOT = SamplingParams(temperature=1.0, seed=1)


def _answers(request: Request) -> list[list[int]]:
    return Engine(exact("gated"), num_blocks=64, block_size=4).generate([request])


# --- block copies -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_host_blocks", [0, 50])
def test_copies_that_fail_are_made_by_the_next_step(num_host_blocks: int) -> None:
    requests = [Request([7, 3, each], max_new_tokens=12, sampling=HOT, n=3) for each in range(3)]
    sizes: dict[str, Any] = {"num_blocks": 9, "block_size": 4, "max_num_seqs": 8}
    engine = Engine(exact("gated"), num_host_blocks=num_host_blocks, **sizes)
    engine._host.block_seconds = 0.0
    expected = [answer for request in requests for answer in _answers(request)]
    do, calls = engine._runner._copy, [0]

    def fails(*given: Any) -> None:
        calls[0] += 1
        if calls[0] % 2:
            raise torch.OutOfMemoryError("no memory for a copy")
        do(*given)

    engine._runner._copy = fails  # type: ignore[method-assign]
    numbers = [engine.add(request) for request in requests]
    found: dict[tuple[int, int], list[int]] = {}
    raised = 0
    while engine.busy:
        try:
            events = engine.step()
        except torch.OutOfMemoryError:
            raised += 1
            continue
        for event in events:
            assert event.token is not None, event.error
            found.setdefault((event.request, event.index), []).append(event.token)
    assert raised >= 1
    assert [found[number, index] for number in numbers for index in range(3)] == expected
    assert_idle(engine)


# --- the pinned buffer ------------------------------------------------------------------------------------------------


class Late:
    """A copy to a device that is made when the host waits for it, as a stream may make it."""

    def __init__(self, inputs: StepInputs) -> None:
        self.inputs, self.due = inputs, False

    def record(self) -> None:
        self.due = True

    def synchronize(self) -> None:
        if self.due:
            self.inputs._there.copy_(self.inputs.buffer)
            self.due = False


def test_nothing_is_packed_over_a_copy_that_is_still_to_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = StepInputs(8, 2, 4, torch.device("cpu"))
    inputs._there = inputs.buffer.clone()
    late: Any = Late(inputs)
    inputs._copied = late
    monkeypatch.setattr(inputs, "upload", late.record)
    parts = [Part(0, 0, [1, 2, 3], 1), Part(1, 4, [4], 1)]
    first = inputs.pack(parts, [Change(0, 0, 9)], block_size=4, step=1)
    inputs.upload()
    for again in (
        lambda: inputs.pack(parts[::-1], block_size=4, step=2),
        lambda: inputs.pack_list(Kind.CHANGE, [Change(1, 1, 3)]),
        lambda: inputs.pack_kind(Kind.IDLE),
        lambda: inputs.pack_warm(4, 1, block_size=4),
    ):
        again()
        assert inputs._there[: len(first)].tolist() == list(first)  # what was uploaded, whole
        inputs.pack(parts, [Change(0, 0, 9)], block_size=4, step=1)
        inputs.upload()


def test_a_padded_step_changes_nothing_but_the_scratch_row() -> None:
    inputs = StepInputs(8, 4, 4, torch.device("cpu"))
    stale = [Change(row, column, 50 + row) for row in range(4) for column in range(4)]
    inputs.change(inputs.pack_list(Kind.CHANGE, stale))
    inputs.pack([Part(row, 5, [1], 1) for row in range(4)], block_size=4, step=1)  # starts, rows and lens of four
    inputs.table.zero_()
    shape = inputs.pack([Part(2, 5, [1], 1)], [Change(2, 1, 7)], block_size=4, step=2)
    padded = inputs.pad(shape, 4, 16, block_size=4)
    inputs.change(padded)
    expected = torch.zeros(5, 4, dtype=torch.int32)
    expected[2, 1] = 7
    assert torch.equal(inputs.table, expected)
    assert inputs._part("starts").tolist() == [0, 1, 1, 1, 1]
    assert inputs._part("lens").tolist() == [6, 0, 0, 0]


# --- weights ----------------------------------------------------------------------------------------------------------


def test_new_weights_drop_what_was_packed_of_old_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of weights that were written to where nothing counts it."""
    dropped: list[int] = []
    drop = onednn.drop
    monkeypatch.setattr(onednn, "drop", lambda weight: (dropped.append(id(weight)), drop(weight)))
    model = copy.deepcopy(exact("gated"))
    engine = Engine(model, num_blocks=16)
    engine.update_weights()
    assert {*dropped} == {id(each) for each in model.parameters()}


def test_a_state_that_is_refused_leaves_nothing_of_the_old_weights_in_the_cache() -> None:
    model, other = (tiny_model(seed=seed, dtype=torch.float64, vocab_size=32) for seed in (0, 1))
    engine = Engine(model, num_blocks=32, block_size=4)
    request = Request(list(range(17)), max_new_tokens=6)
    engine.generate([request])
    with pytest.raises((RuntimeError, ValueError)):
        engine.update_weights({**other.state_dict(), "nothing": torch.zeros(1)})
    assert engine.generate([request])[0] == solo_tokens(model, request)


# --- seals, queues, answers -------------------------------------------------------------------------------------------


def test_a_broken_seal_fails_all_requests_of_its_step() -> None:
    def capture(compute: Run) -> tuple[torch.Tensor, Run]:
        return compute(), compute

    engine = Engine(exact("gated"), num_blocks=16, block_size=4)
    engine._runner.graphs = Graphs(capture, 8, 64)
    engine.generate([Request([1], max_new_tokens=3)])  # one sequence: captured
    for prompt in ([1, 2], [3, 4]):
        engine.add(Request(prompt, max_new_tokens=5))
    with engine.sealed():
        events = list(engine.run())
    ends = [event for event in events if event.finish is not None]
    assert [event.finish for event in ends] == ["error", "error"]
    assert all(isinstance(event.error, SealBroken) for event in ends)
    assert_idle(engine)


def test_each_answer_that_waits_counts() -> None:
    engine = Engine(
        exact("gated"), num_blocks=64, block_size=4, max_num_seqs=2, max_queued_requests=7, max_queued_tokens=60
    )
    engine.add(Request([1, 2], max_new_tokens=5, n=8, sampling=HOT))
    engine.step()
    engine.add(Request([3], max_new_tokens=5))  # six answers of 7 tokens wait
    with pytest.raises(QueueFull, match="7 answers wait, this request has 1, and max_queued_requests=7"):
        engine.add(Request([3], max_new_tokens=5))


def test_an_asyncio_stream_ends_with_its_last_answer() -> None:
    request = Request([1, 2, 3], max_new_tokens=6, n=3, sampling=HOT, stop=[5, 9])
    expected = _answers(request)

    async def body() -> None:
        async with AsyncEngine(Engine(exact("gated"), num_blocks=64, block_size=4)) as serve:
            events = await asyncio.wait_for(serve.complete(request), 60)
            found = [[event.token for event in events if event.index == index] for index in range(3)]
            assert found == expected
            late = await asyncio.wait_for(serve.complete(Request([1], max_new_tokens=9, n=2, timeout_s=1e-6)), 60)
            assert {event.finish for event in late} == {"timeout"}
            assert len(await serve.complete(Request([1], max_new_tokens=2))) == 2  # it goes on

    asyncio.run(body())


# --- ranks ------------------------------------------------------------------------------------------------------------


def _pauses(rank: int, world: int) -> list[Any]:
    mesh = init_mesh(tp=world, device_type="cpu")
    found: list[Any] = []
    with Engine(build("gated", mesh), num_blocks=32, block_size=4) as engine:
        if rank:
            engine.follow()
            return found
        send = engine._runner.channel.send
        engine._runner.channel.send = lambda buffer, idle=False: (found.append(idle), send(buffer, idle=idle))  # type: ignore[method-assign,assignment,func-returns-value]
        engine.add(Request([1, 2], max_new_tokens=6))
        engine.step()
        engine.pause()
        found.append("paused")
        with pytest.raises(RuntimeError, match=r"dismiss\(\) them first"):
            engine.update_weights()
        engine.resume()
        answer = [event.token for event in engine.run()]
    return [found[: found.index("paused")], answer]


def _ends_at_once(rank: int, world: int) -> list[Any]:
    with Engine(build("gated", init_mesh(tp=world, device_type="cpu")), num_blocks=32, block_size=4) as engine:
        if rank:
            engine.follow()
            return []
        answers = engine.generate([Request([1, 2], max_new_tokens=1)])
        return [answers, engine._runner.channel.idle]


@pytest.mark.ranks
def test_a_request_of_one_step_leaves_the_others_at_rest(ranks: Any) -> None:
    answers, idle = ranks(2, _ends_at_once)[0]
    assert answers == _answers(Request([1, 2], max_new_tokens=1))
    assert idle


@pytest.mark.ranks
def test_the_others_wait_without_a_limit_while_rank_0_pauses(ranks: Any) -> None:
    (sent, answer), _ = ranks(2, _pauses)
    assert sent[-1] is True  # the last message before the pause
    assert answer == _answers(Request([1, 2], max_new_tokens=6))[0][1:]


def test_an_engine_closes_although_a_rank_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(exact("gated"), num_blocks=16)

    def gone() -> None:
        raise RanksLost("a rank has ended")

    monkeypatch.setattr(engine._runner, "dismiss", gone)
    with pytest.raises(RanksLost):
        engine.close()
    assert engine._runner.cache is None
    with pytest.raises(RuntimeError, match="closed"):
        engine.add(Request([1], max_new_tokens=1))


def test_a_rank_that_is_lost_at_rest_ends_what_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(exact("gated"), num_blocks=16)

    def gone() -> None:
        raise RanksLost("a rank has ended")

    monkeypatch.setattr(engine._runner, "rest", gone)
    engine.add(Request([1], max_new_tokens=1))
    assert [event.finish for event in engine.step()] == ["length"]
    with pytest.raises(RanksLost):
        engine.add(Request([1], max_new_tokens=1))
