"""What ``/openapi.json`` promises, against what the server does with bodies drawn from it, right and wrong ones."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="fastapi is not installed (pip install .[serve])")
pytest.importorskip("schemathesis", reason="schemathesis is not installed (pip install .[dev])")

import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import CHECKS as schemathesis_checks
from schemathesis.checks import load_all_checks
from server_case import Server, serve

CASES_IN_CI, CASES = 100, 10_000
LIMIT_S = 120  # for an answer that never comes: one case can ask for hundreds of sequences
WEIGHTS = {
    **{"/v1/completions": 10, "/v1/chat/completions": 10, "/v1/responses": 10},
    **{"/tokenize": 4, "/detokenize": 2, "/v1/models/{model}": 2},
}
MODES = st.sampled_from([GenerationMode.POSITIVE, GenerationMode.NEGATIVE])


@pytest.fixture(scope="module")
def small() -> Iterator[Server]:
    with serve(engine={"max_model_len": 64, "num_blocks": 512}, debug=True) as server:
        yield server


def _try(server: Server, cases: int) -> Counter[tuple[str, int]]:
    """How often each path gave each status. AssertionError, with the request, where an answer breaks its promise."""
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    operations = {each.ok().path: each.ok() for each in schema.get_all_operations()}
    assert operations.keys() > WEIGHTS.keys()
    weighed = [path for path in operations for _ in range(WEIGHTS.get(path, 1))]
    seen: Counter[tuple[str, int]] = Counter()

    @settings(
        max_examples=cases,
        deadline=None,
        derandomize=cases < CASES,
        suppress_health_check=list(HealthCheck),
        print_blob=False,
    )
    @given(data=st.data())
    def one(data: st.DataObject) -> None:
        path = data.draw(st.sampled_from(weighed))
        case = data.draw(operations[path].as_strategy(generation_mode=data.draw(MODES)))
        if isinstance(case.body, dict) and data.draw(st.booleans()):  # so that some get as far as the model
            case.body.pop("model", None)
            for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
                if isinstance(case.body.get(name), int) and case.body[name] > 8:
                    case.body[name] = 8
        response = case.call(timeout=LIMIT_S)
        seen[path, response.status_code] += 1
        case.validate_response(response, checks=CHECKS)

    one()
    return seen


def _no_server_error(ctx: Any, response: Any, case: Any) -> None:
    assert response.status_code < 500, response.text


def _errors_are_openais(ctx: Any, response: Any, case: Any) -> None:
    """Each names what is wrong; and what is JSON has no NaN."""
    if response.status_code >= 400:
        assert response.json()["error"]["message"]
    elif "json" in str(response.headers["content-type"]):
        json.loads(response.text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


load_all_checks()
CONFORMS = ("status_code_conformance", "content_type_conformance", "response_schema_conformance")
CHECKS = [_no_server_error, _errors_are_openais, *map(schemathesis_checks.get_one, CONFORMS)]


ASK = [{"role": "user", "content": "hi"}]
SCORES = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
GOOD: list[tuple[str, Any]] = [
    ("/v1/completions", {"prompt": ["a", "b"], "max_tokens": 2, "logprobs": 2, "echo": True}),
    ("/v1/completions", {"prompt": "a", "max_tokens": 2, "stream": True}),
    ("/v1/completions", {"prompt": "ab", "max_tokens": 2, "prompt_logprobs": 2, "return_token_ids": True}),
    ("/v1/chat/completions", {"messages": ASK, "max_tokens": 2, "logprobs": True, "top_logprobs": 2}),
    ("/v1/chat/completions", {"messages": ASK, "max_tokens": 2, "stream": True}),
    ("/v1/chat/completions", {"messages": ASK, "max_tokens": 2, "prompt_logprobs": 0, "return_token_ids": True}),
    ("/v1/responses", {"input": "hi", "max_output_tokens": 2, **SCORES, "text": {"format": {"type": "json_object"}}}),
    ("/v1/responses", {"input": ASK, "instructions": "be brief", "max_output_tokens": 2, "stream": True}),
    ("/tokenize", {"prompt": "a", "return_token_strs": True}),
    ("/detokenize", {"tokens": [97]}),
    *((path, None) for path in ("/v1/models", "/v1/models/{model}", "/health", "/version", "/metrics", "/stats")),
    ("/debug/leaks", None),
]


@pytest.mark.parametrize(("path", "body"), GOOD, ids=range(len(GOOD)))
def test_what_is_right_is_answered_as_described(small: Server, path: str, body: Any) -> None:
    schema = schemathesis.openapi.from_url(f"{small.url}/openapi.json")
    if body is None:
        case = schema[path]["GET"].Case(path_parameters={"model": "tiny"} if "{" in path else {})
    else:
        case = schema[path]["POST"].Case(body=body, media_type="application/json")
    response = case.call()
    assert response.status_code == 200, response.text
    case.validate_response(response, checks=CHECKS)


def test_the_schema_is_kept(small: Server) -> None:
    seen = _try(small, CASES_IN_CI)
    small.idle()
    assert {status for _, status in seen} >= {200, 400}
    assert seen.total() >= CASES_IN_CI


@pytest.mark.nightly(seconds=250)
def test_the_schema_is_kept_in_ten_thousand_cases(small: Server) -> None:
    seen = _try(small, CASES)
    small.idle()
    assert sum(seen.values()) >= CASES
    print(*sorted(seen.items()), sep="\n")
