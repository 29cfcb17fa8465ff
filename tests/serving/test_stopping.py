"""SIGTERM: requests that run end, new ones are refused, and what has not ended in time gets an error.

Run: python -m pytest tests/serving/test_stopping.py
"""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import product
from typing import Any

import httpx
import pytest
from helpers.fast_cases import slow_unless
from helpers.http_served import KEY, PROMPT, Served

import stree
from stree.inputs import ASSETS, load_tokenizer
from stree.serving.app import create_app
from stree.serving.server import bind, serve

HEADERS = {"Authorization": f"Bearer {KEY}"}
BODY: dict[str, Any] = {"model": "tiny", "prompt": PROMPT, "temperature": 0, "ignore_eos": True}
FEW, MANY = 24, 200  # new tokens


def error_of(message: str) -> dict[str, Any]:
    """Write the error object of a server that stops."""
    return {"error": {"message": message, "type": "server_error", "param": None, "code": "service_unavailable"}}


REFUSED = error_of("the server stops and takes no more requests")
OVER = error_of("the server stops, and the time of its last requests is over")


class Steps:
    """Called before every step of the engine, which it delays."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> None:
        time.sleep(self.seconds)


@pytest.fixture(scope="module")
def steps() -> Steps:
    return Steps()


@pytest.fixture(scope="module")
def engine(steps: Steps) -> Iterator[stree.Engine]:
    """Two requests run at once."""
    lm = stree.TreeLM.from_pretrained(ASSETS / "target")
    with stree.Engine(lm, budget=8, max_batch=2, max_length=256, max_queue=8, before_step=steps) as engine:
        yield engine


@pytest.fixture
def server(engine: stree.Engine, steps: Steps) -> Iterator[Served]:
    """An application that ``stopped`` serves."""
    tokenizer = load_tokenizer(str(ASSETS / "target"))
    steps.seconds = 0.2
    yield Served("", engine, create_app(engine, tokenizer, "tiny", api_key=KEY), tokenizer)
    steps.seconds = 0.0
    wait_for(lambda: not engine.stats["running"] + engine.stats["waiting"])


def wait_for(condition: Callable[[], object]) -> None:
    """Wait until a condition holds."""
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "it has not come about"
        time.sleep(0.01)


def send_signal() -> None:
    """Send SIGTERM to this process."""
    os.kill(os.getpid(), signal.SIGTERM)


def stopped(server: Served, grace: float, clients: Callable[[Callable[[], None]], None]) -> float:
    """Serve in this thread while ``clients(stop)`` runs in another one, and call it to send the signal.

    Returns:
        Seconds from the signal to the end of the server.
    """
    listener = bind("127.0.0.1", 0)
    server.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    started, sent = threading.Event(), list[float]()

    def stop() -> None:
        sent.append(time.monotonic())
        send_signal()

    def run() -> None:
        assert started.wait(30)
        try:
            clients(stop)
        finally:
            if not sent:
                stop()

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(run)
        serve(server.app, listener, grace=grace, on_start=started.set)
        took = time.monotonic() - sent[0]
        running.result()
    return took


def streamed(server: Served, num_tokens: int, lines: list[str]) -> int:
    """Read a stream; return its status."""
    body = {**BODY, "max_tokens": num_tokens, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, headers=HEADERS, timeout=60) as stream:
        lines.extend(stream.iter_lines())
        return stream.status_code


def check_stream(lines: list[str], text: str, *, is_whole: bool) -> None:
    """Compare the events of a stream with the text, or with its beginning and an error."""
    events = [line.removeprefix("data: ") for line in lines if line]
    assert all(line.startswith("data: ") for line in lines if line) and events[-1] == "[DONE]"
    parsed = [json.loads(event) for event in events[:-1]]
    if not is_whole:
        assert parsed.pop() == OVER
    found = "".join(each["choices"][0]["text"] for each in parsed)
    assert found == text if is_whole else text.startswith(found) and parsed


def check_whole(response: httpx.Response, text: str, *, is_whole: bool) -> None:
    """Compare an answer with the text, or with the error."""
    if is_whole:
        assert response.status_code == 200 and response.json()["choices"][0]["text"] == text
    else:
        assert response.status_code == 503 and response.json() == OVER and int(response.headers["retry-after"]) > 0


KINDS, TIMES = ("idle", "streams", "whole", "queued"), ("within", "beyond")
FAST = {("streams", "within")}
IN_CI = {("idle", "within"), ("streams", "beyond"), ("whole", "beyond"), ("queued", "within")}


@pytest.mark.parametrize(
    ("kind", "when"), slow_unless(lambda *case: case in FAST, product(KINDS, TIMES), in_ci=lambda *case: case in IN_CI)
)
def test_a_server_stops(kind: str, when: str, server: Served, steps: Steps, caplog: pytest.LogCaptureFixture) -> None:
    is_whole = when == "within"
    num_tokens, grace = (FEW, 30.0) if is_whole else (MANY, 1.5)
    text = server.alone(PROMPT, max_new_tokens=num_tokens, ignore_eos=True)
    streams: list[list[str]] = [[] for _ in range(2 * (kind == "streams"))]
    num_posts = {"idle": 0, "streams": 0, "whole": 2, "queued": 4}[kind]

    def clients(stop: Callable[[], None]) -> None:
        assert httpx.get(f"{server.url}/ready").json() == {"status": "ready"}
        with ThreadPoolExecutor(6) as pool:
            statuses = [pool.submit(streamed, server, num_tokens, lines) for lines in streams]
            body = {**BODY, "max_tokens": num_tokens}
            answers: list[Future[httpx.Response]] = [
                pool.submit(server.post, "/v1/completions", body) for _ in range(num_posts)
            ]
            wait_for(lambda: all(streams) and server.engine.stats["running"] == min(num_posts, 2) + len(streams))
            wait_for(lambda: server.engine.stats["waiting"] == max(num_posts - 2, 0))
            stop()
            if kind == "idle":
                return
            ready = f"{server.url}/ready"
            wait_for(lambda: httpx.get(ready).status_code == 503)
            assert httpx.get(ready).json() == REFUSED and httpx.get(f"{server.url}/health").status_code == 200
            refused = server.post("/v1/completions", body)
            assert refused.status_code == 503 and refused.json() == REFUSED and int(refused.headers["retry-after"]) > 0
            steps.seconds = 0.0 if is_whole else 0.2
            assert [status.result() for status in statuses] == [200] * len(streams)
            for lines in streams:
                check_stream(lines, text, is_whole=is_whole)
            for answer in answers:
                check_whole(answer.result(), text, is_whole=is_whole)

    took = stopped(server, grace, clients)
    assert took < (30 if is_whole and kind != "idle" else 6)
    warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert not [each for each in warnings if not each.name.startswith("transformers")], "no tracebacks"
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{server.url}/health")


@pytest.mark.slow
def test_a_second_signal_ends_at_once(server: Served) -> None:
    lines = list[str]()

    def clients(stop: Callable[[], None]) -> None:
        with ThreadPoolExecutor(2) as pool:
            status = pool.submit(streamed, server, MANY, lines)
            wait_for(lambda: lines)
            stop()
            wait_for(lambda: httpx.get(f"{server.url}/ready").status_code == 503)
            send_signal()
            assert status.result(10) == 200

    assert stopped(server, 300.0, clients) < 10
    check_stream(lines, server.alone(PROMPT, max_new_tokens=MANY, ignore_eos=True), is_whole=False)


def test_a_client_that_sends_half_a_body_does_not_keep_the_server(server: Served) -> None:
    def clients(stop: Callable[[], None]) -> None:
        def half() -> Iterator[bytes]:
            yield b'{"model": '
            wait_for(lambda: len(server.app.state.requests))
            stop()
            time.sleep(1.0)
            yield b'"tiny"}'

        response = httpx.post(f"{server.url}/v1/completions", content=half(), headers=HEADERS, timeout=30)
        check_whole(response, "", is_whole=False)

    assert stopped(server, 0.3, clients) < 6


def test_closing_an_engine_is_bounded_where_a_step_hangs() -> None:
    hangs, goes_on = threading.Event(), threading.Event()

    def step() -> None:
        hangs.set()
        goes_on.wait(60)

    engine = stree.Engine(stree.TreeLM.from_pretrained(ASSETS / "target"), before_step=step)
    handle = engine.submit([1, 2, 3], max_new_tokens=4)
    assert hangs.wait(30) and not engine.close(timeout=0.05)
    goes_on.set()
    assert engine.close() and handle.finish_reason == "cancelled"
