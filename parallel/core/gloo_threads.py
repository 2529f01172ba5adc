"""Wait, before the interpreter ends, until gloo's worker threads have released the tensors they hold.

A worker thread drops its work, tensors included, a moment after the collective's caller continues. Freeing a tensor
that Python knows takes the GIL, and before Python 3.14 a finalising interpreter ends a thread that asks for it. Here
that happens within a destructor, and the whole process aborts: "terminate called without an active exception".
Destroying the process groups does not help, since the threads stay while any variable holds a group, and a script's
variables live until the interpreter ends. So the last hook before that waits until the threads are idle. The bug in
torch: https://github.com/pytorch/pytorch/issues/190489
"""

from __future__ import annotations

import time
from pathlib import Path

THREAD = "pt_gloo_runloop"  # torch's name for a worker thread
LIMIT_S = 5.0  # a collective with a missing peer keeps a thread busy for longer than a process should wait
LOOK_S = 0.001
BLIND_S = 0.1  # for systems that hide a thread's wait: much longer than dropping a work takes
TASKS = Path("/proc/self/task")


def settle(limit_s: float = LIMIT_S) -> bool:
    """Wait until no worker thread of gloo holds a work. False if ``limit_s`` seconds do not suffice."""
    deadline = time.monotonic() + limit_s
    before: dict[str, str] = {}
    while waits := _waits():
        if not all(waits.values()):
            time.sleep(BLIND_S)
            return False
        # Threads are read one after another, so one reading may miss a lock passed between them; two do not.
        if waits == before and all(map(_is_idle, waits.values())):
            return True
        if time.monotonic() > deadline:
            return False
        before = waits
        time.sleep(LOOK_S)  # releases the GIL, which the threads may need
    return True


def _waits() -> dict[str, str]:
    """The system call in which each worker thread waits, as in proc_pid_syscall(5); empty if the system hides it."""
    waits = {}
    for task in TASKS.iterdir() if TASKS.exists() else ():
        if _read(task / "comm") == THREAD:
            waits[task.name] = _read(task / "syscall")
    return {name: wait for name, wait in waits.items() if (TASKS / name).exists()}  # drops those that have ended


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _is_idle(wait: str) -> bool:
    """Whether ``wait`` is a wait for work: the number of futex(2), six arguments and two registers.

    The fourth argument is a time limit. A wait for work has none; waits for a peer and for the GIL have one.
    """
    fields = wait.split()
    return len(fields) == 9 and fields[4] == "0x0"
