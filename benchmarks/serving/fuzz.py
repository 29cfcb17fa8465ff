"""Requests that schemathesis makes of the server's own OpenAPI schema: none may be answered by a status of 5xx.

Run: python -m benchmarks.serving.fuzz [--requests 2000]

schemathesis must be importable: pip install schemathesis, or in a folder of its own that PYTHONPATH names.
"""

from __future__ import annotations

import collections
import contextlib
import json
import tempfile
from typing import Any

import httpx
import hypothesis
import schemathesis

from benchmarks.report import command_line, finish
from benchmarks.serving.load import served
from stree.inputs import load_tokenizer, locate

TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant:"


def main() -> None:
    """Send the requests and count the answers by status."""
    parser = command_line(__doc__, "file of JSON lines to which the record is appended")
    parser.add_argument("--requests", type=int, default=2000)
    options = parser.parse_args()
    tokenizer, folder = load_tokenizer(locate("bundled", "target")), tempfile.mkdtemp()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    with served("--max-length", "64", "--cache-mb", "8", "--tokenizer", folder) as (url, _):
        schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
        statuses: collections.Counter[str] = collections.Counter()
        failed: list[str] = []
        with httpx.Client(base_url=url, timeout=60) as client:
            for result in schema.get_all_operations():
                send(result.ok(), options.requests, client, statuses, failed)
            healthy = client.get("/health").status_code == 200
    found = {"answers": dict(sorted(statuses.items())), "failed": failed[:5], "num_failed": len(failed)}
    finish([{"bench": "serving-fuzz", **found, "alive": healthy}], options.out)


def send(operation: Any, most: int, client: httpx.Client, statuses: Any, failed: list[str]) -> None:
    """Send the requests of one operation, or a few of one that takes no body."""
    count = most // 2 if operation.method == "post" and operation.path.startswith("/v1") else most // 100 + 1
    modes = schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE
    for mode in modes:

        @hypothesis.settings(
            max_examples=max(count // 2, 1), deadline=None, database=None, derandomize=True,
            suppress_health_check=list(hypothesis.HealthCheck),
        )  # fmt: skip
        @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
        def test(case: Any) -> None:
            if isinstance(case.body, dict):
                case.body.setdefault("max_tokens", 2)
                case.body["model"] = "bundled" if len(str(case.body)) % 2 else case.body.get("model", "bundled")
            sent = case.as_transport_kwargs(base_url=str(client.base_url))
            parts = {name: sent.get(name) for name in ("params", "json", "headers")}
            response = client.request(sent["method"], sent["url"], **parts)
            statuses[f"{operation.method.upper()} {operation.path} {response.status_code}"] += 1
            if response.status_code >= 500:
                failed.append(f"{response.status_code} {operation.path} {json.dumps(sent.get('json'))} {response.text}")

        # Of an operation without a body or parameters there are no requests of the second mode.
        with contextlib.suppress(hypothesis.errors.Unsatisfiable, schemathesis.errors.InvalidSchema, TypeError):
            test()


if __name__ == "__main__":
    main()
