"""What stands before every request: the key, the size of the body, and whether the server still takes requests."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any

from stree.serving.errors import APIError, error_response

__all__ = ["Guard"]

OPEN_PATHS = {"/health", "/version", "/metrics", "/", "/openapi.json"}


class Guard:
    """An ASGI application around another one.

    Args:
        app: the other one.
        api_key: which requests need, or None.
        max_body: most bytes of a body.
        is_draining: whether no more requests are taken.
    """

    def __init__(
        self, app: Any, *, api_key: str | None, max_body: int, is_draining: Callable[[], bool]
    ) -> None:  # fmt: skip
        self._app, self._max_body, self._is_draining = app, max_body, is_draining
        self._expected = None if api_key is None else f"Bearer {api_key}".encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer with an error, or pass the request on with its body read."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            self._check(scope)
            receive = await self._read(receive) if scope["method"] == "POST" else receive
        except APIError as error:
            await error_response(error)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _check(self, scope: Any) -> None:
        headers = dict(scope["headers"])
        if self._expected is not None and scope["path"] not in OPEN_PATHS:
            given = headers.get(b"authorization", b"")
            if not secrets.compare_digest(given, self._expected):
                raise APIError(401, "the API key is missing or wrong", headers={"WWW-Authenticate": "Bearer"})
        if scope["method"] == "POST" and self._is_draining():
            raise APIError(503, "the server stops and takes no more requests", headers={"Retry-After": "5"})
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > self._max_body:
            self._refuse_size()

    async def _read(self, receive: Any) -> Any:
        """Read the body; return what gives it again, and then what comes after it, such as a disconnect."""
        parts, size, more = list[bytes](), 0, True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                break
            parts.append(message.get("body", b""))
            size, more = size + len(parts[-1]), message.get("more_body", False)
            if size > self._max_body:
                self._refuse_size()
        messages = [{"type": "http.request", "body": b"".join(parts), "more_body": False}]
        parts.clear()

        async def again() -> Any:
            return messages.pop() if messages else await receive()

        return again

    def _refuse_size(self) -> None:
        raise APIError(413, f"the body is larger than {self._max_body} bytes")
