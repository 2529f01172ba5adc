"""A script's own kernels, emulated: what docs/gpu.md shows, and how the command ends."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from shardfuse.kernels.runtime.dispatch import triton_version

SHOWN = Path(__file__).parents[2] / "docs" / "gpu.md"
TUNED = """
import sys
import torch, triton, triton.language as tl
import beside

DEVICE = triton.runtime.driver.active.get_active_torch_device()


@triton.autotune([triton.Config({"BLOCK": 128}, num_warps=1), triton.Config({"BLOCK": 256}, num_warps=4)], key=["n"])
@triton.jit
def add(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < n
    tl.store(y_ptr + at, tl.load(x_ptr + at, mask) + beside.ONE, mask)


x = torch.randn(1000, device=DEVICE)
y = torch.empty_like(x)
add[lambda meta: (triton.cdiv(1000, meta["BLOCK"]),)](x, y, 1000)
torch.testing.assert_close(y, x + 1)
sys.exit(int(sys.argv[1]))
"""

pytestmark = [
    pytest.mark.codegen,
    pytest.mark.skipif(triton_version() is None, reason="Triton is not installed"),
    pytest.mark.skipif(
        shutil.which("gcc") is None, reason="gcc is not installed: it compiles the stub of CUDA's driver"
    ),
]


def _run(folder: Path, source: str, *options: str, after: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    (folder / "scale.py").write_text(source)
    (folder / "beside.py").write_text("ONE = 1\n")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "shardfuse.kernels.dev.ptx.script", *options, str(folder / "scale.py"), *after]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


def _shown() -> str:
    found = re.search(r"```python\n(import torch, triton.*?)```", SHOWN.read_text(), re.DOTALL)
    assert found is not None
    return found[1]


def test_what_the_documents_show_has_the_fault_that_they_name(tmp_path: Path) -> None:
    line = next(number for number, text in enumerate(_shown().splitlines(), 1) if "missing" in text)
    found = _run(tmp_path, _shown(), "--arch", "sm_80")
    assert found.returncode == 1, found.stderr
    assert f"scale.py:{line}" in found.stdout
    assert "outside every allocation" in found.stdout
    mended = _run(tmp_path, _shown().replace("2 * x)  #", "2 * x, at < n)  #"))
    assert (mended.returncode, mended.stderr) == (0, "")
    assert mended.stdout.splitlines()[-1] == "1 launches, 0 with faults"


def test_each_configuration_is_tried_and_a_script_has_its_arguments_neighbours_and_exit_status(tmp_path: Path) -> None:
    found = _run(tmp_path, TUNED, after=("3",))
    assert found.returncode == 3, found.stderr
    assert "add: 8 x 1 x 1 blocks of 32 threads" in found.stdout
    assert "add: 4 x 1 x 1 blocks of 128 threads" in found.stdout


def test_a_script_that_launches_nothing_or_raises_is_no_success(tmp_path: Path) -> None:
    found = _run(tmp_path, "import torch")
    assert found.returncode == 1
    assert "no kernel was launched" in found.stderr
    found = _run(tmp_path, _shown() + "raise LookupError(5)\n")
    assert found.returncode == 1
    assert "LookupError: 5" in found.stderr
    assert "outside every allocation" in found.stdout


def test_what_a_script_says_at_its_end_is_kept(tmp_path: Path) -> None:
    found = _run(tmp_path, "import sys; sys.exit('it needs a GPU')")
    assert found.returncode == 1
    assert "it needs a GPU" in found.stderr
    found = _run(tmp_path, "import torch; torch.empty(1, device='cuda')")
    assert found.returncode == 1
    assert "choose device='cpu'" in found.stderr
    faulty = _run(tmp_path, _shown() + "import sys; sys.exit(0)\n")
    assert faulty.returncode == 1


def test_a_script_that_is_not_there_is_said(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "shardfuse.kernels.dev.ptx.script", str(tmp_path / "none.py")]
    found = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert found.returncode == 2
    assert "no such file" in found.stderr
