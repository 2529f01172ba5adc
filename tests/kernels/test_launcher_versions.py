"""Who launches a kernel that was launched before: Triton's C function, or Triton's own functions (``launcher.py``)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from shardfuse.kernels.runtime import dispatch, launcher

pytestmark = pytest.mark.skipif(dispatch.triton_version() is None, reason="Triton is not installed")


class Hooks(list[Any]):
    """Triton's chain of hooks, as far as the launcher looks at it."""

    calls = property(lambda self: self)


@pytest.fixture
def bound(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Bind a kernel under a version of Triton; what is launched, and by whom, is noted."""
    from triton import knobs
    from triton.backends.nvidia.driver import CudaLauncher
    from triton.runtime import driver

    seen: list[tuple[str, Any]] = []

    def of(version: str, **changes: Any) -> Any:
        run: Any = CudaLauncher.__new__(CudaLauncher)
        values = {"global_scratch_size": 0, "num_ctas": 1, "profile_scratch_size": 0, "launch_cooperative_grid": False}
        values |= {"launch_pdl": False, "arg_annotations": "annotations", "kernel_signature": b"signature"}
        values |= {"launch": lambda *given: seen.append(("C", given)), **changes}
        vars(run).update(values)

        class Kernel:
            metadata = SimpleNamespace(global_scratch_size=values["global_scratch_size"])
            function, packed_metadata = 7, (4, 1, 0)

            def __getitem__(self, grid: Any) -> Any:
                return lambda *args: seen.append(("Python", args))

        kernel: Any = Kernel()
        kernel.run = run
        monkeypatch.setattr(dispatch, "_TRITON_VERSION", version)
        return launcher.bind(kernel, (2, 3, 1), -1), seen

    monkeypatch.setattr(driver, "_active", SimpleNamespace(get_current_stream=lambda index: 5))
    for name in ("launch_enter_hook", "launch_exit_hook"):
        monkeypatch.setattr(knobs.runtime, name, Hooks(), raising=False)
    return of


@pytest.mark.parametrize("version", ["3.6.0", "3.7.1", "3.8.0", "3.9.2"])
def test_the_c_function_gets_what_its_version_takes(bound, version: str):
    run, seen = bound(version)
    run(("x", 1))
    rest = (("x", 1),) if version != "3.6.0" else ("x", 1)
    head = (2, 3, 1, 5, 7, False, False)
    middle = (None, None, (4, 1, 0), None, None, None) if version == "3.6.0" else (
        (4, 1, 0), None, None, None, None, None, "annotations", b"signature"
    )  # fmt: skip
    assert seen == [("C", (*head, *middle, *rest))]
    assert "C function" in launcher.said()


def test_memory_for_tensor_maps_is_new_at_each_launch(bound):
    run, seen = bound("3.7.1", global_scratch_size=64)
    run(("x",))
    run(("x",))
    first, second = (given[11] for _, given in seen)
    assert first.numel() == second.numel() == 64 * 6
    assert first is not second


@pytest.mark.parametrize(
    ("version", "changes"),
    [
        *(("3.5.1", {}), ("4.0.0", {}), ("unknown", {})),
        *(("3.7.1", {"profile_scratch_size": 8}), ("3.8.0", {"gsan_enabled": True})),
    ],
)
def test_what_is_not_known_is_launched_by_triton(bound, version: str, changes: dict[str, Any]):
    run, seen = bound(version, **changes)
    run(("x", 1))
    assert seen == [("Python", ("x", 1))]
    assert ("Triton's Python" in launcher.said()) is not changes


def test_hooks_see_every_launch(bound):
    from triton import knobs

    run, seen = bound("3.7.1")
    knobs.runtime.launch_enter_hook.append(print)
    run(("x",))
    knobs.runtime.launch_enter_hook.clear()
    run(("x",))
    knobs.runtime.launch_exit_hook = print  # in place of the chain
    run(("x",))
    assert [by for by, _ in seen] == ["Python", "C", "Python"]
    bound("3.7.1")[0](("x",))  # bound where there is no chain
    assert seen[-1][0] == "Python"
