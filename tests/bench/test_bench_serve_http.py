"""The benchmark of the server: its path, and what it says of a side that is slower or says something else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("fastapi")
pytest.importorskip("transformers")

from shardfuse.bench.harness.benchmark import Settings
from shardfuse.bench.harness.http_side import HttpServer
from shardfuse.bench.harness.latency import Times, percentile
from shardfuse.bench.suites import serve_http

DRY = Settings(torch.device("cpu"), dry=True)


def test_the_path_and_the_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = serve_http.plan(DRY)
    (verdict, *_) = [verdict for _, verdict in serve_http.check(DRY, [rows[0].case])]
    assert verdict.ok
    for row in rows:
        ours, peer = row.run()
        assert ours.value > 0
        assert peer.value > 0
        assert row.peer_name == serve_http.SELF
    rig = serve_http._rig(True)
    loads, _ = rig.loads("poisson")
    assert [len(times.first) for times in loads] == [rig.count]
    assert [len(times.between) for times in loads] == [rig.count * (rig.new - 1)]

    class Another:
        def load(self, *given: Any) -> Times:
            found = rig.ours.load(*given)
            found.texts[0] += " another word"
            return found

    monkeypatch.setattr(rig, "peer", Another())
    (verdict, *_) = [verdict for _, verdict in serve_http.check(DRY, [rows[0].case])]
    assert not verdict.ok


def test_a_server_that_does_not_start_is_told_with_what_it_said(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="no such model"):
        HttpServer(["sh", "-c", "echo no such model; exit 3"], 1, tmp_path / "log", {"PATH": "/usr/bin:/bin"})


def test_percentiles_and_plots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    one, two = Times([0.1, 0.3], [0.01]), Times([0.2], [0.02, 0.03])
    assert percentile(0.5, lambda times: times.first, [one, two]) == 0.2
    assert percentile(0.99, lambda times: times.between, [one, two]) == 0.03

    class Rig:
        peer_name = serve_http.PEER

        def loads(self, kind: str) -> tuple[list[Times], list[Times]]:
            return [one], [two]

    monkeypatch.setattr(serve_http, "_rig", lambda dry: Rig())
    png, svg = serve_http.draw(tmp_path / "record.json")
    assert png.read_bytes()[:4] == b"\x89PNG"
    assert svg.read_text().count("<svg") == 1


SHOWN = {
    "all requests, us": "32 requests at once, until the last answer has ended",
    "first token, percentile 50, us": "time to the first token, median",
    "first token, percentile 99, us": "time to the first token, 99th percentile",
    "token to token, percentile 50, us": "time between tokens, median",
    "token to token, percentile 99, us": "time between tokens, 99th percentile",
}


def test_the_page_says_what_the_committed_result_says() -> None:
    """The table in docs/server.md, a row for each of the record's."""
    results = Path(serve_http.__file__).parents[1] / "results" / "cpu" / "amd-zen4"
    record = json.loads((results / "serve_http.json").read_text())
    page = (Path(__file__).parents[2] / "docs" / "server.md").read_text()
    assert record["gate"] == "green"
    assert {row["metric"] for row in record["rows"]} == SHOWN.keys()
    for row in record["rows"]:
        assert row["peer_name"] == serve_http.PEER
        assert f"| {SHOWN[row['metric']]} | {row['ratio']:.3g} |" in page
    assert (results / "serve_http.svg").is_file()
    assert "bench/results/cpu/amd-zen4/serve_http.svg" in page
