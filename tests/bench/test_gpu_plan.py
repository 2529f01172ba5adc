"""The plan and the journal of a GPU run."""

from __future__ import annotations

import importlib.util
import json
from typing import Any

import pytest

from shardfuse.bench.gpu import gpu_run, journal, plan, predictions, summary
from shardfuse.bench.harness import stale, stand_in
from shardfuse.bench.harness.benchmark import Measurement, Work
from shardfuse.bench.harness.records import filed_rows, left
from shardfuse.bench.harness.report import Row
from shardfuse.bench.harness.timing import Timing

OP = "dropout"


# --- the plan ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def planned() -> dict[plan.Name, Measurement]:
    """The short plans' rows that a first call measures."""
    rows = {(b.name, *row.key): row for b in plan.selection(())[1] for row in left(b, stand_in.SETTINGS)}
    return {name: row for name, row in rows.items() if not row.slow and name[0] != gpu_run.CANDIDATES}


def test_the_headlines_come_first_and_what_may_hang_last(planned):
    names = [step.name for step in plan.steps(planned, 0.5, {})]
    headlines = [name for name in plan.HEADLINES if name in planned]
    assert names[: len(headlines)] == headlines
    missing = set(plan.HEADLINES) - set(headlines)
    assert {name[0] for name in missing} <= {"train_step"}
    if importlib.util.find_spec("transformers") is not None:
        assert {name[3] for name in missing} <= {"Liger", "torch.compile"}  # not installed; slow
    assert len(plan.HEADLINES) == 29
    others = [name for name, *_ in names[len(headlines) :]]
    assert set(others[min(map(others.index, plan.SPIN)) :]) == set(plan.SPIN)
    assert len(names) == len(set(names)) == len(planned) > 150


def test_predicted_rows_are_headlines():
    assert {(each.bench, *each.key) for each in predictions.predictions()} < set(plan.HEADLINES)
    told = [(each.bench, *each.key) in plan.HEADLINES[:5] for each in predictions.predictions()]
    assert sum(told) == 5


@pytest.mark.parametrize("factor", [1.0, 1.5])
@pytest.mark.parametrize("card", ["", "nvidia-h200"])
def test_the_plan_holds_if_all_takes_longer(planned, factor, card):
    """Smoke is done by 1:10, every headline begun by 4:00, and all rows and the tests fit a call of 560 s."""
    filed = filed_rows(stale.RESULTS / card) if card else {}
    cases = sum(len(gpu_run.registry.op(name).tagged("test")) for name in plan.selection(())[0])
    smoke = (plan.PROCESS_S + plan.SMOKE_CASE_S * cases / gpu_run.PROCESSES) * factor
    assert smoke < 70
    steps = plan.steps(planned, 0.5, filed)
    begins = list(plan.begins(steps, smoke, factor))
    assert begins[len(plan.HEADLINES) - 1] < 240
    last = list(plan.whole(steps))[-1] * factor
    assert begins[-1] + last + gpu_run.TESTS_S + gpu_run.SUMMARY_S < 560


def test_what_230_rows_took_is_what_the_plan_expects(planned):
    """docs/gpu.md: 259 s for 230 rows on an H200; seconds of the host are fitted to that."""
    steps = plan.steps(planned, 0.5, filed_rows(stale.RESULTS / "nvidia-h200"))
    assert sum(plan.whole(steps)) / len(steps) == pytest.approx(259 / 230, rel=0.15)


def _row(target: float | None, microseconds: float, case: str = "a", work: Work | None = None) -> Measurement:
    return Measurement(case, "forward, us", "peer", target, lambda: (Timing(microseconds),) * 2, work=work)


def test_rows_that_are_open_and_short_come_first():
    rows = {("norm", *row.key): row for row in (_row(1.0, 1.0, case) for case in ("known", "close", "new"))}
    rows[("norm", "long", "forward, us", "peer")] = _row(1.0, 1.0, "long", Work(0, int(3e12)))
    filed = {
        ("norm", case, "forward, us", "peer"): Row(case, "forward, us", 1.0, ratio, "peer", ratio, 1.0, True)
        for case, ratio in (("known", 2.0), ("close", 1.01))
    }
    assert [step.name[1] for step in plan.steps(rows, 0.5, filed)] == ["new", "close", "long", "known"]


