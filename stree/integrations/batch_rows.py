"""Rows of a batch job: prompts in JSON lines, the batch format of OpenAI, or Parquet.  Ray is not needed here."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stree.checks import check_counts
from stree.grammar_fields import GRAMMAR_FIELDS, GUIDED_FIELDS, grammar_of
from stree.request_fields import (
    SAMPLING,
    chat_messages,
    check_fields,
    sampling_of,
    stop_strings,
    template_options,
    utf8,
)  # fmt: skip
from stree.rule_fields import RULE_FIELDS, rules_of
from stree.sampling import Sampling

__all__ = ["Row", "checksum", "read_rows", "request_of", "without_nulls"]

PROMPTS = ("prompt", "messages", "body")  # a row has one of them
LIMITS = ("max_new_tokens", "max_completion_tokens", "max_tokens")
URLS = {"/v1/completions": "prompt", "/v1/chat/completions": "messages"}
INTEGERS = (*LIMITS, "top_k", "seed")
NUMBERS = (*SAMPLING, *LIMITS, "seed")
TEMPLATE = ("chat_template_kwargs", "reasoning_effort", "enable_thinking")
OWN = {"model", "prompt", "messages", "stop", *TEMPLATE, *NUMBERS, *RULE_FIELDS, *GRAMMAR_FIELDS}


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the input.

    Attributes:
        number: its place in the input, from 0; empty lines do not count.
        id: its ``id`` or ``custom_id``; else its number, or ``row-NUMBER`` where another row has that number as its id;
            None for a line that is no object, or that has an id of another type.
        request: what ``request_of`` made of it, or None.
        reason: why it cannot be run, or None.
    """

    number: int
    id: str | int | None = None
    request: dict[str, Any] | None = None
    reason: str | None = None


def checksum(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal digits.

    Raises:
        ValueError: it cannot be read, or is a pipe, of whose rows none would be left to read.
    """
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise ValueError(f"cannot read {path}: the input is read more than once, so it must be a regular file")
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from error


def read_rows(path: Path) -> list[Row]:
    """Read the rows of a Parquet file (``.parquet``) or of JSON lines (any other name).

    An id that an earlier row has makes a row one that cannot be run, whether or not the earlier one can.

    Raises:
        ValueError: a file that cannot be read, or Parquet without a column of prompts; the message names it.
        RuntimeError: Parquet without pyarrow.
    """
    lines = [*(_parquet(path) if path.suffix.lower() == ".parquet" else _json_lines(path))]
    given = {own for own in map(_own_id, lines) if _is_id(own)}
    known: set[str | int] = set()
    rows: list[Row] = []
    for number, line in enumerate(lines):
        row = _row(number, line, given)
        if row.reason is None and row.id in known:
            row = Row(number, row.id, reason=f"an earlier row has the id {row.id!r}")
        if row.id is not None:
            known.add(row.id)
        rows.append(row)
    return rows


def _row(number: int, found: Any, given: Set[str | int]) -> Row:
    """Make a row of what a line holds, or of why it holds nothing; ``given`` are the ids of all rows."""
    if isinstance(found, ValueError):
        return Row(number, reason=str(found))
    own = _own_id(found)
    if own is None:
        own = _free_id(number, given)
    if not _is_id(own):
        return Row(number, reason=f"id must be a string or an integer, got {own!r:.80}")
    try:
        return Row(number, own, request_of(found))
    except (TypeError, ValueError) as error:
        return Row(number, own, reason=str(error))


def _own_id(found: Any) -> Any:
    """Return what a row has as its id; None where there is nothing."""
    if isinstance(found, ValueError):
        return None
    own = found.get("id") if found.get("id") is not None else found.get("custom_id")
    return int(own) if isinstance(own, float) and own.is_integer() else own  # as pandas writes a column with gaps


def _is_id(own: Any) -> bool:
    return isinstance(own, (str, int)) and not isinstance(own, bool)


def _free_id(number: int, given: Set[str | int]) -> str | int:
    """Return the number of a row, or ``row-NUMBER`` where another row has that number as its id."""
    own: str | int = number
    while own in given:
        own = f"row-{number}" if own == number else f"{own}-"
    return own


def request_of(row: Mapping[str, Any]) -> dict[str, Any]:
    """Take the request out of a row.

    Args:
        row: ``prompt`` (a text or token ids) or ``messages`` (turns of a chat) and, where it has its own,
            ``max_new_tokens`` (also ``max_tokens``, ``max_completion_tokens``), ``temperature``, ``top_k``, ``top_p``,
            ``min_p``, ``seed``, ``stop``, ``chat_template_kwargs``, ``reasoning_effort``, ``enable_thinking``
            and the fields of ``rule_fields`` and ``grammar_fields``; or these in a ``body``, as an object or its JSON.
            Other fields of a row are not read; a body with others that decide the text is refused.

    Returns:
        A JSON-able dict of ``prompt`` or ``messages``, and of the options that the row has, under the names of
        ``stree.generate`` (``stop`` for ``stop_strings``, a ``guided_*`` field for ``grammar``).  It is itself a row
        or body with the same request: a worker reads it again.

    Raises:
        TypeError, ValueError: a field of another type or range, or a request that asks for more.
    """
    fields: Mapping[str, Any] = row
    if row.get("body") is not None:
        fields = _body(row)
    fields = {name: value for name, value in fields.items() if value is not None}  # null is absent
    request = _prompt(fields)
    numbers = {name: _number(name, fields[name]) for name in NUMBERS if name in fields}
    sampling_of(numbers, Sampling())  # refuses what is out of range
    limit = next((name for name in LIMITS if name in numbers), None)
    if limit is not None:
        check_counts(**{limit: numbers[limit]})
        request["max_new_tokens"] = numbers[limit]
    if stops := stop_strings(fields.get("stop")):
        request["stop"] = stops
    if (asked := grammar_of(fields)) is not None:
        request[GUIDED_FIELDS[asked[1]]] = asked[2]
    return request | {name: number for name, number in numbers.items() if name not in LIMITS} | rules_of(fields)


def _number(name: str, value: Any) -> Any:
    """Refuse what is no number; return an integer for 3.0 where one is needed, as pandas writes columns with gaps."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number, got {value!r:.80}")
    if name in INTEGERS and isinstance(value, float):
        if not value.is_integer():
            raise TypeError(f"{name} must be an integer, got {value}")
        return int(value)
    return value


