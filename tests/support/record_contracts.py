"""Write down what an unpacked version of a host has of its contract, or compare it with what was written down.

    python tests/support/record_contracts.py HOST VERSION ROOT [--check]

ROOT is the folder that holds the host's package: an unpacked wheel, or a site-packages. The facts go to
contracts.json, from which ``make test`` compares where the host is not installed.
"""

from __future__ import annotations

import argparse
import importlib
import json
from pathlib import Path
from typing import Any

from shardfuse.integrations import contract

FILE = Path(__file__).parents[1] / "integrations" / "contracts.json"


def recorded(host: str, version: str) -> dict[str, Any]:
    """What was written down. KeyError where nothing was."""
    return json.loads(FILE.read_text(encoding="utf-8"))[host][version]


def record(host: str, version: str, facts: dict[str, Any]) -> None:
    """Put an entry into the file, and leave the others."""
    entries: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8")) if FILE.is_file() else {}
    entries.setdefault(host, {})[version] = facts
    FILE.write_text(json.dumps(entries, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def main() -> None:
    """The command above; exits with 1 where something differs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("host", help="vllm, transformers or sglang")
    parser.add_argument("version")
    parser.add_argument("root", type=Path, help="the folder that holds the host's package")
    parser.add_argument("--check", action="store_true", help="compare with the file instead of writing to it")
    args = parser.parse_args()
    if not (args.root / args.host).is_dir():
        parser.error(f"{args.root} holds no package {args.host!r}")
    expected = importlib.import_module(f"shardfuse.integrations.{args.host}.contract").CONTRACT
    facts = contract.read(args.root, expected)
    wrong = contract.differences(facts, expected)
    if args.check:
        before = recorded(args.host, args.version)
        changed = sorted(each for each in {*facts, *before} if facts.get(each) != before.get(each))
        wrong += [f"{each}: recorded {before.get(each)}, found {facts.get(each)}" for each in changed]
    else:
        record(args.host, args.version, facts)
    for line in wrong:
        print(line)
    print(f"{args.host} {args.version}: {len(facts)} facts, {len(wrong)} differences")
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()
