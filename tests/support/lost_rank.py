"""One of two ranks that serve requests without end, for tests that take a rank away: ``python lost_rank.py``.

Rank 0 prints a line when the first answer is there, and when it cannot go on a JSON object of what became of its
requests. Rank 1 prints what :meth:`Engine.follow` raised. Both read torchrun's variables; MESH_TIMEOUT is in seconds.
"""

from __future__ import annotations

import json
import os
from datetime import timedelta

from shardfuse.parallel.core.rendezvous import init_mesh
from shardfuse.serving import Engine, RanksLost, Request
from shardfuse.testing import tiny_model


def lead(engine: Engine) -> dict[str, object]:
    """Keep six requests alive until a step says that a rank is lost."""
    added, ended, told = 0, {}, False
    while not any(why == "error" for why in ended.values()):
        while added - len(ended) < 6:
            engine.add(Request([1 + added % 7, 2, 3], max_new_tokens=40))
            added += 1
        for event in engine.step():
            if event.finish is not None:
                ended[event.request] = event.finish
                error = event.error
        if ended and not told:
            print("served", flush=True)
            told = True
    try:
        engine.add(Request([1]))
        refused = ""
    except RanksLost as lost:
        refused = str(lost)
    reasons = list(ended.values())
    return {"live": added - len(ended), "failed": reasons.count("error"), "error": str(error), "refused": refused,
            "kind": type(error).__name__, "busy": engine.busy}  # fmt: skip


if __name__ == "__main__":
    mesh = init_mesh(tp=2, device_type="cpu", timeout=timedelta(seconds=float(os.environ["MESH_TIMEOUT"])))
    with Engine(
        tiny_model("gated", mesh=mesh, max_positions=64), num_blocks=64, block_size=4, max_num_seqs=4
    ) as serving:
        if os.environ["RANK"] == "0":
            print(json.dumps(lead(serving)), flush=True)
        else:
            try:
                serving.follow()
            except RuntimeError as gone:
                print(json.dumps({"kind": type(gone).__name__, "error": str(gone)}), flush=True)
    os._exit(0)  # process groups with a dead peer may wait when they are destroyed
