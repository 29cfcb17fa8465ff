"""The page at / as HTTP answers it: its headers, its size, and the steps that it streams.

Run: python -m pytest tests/serving/test_page.py
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient
from helpers.http_served import KEY, PROMPT, Served

import stree
from benchmarks import ROOT
from benchmarks.serving import browser
from stree.decode.stop_strings import TokenBytes
from stree.inputs import ASSETS, load_tokenizer
from stree.serving.app import create_app
from stree.serving.document import page_document, step_json


def events_of(served: Served, **body: Any) -> list[dict[str, Any]]:
    response = served.post("/demo/stream", {"prompt": PROMPT, **body})
    assert response.status_code == 200 and response.headers["cache-control"] == "no-store"
    return [json.loads(line.removeprefix("data: ")) for line in response.text.split("\n\n") if line]


def server_of(html: str) -> dict[str, Any]:
    (held,) = re.findall(r'id="data">(.*?)</script>', html)
    found: dict[str, Any] = json.loads(held)["server"]
    return found


def test_the_page_is_one_small_document_whose_policy_allows_its_own_scripts_alone(served: Served) -> None:
    page = httpx.get(served.url)
    assert page.status_code == 200 and len(page.content) < 150_000
    headers = page.headers
    assert headers["x-content-type-options"] == "nosniff" and headers["cache-control"] == "no-store"
    policy = dict(part.strip().split(" ", 1) for part in headers["content-security-policy"].split(";"))
    assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == "'none'"
    assert policy["connect-src"] == "'self'" and policy["img-src"] == "data:"
    for name in ("script", "style"):
        parts = re.findall(rf"<{name}>(.*?)</{name}>", page.text, re.DOTALL)
        digests = [base64.b64encode(hashlib.sha256(part.encode()).digest()).decode() for part in parts]
        assert parts and policy[f"{name}-src"].split() == [f"'sha256-{digest}'" for digest in digests]
    outside = re.findall(r"""(?:src|href|url)\s*[=(]\s*["']?(?!data:|#)[^"'\s>]""", page.text.split("<script>")[0])
    assert outside == [] and "ISC" not in policy and "Permission to use, copy, modify" in page.text
    assert httpx.get(f"{served.url}/favicon.ico").status_code == 204


def test_the_record_of_the_last_run_in_a_browser_is_of_these_files() -> None:
    record = json.loads((ROOT / "benchmarks/results/serving/browser.jsonl").read_text("utf-8"))
    changed = {path for path, _ in record["sources"].items() ^ browser.sources().items()}
    assert not changed, f"made before changes of {changed}; renew it: see CONTRIBUTING.md"
    assert record["chromium"] and record["env"]["date"] and record["passed"]


@pytest.mark.slow
def test_steps_have_the_text_its_trees_and_the_targets_own_token(served: Served) -> None:
    options: Any = {"max_tokens": 12, "seed": 3}
    steps = events_of(served, **options)
    assert "".join(step["text"] for step in steps) == served.alone(PROMPT, max_new_tokens=12)
    assert steps[0]["tree"] is None and steps[-1]["finish_reason"] == "length"
    for step in steps[1:-1]:
        tree = step["tree"]
        assert len(tree["tokens"]) == len(tree["parents"]) <= 12 + 1 and tree["parents"][-1] == tree["path"][-1]
        assert tree["kept"] == len(step["ids"]) <= len(tree["path"]) and len(tree["values"]) == len(tree["tokens"]) - 1
        assert tree["draft_probs"][0] is None and all(0 < prob <= 1 for prob in tree["draft_probs"][1:])
        names = [tree["tokens"][node] for node in [*tree["path"][1:], -1]]
        assert "".join(names[: tree["kept"]]) == step["text"]
    plain = events_of(served, budget=1, **options)
    assert [token for step in plain for token in step.get("ids", [])] == [
        token for step in steps for token in step.get("ids", [])
    ]
    assert all(step["tree"]["parents"] == [-1, 0] for step in plain[1:-1])
    for run in (steps, plain):
        times = [step["decode_s"] for step in run]
        assert times == sorted(times) and run[0]["prefill_s"] > 0 and not run[-1]["is_shared"]


def test_the_prompt_of_a_comparison_runs_whole_each_time(served: Served) -> None:
    events_of(served, max_tokens=1)  # the first text of a cold engine comes after others, which warm it up
    before = served.engine.totals.sums["cached_tokens"]
    for budget in (None, 1, 1):
        events_of(served, max_tokens=4, budget=budget)
    assert served.engine.totals.sums["cached_tokens"] == before
    prompt, cached = [7, 8, 9, 10, 11], list[int]()
    for cache in (False, True, True):  # the first one keeps nothing for the second
        cached.append(served.engine.submit(prompt, max_new_tokens=2, cache=cache).result(60).stats["num_cached_tokens"])
    assert cached == [0, 0, len(prompt)]
    with pytest.raises(TypeError, match="cache must be True or False, got 0"):
        served.engine.submit(prompt, cache=0)


@pytest.mark.parametrize("field", [
    {"prompt": ""}, {"budget": 13}, {"top_p": 0}, {"top_k": -2}, {"seed": 1.5}, {"temperature": 3}, {"other": 1},
    {"max_tokens": 10_000},
])  # fmt: skip
def test_fields_out_of_range_are_named(served: Served, field: dict[str, Any]) -> None:
    response = served.post("/demo/stream", {"prompt": PROMPT, **field})
    assert response.status_code == 400 and next(iter(field)) in json.dumps(response.json()["error"])


def test_a_text_that_shared_its_steps_says_so(served: Served) -> None:
    other = served.engine.submit([1, 2, 3], max_new_tokens=200, ignore_eos=True)
    try:
        assert events_of(served, max_tokens=4)[-1]["is_shared"]
    finally:
        other.cancel()
        other.result()


def test_a_cold_engine_is_warmed_up_before_the_first_text_and_an_error_ends_the_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps = list[str]()
    lm, tokenizer = stree.TreeLM.from_pretrained(ASSETS / "target"), load_tokenizer(str(ASSETS / "target"))
    healthy = lm.verify

    def verify(*args: Any, **options: Any) -> Any:
        if steps and (message := steps.pop()):
            raise RuntimeError(message)
        return healthy(*args, **options)

    monkeypatch.setattr(lm, "verify", verify)
    with stree.Engine(lm, max_length=64) as engine:
        client = TestClient(create_app(engine, tokenizer, "tiny"))
        for number in (3, 4):
            assert client.post("/demo/stream", json={"prompt": PROMPT, "max_tokens": 2}).status_code == 200
            assert engine.stats["ended"] == number
        steps += ["a broken device", "", "", ""]
        events = client.post("/demo/stream", json={"prompt": PROMPT, "max_tokens": 40}).text.split("\n\n")
        assert '"ids"' in events[0] and "a broken device" in events[-3] and events[-2] == "data: [DONE]"
    assert client.post("/demo/stream", json={"prompt": PROMPT, "max_tokens": 2}).status_code == 503


def test_the_page_knows_where_sampled_texts_are_the_same(served: Served) -> None:
    lm, tokenizer, texts = served.engine.lm, served.tokenizer, list[str]()
    with stree.Engine(lm, max_length=64) as engine:  # drafts by retrieval
        client = TestClient(create_app(engine, tokenizer, "tiny"))
        held = [server_of(html) for html in (client.get("/").text, httpx.get(served.url).text)]
        assert [(one["is_match"], one["needs_key"]) for one in held] == [(True, False), (False, True)]
        body = {"prompt": "a, b, a, b, a, b,", "max_tokens": 16, "temperature": 1, "seed": 5}
        for budget in (8, 1):
            parts = client.post("/demo/stream", json={**body, "budget": budget}).text.split("\n\n")
            texts.append("".join(json.loads(part.removeprefix("data: "))["text"] for part in parts if part))
        assert texts[0] == texts[1]


def test_the_page_explains_the_words_that_it_uses(served: Served) -> None:
    html = httpx.get(served.url).text
    assert "<p>This page shows, step by step, how a language model writes a text with token trees." in html
    words = server_of(html)["words"]
    assert [name for name, _ in words] == ["drafter ModelDrafter", "growth Calibrated", "verifier auto"]
    with stree.Engine(served.engine.lm, "none", budget="auto", verifier="match", max_length=64) as engine:
        client = TestClient(create_app(engine, served.tokenizer, "tiny"))
        others = server_of(client.get("/").text)["words"]
    assert [name for name, _ in others] == ["drafter NoDrafter", "tree size auto", "verifier match"]
    assert all(text[0].isupper() and text.endswith(".") for _, text in [*words, *others])


def test_data_in_the_page_cannot_end_its_script(served: Served) -> None:
    hostile = "</script><script>alert(1)</script><!-- $$data$$ \u2028"
    html, _ = page_document({"trees": {"about": hostile}})
    (held,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', html, re.DOTALL)
    assert json.loads(held) == {"trees": {"about": hostile}} and html.count("alert(1)") == 1
    assert KEY not in httpx.get(served.url).text


def test_nodes_behind_the_end_of_a_text_are_told_apart_and_special_tokens_are_named(served: Served) -> None:
    record = stree.StepRecord([5, 0, 7], [-1, 0, 1], [0, 1, 2], [0, 1, 2], [0, 7, 9], None, None, None, {})
    tree = step_json([0], "", record, TokenBytes(served.tokenizer))["tree"]
    assert tree["kept"] == 1 and tree["special"] == [1] and tree["tokens"][1] == "<|endoftext|>"
    assert tree["parents"] == [-1, 0, 1, 2] and tree["values"] is tree["draft_probs"] is None
