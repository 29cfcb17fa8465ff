"""The committed comparison of draft heads, and the bundled head."""

from __future__ import annotations

from typing import Any

import stree
from benchmarks.studies.documents import HEADS, RESULTS
from stree.bench.records import read
from stree.inputs import locate


def test_every_greedy_text_of_the_records_is_that_of_transformers() -> None:
    checks = [
        record
        for name in HEADS
        for record in read(RESULTS / "heads" / name / "results.jsonl")
        if record["metric"] == "check"
    ]
    greedy = [record["identical"] for record in checks if not record["params"]["temperature"]]
    assert len(greedy) == 3 * (3 + 3 + 3 + 5) and all(greedy)


def test_the_bundled_head_drafts_for_the_bundled_target() -> None:
    lm = stree.TreeLM.from_pretrained(locate("bundled", "target"))
    options: dict[str, Any] = {"max_new_tokens": 16, "sampling": stree.Sampling()}
    found = stree.generate(lm, [[5, 17, 9, 33]], locate("bundled-mtp", "drafter"), **options)
    assert found.sequences == stree.generate(lm, [[5, 17, 9, 33]], "none", **options).sequences
    assert found.stats["tau"] > 1.5