def test_seconds_are_the_budget_or_ten_rounds_and_a_gate_counts_once():
    second = Work(0, int(3e12))  # of an H100's memory
    rows = {("norm", *row.key): row for row in (_row(None, 1.0, "a"), _row(None, 1.0, "b", second))}
    short, long = plan.steps(rows, 0.5, {})
    assert (short.seconds, long.seconds) == (pytest.approx(0.6), pytest.approx(0.1 + 2 * (10 + 11)))
    twice = [short, short._replace(name=("norm", "a", "backward, us", "peer"))]
    assert list(plan.whole(twice)) == [short.seconds + short.gate_s, short.seconds]
    assert list(plan.begins(twice, 10.0, 2.0)) == [20.0, pytest.approx(20 + 2 * (short.seconds + short.gate_s))]


# --- the journal ------------------------------------------------------------------------------------------------------


def _event(key: tuple[str, str, str], **changes: Any) -> dict[str, Any]:
    row = Row(key[0], key[1], 1.0, 2.0, key[2], 2.0, None, None).record()
    return {"bench": OP, "source": "s1"} | row | changes


def test_journal_forgets_rows_of_other_sources(tmp_path):
    first = journal.Journal(tmp_path / journal.FILE)
    first.add("row", **_event(("a", "b", "c")))
    first.add("row", **_event(("d", "e", "f"), source="s0"))
    first.add("hung", bench=OP, source="s1", key=["g", "h", "i"])
    first.close()
    again = journal.Journal(tmp_path / journal.FILE)
    again.add("run", origin=ORIGIN, dry=False)
    assert again.done(OP, "s1") == {("a", "b", "c"), ("g", "h", "i")}
    assert again.lost(OP, "s1") == {("g", "h", "i")}
    assert again.done(OP, "s2") == set()
    assert [row.key for row in again.outcome(OP, "s1").rows] == [("a", "b", "c")]
    assert list(again.of("row")) == []  # of this call
    again.close()


def test_half_a_line_of_a_killed_run_is_dropped(tmp_path):
    first = journal.Journal(tmp_path / journal.FILE)
    first.add("run", origin=ORIGIN, dry=False)
    first.close()
    with (tmp_path / journal.FILE).open("a") as file:
        file.write('{"event": "ro')
    assert [event["event"] for event in journal.Events.read(tmp_path).events] == ["run"]
    again = journal.Journal(tmp_path / journal.FILE)
    again.add("finished", good=True)
    again.close()
    assert [event["event"] for event in journal.Events.read(tmp_path).events] == ["run", "finished"]


ORIGIN = {"device": "NVIDIA H100 80GB HBM3", "torch": "2.9.0", "triton": "3.5.0", "date": "2031-05-01"}


@pytest.mark.parametrize(
    ("change", "folder"),
    [
        ({"date": "2031-05-02"}, "nvidia-h100-80gb-hbm3"),
        ({"device": "NVIDIA H200"}, "nvidia-h200"),
        ({"torch": "2.10.0"}, "nvidia-h100-80gb-hbm3-2"),
        ({"triton": "3.6.0"}, "nvidia-h100-80gb-hbm3-2"),
    ],
    ids=["same", "device", "torch", "triton"],
)
def test_another_card_or_version_has_a_folder_of_its_own(tmp_path, change, folder):
    first = journal.Journal(journal.card_folder(tmp_path, ORIGIN) / journal.FILE)
    first.add("run", origin=ORIGIN, dry=False)
    first.close()
    assert journal.card_folder(tmp_path, ORIGIN | change) == tmp_path / folder


def test_the_record_is_the_journals_alone(tmp_path, capsys):
    """Of two calls on a card: the latest sources' rows, with the origin of the call that measured the last of them."""
    folder = tmp_path / "out" / "nvidia-h100-80gb-hbm3"
    first = journal.Journal(folder / journal.FILE)
    told = {"sources": {"a.py": "1"}, "short": True, "planned": [["a", "b", "c"], ["d", "e", "f"]], "skipped": []}
    for commit, dirty in (("abc", False), ("def", True)):
        first.add("run", origin=ORIGIN | {"commit": commit, "dirty": dirty, "environment": {}}, dry=False)
        first.add("benchmark", bench=OP, source="s1", **told)
        if commit == "abc":
            first.add("verdict", bench=OP, source="s1", case="a", name="y", error=0.1, budget=1.0, ok=True)
            first.add("row", **_event(("a", "b", "c")))
    first.close()
    record = journal.Events.read(folder).records()[OP]
    assert (record["origin"]["commit"], record["gate"], record["short"]) == ("abc", "green", True)
    assert ([Row.from_record(row).key for row in record["rows"]], record["missing"]) == (
        [("a", "b", "c")],
        [("d", "e", "f")],
    )
    assert summary.accept(tmp_path / "out", tmp_path / "filed") == 0
    assert json.loads((tmp_path / "filed" / folder.name / f"{OP}.json").read_text())["rows"] == record["rows"]
    assert "planned rows missing: 1" in capsys.readouterr().out


