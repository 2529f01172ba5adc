"""One version's side of ``bench compare commit:A release:B``, as a process: ``python version_side.py BENCH [DEVICE]``.

It answers each line of standard input with one line of JSON. A line is {"keys": true}, {"check": CASE} or
{"time": KEY}. The package on the path is another version, whose modules may differ from those beside this file. So this
file has few imports, and they are absolute.
"""

from __future__ import annotations

import json
import os
import sys
from typing import IO, Any

SECONDS = 0.1  # for one timing of a row


def serve(bench: str, device: str | None, answers: IO[str]) -> None:
    import shardfuse
    from shardfuse.bench.harness.benchmark import Settings
    from shardfuse.bench.harness.runner import default_device, find

    if device is None:
        on = default_device()
    else:
        import torch

        on = torch.device(device)
    settings = Settings(on, seconds=SECONDS)
    benchmark = find(bench)
    rows = {tuple(row.key): row for row in benchmark.plan(settings)}

    def answer(request: dict[str, Any]) -> Any:
        if "check" in request:
            return [str(verdict) for _, verdict in benchmark.check(settings, [request["check"]]) if not verdict.ok]
        if "time" in request:
            row = rows[tuple(request["time"])]
            value = row.run()[0].value
            return 1 / value if row.higher_is_better else value
        return {"keys": list(rows), "package": shardfuse.__file__, "device": str(on)}

    for line in sys.stdin:
        print(json.dumps({"answer": answer(json.loads(line))}), file=answers, flush=True)


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a benchmark prints must not mix with the answers
    try:
        serve(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else None, answers)
    except Exception as error:
        print(json.dumps({"error": f"{type(error).__name__}: {error}"}), file=answers, flush=True)


if __name__ == "__main__":
    main()
