"""A run: it can be resumed after any interruption, keeps every prompt once, and repeats itself with the same seed.

Most tests run methods that make their tokens up, always the same for the same case: what is tested is the run, not the
models.  Those with ``real`` in their name generate.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers.tiny_pairs import tiny_pair

from stree.bench.directory import RunDirectory
from stree.bench.execute import COUNTS, Case, Run
from stree.bench.methods import Method, parse_methods
from stree.bench.pair import Pair
from stree.bench.plan import Settings, Suite, read_suites
from stree.bench.records import Record
from stree.bench.runner import Runner
from stree.bench.summary import summarise

PAIR = tiny_pair()
METHODS = "plain,chain:2,dyspec:5"
SETTINGS = Settings(max_new_tokens=5, temperatures=(0.8,), seeds=(7,))


def made_up(pair: Pair, method: Method, case: Case) -> Run:
    """Make tokens up from all that a method may depend on; they fit no other case."""
    rows = []
    for prompt in case.prompts:
        rng = random.Random(repr((method.name, method.budget, prompt, case.temperature, case.seed)))
        rows.append([rng.randrange(1, 90) for _ in range(case.new_tokens)])
    return Run(rows, 1.0, None, {**dict.fromkeys(COUNTS, 4), "acceptance_by_depth": [], "nodes_per_step": 1.0})


@pytest.fixture
def imagined(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Run no model."""
    monkeypatch.setattr("stree.bench.runner.execute", made_up)
    monkeypatch.setattr("stree.bench.runner.check_method", lambda *_: {"status": "ok", "lossless": True})
    monkeypatch.setattr("stree.bench.runner.judge", lambda *_: {"lossless": True, "verifier": "match"})
    return monkeypatch


@pytest.fixture
def suites(tmp_path: Path) -> list[Suite]:
    """A conversation of two turns and two prompts of one."""
    talk, code = tmp_path / "talk.jsonl", tmp_path / "code.jsonl"
    talk.write_text(json.dumps({"turns": ["once upon", "and then?"]}) + "\n")
    code.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("def f", "class A", "import b", "x = 1")))
    return read_suites({"mt_bench": talk, "mine": code}, 2)


def run(
    out: Path, suites: Sequence[Suite], methods: str = METHODS, settings: Settings = SETTINGS, pair: Pair = PAIR
) -> tuple[list[Record], list[str]]:
    """Start a run or resume it; return its records and the lines that it reported."""
    directory = RunDirectory(out, {"methods": methods}, {"device": "test"})
    said: list[str] = []
    runner = Runner(pair, parse_methods(methods), suites, settings, directory, {})
    runner.say = said.append
    runner.run()
    return RunDirectory(out, {"methods": methods}, {"device": "test"}).records, said


def texts(records: Sequence[Record]) -> dict[tuple[Any, ...], Any]:
    """Tokens by prompt, temperature and method; every one must be there once."""
    names = ("suite", "batch", "turn", "temperature")
    timed = [record for record in records if record["metric"] == "tokens_per_s"]
    keys = [(*(record["params"][name] for name in names), record["provider"]) for record in timed]
    assert max(Counter(keys).values()) == 1, "a prompt is recorded twice"
    return dict(zip(keys, (record["tokens"] for record in timed), strict=True))


def test_every_prompt_turn_and_method_is_run_once(
    tmp_path: Path, suites: list[Suite], imagined: pytest.MonkeyPatch
) -> None:
    found = texts(run(tmp_path / "run", suites)[0])
    blocks = {("mt_bench", 0, 0, 0.8), ("mt_bench", 0, 1, 0.8), ("mine", 0, 0, 0.8), ("mine", 1, 0, 0.8)}
    assert found.keys() == {(*block, method) for block in blocks for method in METHODS.split(",")}
    assert all(len(tokens[0][0]) == 5 for tokens in found.values())


