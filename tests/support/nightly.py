"""``make nightly-share``: what ``make test`` leaves to the night, in shares that CI takes in turn.

The number of commits in a commit's history chooses its share (``share_of``): as many commits as there are shares run
each once, and the next one is known beforehand. In a shallow clone, which cannot count them, the commit's hash chooses.
A share takes at most ``LIMIT_S`` on two cores. Commands that take longer are divided by the arguments of their make
target. ``ALONE`` lists what stays nightly. The commit gives the seed of the fuzzers.

    python tests/support/nightly.py list          every share
    python tests/support/nightly.py title         one share: --share N, or that of the commit
    python tests/support/nightly.py environments  the environments that it runs in, as targets of make
    python tests/support/nightly.py gigabytes     the disk that these take
    python tests/support/nightly.py run
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
LIMIT_S = 12 * 60
# Disk, in gigabytes, by target of make; all others take less than one.
GIGABYTES = {"test-oldest": 6, "test-newest": 6, "test-vllm": 4, "test-vllm-server": 4, "release-check": 2}


class Part(NamedTuple):
    """A command of make, with ``{seed}`` for a seed, and its seconds on two cores, without installation."""

    command: str
    seconds: int

    @property
    def target(self) -> str:
        """What make is asked for."""
        return shlex.split(self.command)[1]

    @property
    def settings(self) -> dict[str, str]:
        """The variables of make that it sets."""
        return dict(word.split("=", 1) for word in shlex.split(self.command)[2:])


SHARES: tuple[tuple[Part, ...], ...] = (
    (
        Part("make test-portable ARGS='--run 1 --half 1'", 290),
        Part("make fuzz SECONDS=30 SEED={seed} ARGS=tests/fuzz/test_layouts.py", 75),
    ),
    (Part("make test-nightly ARGS=\"-m 'nightly and not fuzz' --part 1/10\"", 400),),
    (Part("make test-oldest JOBS='ranks-1 rest-1'", 480),),
    (
        Part("make test-portable ARGS='--run 1 --half 2'", 290),
        Part("make fuzz SECONDS=30 SEED={seed} ARGS=tests/fuzz/test_engine.py", 40),
        Part("make fuzz SECONDS=30 SEED={seed} ARGS=tests/fuzz/test_faults.py", 45),
    ),
    (Part("make test-nightly ARGS=\"-m 'nightly and not fuzz' --part 2/10\"", 400),),
    (
        Part("make codegen-all TARGETS='sm_90'", 450),
        Part("make docs", 25),
        Part("make test-site", 45),
    ),
    (
        Part("make test-portable ARGS='--run 2 --half 1'", 290),
        Part("make fuzz SECONDS=30 SEED={seed} ARGS=tests/fuzz/test_load.py", 60),
        Part("make fuzz SECONDS=30 SEED={seed} ARGS=tests/fuzz/test_starts.py", 45),
    ),
    (Part("make test-nightly ARGS=\"-m 'nightly and not fuzz' --part 3/10\"", 400),),
    (Part("make test-newest JOBS='ranks-1 rest-1'", 480),),
    (Part("make test-vllm ARGS='--part 1/2'", 310),),
    (
        Part("make test-portable ARGS='--run 2 --half 2'", 290),
        Part("make test-hub", 40),
        Part("make test-contracts", 15),
        Part("make fuzz SECONDS=30 SEED={seed} ARGS=tests/fuzz/test_fuse_changes.py", 75),
    ),
    (Part("make test-nightly ARGS=\"-m 'nightly and not fuzz' --part 4/10\"", 400),),
    (Part("make test-oldest JOBS='ranks-2 rest-2'", 480),),
    (
        Part("make test-transformers TRANSFORMERS=5.17.0", 250),
        Part("make test-transformers TRANSFORMERS=5.19.0", 150),
    ),
    (
        Part("make test-portable ARGS='--run 3 --half 1'", 290),
        Part("make test-vllm-server", 120),
    ),
    (Part("make test-nightly ARGS=\"-m 'nightly and not fuzz' --part 5/10\"", 400),),
    (Part("make test-newest JOBS='ranks-2 rest-2'", 480),),
    (
        Part("make codegen-all TARGETS='sm_100'", 450),
        Part("make test-server", 30),
    ),
    (
        Part("make test-portable ARGS='--run 3 --half 2'", 290),
        Part("make release-check UNRELEASED=1", 60),
    ),
    (Part("make test-nightly ARGS=\"-m 'nightly and not fuzz' --part 6/10\"", 400),),
    (Part("make test-oldest JOBS='interpret-1 interpret-2 interpret-3 interpret-4 codegen-1 codegen-2 demo'", 500),),
    (Part("make test-vllm ARGS='--part 2/2'", 310),),
    (
        Part("make test-portable ARGS='--run 4 --half 1'", 290),
        Part("make fuzz SECONDS=30 SEED={seed} ARGS=tests/fuzz/test_checkpoint_files.py", 220),
    ),
    (Part("make test-nightly ARGS=\"-m 'nightly and not fuzz' --part 7/10\"", 400),),
    (Part("make test-newest JOBS='interpret-1 interpret-2 interpret-3 interpret-4 codegen-1 codegen-2 demo'", 500),),
    (
        Part("make test-transformers TRANSFORMERS=5.22.2", 100),
        Part("make test-transformers TRANSFORMERS=5.23.0", 90),
    ),
    (
        Part("make test-portable ARGS='--run 4 --half 2'", 290),
        Part("make test-trained", 200),
    ),
    (Part("make test-nightly ARGS=\"-m 'nightly and not fuzz' --part 8/10\"", 400),),
    (
        Part("make test-finetuned", 400),
        Part("make test-formats", 20),
        Part("make test-tools", 60),
    ),
    (
        Part("make gpu-rehearse", 210),
        Part("make test-models", 210),
    ),
    (Part("make codegen-all TARGETS='sm_80'", 400),),
    (Part("make codegen-all TARGETS='gfx942'", 400),),
    (Part("make codegen-all TARGETS='sm_86'", 400),),
    (Part("make codegen-all TARGETS='sm_89'", 400),),
    (Part("make codegen-all TARGETS='sm_120'", 400),),
    (
        Part("make emulate ARCH=sm_80", 100),
        Part("make emulate ARCH=sm_80 ARGS='--models some'", 90),
        Part("make emulate TRITON=side", 110),
        Part("make emulate TRITON=side ARGS='--models some'", 100),
    ),
    (Part("make emulate ARGS='--models all'", 300),),
    (
        Part("make emulate ARCH=sm_100", 60),
        Part("make emulate ARCH=sm_100 ARGS='--models all'", 300),
        Part("make emulate ARCH=sm_120", 60),
    ),
    (Part("make codegen-counts ARCH=sm_90", 300),),
    (Part("make codegen-counts ARCH=sm_80", 340),),
    (
        Part("make emulate-ranks", 150),
        Part("make emulate-ranks ARCH=sm_80", 180),
    ),
    (Part("make test-nightly ARGS=\"-m 'nightly and not fuzz' --part 9/10\"", 400),),
    (Part("make test-nightly ARGS=\"-m 'nightly and not fuzz' --part 10/10\"", 400),),
    (
        Part("make emulate ARGS='--approximate up'", 80),
        Part("make emulate ARGS='--approximate down'", 80),
        Part("make emulate ARGS=--vary", 450),
    ),
    (
        *(
            Part(f"make fuzz SECONDS=30 SEED={{seed}} ARGS=tests/fuzz/test_emulated_{name}.py", 50)
            for name in ("gemm", "paged", "misc", "invariance")
        ),
        Part("make emulate-others", 130),
    ),
)

# What stays nightly, as it cannot be divided into parts that fit. CONTRIBUTING.md gives its time.
ALONE: tuple[str, ...] = ()


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"no commit chooses a share here ({done.stderr.strip()}): give one of {len(SHARES)} as SHARE=")
    return done.stdout.strip()


def _number() -> int:
    """The commit's hash, shortened: for seeds, and where no history is to be counted."""
    return int(_git("rev-parse", "HEAD")[:6], 16)


