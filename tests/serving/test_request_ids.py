"""The header x-request-id of every response, the type of a 429, and an engine where no request may wait.

Run: python -m pytest tests/serving/test_request_ids.py
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

import httpx
import pytest
from helpers.http_served import KEY, PROMPT, Served, listening

import stree
from stree.inputs import ASSETS, load_tokenizer

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


def test_of_six_requests_at_once_two_rows_without_a_queue_take_two() -> None:
    lm, tokenizer = stree.TreeLM.from_pretrained(ASSETS / "target"), load_tokenizer(str(ASSETS / "target"))
    goes_on, together = threading.Event(), threading.Barrier(6)

    def step() -> None:
        goes_on.wait(60)

    def post(server: Served) -> httpx.Response:
        together.wait(30)
        return server.post("/v1/completions", BODY)

    options: dict[str, Any] = {"budget": 1, "max_batch": 2, "max_length": 64, "max_queue": 0}
    with (
        stree.Engine(lm, "none", before_step=step, **options) as engine,
        listening(engine, tokenizer) as server,
        ThreadPoolExecutor(6) as pool,
    ):
        answers = [pool.submit(post, server) for _ in range(6)]
        refused = [answer.result() for _, answer in zip(range(4), as_completed(answers), strict=False)]
        goes_on.set()
        taken = [answer.result() for answer in answers if answer.result() not in refused]
        again = server.post("/v1/completions", BODY)
    assert [response.status_code for response in [*refused, *taken, again]] == [429] * 4 + [200] * 3
    assert {response.headers["retry-after"] for response in refused} == {"1"}
    error = refused[0].json()["error"]
    assert (error["type"], error["code"]) == ("requests", "rate_limit_exceeded")
