"""Grammars of requests: at the server, in the engine and in rows of a batch.

Run: python -m pytest tests/serving/test_grammars.py
"""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from helpers.calls import error_of, run_json
from helpers.captured import captured, launched, near_drafter
from helpers.fast_cases import slow_unless
from helpers.grammars import END, letters_tokenizer
from helpers.http_served import PROMPT, Served
from helpers.tiny_models import tiny_model

import stree
from stree import Grammar, Sampling
from stree.decode.grammar import CompiledGrammar
from stree.drafters import SuffixDrafter
from stree.grammar_fields import grammar_of
from stree.integrations.batch_generate import RowGenerator
from stree.integrations.batch_rows import request_of
from stree.request_fields import FieldError

SCHEMA: dict[str, Any] = {
    "type": "object", "properties": {"ok": {"type": "boolean"}, "n": {"enum": [1, 2, 3]}}, "required": ["ok", "n"],
    "additionalProperties": False,
}  # fmt: skip
FORMAT: dict[str, Any] = {"type": "json_schema", "json_schema": {"name": "ok", "schema": SCHEMA, "strict": True}}
ASKED: list[tuple[dict[str, Any], Grammar]] = [
    ({"response_format": FORMAT}, Grammar.json_schema(SCHEMA)),
    ({"structured_outputs": {"json": SCHEMA}}, Grammar.json_schema(SCHEMA)),
    ({"guided_json": json.dumps(SCHEMA)}, Grammar.json_schema(SCHEMA)),
    ({"guided_regex": "[0-9]{3}"}, Grammar.regex("[0-9]{3}")),
    ({"structured_outputs": {"regex": "[0-9]{3}", "choice": None}}, Grammar.regex("[0-9]{3}")),
    ({"guided_choice": ["apples", "pears"]}, Grammar.choice(["apples", "pears"])),
    ({"guided_grammar": 'start: "a" | "b" start'}, Grammar.lark('start: "a" | "b" start')),
]
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": {"type": "xml"}}, "response_format", "must be of type text, json_object or json_schema"),
    ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema must be an object with a schema"),
    ({"response_format": "json"}, "response_format", "valid dictionary|must be an object"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "text"}}}},
        "response_format",
        "response_format: json_schema cannot be read: Invalid type: text",
    ),
    ({"guided_regex": "(a"}, "guided_regex", "guided_regex: regex cannot be read"),
    ({"guided_regex": 5}, "guided_regex", "valid string|must have a string"),
    ({"guided_choice": []}, "guided_choice", "choice must be a list of at least one string"),
    ({"guided_choice": [3]}, "guided_choice", "valid string|must hold strings"),
    ({"guided_grammar": "s: 3"}, "guided_grammar", "guided_grammar: lark cannot be read"),
    ({"guided_json": "{"}, "guided_json", "guided_json: json_schema is not JSON"),
    ({"guided_regex": ""}, "guided_regex", "grammar allows no text: the regex fits nothing, or the empty text alone"),
    ({"structured_outputs": {}}, "structured_outputs", "must have one of json, regex, choice, grammar"),
    ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag", "is not known"),
    ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs", "must ask for one grammar, got 2"),
    ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice", "must ask for one grammar, got 2"),
    ({"guided_json": {"type": "array", "uniqueItems": True}}, "guided_json", "Unimplemented keys"),
]


@pytest.mark.parametrize("number", slow_unless(lambda number: number % 2 == 0, range(len(ASKED))))
def test_completions_are_the_texts_of_generate(number: int, served: Served) -> None:
    fields, grammar = ASKED[number]
    body = {"model": "tiny", "prompt": PROMPT, "temperature": 0, "max_tokens": 40}
    choice = served.post("/v1/completions", {**body, **fields}).json()["choices"][0]
    assert choice["text"] == served.alone(PROMPT, max_new_tokens=40, grammar=grammar, tokenizer=served.tokenizer)
    assert choice["finish_reason"] == "stop"


