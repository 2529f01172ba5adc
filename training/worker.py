"""One worker process of ``launch``: run as a script, so that its first lines need nothing but Python.

    python worker.py PARENT_PID FOLDER THREADS

``FOLDER/job.pickle`` names the function and holds its arguments. This rank leaves ``result-RANK.pickle`` there, or
``error-ATTEMPT-RANK.json``, which stays: ranks that are started again read each other's while others already write.
torchrun's agent sets RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT and TORCHELASTIC_RESTART_COUNT. Started again after a
failure, it tries once more only if that may help.
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
    """Have the kernel kill this process when ``parent`` dies, however it dies. Linux only."""
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the line above
        os._exit(1)


def loopback() -> str:
    """The name of the loopback interface: lo on Linux, lo0 on the BSDs and macOS."""
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in ("lo", "lo0") if name in names), "lo")


def main(folder: Path, threads: str) -> int:
    # Both libraries otherwise look the host's name up and talk over whatever interface that leads to.
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = loopback()
    os.environ["OMP_NUM_THREADS"] = threads
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    rank, attempt = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
    if any(json.loads(path.read_text())["final"] for path in folder.glob("error-*.json")):
        return 1
    try:
        module, name, args = pickle.loads((folder / "job.pickle").read_bytes())
        value = getattr(importlib.import_module(module), name)(*args)
        _write(folder / f"result-{rank}.pickle", pickle.dumps(value))
    except Exception as error:
        trace = traceback.format_exc()
        report = {
            "kind": type(error).__name__,
            "message": str(error),
            "trace": trace,
            "time": time.monotonic_ns(),
            # A peer that is gone, memory or a disk that is full: these may be otherwise the next time.
            "final": not isinstance(error, (RuntimeError, OSError, MemoryError)),
        }
        try:
            _write(folder / f"error-{attempt}-{rank}.json", json.dumps(report).encode())
        except OSError:  # the disk may be what is wrong
            print(trace, file=sys.stderr)
        return 1
    return 0


def _write(path: Path, content: bytes) -> None:
    """Whoever finds ``path`` finds all of it."""
    beside = path.with_suffix(".writing")
    beside.write_bytes(content)
    beside.rename(path)


if __name__ == "__main__":
    die_with(int(sys.argv[1]))
    here = Path(__file__).resolve().parent
    sys.path[:] = [entry for entry in sys.path if entry and Path(entry).resolve() != here]  # `import data` is not ours
    code = main(Path(sys.argv[2]), sys.argv[3])
    sys.stdout.flush()
    sys.stderr.flush()
    # Past the interpreter's clean-up: with a rank gone, closing its process groups may wait for the dead.
    os._exit(code)
