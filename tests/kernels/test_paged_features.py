"""paged_attention's features, every two of them together: the reference against loops, the kernel and the CPU's walk
against the reference, and the page that says so."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from shardfuse.kernels.dev import registry
from shardfuse.kernels.dev.accuracy import FACTOR, Verdict, rounding, within
from shardfuse.kernels.dev.cases import paged_attention as cases
from shardfuse.kernels.dev.cases import paged_features as features
from shardfuse.kernels.dev.registry import Case

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CPU = torch.device("cpu")
PAIRWISE = features.pairwise()
NIGHTLY_PARTS = 8
_ran: dict[str, bool] = {}  # case of PAIRWISE -> whether the kernel was right


# ------------------------------------------------------------------------------------------------- written from scratch


def _naive(inputs: dict[str, Any], case: Case) -> dict[str, torch.Tensor]:
    """Attention as the formulas say it, one query and one head at a time, in fp64."""
    options, dtype = cases.asked(case), torch.float64
    n, kv_heads, h, hv = (case.sizes[name] for name in ("N", "K", "H", "Hv"))
    q = inputs["q"].to(dtype)
    out = torch.zeros(len(q), n, hv, dtype=dtype)
    lse = torch.full((len(q), n), -math.inf, dtype=dtype)
    slopes = inputs["alibi_slopes"].to(dtype) if options["alibi"] else torch.zeros(n, dtype=dtype)
    sinks = inputs["sinks"].to(dtype)[:, None] if options["sinks"] else torch.empty(n, 0, dtype=dtype)
    lse[:] = torch.logsumexp(sinks, 1)  # of a row that sees nothing
    row = 0
    for s, (context, queries) in enumerate(zip(options["context"], options["queries"])):
        if queries == 0:
            continue
        keys, values = _tokens(inputs, case, s)
        for p in range(context, context + queries):
            seen = [j for j in range(context + queries) if _sees(inputs, options, s, row, context, p, j)]
            distance = torch.tensor([abs(p - j) for j in seen])
            for head in range(n) if seen else ():
                group = head * kv_heads // n
                score = keys[seen, group] @ q[row, head] * h**-0.5
                if options["softcap"]:
                    score = options["softcap"] * torch.tanh(score / options["softcap"])
                logits = torch.cat((score - slopes[head] * distance, sinks[head]))
                out[row, head] = torch.softmax(logits, 0)[: len(seen)] @ values[seen, group]
                lse[row, head] = torch.logsumexp(logits, 0)
            row += 1
    lse = lse.masked_fill(lse == -math.inf, -1.0)
    return {"out": out, "lse": lse} if options["lse"] else {"out": out}


def _tokens(inputs: dict[str, Any], case: Case, s: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys [L, K, H] and values [L, K, Hv] of sequence s, token by token, as the numbers that they stand for."""
    h, size = case.sizes["H"], case.sizes["block_size"]
    cache, table = inputs["kv_cache"], inputs["block_tables"][s].tolist()
    halves = (cache[..., :h], cache[..., h:]) if isinstance(cache, torch.Tensor) else cache
    found = []
    for half, scale in zip(halves, (inputs.get("k_scale"), inputs.get("v_scale"))):
        tokens = []
        for j in range(int(inputs["seq_lens"][s])):
            token = half[table[j // size], :, j % size].double()
            if scale is not None:
                token = token * (scale if scale.dim() == 1 else scale[table[j // size], :, j % size, None]).double()
            tokens.append(token)
        found.append(torch.stack(tokens))
    return found[0], found[1]


def _sees(inputs: dict[str, Any], options: dict[str, Any], s: int, row: int, context: int, p: int, j: int) -> bool:
    """Whether the query in ``row``, at position p of sequence s, sees key j of that sequence."""
    if options["tree"]:
        return j < context or bool(inputs["tree_mask"][row, j - context])
    if options["causal"] and j > p and not (options["prefix"] and j < int(inputs["prefix_lens"][s])):
        return False
    window = options["window"]
    return window is None or (j > p - window and (options["causal"] or j < p + window))


@pytest.mark.parametrize("case", [*PAIRWISE, *cases.SPEC.tagged("test")], ids=lambda case: case.name)
def test_reference_says_what_loops_say(case: Case) -> None:
    """In fp64, to the order of sums: what the mask, the scales and the softmax are, not how they are rounded."""
    inputs = cases.make_inputs(case, CPU, seed=1)
    found, oracle = cases.run(registry.to_double(inputs), case, "reference"), _naive(inputs, case)
    assert found.keys() == oracle.keys()
    for name in found:
        budget = FACTOR * rounding(torch.float64, cases.SPEC.terms(case))
        verdict = within(name, found[name], oracle[name], budget)
        assert verdict.ok, verdict


# --------------------------------------------------------------------------------------------------- every two features


def _verdicts(case: Case, impl: str, draws: int = 1) -> list[Verdict]:
    """Each output of a case against the oracle, over that many draws of its inputs as one."""
    oracle, low, found = _Outputs(), _Outputs(), _Outputs()
    for seed in range(draws):
        inputs = cases.make_inputs(case, DEVICE, seed)
        oracle.add(cases.run(registry.to_double(inputs), case, "reference"))
        low.add(cases.run(inputs, case, "reference"))
        found.add(cases.run(inputs, case, impl))
    assert found.keys() == oracle.keys()
    return [cases.SPEC.judge(case, name, found[name], low[name], oracle[name]) for name in oracle]


class _Outputs(dict[str, torch.Tensor]):
    def add(self, more: dict[str, torch.Tensor]) -> None:
        self.update({name: torch.cat((self[name], x)) if name in self else x for name, x in more.items()})


@pytest.mark.interpret
@pytest.mark.parametrize("case", PAIRWISE, ids=lambda case: case.name)
def test_kernel(case: Case) -> None:
    _ran[case.name] = False
    verdicts = _verdicts(case, "triton")
    _ran[case.name] = all(verdict.ok for verdict in verdicts)
    assert _ran[case.name], verdicts


@pytest.mark.interpret
def test_every_pair_that_the_page_calls_working_was_run() -> None:
    if len(_ran) < len(PAIRWISE):
        pytest.skip(f"only {len(_ran)} of the {len(PAIRWISE)} cases of test_kernel were selected")
    worked = set().union(*(features.met(case) for case in PAIRWISE if _ran[case.name]))
    missing = [" with ".join(value for _, value in sorted(pair)) for pair in features.meetings(2) if pair not in worked]
    assert missing == []


@pytest.mark.skipif(DEVICE.type != "cpu", reason="on a GPU the kernel runs instead")
@pytest.mark.parametrize("case", PAIRWISE, ids=lambda case: case.name)
def test_walk(case: Case) -> None:
    verdicts = _verdicts(case, "auto")
    assert all(verdict.ok for verdict in verdicts), verdicts


@pytest.mark.nightly
@pytest.mark.interpret
@pytest.mark.parametrize("part", range(NIGHTLY_PARTS))
def test_every_three_features(part: int) -> None:
    """Two draws each: among hundreds of cases, the reference is lucky with the dozen rows of one."""
    wrong = {}
    for case in features.full()[part::NIGHTLY_PARTS]:
        verdicts = _verdicts(case, "triton", draws=2)
        if not all(verdict.ok for verdict in verdicts):
            wrong[case.name] = [str(verdict) for verdict in verdicts]
    assert wrong == {}


# ------------------------------------------------------------------------------------------------- the set and the page


def test_what_is_refused_is_refused_by_name() -> None:
    """Every name in the list, from a case that asks for just that; and no covering case asks for any."""
    pairs = {name: pair for pair, name in features.refused_pairs().items()}
    assert pairs.keys() == features.REFUSED.keys()
    for name, pair in pairs.items():
        case = features.case_of(dict(pair), "refused")
        inputs = cases.make_inputs(case, CPU, seed=0)
        with pytest.raises(ValueError, match=f"refuses {name}"):
            cases.run(inputs, case, "reference")


@pytest.mark.parametrize(
    ("strength", "made"), [(2, features.pairwise), pytest.param(3, features.full, marks=pytest.mark.nightly)]
)
def test_covering_sets_cover(strength: int, made: Any) -> None:
    met = set().union(*(features.met(case, strength) for case in made()))
    assert met == set(features.meetings(strength))
    names = [case.name for case in made()]
    assert len(set(names)) == len(names)


def test_the_page_is_what_the_features_say() -> None:
    page = features.PAGE.read_text()
    assert features.written(page) == page, (
        f"{features.PAGE.name} is out of date: run python -m shardfuse.kernels.dev.cases.paged_features --write"
    )
