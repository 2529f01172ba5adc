"""A rank that is killed or stopped under load: the others say so within the mesh's timeout, and nothing hangs."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).parents[1] / "support" / "lost_rank.py"
TIMEOUT = 10.0  # of the mesh
MARGIN = 30.0  # for a busy machine


@contextlib.contextmanager
def _two_ranks() -> Iterator[list[subprocess.Popen[str]]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    common |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "MESH_TIMEOUT": str(TIMEOUT)}
    started = [
        subprocess.Popen(
            [sys.executable, str(PROGRAM)],
            env=common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        yield started
    finally:
        for each in started:
            each.kill()
            each.communicate()


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("how", "lost"),
    [
        (signal.SIGKILL, 1),
        (signal.SIGKILL, 0),
        (signal.SIGSTOP, 1),
        pytest.param(signal.SIGSTOP, 0, marks=pytest.mark.nightly),
    ],
)
def test_the_others_say_so_in_time(lost: int, how: signal.Signals) -> None:
    with _two_ranks() as ranks:
        assert ranks[0].stdout is not None
        assert ranks[0].stdout.readline() == "served\n"
        began = time.monotonic()
        ranks[lost].send_signal(how)
        out, _ = ranks[1 - lost].communicate(timeout=2 * TIMEOUT + MARGIN)
        took = time.monotonic() - began
    found: dict[str, Any] = json.loads(out.splitlines()[-1])
    assert took < TIMEOUT + MARGIN
    assert found["kind"] == "RanksLost"
    assert "rank" in found["error"]
    if lost == 1:
        assert found["failed"] == 6  # every request that lived
        assert (found["live"], found["busy"]) == (0, False)
        assert found["refused"] == found["error"]
