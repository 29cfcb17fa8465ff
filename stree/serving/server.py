"""Running the application by uvicorn until a signal ends it."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from fastapi import FastAPI

__all__ = ["serve"]


class _Server(uvicorn.Server):
    """Ends in peace at SIGTERM and SIGINT; uvicorn's own would raise the signal again and exit with its number."""

    def __init__(self, config: uvicorn.Config, app: FastAPI) -> None:
        super().__init__(config)
        self._served = app

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Take no more requests at the first signal, and do not wait for those that run at the second."""

        def stop(*_: Any) -> None:
            self.force_exit = self.should_exit
            self._served.state.is_draining = self.should_exit = True

        before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def serve(app: FastAPI, host: str, port: int, *, grace: float = 30.0) -> bool:
    """Serve until SIGTERM or SIGINT; requests that run then have ``grace`` seconds to end.

    Returns:
        Whether it could listen.
    """
    config = uvicorn.Config(app, host, port, log_level="warning", timeout_graceful_shutdown=max(round(grace), 1))
    server = _Server(config, app)
    try:
        server.run()
    except SystemExit:  # the port is taken; uvicorn has said so
        return False
    return server.started
