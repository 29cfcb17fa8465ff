"""Large requests below the body limit: they are refused before they cost time or memory, and others are answered.

Run: python -m pytest tests/serving/test_flood.py
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest
from helpers.fast_cases import slow_unless
from helpers.http_served import KEY, Served, listening
from pydantic import ValidationError

from stree.serving import guard
from stree.serving.protocol import CompletionRequest

COMPLETION: dict[str, Any] = {"model": "tiny", "prompt": "x", "max_tokens": 2}
MAX_TOKENS, LONGEST = 255, 32  # of a prompt of ``served``; characters of the longest token of the bundled tokenizer


class Slow:
    """A tokenizer whose calls for texts of more than 4096 characters last until ``open`` is set."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer, self.open, self.sizes = tokenizer, threading.Event(), list[int]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __call__(self, text: str, **options: Any) -> Any:
        self.sizes.append(len(text))
        if len(text) > 4096:
            self.open.wait(60)
        return self._tokenizer(text, **options)


@pytest.fixture
def slow(served: Served) -> Iterator[tuple[Served, Slow]]:
    tokenizer = Slow(served.tokenizer)
    with listening(served.engine, tokenizer) as server:
        yield server, tokenizer
        tokenizer.open.set()


def body_of(path: str, text: str) -> dict[str, Any]:
    """Write a request of a text or of a chat, whose template adds 17 characters to it."""
    own = {"messages": [{"role": "user", "content": text}]} if path == "chat/completions" else {"prompt": text}
    return {"model": "tiny", "max_tokens": 2, **own}


@pytest.mark.parametrize(("path", "param"), [("completions", "prompt"), ("chat/completions", "messages")])
def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenised(
    path: str, param: str, slow: tuple[Served, Slow]
) -> None:
    server, tokenizer = slow
    tokenizer.sizes.clear()
    tokenizer.open.set()
    response = server.post(f"/v1/{path}", body_of(path, "a" * (MAX_TOKENS * LONGEST + 1)))
    error = response.json()["error"]
    assert response.status_code == 400 and not tokenizer.sizes
    assert (error["param"], error["code"]) == (param, "context_length_exceeded")
    assert "characters, at least" in error["message"] and f"of at most {MAX_TOKENS}" in error["message"]


def test_token_ids_that_cannot_fit_are_refused_by_the_same_code(served: Served) -> None:
    response = served.post("/v1/completions", {"model": "tiny", "prompt": [5] * (MAX_TOKENS + 1), "max_tokens": 1})
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["code"]) == (400, "prompt", "context_length_exceeded")


def test_a_text_of_the_longest_tokens_fits(served: Served) -> None:
    longest = max(served.tokenizer.get_vocab().items(), key=lambda item: len(item[0]))[1]
    text = served.tokenizer.decode([longest] * (MAX_TOKENS - 1))
    assert len(text) == (MAX_TOKENS - 1) * LONGEST
    response = served.post("/v1/completions", {**COMPLETION, "prompt": text})
    assert response.json()["usage"]["prompt_tokens"] <= MAX_TOKENS - 1


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_short_requests_are_answered_while_long_ones_are_tokenised(path: str, slow: tuple[Served, Slow]) -> None:
    server, tokenizer = slow
    with ThreadPoolExecutor(41) as pool:
        long = [pool.submit(server.post, f"/v1/{path}", body_of(path, "long " * 1000)) for _ in range(40)]
        try:
            assert pool.submit(server.post, "/v1/completions", COMPLETION).result(20).status_code == 200
            assert sum(size > 4096 for size in tokenizer.sizes) <= 1
        finally:
            tokenizer.open.set()
        assert {each.result().status_code for each in long} == {400}


