"""Logs of a server on standard error: one line an event, as text or as JSON."""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any

__all__ = ["configure", "log_request"]

PROBES = {"/health", "/ready", "/metrics"}

logger = logging.getLogger("stree.requests")


class _Formatter(logging.Formatter):
    """Writes a record with its ``fields`` as one line; in text a traceback follows on lines of its own.

    Args:
        is_json: whether a line is a JSON object.
    """

    def __init__(self, *, is_json: bool) -> None:
        super().__init__()
        self._is_json = is_json

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of a record."""
        seconds, milliseconds = divmod(int(record.created * 1000), 1000)
        at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds)) + f".{milliseconds:03}Z"
        fields = getattr(record, "fields", {})
        trace = None if record.exc_info is None else self.formatException(record.exc_info)
        if self._is_json:
            head = {"time": at, "level": record.levelname, "message": record.getMessage()}
            return json.dumps({**head, **fields, **({} if trace is None else {"traceback": trace})})
        line = " ".join([at, record.levelname, record.getMessage(), *(f"{k}={_plain(v)}" for k, v in fields.items())])
        return line if trace is None else f"{line}\n{trace}"


class _OneASecond(logging.Filter):
    """Passes one error a second of connections that no open file is left for, of which asyncio logs thousands."""

    _last = 0.0

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether a record is written."""
        if "socket.accept() out of system resource" not in str(record.msg):
            return True
        is_due = record.created - self._last >= 1
        self._last = record.created if is_due else self._last
        return is_due


def configure(form: str, level: str) -> None:
    """Write the records of this package, of uvicorn and of asyncio to standard error.

    Args:
        form: "text" or "json".
        level: "debug", "info", "warning" or "error": the least of this package's records that are written; ``serve``
            lets uvicorn write warnings.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Formatter(is_json=form == "json"))
    handler.addFilter(_OneASecond())
    for name in ("stree", "uvicorn", "asyncio"):
        found = logging.getLogger(name)
        found.handlers, found.propagate = [handler], False
    logging.getLogger("stree").setLevel(level.upper())


def log_request(scope: Any, request_id: str, status: int, began: float) -> None:
    """Log a request of HTTP that has ended, on level DEBUG where it is a monitor's.

    Args:
        scope: of ASGI; ``handles`` of its state are the requests of the engine that it has made.
        request_id: of its header.
        status: of the response, or of the error that has ended it.
        began: by ``time.perf_counter``.
    """
    fields = {
        "method": scope["method"], "path": scope["path"], "status": status,
        "seconds": round(time.perf_counter() - began, 4), "request_id": request_id,
    }  # fmt: skip
    if handles := scope.get("state", {}).get("handles"):
        fields["prompt_tokens"] = sum(len(handle.prompt) for handle in handles)
        fields["new_tokens"] = sum(handle.num_new for handle in handles)
        fields["finish_reasons"] = ",".join(handle.finish_reason or "cancelled" for handle in handles)
    path = scope["path"].removeprefix(scope.get("root_path", ""))
    logger.log(logging.DEBUG if path in PROBES else logging.INFO, "request", extra={"fields": fields})


def _plain(value: Any) -> str:
    """Write a value that clients may have chosen in one word."""
    text = str(value)
    return text if text.isprintable() and text and not set(text) & set(' "=') else json.dumps(text)
