"""JSON schemas with the bundled pair: every text is a valid document, and greedy ones are those of transformers.

Run: python -m pytest -m slow tests/decode/test_grammar_schemas.py
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import jsonschema
import pytest
import torch
from helpers.fast_cases import slow_unless
from llguidance import LLMatcher
from llguidance.hf import from_tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM, LogitsProcessorList

import stree
from stree import Grammar, Sampling
from stree.drafters import ModelDrafter
from stree.inputs import load_tokenizer, locate

pytestmark = pytest.mark.slow


def record(*required: str, **properties: Any) -> dict[str, Any]:
    """Return the schema of an object without other properties."""
    return {
        "type": "object", "properties": properties, "required": [*(required or properties)],
        "additionalProperties": False,
    }  # fmt: skip


NAME = {"type": "string", "maxLength": 8}
DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}
SCHEMAS: dict[str, dict[str, Any]] = {
    "person": record(name=NAME, age={"type": "integer", "minimum": 0, "maximum": 120}),
    "optional": record("id", id=DIGIT, note=NAME, flag={"type": "boolean"}),
    "enum": record(kind={"enum": ["red", "green", 7, None, True]}),
    "const": record(version={"const": "1.0"}, ok={"const": True}),
    "array": {"type": "array", "items": DIGIT, "minItems": 2, "maxItems": 5},
    "strings": {"type": "array", "items": NAME, "minItems": 1, "maxItems": 3},
    "tuple": {"type": "array", "prefixItems": [DIGIT, NAME, {"type": "null"}], "items": False, "minItems": 3},
    "nested": record(a=record(b=record(c=record(d={"type": "boolean"})))),
    "any-of": {"anyOf": [record(x=DIGIT), record(y=NAME), {"type": "null"}]},
    "one-of": record(value={"oneOf": [{"type": "boolean"}, {"type": "integer", "minimum": 10, "maximum": 99}]}),
    "reference": {
        "$defs": {"point": record(x=DIGIT, y=DIGIT)}, "type": "array", "items": {"$ref": "#/$defs/point"},
        "minItems": 1, "maxItems": 2,
    },
    "recursive": {
        "$defs": {"tree": record("v", v=DIGIT, kid={"$ref": "#/$defs/leaf"}), "leaf": record("v", v=DIGIT)},
        "$ref": "#/$defs/tree",
    },
    "pattern": record(zip={"type": "string", "pattern": "^[0-9]{5}$"}, key={"type": "string", "pattern": "^[A-F]{3}$"}),
    "date": record(day={"type": "string", "format": "date"}, host={"type": "string", "format": "ipv4"}),
    "number": record(ratio={"type": "number", "minimum": 0, "maximum": 1, "multipleOf": 0.25}),
    "types": record(v={"type": ["integer", "null", "boolean"], "minimum": -5, "maximum": 5}),
    "all-of": {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 8}]},
    "unicode": record(**{"größe": DIGIT, "日": {"enum": ["月", "é\"\\"]}}),
    "map": {"type": "object", "patternProperties": {"^[a-c]$": DIGIT}, "additionalProperties": False},
    "matrix": {"type": "array", "items": {"type": "array", "items": DIGIT, "maxItems": 2}, "maxItems": 3},
}  # fmt: skip
PROMPTS = ["x = json.loads('", "The answer, as JSON, is "]
NEW = 160


@cache
def tokenizer() -> Any:
    return load_tokenizer(locate("bundled", "target"))


@cache
def pair() -> tuple[stree.TreeLM, ModelDrafter]:
    target, drafter = (
        stree.TreeLM.from_pretrained(locate("bundled", role), device="cpu", dtype="float32")
        for role in ("target", "drafter")
    )
    return target, ModelDrafter(drafter)


def generated(schema: dict[str, Any], sampling: Sampling, **options: Any) -> list[list[int]]:
    """Return the new tokens after the prompts; every one is a valid document."""
    lm, drafter = pair()
    grammar = Grammar.json_schema(schema, whitespace=False)
    prompts = [tokenizer()(prompt)["input_ids"] for prompt in PROMPTS]
    out = stree.generate(
        lm, prompts, drafter, grammar=grammar, tokenizer=tokenizer(), max_new_tokens=NEW, sampling=sampling,
        **{"budget": 16, **options},
    )  # fmt: skip
    assert out.stats["finish_reasons"] == ["stop"] * 2
    for new in out.new_tokens:
        document = tokenizer().decode(new, skip_special_tokens=True)
        jsonschema.validate(json.loads(document), schema, format_checker=jsonschema.FormatChecker())
    return out.new_tokens


@cache
def plain_model() -> Any:
    return AutoModelForCausalLM.from_pretrained(locate("bundled", "target"), dtype=torch.float32).eval()


def plain(schema: dict[str, Any]) -> list[list[int]]:
    """Return the texts of transformers' own generate, whose masks come of a new matcher for every token."""
    tokens, eos = from_tokenizer(tokenizer()), tokenizer().eos_token_id
    source = LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_flexible": False})
    texts = []
    for prompt in PROMPTS:
        ids = tokenizer()(prompt, return_tensors="pt")["input_ids"]

        def exclude(text: Tensor, logits: Tensor, length: int = ids.shape[1]) -> Tensor:
            matcher = LLMatcher(tokens, source)
            assert matcher.consume_tokens(text[0, length:].tolist())
            allowed = torch.frombuffer(bytearray(matcher.compute_logit_bias()), dtype=torch.uint8) > 0
            return logits.masked_fill(~allowed, -torch.inf)

        out = plain_model().generate(
            ids, do_sample=False, max_new_tokens=NEW, eos_token_id=eos, logits_processor=LogitsProcessorList([exclude])
        )
        texts.append([token for token in out[0, ids.shape[1] :].tolist() if token != eos])
    return texts


@pytest.mark.parametrize(
    "name", slow_unless(lambda _: False, SCHEMAS, in_ci=lambda name: [*SCHEMAS].index(name) % 2 == 0)
)
def test_every_text_is_a_valid_document(name: str) -> None:
    generated(SCHEMAS[name], Sampling(0.8), seed=3)
    found = generated(SCHEMAS[name], Sampling())
    expected = plain(SCHEMAS[name])
    assert [[token for token in new if token != tokenizer().eos_token_id] for new in found] == expected


@pytest.mark.parametrize("name", ["person", "array", "any-of", "pattern"])
def test_under_match_it_is_the_text_of_plain_decoding(name: str) -> None:
    sampling = Sampling(0.8)
    expected = generated(SCHEMAS[name], sampling, budget=1)
    assert generated(SCHEMAS[name], sampling, verifier="match") == expected
