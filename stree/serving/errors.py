"""Errors as OpenAI's API writes them: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import json
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from stree.request_fields import shortened

__all__ = ["APIError", "add_handlers", "error_body", "error_event", "error_response", "stopping"]

CODES = {
    400: "invalid_request_error", 401: "invalid_api_key", 404: "not_found", 405: "method_not_allowed",
    408: "request_timeout", 413: "request_too_large", 429: "rate_limit_exceeded", 500: "internal_error",
    503: "service_unavailable",
}  # fmt: skip


class APIError(Exception):
    """A request that is answered by an error.

    Args:
        status: of HTTP.
        message: one line.
        param: the field that is wrong, or None.
        code: in a word; None for that of the status.
        headers: of the response.
    """

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.headers = status, message, param, code, headers


def stopping(message: str) -> APIError:
    """Return the error of a request that a server does not answer because it stops."""
    return APIError(503, message, headers={"Retry-After": "5"})


def error_body(status: int, message: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """Return the error object."""
    kind = "requests" if status == 429 else "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code or CODES.get(status)}}


def error_response(error: APIError) -> JSONResponse:
    """Return the response of an error."""
    body = error_body(error.status, error.message, error.param, error.code)
    return JSONResponse(body, error.status, error.headers)


def error_event(error: APIError) -> str:
    """Return the last events of a stream that an error ends."""
    body = error_body(error.status, error.message, error.param, error.code)
    return f"data: {json.dumps(body)}\n\ndata: [DONE]\n\n"


def add_handlers(app: FastAPI) -> None:
    """Let an application answer every error so; a body that does not fit the schema is 400."""

    @app.exception_handler(APIError)
    async def api_error(_: Request, error: APIError) -> JSONResponse:
        return error_response(error)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        where = [str(part) for part in first["loc"] if part != "body"]
        if not where or first["type"] == "json_invalid":
            return JSONResponse(error_body(400, _no_object(request, first, error.body)), 400)
        param = where[0]
        own = first.get("ctx", {}).get("error")  # of a check of ours, which names the field
        message = str(own) if own else f"{'.'.join(where)}: {first['msg']}"
        return JSONResponse(error_body(400, message, param), 400)

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> JSONResponse:
        message = f"{request.method} {request.url.path}: {error.detail}"
        if error.status_code == 400:  # FastAPI's own, of a body that is no UTF-8 text
            message = f"the body must be a JSON object in UTF-8: {error.detail}"
        return JSONResponse(error_body(error.status_code, message), error.status_code, error.headers)


def _no_object(request: Request, first: Any, body: Any) -> str:
    """Write why a body is no JSON object, from the first error of its validation."""
    if first["type"] == "json_invalid":
        return f"the body must be a JSON object: {first['ctx']['error']} at character {first['loc'][-1]}"
    kind = request.headers.get("content-type", "none")
    if not body or isinstance(body, dict):
        return f"the body must be a JSON object: {first['msg']}" if body else "the body must be a JSON object, got none"
    if isinstance(body, bytes):
        return f"the body must be JSON, with the header Content-Type: application/json, got {shortened(kind)}"
    return f"the body must be a JSON object, got {shortened(body)}"
