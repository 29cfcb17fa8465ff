"""Metrics of the server: they move with every step, under the names and labels of vLLM.

Run: python -m pytest tests/serving/test_metrics.py
"""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import time
from contextlib import suppress
from functools import reduce
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from fastapi.testclient import TestClient
from helpers.http_served import listening
from helpers.tiny_models import patched, tiny_model
from prometheus_client.parser import text_string_to_metric_families

import stree
from stree.drafters import ModelDrafter
from stree.growth import Chain
from stree.inputs import ASSETS, load_tokenizer
from stree.serving.app import create_app
from stree.serving.metrics import Metrics

ROOT = Path(__file__).parents[2]
# From https://docs.vllm.ai/en/stable/usage/metrics/.
NAMES = [
    "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "prompt_tokens_total",
    "generation_tokens_total", "prefix_cache_queries_total", "prefix_cache_hits_total", "spec_decode_num_drafts_total",
    "spec_decode_num_draft_tokens_total", "spec_decode_num_accepted_tokens_total", "time_to_first_token_seconds_count",
    "inter_token_latency_seconds_count", "request_time_per_output_token_seconds_count",
    "e2e_request_latency_seconds_count", "request_queue_time_seconds_count", "request_prefill_time_seconds_count",
    "request_decode_time_seconds_count", "request_inference_time_seconds_count", "request_prompt_tokens_count",
    "request_generation_tokens_count",
]  # fmt: skip


def values(text: bytes | str) -> dict[str, float]:
    """The series of a scrape, by their names and the labels beside those of the model and the engine."""
    text = text.decode() if isinstance(text, bytes) else text
    found = {}
    for sample in (sample for family in text_string_to_metric_families(text) for sample in family.samples):
        labels = dict(sample.labels)
        if not sample.name.startswith("process_"):
            assert (labels.pop("model_name"), labels.pop("engine")) == ("tiny", "0")
        found[" ".join([sample.name.removeprefix("vllm:"), *labels.values()])] = sample.value
    return found


@pytest.fixture(scope="module")
def lm() -> stree.TreeLM:
    return patched(tiny_model("mamba2", eos_token_id=0))


def test_every_series_is_there_before_the_first_request(lm: stree.TreeLM) -> None:
    tokenizer = load_tokenizer(str(ASSETS / "target"))
    with stree.Engine(lm, "none", budget=1, max_batch=1, max_length=64) as engine:
        found = values(TestClient(create_app(engine, tokenizer, "tiny")).get("/metrics").text)
    reasons = [f"request_success_total {reason}" for reason in ("stop", "length", "error", "abort")]
    positions = [f"spec_decode_num_accepted_tokens_per_pos_total {position}" for position in range(16)]
    assert {name: found[name] for name in (*NAMES, *reasons, *positions)} == dict.fromkeys(
        (*NAMES, *reasons, *positions), 0.0
    )
    assert found["process_resident_memory_bytes"] > 1e6 and found["stree_num_threads"] == torch.get_num_threads()


def test_threads_are_those_of_the_engine_s_thread_in_its_last_step(lm: stree.TreeLM) -> None:
    """Another number of threads in each step; torch keeps one for every thread of Python."""
    wanted, own = iter(range(1, 100)), torch.get_num_threads()
    with stree.Engine(lm, "none", budget=1, before_step=lambda: torch.set_num_threads(next(wanted) % 2 + 1)) as engine:
        engine.submit([5, 6, 7], max_new_tokens=2, ignore_eos=True).result(60)
        found = values(Metrics(engine, "tiny").text())
    assert found["stree_num_threads"] == (next(wanted) - 1) % 2 + 1 and torch.get_num_threads() == own


def test_a_replica_is_the_label_of_its_engine(lm: stree.TreeLM) -> None:
    with stree.Engine(lm, "none", budget=1, max_batch=1, max_length=64) as engine:
        samples = [*Metrics(engine, "tiny", "r7").samples()]
    assert {sample.labels["engine"] for sample in samples} == {"r7"} and len(samples) > len(NAMES)


def test_series_move_with_every_step_and_end_at_the_sums_of_the_request(lm: stree.TreeLM) -> None:
    texts: list[bytes] = []
    metrics: list[Metrics] = []

    def scrape() -> None:
        texts.extend(each.text() for each in metrics)

    options: dict[str, Any] = {"budget": 1, "max_batch": 2, "max_length": 50, "cache_bytes": 10**6}
    with stree.Engine(lm, "none", before_step=scrape, **options) as engine:
        metrics.append(Metrics(engine, "tiny"))
        engine.submit([5, 6, 7], max_new_tokens=8, ignore_eos=True).result(60)
        engine.submit([5, 6, 7, 8], max_new_tokens=1, ignore_eos=True).result(60)
        end = values(metrics[0].text())
    scrapes = [*map(values, texts)]
    first = [scrape for scrape in scrapes if scrape["prompt_tokens_total"] == 3 and scrape["num_requests_running"] == 1]
    first = [scrape for scrape in first if scrape["request_success_total length"] == 0]
    assert [scrape["generation_tokens_total"] for scrape in first] == [*range(2, 8)]
    assert [scrape["inter_token_latency_seconds_count"] for scrape in first] == [*range(1, 7)]
    assert [scrape["time_to_first_token_seconds_count"] for scrape in first] == [1] * 6
    assert [scrape["kv_cache_usage_perc"] for scrape in first] == [(3 + new) / 100 for new in range(2, 8)]
    counts = {
        "prompt_tokens_total": 7, "prefix_cache_queries_total": 7, "generation_tokens_total": 9,
        "spec_decode_num_drafts_total": 7, "request_success_total length": 2, "request_prompt_tokens_sum": 7,
        "request_generation_tokens_sum": 9, "request_queue_time_seconds_count": 2, "kv_cache_usage_perc": 0,
        "num_requests_running": 0, "request_time_per_output_token_seconds_count": 1,
    }  # fmt: skip
    assert {name: end[name] for name in counts} == counts