def _told(file: journal.Journal, commit: str = "abc", *, dirty: bool = False, source: str = "s1") -> None:
    """A call's first events."""
    file.add("run", origin=ORIGIN | {"commit": commit, "dirty": dirty, "environment": {}}, dry=False)
    told = {"sources": {"a.py": source}, "short": True, "planned": [["a", "b", "c"], ["d", "e", "f"]], "skipped": []}
    file.add("benchmark", bench=OP, source=source, **told)


def _verdict(file: journal.Journal, *, ok: bool = True, source: str = "s1", case: str = "a") -> None:
    file.add("verdict", bench=OP, source=source, case=case, name="y", error=0.1 if ok else 2.0, budget=1.0, ok=ok)


def test_rows_of_a_dirty_tree_are_not_filed_with_a_clean_ones(tmp_path, capsys):
    file = journal.Journal(tmp_path / "h100" / journal.FILE)
    for commit, dirty, key in (("abc", True, ("a", "b", "c")), ("def", False, ("d", "e", "f"))):
        _told(file, commit, dirty=dirty)
        _verdict(file, case=key[0])
        file.add("row", **_event(key))
    file.close()
    assert summary.accept(tmp_path, tmp_path / "filed") == 1
    assert "its tree was dirty" in capsys.readouterr().err


def test_what_was_red_once_stays_red(tmp_path):
    """A race may let a second check pass."""
    file = journal.Journal(tmp_path / journal.FILE)
    for ok in (True, False, True):
        _told(file)
        _verdict(file, ok=ok)
    file.add("row", **_event(("a", "b", "c")))
    file.close()
    assert file.outcome(OP, "s1").red == {"a"}
    assert not file.records()[OP]["rows"]
    assert any(line.startswith(f"RED {OP} a y") for line in summary._lines(file))


def test_a_call_with_other_sources_hides_no_earlier_rows(tmp_path):
    file = journal.Journal(tmp_path / journal.FILE)
    _told(file)
    _verdict(file)
    file.add("row", **_event(("a", "b", "c")))
    _told(file, source="s2")
    assert [row["case"] for row in file.records()[OP]["rows"]] == ["a"]
    _verdict(file, source="s2", case="d")
    file.add("row", **_event(("d", "e", "f"), source="s2"))
    assert [row["case"] for row in file.records()[OP]["rows"]] == ["d"]
    file.close()


def test_the_summary_is_of_all_calls(tmp_path):
    """The second call's says what of the first is red, and which headlines lack a row."""
    file, headline = journal.Journal(tmp_path / journal.FILE), plan.HEADLINES[0]
    _told(file)
    file.add("smoke", op="rope", case="one", source="s", ok=False, detail="off by one")
    file.add("smoke", op="rope", case="two", source="s", ok=False, detail="")
    _verdict(file)
    file.add("row", **_event(("a", "b", "c")))
    _told(file)
    file.add("smoke", op="rope", case="two", source="s", ok=True, detail="")
    told = {"sources": {}, "short": True, "planned": [headline[1:]], "skipped": [["x", "us", "peer", "no such GPU"]]}
    file.add("benchmark", bench=headline[0], source="s1", **told)
    file.close()
    lines = list(summary._lines(file))
    assert "smoke: 1 of 2 cases right" in lines
    assert "  rope one: off by one" in lines
    assert f"headline without a row: {', '.join(headline)}" in lines
    assert f"skipped {headline[0]} x, us, peer: no such GPU" in lines
    assert "rows measured: 1 of 3, now: 0" in lines
    assert lines[-1] == "the call has not finished"


def test_runs_of_two_versions_are_not_filed_together(tmp_path, capsys):
    for folder in ("h100", "h100-2"):
        file = journal.Journal(tmp_path / folder / journal.FILE)
        _told(file)
        _verdict(file)
        file.add("row", **_event(("a", "b", "c")))
        file.close()
    assert gpu_run.main(["--accept", str(tmp_path)]) == 2
    assert "with different versions: name the folder" in capsys.readouterr().err


def test_a_run_that_could_not_be_filed_does_not_begin(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(gpu_run.torch.cuda, "is_available", lambda: True)
    for commit, dirty in (("unknown", None), ("abc", None)):
        monkeypatch.setattr(gpu_run.provenance, "revision", lambda told=(commit, dirty): told)
        assert gpu_run.main(["--out", str(tmp_path / "out")]) == 2
        assert "make gpu COMMIT=<its hash> DIRTY=0" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_folder_without_a_run_says_so(tmp_path, capsys):
    assert gpu_run.main(["--summary", str(tmp_path)]) == gpu_run.main(["--accept", str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("holds no run") == 2
