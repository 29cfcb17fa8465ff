"""POST /v1/responses of OpenAI's API, written as a chat whose answer is turned into output items and events."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import AsyncIterable, AsyncIterator, Iterator
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from stree.request_fields import ANY_VALUE, shortened, utf8
from stree.serving.errors import APIError
from stree.serving.openai_api import OpenAIAPI
from stree.serving.protocol import ChatRequest

__all__ = ["ResponsesRequest", "respond"]

# Fields that are not supported, with the values that leave them off; null always does.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "background": (False,), "include": ([],), "truncation": ("disabled",), "top_logprobs": (0,),
    "previous_response_id": (), "conversation": (), "prompt": (), "max_tool_calls": (), "stream_options": ({},),
    "context_management": ([],), "moderation": (),
}  # fmt: skip
# Fields of a chat that have another name here, or none.
CHAT_ONLY = {
    "messages", "n", "max_tokens", "max_completion_tokens", "logprobs", "response_format", "reasoning_effort",
    "prompt_logprobs", "separate_reasoning",
}  # fmt: skip
# Fields of a chat -> what they are called here.
NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "response_format": "text",
    "reasoning_effort": "reasoning",
}


class ResponsesRequest(BaseModel):
    """POST /v1/responses; other fields are those of a chat."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    model: str
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    stream: bool | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None

    @field_validator("input", mode="before")
    @classmethod
    def _check_input(cls, given: Any) -> Any:
        if not isinstance(given, str) and not (isinstance(given, list) and all(isinstance(one, dict) for one in given)):
            raise ValueError(f"input must be a text or a list of items, got {shortened(given)}")
        return given

    def chat(self) -> ChatRequest:
        """Return the chat that asks for the same.

        Raises:
            APIError: a field that is not supported, by its name.
            RequestValidationError: a value that a chat does not take.
        """
        extra = dict(self.model_extra or {})
        for name, value in extra.items():
            if value is None:
                continue
            is_off = any(value == one and type(value) is type(one) for one in UNSUPPORTED.get(name, ()))
            if name in CHAT_ONLY or (name in UNSUPPORTED and not is_off):
                raise _unsupported(name, value)
        extra = {name: value for name, value in extra.items() if name not in (*UNSUPPORTED, *ANY_VALUE)}
        text, reasoning = dict(self.text or {}), dict(self.reasoning or {})
        fields = {
            "model": self.model, "messages": self._messages(), "max_tokens": self.max_output_tokens,
            "temperature": self.temperature, "top_p": self.top_p, "stream": self.stream,
            "tools": None if self.tools is None else [_tool(tool) for tool in self.tools],
            "tool_choice": _tool_choice(self.tool_choice), "parallel_tool_calls": self.parallel_tool_calls,
            "response_format": _format(text.pop("format", None)), "verbosity": text.pop("verbosity", None),
            "reasoning_effort": reasoning.pop("effort", None),
            "stream_options": {"include_usage": True} if self.stream else None,
        }  # fmt: skip
        for name, left in (("text", text), ("reasoning", reasoning)):
            if left := {key: value for key, value in left.items() if value is not None}:
                raise _unsupported(name, left)
        try:
            return ChatRequest(**{name: value for name, value in {**extra, **fields}.items() if value is not None})
        except ValidationError as error:
            raise RequestValidationError([
                {**one, "loc": ("body", NAMES.get(str(one["loc"][0]), one["loc"][0]), *one["loc"][1:])}
                for one in error.errors()
            ]) from error  # fmt: skip

    def _messages(self) -> list[dict[str, Any]]:
        """Return the messages of the chat; what the assistant writes and the calls behind it are one message."""
        found = list[dict[str, Any]]()
        if self.instructions:
            found.append({"role": "system", "content": self.instructions})
        items: list[dict[str, Any]] = self.input if isinstance(self.input, list) else [
            {"role": "user", "content": self.input}
        ]  # fmt: skip
        for item in items:
            kind = item.get("type", "message")
            if kind == "function_call":
                if not found or found[-1]["role"] != "assistant":
                    found.append({"role": "assistant", "content": None})
                function = {"name": item.get("name"), "arguments": item.get("arguments")}
                call = {"id": item.get("call_id"), "type": "function", "function": function}
                found[-1].setdefault("tool_calls", []).append(call)
            elif kind == "function_call_output":
                content = _content(item.get("output"))
                found.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": content})
            elif kind == "message":
                role = "system" if item.get("role") == "developer" else item.get("role")
                found.append({"role": role, "content": _content(item.get("content"))})
            elif kind != "reasoning":  # templates leave the reasoning of earlier turns out
                raise APIError(400, f"input: an item of type {shortened(kind)} is not supported", param="input")
        return found


def _unsupported(name: str, value: Any) -> APIError:
    message = f"{name} is not supported in /v1/responses, got {shortened(value)}"
    return APIError(400, message, param=name, code="unsupported_parameter")


def _content(content: Any) -> Any:
    """Return a content with its text parts as a chat has them."""
    if not isinstance(content, list):
        return content
    kinds = ("input_text", "output_text")
    return [
        {**part, "type": "text"} if isinstance(part, dict) and part.get("type") in kinds else part for part in content
    ]


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise APIError(400, f"tools of type {shortened(tool.get('type'))} are not supported", param="tools")
    kept = {name: value for name, value in tool.items() if name != "type" and value is not None}
    return {"type": "function", "function": kept}


def _tool_choice(choice: Any) -> Any:
    if isinstance(choice, dict) and choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    return choice


def _format(form: Any) -> Any:
    if isinstance(form, dict) and form.get("type") == "json_schema":
        return {"type": "json_schema", "json_schema": {name: value for name, value in form.items() if name != "type"}}
    return form


