"""The comparison of growths: expectations against enumeration, remembered forwards against fresh ones, shared draws."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.enumeration import PLAIN, DraftedTrees, TableModel, drafted_trees, expected_tokens
from helpers.tiny_models import VOCAB
from helpers.tiny_pairs import tiny_pair

from benchmarks.studies import methods, who_wins_report
from benchmarks.studies import who_wins as bench_who_wins
from benchmarks.studies.expectation import expected_path
from benchmarks.studies.replay import Replay
from stree.bench.pair import Pair
from stree.sampling import Sampling
from stree.tree import TokenTree

TREE = [-1, 0, 0, 1, 1, 2]
PROMPTS = [[1, 2, 3, 1, 2], [4, 5, 6]]


def mean_length(target: TableModel, trees: DraftedTrees, verifier: str) -> float:
    """Average over all trees that a draft gives."""
    probs = None if verifier == "match" else trees.probs
    on_path, _ = expected_path(trees.tree, target.logits[trees.tokens], PLAIN, probs, verifier)
    return float(trees.weight @ (1 + on_path.sum(1)))


@pytest.mark.parametrize("verifier", ["match", "rejection", "traversal"])
# Node 1 of the second tree is deterministic and comes before siblings that are drawn without its token.
@pytest.mark.parametrize(
    ("parents", "delta"),
    [(TREE, None), ([-1, 0, 0, 1, 2], {1: 1}), ([-1, 0, 1, 2], None)],
    ids=["tree", "delta", "chain"],
)
def test_the_expected_path_is_that_of_every_outcome_of_acceptance(
    parents: list[int], delta: dict[int, int] | None, verifier: str
) -> None:
    target, draft = TableModel.random(3, 1), TableModel.random(3, 2)
    trees = drafted_trees(draft, parents, PLAIN, delta)
    wanted = expected_tokens(target, trees, PLAIN, verifier)
    assert mean_length(target, trees, verifier) == pytest.approx(wanted, abs=1e-12)


def test_repeated_siblings_are_matched_once_and_greedy_paths_are_certain() -> None:
    logits = TableModel.random(3, 1).logits[None].expand(1, 3, 3)
    tree = TokenTree(torch.tensor([[0, 1, 1]]), torch.tensor([[-1, 0, 0]]))
    on_path, _ = expected_path(tree, logits, PLAIN, None, "match")
    assert on_path.tolist()[0] == pytest.approx([0, float(logits[0, 0].softmax(-1)[1]), 0])
    greedy = TokenTree.chain(torch.tensor([[0, int(logits[0, 0].argmax())]]))
    assert expected_path(greedy, logits[:, :2], Sampling(), None, "auto")[0].tolist() == [[0, 1]]


def test_remembered_logits_are_those_of_fresh_forwards_along_the_text() -> None:
    lm = tiny_pair().target
    replay = Replay(lm, PROMPTS, 16)
    generator = torch.Generator().manual_seed(0)
    texts = torch.randint(1, VOCAB, (2, 4), generator=generator)
    state = lm.new_state(2, 64, 16)
    lm.prefill(state, torch.tensor([[1, 2, 3, 1, 2], [4, 5, 6, 0, 0]]), torch.tensor([5, 3]))
    for begin in (0, 2):
        assert replay.lengths.tolist() == [5 + begin, 3 + begin]
        for seed in range(3):  # trees that share nodes with those before
            tokens = torch.randint(1, 4, (2, 7), generator=generator.manual_seed(seed))
            tokens[:, 0], tokens[1, 6] = texts[:, begin], 0
            tree = TokenTree(tokens, torch.tensor([[-1, 0, 0, 1, 1, 2, 3], [-1, 0, 1, 1, 1, 2, -1]]))
            wanted = lm.verify(state, tree)
            torch.testing.assert_close(replay.verify(None, tree)[0], wanted[0])
            below = replay.verify(None, tree, first=4)
            torch.testing.assert_close(below[0], wanted[0, 4:])
            torch.testing.assert_close(below[1, :2], wanted[1, 4:6])  # the last is padding
        replay.move(texts[:, begin : begin + 2])
        lm.verify(state, TokenTree.chain(texts[:, begin : begin + 2]))
        lm.commit(state, torch.tensor([[0, 1]] * 2, dtype=torch.int32), torch.tensor([2, 2], dtype=torch.int32))


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(methods, "SIZES", ((8, 4),))
    monkeypatch.setattr(methods, "DEEPER", ())
    monkeypatch.setattr(methods, "FUSED", ((8, 4),))
    monkeypatch.setattr(methods, "CHAINS", (1, 3, 4))
    monkeypatch.setattr(Pair, "load", lambda: tiny_pair())


def test_a_run_is_resumed_and_reported(small: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    suite = tmp_path / "toy.txt"
    suite.write_text("abc abc abc\n\nxyz zyx\n", encoding="utf-8")
    arguments = ["--suite", f"toy={suite}", "--limit", "2", "--batch", "1", "--new-tokens", "4", "--out",
                 str(tmp_path / "out"), "--temperature", "0,1"]  # fmt: skip
    results = tmp_path / "out" / "results.jsonl"
    bench_who_wins.main(arguments)
    records = [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()]
    assert [(r["params"]["temperature"], r["prompts"]) for r in records] == [
        (0.0, [0]), (1.0, [0]), (0.0, [1]), (1.0, [1])
    ]  # fmt: skip
    for record in records:
        assert all(1 <= tau <= 1 + record["calls"][key] for key, row in record["tau"].items() for tau in row
                   if not key.startswith(("suffix", "fused")))  # fmt: skip
        assert record["tau"]["chain 5x4"] >= record["tau"]["chain 2x1"]
    assert "calibrated@match 8x4" in records[1]["tau"] and "calibrated@match 8x4" not in records[0]["tau"]
    bench_who_wins.main(arguments)  # everything is finished
    assert len(results.read_text(encoding="utf-8").splitlines()) == 4
    assert "Texts of 4 tokens, a context at every 4th." in capsys.readouterr().out
    for wrong, message in ((["--batch", "4"], "a multiple of --batch 4, got 2"), (["--only", "sequia"], "got sequia")):
        with pytest.raises(SystemExit):
            bench_who_wins.main([*arguments, *wrong])
        assert message in capsys.readouterr().err


def test_ratios_are_paired_over_prompts_and_later_records_replace_earlier_ones(tmp_path: Path) -> None:
    def record(tau: dict[str, Any], measured: dict[str, float]) -> str:
        params = {"suite": "toy", "temperature": 0.8, "batch": 0}
        return json.dumps({"metric": "expected_tokens", "params": params, "tau": tau, "measured": measured}) + "\n"

    chain = [2.0, 2.1, 1.9, 2.0]
    first = {"calibrated 16x4": [9.0] * 4, "chain 5x4": chain, "calibrated@rejection 16x4": [2 * x for x in chain]}
    first |= {"chain 9x8": [2 * x for x in chain], "chain 16x15": chain}
    again = {"calibrated 16x4": [1.5 * x for x in chain], "sequoia 16x4": chain[::-1], "dyspec 16x4": [1.0, 2.0]}
    lines = record(first, {"calibrated 16x4": 7.5}) + record(again, {"calibrated 16x4": 2.5})
    (tmp_path / "results.jsonl").write_text(lines, encoding="utf-8")
    row = who_wins_report.read_temperatures(tmp_path)[0.8]
    found = {question: (what, ratio) for question, what, ratio in row.ratio_rows()}
    assert found["chain of equal calls"] == ("calibrated 16x4 / chain 5x4", "1.500 [1.500, 1.500]")
    assert found["best chain"] == ("calibrated 16x4 / chain 9x8", "0.750 [0.750, 0.750]")
    assert found["traversal or rejection"] == ("calibrated 16x4 / calibrated@rejection 16x4", "0.750 [0.750, 0.750]")
    assert found["best growth"][0] == "calibrated 16x4 / sequoia 16x4", "its interval reaches lowest"
    written = who_wins_report.markdown(tmp_path)
    assert "the same prompts emits: calibrated 16x4 2.50." in written and "| sequoia | 2.00 |" in written
