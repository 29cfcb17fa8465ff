"""Fields of requests that name bias, penalties, and allowed and forbidden tokens, with the names of OpenAI and vLLM."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from stree.request_fields import FieldError, shortened, utf8

__all__ = ["RULE_FIELDS", "rules_of", "tokenized_words"]

MOST_BAD_WORDS, MOST_IN_WORD = 128, 64


def rules_of(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the token rules that a request asks for, under the names of ``stree.generate``.

    Null and values that ask for nothing are left out.  ``bad_words`` may hold strings: see ``tokenized_words``.

    Raises:
        FieldError: a field of another type or range.
    """
    found = {}
    for field, (name, neutral, read) in FIELDS.items():
        value = fields.get(field)
        if value is not None and (value := read(field, value)) != neutral:
            found[name] = value
    return found


def tokenized_words(words: Sequence[str | list[int]], tokenizer: Any) -> list[list[int]]:
    """Return the token lists of words, those of strings as vLLM makes them.

    A string is tokenised at the beginning of a text and, where that changes its first token alone, after a space.
    """
    found: list[list[int]] = []
    for word in words:
        if not isinstance(word, str):
            found.append(word)
            continue
        bare, spaced = (tokenizer(space + word.lstrip(), add_special_tokens=False)["input_ids"] for space in ("", " "))
        found.append(bare)
        if len(spaced) == len(bare) and spaced[0] != bare[0]:
            found.append(spaced)
    return found


def _number(field: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise FieldError(field, f"{field} must be a number, got {shortened(value)}")
    if not math.isfinite(value):
        raise FieldError(field, f"{field} must be finite, got {value}")
    return float(value)


def _penalty(field: str, value: Any) -> float:
    number = _number(field, value)
    if not -2 <= number <= 2:
        raise FieldError(field, f"{field} must be in [-2, 2], got {value}")
    return number


def _repetition(field: str, value: Any) -> float:
    number = _number(field, value)
    if number <= 0:
        raise FieldError(field, f"{field} must be above 0, got {value}")
    return number


def _count(field: str, value: Any) -> int:
    number = _number(field, value)
    if number < 0 or not number.is_integer():
        raise FieldError(field, f"{field} must be an integer of at least 0, got {value}")
    return int(number)


def _bias(field: str, value: Any) -> dict[int, float]:
    if not isinstance(value, dict):
        raise FieldError(field, f"{field} must be an object of tokens and numbers, got {shortened(value)}")
    bias = {}
    for token, number in value.items():
        if number is None:  # a row of Parquet has every key of its column
            continue
        if not (str(token).isascii() and str(token).isdecimal()):
            raise FieldError(field, f"{field} must have token ids as keys, got {shortened(token)}")
        bias[int(token)] = _number(field, number)
        if not -100 <= bias[int(token)] <= 100:
            raise FieldError(field, f"{field} must be in [-100, 100], got {number} for token {token}")
    return bias


def _tokens(field: str, value: Any) -> list[int]:
    if not isinstance(value, list) or not value or any(type(token) is not int for token in value):
        raise FieldError(field, f"{field} must be a list of at least one token id, got {shortened(value)}")
    return value


def _words(field: str, value: Any) -> list[str | list[int]]:
    if not isinstance(value, list) or len(value) > MOST_BAD_WORDS:
        what = f"a list of at most {MOST_BAD_WORDS} strings or token lists"
        raise FieldError(field, f"{field} must be {what}, got {shortened(value)}")
    for word in value:
        if not isinstance(word, str):
            _tokens(field, word)
        elif not word.strip():
            raise FieldError(field, f"{field} must hold no empty string, got {shortened(word)}")
        if len(word) > MOST_IN_WORD:
            what = f"words of at most {MOST_IN_WORD} characters or tokens"
            raise FieldError(field, f"{field} must hold {what}, got {len(word)}")
        try:
            utf8(field, word if isinstance(word, str) else "")
        except ValueError as error:
            raise FieldError(field, str(error)) from error
    return value


# Name of ``stree.generate``, the value that asks for nothing, and what reads a value.
FIELDS: dict[str, tuple[str, Any, Callable[[str, Any], Any]]] = {
    "logit_bias": ("logit_bias", {}, _bias),
    "repetition_penalty": ("repetition_penalty", 1.0, _repetition),
    "frequency_penalty": ("frequency_penalty", 0.0, _penalty),
    "presence_penalty": ("presence_penalty", 0.0, _penalty),
    "allowed_token_ids": ("allowed_token_ids", None, _tokens),
    "bad_words": ("bad_words", [], _words),
    "min_tokens": ("min_new_tokens", 0, _count),
    "min_new_tokens": ("min_new_tokens", 0, _count),
}
RULE_FIELDS = tuple(FIELDS)