class _Output:
    """Output items, and the events that announce them."""

    def __init__(self) -> None:
        self.items, self._number = list[dict[str, Any]](), -1
        self._text: str | None = None  # of the message that is open

    def event(self, kind: str, **fields: Any) -> dict[str, Any]:
        """Return the next event."""
        self._number += 1
        return {"type": f"response.{kind}", "sequence_number": self._number, **fields}

    def push(self, message: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Append a message of a chat, or what the next chunk adds to it; yield its events."""
        for part in message.get("parts", [message]):
            if part.get("content"):
                if self._text is None:
                    self.items.append(_message(f"msg_{secrets.token_hex(12)}", "", "in_progress"))
                    yield self.event(
                        "output_item.added", output_index=len(self.items) - 1, item={**self.items[-1], "content": []}
                    )
                    yield self.event("content_part.added", **self._place(), part=_part(""))
                    self._text = ""
                self._text += part["content"]
                yield self.event("output_text.delta", **self._place(), delta=part["content"], logprobs=[])
            for call in part.get("tool_calls") or ():
                yield from self.close("completed")
                function, name = call["function"], f"fc_{secrets.token_hex(12)}"
                item = {"type": "function_call", "id": name, "call_id": call["id"], **function, "status": "completed"}
                self.items.append(item)
                place = {"output_index": len(self.items) - 1}
                yield self.event("output_item.added", **place, item={**item, "arguments": "", "status": "in_progress"})
                yield self.event("function_call_arguments.delta", **place, item_id=name, delta=function["arguments"])
                yield self.event("function_call_arguments.done", **place, item_id=name, **function)
                yield self.event("output_item.done", **place, item=item)

    def close(self, status: str) -> Iterator[dict[str, Any]]:
        """End the message that is open, if any; yield its events."""
        if self._text is not None:
            text, self._text = self._text, None
            place = self._place()
            self.items[-1] = _message(place["item_id"], text, status)
            yield self.event("output_text.done", **place, text=text, logprobs=[])
            yield self.event("content_part.done", **place, part=_part(text))
            yield self.event("output_item.done", output_index=place["output_index"], item=self.items[-1])

    def _place(self) -> dict[str, Any]:
        return {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1, "content_index": 0}


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": []}


def _message(name: str, text: str, status: str) -> dict[str, Any]:
    return {"type": "message", "id": name, "role": "assistant", "status": status, "content": [_part(text)]}


async def respond(api: OpenAIAPI, body: ResponsesRequest, request: Request) -> Any:
    """Answer POST /v1/responses; nothing is stored."""
    head = {
        "id": f"resp_{secrets.token_hex(12)}", "object": "response", "created_at": int(time.time()),
        "model": body.model, "instructions": body.instructions, "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {}, "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None, "reasoning": body.reasoning,
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "text": body.text or {"format": {"type": "text"}}, "tool_choice": body.tool_choice or "auto",
        "tools": [{"parameters": None, "strict": None, **tool} for tool in body.tools or []],
        "top_p": 1.0 if body.top_p is None else body.top_p, "truncation": "disabled", "error": None, "store": False,
    }  # fmt: skip
    try:
        utf8("the request", json.dumps(head, ensure_ascii=False, allow_nan=False))  # the answer repeats it
    except (ValueError, RecursionError) as error:
        raise APIError(400, f"the body must be JSON in UTF-8: {error}") from error
    try:
        answer = await api.chat(body.chat(), request, has_parts=True)
    except APIError as error:
        error.param = NAMES.get(error.param or "", error.param)
        raise
    if isinstance(answer, StreamingResponse):
        events = _events(head, answer.body_iterator)
        return StreamingResponse(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
    output, choice = _Output(), answer["choices"][0]
    for _ in output.push(choice["message"]):
        pass
    return _ended(head, output, choice["finish_reason"], answer["usage"])[1]


async def _events(head: dict[str, Any], chunks: AsyncIterable[Any]) -> AsyncIterator[str]:
    """Yield the events of a response from those of a chat's stream."""
    output, reason = _Output(), ""
    begun = {**head, "status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    for kind in ("created", "in_progress"):
        yield _written(output.event(kind, response=begun))
    async for line in chunks:
        for part in filter(None, str(line).split("\n\n")):
            if (text := part.removeprefix("data: ")) == "[DONE]":
                return
            chunk = json.loads(text)
            if "error" in chunk:
                fields = {name: chunk["error"][name] for name in ("code", "message", "param")}
                yield _written({**output.event("error"), "type": "error", **fields})
                return
            for choice in chunk["choices"]:
                for event in output.push(choice["delta"]):
                    yield _written(event)
                reason = choice["finish_reason"] or reason
            if chunk["usage"] is not None:
                events, response = _ended(head, output, reason, chunk["usage"])
                for event in events:
                    yield _written(event)
                yield _written(output.event(response["status"], response=response))


def _ended(
    head: dict[str, Any], output: _Output, reason: str, usage: dict[str, Any]
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the last events of the items, and the response."""
    status = "incomplete" if reason == "length" else "completed"
    events = [*output.close(status)]
    details = {"cached_tokens": usage["prompt_tokens_details"]["cached_tokens"], "cache_write_tokens": 0}
    return events, {
        **head, "status": status, "output": output.items,
        "incomplete_details": {"reason": "max_output_tokens"} if reason == "length" else None,
        "usage": {
            "input_tokens": usage["prompt_tokens"], "input_tokens_details": details,
            "output_tokens": usage["completion_tokens"], "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        },
    }  # fmt: skip


def _written(event: dict[str, Any]) -> str:
    return f"event: {event['type']}\ndata: {json.dumps(event)}\n\n"
