"""What monitors ask a server for: /health follows the engine, /ready also the server.

Run: python -m pytest tests/serving/test_health.py
"""

from __future__ import annotations

import httpx
import pytest
from fastapi.testclient import TestClient
from helpers.http_served import KEY, PROMPT, Served

import stree
from stree.inputs import ASSETS, load_tokenizer
from stree.serving.app import create_app
from stree.serving.first_requests import run_first_requests


@pytest.mark.parametrize(
    "path", ["/health", "/ready", "/", "/version", "/openapi.json", "/v1/models", "/v1/models/tiny"]
)
def test_head_is_get_without_a_body(path: str, served: Served) -> None:
    key = {"Authorization": f"Bearer {KEY}"}
    head, get = (ask(served.url + path, headers=key) for ask in (httpx.head, httpx.get))
    assert head.status_code == get.status_code == 200 and not head.content
    assert head.headers["content-length"] == get.headers["content-length"]


@pytest.mark.parametrize("error", [SystemExit, ValueError])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_engine_whose_thread_has_ended_is_not_healthy_and_ends_its_requests(error: type[BaseException]) -> None:
    def fail() -> None:
        raise error  # no error of a request

    lm, tokenizer = stree.TreeLM.from_pretrained(ASSETS / "target"), load_tokenizer(str(ASSETS / "target"))
    with stree.Engine(lm, before_step=fail) as engine:
        client = TestClient(create_app(engine, tokenizer, "tiny"))
        assert client.get("/health").json() == {"status": "ok"}
        for _ in range(2):  # one that runs when it happens, and one that comes later
            with pytest.raises(RuntimeError, match="the engine's thread has ended"):
                engine.submit([1, 2, 3]).result(30)
        for path in ("/health", "/ready"):
            response = client.get(path)
            assert response.status_code == 503
            assert "the engine's thread has ended" in response.json()["error"]["message"]
            assert client.head(path).status_code == 503
        assert client.post("/v1/completions", json={"model": "tiny", "prompt": PROMPT}).status_code == 503


def test_a_closed_engine_is_not_ready() -> None:
    lm, tokenizer = stree.TreeLM.from_pretrained(ASSETS / "target"), load_tokenizer(str(ASSETS / "target"))
    with stree.Engine(lm) as engine:
        client = TestClient(create_app(engine, tokenizer, "tiny"))
    assert [client.get(path).status_code for path in ("/health", "/ready")] == [503, 503]


def test_first_requests_show_an_engine_that_cannot_decode_and_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    lm, tokenizer = stree.TreeLM.from_pretrained(ASSETS / "target"), load_tokenizer(str(ASSETS / "target"))
    for max_length in (1, 2, 64):
        with stree.Engine(lm, max_length=max_length, cache_bytes=10**8) as engine:
            run_first_requests(engine)
            assert engine.stats["requests"] == 2 * (max_length > 1)
            metrics = TestClient(create_app(engine, tokenizer, "tiny")).get("/metrics").text
            assert 'vllm:generation_tokens_total{engine="0",model_name="tiny"} 0.0' in metrics
    with stree.Engine(lm, max_length=64) as engine:
        monkeypatch.setattr(lm, "prefill", lambda *_, **__: (_ for _ in ()).throw(RuntimeError("a broken device")))
        with pytest.raises(stree.GenerationError, match="broken device"):
            run_first_requests(engine)


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER", "bearer  "])
def test_the_scheme_of_a_key_may_be_written_in_any_case(scheme: str, served: Served) -> None:
    models = f"{served.url}/v1/models"
    assert httpx.get(models, headers={"Authorization": f"{scheme} {KEY}"}).status_code == 200
    for wrong in (f"{scheme} {KEY}x", f"{scheme} {KEY.upper()}", f"Basic {KEY}", KEY, scheme.strip(), ""):
        assert httpx.get(models, headers={"Authorization": wrong}).status_code == 401
