"""Which addresses a process and its children listen on, by Linux's /proc, while a test lets them run."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

PAUSE_S = 0.03
_LISTENING = "0A"


class Address(NamedTuple):
    """An address that a process listens on."""

    command: str
    host: str
    port: int

    @property
    def local(self) -> bool:
        return ipaddress.ip_address(self.host).is_loopback


def family(pid: int) -> list[int]:
    """A process and all processes below it."""
    found = [pid]
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                found += family(int(child))
    return found


def listening(pid: int) -> set[Address]:
    """The addresses that a process and all processes below it listen on now."""
    found = set()
    for each in family(pid):
        with contextlib.suppress(OSError):  # it has ended
            links = set()
            for file in Path(f"/proc/{each}/fd").iterdir():
                with contextlib.suppress(OSError):
                    links.add(os.readlink(file))
            command = Path(f"/proc/{each}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:120]
            for table in ("tcp", "tcp6"):
                for line in Path(f"/proc/{each}/net/{table}").read_text().splitlines()[1:]:
                    _, local, _, state, *_, inode = line.split()[:10]
                    if state == _LISTENING and f"socket:[{inode}]" in links:
                        found.add(Address(command, *_parsed(local)))
    return found


def _parsed(text: str) -> tuple[str, int]:
    """An address as the kernel prints it: 32-bit words of the machine's byte order in hexadecimal, and the port."""
    host, port = text.split(":")
    words = [bytes.fromhex(host[i : i + 8])[::-1] for i in range(0, len(host), 8)]
    return str(ipaddress.ip_address(b"".join(words))), int(port, 16)


@contextlib.contextmanager
def watched(pid: int) -> Iterator[set[Address]]:
    """Collect, within the block, every address that the process and those below it listen on at any time."""
    seen: set[Address] = set()
    over = threading.Event()

    def watch() -> None:
        while not over.wait(PAUSE_S):
            seen.update(listening(pid))

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield seen
    finally:
        over.set()
        thread.join()
