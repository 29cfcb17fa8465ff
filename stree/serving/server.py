"""Running the application by uvicorn until a signal ends it."""

from __future__ import annotations

import signal
import socket
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI

__all__ = ["bind", "bind_path", "serve"]

ANSWER_S = 2.0  # that clients have to read the last answers, once the grace is over


def bind(host: str, port: int) -> socket.socket:
    """Return a socket bound to an address; it does not listen yet, so clients are refused until ``serve``.

    Raises:
        OSError: the port is taken, or the address is not this machine's.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.socket(family)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        raise OSError(f"cannot listen at {host}, port {port}: {error.strerror or error}") from error
    return listener


@contextmanager
def bind_path(path: Path) -> Iterator[socket.socket]:
    """Bind a socket to a path, which is removed at the end; it does not listen before ``serve``.

    Raises:
        OSError: a process listens there, something else is there, or the folder is not to be written to.
    """
    listener = socket.socket(socket.AF_UNIX)
    try:
        if path.exists() and stat.S_ISSOCK(path.stat().st_mode) and not _listens(path):
            path.unlink()  # a server that was killed has left it
        listener.bind(str(path))
    except OSError as error:
        listener.close()
        raise OSError(f"cannot listen at {path}: {error.strerror or error}") from error
    with listener:
        try:
            yield listener
        finally:
            path.unlink(missing_ok=True)


def _listens(path: Path) -> bool:
    """Return whether a process listens at a path."""
    with socket.socket(socket.AF_UNIX) as client:
        return client.connect_ex(str(path)) == 0


class _Server(uvicorn.Server):
    """Drains at the first SIGTERM or SIGINT while it still listens, and ends at the second one with exit status 0.

    uvicorn's own server closes the listener first, cancels tasks at the end, and raises the signal again.
    """

    def __init__(self, config: uvicorn.Config, app: FastAPI, grace: float, on_start: Callable[[], None]) -> None:
        super().__init__(config)
        self._requests, self._grace, self._on_start = app.state.requests, grace, on_start
        self._deadline: float | None = None  # by time.monotonic(), of the requests that run
        self._is_ending = False

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Take no more requests at the first signal, and do not wait for those that run at the second."""

        def stop(*_: Any) -> None:
            self.force_exit = self._is_ending
            self._deadline = time.monotonic() + (0.0 if self._requests.is_draining else self._grace)
            self._requests.is_draining = True

        before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to listen, and say so."""
        await super().startup(sockets)
        self._on_start()

    async def on_tick(self, counter: int) -> bool:
        """Return whether to close the listener: all requests are answered, or their time is over."""
        if await super().on_tick(counter):
            return True
        now = time.monotonic()
        if self._deadline is None or (len(self._requests) and now < self._deadline):
            return False
        self._requests.end()
        self._is_ending = True
        self.config.timeout_graceful_shutdown = round(max(self._deadline - now, ANSWER_S))
        return True


def serve(
    app: FastAPI, listener: socket.socket, *, grace: float = 30.0, on_start: Callable[[], None] = lambda: None,
    **settings: Any,
) -> None:  # fmt: skip
    """Serve until SIGTERM or SIGINT.

    From the first signal on new requests are refused by 503, while those that run have ``grace`` seconds to end; what
    has not ended then gets an error, as at a second signal.

    Args:
        app: of ``create_app``.
        listener: of ``bind`` or ``bind_path``; it is closed at the end.
        grace: seconds.
        on_start: called once the server listens.
        settings: further ones of ``uvicorn.Config``, such as ``root_path`` and ``ssl_certfile``.

    Raises:
        OSError: another process listens at that address now.
    """
    try:
        listener.listen()  # uvicorn's error names no address
    except OSError as error:
        at = listener.getsockname()
        where = at if isinstance(at, str) else f"{at[0]}, port {at[1]}"
        raise OSError(f"cannot listen at {where}: {error.strerror or error}") from error
    config = uvicorn.Config(app, log_config=None, log_level="warning", lifespan="off", **settings)
    _Server(config, app, grace, on_start).run([listener])
