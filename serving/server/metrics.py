"""Prometheus metrics with vLLM's names and meanings, so that vLLM's dashboards and autoscalers work with them."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from ..stats import STEP_SIZES, EngineLoad, EngineStats

_LABELS = ("model_name", "engine")
_FIRST_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
_BETWEEN_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10, 20)
_WHOLE_S = (0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
_ANSWERS = (1, 2, 5, 10, 20)
REASONS = ("stop", "length", "abort", "error")
_REFUSED = {
    400: "invalid",
    401: "key",
    403: "host",
    404: "not_found",
    405: "not_found",
    408: "timeout",
    413: "too_large",
    429: "queue_full",
    499: "gone",
    503: "unavailable",
}  # by status; "connections" and "header_timeout" are refused before there is a request
REFUSALS = (*dict.fromkeys(_REFUSED.values()), "connections", "header_timeout", "error")


@dataclass
class Totals:
    """The sums behind some metrics, for the live page: tokens, and seconds with their counts."""

    generated: int = 0
    prompt: int = 0
    first_s: float = 0.0
    first_count: int = 0
    between_s: float = 0.0
    between_count: int = 0


class Metrics:
    """The metrics of one server, in a registry of its own."""

    def __init__(self, model: str) -> None:
        self.registry = CollectorRegistry()
        labels = (model, "0")

        def histogram(name: str, help: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"vllm:{name}", help, _LABELS, buckets=buckets, registry=self.registry).labels(*labels)

        self.prompt_tokens = Counter(
            "vllm:prompt_tokens", "Tokens of prompts whose answer has begun.", _LABELS, registry=self.registry
        ).labels(*labels)
        self.generation_tokens = Counter(
            "vllm:generation_tokens", "Generated tokens.", _LABELS, registry=self.registry
        ).labels(*labels)
        ended = Counter(
            "vllm:request_success", "Answers that ended, by reason.", (*_LABELS, "finished_reason"),
            registry=self.registry,
        )  # fmt: skip
        self.ended = {reason: ended.labels(*labels, reason) for reason in REASONS}
        refused = Counter(
            "shardfuse:requests_refused", "Requests and connections that ended with an error, by reason.",
            (*_LABELS, "reason"), registry=self.registry,
        )  # fmt: skip
        self.refused = {reason: refused.labels(*labels, reason) for reason in REFUSALS}
        self.request_prompt_tokens = histogram("request_prompt_tokens", "Tokens of a prompt.", _TOKENS)
        self.request_generation_tokens = histogram("request_generation_tokens", "Tokens of an answer.", _TOKENS)
        self.params_n = histogram("request_params_n", "Answers that a request asks for.", _ANSWERS)
        self.params_max_tokens = histogram("request_params_max_tokens", "The most tokens of an answer.", _TOKENS)
        self.first = histogram("time_to_first_token_seconds", "From a request's arrival to its first token.", _FIRST_S)
        self.between = histogram(
            "inter_token_latency_seconds", "Between two tokens of an answer that came in two steps.", _BETWEEN_S
        )
        self.each = histogram(
            "request_time_per_output_token_seconds",
            "From the first token to the last, for each one after the first.",
            _BETWEEN_S,
        )
        self.whole = histogram("e2e_request_latency_seconds", "From a request's arrival to its end.", _WHOLE_S)
        self.queue = histogram("request_queue_time_seconds", "From a request's arrival to its first step.", _WHOLE_S)
        self.prefill = histogram("request_prefill_time_seconds", "From the first step to the first token.", _WHOLE_S)
        self.decode = histogram("request_decode_time_seconds", "From the first token to the last.", _WHOLE_S)
        self.inference = histogram("request_inference_time_seconds", "From the first step to the last token.", _WHOLE_S)
        self.longest = histogram(
            "request_max_num_generation_tokens", "Tokens of the longest answer to a prompt.", _TOKENS
        )
        self.computed = histogram(
            "request_prefill_kv_computed_tokens", "Tokens of a prompt that were not in the prefix cache.", _TOKENS
        )
        self.prompt_tokens_cached = Counter(
            "vllm:prompt_tokens_cached", "Of prompt_tokens, those found in the prefix cache.", _LABELS,
            registry=self.registry,
        ).labels(*labels)  # fmt: skip
        self._gauges = {
            "running": Gauge(
                "vllm:num_requests_running", "Answers that are being computed.", _LABELS, registry=self.registry
            ).labels(*labels),
            "waiting": Gauge(
                "vllm:num_requests_waiting", "Requests that wait for room.", _LABELS, registry=self.registry
            ).labels(*labels),
            "cache": Gauge(
                "vllm:kv_cache_usage_perc", "Share of the cache's blocks that answers own: 0 to 1.", _LABELS,
                registry=self.registry,
            ).labels(*labels),
        }  # fmt: skip
        self.totals = Totals()
        self._stats = EngineStats()
        self.registry.register(_OfTheEngine(self, labels))

    def look(self, load: EngineLoad, stats: EngineStats) -> None:
        """Copy the engine's statistics for the next scrape."""
        self._gauges["running"].set(load.running)
        self._gauges["waiting"].set(load.waiting)
        self._gauges["cache"].set(load.used_blocks / load.num_blocks)
        self._stats = stats

    def answered(self, status: int) -> None:
        """Count a request whose answer has ``status``, if that is an error's; 0: the client had gone before."""
        if status == 0 or status >= 400:
            reason = _REFUSED.get(status or 499, "invalid" if status < 500 else "error")
            self.refused[reason].inc()

    def arrived(self, answers: int, max_tokens: int) -> None:
        """Count a queued request."""
        self.params_n.observe(answers)
        self.params_max_tokens.observe(max_tokens)


