"""The server in replicas of Ray Serve: what each replica does, read through Ray's proxy and from what Ray exports.

Run: python -m pytest tests/serving/test_ray_serve.py
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from helpers.http_served import KEY, Served
from prometheus_client.parser import text_string_to_metric_families

pytestmark = pytest.mark.slow

COMPLETION: dict[str, Any] = {"model": "tiny", "prompt": "x", "max_tokens": 2}


def test_a_client_of_ray_serve_that_leaves_frees_its_row(ray_served: Served) -> None:
    body = {**COMPLETION, "max_tokens": 200, "ignore_eos": True, "temperature": 0, "stream": True}
    headers = {"Authorization": f"Bearer {KEY}"}
    for _ in range(12):  # more than the rows of both replicas
        with httpx.stream("POST", f"{ray_served.url}/v1/completions", json=body, headers=headers) as stream:
            assert next(stream.iter_lines()).startswith("data: ")
    generated = dict[str, float]()  # of each replica, once nothing runs
    for number in range(60):
        time.sleep(0.05)
        if number >= 40:
            generated |= generated_tokens(httpx.get(f"{ray_served.url}/metrics").text, "vllm:")
    assert len(generated) == 2 and sum(generated.values()) < 12 * 100, generated


def generated_tokens(scrape: str, prefix: str) -> dict[str, float]:
    """Sum of new tokens by the label of a replica."""
    samples = [sample for family in text_string_to_metric_families(scrape) for sample in family.samples]
    return {one.labels["engine"]: one.value for one in samples if one.name == f"{prefix}generation_tokens_total"}


def test_ray_exports_the_metrics_of_every_replica(ray_served: Served) -> None:
    import ray

    exported = f"http://127.0.0.1:{ray.nodes()[0]['MetricsExportPort']}/metrics"

    def wait(condition: Callable[[dict[str, float]], bool]) -> dict[str, float]:
        found: dict[str, float] = {}
        for _ in range(60):
            if condition(found := generated_tokens(httpx.get(exported).text, "ray_vllm_")):
                break
            time.sleep(0.5)
        assert condition(found), found
        return found

    before = wait(lambda found: len(found) == 2)
    for _ in range(12):
        assert (
            ray_served.post("/v1/completions", {**COMPLETION, "max_tokens": 5, "ignore_eos": True}).status_code == 200
        )
    after = wait(lambda found: sum(found.values()) == sum(before.values()) + 12 * 5)
    assert after.keys() == before.keys()
    proxied = dict[str, float]()  # the replica that answers is not chosen
    for _ in range(30):
        proxied |= generated_tokens(httpx.get(f"{ray_served.url}/metrics").text, "vllm:")
    assert proxied == after
