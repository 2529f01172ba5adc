"""Runs one function in several local processes through torchrun's launcher."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

Result = TypeVar("Result")
TAIL_LINES = 15


def launch(ranks: int, body: Callable[..., Result], *arguments: object) -> list[Result]:
    """``body(*arguments)`` in ``ranks`` processes on this machine; what each returned, by rank.

    ``body`` is a module-level function and finds torchrun's environment. The rendezvous takes a free port of the
    loopback interface. An interrupt or a failure ends every process; what a failed one wrote to its standard error
    is in the RuntimeError's message.
    """
    with tempfile.TemporaryDirectory(prefix="shardfuse-bench-") as logs:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=ranks,
            run_id="shardfuse-bench",
            rdzv_backend="c10d",
            rdzv_endpoint="127.0.0.1:0",
            local_addr="127.0.0.1",
            max_restarts=0,
            monitor_interval=0.1,
            start_method="spawn",
            logs_specs=DefaultLogsSpecs(log_dir=logs, redirects=Std.ERR),
        )
        try:
            results = elastic_launch(config, body)(*arguments)
        except SignalException as signalled:
            raise KeyboardInterrupt from signalled
        except ChildFailedError as failed:
            raise RuntimeError(f"{failed}\n{_tail(Path(logs))}") from None
    return [results[rank] for rank in range(ranks)]


def _tail(logs: Path) -> str:
    """The last lines of the longest standard error among the ranks."""
    texts = [path.read_text(errors="replace") for path in logs.rglob("stderr.log")]
    return "\n".join(max(texts, key=len, default="").splitlines()[-TAIL_LINES:])
