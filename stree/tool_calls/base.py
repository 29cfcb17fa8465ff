"""What a format of tool calls is, and reading one out of a text that grows."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["JSON", "ToolCall", "ToolCallReader", "ToolFormat", "call_of", "calls_of", "calls_of_json"]

UNTERMINATED = "unterminated string"  # in small letters, in messages of Python's readers of JSON and of Python
MOST = sys.float_info.max
# Reads numbers beyond float64 as the largest one, and refuses NaN and infinity, which are no JSON.
JSON = json.JSONDecoder(parse_float=lambda text: min(max(float(text), -MOST), MOST), parse_constant=int)
Schemas = Mapping[str, Mapping[str, Any]]  # of the parameters, by the names of the tools


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a function.

    Attributes:
        name: of the function.
        arguments: a JSON object, as text.
    """

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a family of models writes calls.

    Attributes:
        hints: parts of chat templates that ask for this format.
        begin: text in front of calls.
        end: text behind them; None where they reach to the end of the answer.
        read: returns the calls in a text from ``begin`` to ``end``, both included; ValueError where it has none, with
            ``UNTERMINATED`` in its message where ``end`` is part of a string.
        call: returns a call as an expression of Lark, from the name of a tool and the schema of its parameters;
            ValueError where the format cannot write it.
        opening, closing: text between ``begin`` and a call, and between a call and ``end``.
        divider: text between two calls.
        rules: of Lark, that calls have in them.
        is_list: whether ``begin`` and ``end`` enclose all calls, and not each.
        is_whole: whether calls stand at the beginning of an answer or nowhere.
    """

    hints: tuple[str, ...]
    begin: str
    end: str | None
    read: Callable[[str, Schemas], list[ToolCall]]
    call: Callable[[str, Mapping[str, Any]], str]
    opening: str = ""
    closing: str = ""
    divider: str = ""
    rules: str = ""
    is_list: bool = False
    is_whole: bool = False


def call_of(name: Any, arguments: Any, schemas: Schemas) -> ToolCall:
    """Return a call.

    Raises:
        ValueError: no tool has the name, or the arguments are no object that JSON can write.
    """
    if name not in schemas or not isinstance(arguments, Mapping):
        raise ValueError(f"no call of a known tool: {name!r:.80}")
    text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    return ToolCall(str(name), text.encode(errors="backslashreplace").decode())  # halves of pairs of surrogates


def calls_of_json(text: str, schemas: Schemas) -> list[ToolCall]:
    """Read calls that are a JSON object of ``name`` and ``arguments`` or ``parameters``, or a list of them.

    Raises:
        ValueError: something else.
    """
    return calls_of(JSON.decode(text), schemas)


def calls_of(found: Any, schemas: Schemas) -> list[ToolCall]:
    """Return the calls of a JSON value that is parsed already; see ``calls_of_json``."""
    listed = found if isinstance(found, list) else [found]
    if not listed or not all(isinstance(one, dict) for one in listed):
        raise ValueError("calls must be objects")
    return [call_of(one.get("name"), one.get("arguments", one.get("parameters", {})), schemas) for one in listed]


class ToolCallReader:
    """Splits an answer into its content and its calls.

    Text that may belong to a call is held back until it is known; what then is no call is content.

    Args:
        form: the format.
        schemas: of the tools; calls of other names are content.
    """

    def __init__(self, form: ToolFormat, schemas: Schemas) -> None:
        self._form, self._schemas, self._held = form, schemas, ""
        self._has_content = self._is_behind_call = False

    def push(self, piece: str, *, is_last: bool = False) -> list[str | ToolCall]:
        """Append text; return the content and the calls that are certain now in order, spaces around calls left out."""
        self._held += piece
        parts = list[str | ToolCall]()
        if self._is_behind_call:
            self._held = self._held.lstrip()
        while (begin := self._begin()) >= 0:
            end, new = self._read(begin, is_last)
            if end is None:
                break
            if new is None:
                parts.append(self._take(end))
            else:
                parts += [self._take(begin).rstrip(), *new]
                self._held, self._is_behind_call = self._held[end - begin :].lstrip(), True
        place = len(self._held) if is_last else self._certain()
        parts.append(self._take(place))
        return [part for part in parts if part]

    def _read(self, begin: int, is_last: bool) -> tuple[int | None, list[ToolCall] | None]:
        """Return where calls end and the calls: both None where the end is not known yet, no calls where they are text.

        An end inside a string is none: the next one is tried.
        """
        first, end = None, self._end(begin, is_last)
        while end is not None:
            first = first or end
            try:
                return end, self._form.read(self._held[begin:end], self._schemas)
            except (ValueError, RecursionError) as error:
                if UNTERMINATED not in str(error).lower() or (is_last and end == len(self._held)):
                    return first, None
            end = self._end(end, is_last)
        return None, None

    def _begin(self) -> int:
        """Return where a call may begin, or -1."""
        if not self._form.is_whole:
            return self._held.find(self._form.begin)
        start = len(self._held) - len(self._held.lstrip())
        return start if not self._has_content and self._held.startswith(self._form.begin, start) else -1

    def _end(self, begin: int, is_last: bool) -> int | None:
        """Return where a call ends, or None where that is not known yet."""
        found = -1 if self._form.end is None else self._held.find(self._form.end, begin)
        if found >= 0:
            return found + len(self._form.end or "")
        return len(self._held) if is_last else None

    def _certain(self) -> int:
        """Return how much of what is held back is content, whatever follows."""
        end = self._begin()
        if end < 0:
            end = len(self._held)
            for length in range(1, min(len(self._form.begin), end + 1)):
                if self._form.begin.startswith(self._held[-length:]):
                    end = len(self._held) - length  # the longest one is the last found
        return len(self._held[:end].rstrip())

    def _take(self, end: int) -> str:
        """Take the first characters out of what is held back."""
        taken, self._held = self._held[:end], self._held[end:]
        self._has_content |= bool(taken.strip())
        self._is_behind_call &= not taken
        return taken
