"""What is no grammar is refused when it is made.

Run: python -m pytest tests/decode/test_grammar_made.py
"""

from __future__ import annotations

import sys
from typing import Any, cast

import pytest

from stree import Grammar

BYTES, NUMBERS, ONE = (cast(Any, value) for value in (b"a", [1], 1))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Grammar.regex("[a"), "regex cannot be read: .*unclosed character class"),
        (lambda: Grammar.regex("(?=a)b"), "regex cannot be read: .*look-around"),
        (lambda: Grammar.regex(BYTES), "regex must be a string, got b'a'"),
        (lambda: Grammar.regex("a" * 2_000_000), "regex must have at most 1048576 characters, got 2000000"),
        (lambda: Grammar.regex("\ud800"), "regex cannot be read: .*surrogates not allowed"),
        (lambda: Grammar.choice([]), r"choice must be a list of at least one string, got \[\]"),
        (lambda: Grammar.choice(["a", ""]), "choice must hold strings that are not empty, got ''"),
        (lambda: Grammar.choice("ab"), "choice must be a list of at least one string, got 'ab'"),
        (lambda: Grammar.lark('begin: "a"'), "lark cannot be read: no start rule found"),
        (lambda: Grammar.lark('root ::= "a" |)'), "lark cannot be read: "),
        (lambda: Grammar.lark("start: a\na[capture, temperature=0.7]: /b+/"), "temperature= of a rule is not sup"),
        (lambda: Grammar.lark('start: a\na[lazy, stop = ","]: /b+/'), "stop= of a rule is not supported; lazy, suf"),
        (lambda: Grammar.json_schema("{"), "json_schema is not JSON"),
        (lambda: Grammar.json_schema(NUMBERS), r"json_schema must be an object or its JSON, got \[1\]"),
        (lambda: Grammar.json_schema({"type": "text"}), "json_schema cannot be read: Invalid type: text"),
        (lambda: Grammar.json_schema({"a": {1}}), "json_schema must be made of JSON's types"),
        (lambda: Grammar.json_schema({"type": "array", "uniqueItems": True}), "Unimplemented keys: ..uniqueItems"),
        (lambda: Grammar.json_schema({"minimum": 3, "maximum": 1, "type": "integer"}), "Unsatisfiable schema"),
        (lambda: Grammar.json_schema({}, whitespace=ONE), "whitespace must be True or False, got 1"),
    ],
)
def test_what_is_no_grammar_is_refused(make: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        make()


def test_a_grammar_may_quote_the_names_of_attributes_that_are_refused() -> None:
    rules = ['start: "[stop=" a /[,stop=]+/ // [stop=]', 'a[capture, stop_capture="b", suffix=/[,stop=]/]: /b+/']
    assert Grammar.lark("\n".join(rules)).kind == "lark"


def test_without_its_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(RuntimeError, match=r"grammars need the package llguidance: pip install 'stree\[grammar\]'"):
        Grammar.regex("a")
