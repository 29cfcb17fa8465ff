"""Prompt files of every format, and what is said of bad ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stree.bench.prompts import parse_suites, read_suite


def write_lines(path: Path, *records: dict[str, Any] | str) -> Path:
    lines = [record if isinstance(record, str) else json.dumps(record) for record in records]
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("name", "fields", "turns"),
    [
        ("humaneval", {"task_id": "HumanEval/0", "prompt": "def f():\n", "test": "x"}, ("def f():\n",)),
        ("gsm8k", {"question": "How many?", "answer": "3"}, ("Question: How many?\nAnswer:",)),
        ("mt_bench", {"question_id": 81, "category": "w", "turns": ["Compose.", "Rewrite."]}, ("Compose.", "Rewrite.")),
        ("spec_bench", {"question_id": 1, "category": "rag", "turns": ["One."]}, ("One.",)),
        ("mine", {"prompt": "free"}, ("free",)),
        ("mine", {"text": "free"}, ("free",)),
    ],
)
def test_a_prompt_is_read_from_every_format(
    tmp_path: Path, name: str, fields: dict[str, Any], turns: tuple[str, ...]
) -> None:
    (prompt,) = read_suite(name, write_lines(tmp_path / "suite.jsonl", fields))
    assert (prompt.suite, prompt.index, prompt.turns) == (name, 0, turns)


def test_a_text_file_holds_a_prompt_a_paragraph_and_the_limit_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("one\nline two\n\n \ntwo\n\nthree\n", encoding="utf-8")
    assert [prompt.turns for prompt in read_suite("text", path, 2)] == [("one\nline two",), ("two",)]


@pytest.mark.parametrize(
    ("name", "line", "message"),
    [
        ("mine", '{"prompt": ', r"suite 'mine': line 2 of suite\.jsonl: not JSON"),
        (
            "mine",
            '{"other": 1}',
            r"a record needs one of the fields prompt, question, turns, text, got other",
        ),
        ("mine", r'{"text": "a\ud800"}', r"line 2 .*: a prompt must be text of whole characters: .*surrogates"),
        ("humaneval", '{"question": "x"}', r"line 2 .*: a record needs the field prompt, got question"),
        ("mt_bench", '{"turns": []}', r"line 2 .*: turns must be a list of texts, got \[\]"),
        ("mine", '{"prompt": " "}', r"line 2 .*: a prompt must be a text that is not empty, got ' '"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, name: str, line: str, message: str) -> None:
    good = {"turns": ["x"]} if name == "mt_bench" else {"prompt": "x"}
    with pytest.raises(ValueError, match=message):
        read_suite(name, write_lines(tmp_path / "suite.jsonl", good, line))


def test_a_file_without_prompts_is_refused(tmp_path: Path) -> None:
    for file in ("empty.jsonl", "empty.txt"):
        with pytest.raises(ValueError, match=f"suite 'mine': {file} holds no prompts"):
            read_suite("mine", write_lines(tmp_path / file, "", ""))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("FILE", "a suite must be NAME=FILE, got"),
        ("a=FILE,a=FILE", "suite 'a' is given twice"),
        ("$a_$=FILE", r"a suite's name must be letters, digits, - and _, .* got '\$a_\$'"),
        ("a=FILE,_b=FILE", "got '_b'"),  # a plot's legend leaves such a name out
        ("a=FILE-that-is-not", "suite 'a': there is no file"),
    ],
)
def test_a_bad_suite_option_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = write_lines(tmp_path / "one, two.jsonl", {"text": "x"})
    assert parse_suites(f"a={path},b={path}") == {"a": path, "b": path}
    with pytest.raises(ValueError, match=message):
        parse_suites(text.replace("FILE", str(path)))
