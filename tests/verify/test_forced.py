"""A forced acceptance length: tokens a step on average, whatever the target says, and labelled as not lossless."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers.fast_cases import slow_unless
from helpers.tiny_models import tiny_model

import stree
from stree.cli import main
from stree.drafters import ModelDrafter
from stree.sampling import Sampling
from stree.verify.forced import ForcedLength


def forced(tokens: float, growth: str, temperature: float = 0.8, **options: Any) -> stree.Generation:
    target, draft = (stree.TreeLM(tiny_model(family, seed=seed)) for seed, family in enumerate(("bamba", "mamba2")))
    return stree.generate(
        target, [[1, 2, 3]], ModelDrafter(draft), growth=growth, verifier=ForcedLength(tokens), allow_lossy=True,
        sampling=Sampling(temperature), max_new_tokens=100, ignore_eos=True, **options,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("tokens", "growth", "expected"),
    slow_unless(
        lambda tokens, growth, expected: tokens == 9,
        [(1.0, "chain:4", 1.0), (3.0, "chain:4", 3.0), (2.5, "calibrated:12x4", 2.5), (9.0, "chain:4", 5.0)],
    ),
)
def test_steps_have_the_tokens_that_are_forced_as_far_as_trees_are_deep(
    tokens: float, growth: str, expected: float
) -> None:
    stats = forced(tokens, growth).stats
    is_whole = float(tokens).is_integer()
    assert stats["tau"] == pytest.approx(expected, rel=1e-9 if is_whole else 0.15)
    assert stats["lossless"] is False and stats["verifier"] == "ForcedLength"


def test_it_is_refused_unless_lossy_text_is_allowed() -> None:
    lm = stree.TreeLM(tiny_model("mamba2"))
    with pytest.raises(ValueError, match="ForcedLength.* does not keep .* only with allow_lossy=True"):
        stree.generate(lm, [[1, 2]], verifier=ForcedLength(2.0))


@pytest.mark.parametrize(("tokens", "error"), [(0.5, ValueError), (float("nan"), ValueError), ("2", TypeError)])
def test_lengths_that_cannot_be_are_refused(tokens: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="tokens must be"):
        ForcedLength(tokens)


@pytest.mark.slow
def test_a_run_of_bench_names_and_labels_what_is_forced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "texts.jsonl").write_text('{"prompt": "The river rises in"}\n')
    run = ["bench", "run", "--suite", f"texts={tmp_path / 'texts.jsonl'}", "--methods", "plain,chain:4"]
    run += ["--max-new-tokens", "24", "--acceptance-length", "3", "--out", str(tmp_path / "run")]
    assert main(run) == 0
    table = capsys.readouterr().out
    assert "lossy-forced-3:chain:4" in table and "LOSSY by design (ForcedLength)" in table
    records = [
        json.loads(line) for file in (tmp_path / "run").glob("*.jsonl") for line in file.read_text().splitlines()
    ]
    forced = [record for record in records if record.get("provider") == "lossy-forced-3:chain:4"]
    assert forced and all(record["is_lossy"] and record["forced_acceptance_length"] == 3 for record in forced)
    assert any(record["metric"] == "tokens_per_s" and record["tau"] == 3 for record in forced)
    assert not any("is_lossy" in record for record in records if record.get("provider") == "plain")
    assert main([*run[:-2], "--out", str(tmp_path / "other"), "--acceptance-length", "0"]) == 2
