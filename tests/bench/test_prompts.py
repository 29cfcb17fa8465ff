"""Prompt files of every format, and what is said of bad ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stree.bench.plan import read_suites
from stree.bench.prompts import PLACEHOLDER, parse_suites, read_categories, read_suite


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
        ("mine", '{"other": 1}', r"a record needs one of the fields prompt, question, turns, text, got other"),
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


SPEED = [
    {
        "question_id": str(number),
        "category": category,
        "sub_category": None,
        "turns": turns,
        "multiturn": len(turns) > 1,
    }
    for number, (category, turns) in enumerate(
        [("coding", ["a"]), ("RAG", ["b", "c"]), ("coding", ["d"]), ("coding", ["e"]), ("low entropy", ["f"])]
    )
]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_speed_bench_is_a_suite_a_category(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"test.{kind}"
    if kind == "parquet":
        pyarrow = pytest.importorskip("pyarrow")
        pytest.importorskip("pyarrow.parquet").write_table(pyarrow.Table.from_pylist(SPEED), path)
    else:
        write_lines(path, *SPEED)
    found = read_categories("speed_bench_1k", path, 2)
    assert {name: [prompt.turns for prompt in prompts] for name, prompts in found.items()} == {
        "speed_bench_1k-coding": [("a",), ("d",)],
        "speed_bench_1k-rag": [("b", "c")],
        "speed_bench_1k-low_entropy": [("f",)],
    }
    assert [prompt.index for prompt in found["speed_bench_1k-coding"]] == [0, 2]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"category": "rag"}, r"record 1 of test\.jsonl: turns must be a list of texts, got None"),
        ({"turns": ["x"]}, "a prompt must be a text that is not empty, got None"),
        ({"category": "rag", "turns": [f"{PLACEHOLDER} USING ..."]}, r"it has no text yet; run .*prepare_data\.py"),
    ],
)
def test_a_record_of_speed_bench_without_a_text_is_named(tmp_path: Path, record: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_categories("speed_bench", write_lines(tmp_path / "test.jsonl", record))
    (tmp_path / "test.parquet").write_bytes(b"PAR1")
    with pytest.raises(ValueError, match=r"needs the package pyarrow|cannot read .*test\.parquet as Parquet"):
        read_categories("speed_bench", tmp_path / "test.parquet")


@pytest.mark.parametrize("name", ["mine", "speed_bench"])
def test_a_file_of_another_encoding_is_named(tmp_path: Path, name: str) -> None:
    path = tmp_path / "test.jsonl"
    path.write_text(json.dumps({"turns": ["x"], "category": "rag"}), encoding="utf-16")
    with pytest.raises(ValueError, match=rf"suite '{name}': test\.jsonl is not UTF-8 text"):
        read_categories(name, path)


def test_the_bundled_suites_have_ten_prompts_each_and_two_to_tune_on() -> None:
    suites = read_suites(parse_suites("bundled"), 10)
    assert [suite.name for suite in suites] == ["code", "mathematics", "chat"]
    assert all(len(suite.prompts) == 10 and len(suite.held_out) == 2 and suite.is_held_out for suite in suites)
    assert len({prompt.turns for suite in suites for prompt in (*suite.prompts, *suite.held_out)}) == 36
    assert max(len(prompt.turns) for prompt in suites[2].prompts) == 2


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
