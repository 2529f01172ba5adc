"""One worker process of ``launch``: run as a script, so that its first lines need nothing but Python.

    python worker.py PARENT_PID FOLDER THREADS

``FOLDER/job.pickle`` names the function and holds its arguments. This rank writes ``result-RANK.pickle`` there, or
``error-ATTEMPT-RANK.json``. Error files are never removed: restarted ranks read each other's while others write theirs.
torchrun's agent sets RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT and TORCHELASTIC_RESTART_COUNT. After a failure a
restarted worker tries again only if that may help.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import pickle
import signal
import socket
import sys
import time
import traceback
from pathlib import Path

PR_SET_PDEATHSIG = 1


def die_with(parent: int) -> None:
    """Make the kernel kill this process when ``parent`` dies for any reason. Linux only."""
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent died before the line above
        os._exit(1)


def loopback() -> str:
    """The name of the loopback interface: lo on Linux, lo0 on the BSDs and macOS."""
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in ("lo", "lo0") if name in names), "lo")


def main(folder: Path, threads: str) -> int:
    # By default both libraries look up the host's name and use the interface of its address.
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = loopback()
    os.environ["OMP_NUM_THREADS"] = threads
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    rank, attempt = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
    if any(json.loads(path.read_text())["final"] for path in folder.glob("error-*.json")):
        return 1
    try:
        # The process that started this one wrote it, into a folder for this user alone.
        module, name, args = pickle.loads((folder / "job.pickle").read_bytes())  # noqa: S301
        value = getattr(importlib.import_module(module), name)(*args)
        _write(folder / f"result-{rank}.pickle", pickle.dumps(value))
    except Exception as error:
        trace = traceback.format_exc()
        report = {
            "kind": type(error).__name__,
            "message": str(error),
            "trace": trace,
            "time": time.monotonic_ns(),
            # A dead peer, full memory or a full disk may not recur at the next attempt.
            "final": not isinstance(error, (RuntimeError, OSError, MemoryError)),
        }
        try:
            _write(folder / f"error-{attempt}-{rank}.json", json.dumps(report).encode())
        except OSError:  # the disk may be the cause
            print(trace, file=sys.stderr)
        return 1
    return 0


def _write(path: Path, content: bytes) -> None:
    """Write ``path`` atomically: a reader never sees part of it."""
    beside = path.with_suffix(".writing")
    beside.write_bytes(content)
    beside.rename(path)


if __name__ == "__main__":
    die_with(int(sys.argv[1]))
    here = Path(__file__).resolve().parent
    sys.path[:] = [entry for entry in sys.path if entry and Path(entry).resolve() != here]  # hide our folder data
    code = main(Path(sys.argv[2]), sys.argv[3])
    sys.stdout.flush()
    sys.stderr.flush()
    # Skip the interpreter's clean-up: closing a process group may wait forever for a dead rank.
    os._exit(code)
