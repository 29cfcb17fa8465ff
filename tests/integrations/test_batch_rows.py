"""Rows of batch jobs: what is read, and what is rejected by name.

Run: python -m pytest tests/integrations/test_batch_rows.py
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.http_served import NEUTRAL, REFUSED

from stree.integrations.batch_folder import open_job
from stree.integrations.batch_rows import OWN, Row, read_rows, request_of
from stree.integrations.ray import Generator

CHAT = {"custom_id": "c", "method": "POST", "url": "/v1/chat/completions"}
TURNS = [{"role": "user", "content": "hi"}]
# What a line holds, and its id and request.
RUN: list[tuple[Any, Any, dict[str, Any]]] = [
    ({"prompt": "a"}, 0, {"prompt": "a"}),
    ({"id": "x", "prompt": "a", "label": 3, "temperature": None}, "x", {"prompt": "a"}),
    ({"id": 7, "custom_id": "y", "prompt": [1, 2]}, 7, {"prompt": [1, 2]}),
    (
        {"custom_id": "y", "prompt": "a", "max_tokens": 4, "temperature": 0.5, "top_k": 3, "seed": 9, "stop": "end"},
        "y", {"prompt": "a", "max_new_tokens": 4, "temperature": 0.5, "top_k": 3, "seed": 9, "stop": ["end"]},
    ),
    ({**CHAT, "body": {"model": "m", "messages": TURNS, "max_completion_tokens": 2}}, "c",
     {"messages": TURNS, "max_new_tokens": 2}),
    ({**CHAT, "body": {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}], "n": 1}}, "c",
     {"messages": TURNS}),
    ({"id": 3.0, "prompt": "a", "max_tokens": 2.0, "seed": 1.0}, 3, {"prompt": "a", "max_new_tokens": 2, "seed": 1}),
    ({"body": json.dumps({"prompt": "a", "top_p": 0.5, "logit_bias": {}})}, 0, {"prompt": "a", "top_p": 0.5}),
    ({"prompt": "a", "logit_bias": {"5": 2, "6": None}, "presence_penalty": 0, "bad_words": ["b"], "min_tokens": 2}, 0,
     {"prompt": "a", "logit_bias": {5: 2.0}, "bad_words": ["b"], "min_new_tokens": 2}),
]  # fmt: skip
# A value of every field that a request has beside its prompt.
FIELDS: dict[str, Any] = {
    "max_new_tokens": 3,
    "max_completion_tokens": 3,
    "max_tokens": 3,
    "temperature": 0.5,
    "top_k": 2,
    "top_p": 0.5,
    "min_p": 0.1,
    "seed": 4,
    "stop": "end",
    "chat_template_kwargs": {"a": [1]},
    "reasoning_effort": "low",
    "enable_thinking": False,
    "logit_bias": {"5": 2},
    "repetition_penalty": 1.5,
    "frequency_penalty": 1,
    "presence_penalty": 1,
    "allowed_token_ids": [1],
    "bad_words": ["b", [2]],
    "min_tokens": 2,
    "min_new_tokens": 2,
    "response_format": {"type": "json_object"},
    "structured_outputs": {"choice": ["a"]},
    "guided_json": False,
    "guided_regex": "a+",
    "guided_choice": ["a"],
    "guided_grammar": 'start: "a"',
}
# A line that cannot be run, and a part of the reason.
REJECTED = [
    ('{"prompt": ', "line 1 is not JSON"),
    (b'{"prompt": "\xff"}', "line 1 is no UTF-8 text"),
    ("[1]", "a row must be an object, got list"),
    ('{"text": "a"}', "a row must have a prompt or messages, got neither"),
    ('{"prompt": "a", "messages": []}', "got both"),
    ('{"prompt": 3}', "prompt must be a text or a list of token ids, got 3"),
    ('{"prompt": ["a", "b"]}', "prompt must be a text"),
    ('{"prompt": "\\ud800"}', "prompt is no UTF-8 text"),
    ('{"id": [1], "prompt": "a"}', "id must be a string or an integer, got [1]"),
    ('{"messages": "a"}', "messages must be a list of turns"),
    ('{"messages": [{"content": "a"}]}', "must be an object with a role"),
    ('{"messages": [{"role": "user", "content": 3}]}', "the content of a turn must be a text, got 3"),
    ('{"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}', "type 'input_audio' is not supported"),
    ('{"messages": [{"role": "tool", "content": "", "name": "\\ud800"}]}', "messages is no UTF-8 text"),
    ('{"prompt": "a", "temperature": "hot"}', "temperature must be a number, got 'hot'"),
    ('{"prompt": "a", "temperature": -1}', "temperature must be finite and not negative"),
    ('{"prompt": "a", "top_p": 2}', "top_p must be in (0, 1], got 2"),
    ('{"prompt": "a", "top_k": 1.5}', "top_k must be an integer, got 1.5"),
    ('{"prompt": "a", "max_tokens": 0}', "max_tokens must be at least 1, got 0"),
    ('{"prompt": "a", "max_tokens": 1.5}', "max_tokens must be an integer, got 1.5"),
    ('{"prompt": "a", "seed": 1.5}', "seed must be an integer, got 1.5"),
    ('{"prompt": "a", "stop": ["b", 3]}', "stop must be a string or a list of at most 16 strings"),
    ('{"prompt": "a", "repetition_penalty": 0}', "repetition_penalty must be above 0"),
    ('{"body": 3}', "body must be an object, got int"),
    ('{"body": {"prompt": "a", "n": 2}}', "n is not supported, got 2"),
    ('{"body": {"prompt": "a", "ignore_eos": true}}', "ignore_eos is not supported, got True"),
    ('{"body": {"prompt": "a", "stream": true}}', "stream is not supported, got True"),
    ('{"body": {"prompt": "a", "logprobs": 0}}', "logprobs is not supported, got 0"),
    *((json.dumps({"body": {"prompt": "a", name: value}}), message) for name, value, message in REFUSED),
    ('{"body": {"prompt": "a"}, "method": "GET"}', "method must be POST, got 'GET'"),
    ('{"body": {"prompt": "a"}, "url": "/v1/embeddings"}', "url must be one of /v1/completions"),
    ('{"body": {"prompt": "a"}, "url": "/v1/chat/completions"}', "must have messages"),
]


def rows_of(folder: Path, *lines: Any) -> list[Row]:
    path = folder / "input.jsonl"
    path.write_bytes(b"\n".join(line if isinstance(line, bytes) else str(line).encode() for line in lines))
    return read_rows(path)


@pytest.mark.parametrize(("line", "id", "request_"), RUN)
def test_a_row_is_read(line: Any, id: Any, request_: Any, tmp_path: Path) -> None:
    assert rows_of(tmp_path, json.dumps(line)) == [Row(0, id, request_)]


def test_every_field_of_a_request_is_one_when_it_is_read_again() -> None:
    assert FIELDS.keys() == OWN - {"model", "prompt", "messages"}
    for name, value in FIELDS.items():
        request = request_of({"messages": TURNS, name: value})
        assert request != {"messages": TURNS}, name
        assert request_of({"body": json.dumps(request)}) == request, name  # as workers of Ray read it


@pytest.mark.parametrize(("line", "reason"), REJECTED)
def test_a_row_that_cannot_be_run_is_named_and_the_others_are_read(line: Any, reason: str, tmp_path: Path) -> None:
    bad, good = rows_of(tmp_path, line, '{"prompt": "a"}')
    assert bad.reason is not None and reason in bad.reason and "\n" not in bad.reason and bad.request is None
    assert good == Row(1, 1, {"prompt": "a"})


@pytest.mark.parametrize(("name", "value"), NEUTRAL)
def test_a_body_may_have_what_changes_no_text(name: str, value: Any, tmp_path: Path) -> None:
    row = rows_of(tmp_path, json.dumps({**CHAT, "body": {"messages": TURNS, name: value}}))[0]
    plain = {"messages": TURNS} | ({name: value} if name in ("top_k", "min_p") else {})
    assert (row.reason, row.request) == (None, plain)


def test_the_second_row_of_an_id_is_rejected_and_empty_lines_do_not_count(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, '{"prompt": "a", "id": 7}', "", '{"prompt": "b"}', '{"prompt": "c", "id": 7}')
    assert [(row.number, row.id, row.reason) for row in rows] == [
        (0, 7, None), (1, 1, None), (2, 7, "an earlier row has the id 7"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("ids", "expected"),
    [([2, None, None], [2, 1, "row-2"]), ([None, 0], ["row-0", 0]), (["row-1", 1.0, 0, None, 3, "row-3"], None)],
)
def test_a_row_without_an_id_rejects_no_row_that_has_one(ids: list[Any], expected: Any, tmp_path: Path) -> None:
    rows = rows_of(tmp_path, *(json.dumps({"prompt": "a", "id": own}) for own in ids))
    assert [row.id for row in rows] == (expected or ["row-1", 1, 0, "row-3-", 3, "row-3"])
    assert not any(row.reason for row in rows)


def test_a_line_that_is_no_row_is_reported_by_its_line_and_under_no_row_s_id(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, '{"prompt": "a", "id": 1}', "", '{"pro', "3", '{"prompt": "a", "id": true}')
    with open_job(tmp_path / "out", {}) as job:
        assert job.pending(rows) == [Row(0, 1, {"prompt": "a"})]
    lines = (tmp_path / "out" / "rejected.jsonl").read_text().splitlines()
    found = [(record["id"], record["row"], record["reason"]) for record in map(json.loads, lines)]
    assert [own for own, _, _ in found] == [None] * 3 and [row for _, row, _ in found] == [1, 2, 3]
    assert found[0][2].startswith("line 3 is not JSON")
    assert found[1][2] == "line 4: a row must be an object, got int"


def test_parquet_is_read_and_one_that_is_torn_or_without_prompts_is_refused(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path = tmp_path / "rows.parquet"
    columns = {"id": ["x", None], "prompt": ["a", None], "messages": [None, TURNS], "max_tokens": [None, 3]}
    parquet.write_table(pyarrow.table(columns), path)
    chat = {"messages": TURNS, "max_new_tokens": 3}
    assert read_rows(path) == [Row(0, "x", {"prompt": "a"}), Row(1, 1, chat)]
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ValueError, match=r"cannot read .*rows\.parquet as Parquet: "):
        read_rows(path)
    parquet.write_table(pyarrow.table({"text": ["a"]}), path)
    with pytest.raises(ValueError, match=r"rows\.parquet has none of the columns prompt, messages, body; it has text"):
        read_rows(path)


def test_keys_of_other_rows_are_absent_from_the_objects_of_a_row_of_arrow(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    def chat(**arguments: Any) -> dict[str, Any]:
        call = {"function": {"name": "f", "arguments": arguments}}
        return {"messages": [{"role": "assistant", "content": None, "tool_calls": [call]}]}

    lines: list[dict[str, Any]] = [
        {"prompt": "a", "guided_json": {"properties": {"n": {"type": "integer"}}}},
        {"prompt": "b", "guided_json": {"properties": {"m": {"enum": ["x"]}}}},
        chat(city="Oslo") | {"chat_template_kwargs": {"brief": True}},
        chat(days=2) | {"chat_template_kwargs": {"style": "warm"}},
    ]
    table = pyarrow.Table.from_pylist([dict.fromkeys(OWN) | line for line in lines])
    parquet.write_table(table, tmp_path / "a.parquet")
    assert [row.request for row in read_rows(tmp_path / "a.parquet")] == lines
    found: list[Any] = []

    def run(requests: list[Any]) -> list[Any]:
        found[:] = requests
        return requests

    load: Any = partial(SimpleNamespace, check=list, run=run)
    for batch in (table, {name: table[name].to_numpy() for name in OWN}):  # as map_batches passes them
        Generator(load)(batch)
        assert found == lines
