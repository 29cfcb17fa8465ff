"""``stree serve`` as a user runs it: mistakes are named before a model is loaded, SIGTERM ends it in peace.

Run: python -m pytest tests/cli/test_serve.py
"""

from __future__ import annotations

import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI

import stree
from stree.cli import main
from stree.cli.threads import SET_BY_USER
from stree.serving.server import bind, serve

MISTAKES = {
    "--port 0": "port must be at least 1", "--port 70000": "--port must be at most 65535", "--max-batch 0": "max_batch",
    "--max-length 0": "max_length", "--max-queue -1": "max_queue", "--max-body-mb -1": "--max-body-mb must be",
    "--cache-mb nan": "--cache-mb must be", "--grace inf": "--grace must be", "--budget many": "--budget must be",
    "--growth oak": "oak", "--growth calibrated:8 --budget 4": "sets a budget of 8 nodes",
    "--verifier maybe": "--verifier must be", "--api-key-env NO_SUCH_NAME": "NO_SUCH_NAME",
    "--root-path api": "--root-path must begin with /", "--root-path /api/": "--root-path must begin with /",
    "--uds nowhere/s": "cannot listen at nowhere/s", "--prefill-chunk 0": "prefill_chunk",
    "--drafter nowhere": "nowhere", "--ssl-keyfile key.pem": "--ssl-keyfile needs --ssl-certfile",
    "--ssl-certfile nowhere.pem": "--ssl-certfile: nowhere.pem are no certificate and key: No such file",
}  # fmt: skip


@pytest.mark.parametrize("flags", MISTAKES)
def test_mistakes_are_named_in_one_line(flags: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "bundled", *flags.split()]) == 2
    said = capsys.readouterr().err.strip()
    assert MISTAKES[flags] in said and said.startswith("stree: error: ") and "\n" not in said


@pytest.mark.parametrize("host", ["127.0.0.1", "203.0.113.7", "no such host"])
def test_an_address_that_cannot_be_taken_is_named_before_the_model_is_loaded(
    host: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stree.TreeLM, "from_pretrained", lambda *_, **__: pytest.fail("the model is loaded"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert main(["serve", "bundled", "--growth", "calibrated:8x4", "--host", host, "--port", port]) == 2
    said = capsys.readouterr().err.strip()
    assert said.startswith(f"stree: error: cannot listen at {host}, port {port}: ") and "\n" not in said


def test_a_second_server_at_an_address_that_was_free_is_refused_by_its_name() -> None:
    with bind("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with bind("127.0.0.1", port) as second:  # neither listens yet
            first.listen()
            with pytest.raises(OSError, match=f"cannot listen at 127.0.0.1, port {port}: Address already in use"):
                serve(FastAPI(), second)


@pytest.mark.slow
def test_a_server_with_a_certificate_at_a_socket_behind_a_proxy_with_lines_of_json(tmp_path: Path) -> None:
    path = tmp_path / "stree.sock"
    with socket.socket(socket.AF_UNIX) as left:  # by a server that was killed
        left.bind(str(path))
    command = [sys.executable, "-m", "stree.cli", "serve", "bundled", "--uds", str(path), "--root-path", "/api"]
    subject = ["-subj", "/CN=stree", "-addext", "subjectAltName=DNS:stree"]
    names = {option: str(tmp_path / f"{option}.pem") for option in ("keyfile", "certfile")}
    openssl = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", *subject, "-days", "1", "-keyout"]
    subprocess.run([*openssl, names["keyfile"], "-out", names["certfile"]], check=True, capture_output=True)
    command += ["--ssl-certfile", names["certfile"], "--ssl-keyfile", names["keyfile"]]
    command += ["--log-format", "json", "--api-key-env", "STREE_KEY"]
    server = subprocess.Popen(command, env={**os.environ, "STREE_KEY": "k"}, stderr=subprocess.PIPE, text=True)
    try:
        trust = httpx.HTTPTransport(uds=str(path), verify=ssl.create_default_context(cafile=names["certfile"]))
        with httpx.Client(transport=trust, base_url="https://stree", timeout=60) as client:
            wait_for(lambda: client.get("/ready").status_code == 200)
            assert main(["serve", "bundled", "--uds", str(path)]) == 2, "it is in use"
            assert client.get("/v1/models").status_code == 401
            assert client.get("/openapi.json").json()["servers"] == [{"url": "/api"}]
            client.headers["Authorization"] = "Bearer k"
            body = {"model": "bundled", "prompt": "Question:", "max_tokens": 5, "ignore_eos": True}
            assert client.post("/v1/completions", json=body).json()["usage"]["completion_tokens"] == 5
        server.send_signal(signal.SIGTERM)
        assert server.wait(30) == 0 and not path.exists()
    finally:
        server.kill()
        assert server.stderr is not None
        records = [json.loads(line) for line in server.stderr.read().splitlines()]
        records = [record for record in records if not record["message"].startswith(("torch runs on ", "steps run "))]
    assert records[0]["message"] == f"stree serves bundled at unix:{path}"
    assert [(each["path"], each["status"]) for each in records[1:]] == [
        ("/api/v1/models", 401), ("/api/openapi.json", 200), ("/api/v1/completions", 200),
    ]  # fmt: skip


@pytest.mark.slow
def test_sigterm_lets_running_requests_end_and_exits_with_0() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "stree.cli", "serve", "bundled", "--port", str(port), "--api-key-env", "STREE_KEY"]
    environment = {name: value for name, value in os.environ.items() if name not in SET_BY_USER}
    server = subprocess.Popen(command, env={**environment, "STREE_KEY": "k"}, stderr=subprocess.PIPE, text=True)
    try:
        wait_for(lambda: httpx.get(f"{url}/ready").status_code == 200)
        # The bundled target has 24 MB of weights: one thread, however many cores are idle.
        assert 'stree_num_threads{engine="0",model_name="bundled"} 1.0' in httpx.get(f"{url}/metrics").text
        assert 'generation_tokens_total{engine="0",model_name="bundled"} 0.0' in httpx.get(f"{url}/metrics").text
        body = {"model": "bundled", "prompt": "Question:", "max_tokens": 150, "ignore_eos": True, "temperature": 0}
        answers: list[httpx.Response] = []
        headers = {"Authorization": "Bearer k"}
        thread = threading.Thread(
            target=lambda: answers.append(httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=60))
        )
        thread.start()
        wait_for(
            lambda: 'vllm:num_requests_running{engine="0",model_name="bundled"} 1' in httpx.get(f"{url}/metrics").text
        )
        server.send_signal(signal.SIGTERM)
        thread.join()
        assert answers[0].json()["usage"]["completion_tokens"] == 150
        assert server.wait(30) == 0
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{url}/health")
    finally:
        server.kill()
        said = server.stderr.read() if server.stderr else ""
        assert "without a key" not in said and "torch runs on 1 thread(s)\n" in said


def wait_for(condition: object) -> None:
    """Wait until a condition holds."""
    assert callable(condition)
    for _ in range(600):
        try:
            if condition():
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.1)
    raise TimeoutError("the server did not answer")
