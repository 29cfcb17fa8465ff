"""The grammar of a request."""

from __future__ import annotations

from collections.abc import Collection

from stree.decode.grammar import Grammar
from stree.grammar_fields import grammar_of
from stree.serving.errors import APIError
from stree.serving.protocol import ChatRequest, GenerationRequest
from stree.tool_calls import ToolFormat, calls_lark

__all__ = ["grammar_of_request"]


def grammar_of_request(
    body: GenerationRequest, form: ToolFormat | None, special_tokens: Collection[str]
) -> Grammar | None:
    """Return the grammar of a request, or None.

    Args:
        body: the request.
        form: of tool calls, which ``tool_choice`` may force.
        special_tokens: of the tokenizer.

    Raises:
        APIError: it cannot be read.
    """
    asked = grammar_of(dict(body))
    field = "tool_choice" if asked is None else asked[0]
    try:
        if form is not None and isinstance(body, ChatRequest) and body.has_forced_call:
            return Grammar.lark(calls_lark(form, body.tool_schemas, special_tokens, is_one=body.has_one_call))
        grammar: Grammar | None = None if asked is None else getattr(Grammar, asked[1])(asked[2])
    except (TypeError, ValueError) as error:
        raise APIError(400, f"{field}: {error}", param=field) from error
    except RuntimeError as error:  # without the package
        raise APIError(400, f"{field} is not supported: {error}", param=field, code="unsupported_parameter") from error
    return grammar
