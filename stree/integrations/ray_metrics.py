"""Metrics of a replica of Ray Serve among those that Ray exports for Prometheus."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from stree.serving.metrics import Metrics

__all__ = ["exported"]

PERIOD_S = 2.0  # Ray itself collects every 10 seconds by default


@asynccontextmanager
async def exported(metrics: Metrics) -> AsyncIterator[None]:
    """Export metrics every PERIOD_S seconds, in a replica of Ray Serve.

    A series ``vllm:NAME`` of ``/metrics`` is ``ray_vllm_NAME`` there, with Ray's labels ``replica``, ``deployment`` and
    ``application`` beside its own.  All are gauges for Ray, since its counters and histograms take single events; their
    values are those of ``/metrics``, so that ``rate`` and ``histogram_quantile`` hold.
    """
    task = asyncio.create_task(_export(metrics))
    try:
        yield
    finally:
        task.cancel()


async def _export(metrics: Metrics) -> None:
    """Set Ray's gauges, again and again."""
    from ray.serve.metrics import Gauge

    gauges: dict[str, Any] = {}
    while True:
        for sample in metrics.samples():
            if sample.name not in gauges:
                name = sample.name.replace(":", "_")
                gauges[sample.name] = Gauge(name, f"{sample.name} of /metrics", tag_keys=(*sample.labels,))
            gauges[sample.name].set(sample.value, tags={**sample.labels})
        await asyncio.sleep(PERIOD_S)
