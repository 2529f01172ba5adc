"""Which table of CPU products a processor gets, what follows from its relatives', and what is said of it."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tuning_case import shipped_tables, table_of

import shardfuse as sf
from shardfuse.kernels.linear import cpu, cpu_tables
from shardfuse.kernels.linear.cpu_tables import NEVER, relatives
from shardfuse.kernels.runtime import onednn, processor, tuning

ZEN3, ZEN4, ZEN5 = "x86_64-amd-avx2-mkl", "x86_64-amd-avx512-mkl-zen4", "x86_64-amd-avx512-mkl"
SKYLAKE = "x86_64-intel-avx512-mkl"
AVX, AVX2, AVX512 = "fpu sse2 avx", "fpu sse2 avx avx2 fma", "fpu sse2 avx avx2 fma avx512f avx512bw"
# /proc/cpuinfo's vendor, family, model, flags, and the tables that the processor gets, the nearest first.
PROCESSORS = {
    "AMD EPYC 7351 (Zen)": ("AuthenticAMD", 23, 1, AVX2, [ZEN3]),
    "AMD EPYC 7742 (Zen 2)": ("AuthenticAMD", 23, 49, AVX2, [ZEN3]),
    "AMD EPYC 7763 (Zen 3)": ("AuthenticAMD", 25, 1, AVX2, [ZEN3]),
    "AMD EPYC 9654 (Zen 4)": ("AuthenticAMD", 25, 17, AVX512, [ZEN4]),
    "AMD EPYC 9755 (Zen 5)": ("AuthenticAMD", 26, 2, AVX512, [ZEN5]),
    "AMD Opteron 6386 SE": ("AuthenticAMD", 21, 2, AVX, [ZEN3, ZEN4, ZEN5]),
    "Intel Xeon Gold 6148": ("GenuineIntel", 6, 85, AVX512, [SKYLAKE]),
    "Intel Xeon Platinum 8480+": ("GenuineIntel", 6, 143, AVX512, [SKYLAKE]),
    "Intel Xeon E5-2680 v4": ("GenuineIntel", 6, 79, AVX2, [SKYLAKE]),
    "Hygon C86 7185": ("HygonGenuine", 24, 1, AVX2, []),
}


@pytest.fixture
def processor_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """``processor_of(name)``: from now on this machine is that one of PROCESSORS, as far as Linux tells."""

    def be(name: str) -> None:
        vendor, family, model, flags, _ = PROCESSORS[name]
        facts = {"vendor_id": vendor, "cpu family": family, "model": model, "model name": name, "flags": flags}
        core = "".join(f"{field}\t: {value}\n" for field, value in facts.items())
        (tmp_path / "cpuinfo").write_text(f"processor\t: 0\n{core}\nprocessor\t: 1\n{core}\n")
        forget()

    def forget() -> None:
        processor._facts.cache_clear()
        processor.architecture.cache_clear()
        tuning.forget()

    monkeypatch.setattr(processor, "CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    monkeypatch.delenv(tuning.VARIABLE, raising=False)
    yield be
    monkeypatch.undo()
    forget()


@pytest.mark.parametrize("name", PROCESSORS)
def test_each_processor_gets_its_own_table_or_its_vendors(name: str, processor_of: Callable[..., None]):
    processor_of(name)
    found = cpu.in_force()
    assert [each.arch for each in found.tables] == PROCESSORS[name][-1]
    assert found.own == (processor.architecture() in PROCESSORS[name][-1])
    assert found.said().startswith("no table says") is not bool(found.tables)
    for kind, thresholds in found.thresholds.items():
        for bits, tokens in enumerate(thresholds):  # oneDNN wins only where it does in each of the tables
            assert tokens == max(each.thresholds[kind][bits] for each in found.tables)


def test_an_assumed_instruction_set_is_another_processor(
    processor_of: Callable[..., None], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    processor_of("AMD EPYC 9755 (Zen 5)")
    assert [each.arch for each in cpu.in_force().tables] == [ZEN3]


def test_another_library_machine_or_vendor_is_no_relative(tmp_path: Path):
    strangers = ["x86_64-amd-avx512-other", "x86_64-other-avx512-mkl", "aarch64-amd-avx2-mkl", "sm_90"]
    with shipped_tables(tmp_path / "shipped") as write:
        for arch in (*strangers, ZEN4, "x86_64-amd-neon-mkl"):
            write(_table(arch, "something", train=1), f"{arch}.json")
        for arch in (*strangers[:3], "x86_64-other-avx2-mkl", "x86_64-amd-avx2-other", "a", ""):
            assert [table.arch for table in relatives(arch)] == ([arch] if arch == strangers[2] else [])
        assert [table.arch for table in relatives(ZEN3)] == [ZEN4, "x86_64-amd-neon-mkl"]


def test_the_users_table_is_of_its_own_processor_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Laid over the shipped one of that processor, entry by entry; to others it says nothing."""
    mine = tmp_path / "mine.json"
    table = _table(ZEN4, "my machine", train=2)
    table["entries"] = [entry for entry in table["entries"] if entry["bucket"].startswith("train")]
    mine.write_text(json.dumps(table))
    with shipped_tables(tmp_path / "shipped") as write:
        write(_table(ZEN4, "a Zen 4", train=8, packed=4), f"{ZEN4}.json")
        monkeypatch.setenv(tuning.VARIABLE, str(mine))
        tuning.forget()
        own = cpu_tables.in_force(ZEN4)
        assert (own.thresholds["train"][12], own.thresholds["packed"][12]) == (2, 4)
        assert own.said() == f"the table of {ZEN4}, measured on my machine"
        assert (own.why("train", 12), own.why("packed", 12)) == (
            "a measurement on my machine",
            "a measurement on a Zen 4",
        )
        assert cpu_tables.in_force(ZEN3).thresholds["train"][12] == 8


