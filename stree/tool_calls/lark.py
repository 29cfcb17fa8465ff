"""Parts of grammars of calls, in the Lark of llguidance."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["json_call", "json_value", "properties_of", "quoted"]

# One space behind commas and colons and none elsewhere, as chat templates write JSON.
SPACES = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def quoted(text: str) -> str:
    """Return a text as a string of Lark."""
    return json.dumps(text, ensure_ascii=False)


def json_value(schema: Any) -> str:
    """Return the JSON of a schema as an expression."""
    schema = {"not": {}} if schema is False else schema if isinstance(schema, Mapping) else {}
    return f"%json {json.dumps({**schema, 'x-guidance': SPACES})}"


def json_call(name: str, schema: Mapping[str, Any], arguments: str = "arguments", *, begin: str = "{") -> str:
    """Return ``{"name": NAME, "arguments": {...}}`` as an expression; another ``begin`` is in place of the brace."""
    begin += f'"name": {json.dumps(name)}, "{arguments}": '
    return f"{quoted(begin)} {json_value({**schema, 'type': 'object'})} {quoted('}')}"


def properties_of(schema: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any], bool]]:
    """Yield the name and the schema of each parameter, with the definitions around it, and whether it is required.

    Raises:
        ValueError: ``properties`` that are no object, or ``required`` that is no list.
    """
    schema = _resolved(schema)
    properties, required = schema.get("properties") or {}, schema.get("required") or []
    if not isinstance(properties, Mapping) or not isinstance(required, list):
        raise ValueError("parameters must have an object as properties and a list as required")
    shared: dict[str, Any] = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    for key, own in properties.items():
        yield key, _resolved({**shared, **(own if isinstance(own, dict) else {})}), key in required


def _resolved(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema in which what its ``$ref`` names is in its place, where that is in the schema itself."""
    found: Any = schema
    for part in str(schema.get("$ref", "")).split("/")[1:]:
        found = found.get(part) if isinstance(found, Mapping) else None
    own = {name: value for name, value in schema.items() if name != "$ref" or not isinstance(found, Mapping)}
    return {**own, **found} if isinstance(found, Mapping) else own
