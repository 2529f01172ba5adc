"""``/metrics``, and the tokens and times behind it: what was served, the phases of an answer, the prefix cache."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="fastapi is not installed (pip install .[serve])")

from server_case import NAME, SOON_S, Server, answer, events, serve, until

from shardfuse.serving.server import metrics as metrics_module
from shardfuse.serving.server.metrics import AnswerTimes, Metrics

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
LONG = {"prompt": "hello", "max_tokens": 200, "temperature": 0, "ignore_eos": True}
SHORT = {"prompt": "hello", "max_tokens": 4, "temperature": 0}
LABELS = {"model_name": NAME, "engine": "0"}

# Of vLLM 0.32.0, vllm/v1/metrics/loggers.py; prometheus_client adds "_total" to counters.
VLLM_NAMES = {
    "vllm:num_requests_running": "gauge",
    "vllm:num_requests_waiting": "gauge",
    "vllm:kv_cache_usage_perc": "gauge",
    "vllm:prefix_cache_queries": "counter",
    "vllm:prefix_cache_hits": "counter",
    "vllm:num_preemptions": "counter",
    "vllm:prompt_tokens": "counter",
    "vllm:generation_tokens": "counter",
    "vllm:request_success": "counter",
    "vllm:request_prompt_tokens": "histogram",
    "vllm:request_generation_tokens": "histogram",
    "vllm:request_params_n": "histogram",
    "vllm:request_params_max_tokens": "histogram",
    "vllm:time_to_first_token_seconds": "histogram",
    "vllm:inter_token_latency_seconds": "histogram",
    "vllm:request_time_per_output_token_seconds": "histogram",
    "vllm:e2e_request_latency_seconds": "histogram",
    "vllm:request_queue_time_seconds": "histogram",
    "vllm:request_prefill_time_seconds": "histogram",
    "vllm:request_decode_time_seconds": "histogram",
    "vllm:request_inference_time_seconds": "histogram",
    "vllm:request_max_num_generation_tokens": "histogram",
    "vllm:request_prefill_kv_computed_tokens": "histogram",
    "vllm:prompt_tokens_cached": "counter",
    "vllm:iteration_tokens_total": "histogram",
}
# Of the queries in the Grafana boards of vLLM 0.32.0: examples/observability/prometheus_grafana/grafana.json, and
# performance_statistics.json and query_statistics.json in examples/observability/dashboards/grafana.
BOARDS = (
    *(f"vllm:request_time_per_output_token_seconds_{each}" for each in ("bucket", "sum", "count")),
    "vllm:iteration_tokens_total_count",
    *(f"vllm:e2e_request_latency_seconds_{each}" for each in ("bucket", "sum", "count")),
    *(f"vllm:inter_token_latency_seconds_{each}" for each in ("bucket", "sum", "count")),
    *(f"vllm:time_to_first_token_seconds_{each}" for each in ("bucket", "sum", "count")),
    *("vllm:prompt_tokens_total", "vllm:generation_tokens_total", "vllm:request_success_total"),
    *("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"),
    *("vllm:request_prompt_tokens_bucket", "vllm:request_generation_tokens_bucket"),
    *("vllm:request_queue_time_seconds_sum", "vllm:request_prefill_time_seconds_sum"),
    *("vllm:request_decode_time_seconds_sum", "vllm:request_max_num_generation_tokens_sum"),
)


def test_metrics_have_vllms_names(server: Server) -> None:
    from prometheus_client.parser import text_string_to_metric_families

    server.post(COMPLETIONS, SHORT)
    found = list(text_string_to_metric_families(server.get("/metrics").text))
    kinds = {each.name: each.type for each in found if not each.name.endswith("_created")}
    assert kinds == {**VLLM_NAMES, "shardfuse:requests_refused": "counter", "shardfuse:logits_not_finite": "counter"}
    labels = [sample.labels for each in found for sample in each.samples]
    assert all(each["model_name"] == NAME and each["engine"] == "0" for each in labels)


def test_metrics_count_what_was_served() -> None:
    with serve() as server:
        server.post(COMPLETIONS, {"prompt": ["hello", "ab"], "max_tokens": 6, "n": 2, "ignore_eos": True})
        server.post(COMPLETIONS, {**SHORT, "stream": True, "ignore_eos": True})
        server.post(COMPLETIONS, {**SHORT, "stop": answer("hello", 4)[1][2]})
        server.idle()
        found = server.metrics()
        assert found["vllm:prompt_tokens_total"] == 5 + 2 + 5 + 5
        assert found["vllm:generation_tokens_total"] == 4 * 6 + 4 + 3
        assert found["vllm:request_success_total{length}"] == 5
        assert found["vllm:request_success_total{stop}"] == 1
        assert found["vllm:request_success_total{abort}"] == found["vllm:request_success_total{error}"] == 0
        assert found["vllm:time_to_first_token_seconds_count"] == 6
        assert found["vllm:e2e_request_latency_seconds_count"] == 6
        assert found["vllm:inter_token_latency_seconds_count"] == 31 - 6
        assert found["vllm:request_generation_tokens_sum"] == 31
        assert found["vllm:request_params_n_sum"] == 2 + 2 + 1 + 1
        assert found["vllm:num_requests_running"] == found["vllm:num_requests_waiting"] == 0
        assert found["vllm:kv_cache_usage_perc"] == 0
        with server.failing(ArithmeticError("a defect")):
            server.post(COMPLETIONS, SHORT)
        assert server.metrics()["vllm:request_success_total{error}"] == 1


def test_gauges_show_the_load() -> None:
    with serve(engine={"max_num_seqs": 1}) as server, ThreadPoolExecutor(2) as pool:
        with server.slow(0.05):
            asked = [pool.submit(server.post, COMPLETIONS, LONG) for _ in range(2)]
            until(lambda: server.served.serve.load.running and server.served.serve.load.waiting)
            found = server.metrics()
            assert (found["vllm:num_requests_running"], found["vllm:num_requests_waiting"]) == (1, 1)
            assert 0 < found["vllm:kv_cache_usage_perc"] < 1
        assert [each.result(SOON_S).status_code for each in asked] == [200, 200]


def test_vllms_boards_have_no_empty_panel() -> None:
    from prometheus_client.parser import text_string_to_metric_families

    with serve() as server:
        server.post(COMPLETIONS, {**SHORT, "n": 2})
        found = list(text_string_to_metric_families(server.get("/metrics").text))
    samples = [each for family in found for each in family.samples]
    assert {*BOARDS} <= {each.name for each in samples}
    counts = {each.name: each.value for each in samples if each.name.endswith("_count")}
    assert len(counts) == sum(kind == "histogram" for kind in VLLM_NAMES.values())
    assert min(counts.values()) > 0, counts


PHASES = ("queue", "prefill", "decode", "inference")


def _phases(found: dict[str, float], kind: str = "sum") -> dict[str, float]:
    return {name: found[f"vllm:request_{name}_time_seconds_{kind}"] for name in PHASES}


def test_the_phases_are_the_whole() -> None:
    """Of several answers to a prompt, and of one that has no decode."""
    with serve(engine={"max_num_seqs": 2}) as server:
        server.post(COMPLETIONS, {"prompt": ["hello", "ab"], "max_tokens": 6, "n": 2, "ignore_eos": True})
        server.post(COMPLETIONS, {**SHORT, "max_tokens": 1})
        found = server.metrics()
    phases = _phases(found)
    assert _phases(found, "count") == dict.fromkeys(PHASES, 5)
    assert min(phases.values()) > 0
    assert phases["queue"] + phases["prefill"] == pytest.approx(found["vllm:time_to_first_token_seconds_sum"])
    assert phases["prefill"] + phases["decode"] == pytest.approx(phases["inference"])
    assert phases["decode"] == pytest.approx(found["vllm:inter_token_latency_seconds_sum"])


def test_a_phase_lasts_from_one_time_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter((15.0, 18.0, 21.0, 22.0))  # three tokens and the end
    monkeypatch.setattr(metrics_module, "time", SimpleNamespace(monotonic=lambda: next(now)))
    metrics = Metrics(NAME)
    times = AnswerTimes(metrics, arrived=10.0, prompt=5, leads=True)
    times.begin(12.0, 3)
    for _ in range(3):
        times.token()
    times.end("stop")
    assert _sums(metrics) == {"queue": 2, "prefill": 3, "decode": 6, "inference": 9}


def test_an_answer_without_a_token_has_no_phases() -> None:
    metrics = Metrics(NAME)
    AnswerTimes(metrics, arrived=0.0, prompt=5, leads=True).end("abort")
    assert metrics.registry.get_sample_value("vllm:e2e_request_latency_seconds_count", LABELS) == 1
    assert metrics.registry.get_sample_value("vllm:request_queue_time_seconds_count", LABELS) == 0


def _sums(metrics: Metrics) -> dict[str, float | None]:
    return {name: metrics.registry.get_sample_value(f"vllm:request_{name}_time_seconds_sum", LABELS) for name in PHASES}


def test_preempted_answers_have_phases_and_the_longest_answer_counts() -> None:
    with serve(engine={"max_num_seqs": 2, "num_blocks": 8, "max_model_len": 60}) as server:
        server.post(COMPLETIONS, {"prompt": ["hello", "hullo"], "max_tokens": 50, "ignore_eos": True})
        assert server.engine.stats.preemptions > 0
        assert _phases(server.metrics(), "count") == dict.fromkeys(PHASES, 2)
        stop = answer("hello", 4)[1][2]
        server.post(COMPLETIONS, {**SHORT, "stop": stop, "n": 3})
        found = server.metrics()
    assert found["vllm:request_max_num_generation_tokens_count"] == 3
    assert found["vllm:request_max_num_generation_tokens_sum"] == 50 + 50 + 3


def test_steps_are_counted_by_their_tokens() -> None:
    """A prompt of 20 tokens in steps of 8, 8 and 4, the last of which generates a token, then three of one token."""
    with serve(engine={"max_num_batched_tokens": 8}) as server:
        server.post(COMPLETIONS, {**SHORT, "prompt": "a" * 20, "ignore_eos": True})
        until(lambda: server.served.serve.newest_stats.steps == 6)
        found = server.metrics()
    name = "vllm:iteration_tokens_total"
    assert (found[f"{name}_count"], found[f"{name}_sum"]) == (6, 8 + 8 + 5 + 3)
    assert [found[f"{name}_bucket{{{most}}}"] for most in ("1.0", "2.0", "4.0", "8.0", "16384.0", "+Inf")] == [
        *(3, 3, 3, 6, 6, 6)
    ]


# --- the prefix cache -------------------------------------------------------------------------------------------------

BLOCK = 8  # tokens, of the tiny engine
SAME = "the same beginning of all"


def test_usage_tells_the_cached_tokens_of_the_prompts() -> None:
    """Whole and streamed, of one prompt and of several; another text behind the same beginning finds its blocks."""
    found_again = len(SAME) // BLOCK * BLOCK

    def details(usage: Any) -> Any:
        return usage["prompt_tokens_details"]

    with serve() as server:
        asked = {"prompt": SAME, "max_tokens": 2}
        assert details(server.post(COMPLETIONS, asked).json()["usage"]) == {"cached_tokens": 0}
        assert details(server.post(COMPLETIONS, asked).json()["usage"]) == {"cached_tokens": found_again}
        both = {**asked, "prompt": [SAME, SAME + "!", "other"], "n": 2}
        assert details(server.post(COMPLETIONS, both).json()["usage"]) == {"cached_tokens": 2 * found_again}
        streamed = {**both, "stream": True, "stream_options": {"include_usage": True}}
        assert details(events(server.post(COMPLETIONS, streamed).text)[-1]["usage"]) == {
            "cached_tokens": 2 * found_again
        }
        found = server.metrics()
        assert found["vllm:prompt_tokens_cached_total"] == 5 * found_again
        assert (
            found["vllm:request_prefill_kv_computed_tokens_sum"] == found["vllm:prompt_tokens_total"] - 5 * found_again
        )
        chat = {"messages": [{"role": "user", "content": SAME}], "max_tokens": 2}
        first = server.post(CHAT, chat).json()["usage"]
        assert details(first) == {"cached_tokens": 0}
        streamed = {**chat, "stream": True, "stream_options": {"include_usage": True}}
        last = events(server.post(CHAT, streamed).text)[-1]["usage"]
        assert details(last) == {"cached_tokens": first["prompt_tokens"] // BLOCK * BLOCK}
