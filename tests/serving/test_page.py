"""The page of ``stree serve`` in Chromium, driven by the WebDriver protocol.

Run: python -m pytest tests/serving/test_page.py, with chromium and chromedriver on the path
"""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from helpers.http_served import KEY, PROMPT, Served

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("chromedriver") is None, reason="needs chromium and chromedriver"),
]
ARGUMENTS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update",
]  # fmt: skip


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[httpx.Client]:
    """Start a session of Chromium; requests go below its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    driver = subprocess.Popen(["chromedriver", f"--port={port}"], stdout=subprocess.DEVNULL)
    options = {"args": [*ARGUMENTS, f"--user-data-dir={tmp_path}"]}
    wanted = {"capabilities": {"alwaysMatch": {"browserName": "chrome", "goog:chromeOptions": options}}}
    try:
        url = f"http://127.0.0.1:{port}/session"
        with httpx.Client(transport=httpx.HTTPTransport(retries=8), timeout=60) as client:
            url += "/" + client.post(url, json=wanted).raise_for_status().json()["value"]["sessionId"]
            with httpx.Client(base_url=url, timeout=60) as session:
                yield session
            client.delete(url)
    finally:
        driver.terminate()
        driver.wait()


def script(browser: httpx.Client, text: str) -> Any:
    """Return what a script of the page returns."""
    return browser.post("/execute/sync", json={"script": text, "args": []}).raise_for_status().json()["value"]


def waited(found: Callable[[], Any]) -> Any:
    """Return the first true value, at most 30 seconds later."""
    for _ in range(600):
        if value := found():
            return value
        time.sleep(0.05)
    raise TimeoutError


def fill(browser: httpx.Client, **values: object) -> None:
    """Write into fields of the page and press its button."""
    for name, value in values.items():
        script(browser, f"document.getElementById({name!r}).value = {str(value)!r}")
    script(browser, "document.getElementById('run').click()")


def test_the_page_streams_a_text_draws_trees_and_stops(browser: httpx.Client, served: Served) -> None:
    browser.post("/url", json={"url": served.url}).raise_for_status()
    assert script(browser, "return document.title || document.querySelector('h1').textContent") == "stree"
    fill(browser, prompt=PROMPT, limit=24)
    message = waited(lambda: script(browser, "return document.getElementById('speed').textContent"))
    assert "key" in message.lower()
    fill(browser, key=KEY)
    speed = waited(lambda: script(browser, "return /plain/.test(speed.textContent) && speed.textContent"))
    assert speed.startswith("24 tokens, ")
    shown = script(browser, "return document.getElementById('text').textContent")
    assert shown == PROMPT + served.alone(PROMPT, max_new_tokens=24)
    lines, accepted = script(
        browser, "return ['', '[stroke=\"#1f5fbf\"]'].map(kind => tree.querySelectorAll('line' + kind).length)"
    )
    assert lines >= accepted and lines > 0
    assert script(browser, "return tree.querySelectorAll('text').length") == lines + 1
    fill(browser, limit=200)
    waited(lambda: script(browser, "return document.getElementById('tree').querySelectorAll('line').length"))
    script(browser, "document.getElementById('stop').click()")
    waited(lambda: not served.engine.stats["running"])
    assert script(browser, "return document.getElementById('stop').disabled")
    problems = browser.post("/se/log", json={"type": "browser"}).json()["value"]
    assert [entry for entry in problems if entry["level"] == "SEVERE" and "401" not in entry["message"]] == []