class AnswerTimes:
    """Measures one answer as its tokens arrive, for ``metrics``; ``leads`` marks the first answer to its prompt.

    Times are those of ``time.monotonic()``. An answer without a token has no phases.
    """

    def __init__(self, metrics: Metrics, arrived: float, prompt: int, leads: bool) -> None:
        self._metrics, self._arrived, self._prompt, self._leads = metrics, arrived, prompt, leads
        self.tokens = 0
        self.first: float | None = None
        self._scheduled: float | None = None
        self._last = arrived

    def begin(self, scheduled: float, cached: int | None) -> None:
        """Record when the engine first scheduled the answer, before its first :meth:`token`; of the first answer also
        how many tokens of the prompt were ``cached``.
        """
        self._scheduled = scheduled
        if cached is not None:
            self._metrics.prompt_tokens_cached.inc(cached)
            self._metrics.computed.observe(self._prompt - cached)

    def token(self) -> None:
        now, metrics, totals = time.monotonic(), self._metrics, self._metrics.totals
        if self.first is None:
            self.first = now
            prompt = self._prompt if self._leads else 0
            metrics.prompt_tokens.inc(prompt)
            metrics.first.observe(now - self._arrived)
            totals.prompt += prompt
            totals.first_s += now - self._arrived
            totals.first_count += 1
        else:
            metrics.between.observe(now - self._last)
            totals.between_s += now - self._last
            totals.between_count += 1
        self._last = now
        self.tokens += 1
        metrics.generation_tokens.inc()
        totals.generated += 1

    def end(self, reason: str) -> None:
        metrics = self._metrics
        metrics.ended[reason].inc()
        metrics.whole.observe(time.monotonic() - self._arrived)
        metrics.request_prompt_tokens.observe(self._prompt)
        metrics.request_generation_tokens.observe(self.tokens)
        if self.first is None:
            return
        if self._scheduled is not None:
            metrics.queue.observe(self._scheduled - self._arrived)
            metrics.prefill.observe(self.first - self._scheduled)
            metrics.decode.observe(self._last - self.first)
            metrics.inference.observe(self._last - self._scheduled)
        if self.tokens > 1:
            metrics.each.observe((self._last - self.first) / (self.tokens - 1))


class _OfTheEngine(Collector):
    """Counters and a histogram that the engine keeps."""

    def __init__(self, metrics: Metrics, labels: tuple[str, str]) -> None:
        self._metrics, self._labels = metrics, labels

    def collect(self) -> Iterator[Any]:
        stats = self._metrics._stats
        for name, help, value in (
            (
                "shardfuse:logits_not_finite", "Answers that ended because the model's logits were NaN or infinite.",
                stats.not_finite,
            ),
            ("vllm:num_preemptions", "How often an answer lost its blocks to another.", stats.preemptions),
            (
                "vllm:prefix_cache_queries", "Tokens that were looked up in the prefix cache.",
                stats.shared_tokens + stats.prefill_tokens,
            ),
            ("vllm:prefix_cache_hits", "Of these, tokens that were found.", stats.shared_tokens),
        ):  # fmt: skip
            family = CounterMetricFamily(name, help, labels=_LABELS)
            family.add_metric(self._labels, value)
            yield family
        counts = accumulate(stats.step_sizes)
        buckets = [(floatToGoString(most), count) for most, count in zip((*STEP_SIZES, math.inf), counts)]
        steps = HistogramMetricFamily("vllm:iteration_tokens_total", "Tokens of a step of the engine.", labels=_LABELS)
        steps.add_metric(self._labels, buckets, stats.prefill_tokens + stats.generated_tokens)
        yield steps
