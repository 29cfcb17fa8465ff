"""The committed comparison of draft heads: the table of the documents is that of the records."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import stree
from benchmarks.studies.heads import heads_table
from stree.bench.records import read
from stree.inputs import locate

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = [ROOT / "benchmarks" / "results" / "heads" / name for name in ("model", "mtp", "eagle3", "dflash")]


def test_the_table_of_the_documents_is_that_of_the_records() -> None:
    assert heads_table(FOLDERS) in (ROOT / "docs" / "results.md").read_text(encoding="utf-8")


def test_every_greedy_text_of_the_records_is_that_of_transformers() -> None:
    checks = [record for folder in FOLDERS for record in read(folder / "results.jsonl") if record["metric"] == "check"]
    greedy = [record["identical"] for record in checks if not record["params"]["temperature"]]
    assert len(greedy) == 3 * (3 + 3 + 3 + 5) and all(greedy)


def test_the_bundled_head_drafts_for_the_bundled_target() -> None:
    lm = stree.TreeLM.from_pretrained(locate("bundled", "target"))
    options: dict[str, Any] = {"max_new_tokens": 16, "sampling": stree.Sampling()}
    found = stree.generate(lm, [[5, 17, 9, 33]], locate("bundled-mtp", "drafter"), **options)
    assert found.sequences == stree.generate(lm, [[5, 17, 9, 33]], "none", **options).sequences
    assert found.stats["tau"] > 1.5
