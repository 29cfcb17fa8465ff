"""Metrics for Prometheus under vLLM's names, so that its dashboards fit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Sample

from stree.serving.engine import Engine

__all__ = ["Metrics"]

GAUGES = {"running": "num_requests_running", "waiting": "num_requests_waiting"}
COUNTERS = {
    "prompt_tokens": "prompt_tokens", "new_tokens": "generation_tokens", "queried_tokens": "prefix_cache_queries",
    "cached_tokens": "prefix_cache_hits", "drafted": "spec_decode_num_draft_tokens",
    "accepted": "spec_decode_num_accepted_tokens", "steps": "spec_decode_num_drafts",
}  # fmt: skip
FINISH_REASONS = ("stop", "length", "error", "abort")  # a cancelled request counts as the last
LABELS = ("model_name", "engine")
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)
TOKENS = tuple(mantissa * 10**exponent for exponent in range(6) for mantissa in (1, 2, 5))
HISTOGRAMS = {
    "time_to_first_token_seconds": "Seconds from the submission of a request to its first token.",
    "inter_token_latency_seconds": "Seconds between the outputs of a request, each of one token or more.",
    "request_time_per_output_token_seconds": "Mean seconds per token of a request after its first token.",
    "e2e_request_latency_seconds": "Seconds from the submission of a request to its end.",
    "request_queue_time_seconds": "Seconds that a request waited.",
    "request_prefill_time_seconds": "Seconds from the end of the wait to the first token.",
    "request_decode_time_seconds": "Seconds from the first token to the end.",
    "request_inference_time_seconds": "Seconds from the end of the wait to the end.",
    "request_prompt_tokens": "Tokens of the prompt of a request.",
    "request_generation_tokens": "New tokens of a request.",
}


class Metrics:
    """What a server has done; every series is there, at zero, before the first request.

    Args:
        engine: its own sums are read when the metrics are, and count from now on.
        model: the label ``model_name`` of every metric.
        replica: the label ``engine``.
    """

    def __init__(self, engine: Engine, model: str, replica: str = "0") -> None:
        self._engine, self._labels, self._registry = engine, (model, replica), CollectorRegistry()
        self._before, self._accepted_before = engine.stats, [*engine.totals.accepted_at]
        self._registry.register(self)
        ProcessCollector(registry=self._registry)
        self._histograms = {
            name: Histogram(
                f"vllm:{name}", text, LABELS, registry=self._registry, buckets=TOKENS if "_tokens" in name else SECONDS
            ).labels(*self._labels)
            for name, text in HISTOGRAMS.items()
        }
        self._ended = Counter(
            "vllm:request_success", "Requests that have ended.", [*LABELS, "finished_reason"], registry=self._registry
        )
        for reason in FINISH_REASONS:
            self._ended.labels(*self._labels, reason)
        engine.totals.listeners += (self,)

    def collect(self) -> Iterator[Any]:
        """Read the engine's sums."""
        stats = self._engine.stats
        capacity = self._engine.max_batch * self._engine.max_length
        gauges = {name: stats[key] for key, name in GAUGES.items()}
        for name, value in {**gauges, "kv_cache_usage_perc": stats["held_tokens"] / capacity}.items():
            yield self._family(GaugeMetricFamily, name, value)
        threads = GaugeMetricFamily("stree_num_threads", "CPU threads of torch in the last step.", labels=LABELS)
        threads.add_metric(self._labels, self._engine.totals.num_threads)
        yield threads
        for key, name in COUNTERS.items():
            yield self._family(CounterMetricFamily, name, stats[key] - self._before[key])
        name = "vllm:spec_decode_num_accepted_tokens_per_pos"
        by_depth = CounterMetricFamily(name, "Accepted tokens by depth in the tree.", labels=[*LABELS, "position"])
        for depth, count in enumerate(self._engine.totals.accepted_at):
            before = self._accepted_before[depth] if depth < len(self._accepted_before) else 0
            by_depth.add_metric([*self._labels, str(depth)], count - before)
        yield by_depth

    def on_tokens(self, first_s: float, gap_s: float | None) -> None:
        """Observe the time of a step's tokens."""
        if gap_s is not None:
            self._histograms["inter_token_latency_seconds"].observe(gap_s)
        else:
            self._histograms["time_to_first_token_seconds"].observe(first_s)

    def on_end(self, stats: Mapping[str, Any], reason: str) -> None:
        """Count a request that has ended."""
        self._ended.labels(*self._labels, reason if reason in FINISH_REASONS else "abort").inc()
        queue_s, first_s, total_s = (stats[name] for name in ("queue_s", "first_token_s", "total_s"))
        if first_s is None:
            return
        later = stats["num_new_tokens"] - 1
        values = {
            "e2e_request_latency_seconds": total_s, "request_queue_time_seconds": queue_s,
            "request_prefill_time_seconds": first_s - queue_s, "request_decode_time_seconds": total_s - first_s,
            "request_inference_time_seconds": total_s - queue_s, "request_prompt_tokens": stats["num_prompt_tokens"],
            "request_generation_tokens": later + 1,
            **({"request_time_per_output_token_seconds": (total_s - first_s) / later} if later else {}),
        }  # fmt: skip
        for name, value in values.items():
            self._histograms[name].observe(value)

    def _family(self, family: Any, name: str, value: float) -> Any:
        """Return one series."""
        text = (
            "Tokens of running requests, of all that fit." if name == "kv_cache_usage_perc" else name.replace("_", " ")
        )
        metric = family(f"vllm:{name}", text, labels=LABELS)
        metric.add_metric(self._labels, value)
        return metric

    def samples(self) -> Iterator[Sample]:
        """Return name, labels and value of everything but the process's own metrics."""
        for family in self._registry.collect():
            yield from (one for one in family.samples if "engine" in one.labels and not one.name.endswith("_created"))

    def text(self) -> bytes:
        """Return all metrics in Prometheus' format."""
        found: bytes = generate_latest(self._registry)
        return found