def share_of(commits: int) -> int:
    """The share, from 1 on, of a history of so many commits."""
    return commits % len(SHARES) + 1


def chosen(share: int | None) -> int:
    """``share``, or that of the commit. ValueError if it does not exist, or git cannot tell the commit."""
    if share is None:
        shallow = _git("rev-parse", "--is-shallow-repository") == "true"
        return share_of(_number() if shallow else int(_git("rev-list", "--count", "HEAD")))
    if not 1 <= share <= len(SHARES):
        raise ValueError(f"there is no share {share}: expected 1 to {len(SHARES)}")
    return share


def title(share: int) -> str:
    """For example "nightly share 3 of 9, some 8 minutes: make test-vllm"."""
    parts = SHARES[share - 1]
    minutes = -(-sum(part.seconds for part in parts) // 60)
    commands = "; ".join(part.command for part in parts)
    return f"nightly share {share} of {len(SHARES)}, some {minutes} minutes: {commands}"


def database(*variables: str) -> str:
    """Every rule and variable of the Makefile, expanded, whatever the make that calls this was given.

    The goal is ``help``: of another one's recipe make would run the lines that call make, dry or not.
    """
    environment = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKEOVERRIDES")}
    command = ["make", "-pq", "help", *variables]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True).stdout


def environments(share: int) -> list[str]:
    """The environments beside .venv in which a share's parts run: prerequisites of their targets in the Makefile."""
    found: dict[str, None] = {}
    for part in SHARES[share - 1]:
        variables = shlex.split(part.command.format(seed=0))[2:]
        rule = re.search(rf"^{re.escape(part.target)}:(.*)$", database(*variables), re.M)
        assert rule is not None, f"make does not know {part.target}"
        found |= dict.fromkeys(word for word in rule[1].split() if re.fullmatch(r"\.side/.*/\.installed", word))
    return list(found)


