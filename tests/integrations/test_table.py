"""The table of docs/integrations.md is what the lanes wrote, and these ran what the page says of them."""

from __future__ import annotations

from collections import Counter

import host_table
import pytest

from shardfuse.integrations import sglang, transformers, vllm
from shardfuse.integrations.conformance import models


def test_the_page_is_what_the_lanes_wrote():
    assert host_table.PAGE.read_text() == host_table.page(), "python tests/support/host_table.py --write"


@pytest.mark.parametrize("host", [vllm.HOST, transformers.HOST], ids=lambda host: host.name)
def test_twelve_architectures_and_more_are_equal_in_every_version(host):
    found = host_table.read(host.name.lower())
    assert not found["origin"]["dirty"]
    equal = Counter(row["version"] for row in found["rows"] if row["ok"] and not row["case"] and row["attention"])
    assert set(equal) == set(host.ran)
    assert min(equal.values()) >= 12
    refused = {row["architecture"] for row in found["rows"] if not row["ok"]}
    assert refused <= ({"bloom", "stablelm"} if host is transformers.HOST else set())
    assert {row["architecture"] for row in found["rows"]} == models.ARCHITECTURES.keys()


def test_what_else_ran_in_vllm():
    cases = " ".join(row["case"] for row in host_table.read("vllm")["rows"] if row["ok"])
    for said in ("blocks of 32", "blocks of 128", "TP 2", "engine process", "layout LBHNC", "server", "refused"):
        assert said in cases


def test_versions_that_are_only_compared_are_recorded():
    recorded = host_table.contracts()
    for host in (vllm.HOST, sglang.HOST):
        assert set(recorded[host.package]) >= {*host.ran, *host.compared}
