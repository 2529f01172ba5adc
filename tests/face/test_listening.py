"""No command opens a port to other machines unless it is asked to: every socket, of every process, at any time.

The demo's test and ``http_load.serving`` look at the sockets of demos and servers.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import sockets
import torch.distributed as dist
import train_case
from launched import Leftovers

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.skipif(not Path("/proc/self/net/tcp").exists(), reason="reads Linux's /proc"),
]
COMMANDS = {
    "generate": ("generate", "--tiny", "--tp", "2", "--device", "cpu", "--prompt", "hi", "--max-tokens", "2"),
    "train": ("train", "run.toml"),
    "bench": ("bench", "calibrate", "--ranks", "2", "--device", "cpu", "--dry", "--out", "links.json"),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_listens_on_the_loopback_interface_alone(name: str, tmp_path: Path) -> None:
    train_case.write_toml(tmp_path / "run.toml", train_case.values("out", steps=2, parallel={"tp": 2}))
    leftovers = Leftovers()
    command = [sys.executable, "-m", "shardfuse", *COMMANDS[name]]
    process = subprocess.Popen(
        command, cwd=tmp_path, env=leftovers.environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    with sockets.watched(process.pid) as seen:
        output, _ = process.communicate()
    assert process.returncode == 0, output
    assert seen, output  # ranks meet at a port at least
    assert all(address.local for address in seen), seen
    leftovers.assert_none()


def _nothing(rank: int, world: int) -> int:
    return dist.get_world_size()


def test_the_tests_own_ranks_do(ranks) -> None:
    with sockets.watched(os.getpid()) as seen:
        assert ranks(2, _nothing) == [2, 2]
        time.sleep(10 * sockets.PAUSE_S)
    assert seen
    assert all(address.local for address in seen), seen


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "::1", "::"])  # noqa: S104 - what the test is about
def test_a_socket_is_seen_as_it_is(host: str) -> None:
    kind = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, 0), family=kind)
    except OSError:
        pytest.skip(f"this machine has no {host}")
    with listener:
        (found,) = [each for each in sockets.listening(os.getpid()) if each.port == listener.getsockname()[1]]
    assert (found.host, found.local) == (host, host in ("127.0.0.1", "::1"))