def test_every_seed_is_a_text_and_a_repetition_is_a_time(
    tmp_path: Path, suites: list[Suite], imagined: pytest.MonkeyPatch
) -> None:
    order: list[tuple[str, int]] = []
    seconds = iter([1.0, 4.0, 2.0, 2.0, 4.0, 1.0] * 20)

    def timed(pair: Pair, method: Method, case: Case) -> Run:
        order.append((method.name, case.seed))
        assert (case.top_k, case.top_p) == (5, 0.9)
        return replace(made_up(pair, method, case), seconds=next(seconds))

    imagined.setattr("stree.bench.runner.execute", timed)
    settings = Settings(5, (0.0, 0.8), seeds=(3, 4), top_k=5, top_p=0.9, repeats=3)
    records, _ = run(tmp_path / "run", suites[1:], "plain,suffix", settings)
    timed_records = [record for record in records if record["metric"] == "tokens_per_s"]
    places = [(r["params"]["temperature"], r["params"]["seed"], r["params"]["batch"]) for r in timed_records[::2]]
    assert places == [(0.0, 3, 0), (0.0, 3, 1), (0.8, 3, 0), (0.8, 3, 1), (0.8, 4, 0), (0.8, 4, 1)]
    first = [("plain", 3), ("suffix", 3), ("suffix", 3), ("plain", 3), ("plain", 3), ("suffix", 3)]
    assert order[:6] == first, "methods take turns in every repetition"
    assert timed_records[0]["runs"] == 3 and timed_records[0]["p50"] == 5 / 2.0
    (row,) = [row for row in summarise(records) if (row["method"], row["temperature"]) == ("suffix", 0.8)]
    assert row["prompts"] == row["samples"] == 2, "texts of one prompt are one sample"


