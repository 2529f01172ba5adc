"""The cases of models made small: they launch what is built for the models, in the same configurations."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest

from shardfuse.kernels.dev import registry
from shardfuse.kernels.dev.cases import comm, linear, linear_builds, linear_fused
from shardfuse.kernels.dev.ptx import models
from shardfuse.kernels.dev.registry import Case
from shardfuse.kernels.runtime import device, dispatch, fences
from shardfuse.kernels.runtime.chips import converts_e4m3
from shardfuse.kernels.runtime.dispatch import triton_version

pytestmark = [
    pytest.mark.codegen,
    pytest.mark.skipif(triton_version() is None, reason="Triton is not installed"),
]

LAUNCHES: dict[str, Callable[[Case], None]] = {
    "linear_act": linear._launch,
    "gated_linear": linear_fused._gated_launch,
    "dgrad_act": linear_fused._dgrad_act_launch,
    "dgrad_gated": linear_fused._dgrad_gated_launch,
    "wgrad_accumulate": linear_fused._wgrad_launch,
    "all_gather_linear": comm._gather_launch,
    "linear_reduce_scatter": comm._send_launch,
}
# What only ranks on machines of their own launch: the products of their backward, and the wait that stands alone.
APART = ("gather", "wait", "-send")


def _products(op: str, arch: str, deep: bool = False) -> Iterator[tuple[models.Small, list[device.Launch]]]:
    for small in models.cases(registry.op(op), deep=deep):
        with models.configured(small), device.capture(arch, tf32=small.tf32) as launches:
            LAUNCHES[op](small.case)
        yield small, launches


@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90", "sm_100"])
@pytest.mark.parametrize("op", LAUNCHES)
def test_every_build_of_a_product_is_launched(op: str, arch: str):
    built = {build.config for build in registry.op(op).builds(arch)}
    launched = {linear_builds.build_of(op, each, arch).config for _, found in _products(op, arch) for each in found}
    missing = built - launched
    assert not [name for name in missing if not any(part in name for part in APART)]
    assert len(missing) <= 4
    assert len(built & launched) >= 4


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@pytest.mark.parametrize("deep", [False, True])
@pytest.mark.parametrize("op", LAUNCHES)
def test_pipelines_are_refilled(op: str, arch: str, deep: bool):
    """A stage is filled again only in a loop of more steps than there are stages; a sum over few tokens has none."""
    products = [each for _, found in _products(op, arch, deep) for each in found if each.gemm is not None]
    long = [each for each in products if each.config.split_k == 1 and (each.gemm.layout != "tn" or each.gemm.K > 256)]
    stages = [(each, each.config.num_stages) for each in long]
    shallow = [each for each, n in stages if -(-each.gemm.K // each.config.block_k) < (2 * n if deep else n + 2)]
    assert len(long) >= 2
    assert not shallow


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
def test_every_build_of_attention_is_launched(arch: str):
    from shardfuse.kernels.dev.cases import paged_builds

    spec = registry.op("paged_attention")
    small = [each.case for each in models.cases(spec)]
    launched = {build.config for build in paged_builds.collect(arch, small)}
    assert {build.config for build in spec.builds(arch)} == launched


@pytest.fixture(params=["sm_80", "sm_90"])
def chip(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Tensors of the CPU are launched on as on this chip."""
    monkeypatch.setattr(device, "architecture", lambda of: request.param)
    monkeypatch.setattr(device, "program_slots", lambda of: 3)
    monkeypatch.setattr(dispatch, "_INTERPRETING", True)
    with fences.assumed(True):
        yield request.param


def test_some_cases_launch_every_configuration(chip: str):
    specs = [spec for spec in registry.ops().values() if spec.name != "scaled_linear" or converts_e4m3(chip)]
    chosen = models.some(specs)
    names = {(spec.name, small.name): _names(spec, small) for spec in specs for small in models.cases(spec)}
    kept = [names[spec.name, small.name] for spec, small in chosen]
    assert set().union(*kept) == set().union(*names.values())
    assert {spec.name for spec, _ in chosen} == {name for name, _ in names}
    assert len(chosen) < len(names) / 2


def _names(spec: registry.OpSpec, small: models.Small) -> set[str]:
    return {each.name for each in models.launched(spec, small)}


def test_a_configuration_that_one_case_has_is_not_left_out(chip: str, monkeypatch: pytest.MonkeyPatch):
    spec = registry.op("rms_norm")
    launched, last = models.launched, models.cases(spec)[-1]
    new = models.Launched("a kernel in a new configuration", 100.0)
    monkeypatch.setattr(models, "launched", lambda op, small: launched(op, small) + [new] * (small == last))
    assert last.name in {small.name for _, small in models.some([spec])}


def test_launches_are_those_of_the_code_that_is_built(chip: str):
    """What ``launched`` notes on tensors of the CPU is what is captured on meta tensors for ahead-of-time builds."""
    spec = registry.op("linear_act")
    for small, launches in itertools.islice(_products("linear_act", chip), 0, None, 6):
        captured = {f"{each.fn.__name__} {each.config}" for each in launches}
        assert _names(spec, small) >= captured