@pytest.mark.parametrize(("limit", "accepted"), [(3, 2), (6, 4), (7, 5)])
def test_accepted_tokens_beyond_the_limit_are_not_counted(lm: stree.TreeLM, limit: int, accepted: int) -> None:
    """The target drafts for itself, four tokens a step, and a step emits one more of its own."""
    with stree.Engine(lm, ModelDrafter(lm), growth=Chain(4), budget=5, max_batch=1, max_length=64) as engine:
        metrics = Metrics(engine, "tiny")
        handle = engine.submit([5, 6, 7], max_new_tokens=limit, ignore_eos=True)
        handle.result(60)
        found = values(metrics.text())
    by_depth = [found[f"spec_decode_num_accepted_tokens_per_pos_total {depth}"] for depth in range(16)]
    assert found["spec_decode_num_accepted_tokens_total"] == handle.stats["accepted"] == sum(by_depth) == accepted
    assert by_depth == sorted(by_depth, reverse=True) and by_depth[0] == found["spec_decode_num_drafts_total"]


def test_an_answer_counts_what_its_steps_accepted(lm: stree.TreeLM) -> None:
    """The target drafts for itself, so all four nodes of a step are accepted; vLLM has the same names."""
    tokenizer = load_tokenizer(str(ASSETS / "target"))
    body = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 6, "ignore_eos": True, "temperature": 0}
    with stree.Engine(lm, ModelDrafter(lm), growth=Chain(4), budget=5, max_batch=2, max_length=64) as engine:
        client = TestClient(create_app(engine, tokenizer, "tiny", has_metrics=True))
        whole = client.post("/v1/completions", json=body).json()
        streamed = client.post(
            "/v1/completions", json={**body, "stream": True, "stream_options": {"include_usage": True}}
        )
        several = client.post("/v1/completions", json={**body, "n": 2}).json()
        one_token = client.post("/v1/completions", json={**body, "max_tokens": 1}).json()
        plain = TestClient(create_app(engine, tokenizer, "tiny")).post("/v1/completions", json=body).json()
    found = whole["metrics"]["speculative_decoding"]
    assert found == {
        "mean_acceptance_length": 5.0, "draft_acceptance_rate": 1.0, "acceptance_histogram": [0, 0, 0, 0, 1],
        "num_spec_steps": 1, "num_accepted_draft_tokens": 4, "num_draft_tokens": 4, "num_spec_tokens": 4,
    }  # fmt: skip
    assert json.loads(streamed.text.split("data: ")[-2])["metrics"] == whole["metrics"]
    assert "metrics" not in plain and several["metrics"] == {"speculative_decoding": None}
    none = one_token["metrics"]["speculative_decoding"]  # AIPerf wants a bucket more than num_spec_tokens
    assert (none["acceptance_histogram"], none["num_spec_tokens"], none["num_spec_steps"]) == ([0], 0, 0)


def board_queries() -> list[str]:
    """The queries of the board, with its variables set."""
    board = json.loads((ROOT / "docs/grafana.json").read_text())
    queries = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    values = {"$__rate_interval": "1m", "$model": "tiny", "$engine": ".*", "$job": ".*"}
    return [reduce(lambda query, name: query.replace(name, values[name]), values, query) for query in queries]


def test_the_board_asks_for_series_that_are_there(lm: stree.TreeLM) -> None:
    tokenizer = load_tokenizer(str(ASSETS / "target"))
    with stree.Engine(lm, "none", budget=1, max_batch=1, max_length=64) as engine:
        scrape = TestClient(create_app(engine, tokenizer, "tiny")).get("/metrics").text
    there = set(re.findall(r"^[\w:]+", scrape, re.MULTILINE))
    for query in board_queries():
        assert "$" not in query
        names = set(re.findall(r"vllm:\w+|process_\w+", query))
        assert names and names <= there, query


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("prometheus") is None, reason="no prometheus to ask")
def test_every_query_of_the_board_returns_data_from_prometheus(lm: stree.TreeLM, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(ASSETS / "target"))
    options: dict[str, Any] = {"growth": Chain(4), "budget": 5, "max_batch": 2, "max_length": 64, "cache_bytes": 10**6}
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    with stree.Engine(lm, ModelDrafter(lm), **options) as engine, listening(engine, tokenizer) as served:
        config = {"scrape_configs": [{"job_name": "stree", "scrape_interval": "1s", "static_configs": [
            {"targets": [served.url.removeprefix("http://")]},
        ]}]}  # fmt: skip
        (tmp_path / "prometheus.yml").write_text(json.dumps(config))
        command = ["prometheus", f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/data"]
        process = subprocess.Popen([*command, f"--web.listen-address={address}"], stderr=subprocess.DEVNULL)
        try:
            deadline, missing = time.monotonic() + 30, board_queries()
            while missing and time.monotonic() < deadline:
                served.post("/v1/completions", {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 6})
                time.sleep(0.5)
                with suppress(httpx.TransportError):
                    missing = [query for query in missing if not answers(address, query)]
            assert not missing
        finally:
            process.kill()


def answers(address: str, query: str) -> bool:
    """Whether Prometheus has a number for a query."""
    found = httpx.get(f"http://{address}/api/v1/query", params={"query": query}).json()
    assert found["status"] == "success", found
    return any(value["value"][1] != "NaN" for value in found["data"]["result"])
