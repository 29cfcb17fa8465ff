"""Fields of requests that ask for a grammar, with the names of OpenAI and vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stree.request_fields import FieldError, UnsupportedField, shortened

__all__ = ["GRAMMAR_FIELDS", "GUIDED_FIELDS", "grammar_of"]

# How vLLM's fields are called among those of ``structured_outputs``.
GUIDED = {"guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar"}
KINDS = {"json": "json_schema", "regex": "regex", "choice": "choice", "grammar": "lark"}
GUIDED_FIELDS = {KINDS[name]: field for field, name in GUIDED.items()}  # by the method of ``stree.Grammar``
GRAMMAR_FIELDS = ("response_format", "structured_outputs", *GUIDED)
ANY_OBJECT = {"type": "object"}


def grammar_of(fields: Mapping[str, Any]) -> tuple[str, str, Any] | None:
    """Return the grammar that a request asks for, or None.

    Returns:
        The field that asks for it, the name of a method of ``stree.Grammar``, and its argument, JSON-able.

    Raises:
        FieldError: a field of another type, or several grammars.
    """
    found = [(field, *each) for field in GRAMMAR_FIELDS for each in _kinds(field, fields.get(field))]
    if len(found) > 1:
        names = " and ".join(dict.fromkeys(field for field, *_ in found))
        raise FieldError(found[1][0], f"{names} must ask for one grammar, got {len(found)}")
    for field, kind, value in found:
        types: Any = {"json_schema": (dict, str, bool), "choice": list}.get(kind, str)
        if not isinstance(value, types):
            wanted = {"json_schema": "a JSON schema", "choice": "a list of strings"}.get(kind, "a string")
            raise FieldError(field, f"{field} must have {wanted}, got {shortened(value)}")
        return field, kind, value
    return None


def _kinds(field: str, value: Any) -> list[tuple[str, Any]]:
    """Return what a field asks for, each the name of a method and its argument."""
    if value is None:
        return []
    if field in GUIDED:
        return [(KINDS[GUIDED[field]], value)]
    if not isinstance(value, dict):
        raise FieldError(field, f"{field} must be an object, got {shortened(value)}")
    value = {name: own for name, own in value.items() if own is not None}  # a row of Parquet has every key
    if field == "response_format":
        return _response_format(value)
    asked = {name: own for name, own in value.items() if own is not False}
    other = next((name for name in asked if name not in KINDS and name != "json_object"), None)
    if other is not None:
        raise UnsupportedField(f"{field}.{other}", asked[other])
    if not asked:
        raise FieldError(field, f"{field} must have one of {', '.join(KINDS)}, json_object, got none")
    return [("json_schema", ANY_OBJECT) if name == "json_object" else (KINDS[name], own) for name, own in asked.items()]


def _response_format(value: dict[str, Any]) -> list[tuple[str, Any]]:
    kind, field = value.get("type"), "response_format"
    if kind == "text":
        return []
    if kind == "json_object":
        return [("json_schema", ANY_OBJECT)]
    if kind != "json_schema":
        raise FieldError(field, f"{field} must be of type text, json_object or json_schema, got {shortened(kind)}")
    inner = value.get("json_schema")
    if not isinstance(inner, dict):
        raise FieldError(field, f"{field}.json_schema must be an object with a schema, got {shortened(inner)}")
    return [("json_schema", inner["schema"] if inner.get("schema") is not None else ANY_OBJECT)]
