"""The grammar of answers that must call tools."""

from __future__ import annotations

from collections.abc import Collection

from stree.tool_calls.base import Schemas, ToolFormat
from stree.tool_calls.lark import quoted

__all__ = ["calls_lark"]


def calls_lark(form: ToolFormat, schemas: Schemas, special_tokens: Collection[str], *, is_one: bool) -> str:
    """Return the grammar of answers that are calls and nothing else.

    Args:
        form: of the calls.
        schemas: of the tools that may be called, at least one.
        special_tokens: of the tokenizer; where a format's marker is one, the grammar asks for this token.
        is_one: whether there is one call, rather than one or more.

    Raises:
        ValueError: the format cannot write a call of a tool.
    """
    begin, end = (text if text in special_tokens else quoted(text) for text in (form.begin, form.end or ""))
    begin, end = f"{begin} {quoted(form.opening)}", f"{quoted(form.closing)} {end}"
    call = "call" if form.is_list else f"{begin} call {end}"
    calls = call if is_one else f"{call} ({quoted(form.divider)} {call})*"
    rules = [form.call(name, schema) for name, schema in schemas.items()]
    lines = [f"start: {begin} {calls} {end}" if form.is_list else f"start: {calls}"]
    lines.append("call: " + " | ".join(f"call_{number}" for number in range(len(rules))))
    lines += [f"call_{number}: {rule}" for number, rule in enumerate(rules)]
    return "\n".join([*lines, form.rules]).replace("::=", r":\u003a=")  # which would mark the grammar as EBNF
