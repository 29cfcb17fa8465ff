"""AIPerf's runs and its SPEED-Bench report against a server: their figures are those that the server counts.

Run: pip install aiperf, in an environment of its own whose folder bin is last on the path, and
    python -m pytest -m slow tests/serving/test_aiperf.py
"""

from __future__ import annotations

import csv
import hashlib
import json
import os
import shutil
import subprocess
from pathlib import Path

import httpx
import pytest
from helpers.http_served import listening
from prometheus_client.parser import text_string_to_metric_families

import stree
from stree.drafters import ModelDrafter
from stree.inputs import ASSETS, load_tokenizer

QUESTIONS = {
    "coding": ["Write a function that adds two numbers.", "Write a loop that prints 1 to 10."],
    "math": ["Tom has 3 apples. He gets 2 more apples each day for 5 days. How many?", "What is 17 times 4?"],
}
COUNTERS = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")


def counts(url: str) -> list[float]:
    """Return steps, drafted and accepted tokens so far."""
    families = text_string_to_metric_families(httpx.get(f"{url}/metrics").text)
    found = {sample.name: sample.value for family in families for sample in family.samples}
    return [found[f"vllm:spec_decode_{name}_total"] for name in COUNTERS]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("aiperf") is None, reason="needs the command aiperf, which is not a requirement")
def test_the_speed_bench_report_has_what_the_server_has_counted(tmp_path: Path) -> None:
    rows = [
        {"question_id": hashlib.md5(text.encode()).hexdigest(), "category": name, "messages": [
            {"role": "user", "content": text},
        ]}
        for name, texts in QUESTIONS.items() for text in texts
    ]  # fmt: skip
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    target, drafter = (stree.TreeLM.from_pretrained(ASSETS / name) for name in ("target", "drafter"))
    tokenizer = load_tokenizer(str(ASSETS / "target"))
    expected, found = dict[str, list[float]](), dict[str, dict[str, float]]()

    def aiperf(*arguments: str) -> None:
        environment = {name: os.environ[name] for name in ("PATH", "HOME")}  # its tokenizer's loader reads others
        subprocess.run(["aiperf", *arguments], cwd=tmp_path, env=environment, check=True, timeout=240)

    with (
        stree.Engine(target, ModelDrafter(drafter), budget=12, max_batch=2, max_length=256) as engine,
        listening(engine, tokenizer, api_key=None, has_metrics=True) as served,
    ):
        for name in QUESTIONS:
            before = counts(served.url)
            aiperf(
                "profile", "--model", "tiny", "--url", served.url, "--endpoint-type", "chat", "--streaming",
                "--input-file", "rows.jsonl", "--custom-dataset-type", f"speed_bench_{name}", "--tokenizer",
                str(ASSETS / "target"), "--use-server-token-count", "--extra-inputs", "temperature:0",
                "--extra-inputs", "max_completion_tokens:24", "--concurrency", "2", "--request-count", "4",
                "--server-metrics", f"{served.url}/metrics", "--ui", "none", "--artifact-dir", f"runs/{name}",
            )  # fmt: skip
            expected[name] = [now - then for now, then in zip(counts(served.url), before, strict=True)]
    for metric in ("accept_length", "accept_rate"):
        aiperf("speed-bench-report", "runs", "--metric", metric, "--format", "csv", "--output", f"{metric}.csv")
        (row,) = csv.DictReader((tmp_path / f"{metric}.csv").read_text().splitlines())
        found[metric] = {name: float(row[name]) for name in QUESTIONS}
    for name, (steps, drafted, accepted) in expected.items():
        assert found["accept_length"][name] == pytest.approx(1 + accepted / steps, abs=0.006)
        assert found["accept_rate"][name] == pytest.approx(accepted / drafted, abs=0.006)
        profile = json.loads((tmp_path / "runs" / name / "profile_export_aiperf.json").read_text())
        histogram = {int(key): value for key, value in profile["pooled_spec_decode_acceptance_histogram"].items()}
        assert sum(histogram.values()) == steps and profile["spec_decode_draft_tokens"]["sum"] == drafted
        # A response also counts what its last step accepted beyond the limit, at most a step's for each of the four.
        assert 0 <= sum(key * value for key, value in histogram.items()) - accepted <= 4 * max(histogram)
    assert found["accept_length"]["coding"] != found["accept_length"]["math"]