def test_other_requests_are_answered_while_the_fields_of_one_are_checked(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    check, is_checked = CompletionRequest.check, threading.Event()

    def waiting(body: CompletionRequest) -> None:
        assert not body.logit_bias or is_checked.wait(20)
        check(body)

    monkeypatch.setattr(CompletionRequest, "check", waiting)
    with ThreadPoolExecutor(1) as pool:
        large = pool.submit(served.post, "/v1/completions", {**COMPLETION, "logit_bias": {"5": 1}})
        assert served.post("/v1/completions", COMPLETION).status_code == 200 and not large.done()
        is_checked.set()
        assert large.result().status_code == 200


def test_more_prompts_than_may_wait_are_not_tokenised(slow: tuple[Served, Slow]) -> None:
    server, tokenizer = slow
    tokenizer.sizes.clear()
    assert server.post("/v1/completions", {**COMPLETION, "prompt": ["x"] * 2000, "max_tokens": 200}).status_code == 400
    assert not tokenizer.sizes


@pytest.mark.parametrize("field", ["prompt", "stop_token_ids"])
def test_a_list_is_read_up_to_its_first_wrong_item(field: str) -> None:
    with pytest.raises(ValidationError) as found:
        CompletionRequest(**{**COMPLETION, field: ["a", *[{}] * 10_000]})
    assert found.value.error_count() <= 5


def nested(depth: int, field: str) -> bytes:
    """Write a request with lists within lists."""
    kept = {name: value for name, value in COMPLETION.items() if name != field}
    return json.dumps({**kept, field: 0}).replace(": 0}", ": " + "[" * depth + "]" * depth + "}").encode()


@pytest.mark.parametrize(
    "field", slow_unless("prompt".__eq__, ["prompt", "stop", "logit_bias", "unknown", "max_tokens"])
)
def test_lists_within_lists_are_refused_at_any_depth(field: str, served: Served) -> None:
    for depth in (2, 50, *range(700, 1020, 8), 9000):
        response = served.post("/v1/completions", nested(depth, field))
        assert response.status_code == 400, (depth, response.text)
        assert response.json()["error"]["message"] and len(response.content) < 1000


@pytest.mark.slow
def test_deep_messages_are_refused(served: Served) -> None:
    for depth in (*range(500, 1020, 8), 9000):
        message = b'{"role": "user", "content": "x", "extra": ' + b"[" * depth + b"]" * depth + b"}"
        body = b'{"model": "tiny", "max_tokens": 1, "messages": [' + message + b"]}"
        response = served.post("/v1/chat/completions", body)
        assert response.status_code in (200, 400), (depth, response.text)


def test_stop_strings_and_messages_have_limits(served: Served) -> None:
    response = served.post("/v1/completions", {**COMPLETION, "stop": ["a" * 1024]})
    assert response.status_code == 200
    for stop in (["a" * 1025], "é" * 1025):
        error = served.post("/v1/completions", {**COMPLETION, "stop": stop}).json()["error"]
        assert error["param"] == "stop" and "at most 1024 characters" in error["message"]
    turns = [{"role": "", "content": ""}] * 256
    error = served.post("/v1/chat/completions", {"model": "tiny", "messages": turns}).json()["error"]
    assert error["param"] == "messages" and "256 messages" in error["message"]


@pytest.mark.parametrize(
    ("body", "kind", "said"),
    [
        (b"hello", "application/json", "the body must be a JSON object: Expecting value at character 0"),
        (b"[1]", "application/json", "the body must be a JSON object, got [1]"),
        (b"", "application/json", "the body must be a JSON object, got none"),
        (b"\xff", "application/json", "the body must be a JSON object in UTF-8: "),
        (b'{"model": "tiny"}', "text/plain", "the header Content-Type: application/json, got 'text/plain'"),
        ({"prompt": 5}, "application/json", "prompt must be a text or token ids, or a list of these, got 5"),
        (
            {"prompt": ["a", 5]},
            "application/json",
            "prompt must be a text or token ids, or a list of these, got ['a', 5]",
        ),
    ],
)
def test_a_body_that_is_no_request_is_named(served: Served, body: Any, kind: str, said: str) -> None:
    body = {"model": "tiny", **body} if isinstance(body, dict) else body
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": kind}
    answer = served.post("/v1/completions", body, headers=headers)
    assert answer.status_code == 400 and said in answer.json()["error"]["message"], answer.text


@pytest.mark.parametrize(("piece", "status"), [(b" " * 4096, 413), (b"", 408)])
def test_a_body_that_never_ends_is_refused_and_closed(
    piece: bytes, status: int, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "BODY_S", 0.2)
    chunk = b"%x\r\n%b\r\n" % (len(piece), piece) if piece else b""
    with socket.create_connection(("127.0.0.1", int(served.url.rpartition(":")[2])), timeout=20) as client:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n"
        client.sendall(head.encode() + b"Transfer-Encoding: chunked\r\n\r\n")
        received = list[bytes]()

        def send() -> None:
            with suppress(OSError):
                while chunk:
                    client.sendall(chunk)

        with ThreadPoolExecutor(1) as pool:
            pool.submit(send)
            with suppress(ConnectionError):  # closed while this side still writes
                while part := client.recv(4096):
                    received.append(part)
    assert b"".join(received).startswith(b"HTTP/1.1 %d " % status), received
