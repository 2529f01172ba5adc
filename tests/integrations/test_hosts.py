"""Versions of a host and what its sources have: what is found, what is refused, and in what words."""

from __future__ import annotations

import dataclasses
import textwrap
import warnings
from pathlib import Path

import pytest

from shardfuse.integrations import UnsupportedHost, hosts
from shardfuse.integrations.contract import Abstract, Expectation, Has, Says, Takes, differences, read

SOURCE = """
    import os
    from typing import Any, Protocol

    if os.name:
        def attend(q, k, *, scale, **others): ...
    else:
        def attend(q): ...

    class Base:
        first: int
        second, third = 1, 2

        def __init__(self, layer, /, name="x", *rest):
            self.made = layer

            def inner(self):
                self.hidden = 1

        @abstractmethod
        def build(self): ...

        @property
        @abc.abstractmethod
        def plan(self): ...

    def writes(impl, key):
        impl.update(key,
                    key)
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "host").mkdir()
    (tmp_path / "host" / "__init__.py").write_text(textwrap.dedent(SOURCE))
    return tmp_path


def _wrong(root: Path, *expected: Expectation) -> list[str]:
    return differences(read(root, expected), expected)


FILE = "host/__init__.py"


def test_what_holds(root: Path):
    contract = (
        Takes(FILE, "Base.__init__", ("layer", "name", "*rest")),
        Has(FILE, "Base", ("first", "second", "third", "made", "build", "plan")),
        Has(FILE, "", ("Base", "attend", "Any", "os")),
        Abstract(FILE, "Base", ("build", "plan")),
        Says(FILE, "writes", "impl.update(key, key)"),
    )
    assert _wrong(root, *contract) == []


@pytest.mark.parametrize(
    ("expected", "says"),
    [
        (Takes(FILE, "Base.__init__", ("layer",)), "Base.__init__ takes (layer, name, *rest), expected (layer)"),
        (Takes(FILE, "attend", ("q",)), ""),  # the last definition counts
        (Takes(FILE, "Base.gone", ()), f"{FILE} has no Base.gone"),
        (Has(FILE, "Base", ("first", "hidden", "gone")), "Base has no hidden, gone"),
        (Has(FILE, "Gone", ("first",)), f"{FILE} has no Gone"),
        (Has("host/gone.py", "", ("first",)), "there is no host/gone.py"),
        (Abstract(FILE, "Base", ("build",)), "Base asks for plan, which the plug-in lacks"),
        (Says(FILE, "writes", "impl.update(key)"), "writes no longer says 'impl.update(key)'"),
    ],
)
def test_what_differs_is_named(root: Path, expected: Expectation, says: str):
    assert _wrong(root, expected) == ([says] if says else [])


@pytest.fixture
def installed(root: Path, monkeypatch: pytest.MonkeyPatch) -> hosts.Host:
    monkeypatch.syspath_prepend(str(root))
    versions = {"host-cpu": "1.2+cpu"}

    def version(name: str) -> str:
        if name not in versions:
            raise hosts.metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(hosts.metadata, "version", version)
    return hosts.Host("The Host", "host", ("host", "host-cpu"), ran=("1.1",), compared=("1.0",))


def test_a_tested_version_is_taken_without_a_word(installed: hosts.Host):
    tested = dataclasses.replace(installed, ran=("1.2",))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert tested.check([Has(FILE, "", ("Gone",))]) == "1.2"


def test_another_version_with_the_contract_is_taken_with_a_warning(installed: hosts.Host):
    says = r"The Host 1\.2 was not tested.*Versions tested: 1\.1 \(run\); 1\.0 \(contract compared, not run\)"
    with pytest.warns(UserWarning, match=says):
        assert installed.check([Has(FILE, "", ("Base",))]) == "1.2"


def test_another_version_without_it_is_refused(installed: hosts.Host):
    with pytest.raises(UnsupportedHost, match=rf"The Host 1\.2 is not .*: {FILE} has no Gone. Versions tested: 1\.1"):
        installed.check([Has(FILE, "", ("Gone",))])


def test_sources_that_cannot_be_parsed_are_refused(installed: hosts.Host, root: Path):
    (root / "host" / "other.py").write_text("def broken(:\n")
    with pytest.raises(UnsupportedHost, match=r"The Host 1\.2 is not .*its sources cannot be read .*Versions tested"):
        installed.check([Has("host/other.py", "", ("Base",))])


def test_a_missing_host_is_named_with_what_to_install():
    gone = hosts.Host("The Host", "no_such_host", ("no-such-host",), ran=("1.1",))
    with pytest.raises(UnsupportedHost, match=r"The Host is not installed: pip install no-such-host==1\.1"):
        gone.check([])
