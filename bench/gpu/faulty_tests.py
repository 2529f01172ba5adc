"""Tests that go wrong in every way that a GPU run knows: a dry run rehearses with them (``rehearsal.py``)."""

from __future__ import annotations

import os
import time


def test_passes() -> None:
    assert os.getpid() > 0


def test_fails() -> None:
    raise AssertionError("it fails, and the journal says why")


def test_crashes() -> None:
    os.abort()


def test_hangs() -> None:
    time.sleep(3600)


def test_passes_after_all_that() -> None:
    assert os.getpid() > 0