def test_a_run_cut_off_anywhere_ends_as_an_undisturbed_one(
    tmp_path: Path, suites: list[Suite], imagined: pytest.MonkeyPatch
) -> None:
    wanted, whole = texts(run(tmp_path / "whole", suites)[0]), (tmp_path / "whole" / "results.jsonl").read_bytes()
    ends = [place for place, byte in enumerate(whole) if byte == ord("\n")]
    assert len(ends) == 2 * 3 + 4 * 3
    # After lines, and in the middle of them: inside a number, a name or a token, wherever that falls.
    cuts = [end + 1 for end in ends[::3]] + [(a + b) // 2 for a, b in zip(ends, ends[1:], strict=False)][::3]
    for cut in cuts:
        out = tmp_path / f"cut{cut}"
        out.mkdir()
        (out / "run.json").write_bytes((tmp_path / "whole" / "run.json").read_bytes())
        (out / "results.jsonl").write_bytes(whole[:cut])
        records, _ = run(out, suites)
        assert texts(records) == wanted, cut
        checks = Counter((r["params"]["suite"], r["provider"]) for r in records if r["metric"] == "check")
        assert set(checks.values()) == {1} and len(checks) == 6, cut


def test_a_second_turn_has_plain_decoding_s_first_answer_in_context(
    tmp_path: Path, suites: list[Suite], imagined: pytest.MonkeyPatch
) -> None:
    for methods in ("plain,chain:2", "chain:2"):  # also where plain is not compared
        found = texts(run(tmp_path / methods, suites[:1], methods)[0])
        first, second = PAIR.tokenizer("once upon")["input_ids"], PAIR.tokenizer("\n\nand then?\n\n")["input_ids"]
        plain, chain = parse_methods("plain,chain:2")
        answer = made_up(PAIR, plain, Case((tuple(first),), 5, 0.8, 7)).tokens[0]
        wanted = made_up(PAIR, chain, Case(((*first, *answer, *second),), 5, 0.8, 7)).tokens
        assert found["mt_bench", 0, 1, 0.8, "chain:2"] == [wanted]


def test_a_conversation_that_is_too_long_from_its_first_turn_on_is_left_out(
    tmp_path: Path, suites: list[Suite], imagined: pytest.MonkeyPatch
) -> None:
    imagined.setattr("stree.models.tree_lm.TreeLM.max_length", 6)
    imagined.setattr("stree.bench.runner.execute", lambda *_: pytest.fail("a prompt that does not fit was run"))
    records, said = run(tmp_path / "run", suites[:1])
    assert [record["params"]["turn"] for record in records if record["metric"] == "skipped"] == [0, 1]
    assert sum("prompts [0] are left out" in line for line in said) == 2


def test_methods_are_checked_on_the_first_prompt_that_fits(tmp_path: Path, imagined: pytest.MonkeyPatch) -> None:
    checked: list[Any] = []

    def check(pair: Pair, method: Method, cases: Sequence[Case], *_: Any) -> Record:
        checked.extend(case.prompts[0] for case in cases)
        return {"status": "ok", "lossless": True}

    (tmp_path / "mine.txt").write_text("import b\n\nx = 1\n\ny = 1\n")
    imagined.setattr("stree.bench.runner.check_method", check)
    imagined.setattr("stree.models.tree_lm.TreeLM.max_length", 10)
    run(tmp_path / "run", read_suites({"mine": tmp_path / "mine.txt"}, None), "plain")
    assert checked == [tuple(PAIR.tokenizer("x = 1")["input_ids"])]


@pytest.mark.slow
def test_real_batches_keep_every_prompt_and_what_cannot_run_is_reported(tmp_path: Path, suites: list[Suite]) -> None:
    settings = Settings(max_new_tokens=4, temperatures=(0.0,), batch_size=2)
    methods = "plain,transformers,mamba-ssm,chain:2,unrolled:static:2,2"
    records, said = run(tmp_path / "run", suites, methods, settings)
    found = texts(records)
    for method in ("transformers", "chain:2", "unrolled:static:2,2"):
        assert found["mine", 0, 0, 0.0, method] == found["mine", 0, 0, 0.0, "plain"]
    assert len(found["mine", 0, 0, 0.0, "plain"][0]) == 2
    assert all(record["lossless"] for record in records if record["metric"] == "tokens_per_s")
    assert any("mamba-ssm cannot run: mamba-ssm needs a CUDA device; it is not timed" in line for line in said)


def test_a_method_that_fails_later_is_reported_and_the_others_go_on_in_turns(
    tmp_path: Path, suites: list[Suite], imagined: pytest.MonkeyPatch
) -> None:
    order: list[str] = []

    def breaks(pair: Pair, method: Method, case: Case) -> Run:
        order.append(method.name)
        if method.name == "chain:2" and len(order) > 3:
            raise RuntimeError("out of memory")
        return made_up(pair, method, case)

    imagined.setattr("stree.bench.runner.execute", breaks)
    records, said = run(tmp_path / "run", suites[1:])
    assert order == ["plain", "chain:2", "dyspec:5", "chain:2", "dyspec:5", "plain"]
    assert [key[-1] for key in texts(records) if key[1] == 1] == ["plain", "dyspec:5"]
    assert said == ["mine: chain:2 cannot run: RuntimeError: out of memory; it is not timed any more"]


def test_a_chain_is_tuned_once_on_held_out_prompts(
    tmp_path: Path, suites: list[Suite], imagined: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, ...]] = []

    def slow(pair: Pair, method: Method, case: Case) -> Run:
        seen.append(case.prompts[0])
        run = made_up(pair, method, case)
        return Run(run.tokens, {2: 3.0, 3: 1.0, 4: 2.0}[int(method.budget)], None, run.stats)  # depth 2 is the fastest

    (suite,) = suites[1:]
    assert suite.is_held_out and [prompt.turns[0] for prompt in suite.held_out] == ["import b", "x = 1"]
    imagined.setattr("stree.bench.runner.execute", slow)
    records, said = run(tmp_path / "run", [suite], "chain:1-3")
    held = [tuple(PAIR.tokenizer(prompt.turns[0])["input_ids"]) for prompt in suite.held_out]
    assert seen[:9] == [held[0]] * 6 + [held[1]] * 3  # the first time warms up
    (tuning,) = [record for record in records if record["metric"] == "tuning"]
    assert (tuning["depth"], tuning["is_held_out"]) == (2, True)
    assert tuning["tokens_per_s_by_depth"] == {"1": 10 / 6, "2": 10 / 2, "3": 10 / 4}
    assert {r["params"]["budget"] for r in records if r["metric"] == "tokens_per_s"} == {3}
    assert "chain:1-3 is tuned to depth 2 on held-out prompts" in said[0]
    whole = read_suites({"mine": tmp_path / "code.jsonl"}, None)
    _, said = run(tmp_path / "all", whole, "chain:1-3")
    assert "on the measured prompts: the file has no others" in said[0]
    seen.clear()
    imagined.setattr("stree.models.tree_lm.TreeLM.max_length", SETTINGS.max_new_tokens + len(held[0]) - 1)
    run(tmp_path / "short", [suite], "chain:1-3")
    assert seen[:6] == [held[1]] * 6 and held[0] not in seen, "a prompt that does not fit is left out"