@pytest.mark.slow
def test_a_client_gets_a_document_whole_and_streamed(served: Served) -> None:
    options: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "go"}], "max_tokens": 60}
    chat = served.client.chat.completions
    for seed in range(3):
        drawn: dict[str, Any] = {**options, "temperature": 0.8, "seed": seed, "response_format": FORMAT}
        whole = chat.create(**drawn).choices[0]
        assert whole.finish_reason == "stop" and whole.message.content is not None
        jsonschema.validate(json.loads(whole.message.content), SCHEMA)
        chunks = list(chat.create(**drawn, stream=True))
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.message.content
    text = chat.create(**options, response_format={"type": "json_object"}, temperature=0).choices[0].message.content
    assert text is not None and text.startswith("{")


def test_bad_grammars_are_answered_by_error_objects(served: Served) -> None:
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 4}
    for fields, param, message in REFUSED:
        refused = served.post("/v1/completions", {**body, **fields})
        error = refused.json()["error"]
        assert refused.status_code == 400, fields
        assert param in str(error["param"]), (fields, error)
        with pytest.raises(ValueError, match=message):
            raise ValueError(error["message"])


LETTERS = letters_tokenizer()
GRAMMARS = [Grammar.regex("(ab|c){1,4}a?"), None, Grammar.regex("[ab]{2}c{0,3}(ab)?"), Grammar.choice(["cab", "b"])]
PROMPTS = [[5, 6, 7, 8], [3, 4], [9, 9, 2], [8]]


def requested(engine: stree.Engine, sampling: Sampling) -> list[list[int]]:
    """Submit a request for each prompt."""
    given: dict[str, Any] = {"tokenizer": LETTERS, "stop_token_ids": [END], "max_new_tokens": 9, "sampling": sampling}
    pairs = zip(PROMPTS, GRAMMARS, strict=True)
    handles = [engine.submit(prompt, grammar=grammar, **given) for prompt, grammar in pairs]
    return [handle.result(60).new_tokens[0] for handle in handles]


def alone(sampling: Sampling) -> list[list[int]]:
    """Generate for each prompt alone, without trees."""
    given: dict[str, Any] = {"tokenizer": LETTERS, "stop_token_ids": [END], "max_new_tokens": 9, "sampling": sampling}
    pairs = zip(PROMPTS, GRAMMARS, strict=True)
    return [
        stree.generate(launched(), [prompt], "none", grammar=grammar, **given).new_tokens[0]
        for prompt, grammar in pairs
    ]


def test_tokens_that_a_grammar_names_by_number_are_drawn_by_trees_too() -> None:
    tokens = [3, 1, 2, 2, 3, 1, 1, 2]
    grammar = Grammar.lark("start: " + " ".join(f"<[{token}]>" for token in tokens))
    given: dict[str, Any] = {"tokenizer": LETTERS, "stop_token_ids": [], "max_new_tokens": len(tokens)}
    for sampling in (Sampling(), Sampling(0.9)):
        out = stree.generate(launched(), [[5, 6, 7, 8]], near_drafter(), grammar=grammar, sampling=sampling, **given)
        assert out.new_tokens == [tokens] and out.stats["steps"] < len(tokens) - 1


