"""Resumption, texts and mistakes of batch jobs, without Ray.

Run: python -m pytest tests/integrations/test_batch.py
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from helpers.calls import error_of, full_disk
from helpers.http_served import CONVERSATION, TOOL_TEMPLATE, as_a_template_has_it
from helpers.tiny_models import patched, tiny_model
from helpers.tiny_pairs import save_tiny

import stree
from stree.cli import main
from stree.cli.progress import RowProgress
from stree.drafters import SuffixDrafter
from stree.inputs import ASSETS, load_tokenizer
from stree.integrations.batch_folder import open_job
from stree.integrations.batch_generate import RowGenerator
from stree.integrations.batch_rows import Row, request_of

TURNS = [{"role": "user", "content": "hi"}]
ROWS = [Row(number, f"r{number}", {"prompt": "a"}) for number in range(4)] + [Row(4, "r1", reason="twice")]


def result(row: Row) -> dict[str, Any]:
    return {"row": row.number, "id": row.id, "text": "é", "reason": None}


def written(folder: Path, pattern: str = "part-*.jsonl") -> list[Any]:
    return [
        json.loads(line)["id"] for path in sorted(folder.glob(pattern)) for line in path.read_text().split("\n")[:-1]
    ]


@pytest.mark.parametrize("torn", [b"", b'{"id": "r', b"x" * 100_000], ids=["whole", "torn", "long"])
def test_an_interrupted_job_goes_on_with_the_rows_that_have_no_result(torn: bytes, tmp_path: Path) -> None:
    with open_job(tmp_path / "out", {"seed": 1}) as job:
        assert job.pending(ROWS) == ROWS[:4]
        job.add([result(ROWS[2])])
    for name in ("part-00000.jsonl", "rejected.jsonl"):
        with (tmp_path / "out" / name).open("ab") as file:
            file.write(torn)
    with open_job(tmp_path / "out", {"seed": 1}) as job:
        assert [row.id for row in job.pending(ROWS)] == ["r0", "r1", "r3"]
        job.add([result(ROWS[1]), {"row": 3, "id": "r3", "reason": "too long"}])
        job.add([result(ROWS[0])])
    with open_job(tmp_path / "out", {"seed": 1}) as job:
        assert job.pending(ROWS) == []
    assert written(tmp_path / "out") == ["r2", "r1", "r0"]
    assert written(tmp_path / "out", "rejected.jsonl") == ["r1", "r3"]


def test_a_folder_of_another_job_or_of_something_else_or_in_use_is_refused(tmp_path: Path) -> None:
    def refusal(folder: Path, **settings: Any) -> str:
        with pytest.raises(ValueError) as error, open_job(folder, {"seed": 1, **settings}):
            pass
        return str(error.value).replace(str(tmp_path), "")

    with open_job(tmp_path / "out", {"seed": 1}):
        assert refusal(tmp_path / "out").startswith("another run writes into /out")
    assert refusal(tmp_path / "out", seed=2) == (
        "/out holds another job, with seed 1 where this one has 2; choose another --out"
    )
    assert "with top_k None where this one has 3" in refusal(tmp_path / "out", top_k=3)
    assert refusal(tmp_path).startswith(" holds files that stree batch did not make")
    (tmp_path / "file").touch()
    assert refusal(tmp_path / "file") == "a folder is needed at /file, but /file is a file"
    assert refusal(Path("/proc/out")).startswith("cannot write /proc/out: ")
    for line in ("", "{}", '{"id": [1]}', '{"id": null}', '"id"', "[" * 100_000):
        (tmp_path / "out" / "part-00000.jsonl").write_text(f'{{"id": 1}}\n{line}\n')
        assert refusal(tmp_path / "out") == "line 2 of /out/part-00000.jsonl is no record of stree batch"


def test_a_full_disk_is_named_and_loses_no_row(tmp_path: Path) -> None:
    with open_job(tmp_path, {}) as job, full_disk(100), pytest.raises(ValueError, match="cannot write .*part-00000"):
        job.add(map(result, ROWS[:4]))
    assert (tmp_path / "part-00000.jsonl").stat().st_size == 100, "the line that did not fit is torn"
    with open_job(tmp_path, {}) as job:
        job.add(map(result, job.pending(ROWS)))
    assert sorted(written(tmp_path)) == ["r0", "r1", "r2", "r3"]


@pytest.fixture(scope="module")
def generator(tmp_path_factory: pytest.TempPathFactory) -> RowGenerator:
    tokenizer = load_tokenizer(save_tiny(tmp_path_factory.mktemp("target")))
    lm = patched(tiny_model("mamba2", eos_token_id=0))
    return RowGenerator(lm, tokenizer, SuffixDrafter(), max_new_tokens=5, max_batch=2, options={"budget": 4})


def test_rows_have_the_texts_of_generate_and_those_that_cannot_be_run_a_reason(generator: RowGenerator) -> None:
    requests: list[dict[str, Any]] = [
        {"prompt": "w1 w2 w3"}, {"prompt": ""}, {"prompt": [4, 5], "max_new_tokens": 3},
        {"messages": TURNS}, {"prompt": [9999]}, {"prompt": "w7", "temperature": 1.0, "seed": 3},
    ]  # fmt: skip
    found = generator.run(requests)
    reasons = [row["reason"] for row in found]
    assert reasons[1] == "the prompt is empty; every prompt needs at least one token"
    assert reasons[3] == "the target's tokenizer has no chat template"
    assert reasons[4].startswith("the prompt has token 9999, outside the vocabulary")
    assert [place for place, reason in enumerate(reasons) if reason is None] == [0, 2, 5]
    for place, prompt, limit in ((0, [1, 2, 3], 5), (2, [4, 5], 3)):
        expected = stree.generate(generator.lm, [prompt], "none", max_new_tokens=limit).sequences[0][len(prompt) :]
        text = generator.tokenizer.decode(expected, skip_special_tokens=True)
        assert (found[place]["token_ids"], found[place]["text"]) == (expected, text)
        assert found[place]["num_new_tokens"] == len(expected) and found[place]["finish_reason"] in ("length", "stop")
    sampled = [generator.run([{**requests[5], "seed": seed}])[0]["token_ids"] for seed in range(4)]
    assert len(set(map(tuple, sampled))) > 1, "the seed and the temperature are the row's own"


def test_every_field_of_a_message_reaches_the_chat_template(generator: RowGenerator) -> None:
    tokenizer = load_tokenizer(str(ASSETS / "target"))
    tokenizer.chat_template = TOOL_TEMPLATE
    lm = stree.TreeLM.from_pretrained(ASSETS / "target")
    request = request_of({"body": {"messages": CONVERSATION}})
    again = request_of({"body": json.dumps(request)})  # as workers of Ray read it
    prompt = tokenizer(as_a_template_has_it())["input_ids"]
    expected = stree.generate(lm, [prompt], "none", max_new_tokens=5).sequences[0][len(prompt) :]
    assert replace(generator, lm=lm, tokenizer=tokenizer).run([again])[0]["token_ids"] == expected


def test_a_row_may_lift_the_job_s_limit_of_tokens(generator: RowGenerator) -> None:
    limited = replace(generator, sampling=stree.Sampling(1.0, top_k=1))
    row = {"prompt": "w7", "seed": 3}
    free = generator.run([{**row, "temperature": 1.0}])[0]["token_ids"]
    assert limited.run([{**row, "top_k": -1}])[0]["token_ids"] == free
    assert limited.run([row])[0]["token_ids"] == generator.run([row])[0]["token_ids"] != free


def test_rows_have_token_rules_of_their_own(generator: RowGenerator) -> None:
    prompt, lm = [1, 2, 3], generator.lm
    plain = stree.generate(lm, [prompt], "none", max_new_tokens=5).sequences[0][3:]
    rules: list[dict[str, Any]] = [
        {}, {"bad_words": [[plain[0]]], "repetition_penalty": 1.5}, {"logit_bias": {"7": 100.0}},
        {"allowed_token_ids": [9999]},
    ]  # fmt: skip
    found = generator.run([{"prompt": prompt, **own} for own in rules])
    word = generator.run([{"prompt": prompt, **rules[1], "bad_words": [f"w{plain[0]}"]}])[0]
    own = {**rules[1], "max_new_tokens": 5}
    expected = stree.generate(lm, [prompt], "none", **own).sequences[0][3:]
    assert [row.get("token_ids") for row in found] == [plain, expected, [7] * 5, None]
    assert word["token_ids"] == expected and plain[0] not in expected
    assert found[3]["reason"] == "allowed_token_ids has token 9999, outside the vocabulary of 97"


def test_options_that_serve_no_row_are_an_error_of_the_job(generator: RowGenerator) -> None:
    generator.check()
    with pytest.raises(ValueError, match="block verification takes trees without branches"):
        replace(generator, options={"verifier": "block", "budget": 4}).check()


def test_a_row_for_which_the_model_fails_is_rejected_and_a_model_that_fails_always_ends_the_job(
    generator: RowGenerator,
) -> None:
    def processor(text: Any, logits: Any, tokens: tuple[int, ...]) -> Any:
        if text[0, 0] in tokens and text.shape[1] > 4:
            raise ArithmeticError(f"no logits for {int(text[0, 0])}")
        return logits

    requests = [{"prompt": [number, 2, 3]} for number in range(5)]
    expected = generator.run(requests)
    failing = replace(generator, options={"budget": 4, "logits_processor": partial(processor, tokens=(3,))})
    found = failing.run(requests)
    assert found[:3] + found[4:] == expected[:3] + expected[4:]
    assert found[3] == {"reason": "generation failed after 2 new tokens: no logits for 3"}
    always = replace(failing, options={"logits_processor": lambda text, logits: 1 / 0})
    with pytest.raises(ZeroDivisionError):
        always.run(requests)


class _Failing(SuffixDrafter):
    def start(self, *arguments: Any, **options: Any) -> Any:
        run: Any = super().start(*arguments, **options)
        run.propose = lambda *_, **__: 1 / 0
        return run


def test_rows_are_finished_without_a_drafter_that_fails(
    generator: RowGenerator, caplog: pytest.LogCaptureFixture
) -> None:
    requests = [{"prompt": [number, 2, 3]} for number in range(2)]
    assert replace(generator, drafter=_Failing()).run(requests) == generator.run(requests)
    assert "the drafter failed, and the rest was decoded without it: division by zero" in caplog.text


COMMANDS = {
    "input.jsonl --out out --workers 0": "workers must be at least 1, got 0",
    "input.jsonl --out out --max-batch 0": "max_batch must be at least 1, got 0",
    "input.jsonl --out out --gpus-per-worker -1": "--gpus-per-worker must be finite and not negative, got -1.0",
    "input.jsonl --out out --temperature -1": "temperature must be finite and not negative, got -1.0",
    "input.jsonl --out out --budget most": "--budget must be a number of nodes or 'auto', got 'most'",
    "input.jsonl --out out --target nowhere": "no checkpoint that transformers can read at 'nowhere'",
    "input.jsonl --out input.jsonl": "a folder is needed at input.jsonl, but input.jsonl is a file",
    "input.jsonl --out .": ". holds files that stree batch did not make; choose another --out",
    "nowhere.jsonl --out out": "cannot read nowhere.jsonl: No such file or directory",
    "torn.parquet --out out": "cannot read torn.parquet as Parquet: ",
    ". --out out": "cannot read .: Is a directory",
    "pipe --out out": "cannot read pipe: the input is read more than once, so it must be a regular file",
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_mistake_is_named_before_anything_is_written(
    command: str,
    target_folder: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if command.startswith("torn.parquet"):
        pytest.importorskip("pyarrow")
    monkeypatch.setattr("stree.integrations.ray.check_ray", lambda: None)
    monkeypatch.chdir(tmp_path)
    Path("input.jsonl").write_text('{"prompt": "w1"}\n')
    Path("torn.parquet").write_bytes(b"PAR1")
    os.mkfifo("pipe")
    words = command.split()
    error = error_of(capsys, "batch", *words, *([] if "--target" in words else ["--target", target_folder]))
    assert COMMANDS[command] in error and len(error.splitlines()) == 1, error
    assert {path.name for path in tmp_path.iterdir()} == {"input.jsonl", "torn.parquet", "pipe"}


def test_without_ray_the_command_says_what_to_install(
    target_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "input.jsonl").write_text('{"prompt": "w1"}\n{"prompt": 3}\n')
    monkeypatch.setitem(sys.modules, "ray", None)
    words = [str(tmp_path / "input.jsonl"), "--out", str(tmp_path / "out"), "--target", target_folder]
    assert "stree batch needs Ray: pip install 'stree[ray]'" in error_of(capsys, "batch", *words)
    assert not (tmp_path / "out").exists()


def test_a_job_of_rejected_rows_alone_needs_no_ray(
    target_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "input.jsonl").write_text('{"prompt": 3}\n')
    monkeypatch.setitem(sys.modules, "ray", None)
    words = ["batch", str(tmp_path / "input.jsonl"), "--out", str(tmp_path / "out"), "--target", target_folder]
    assert main(words) == 0 == main(words)
    assert written(tmp_path / "out", "rejected.jsonl") == [0]


def test_progress_in_a_file_is_a_line_now_and_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = iter(range(0, 100, 4))
    monkeypatch.setattr("time.monotonic", lambda: next(now))
    with RowProgress(9, 2) as progress:
        for _ in range(4):
            progress.advance()
    assert capsys.readouterr().err.splitlines() == [f"stree: {done} of 9 rows" for done in (2, 5, 6)]


def test_the_command_writes_its_progress_where_standard_error_is_no_terminal(
    target_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def in_this_process(rows: list[Row], load: Any, **_: Any) -> Iterator[dict[str, Any]]:
        for row, found in zip(rows, load().run([row.request for row in rows]), strict=True):
            yield {"row": row.number, "id": row.id, **found}

    monkeypatch.setattr("stree.integrations.ray.run_rows", in_this_process)
    monkeypatch.setattr("stree.integrations.ray.check_ray", lambda: None)
    monkeypatch.setattr("stree.integrations.ray.local_ray", lambda workers: nullcontext())
    (tmp_path / "input.jsonl").write_text('{"prompt": "w1"}\n' * 2)
    words = ["batch", str(tmp_path / "input.jsonl"), "--out", str(tmp_path / "out"), "--target", target_folder]
    assert main([*words, "--gpus-per-worker", "0", "--max-new-tokens", "1", "--drafter", "none"]) == 0
    assert [line for line in capsys.readouterr().err.splitlines() if "rows" in line] == [
        "stree: 0 of 2 rows", "stree: 2 of 2 rows",
    ]  # fmt: skip
    assert written(tmp_path / "out") == [0, 1]
