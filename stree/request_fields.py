"""Fields of requests in the format of OpenAI's API, for all that read it: the server and batch files."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from reprlib import Repr
from typing import Any, TypeVar

from stree.sampling import Sampling

__all__ = [
    "MOST_STOP_STRINGS", "SAMPLING", "FieldError", "UnsupportedField", "chat_messages", "check_fields", "check_prompt",
    "check_roles", "rendered", "sampling_of", "shortened", "stop_strings", "template_options", "utf8",
]  # fmt: skip

T = TypeVar("T")
MOST_STOP_STRINGS, MOST_STOP_CHARACTERS = 16, 1024
MOST_MESSAGES = 10_000
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
MOST_OTHER_ROLES = 8
NO_ROLE = "no role of a template"
INSTEAD_OF_CONTENT = ("tool_calls", "function_call", "reasoning_content", "refusal")
SAMPLING = ("temperature", "top_k", "top_p", "min_p")

# Arguments of a tokenizer's ``apply_chat_template`` that are not the template's own.
OURS = frozenset({
    "conversation", "messages", "tools", "documents", "chat_template", "add_generation_prompt", "tokenize",
    "continue_final_message", "padding", "truncation", "max_length", "return_tensors", "return_dict",
    "return_assistant_tokens_mask", "tokenizer_kwargs",
})  # fmt: skip
# Fields that change no text, whatever their value: they name a caller, or concern storage, caches, price and speed.
ANY_VALUE = frozenset({
    "user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "metadata", "store", "service_tier",
    "prediction", "request_id",
})  # fmt: skip
# Every other field that is known, and its values that ask for nothing; null is always one.  A reader takes some of them
# itself, with any value; of the others these values alone.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,), "best_of": (1,), "stream": (False,), "stream_options": (), "echo": (False,), "suffix": ("",),
    "logprobs": (False,), "top_logprobs": (0,), "prompt_logprobs": (),
    "ignore_eos": (False,), "stop_token_ids": ([],), "include_stop_str_in_output": (False,),
    "length_penalty": (1,), "logits_processors": ([],),
    "use_beam_search": (False,), "early_stopping": (False,),
    "response_format": ({"type": "text"},), "structured_outputs": (), "guided_json": (), "guided_regex": (),
    "guided_choice": (), "guided_grammar": (),
    "tools": ([],), "tool_choice": ("none", "auto"), "parallel_tool_calls": (True, False), "functions": ([],),
    "function_call": ("none", "auto"), "documents": ([],), "web_search_options": (),
    "modalities": (["text"],), "audio": (), "verbosity": ("medium",), "reasoning_effort": (),
    "enable_thinking": (), "include_reasoning": (True,), "separate_reasoning": (False,),
    "add_generation_prompt": (True,), "continue_final_message": (False,),
    "chat_template": (), "chat_template_kwargs": ({},), "mm_processor_kwargs": ({},), "truncate_prompt_tokens": (),
    "skip_special_tokens": (True,), "spaces_between_special_tokens": (True,), "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,), "priority": (0,), "cache_salt": (),
}  # fmt: skip


class FieldError(ValueError):
    """A field of another type or range.

    Attributes:
        field: its name.
    """

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


class UnsupportedField(FieldError):
    """A field that asks for something that is not done."""

    def __init__(self, field: str, value: Any) -> None:
        kind = "supported" if field in NEUTRAL or field == "add_special_tokens" else "known"
        super().__init__(field, f"{field} is not {kind}, got {shortened(value)}")


def check_fields(fields: Mapping[str, Any], taken: Collection[str]) -> None:
    """Refuse fields that a reader does not take, unless they ask for nothing.

    Args:
        fields: of a request.
        taken: the names of those that it takes.

    Raises:
        UnsupportedField: it names the first of them.
    """
    # A chat template writes special tokens itself; a prompt gets the tokenizer's.
    neutral = {**NEUTRAL, "add_special_tokens": (fields.get("messages") is None,)}
    for name, value in fields.items():
        if name in taken or name in ANY_VALUE or value is None:
            continue
        if not any(_is_same(value, one) for one in neutral.get(name, ())):
            raise UnsupportedField(name, value)


def check_prompt(prompt: Any) -> Any:
    """Return a prompt of /v1/completions; its lists are not checked further.

    Raises:
        ValueError: neither a text nor a list of one kind of items: texts, tokens or token lists.
    """
    kinds = {type(one) for one in prompt} if isinstance(prompt, list) else set()
    if not isinstance(prompt, (str, list)) or len(kinds) > 1 or not kinds <= {str, int, list}:
        raise ValueError(f"prompt must be a text or token ids, or a list of these, got {shortened(prompt)}")
    return prompt


def stop_strings(stop: Any) -> list[str]:
    """Return the stop strings that ``stop`` gives: one string, several, or none; empty ones end no text.

    Raises:
        ValueError: something else, or too many.
    """
    strings = [stop] if isinstance(stop, str) else [] if stop is None else stop
    wanted = f"stop must be a string or a list of at most {MOST_STOP_STRINGS} strings"
    if not isinstance(strings, list) or not all(isinstance(string, str) for string in strings):
        raise ValueError(f"{wanted}, got {shortened(stop)}")
    if len(strings) > MOST_STOP_STRINGS:
        raise ValueError(f"{wanted}, got {len(strings)}")
    if any(len(string) > MOST_STOP_CHARACTERS for string in strings):
        raise ValueError(f"strings of stop must have at most {MOST_STOP_CHARACTERS} characters")
    return [utf8("stop", string) for string in strings if string]


def sampling_of(fields: Mapping[str, Any], default: Sampling) -> Sampling:
    """Return how tokens are drawn: by the fields of a request, and by ``default`` where they are absent or null.

    Raises:
        TypeError, ValueError: as ``Sampling``; a ``top_k`` of -1 or 0 means all tokens.
    """
    own = {name: fields[name] for name in SAMPLING if fields.get(name) is not None}
    return replace(default, **own | ({"top_k": None} if own.get("top_k") in (-1, 0) else {}))


def chat_messages(messages: Any) -> list[dict[str, Any]]:
    """Return the messages of a chat as templates of transformers take them, with all their fields.

    Content is a text, null, or text parts, which are joined.  The arguments of tool calls, which OpenAI's clients write
    as JSON, are parsed.  Other fields that are null are left out: clients and tables have them where a field is absent.

    Raises:
        ValueError: something else; the message says what.
    """
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"messages must be a list of turns, got {shortened(messages)}")
    if len(messages) > MOST_MESSAGES:
        raise ValueError(f"messages must be at most {MOST_MESSAGES}, got {len(messages)}")
    found = [_message(message) for message in messages]
    try:
        others = [{name: value for name, value in message.items() if name != "content"} for message in found]
        utf8("messages", json.dumps(others, ensure_ascii=False))
    except (TypeError, RecursionError) as error:
        raise ValueError(f"messages must be made of JSON's types: {error}") from error
    return found


def rendered(
    messages: Sequence[dict[str, Any]], render: Callable[[list[dict[str, Any]]], T]
) -> tuple[list[dict[str, Any]], T]:
    """Apply a chat template; return the messages that it has read, and what ``render`` returns for them.

    A template that refuses a content of null beside calls, as Granite's and LFM2.5's, gets an empty text in its place.
    """
    try:
        return [*messages], render([*messages])
    except Exception:  # of the template
        texts = [{**message, "content": message.get("content") or ""} for message in messages]
        if texts == [*messages]:
            raise
        return texts, render(texts)


def check_roles(messages: Sequence[Mapping[str, Any]], render: Callable[[list[dict[str, Any]]], Any]) -> None:
    """Refuse roles that neither OpenAI's API has nor the chat template reads.

    Args:
        messages: as ``chat_messages`` returns them; the template takes them.
        render: applies the template.

    Raises:
        ValueError: the template writes the same with another word as the role.
    """
    others = sorted({message["role"] for message in messages} - {*ROLES})
    if len(others) > MOST_OTHER_ROLES:
        raise ValueError(f"messages must have at most {MOST_OTHER_ROLES} roles beside {', '.join(ROLES)}")
    own = render([{**message} for message in messages]) if others else None
    for role in others:
        try:
            other = render([{**one, "role": NO_ROLE if one["role"] == role else one["role"]} for one in messages])
        except Exception:  # of the template, which has read the role
            continue
        if other == own:
            raise ValueError(f"the role of a message must be one of {', '.join(ROLES)}, got {shortened(role)}")


def template_options(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a request gives its chat template: ``chat_template_kwargs``, and two fields under their own names.

    Raises:
        FieldError: something else than an object, or one that names an argument of the tokenizer's own; a field of
            another type.
    """
    own = fields.get("chat_template_kwargs") or {}
    if not isinstance(own, dict) or OURS & own.keys():
        wanted = "chat_template_kwargs must be an object of the template's own variables"
        raise FieldError("chat_template_kwargs", f"{wanted}, got {shortened(own)}")
    named = {name: fields[name] for name in ("reasoning_effort", "enable_thinking") if fields.get(name) is not None}
    if not isinstance(named.get("enable_thinking", True), bool):
        raise FieldError("enable_thinking", f"enable_thinking must be true or false, got {shortened(named)}")
    return {**named, **own}


