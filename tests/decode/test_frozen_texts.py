"""Texts, trees and accepted counts of the bundled pair, frozen: a worse draft leaves every lossless test green.

Run: python -m pytest tests/decode/test_frozen_texts.py -m slow
After a change that is meant to draft otherwise: PYTHONPATH=.:tests python tests/decode/test_frozen_texts.py; say why in
the commit.
"""

from __future__ import annotations

import hashlib
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.fast_cases import slow_unless

import stree
from stree.drafters import Drafter, FusedDrafter, SuffixDrafter
from stree.inputs import ASSETS, load_tokenizer
from stree.sampling import Sampling

RECORD = Path(__file__).with_name("frozen_texts.json")
PROMPTS = ["def fibonacci(n):\n    if n", "Question: Tom has 3 apples. He gets 2 more apples each day for 5 days."]
SAMPLINGS = {"greedy": Sampling(), "sampled": Sampling(0.8), "truncated": Sampling(1.0, top_k=20, top_p=0.9)}
BUDGETS = {
    "calibrated": 16, "dyspec": 16, "chain:4": 5, "static:3,2,1": 16, "sequoia": 16, "opt-tree": 16, "eagle2": 16,
    "rsds:3,4": 16, "specinfer:2,2": 8,
}  # fmt: skip
CASES = [(drafter, growth, sampling) for drafter in ("model", "mtp") for growth in BUDGETS for sampling in SAMPLINGS]
CASES += [(drafter, "", sampling) for drafter in ("suffix", "fused") for sampling in SAMPLINGS]


@cache
def target() -> stree.TreeLM:
    """Load the bundled target in float64, so that no near-tie depends on the processor."""
    return stree.TreeLM.from_pretrained(ASSETS / "target", "cpu", torch.float64)


@cache
def drafter(name: str) -> Drafter:
    if name == "mtp":
        return stree.drafters.load(ASSETS / "mtp", target())
    model, suffix = stree.drafters.load(ASSETS / "drafter", target()), SuffixDrafter()
    drafters = {"model": model, "suffix": suffix, "fused": FusedDrafter(model, suffix)}
    return drafters[name]


def outcome(name: str, growth: str, sampling: str) -> dict[str, Any]:
    """Return a hash of the texts and of the trees without padding, and the accepted nodes of every step."""
    tokenizer = load_tokenizer(str(ASSETS / "target"))
    options: dict[str, Any] = {"growth": growth} if growth else {}
    whole, accepted = hashlib.sha256(), list[list[int]]()
    with stree.Engine(
        target(), drafter(name), budget=BUDGETS.get(growth, 16), max_batch=2, max_length=128, **options
    ) as engine:
        handles = [
            engine.submit(tokenizer(prompt)["input_ids"], sampling=SAMPLINGS[sampling], max_new_tokens=40, trees=True)
            for prompt in PROMPTS
        ]
        for handle in handles:
            trees = [step.tree for step in handle.steps() if step.tree is not None]
            nodes = [
                [(token, parent) for token, parent in zip(tree.tokens, tree.parents, strict=True) if parent >= 0]
                for tree in trees
            ]
            whole.update(json.dumps([handle.tokens, nodes, [tree.path for tree in trees]]).encode())
            accepted.append([len(tree.path) - 1 for tree in trees])
    return {"sha256": whole.hexdigest()[:16], "accepted": accepted}


def is_fast(name: str, growth: str, sampling: str) -> bool:
    return (name, growth, sampling) == ("model", "calibrated", "sampled")


def in_ci(name: str, growth: str, sampling: str) -> bool:
    """Whether a case is one of a cover of drafters and growths; of a head, with the default growth."""
    if name == "mtp" and growth != "calibrated":
        return False
    place = [*BUDGETS, ""].index(growth) + ("model", "mtp", "suffix", "fused").index(name)
    return place % len(SAMPLINGS) == [*SAMPLINGS].index(sampling)


@pytest.mark.parametrize(("name", "growth", "sampling"), slow_unless(is_fast, CASES, in_ci=in_ci))
def test_texts_and_trees_are_those_that_were_recorded(name: str, growth: str, sampling: str) -> None:
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    assert outcome(name, growth, sampling) == record[" ".join((name, growth, sampling))]


if __name__ == "__main__":
    torch.set_num_threads(1)
    record = {" ".join(case): outcome(*case) for case in CASES}
    lines = (f"{json.dumps(name)}: {json.dumps(found)}" for name, found in record.items())
    RECORD.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
