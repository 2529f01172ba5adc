"""What ran in which host: the rows that the lanes wrote, and the table of ``docs/integrations.md`` made of them.

``python tests/support/host_table.py --write`` writes it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
ROWS = ROOT / "tests" / "integrations" / "rows"
CONTRACTS = ROOT / "tests" / "integrations" / "contracts.json"
PAGE = ROOT / "docs" / "integrations.md"
BEGIN, END = "<!-- table -->", "<!-- end of the table -->"
_HOSTS = ("vLLM", "transformers")
_KEEP = ("host", "version", "architecture", "case", "ok", "refused", "attention", "writes", "copied_pages", "why")


def write(name: str, rows: Sequence[dict[str, Any]]) -> None:
    """Replace the rows of a lane, with the machine and the commit that they come from."""
    import torch

    from shardfuse.bench.harness import provenance

    # The rows of other lanes, and of this one in other versions, were not looked at.
    changed = ["git", "-C", str(ROOT), "status", "--porcelain", "--", ".", f":!{ROWS.relative_to(ROOT)}"]
    origin = provenance.describe(torch.device("cpu"))
    origin["dirty"] = bool(subprocess.run(changed, capture_output=True, text=True, check=True).stdout)
    kept = [{field: row[field] for field in _KEEP if field in row} for row in rows]
    ROWS.mkdir(exist_ok=True)
    lines = ",\n  ".join(map(json.dumps, kept))
    (ROWS / f"{name}.json").write_text(f'{{\n "origin": {json.dumps(origin)},\n "rows": [\n  {lines}\n ]\n}}\n')


def read(name: str) -> dict[str, Any]:
    """Origin and rows of a lane."""
    found: dict[str, Any] = json.loads((ROWS / f"{name}.json").read_text())
    return found


def merged(name: str, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of a lane as they were written, with these in the place of those of the same cases."""

    def key(row: dict[str, Any]) -> tuple[str, ...]:
        return tuple(str(row[field]) for field in ("version", "architecture", "case"))

    return [row for row in read(name)["rows"] if key(row) not in set(map(key, rows))] + list(rows)


def contracts() -> dict[str, dict[str, Any]]:
    """What the contracts found, by host and version."""
    found: dict[str, dict[str, Any]] = json.loads(CONTRACTS.read_text())
    return found


def page() -> str:
    """``docs/integrations.md`` with the table as it is to be."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    return f"{before}{BEGIN}\n{table()}\n{END}{rest.partition(END)[2]}"


def table() -> str:
    """Architectures by host and version, then what else was run, then the contracts, in Markdown."""
    rows = [row for host in _HOSTS for row in read(host.lower())["rows"]]
    plain = [row for row in rows if not row.get("case")]
    hosts = sorted({(row["host"], row["version"]) for row in plain}, key=lambda host: (_HOSTS.index(host[0]), host[1]))
    cells = {(row["architecture"], row["host"], row["version"]): _cell(row) for row in plain}
    kinds = list(dict.fromkeys(row["architecture"] for row in plain))
    lines = ["| model | " + " | ".join(f"{host} {version}" for host, version in hosts) + " |"]
    lines += ["|" + " --- |" * (len(hosts) + 1)]
    lines += [f"| {kind} | " + " | ".join(cells.get((kind, *host), "") for host in hosts) + " |" for kind in kinds]
    others: dict[tuple[str, str, str, str], list[str]] = {}
    for row in rows:
        if row.get("case"):
            others.setdefault((row["host"], row["case"], row["architecture"], _verdict(row)), []).append(row["version"])
    lines += ["", "| what else ran | model | result |", "| --- | --- | --- |"]
    lines += [
        f"| {host} {', '.join(versions)}: {case} | {kind} | {verdict} |"
        for (host, case, kind, verdict), versions in others.items()
    ]
    found = contracts()
    lines += ["", "| contract compared with the sources of | expectations |", "| --- | --- |"]
    lines += [
        f"| {host} {version} | {len(facts)} |" for host in sorted(found) for version, facts in found[host].items()
    ]
    return "\n".join(lines)


def _cell(row: dict[str, Any]) -> str:
    return f"{_verdict(row)}, {row['attention']} calls" if row["ok"] and row.get("attention") else _verdict(row)


def _verdict(row: dict[str, Any]) -> str:
    if row.get("refused") or "refused" in row.get("why", ""):
        return "refused"
    if not row["ok"]:
        return row.get("why") or "differs"
    return "equal, windows gathered" if row.get("copied_pages") else "equal"


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        PAGE.write_text(page())
    else:
        sys.exit(__doc__)
