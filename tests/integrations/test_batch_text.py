"""Where the texts of batch rows end: stop strings in new text alone, and the stop tokens of model and tokenizer.

Run: python -m pytest tests/integrations/test_batch_text.py
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from helpers.tiny_pairs import byte_fallback, writing_model

from stree.drafters import SuffixDrafter
from stree.integrations.batch_generate import RowGenerator
from stree.integrations.ray import Generator


@pytest.fixture(scope="module")
def generator() -> RowGenerator:
    """A model that continues "a" by "ж日bc", <|im_start|>, "user", <|im_end|>, "fin" and </s>, and a line by "ob"."""
    tokenizer = byte_fallback("<|im_end|>")
    ends = ["<|im_start|>", *"user", "<|im_end|>", *"fin", "</s>"]
    chains = [[*tokenizer("aж日bc")["input_ids"], *tokenizer.convert_tokens_to_ids(ends)]]
    chains += [tokenizer.convert_tokens_to_ids(names) for names in (["<0x0A>", "o", "b"], ["a", "b"])]
    lm = writing_model(tokenizer, *chains, eos_token_id=tokenizer.convert_tokens_to_ids("</s>"))
    return RowGenerator(lm, tokenizer, SuffixDrafter(), max_new_tokens=20, max_batch=4, options={"budget": 4})


def texts(generator: RowGenerator, *rows: dict[str, Any]) -> list[tuple[str, str]]:
    found = generator.run([{"prompt": "a", **row} for row in rows])
    return [(row["text"], row["finish_reason"]) for row in found]


def test_rows_end_at_the_tokenizers_own_stop_token_unless_options_name_others(generator: RowGenerator) -> None:
    assert texts(generator, {}, {"max_new_tokens": 3}) == [("ж日bcuser", "stop"), ("ж\ufffd", "length")]
    other = generator.tokenizer.convert_tokens_to_ids("n")
    named = replace(generator, options={"budget": 4, "stop_token_ids": [other]})
    assert texts(named, {}) == [("ж日bcuserfin", "stop")]
    endless = replace(generator, options={"budget": 4, "ignore_eos": True}, max_new_tokens=14)
    assert texts(endless, {}) == [("ж日bcuserf", "length")]


def test_the_text_of_a_row_does_not_hold_its_stop_string(generator: RowGenerator) -> None:
    rows: list[dict[str, Any]] = [
        {"stop": ["<|im_start|>us"]}, {"stop": ["never", "日b"]}, {"stop": ["cu"]}, {}, {"stop": ["us", "er"]},
    ]  # fmt: skip
    assert texts(generator, *rows) == [(text, "stop") for text in ("ж日bc", "ж", "ж日b", "ж日bcuser", "ж日bc")]


def test_a_stop_string_of_a_row_does_not_begin_in_its_prompt(generator: RowGenerator) -> None:
    rows = [{"prompt": "x\n", "stop": ["\nob"]}, {"prompt": "xa", "stop": ["ab"]}, {"prompt": "xa", "stop": ["bc"]}]
    assert [text for text, _ in texts(generator, *rows)] == ["obcuser", "bcuser", ""]


@pytest.mark.parametrize("kind", ["table", "arrays", "frame"])
def test_a_column_of_a_result_s_name_is_replaced(generator: RowGenerator, kind: str) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    batch = pyarrow.table({"text": ["before", "before"], "prompt": ["a", ""], "label": [5, 6]})
    if kind == "arrays":
        batch = {name: batch[name].to_numpy() for name in batch.column_names}
    elif kind == "frame":
        pytest.importorskip("pandas")
        batch = batch.to_pandas()
    found = Generator(lambda: generator)(batch)
    columns = found if isinstance(found, dict) else found.to_pydict()
    names = [*found] if isinstance(found, dict) else found.column_names
    assert sorted(names) == ["finish_reason", "label", "num_new_tokens", "prompt", "reason", "text", "token_ids"]
    assert [str(text) for text in columns["text"]] == ["ж日bcuser", "None"]
    assert [*columns["label"]] == [5, 6]
