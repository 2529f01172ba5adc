"""Tables of measured configurations: reading, refusing, layering, and what asks them."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch.fx.experimental.proxy_tensor import make_fx
from tuning_case import BF16, CONFIG, FP32, GEMM, KEY, entry_of, look_up, shipped_tables, table_of

from shardfuse.bench import tunable
from shardfuse.bench.harness.stale import RESULTS
from shardfuse.kernels.dev import registry
from shardfuse.kernels.linear import cpu_tables, functional
from shardfuse.kernels.linear.config import pick_config
from shardfuse.kernels.linear.gemm import Gemm, GemmConfig
from shardfuse.kernels.linear.tuned import MAX_TOKENS, OP, SOURCES, bucket, fits, shared_bytes
from shardfuse.kernels.runtime import device, dispatch, tuning


@pytest.fixture
def shipped(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    with shipped_tables(tmp_path / "shipped") as write:
        yield write


# --- reading ----------------------------------------------------------------------------------------------------------


def test_no_table_knows_nothing(shipped):
    assert look_up() is None
    assert dispatch.stock_wins("sm_90", OP, lambda: pytest.fail("asked for a bucket that nothing claims")) is None
    assert tuning.tables("sm_90") == {}


def test_a_table_is_read_once_and_asked_by_bucket(shipped):
    path = shipped(table_of(entry_of()))
    assert look_up() == CONFIG
    path.unlink()
    assert look_up() == CONFIG
    assert look_up(KEY + "-odd") is None
    assert look_up(None) is None
    assert look_up(arch="sm_80") is None
    assert tuning.lookup("sm_90", "another op", KEY, GemmConfig) is None


def test_a_table_survives_writing(shipped):
    path = shipped(table_of(entry_of(stock_wins="stock is faster"), entry_of(bucket="aa", config=None)))
    table = tuning.read(path)
    assert [entry.bucket for entry in table.entries] == [KEY, "aa"]
    again = path.with_name("again.json")
    again.write_text(json.dumps(table.record()))
    assert [entry.bucket for entry in tuning.read(again).entries] == ["aa", KEY]  # in order, for small diffs
    assert json.loads(again.read_text())["entries"][1] == entry_of(stock_wins="stock is faster")


def test_fields_left_out_take_their_defaults(shipped):
    config = dataclasses.asdict(CONFIG)
    del config["group_m"], config["split_k"], config["swap"]
    shipped(table_of(entry_of(config=config)))
    assert look_up() == dataclasses.replace(CONFIG, group_m=8)


def test_the_users_table_lies_over_the_shipped_one(shipped, monkeypatch, tmp_path):
    shipped(table_of(entry_of(), entry_of(bucket="shipped only")))
    own = tmp_path / "own.json"
    mine = GemmConfig(64, 64, 64, 4, 3, use_tma=False)
    own.write_text(json.dumps(table_of(entry_of(config=dataclasses.asdict(mine)))))
    monkeypatch.setenv(tuning.VARIABLE, str(own))
    tuning.forget()
    assert look_up() == mine
    assert look_up("shipped only") == CONFIG
    assert look_up(arch="sm_100") is None  # it is for sm_90
    assert [Path(path).name for path in tuning.tables("sm_90")] == ["sm_90.json", "own.json"]


def test_a_users_table_that_is_not_there_is_an_error(shipped, monkeypatch):
    monkeypatch.setenv(tuning.VARIABLE, "/nowhere/table.json")
    tuning.forget()
    with pytest.raises(ValueError, match=r"SHARDFUSE_TUNED='/nowhere/table\.json': there is no such file"):
        look_up()


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ('{"format": 1,\n "arch": sm_90}', "sm_90.json, line 2: not JSON"),
        ("[]", "sm_90.json: expected an object with format, arch"),
        (table_of(format=1), "format 1, and this version reads format 2"),
        (table_of(dry=True), "written by a dry run"),
        (table_of(notes="x"), "unknown field 'notes'"),
        ({"format": 2}, "field 'arch' is missing"),
        (table_of(sources={OP: [1]}), "sources of gemm must be file names"),
        (table_of(entry_of(), 3), "entry 1: expected an object"),
        (table_of(entry_of(), entry_of()), f"entry 1: a second entry for gemm {KEY}"),
        (table_of(entry_of(speed=3)), "entry 0: unknown field 'speed'"),
        (table_of(entry_of(source=None)), "entry 0: field 'source' is missing"),
        (table_of(entry_of(bucket=4096)), "entry 0: bucket is 4096, expected str"),
        (table_of(entry_of(config={"block_m": 128})), f"entry 0 ({KEY}), config: field 'block_k' is missing"),
        (table_of(entry_of(config=dataclasses.asdict(CONFIG) | {"depth": 3})), "config: unknown field 'depth'"),
        (table_of(entry_of(config=dataclasses.asdict(CONFIG) | {"use_tma": 1})), "use_tma is 1, expected bool"),
        (table_of(entry_of(config=dataclasses.asdict(CONFIG) | {"swap": "no"})), "swap is 'no', expected bool"),
        (table_of(entry_of(config=dataclasses.asdict(CONFIG) | {"split_k": 0})), "split_k is 0, expected at least 1"),
        (table_of(entry_of(config=dataclasses.asdict(CONFIG) | {"block_m": 0})), "block_m is 0, expected at least 1"),
    ],
    ids=lambda value: value if isinstance(value, str) and len(value) < 60 else "",
)
def test_a_broken_table_is_named(shipped, content, complaint):
    shipped(content)
    with pytest.raises(ValueError) as raised:
        look_up()
    assert complaint in str(raised.value)
    assert "sm_90.json" in str(raised.value)


def test_a_table_that_is_no_text_is_named(shipped):
    path = shipped("")
    path.write_bytes(b"\xff\xfe\x00\x80")
    with pytest.raises(ValueError, match=r"sm_90\.json: not a text file"):
        look_up()


# --- age and claims ---------------------------------------------------------------------------------------------------


def test_a_claim_names_its_measurement(shipped):
    shipped(table_of(entry_of(stock_wins="stock took 1 us", source="sm_90.json: bench tune at commit abc")))
    assert dispatch.stock_wins("sm_90", OP, lambda: KEY) == "stock took 1 us (sm_90.json: bench tune at commit abc)"
    assert dispatch.stock_wins("sm_90", OP, lambda: "another") is None
    assert dispatch.stock_wins("sm_90", OP, lambda: None) is None


def test_an_old_entry_keeps_its_configuration_and_loses_its_claim(shipped):
    shipped(table_of(entry_of(stock_wins="stock took 1 us", source_hash="0" * 16)))
    assert look_up() == CONFIG
    assert dispatch.stock_wins("sm_90", OP, lambda: KEY) is None
    [table] = tuning.tables("sm_90").values()
    assert [entry.stale for entry in table.entries] == [True]


def test_the_hash_follows_every_source():
    assert tuning.source_hash(SOURCES) == tuning.source_hash(tuple(reversed(SOURCES)))
    assert len({tuning.source_hash(SOURCES[:n]) for n in range(len(SOURCES) + 1)}) == len(SOURCES) + 1
    assert all((Path(tuning.__file__).parents[1] / name).is_file() for name in SOURCES)


def test_what_ships_is_sound():
    """Tables in the package: readable, of a clean commit, and in configurations that fit."""
    for path in sorted(tuning.SHIPPED.glob("*.json")):
        table = tuning.read(path)
        assert path.stem == table.arch
        assert table.arch in registry.TARGETS or set(table.sources) == {cpu_tables.OP}
        assert not table.dry
        assert table.origin["dirty"] is False
        configs: dict[str, object] = {}
        for op, kind in {
            cpu_tables.OP: cpu_tables.CpuConfig,
            **{op: kind for op, (kind, _) in tunable.KINDS.items()},
        }.items():
            configs |= tuning._configs(table.arch, op, kind)
        assert set(configs) == {entry.bucket for entry in table.entries if entry.config}


# --- under torch.compile ----------------------------------------------------------------------------------------------


def test_claims_do_not_tie_a_graph_to_its_sizes(shipped):
    """One graph for all token counts, though a table claims some of them for the stock path."""
    shipped(table_of(entry_of(stock_wins="stock took 1 us")))
    counter = CompileCounter()

    @torch.compile(backend=counter, fullgraph=True, dynamic=True)
    def step(x: torch.Tensor) -> torch.Tensor:
        gemm = lambda: bucket(dataclasses.replace(GEMM, M=x.shape[0]))
        return x * 2 if dispatch.stock_wins("sm_90", OP, gemm) is None else x * 3

    for tokens in (4096, 3, 5000):
        x = torch.ones(tokens, 2)
        assert torch.equal(step(x), x * 2)
    assert counter.frame_count == 1


def test_symbolic_sizes_have_no_bucket():
    seen: list[str | None] = []

    def trace(x: torch.Tensor) -> torch.Tensor:
        seen.append(bucket(dataclasses.replace(GEMM, M=x.shape[0])))
        seen.append(bucket(dataclasses.replace(GEMM, layout="tn", K=x.shape[0])))
        return x + 1

    graph = make_fx(trace, tracing_mode="symbolic")(torch.ones(40, 2))
    assert seen == [None, None]
    assert not graph.shape_env.guards


# --- buckets ----------------------------------------------------------------------------------------------------------


def test_buckets_round_tokens_up_and_nothing_else():
    assert bucket(GEMM) == KEY
    tokens = {1: 1, 2: 2, 3: 4, 63: 64, 64: 64, 65: 128, 4097: 8192, 16384: 16384, 100000: MAX_TOKENS}
    for M, rounded in tokens.items():
        assert bucket(dataclasses.replace(GEMM, M=M)) == KEY.replace("t4096", f"t{rounded}")
    wgrad = Gemm("tn", 14336, 4096, 3000, BF16, FP32, reads=1, epilogue=("row_sum", "accumulate"))
    assert bucket(wgrad) == "tn-t4096-m14336-n4096-bf16-to_float32-row_sum-accumulate".replace("float32", "fp32")


@pytest.mark.parametrize(
    "change",
    [
        {"layout": "nn"},
        {"N": 14337},
        {"K": 4097},
        {"dtype": torch.float16},
        {"out_dtype": FP32},
        {"combine": "gated", "pairs": 2},
        {"combine": "chained", "pairs": 2},
        {"pairs": 3},
        {"epilogue": ("bias",)},
        {"precision": "tf32"},
        {"aligned": False},
    ],
    ids=str,
)
def test_buckets_tell_apart_what_runs_differently(change):
    assert bucket(dataclasses.replace(GEMM, **change)) != KEY


def test_row_invariant_products_have_no_bucket():
    assert bucket(dataclasses.replace(GEMM, row_invariant=True)) is None


def test_an_entry_that_no_longer_fits_can_be_told():
    assert fits("sm_90", GEMM, CONFIG)
    assert not fits("sm_90", GEMM, dataclasses.replace(CONFIG, num_stages=9))


def test_row_sums_leave_no_room_for_a_fourth_stage():
    """Compiled so, the kernel asks for 245,832 bytes of 232,448: the tile of a weight gradient without a bias."""
    wgrad = Gemm("tn", 16384, 4096, 4096, torch.bfloat16, torch.bfloat16)
    tile = pick_config("sm_90", wgrad)
    summed = dataclasses.replace(wgrad, epilogue=("row_sum",))
    assert (tile.block_m, tile.block_n, tile.num_stages) == (128, 256, 4)
    assert fits("sm_90", wgrad, tile)
    assert not fits("sm_90", summed, tile)
    assert shared_bytes("sm_90", summed, tile) == pytest.approx(245_832, rel=1e-3)
    assert fits("sm_90", summed, pick_config("sm_90", summed))


# --- what was measured to lose at every size --------------------------------------------------------------------------


def _ratios(bench: str, case: str, metric: str, peer: str) -> list[float]:
    rows = json.loads((RESULTS / "nvidia-h200" / f"{bench}.json").read_text())["rows"]
    return [
        row["ratio"] for row in rows if case in row["case"] and row["metric"] == metric and peer in row["peer_name"]
    ]


@pytest.mark.parametrize(
    ("case", "faster"),
    [
        (("sm_90", "gated_linear", BF16, 65), True),
        (("sm_90", "gated_linear", BF16, 64), False),  # few tokens were not measured
        (("sm_100", "gated_linear", BF16, 4096), False),
        (("sm_90", "linear_act", BF16, 4096), False),
        (("sm_80", "linear_act", FP32, 1), True),
        (("gfx942", "linear_act", FP32, 4096), False),
    ],
    ids=str,
)
def test_auto_takes_the_stock_calls_where_they_won_at_every_size(case, faster):
    assert (functional._beaten(*case) is not None) is faster


def test_with_tf32_a_product_in_fp32_is_the_kernels(monkeypatch):
    monkeypatch.setattr(device, "allow_tf32", lambda: True)
    assert functional._beaten("sm_90", "linear_act", FP32, 4096) is None


def test_the_reasons_say_what_the_committed_results_hold():
    gated = _ratios("gated", "gate_up", "forward, us", "eager")
    said = re.search(r"take (\S+) to (\S+) of", functional._beaten("sm_90", "gated_linear", BF16, 65))
    assert [f"{ratio:.2f}" for ratio in sorted(gated)] == [said[1], said[2]]
    (fp32,) = _ratios("candidates", "float32", "forward, us", "cuBLAS")
    assert "a tenth of the kernel's time" in functional._beaten("sm_90", "linear_act", FP32, 1)
    assert fp32 == pytest.approx(0.1, rel=0.05)


@pytest.mark.parametrize(("dtype", "impl"), [(FP32, "reference"), (BF16, "triton")])
def test_what_a_layer_is_said_to_run_on_a_gpu_is_what_calls_run(dtype, impl, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(device, "architecture", lambda on: "sm_90")
    monkeypatch.setattr(dispatch, "_why_not_triton", lambda on: None)
    monkeypatch.setattr(dispatch, "_decided", {})
    weight = torch.empty(8, 8, dtype=dtype, device="meta")
    choice = functional.layer_choice(weight, torch.device("cuda", 0), "auto", "identity", True)
    assert choice.impl == impl
    if impl == "reference":
        assert "candidates.json" in choice.reason
