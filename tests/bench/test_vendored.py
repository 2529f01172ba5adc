"""Peers of the benchmarks that travel as wheels."""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
import zipfile
from pathlib import Path

import pytest

from shardfuse.bench.harness import vendored


def _wheel(folder: Path, name: str, package: str) -> None:
    with zipfile.ZipFile(folder / name, "w") as wheel:
        wheel.writestr(f"{package}/__init__.py", "ANSWER = 42\n")
        wheel.writestr(f"{package}-1.0.dist-info/METADATA", f"Name: {package}\nVersion: 1.0\n")


def test_pure_wheels_are_carried_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    _wheel(tmp_path, "a_peer_of_ours-1.0-py3-none-any.whl", "a_peer_of_ours")
    _wheel(tmp_path, "torch-0.0-py3-none-any.whl", "torch")  # what is installed stays
    assert vendored.carry(tmp_path) == ["a_peer_of_ours"]
    assert importlib.import_module("a_peer_of_ours").ANSWER == 42
    assert importlib.metadata.version("a_peer_of_ours") == "1.0"
    assert vendored.carry(tmp_path) == []
    assert vendored.carry(tmp_path / "none") == []


def test_wheels_that_cannot_be_carried_are_named(tmp_path: Path):
    (tmp_path / "x-1.0-py3-none-any.whl").write_bytes(b"PK cut short")
    with pytest.raises(ValueError, match=r"x-1\.0-py3-none-any\.whl: not a wheel, or a truncated one"):
        vendored.carry(tmp_path)
    _wheel(tmp_path, "a-1.0-cp311-cp311-linux_x86_64.whl", "a")
    with pytest.raises(ValueError, match="only pure wheels"):
        vendored.carry(tmp_path)