def _message(message: Any) -> dict[str, Any]:
    """Return one message; see ``chat_messages``."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise ValueError(f"a turn of messages must be an object with a role and a content, got {shortened(message)}")
    kept = {name: value for name, value in message.items() if value is not None or name == "content"}
    if kept.get("content") is None and not any(kept.get(name) for name in INSTEAD_OF_CONTENT):
        raise ValueError(f"a message must have a content or tool_calls, got {shortened(message)}")
    if kept.get("content") is not None:
        kept["content"] = utf8("messages", _text(kept["content"]))
    if isinstance(kept.get("tool_calls"), list):
        kept["tool_calls"] = [_tool_call(call) for call in kept["tool_calls"]]
    return kept


def _text(content: Any) -> str:
    """Return a content, which is a text or a list of text parts, as one text."""
    for part in content if isinstance(content, list) else []:
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(part, dict) or kind != "text":
            raise ValueError(f"messages: a content part of type {kind!r} is not supported, only 'text' is")
    texts = [part.get("text") for part in content] if isinstance(content, list) else [content]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError(f"the content of a turn must be a text, got {shortened(content)}")
    return "".join(texts)


def _tool_call(call: Any) -> Any:
    """Return a tool call with its arguments as an object, where they are the JSON of one, empty or absent."""
    function = call.get("function") if isinstance(call, dict) else None
    text = (function.get("arguments") or "{}") if isinstance(function, dict) else None
    if not isinstance(function, dict) or not isinstance(text, str):
        return call
    try:
        arguments = json.loads(text)
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else call


def utf8(name: str, text: str) -> str:
    """Return a text; refuse half of a pair of surrogates, which can be written in JSON."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name} is no UTF-8 text: {error}") from error
    return text


def shortened(value: Any) -> str:
    """Return the ``repr`` of a JSON value, or part of it, whatever its size and its depth."""
    writer = Repr()
    writer.maxstring = 80
    return f"{writer.repr(value):.80}"


def _is_same(value: Any, other: Any) -> bool:
    """Whether two JSON values are equal; true is not 1."""
    return bool(value == other) and isinstance(value, bool) == isinstance(other, bool)
