"""The engine on an asyncio loop: tokens, cancellation, failures, the end, and what is left behind.

Where a test has to know between which steps something happens, its engine waits in ``step`` until the test lets it go.
"""

from __future__ import annotations

import asyncio
import copy
import threading
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import Any

import pytest
import torch
from serving_case import exact

from shardfuse import AsyncEngine
from shardfuse.serving import Engine, QueueFull, Request, SamplingParams, TokenEvent
from shardfuse.serving.aio import SlowReader
from shardfuse.testing import assert_idle, solo_tokens

LIMIT_S = 60.0  # for what takes milliseconds: a test fails instead of waiting for ever


def _run(body: Callable[[], Awaitable[Any]]) -> Any:
    """What ``body`` returns in a loop of its own; no thread and no task is left."""
    threads = threading.enumerate()

    async def main() -> Any:
        result = await asyncio.wait_for(body(), LIMIT_S)
        left = asyncio.all_tasks() - {asyncio.current_task()}
        assert not left, left
        return result

    result = asyncio.run(main(), debug=True)
    assert threading.enumerate() == threads
    return result


def _engine(cls: type[Engine] = Engine, **options: Any) -> Any:
    return cls(exact("gated"), **{"num_blocks": 24, "block_size": 4, "max_num_seqs": 4, **options})


def _requests(count: int) -> list[Request]:
    return [
        Request(
            [i % 32, *range(1, 2 + i % 7)],
            max_new_tokens=1 + i * 5 % 17,
            sampling=SamplingParams(temperature=0.9 if i % 3 == 0 else 0.0, seed=i),
            priority=i % 2,
        )
        for i in range(count)
    ]


def _tokens(events: list[TokenEvent]) -> list[int]:
    return [event.token for event in events if event.token is not None]