def gigabytes(share: int) -> int:
    """An upper bound of the disk that a share's environments take."""
    return sum(GIGABYTES.get(target, 1) for target in {part.target for part in SHARES[share - 1]})


def run(share: int) -> bool:
    """Run a share, print the time of each part, and how one that is red is repeated; returns whether all were green."""
    print(title(share), flush=True)
    results = []
    for part in SHARES[share - 1]:
        seed = _number() if "{seed}" in part.command else None
        command = part.command.format(seed=seed)
        print(f"--- {command}", flush=True)
        begin = time.monotonic()
        code = subprocess.run(shlex.split(command), cwd=ROOT).returncode
        results.append((command, time.monotonic() - begin, code))
    print(f"nightly share {share} of {len(SHARES)}:")
    for command, seconds, code in results:
        print(f"  {seconds:5.0f} s  {'FAILED' if code else 'ok':6}  {command}")
    red = [command for command, _, code in results if code]
    if red:
        print(f"error: nightly share {share} is red; again: make nightly-share SHARE={share}, or", file=sys.stderr)
        print("\n".join(f"  {command}" for command in red), file=sys.stderr)
    return not red


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", choices=["list", "title", "environments", "gigabytes", "run"])
    parser.add_argument("--share", type=int, metavar="N", help=f"1 to {len(SHARES)} (default: the commit's)")
    options = parser.parse_args(arguments)
    if options.what == "list":
        print("\n".join(map(title, range(1, len(SHARES) + 1))))
        return 0
    try:
        share = chosen(options.share)
        if options.what == "run":
            return 0 if run(share) else 1
        if options.what == "environments":
            print("\n".join(environments(share)))
        else:
            print(title(share) if options.what == "title" else gigabytes(share))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
