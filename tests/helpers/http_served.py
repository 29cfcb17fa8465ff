"""A server that listens, and what its clients ask."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import openai
import uvicorn

import stree
from stree.serving.app import create_app

PROMPT = "Question: Tom has 3 apples. He gets 2 more"
TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant:"
KEY = "a secret"


@dataclass
class Served:
    """A server that listens."""

    url: str
    engine: Any  # or what has its target only
    app: Any
    tokenizer: Any

    @property
    def client(self) -> openai.OpenAI:
        """The official client, which refuses answers that do not fit OpenAI's schema."""
        return openai.OpenAI(
            base_url=f"{self.url}/v1", api_key=KEY, _strict_response_validation=True, max_retries=0
        )  # fmt: skip

    @property
    def lenient(self) -> openai.OpenAI:
        """The same without that check: OpenAI's schema of text completions has no chunk before the last one."""
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=KEY, max_retries=0)

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        """Send JSON, or bytes as they are, with the key unless headers are given."""
        headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json", **options.pop("headers", {})}
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return httpx.post(self.url + path, content=content, headers=headers, timeout=60, **options)

    def alone(self, prompt: str, **options: Any) -> str:
        """The text that generate gives."""
        ids = self.tokenizer(prompt)["input_ids"]
        text = stree.generate(self.engine.lm, [ids], stree.drafters.NoDrafter(), **options).sequences[0]
        whole: str = self.tokenizer.decode(text, skip_special_tokens=True)
        return whole[len(self.tokenizer.decode(ids)) :]


@contextmanager
def listening(engine: stree.Engine, tokenizer: Any) -> Iterator[Served]:
    """Serve an engine on a free port, under the name "tiny"."""
    app = create_app(engine, tokenizer, "tiny", api_key=KEY, max_body=20_000)
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    yield Served(f"http://127.0.0.1:{port}", engine, app, tokenizer)
    server.should_exit = True
    thread.join()
