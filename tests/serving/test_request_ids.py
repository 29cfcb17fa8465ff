"""The header x-request-id of every response, the type of a 429, and an engine where no request may wait.

Run: python -m pytest tests/serving/test_request_ids.py
"""

from __future__ import annotations

import threading
from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient
from helpers.http_served import KEY, PROMPT, Served

import stree
from stree.inputs import ASSETS, load_tokenizer
from stree.serving.app import create_app

BODY: dict[str, Any] = {"model": "tiny", "prompt": PROMPT, "max_tokens": 2}
CASES: list[tuple[str, str, dict[str, Any] | bytes, int]] = [
    ("GET", "/health", {}, 200), ("POST", "/v1/completions", BODY, 200),
    ("POST", "/v1/completions", {**BODY, "stream": True}, 200), ("POST", "/v1/completions", {}, 400),
    ("POST", "/v1/completions", {**BODY, "model": "other"}, 404), ("GET", "/nothing", {}, 404),
    ("POST", "/v1/models", {}, 405), ("POST", "/v1/completions", {**BODY, "prompt": "x" * 30_000}, 413),
]  # fmt: skip


@pytest.mark.parametrize(("method", "path", "body", "status"), CASES)
def test_an_id_is_echoed_or_made(method: str, path: str, body: dict[str, Any], status: int, served: Served) -> None:
    found = set()
    for given in ("client 7", "", "x" * 129, None):
        headers = {"Authorization": f"Bearer {KEY}", **({} if given is None else {"X-Request-Id": given})}
        response = httpx.request(method, served.url + path, json=body or None, headers=headers, timeout=60)
        assert response.status_code == status and len(response.headers.get_list("x-request-id")) == 1
        found.add(response.headers["x-request-id"])
    assert "client 7" in found and len(found) == 4 and all(len(each) in (8, 32) for each in found)
    assert "x-request-id" in httpx.get(f"{served.url}/v1/models").headers, "without the key"


def test_an_unexpected_error_is_an_error_object_with_an_id(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served.engine, "submit", lambda *_, **__: 1 / 0)
    response = served.post("/v1/completions", BODY, headers={"X-Request-Id": "a"})
    assert response.status_code == 500 and response.headers["x-request-id"] == "a"
    assert response.json()["error"]["message"] == "the server failed: ZeroDivisionError"


def test_none_waits_where_the_queue_has_no_place() -> None:
    lm, tokenizer = stree.TreeLM.from_pretrained(ASSETS / "target"), load_tokenizer(str(ASSETS / "target"))
    runs, goes_on = threading.Event(), threading.Event()

    def step() -> None:
        runs.set()
        goes_on.wait(60)

    with stree.Engine(lm, max_batch=1, max_queue=0, before_step=step) as engine:
        client = TestClient(create_app(engine, tokenizer, "tiny"))
        handle = engine.submit([1, 2, 3], max_new_tokens=2)
        assert runs.wait(30)
        response = client.post("/v1/completions", json=BODY)
        assert response.status_code == 429 and response.headers["retry-after"] == "1"
        error = response.json()["error"]
        assert (error["type"], error["code"]) == ("requests", "rate_limit_exceeded")
        goes_on.set()
        handle.result(60)
        assert client.post("/v1/completions", json=BODY).status_code == 200
