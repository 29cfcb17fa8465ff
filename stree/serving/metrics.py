"""Metrics for Prometheus under vLLM's names, so that its dashboards fit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from stree.serving.engine import Engine
from stree.serving.handle import RequestHandle

__all__ = ["Metrics"]

GAUGES = {"running": "num_requests_running", "waiting": "num_requests_waiting"}
COUNTERS = {
    "prompt_tokens": "prompt_tokens", "new_tokens": "generation_tokens", "cached_tokens": "prefix_cache_hits",
    "drafted": "spec_decode_num_draft_tokens", "accepted": "spec_decode_num_accepted_tokens",
    "steps": "spec_decode_num_drafts",
}  # fmt: skip
FINISH_REASONS = ("stop", "length", "error", "abort")  # a cancelled request counts as the last
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class Metrics:
    """What a server has done; every series is there, at zero, before the first request.

    Args:
        engine: its own sums are read when the metrics are, and count from now on.
        model: a label of every metric.
    """

    def __init__(self, engine: Engine, model: str) -> None:
        self._engine, self._model, self._registry = engine, model, CollectorRegistry()
        self._before = {key: engine.stats[key] for key in COUNTERS}
        self._registry.register(self)
        self._first = self._histogram("vllm:time_to_first_token_seconds", "Until the first token.")
        self._each = self._histogram("vllm:time_per_output_token_seconds", "For each later token.")
        self._whole = self._histogram("vllm:e2e_request_latency_seconds", "Until the end of a request.")
        self._ended = Counter(
            "vllm:request_success", "Requests that have ended.", ["model_name", "finished_reason"],
            registry=self._registry,
        )  # fmt: skip
        for reason in FINISH_REASONS:
            self._ended.labels(self._model, reason)

    def collect(self) -> Iterator[Any]:
        """Read the engine's sums."""
        stats = self._engine.stats
        for family, names in ((GaugeMetricFamily, GAUGES), (CounterMetricFamily, COUNTERS)):
            for key, name in names.items():
                metric = family(f"vllm:{name}", name.replace("_", " "), labels=["model_name"])
                metric.add_metric([self._model], stats[key] - self._before.get(key, 0))
                yield metric

    def observe(self, handle: RequestHandle) -> None:
        """Count a request that has ended."""
        stats = handle.stats
        reason = handle.finish_reason
        self._ended.labels(self._model, reason if reason in FINISH_REASONS else "abort").inc()
        if stats["first_token_s"] is None or stats["total_s"] is None:
            return
        self._first.observe(stats["first_token_s"])
        self._whole.observe(stats["total_s"])
        if stats["num_new_tokens"] > 1:
            later = stats["total_s"] - stats["first_token_s"]
            self._each.observe(later / (stats["num_new_tokens"] - 1))

    def _histogram(self, name: str, text: str) -> Histogram:
        histogram = Histogram(name, text, ["model_name"], registry=self._registry, buckets=SECONDS)
        return histogram.labels(self._model)

    def text(self) -> bytes:
        """Return all metrics in Prometheus' format."""
        found: bytes = generate_latest(self._registry)
        return found
