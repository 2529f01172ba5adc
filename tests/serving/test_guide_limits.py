"""Guides that would end the process, fill its memory or compile for ever end their own request only."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tokenizers", reason="tokenizers is not installed (pip install .[hf])")
pytest.importorskip("llguidance", reason="llguidance is not installed (pip install .[guided])")

import sockets
import tokenizer_case as case
from launched import Leftovers

from shardfuse.serving import Engine, Guide, Request, SamplingParams, TokenEvent, guide_process, guiding
from shardfuse.serving.guide import GuideBusy, GuideRefused

TOKENIZER = case.byte_level()
END = TOKENIZER.token_to_id(case.END)
LONG_S = 60.0
ENDLESS = [Guide.json_schema({"type": "integer", "multipleOf": number}) for number in (9999991, 9999973, 9999971)]


def _references(count: int) -> Guide:
    chain = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(count)}
    return Guide.json_schema({"$defs": {**chain, f"d{count}": {"type": "integer"}}, "$ref": "#/$defs/d0"})


def _rules(count: int) -> Guide:
    chain = "\n".join(f"r{i}: r{i + 1}" for i in range(count))
    return Guide.grammar(f'start: r0\n{chain}\nr{count}: "a"')


def _engine(**options: Any) -> Engine:
    given = {"block_size": 4, "num_blocks": 2000, "max_num_seqs": 32, "tokenizer": TOKENIZER, **options}
    return Engine(case.model(), **given)


def _request(guide: Guide, **options: Any) -> Request:
    return Request([40, 7, 100], 40, stop=[END], sampling=SamplingParams(guide=guide), **options)


def _run(engine: Engine, guide: Guide) -> list[TokenEvent]:
    number = engine.add(_request(guide))
    return [event for event in engine.run() if event.request == number]


def _forks(engine: Engine) -> int:
    """The processes that compile a guide now."""
    compiler = engine._guides._compiler
    return 0 if compiler is None or compiler.pid is None else len(sockets.family(compiler.pid)) - 1


def _until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LONG_S
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("guide", "options", "says"),
    [
        (_references(20_000), {}, "json_schema is too complex: it nests too deeply, or its definitions refer"),
        (_rules(30_000), {}, "grammar is too complex: it nests too deeply, or its definitions refer"),
        (ENDLESS[0], {"guide_timeout_s": 0.2}, "json_schema is too complex: it needs more than 0.2 s to compile"),
        (Guide.choice(["a" * 300_000]), {"guide_memory_mib": 64}, "choice is too complex: it needs more than 16 MiB"),
        (Guide.regex("(" * 20_000), {}, "regex cannot be compiled"),
        (Guide.choice([f"{i} {i % 7}" for i in range(3000)]), {}, ""),
        (_references(1000), {}, ""),
    ],
    ids=["references", "rules", "endless", "large", "open", "many-choices", "some-references"],
)
def test_a_guide_beyond_the_limits_ends_its_request_alone(guide: Guide, options: dict[str, Any], says: str):
    engine = _engine(**options)
    *_, last = _run(engine, guide)
    if says:
        assert isinstance(last.error, GuideRefused)
        assert not isinstance(last.error, GuideBusy)
        assert says in str(last.error)
    else:
        assert last.error is None
    *_, last = _run(engine, Guide.choice(["yes"]))
    assert last.finish == "stop"
    engine.close()


def test_what_compiles_long_holds_up_nobody_and_ends_with_its_request():
    engine = _engine()
    numbers = [engine.add(_request(guide)) for guide in ENDLESS]
    quick = engine.add(_request(Guide.choice(["yes"])))
    finished = [event.request for event in iter(lambda: _next(engine), None) if event.finish]
    assert finished == [quick]
    assert _forks(engine) == len(numbers)
    for number in numbers:
        engine.cancel(number)
    engine.step()
    _until(lambda: _forks(engine) == 0)
    engine.close()


def _next(engine: Engine) -> TokenEvent | None:
    """The next event; None once only guides that compile are left."""
    for _ in range(1000):
        for event in engine.step():
            return event
        if len(engine._live) == len(ENDLESS):
            return None
    raise AssertionError("the engine gave no token")


def test_another_process_replaces_one_that_was_killed():
    engine = _engine()
    first = engine.add(_request(ENDLESS[0]))
    _until(lambda: bool(engine.step()) or _forks(engine) == 1)
    compiler = engine._guides._compiler
    killed = compiler.pid
    os.kill(killed, signal.SIGKILL)
    _until(lambda: engine.step() is None or (compiler.pid != killed and _forks(engine) == 1))  # it is tried again
    assert engine.lives(first)
    os.kill(compiler.pid, signal.SIGKILL)
    (event,) = list(engine.run())
    assert "the process that compiles guides ended with -9, 2 times in a row" in str(event.error)
    *_, last = _run(engine, Guide.choice(["yes"]))
    assert last.finish == "stop"
    engine.close()


def test_kept_guides_take_no_more_memory_than_they_may(monkeypatch: pytest.MonkeyPatch):
    engine = _engine(guide_memory_mib=64)
    kept = engine._guides._compiled
    sizes = []
    for number in range(9):
        *_, last = _run(engine, Guide.choice([f"{number}" + "a" * 20_000]))
        assert last.finish == "length"
        sizes.append(sum(each.nbytes for each in kept.values()))
    assert max(sizes) <= 64 << 20
    assert sizes[-1] > sizes[0] > 1 << 20  # several are kept, and what they take was measured
    assert 1 < len(kept) < 9
    monkeypatch.setattr(guiding, "_KEPT", 1)
    _run(engine, Guide.choice(["yes"]))
    assert list(kept) == [Guide.choice(["yes"])]
    engine.close()


def test_a_guide_without_room_beside_those_in_use_may_come_again():
    engine = _engine(guide_memory_mib=64)
    running = engine.add(_request(Guide.choice(["b" * 20_000])))
    _until(lambda: bool(engine.step()))
    (used,) = engine._guides._compiled.values()
    used.nbytes = 60 << 20
    waiting = Guide.choice(["a" * 20_000])
    number = engine.add(_request(waiting))
    error = next(event.error for event in list(engine.run()) if event.request == number)
    assert isinstance(error, GuideBusy)
    assert "needs more than 1 MiB of memory to compile, and the guides in use now leave no more" in str(error)
    assert not engine.lives(running)
    *_, last = _run(engine, waiting)
    assert last.finish == "length"
    engine.close()


def test_no_number_of_guides_that_compile_long_holds_up_another():
    engine = _engine()
    for number in range(9999991, 9999991 - 80, -2):
        engine.add(_request(Guide.json_schema({"type": "integer", "multipleOf": number})))
    _until(lambda: bool(engine.step()) or _forks(engine) == guide_process._FORKS)
    quick = engine.add(_request(Guide.choice(["yes"])))
    while engine.lives(quick):
        events = engine.step()
    assert [event.error for event in events if event.request == quick] == [None]
    assert len(engine._live) > 20  # they compile still
    engine.close()


def test_the_process_ends_with_an_engine_that_is_dropped(monkeypatch: pytest.MonkeyPatch):
    late = threading.Event()
    guarded = guiding._guarded

    def linger(*work: Any) -> None:
        guarded(*work)
        late.wait(LONG_S)

    monkeypatch.setattr(guiding, "_guarded", linger)
    engine = _engine()
    _run(engine, Guide.choice(["yes"]))
    pid = engine._guides._compiler.pid
    assert Path(f"/proc/{pid}").exists()
    del engine
    gc.collect()
    gc.disable()  # what a thread held until now goes without it
    try:
        late.set()
        _until(lambda: not Path(f"/proc/{pid}").exists())
    finally:
        gc.enable()


# A guide on trial, and one that passed and is compiled in the program itself.
PROGRAM = """
import sys
from test_guide_limits import ENDLESS, WIDE, _engine, _forks, _request, _until, guiding
engine = _engine()
if sys.argv[1] == "trial":
    engine.add(_request(ENDLESS[0]))
    _until(lambda: bool(engine.step()) or _forks(engine) == 1)
else:
    begun, build = [], guiding.build
    guiding.build = lambda *some: begun.append(1) or build(*some)
    engine.add(_request(WIDE))
    _until(lambda: bool(engine.step()) or begun)
print("compiles", flush=True)
"""
WIDE = Guide.json_schema(
    {"type": "object", "properties": {f"p{i}": {"enum": [f"{i}_{j}" for j in range(60)]} for i in range(1000)}}
)


@pytest.mark.parametrize("when", ["trial", "build"])
def test_a_program_ends_whatever_compiles(when: str):
    leftovers = Leftovers()
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    program = subprocess.run(
        [sys.executable, "-c", PROGRAM, when],
        env={**leftovers.environment(), "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=2 * LONG_S,
    )
    assert (program.returncode, program.stdout) == (0, "compiles\n"), program.stderr
    leftovers.assert_none(within=LONG_S)  # what has a low priority frees its memory slowly beside others


@pytest.mark.parametrize(
    "options", [{"guide_timeout_s": 0}, {"guide_timeout_s": float("inf")}, {"guide_memory_mib": 0}]
)
def test_limits_that_make_no_sense_are_refused(options: dict[str, Any]):
    with pytest.raises(ValueError, match=f"{next(iter(options))}="):
        _engine(**options)
