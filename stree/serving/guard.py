"""What stands before every request: its id, the key, the size of the body, and whether requests are still taken."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from contextlib import suppress
from typing import Any

from stree.serving.errors import APIError, error_event, error_response, stopping
from stree.serving.logs import log_request

__all__ = ["Guard", "OpenRequests"]

logger = logging.getLogger("stree")

OPEN_PATHS = {"/health", "/ready", "/version", "/metrics", "/", "/favicon.ico", "/openapi.json"}
ID_HEADER, LONGEST_ID = b"x-request-id", 128
LEFT = 499  # in the log: the client has left before the end of its answer
BODY_S = 120.0  # that a body may take to come
REST_S = 5.0  # and the rest of one that is too large, at most
CLOSE = {"Connection": "close"}  # else the server would read the rest of the body, which may have no end
LAST_EVENT_S = 1.0  # that a client has to read the end of its stream


class OpenRequests:
    """The requests of a server that are not answered yet; ``len`` counts them.

    Attributes:
        is_draining: whether no more are taken.
    """

    def __init__(self) -> None:
        self.is_draining = False
        self._limits = set[asyncio.Timeout]()

    def __len__(self) -> int:
        return len(self._limits)

    def add(self, limit: asyncio.Timeout) -> None:
        """Note a request that runs within ``limit``, which is entered."""
        self._limits.add(limit)

    def discard(self, limit: asyncio.Timeout) -> None:
        """Drop a request that is answered."""
        self._limits.discard(limit)

    def end(self) -> None:
        """Let every request be answered by an error now; called in the event loop."""
        while self._limits:
            self._limits.pop().reschedule(asyncio.get_running_loop().time())


class Guard:
    """An ASGI application around another one: every response has its request's id, or a new one, and is logged.

    Args:
        app: the other one.
        api_key: which requests need, or None.
        max_body: most bytes of a body.
        requests: those of the server.
    """

    def __init__(self, app: Any, *, api_key: str | None, max_body: int, requests: OpenRequests) -> None:
        self._app, self._max_body, self._requests = app, max_body, requests
        self._key = None if api_key is None else api_key.encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer with an error, or pass the request on with its body read."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = dict(scope["headers"]).get(ID_HEADER, b"")
        request_id = given if 0 < len(given) <= LONGEST_ID else secrets.token_hex(16).encode()
        status, logged, began = None, LEFT, time.perf_counter()

        async def named(message: Any) -> None:
            nonlocal status, logged
            if message["type"] == "http.response.start":
                status = message["status"]
                message = {**message, "headers": [*message.get("headers", ()), (ID_HEADER, request_id)]}
            elif not message.get("more_body", False):
                logged = status or LEFT
            await send(message)

        try:
            self._check(scope)
            read = {**scope, "method": "GET"} if scope["method"] == "HEAD" else scope  # answered without the body
            await (self._post if scope["method"] == "POST" else self._app)(read, receive, named)
        except APIError as error:
            if status is None:
                await error_response(error)(scope, receive, named)
            logged = error.status
        except Exception as error:
            logged = 500
            if status is not None:
                raise
            logger.exception("the request %s failed", ascii(request_id.decode("latin-1")))
            await error_response(APIError(500, f"the server failed: {type(error).__name__}"))(scope, receive, named)
        finally:
            log_request(scope, request_id.decode("latin-1"), logged, began)

    async def _post(self, scope: Any, receive: Any, send: Any) -> None:
        """Run a request until the server ends it: then it is answered by an error, a stream by an event and its end.

        Raises:
            APIError: the server has ended it; an open stream has this error as its last event.
        """
        is_started = is_open_stream = False

        async def noted(message: Any) -> None:
            nonlocal is_started, is_open_stream
            await send(message)
            if message["type"] == "http.response.start":
                kind = dict(message["headers"]).get(b"content-type", b"")
                is_started, is_open_stream = True, kind.startswith(b"text/event-stream")
            elif not message.get("more_body", False):
                is_open_stream = False

        limit = asyncio.timeout(None)
        try:
            async with limit:
                self._requests.add(limit)
                await self._app(scope, await self._read(receive), noted)
            return
        except TimeoutError:
            if not limit.expired():
                raise
        finally:
            self._requests.discard(limit)
        error = stopping("the server stops, and the time of its last requests is over")
        if is_open_stream:
            with suppress(TimeoutError):
                async with asyncio.timeout(LAST_EVENT_S):
                    await send({"type": "http.response.body", "body": error_event(error).encode(), "more_body": False})
        if is_open_stream or not is_started:
            raise error

    def _check(self, scope: Any) -> None:
        headers = dict(scope["headers"])
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        if self._key is not None and path not in OPEN_PATHS:
            scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
            if scheme.lower() != b"bearer" or not secrets.compare_digest(given.strip(), self._key):
                raise APIError(401, "the API key is missing or wrong", headers={"WWW-Authenticate": "Bearer"})
        if scope["method"] == "POST" and self._requests.is_draining:
            raise stopping("the server stops and takes no more requests")
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > self._max_body:
            self._refuse_size()

    async def _read(self, receive: Any) -> Any:
        """Read the body; return what gives it again, and then what comes after it, such as a disconnect."""
        parts, size, more = list[bytes](), 0, True
        with suppress(TimeoutError):
            async with asyncio.timeout(BODY_S) as limit:
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        break
                    parts.append(message.get("body", b""))
                    size, more = size + len(parts[-1]), message.get("more_body", False)
                    if size > self._max_body:  # the client reads no answer before it has sent its body
                        parts = [b""]
                        limit.reschedule(min(limit.when() or 0.0, asyncio.get_running_loop().time() + REST_S))
        if size > self._max_body:
            self._refuse_size(CLOSE)
        if limit.expired():
            raise APIError(408, f"the body has not ended within {BODY_S:g} seconds", headers=CLOSE)
        parts.append(b"")
        parts.reverse()

        async def again() -> Any:
            if not parts:
                return await receive()
            part = parts.pop()
            return {"type": "http.request", "body": part, "more_body": bool(parts)}

        return again

    def _refuse_size(self, headers: dict[str, str] | None = None) -> None:
        raise APIError(413, f"the body is larger than {self._max_body} bytes", headers=headers)