def test_a_table_without_the_engines_kinds_has_the_others_in_their_place(tmp_path: Path):
    table = _table(ZEN4, "a Zen 4", packed=4)
    table["entries"] = [entry for entry in table["entries"] if not entry["bucket"].startswith("served")]
    with shipped_tables(tmp_path / "shipped") as write:
        write(table, f"{ZEN4}.json")
        own = cpu_tables.in_force(ZEN4)
        assert own.thresholds["served"][12] == 4
        assert own.why("served", 12) == "a measurement on a Zen 4"


def test_a_processor_that_stood_in_is_told(tmp_path: Path):
    table = _table(SKYLAKE, "a Zen 5", packed=4)
    table["entries"] = [entry | {"source": f"a measurement, standing for {SKYLAKE}"} for entry in table["entries"]]
    with shipped_tables(tmp_path / "shipped") as write:
        write(table, f"{SKYLAKE}.json")
        told = cpu_tables.in_force("x86_64-intel-avx2-mkl").said()
        assert told.startswith(
            f"x86_64-intel-avx2-mkl has no table and takes that of {SKYLAKE} (measured on a Zen 5, which"
        )


def test_what_env_says_of_ranks_that_disagree(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(onednn, "why_not", lambda dtype: None)
    assert cpu.said() == cpu.in_force().said()
    monkeypatch.setattr(onednn, "why_not", lambda dtype: "oneDNN is not there")
    assert cpu.said() == "oneDNN is not there"
    monkeypatch.setattr(cpu, "_disagreement", "the ranks differ")
    assert cpu.said() == "the ranks differ"


@pytest.mark.parametrize(
    "arch", ["", "a", "x86_64-amd-avx2", "x86_64-amd-sse-mkl", "x86_64--avx2-mkl", "a-b-avx2-c-d-e"]
)
def test_what_is_no_processors_name(arch: str):
    with pytest.raises(ValueError, match="expected a machine, a vendor, other, avx2, avx512 and a library"):
        cpu_tables.check_name(arch)
    cpu_tables.check_name(ZEN4)
    cpu_tables.check_name(processor.architecture())


def _table(arch: str, on: str, **tokens: int) -> dict[str, Any]:
    """From so many tokens on oneDNN is faster, by kind, whatever the size; 0 is never."""
    entries = [
        {
            "op": cpu_tables.OP,
            "bucket": cpu_tables.bucket(kind, 1),
            "config": {"from_tokens": tokens.get(kind, 0)},
            "measured": {},
            "source": f"a measurement on {on}",
            "source_hash": tuning.source_hash(cpu_tables.SOURCES),
        }
        for kind in cpu_tables.KINDS
    ]
    sources = {cpu_tables.OP: list(cpu_tables.SOURCES)}
    return table_of(*entries, arch=arch, sources=sources, origin={"processor": on})


def test_relatives_decide_where_they_agree(tmp_path: Path):
    """The engine's kinds, too; and a table of the processor's own takes their place."""
    arch = "x86_64-amd-other-mkl"
    with shipped_tables(tmp_path / "shipped") as write:
        write(_table(ZEN4, "a Zen 4", train=4, packed=2, served=1), f"{ZEN4}.json")
        write(_table(ZEN3, "a Zen 3", train=16, served=2), f"{ZEN3}.json")
        write(_table(SKYLAKE, "a Skylake", train=1, packed=1), f"{SKYLAKE}.json")
        found = cpu_tables.in_force(arch)
        assert [each.arch for each in found.tables] == [ZEN3, ZEN4]
        decided = {kind: thresholds[12] for kind, thresholds in found.thresholds.items()}
        assert decided == {"train": 16, "packed": NEVER, "packed_act": NEVER, "served": 2, "served_act": NEVER}
        told = found.why("packed", 12)
        assert f"{ZEN3} (measured on a Zen 3) never, {ZEN4} (measured on a Zen 4) from 2 tokens on" in told
        assert "`shardfuse bench calibrate --cpu` measures one" in told
        write(_table(arch, "itself", packed=8), f"{arch}.json")
        own = cpu_tables.in_force(arch)
        assert (own.own, own.thresholds["packed"][12], own.why("packed", 12)) == (True, 8, "a measurement on itself")


@pytest.mark.skipif(onednn.why_not(torch.float32) is not None, reason=str(onednn.why_not(torch.float32)))
def test_explain_says_whose_table_it_is(tmp_path: Path, processor_of: Callable[..., None]):
    """Of one processor: a layer with the table of its own, with its relatives' and with none."""
    layer = sf.ParallelMLP(64, 128)
    processor_of("AMD Opteron 6386 SE")
    arch = processor.architecture()

    def says() -> str:
        tuning.forget()
        return sf.explain(layer).rows[0].why

    with shipped_tables(tmp_path / "shipped") as write:
        assert says() == f"no table says where oneDNN is faster on this processor ({arch}); {cpu_tables._HOW}"
        write(_table(ZEN4, "a Zen 4", train=4), f"{ZEN4}.json")
        assert says().startswith(f"faster from 4 tokens on, the reference for fewer: {arch} has no table")
        write(_table(ZEN3, "a Zen 3"), f"{ZEN3}.json")
        assert says().startswith(f"torch's own product: {arch} has no table")
        write(_table(arch, "itself", train=32), f"{arch}.json")
        assert says() == "faster from 32 tokens on, the reference for fewer (a measurement on itself)"