@pytest.mark.parametrize("is_captured", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_requests_of_an_engine_get_the_texts_that_they_get_alone(
    is_captured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = [alone(sampling) for sampling in (Sampling(), Sampling(0.9))]
    lm = captured(monkeypatch) if is_captured else launched()
    with stree.Engine(lm, near_drafter(), budget=8, max_batch=3, max_length=64, verifier="match") as engine:
        for _ in range(2):
            assert [requested(engine, sampling) for sampling in (Sampling(), Sampling(0.9))] == expected


def test_a_grammar_that_cannot_be_followed_ends_its_own_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    mask, bad = CompiledGrammar.mask, frozenset({END, 7})

    def failing(grammar: CompiledGrammar, matcher: Any) -> Any:
        if grammar.ends == bad and len(matcher.compute_ff_tokens()) == 0 and matcher.is_accepting():
            raise ValueError("grammar cannot be followed: too complex")
        return mask(grammar, matcher)

    monkeypatch.setattr(CompiledGrammar, "mask", failing)
    monkeypatch.setattr(type(launched()), "eos_token_ids", frozenset({7}), raising=False)
    given: dict[str, Any] = {"tokenizer": LETTERS, "grammar": Grammar.regex("[abc]{2}(a|b)*"), "max_new_tokens": 9}
    with stree.Engine(launched(), SuffixDrafter(), budget=4, max_batch=3, max_length=64) as engine:
        other = engine.submit(PROMPTS[0], stop_token_ids=[END], **given)
        failed = engine.submit(PROMPTS[1], stop_token_ids=[END, 7], **given)
        with pytest.raises(stree.GenerationError, match="the request failed: grammar cannot be followed: too complex"):
            failed.result(60)
        assert failed.finish_reason == "error" and len(other.result(60).new_tokens[0]) > 2
    out = stree.generate(launched(), PROMPTS[:1], stop_token_ids=[END, 7], **given)
    assert out.stats["finish_reasons"] == ["error: grammar cannot be followed: too complex"]


@pytest.mark.slow
def test_rows_of_a_batch_have_grammars_of_their_own(served: Served) -> None:
    generator = RowGenerator(served.engine.lm, served.tokenizer, SuffixDrafter(), max_new_tokens=40)
    asked = ASKED[::3]
    bodies = [{"body": {"prompt": PROMPT, **fields}} for fields, _ in asked] + [{"prompt": PROMPT}]
    rows = [request_of(json.loads(json.dumps(body))) for body in bodies]
    found = generator.run([*rows, {"prompt": PROMPT, "guided_regex": "(a"}])
    for row, (_, grammar) in zip(found, asked, strict=False):
        assert row["text"] == served.alone(PROMPT, max_new_tokens=40, grammar=grammar, tokenizer=served.tokenizer)
    assert found[-2]["text"] == served.alone(PROMPT, max_new_tokens=40)
    assert found[-1]["reason"].startswith("regex cannot be read")
    for fields, field, _ in REFUSED[:2]:
        with pytest.raises(FieldError) as caught:
            grammar_of(fields)
        assert caught.value.field == field


@pytest.mark.slow
def test_the_command_continues_by_a_schema_or_an_expression(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "schema.json"
    file.write_text(json.dumps(SCHEMA), encoding="utf-8-sig")
    report = run_json(capsys, "generate", "x = ", "--json-schema", str(file), "--max-new-tokens", "60")
    jsonschema.validate(json.loads(report["text"].removeprefix("x = ")), SCHEMA)
    report = run_json(capsys, "generate", "x = ", "--regex", "[0-9]{3}", "--drafter", "suffix")
    assert report["text"].removeprefix("x = ").isdigit() and report["finish_reason"] == "stop"
    assert "cannot read --json-schema" in error_of(capsys, "generate", "x", "--json-schema", str(tmp_path / "none"))
    assert "regex cannot be read" in error_of(capsys, "generate", "x", "--regex", "(a")


CANNOT_WRITE = "grammar cannot be followed: the tokenizer has no token for what must follow"


def test_a_row_that_cannot_be_followed_is_no_result_and_ends_no_other() -> None:
    generator = RowGenerator(launched(), LETTERS, SuffixDrafter(), max_new_tokens=9)
    rows: Any = [
        {"prompt": PROMPTS[0], "logit_bias": {"3": 50.0}, "guided_regex": one} for one in ("(a|cx)b", "[ab]{2}c")
    ]
    found = generator.run([request_of(row) for row in rows])
    assert found[0] == {"reason": CANNOT_WRITE} and found[1]["token_ids"][2:] == [3]


def test_the_command_says_that_a_grammar_cannot_be_followed(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    LETTERS.save_pretrained(tmp_path)
    tiny_model("mamba2").save_pretrained(tmp_path)
    asked = ("--target", str(tmp_path), "--logit-bias", '{"3": 50}', "--regex", "(a|cx)b")
    assert f"stree: error: {CANNOT_WRITE}" in error_of(capsys, "generate", "ab", *asked)
