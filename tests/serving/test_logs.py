"""Lines of the server's log.

Run: python -m pytest tests/serving/test_logs.py
"""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import re
import socket
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from fastapi.responses import StreamingResponse
from fastapi.testclient import TestClient
from helpers.http_served import KEY, PROMPT, Served

from stree.serving.guard import Guard, OpenRequests
from stree.serving.logs import configure

BODY: dict[str, Any] = {"model": "tiny", "prompt": PROMPT, "max_tokens": 3, "n": 2, "ignore_eos": True}


@pytest.fixture(autouse=True)
def loggers() -> Iterator[None]:
    """Leave the loggers of the process as they were."""
    found = [logging.getLogger(name) for name in ("stree", "uvicorn", "asyncio")]
    before = [(each.handlers, each.propagate, each.level) for each in found]
    yield
    for each, (handlers, propagate, level) in zip(found, before, strict=True):
        each.handlers, each.propagate = handlers, propagate
        each.setLevel(level)


def lines(served: Served, capsys: pytest.CaptureFixture[str], form: str, level: str) -> list[str]:
    """What requests of several kinds log."""
    configure(form, level)
    client = TestClient(served.app)  # its requests return once they are logged
    headers = {"Authorization": f"Bearer {KEY}", "X-Request-Id": "a b"}
    for stream in (False, True):
        client.post("/v1/completions", json={**BODY, "stream": stream}, headers=headers)
    client.post("/v1/completions", json={**BODY, "model": "other"}, headers=headers)
    for path in ("/health", "/no%0Athing"):
        client.get(path, headers=headers)
    return capsys.readouterr().err.splitlines()


def test_a_request_is_one_object_of_json(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    records = [json.loads(line) for line in lines(served, capsys, "json", "info")]
    for record in records:
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", record.pop("time"))
        assert 0 < record.pop("seconds") < 60
    tokens = {"prompt_tokens": 2 * len(served.tokenizer(PROMPT)["input_ids"]), "new_tokens": 6}
    post = {"level": "INFO", "message": "request", "method": "POST", "path": "/v1/completions", "request_id": "a b"}
    done = {**post, "status": 200, **tokens, "finish_reasons": "length,length"}
    assert records[:3] == [done, done, {**post, "status": 404}]
    assert records[3:] == [{**post, "method": "GET", "path": "/no\nthing", "status": 404}]


def test_a_request_is_one_line_of_text(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    found = lines(served, capsys, "text", "debug")
    assert len(found) == 5, "and a monitor's on level DEBUG"
    assert re.search(
        r"Z INFO request method=POST path=/v1/completions status=200 seconds=\S+ request_id=\"a b\"", found[0]
    )
    assert " DEBUG request method=GET path=/health status=200" in found[3] and 'path="/no\\nthing"' in found[4]
    assert not lines(served, capsys, "text", "warning")


def test_an_unexpected_error_has_its_traceback(
    served: Served, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(served.engine, "submit", lambda *_, **__: 1 / 0)
    configure("json", "info")
    headers = {"Authorization": f"Bearer {KEY}"}
    assert TestClient(served.app).post("/v1/completions", json=BODY, headers=headers).status_code == 500
    error, request = map(json.loads, capsys.readouterr().err.splitlines())
    assert error["level"] == "ERROR" and error["traceback"].endswith("ZeroDivisionError: division by zero")
    assert request["status"] == 500 and request["request_id"] in error["message"]


@pytest.mark.parametrize(("end", "status"), [("client leaves", 499), ("server stops", 503), ("text ends", 200)])
def test_a_stream_is_logged_by_how_it_has_ended(end: str, status: int, capsys: pytest.CaptureFixture[str]) -> None:
    requests, messages = OpenRequests(), [{"type": "http.request", "body": b""}]

    async def events() -> AsyncIterator[str]:
        yield "data: a"
        if end == "server stops":
            requests.end()
        if end != "text ends":
            await asyncio.Event().wait()

    async def receive() -> Any:
        if not messages and end != "client leaves":
            await asyncio.Event().wait()
        return messages.pop() if messages else {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    sent = list[Any]()
    configure("json", "info")
    app = StreamingResponse(events(), media_type="text/event-stream")
    guard = Guard(app, api_key=None, max_body=9, requests=requests)
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
    asyncio.run(guard(scope, receive, send))
    assert sent[0]["status"] == 200 and (b"the server stops" in sent[-1]["body"]) == (end == "server stops")
    assert json.loads(capsys.readouterr().err)["status"] == status


def test_connections_that_no_file_is_left_for_are_a_line_a_second(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def accept(_: socket.socket) -> Any:
        raise OSError(errno.EMFILE, "Too many open files")

    async def connect() -> None:
        server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0, backlog=99)
        with socket.create_connection(server.sockets[0].getsockname()):
            await asyncio.sleep(0.2)
            server.close()

    monkeypatch.setattr(socket.socket, "accept", accept)
    configure("json", "info")
    asyncio.run(connect())
    assert "Too many open files" in json.loads(capsys.readouterr().err)["traceback"]