class Gated(Engine):
    """Each step waits for :meth:`let`, and says that it waits."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._gate, self.reached, self.taken = threading.Semaphore(0), threading.Semaphore(0), 0

    def step(self) -> list[TokenEvent]:
        self.reached.release()
        assert self._gate.acquire(timeout=LIMIT_S)
        self.taken += 1
        return super().step()

    def let(self, steps: int) -> None:
        self._gate.release(steps)

    async def waits(self) -> None:
        """Until a step waits to be let go, and has not been waited for before."""
        assert await asyncio.get_running_loop().run_in_executor(None, self.reached.acquire, True, LIMIT_S)


async def _sent() -> None:
    """One turn of the loop: the tasks that were made have sent what they ask for."""
    await asyncio.sleep(0)


# --- tokens -----------------------------------------------------------------------------------------------------------


def test_forty_tasks_get_the_tokens_that_the_engine_alone_gives() -> None:
    requests = _requests(40)
    engine = _engine(num_blocks=8)
    expected = engine.generate(requests)
    before = engine.stats.generated_tokens

    async def one(serve: AsyncEngine, request: Request) -> list[int]:
        events = [event async for event in serve.stream(request)]
        assert [event.finish is not None for event in events] == [False] * (len(events) - 1) + [True]
        assert len({event.request for event in events}) == 1
        return _tokens(events)

    async def body() -> list[list[int]]:
        async with AsyncEngine(engine) as serve:
            answers = await asyncio.gather(*(one(serve, request) for request in requests))
            assert (await serve.stats()).generated_tokens - before == sum(map(len, answers))
            return answers

    assert _run(body) == expected
    assert expected[3] == solo_tokens(exact("gated"), requests[3])
    assert engine.stats.preemptions > 0
    assert not engine.busy
    assert_idle(engine)


def test_complete_returns_every_event() -> None:
    request = _requests(9)[8]

    async def body() -> list[TokenEvent]:
        async with AsyncEngine(_engine()) as serve:
            return await serve.complete(request)

    events = _run(body)
    assert _tokens(events) == solo_tokens(exact("gated"), request)
    assert events[-1].finish == "length"


def test_the_loop_runs_while_a_step_is_computed() -> None:
    """And a task that never reads its events keeps no other from its own."""
    engine = _engine(Gated)

    async def body() -> None:
        async with AsyncEngine(engine) as serve, aclosing(serve.stream(Request([1], max_new_tokens=9))) as slow:
            first = asyncio.ensure_future(anext(slow))
            await engine.waits()  # here, in the loop, while the worker stands in a step
            engine.let(1)
            assert (await first).token is not None
            other = asyncio.ensure_future(serve.complete(Request([2], max_new_tokens=12)))
            engine.let(20)
            assert len(await other) == 12
            assert len([event async for event in slow]) == 8

    _run(body)
    assert_idle(engine)


def test_an_idle_engine_takes_no_step() -> None:
    engine = _engine(Gated)

    async def body() -> None:
        async with AsyncEngine(engine) as serve:
            engine.let(1000)
            await serve.complete(Request([1], max_new_tokens=3))
            taken = engine.taken
            assert taken == 3
            for _ in range(50):
                await serve.stats()  # the worker wakes up, carries it out, and waits again
            assert engine.taken == taken

    _run(body)


# --- cancellation -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("after", [0, 1, 2, 5, 9])
@pytest.mark.parametrize("way", ["leaves", "cancelled"])
def test_a_task_that_leaves_cancels_its_request_before_the_next_step(after: int, way: str) -> None:
    engine = _engine(Gated)
    kept = Request([7, 8], max_new_tokens=20)

    async def read(serve: AsyncEngine) -> None:
        seen = 0
        async with aclosing(serve.stream(Request([1, 2, 3], max_new_tokens=30))) as stream:
            async for _ in stream:
                seen += 1
                if way == "leaves" and seen == after:
                    return

    async def body() -> None:
        async with AsyncEngine(engine) as serve:
            other = asyncio.ensure_future(serve.complete(kept))
            await engine.waits()
            task = asyncio.ensure_future(read(serve))
            await _sent()
            for _ in range(after + 1):  # the first step comes before the request
                engine.let(1)
                await engine.waits()
            if way == "cancelled" or after == 0:
                task.cancel()
            await asyncio.wait([task])
            engine.let(1)  # the step that the worker stands in: the next turn carries the cancellation out
            await engine.waits()
            assert list(engine._live) == [0]
            assert engine._allocator.used_blocks == len(engine._allocator.table(engine._live[0][0].id))
            engine.let(100)
            assert _tokens(await other) == solo_tokens(exact("gated"), kept)
            await serve.drain()

    _run(body)
    assert not engine.busy
    assert_idle(engine)


def test_a_task_that_is_cancelled_while_its_request_is_added_leaves_nothing() -> None:
    """Before the worker has seen the request, and after: in one turn of the loop, whichever comes first."""
    engine = _engine(Gated)

    async def body() -> None:
        async with AsyncEngine(engine) as serve:
            other = asyncio.ensure_future(serve.complete(Request([7], max_new_tokens=3)))
            await engine.waits()
            tasks = [asyncio.ensure_future(serve.complete(request)) for request in _requests(20)]
            await _sent()
            for task in tasks:
                task.cancel()
            engine.let(100)
            ends = await asyncio.gather(*tasks, return_exceptions=True)
            assert all(isinstance(end, asyncio.CancelledError) for end in ends)
            await other
            await serve.drain()
            assert engine._next_id == 1  # none was added for tasks that were gone

    _run(body)
    assert_idle(engine)


def test_tasks_cancelled_at_any_moment_leak_no_block() -> None:
    engine, requests = _engine(), _requests(60)
    expected = [solo_tokens(exact("gated"), request) for request in requests]

    async def one(serve: AsyncEngine, number: int, leave_after: int) -> list[int]:
        tokens: list[int] = []
        async with aclosing(serve.stream(requests[number])) as stream:
            async for event in stream:
                tokens += _tokens([event])
                if len(tokens) == leave_after:
                    break
        return tokens

    async def body() -> None:
        async with AsyncEngine(engine) as serve:
            tasks = [asyncio.ensure_future(one(serve, i, i % 5 or 100)) for i in range(60)]
            for i in range(0, 60, 4):
                await serve.stats()  # a step boundary or two
                tasks[i].cancel()
            answers = await asyncio.gather(*tasks, return_exceptions=True)
            await serve.drain()
            assert_idle(engine)
        cancelled = [i for i, answer in enumerate(answers) if isinstance(answer, asyncio.CancelledError)]
        assert set(cancelled) <= set(range(0, 60, 4))
        for i, answer in enumerate(answers):
            if not isinstance(answer, asyncio.CancelledError):
                assert answer == expected[i][: i % 5 or 100]

    _run(body)
    assert not engine.busy


# --- refusals and failures --------------------------------------------------------------------------------------------


def test_refusals_are_raised_in_the_task_that_asked() -> None:
    engine = _engine(Gated, max_num_seqs=1, max_queued_requests=1)

    async def body() -> None:
        async with AsyncEngine(engine) as serve:
            with pytest.raises(ValueError, match="prompt is empty"):
                await serve.complete(Request([]))
            with pytest.raises(ValueError, match="request is a list"):
                await anext(serve.stream([1]))  # type: ignore[arg-type]
            running = asyncio.ensure_future(serve.complete(Request([1], max_new_tokens=2)))
            await engine.waits()  # it runs from this step on
            engine.let(1)
            await engine.waits()
            waiting = [asyncio.ensure_future(serve.complete(Request([2], max_new_tokens=2))) for _ in range(3)]
            await _sent()
            engine.let(100)
            ends = [*await asyncio.gather(*waiting, return_exceptions=True), *await asyncio.gather(running)]
            assert [type(end) for end in ends[:3]].count(QueueFull) == 2
            with pytest.raises((RuntimeError, ValueError)):
                await serve.update_weights({"nothing": torch.zeros(1)})
            assert len(await serve.complete(Request([1], max_new_tokens=2))) == 2

    _run(body)
    assert_idle(engine)


class Failing(Engine):
    """Steps fail while ``fails`` says so; it gets the number of the step."""

    fails: Callable[[int], bool] = staticmethod(lambda step: False)
    taken = 0

    def step(self) -> list[TokenEvent]:
        self.taken += 1
        if self.fails(self.taken):
            raise OSError(f"step {self.taken} failed")
        return super().step()


def test_a_step_that_fails_once_is_taken_again() -> None:
    engine, requests = _engine(Failing), _requests(8)
    engine.fails = lambda step: step % 2 == 1  # no two in a row

    async def body() -> list[list[TokenEvent]]:
        async with AsyncEngine(engine) as serve:
            return await asyncio.gather(*map(serve.complete, requests))

    assert [_tokens(events) for events in _run(body)] == [solo_tokens(exact("gated"), each) for each in requests]
    assert_idle(engine)


def test_a_step_that_fails_again_fails_what_lives_and_nothing_else() -> None:
    engine, requests = _engine(Failing), _requests(3)
    engine.fails = lambda step: step in (1, 2)

    async def body() -> None:
        async with AsyncEngine(engine) as serve:
            await serve.pause()  # so that all three live when the steps fail
            first = [asyncio.ensure_future(serve.complete(request)) for request in requests]
            while len(engine._live) < 3:
                await serve.stats()
            await serve.resume()
            for end in await asyncio.gather(*first, return_exceptions=True):
                assert isinstance(end, RuntimeError)
                assert str(end) == "complete: the request failed: step 2 failed"
                assert isinstance(end.__cause__, OSError)
            await serve.drain()
            assert_idle(engine)
            assert _tokens(await serve.complete(requests[0])) == solo_tokens(exact("gated"), requests[0])

    _run(body)
    assert engine.taken == 4  # two failures, one that reports the ends, one token


async def _drain_for_ever(serve: AsyncEngine) -> None:
    while True:
        await serve.drain()


def test_an_engine_that_cannot_go_on_stops_the_worker() -> None:
    """Every step fails, also one that has nothing to compute: no request hangs, and the worker does not spin."""
    engine = _engine(Failing)
    engine.fails = lambda step: True

    async def body() -> None:
        async with AsyncEngine(engine) as serve:
            events = [event async for event in serve.stream(Request([1], max_new_tokens=9))]
            assert [(event.finish, str(event.error)) for event in events] == [("error", "step 2 failed")]
            with pytest.raises(RuntimeError, match=r"drain: the AsyncEngine has stopped: OSError: step 3 failed"):
                await _drain_for_ever(serve)  # the worker may be about to stop
            with pytest.raises(RuntimeError, match="stream: the AsyncEngine has stopped"):
                await serve.complete(Request([1], max_new_tokens=9))

    _run(body)
    assert engine.taken == 4  # the last one is the end's attempt to report


def test_one_request_that_fails_is_no_failure_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = _engine()
    forward = engine._runner.logits
    monkeypatch.setattr(engine._runner, "logits", lambda chunks: _poisoned(forward, chunks))

    async def body() -> None:
        async with AsyncEngine(engine) as serve:
            good, bad = Request([1, 2], max_new_tokens=5), Request([13], max_new_tokens=5, priority=7)
            answers = await asyncio.gather(serve.complete(good), serve.complete(bad), return_exceptions=True)
            assert isinstance(answers[1], RuntimeError)
            assert isinstance(answers[1].__cause__, ZeroDivisionError)
            assert _tokens(answers[0]) == solo_tokens(exact("gated"), good)

    _run(body)
    assert_idle(engine)


def _poisoned(forward: Callable[[Any], torch.Tensor], chunks: Any) -> torch.Tensor:
    if any(chunk.sequence.request.priority == 7 for chunk in chunks):
        raise ZeroDivisionError("a fault")
    return forward(chunks)


# --- pauses, deadlines, weights ---------------------------------------------------------------------------------------


def test_deadlines_fire_while_the_engine_is_paused() -> None:
    engine = _engine(Failing)

    async def body() -> None:
        async with AsyncEngine(engine) as serve:
            await serve.pause()
            stays = asyncio.ensure_future(serve.complete(Request([1], max_new_tokens=2, timeout_s=1e300)))
            for timeout_s in (1e-6, 0.01):
                events = await serve.complete(Request([2], max_new_tokens=9, timeout_s=timeout_s))
                assert events == [TokenEvent(events[0].request, None, "timeout")]
            taken = engine.taken
            assert 2 <= taken <= 4  # a step for each deadline, and none in between
            left = asyncio.ensure_future(serve.complete(Request([3], max_new_tokens=9)))
            while len(engine._live) < 2:
                await serve.stats()
            left.cancel()  # frees what it has, paused or not
            await asyncio.wait([left])
            while len(engine._live) > 1:
                await serve.stats()
            assert not stays.done()
            assert engine.stats.steps == 0
            await serve.resume()
            assert len(await stays) == 2

    _run(body)
    assert_idle(engine)


def test_weights_change_between_two_steps() -> None:
    old, new = exact("gated"), copy.deepcopy(exact("gated"))
    with torch.no_grad():
        for param in new.parameters():
            param.mul_(1.5)
    engine = Gated(copy.deepcopy(old), num_blocks=24, block_size=4)
    request = Request([1, 2, 3], max_new_tokens=9)

    async def body() -> list[TokenEvent]:
        async with AsyncEngine(engine) as serve:
            answer = asyncio.ensure_future(serve.complete(request))
            await engine.waits()
            update = asyncio.ensure_future(serve.update_weights(new.state_dict()))
            await _sent()
            engine.let(1)
            await update  # after one token
            engine.let(100)
            return await answer

    tokens = _tokens(_run(body))
    assert tokens[:1] == solo_tokens(old, Request([1, 2, 3], max_new_tokens=1))
    assert tokens[1:] == solo_tokens(new, Request([1, 2, 3, tokens[0]], max_new_tokens=8))
    assert tokens != solo_tokens(old, request)


# --- the end ----------------------------------------------------------------------------------------------------------


def test_the_end_under_load_ends_every_request() -> None:
    engine = _engine(Gated)

    async def body() -> None:
        async with AsyncEngine(engine) as serve:
            tasks = [asyncio.ensure_future(serve.complete(request)) for request in _requests(30)]
            drained = asyncio.ensure_future(serve.drain())
            await engine.waits()
            engine.let(3)
            for _ in range(3):
                await engine.waits()
            engine.let(100)
        ends = [events[-1].finish for events in await asyncio.gather(*tasks)]
        assert ends.count("cancelled") > 10
        await drained
        for call in (
            serve.complete(Request([1], max_new_tokens=9)),
            serve.pause(),
            serve.drain(),
            serve.stats(),
            serve.update_weights(),
        ):
            with pytest.raises(RuntimeError, match="the AsyncEngine is closed: its async with block has ended"):
                await call
        await serve.aclose()  # once more changes nothing

    _run(body)
    assert not engine.busy
    assert_idle(engine)
    assert len(engine.generate([Request([1], max_new_tokens=3)])[0]) == 3


def test_a_task_that_is_cancelled_at_the_end_leaves_no_thread() -> None:
    engine = _engine(Gated)

    async def serve_one(entered: asyncio.Event) -> None:
        async with AsyncEngine(engine) as serve:
            asyncio.ensure_future(serve.complete(Request([1], max_new_tokens=9)))  # noqa: RUF006
            await engine.waits()
            entered.set()

    async def body() -> None:
        entered = asyncio.Event()
        task = asyncio.ensure_future(serve_one(entered))
        await entered.wait()
        task.cancel()  # while the end waits for the step
        engine.let(100)
        await asyncio.wait([task])
        assert task.cancelled()

    _run(body)
    assert_idle(engine)


def test_a_loop_that_is_gone_ends_the_worker() -> None:
    """A loop that was stopped and closed within the block, as no asyncio.run does."""
    engine = _engine(Gated)
    loop = asyncio.new_event_loop()
    serve = loop.run_until_complete(AsyncEngine(engine).__aenter__())
    stream = serve.stream(Request([1], max_new_tokens=9))
    first = loop.create_task(anext(stream))
    loop.run_until_complete(engine.waits())
    thread = serve._thread
    first.cancel()
    loop.run_until_complete(asyncio.wait([first]))
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()
    engine.let(100)
    assert thread is not None
    thread.join(LIMIT_S)
    assert not thread.is_alive()
    assert_idle(engine)


# --- misuse -----------------------------------------------------------------------------------------------------------


def test_misuse_is_refused() -> None:
    engine = _engine()
    serve = AsyncEngine(engine)

    async def elsewhere() -> None:
        with pytest.raises(RuntimeError, match="drain: the AsyncEngine belongs to another event loop"):
            await serve.drain()
        with pytest.raises(RuntimeError, match="stream: the AsyncEngine belongs to another event loop"):
            await serve.complete(Request([1], max_new_tokens=9))

    async def body() -> None:
        with pytest.raises(RuntimeError, match="stream: the AsyncEngine is not open"):
            await serve.complete(Request([1], max_new_tokens=9))
        engine.add(Request([1], max_new_tokens=1))
        with pytest.raises(RuntimeError, match=r"the engine is busy: read run\(\) to its end"):
            await serve.__aenter__()
        list(engine.run())
        async with serve:
            with pytest.raises(RuntimeError, match="another one serves this engine"):
                await AsyncEngine(engine).__aenter__()
            await asyncio.to_thread(asyncio.run, elsewhere())
            assert len(await serve.complete(Request([1], max_new_tokens=2))) == 2
        with pytest.raises(RuntimeError, match="it was used before"):
            await serve.__aenter__()
        async with AsyncEngine(engine) as again:
            assert len(await again.complete(Request([1], max_new_tokens=2))) == 2

    _run(body)

    class Second:
        rank = 1

    engine.model = copy.copy(engine.model)
    engine.model.group = Second()  # type: ignore[misc,assignment]
    with pytest.raises(ValueError, match=r"this is rank 1: rank 0 takes the requests; call engine.follow\(\)"):
        AsyncEngine(engine)


def test_answers_that_are_not_read_are_cancelled() -> None:
    """The others are served; the reader gets an error, and nothing of the unread events is held."""
    engine = _engine()

    async def body() -> None:
        async with AsyncEngine(engine) as serve:
            requests = [Request([1, 2], max_new_tokens=40, n=2), Request([3], max_new_tokens=40)]
            unread = await serve.submit(*requests, most_unread=5000)
            other = await serve.complete(Request([4], max_new_tokens=60))
            assert len(_tokens(other)) == 60
            await serve.drain()
            with pytest.raises(SlowReader, match="more than 5000 bytes"):
                async for _ in unread:
                    pass
            assert unread._queue.empty()
            assert [position async for position, _ in unread] == []
            read = await serve.submit(*requests, most_unread=10**6)
            assert len([event async for _, event in read]) == 120

    _run(body)
    assert_idle(engine)


def test_a_reader_with_many_events_lets_others_run() -> None:
    engine = _engine()

    async def body() -> int:
        async with AsyncEngine(engine) as serve:
            submitted = await serve.submit(Request([1, 2], max_new_tokens=60))
            await serve.drain()
            turns = 0

            async def other() -> None:
                nonlocal turns
                while True:
                    turns += 1
                    await asyncio.sleep(0)

            task = asyncio.create_task(other())
            assert len([event async for event in submitted]) == 60
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            return turns

    assert _run(body) >= 3
    assert_idle(engine)