def _body(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the body of a row in OpenAI's format; refuse what asks for another text than this job writes."""
    body = row["body"]
    if isinstance(body, str):
        body = _parsed(body, "body")
    if not isinstance(body, dict):
        raise TypeError(f"body must be an object, got {type(body).__name__}")
    if row.get("method") not in (None, "POST"):
        raise ValueError(f"method must be POST, got {row['method']!r:.80}")
    url = row.get("url")
    if url is not None and (not isinstance(url, str) or url not in URLS):
        raise ValueError(f"url must be one of {', '.join(URLS)}, got {url!r:.80}")
    if url is not None and body.get(URLS[url]) is None:
        raise ValueError(f"the body of a request to {url} must have {URLS[url]}")
    check_fields(body, OWN)
    return body


def _prompt(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the prompt or the messages of a request."""
    prompt, messages = fields.get("prompt"), fields.get("messages")
    if (prompt is None) == (messages is None):
        which = "neither" if prompt is None else "both"
        raise ValueError(f"a row must have a prompt or messages, got {which}")
    if messages is not None:
        template_options(fields)
        options = {name: fields[name] for name in TEMPLATE if fields.get(name) not in (None, {})}
        return {"messages": chat_messages(messages), **options}
    is_tokens = isinstance(prompt, list) and all(type(token) is int for token in prompt)
    if not is_tokens and not isinstance(prompt, str):
        raise TypeError(f"prompt must be a text or a list of token ids, got {prompt!r:.80}")
    return {"prompt": prompt if is_tokens else utf8("prompt", str(prompt))}


def without_nulls(value: Any) -> Any:
    """Return a value of Arrow without nulls in its objects, each of which has every key that another row's has.

    The content of a message is kept, as ``chat_messages`` keeps it.
    """
    if isinstance(value, list):
        return [*map(without_nulls, value)]
    if not isinstance(value, dict):
        return value
    return {
        name: without_nulls(own)
        for name, own in value.items()
        if own is not None or (name == "content" and "role" in value)
    }


def _json_lines(path: Path) -> Iterator[Any]:
    """Read what every line holds; of a line that is not JSON, the error."""
    try:
        file = path.open("rb")
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from error
    with file:
        for number, line in enumerate(file, 1):
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                if text.strip():
                    found = _parsed(text, f"line {number}")
                    is_object = isinstance(found, dict)
                    kind = type(found).__name__
                    yield found if is_object else ValueError(f"line {number}: a row must be an object, got {kind}")
            except ValueError as error:
                is_json = not isinstance(error, UnicodeDecodeError)
                yield error if is_json else ValueError(f"line {number} is no UTF-8 text: {error}")


def _parsed(text: str, name: str) -> Any:
    """Parse JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name} is not JSON: {str(error).split(':')[0]}") from error


def _parquet(path: Path) -> Iterator[Any]:
    """Read the rows of a Parquet file as dicts."""
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise RuntimeError("reading Parquet needs the package pyarrow: pip install 'stree[ray]'") from error
    try:
        with parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            if not set(PROMPTS) & set(names):
                raise ValueError(f"{path} has none of the columns {', '.join(PROMPTS)}; it has {', '.join(names)}")
            for batch in file.iter_batches():
                yield from map(without_nulls, batch.to_pylist())
    except (ArrowException, OSError) as error:
        raise ValueError(f"cannot read {path} as Parquet: {str(error).strip().splitlines()[0]}") from error
