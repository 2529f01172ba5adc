"""Where results are filed: a GPU's by its name, a CPU's by its kind."""

from __future__ import annotations

import json
import statistics
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from shardfuse.bench.harness import places, publish, stale

KINDS = {
    "x86_64, AMD EPYC, family 25, model 17": "amd-zen4",
    "x86_64, AMD EPYC 7763 64-Core Processor, family 25, model 1": "amd-zen3",
    "x86_64, AMD EPYC 9755 128-Core Processor, family 26, model 2": "amd-zen5",
    "x86_64, AMD Something, family 26, model 224": "amd-family-26-model-224",
    "x86_64, Intel(R) Xeon(R) Platinum 8481C CPU @ 2.70GHz, family 6, model 143": "intel-sapphire-rapids",
    "x86_64, Intel(R) Xeon(R) CPU @ 2.20GHz, family 6, model 79": "intel-family-6-model-79",
    "x86_64": None,
    "x86_64, AMD EPYC": None,
    "aarch64, Neoverse-V2": None,
    "": None,
}
ZEN4 = "x86_64, AMD EPYC, family 25, model 17"
CLEAN = {"date": "2031-05-01T00:00:00+00:00", "commit": "abc123", "dirty": False, "environment": {}, "cpu": ZEN4}


@pytest.mark.parametrize(("description", "kind"), KINDS.items())
def test_kind_of_a_processor(description: str, kind: str | None):
    assert places.cpu_kind(description) == kind


def _record(**changes: Any) -> dict[str, Any]:
    fixed = {"bench": "fuse", "device": "cpu", "gate": "green", "dry": False, "short": False}
    return {**fixed, "rows": [{}], "missing": [], "sources": {}, "origin": CLEAN} | changes


def test_a_cpus_result_is_filed_under_its_kind(tmp_path: Path):
    assert stale.accept(_record(), tmp_path) == tmp_path / "cpu" / "amd-zen4" / "fuse.json"
    with pytest.raises(ValueError, match="vendor, family and model"):
        stale.accept(_record(origin=CLEAN | {"cpu": "x86_64"}), tmp_path)
    assert places.folder(_record(device="NVIDIA H100 80GB HBM3")) == "nvidia-h100-80gb-hbm3"
    assert {item.gpu for item in stale.survey(tmp_path)} == {stale.ANY_GPU}


def test_the_report_finds_every_kind_and_tells_them_apart(tmp_path: Path):
    committed = json.loads((stale.RESULTS / "cpu" / "amd-zen4" / "serve.json").read_text())
    other = committed | {"origin": committed["origin"] | {"cpu": "x86_64, AMD EPYC, family 26, model 2"}}
    untold = committed | {"origin": committed["origin"] | {"cpu": "x86_64"}}
    for name, record in (("cpu/amd-zen4", committed), ("cpu/amd-zen5", other), ("cpu", untold)):
        (tmp_path / name).mkdir(parents=True, exist_ok=True)
        (tmp_path / name / "serve.json").write_text(json.dumps(record))
    headings = [line for line in publish.markdown(publish.read_all([], results=tmp_path), ()) if line.startswith("## ")]
    assert headings == ["## serve on cpu (amd-zen4)", "## serve on cpu (amd-zen5)", "## serve on cpu"]


@pytest.mark.parametrize("path", sorted((stale.RESULTS / "cpu").rglob("*.json")), ids=lambda path: path.stem)
def test_a_committed_result_lies_where_it_belongs_with_date_and_noise(path: Path):
    """A record that does not tell its processor lies in no kind's folder."""
    record = json.loads(path.read_text())
    assert path.relative_to(stale.RESULTS).parent.as_posix() == (places.folder(record) or "cpu")
    assert path.stem == record["bench"]
    datetime.fromisoformat(record["origin"]["date"])
    timed = [row for row in record["rows"] if row["between"] is not None]
    assert all(row["noise"] is not None for row in timed)


def test_the_page_lists_the_committed_results():
    """The table in docs/benchmarks.md; on failure its right lines are in the error."""
    page = (Path(__file__).parents[2] / "docs" / "benchmarks.md").read_text()
    shown = page.partition("<!-- cpu results -->\n")[2].partition("<!-- /cpu results -->")[0]
    lines = ["| record below `bench/results/` | measured | rows | noise, median | largest |", "|---|---|---|---|---|"]
    for path in sorted((stale.RESULTS / "cpu").rglob("*.json")):
        record = json.loads(path.read_text())
        noise = [row["noise"] for row in record["rows"] if row["noise"] is not None]
        name, date = path.relative_to(stale.RESULTS).as_posix(), record["origin"]["date"][:10]
        found = f"{statistics.median(noise):.1%} | {max(noise):.1%}"
        lines.append(f"| `{name}` | {date} | {len(record['rows'])} | {found} |")
    assert shown == "\n".join(lines) + "\n"
