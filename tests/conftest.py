"""What every test relies on: an environment that is set before torch and Triton look at it, seeds, worker processes.

Without a GPU, Triton kernels are interpreted (TRITON_INTERPRET=1); allocations are poisoned with NaN
(SHARDFUSE_POISON=1) everywhere. What is set outside wins.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import os
import re
import signal
import sys
import types
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("OMP_NUM_THREADS", str(min(4, len(os.sched_getaffinity(0)))))
os.environ.setdefault("SHARDFUSE_POISON", "1")
# Some virtual machines advertise AMX and trap on it: oneDNN's bf16 matrix product would kill the process.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
os.environ["HF_HUB_OFFLINE"] = "1"  # tests use no network

import torch  # reads OMP_NUM_THREADS; does not import Triton

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import interpreter  # after TRITON_INTERPRET is set
import margins
from fuzz import Fuzz
from hypothesis import settings

# Whoever starts the tests in the background (nohup, a shell's &) has them ignore these, and ignoring is inherited: a
# demo that a test interrupts would rightly go on.
for _signal, _default in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(_signal) is signal.SIG_IGN:
        signal.signal(_signal, _default)

settings.register_profile("shardfuse", deadline=None, derandomize=True, database=None)
settings.load_profile("shardfuse")


SEVERAL, COMPILED, A_SECOND = 6, 4, 3
# Of files whose tests wait for processes.
SECONDS = {"test_gpu_runner.py": 30, "test_gpu_phases.py": 75, "test_site_browser.py": 25}
# What a test that compares numbers calls or names, or asks of a verdict or of a benchmark's gate.
COMPARES = {"judge", "within", "relative_error", "assert_close", "opcheck", "allclose", "isclose", "equal", "approx"}
COMPARES |= {"BUDGET", "green", "ok"}
# Files of tests that call or name such functions and compare no numbers that a processor computes -> what they compare.
NOT_NUMERIC = {
    "test_checkpoint.py": "bits that were saved, and the same steps in the same process",
    "test_checkpoint_refusals.py": "bits that a refused load must not change",
}
ROOT = str(Path(__file__).parents[1]) + os.sep


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", metavar="I/N", help="of the chosen tests, the files that fall to process I of N")
    parser.addoption("--numeric", action="store_true", help="of the chosen tests, those that compare numbers")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """A lane "MARK and not ..." has nothing in files that do not name the mark: importing them all takes a while."""
    lane = re.match(r"(\w+) and not ", config.getoption("markexpr"))
    if lane and collection_path.name.startswith("test_"):
        return None if re.search(rf"\b{lane[1]}\b|_case\b", collection_path.read_text()) else True
    return None


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    """Whatever uses the worker processes belongs to their lane; then, of what was chosen, a part."""
    for item in items:
        if "ranks" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.ranks)
    yield
    if config.getoption("--numeric"):
        numeric = functools.cache(_compares)
        _keep(config, items, {item for item in items if numeric(item.function)})
    part = config.getoption("--part")
    if part:
        paths = _files_of_part(items, *map(int, part.split("/")))
        _keep(config, items, {item for item in items if item.path in paths})


def pytest_collection_finish() -> None:
    """No collection of garbage traverses again what the test files have imported: with torch it takes a second."""
    gc.freeze()


def _keep(config: pytest.Config, items: list[pytest.Item], kept: set[pytest.Item]) -> None:
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]


def _compares(function: Any) -> bool:
    """Whether a test compares numbers: it, or what it names of this project's, or what that names, and so on.

    Not a test of Inductor: the numbers of the code that it makes are its own. Nor one in NOT_NUMERIC.
    """
    inner = inspect.unwrap(function)
    if "inductor" in inner.__name__ or Path(inner.__code__.co_filename).name in NOT_NUMERIC:
        return False
    seen: set[Any] = set()
    waiting = [inspect.unwrap(function), getattr(getattr(function, "hypothesis", None), "inner_test", function)]
    while waiting:
        each = waiting.pop()
        if each in seen:
            continue
        seen.add(each)
        names = set(_names(each.__code__))
        if names & COMPARES:
            return True
        named = [each.__globals__[name] for name in names & each.__globals__.keys()]
        for holder in [each for each in named if inspect.isclass(each) or inspect.ismodule(each)]:
            named += [vars(holder)[name] for name in names & vars(holder).keys()]
        waiting += [each for each in named if inspect.isfunction(each) and each.__code__.co_filename.startswith(ROOT)]
    return False


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _files_of_part(items: list[pytest.Item], part: int, parts: int) -> set[Path]:
    """Files go, the one with the most tests first, to the part that has the fewest so far.

    A test of several processes counts as ``SEVERAL``: they share the cores, and interpret what the others wait for; one
    that compiles counts as ``COMPILED``. Each of the ``SECONDS`` of a file, and each of the ``seconds`` that a test's
    marks ``nightly`` and ``codegen`` give, counts as ``A_SECOND`` others.
    """
    sizes: Counter[Path] = Counter()
    for item in items:
        if not sizes[item.path]:
            sizes[item.path] = A_SECOND * SECONDS.get(item.path.name, 0)
        marks = [mark for name in ("nightly", "codegen") if (mark := item.get_closest_marker(name))]
        sizes[item.path] += A_SECOND * sum(mark.kwargs.get("seconds", 0) for mark in marks)
        compiled = COMPILED if item.get_closest_marker("codegen") else 1
        sizes[item.path] += SEVERAL if item.get_closest_marker("ranks") else compiled
    taken: list[list[Path]] = [[] for _ in range(parts)]
    for path, _ in sorted(sizes.items(), key=lambda entry: (-entry[1], entry[0])):
        min(taken, key=lambda paths: sum(sizes[path] for path in paths)).append(path)
    return set(taken[part - 1])


@pytest.fixture(scope="session")
def ranks() -> Iterator[Any]:
    """``ranks(world, body, *args)``: see tests/support/ranks.py."""
    from ranks import Pool

    pool = Pool()
    yield pool
    pool.close()


@pytest.fixture
def fuzz(request: pytest.FixtureRequest) -> Fuzz:
    """``fuzz.run(check)``: see tests/support/fuzz.py."""
    return Fuzz.from_environment(request.node.name)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _compile_anew() -> Iterator[None]:
    """torch compiles the same code for a few inputs only, counted over all tests of a process."""
    yield
    if (dynamo := sys.modules.get("torch._dynamo")) is not None:
        dynamo.reset()


@pytest.fixture
def on_device() -> Iterator[None]:
    """Factory functions make their tensors where the kernels run."""
    with (
        torch.device("cuda") if torch.cuda.is_available() else contextlib.nullcontext()
    ):  # on a CPU it slows calls down
        yield


@pytest.fixture
def kernels_on_device(request: pytest.FixtureRequest) -> None:
    """Tests of the kernels make their tensors where those run; all others make theirs on the CPU."""
    if request.node.get_closest_marker("interpret"):
        request.getfixturevalue("on_device")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    with margins.left_out() if item.get_closest_marker("spoiled") else contextlib.nullcontext():
        yield


interpreter.install()
interpreter.allow()
margins.install()


@pytest.fixture
def fp32_products() -> Iterator[None]:
    """The test's kernels sum products in fp32, as a GPU does: see tests/support/interpreter.py."""
    with interpreter.fp32_products():
        yield


@pytest.fixture(scope="session")
def own_interpreter() -> None:
    """The test starts commands that interpret kernels with the interpreter as it comes."""
    if interpreter.refused is not None:
        pytest.skip(interpreter.refused)
