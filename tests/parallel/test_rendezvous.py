"""Restarted processes find each other, whatever state dead processes left in torchrun's store."""

from __future__ import annotations

import socket
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from shardfuse.parallel.core import rendezvous
from shardfuse.parallel.core.rendezvous import LEADER, loopback_store, start_name

WAIT = timedelta(seconds=60)


@pytest.fixture
def server() -> dist.TCPStore:
    return loopback_store()


def _meet(server: dist.TCPStore, rank: int, world: int, timeout: timedelta = WAIT) -> str:
    """Join the rendezvous like a process, with a separate connection."""
    store = dist.TCPStore("127.0.0.1", server.port, is_master=False, timeout=timeout, wait_for_workers=False)
    return start_name(store, rank, world, timeout)


def test_every_start_has_a_name_of_its_own(server: dist.TCPStore):
    names = []
    with ThreadPoolExecutor(3) as pool:
        for _ in range(3):
            started = [pool.submit(_meet, server, rank, 3) for rank in (2, 0, 1)]
            (name,) = {each.result() for each in started}
            names.append(name)
    assert len(set(names)) == 3
    assert start_name(server, 0, 1, WAIT) not in names


@pytest.mark.parametrize("complete", [True, False])
def test_whoever_comes_first_does_not_follow_a_dead_rank_0(
    server: dist.TCPStore, complete: bool, monkeypatch: pytest.MonkeyPatch
):
    """The dead attempt had completed its rendezvous, or its rank 0 was still waiting."""
    monkeypatch.setattr(rendezvous, "PATIENCE", timedelta(milliseconds=50))
    old = "shardfuse/old"
    server.set(LEADER, old)
    server.set(f"{old}/1", "dead")
    if complete:
        server.set(f"{old}/answers", "dead")
    with ThreadPoolExecutor(3) as pool:
        early = [pool.submit(_meet, server, rank, 3) for rank in (1, 2)]
        while server.get(f"{old}/1") == b"dead" or not server.check([f"{old}/2"]):
            assert not any(map(Future.done, early))
        (name,) = {_meet(server, 0, 3), *(each.result() for each in early)}
    assert name != old


def test_a_rank_0_that_does_not_come_is_waited_for_so_long(server: dist.TCPStore, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(rendezvous, "PATIENCE", timedelta(milliseconds=50))
    server.set(LEADER, "shardfuse/old")
    with pytest.raises(dist.DistStoreError, match="rank 0 of 2 did not connect within"):
        _meet(server, 1, 2, timedelta(seconds=0.3))
    with pytest.raises(dist.DistStoreError):
        _meet(server, 0, 2, timedelta(seconds=0.3))


def test_a_rank_that_has_reached_an_earlier_store_goes_on_to_the_next(monkeypatch: pytest.MonkeyPatch):
    """Without torchrun's agent, a process starts again while rank 0 still keeps the store of the start before."""
    old = loopback_store()
    port = old.port
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": 1, "WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    for key, value in {LEADER: "shardfuse/old", "shardfuse/old/1": "before", "shardfuse/old/answers": "before"}.items():
        old.set(key, value)
    with ThreadPoolExecutor(1) as pool:
        started = pool.submit(rendezvous.own_store, WAIT)
        while old.get("shardfuse/old/1") == b"before":
            assert not started.done()
        del old  # which ends it
        new = loopback_store(port)
        name = start_name(new, 0, 2, WAIT)
        store, rank, world = started.result()
    assert (rank, world) == (1, 2)
    store.set("of", "this start")
    assert dist.PrefixStore(name, new).get("of") == b"this start"


def test_without_a_store_of_torchruns_there_is_none(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    assert rendezvous.agent_store(None) is None
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "False")
    assert rendezvous.agent_store(None) is None


def _fail(*args: object, **options: object) -> None:
    raise AssertionError("torch's client would go on for up to 2.5 times the timeout")


def test_a_store_is_waited_for_so_long(monkeypatch: pytest.MonkeyPatch):
    for name in ("TCPStore", "init_process_group"):
        monkeypatch.setattr(dist, name, _fail)
    with socket.socket() as store, ThreadPoolExecutor(1) as pool:
        store.bind(("127.0.0.1", 0))  # it does not listen yet
        variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.getsockname()[1], "RANK": 1, "WORLD_SIZE": 2}
        for name, value in variables.items():
            monkeypatch.setenv(name, str(value))
        with pytest.raises(RuntimeError, match=r"the 2 processes could not connect at 127\.0\.0\.1"):
            rendezvous.connect("cpu", timedelta(seconds=0.2))
        waiting = pool.submit(rendezvous.connect, "cpu", WAIT)
        store.listen()
        with pytest.raises(AssertionError, match="torch's client"):
            waiting.result()


def test_processes_under_torchrun_use_its_store_under_a_new_name(
    server: dist.TCPStore, monkeypatch: pytest.MonkeyPatch
):
    server.set("default", "of the dead")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": server.port, "RANK": 0, "WORLD_SIZE": 1}.items():
        monkeypatch.setenv(name, str(value))
    found = rendezvous.agent_store(WAIT)
    assert found is not None
    store, rank, world = found
    assert (rank, world) == (0, 1)
    assert not store.check(["default"])
    store.set("default", "of the living")
    assert server.get("default") == b"of the dead"
