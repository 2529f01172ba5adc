"""The documentation site, built once for the tests of its text and those in a browser."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCS_PYTHON = ROOT / ".side" / "docs" / "bin" / "python"


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the built site; a dead link or anchor, or a tag that loads from another host fails it."""
    if not DOCS_PYTHON.exists():
        pytest.skip("mkdocs is not installed (make docs)")
    folder = tmp_path_factory.mktemp("docs") / "site"
    command = [str(DOCS_PYTHON), "-m", "mkdocs", "build", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder
