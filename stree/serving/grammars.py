"""The grammar of a request."""

from __future__ import annotations

from stree.decode.grammar import Grammar
from stree.grammar_fields import grammar_of
from stree.serving.errors import APIError
from stree.serving.protocol import GenerationRequest

__all__ = ["grammar_of_request"]


def grammar_of_request(body: GenerationRequest) -> Grammar | None:
    """Return the grammar of a request, or None.

    Raises:
        APIError: it cannot be read.
    """
    asked = grammar_of(dict(body))
    if asked is None:
        return None
    field, kind, value = asked
    try:
        grammar: Grammar = getattr(Grammar, kind)(value)
    except (TypeError, ValueError) as error:
        raise APIError(400, f"{field}: {error}", param=field) from error
    except RuntimeError as error:  # without the package
        raise APIError(400, f"{field} is not supported: {error}", param=field, code="unsupported_parameter") from error
    return grammar
