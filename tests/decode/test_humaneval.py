"""Greedy texts of the bundled pair on HumanEval prompts are token for token those of transformers.

STREE_FULL=1 runs 20 prompts of 128 tokens.
"""

from __future__ import annotations

import json
import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

import stree
from stree.drafters import Drafter, ModelDrafter, NoDrafter, SuffixDrafter
from stree.growth import Chain, DySpec, Growth, Static
from stree.models.tree_lm import TreeLM

ROOT = Path(__file__).resolve().parents[2]
GROWTHS: dict[str, tuple[Growth | None, int]] = {
    "chain": (Chain(4), 5),
    "static": (Static([3, 2, 1]), 16),
    "stree": (Static.stree(), 13),
    "layers": (None, 16),
    "heap": (DySpec(form="heap"), 5),
}
ASSETS = ROOT / "stree" / "assets"
HUMANEVAL = ROOT.parent / "shared" / "data" / "humaneval" / "HumanEval.jsonl"
IS_FULL = os.environ.get("STREE_FULL", "0") == "1"
NUM_PROMPTS, NUM_TOKENS = (20, 128) if IS_FULL else (4, 32)
# Of the logits' scale: two orders of summation in float32 differ by about 1e-6; a greater gap is no tie.
TIE = 1e-4
BUNDLED_WAYS = ["suffix", "model-stree", "model-layers"]
BUNDLED_WAYS += ["none", "model-chain", "model-static", "model-heap", "self-layers"] if IS_FULL else []


@cache
def bundled() -> tuple[Any, TreeLM, TreeLM, list[list[int]], list[list[int]]]:
    """Load the pair: an unpatched target, both as TreeLM, prompts and transformers' own texts."""
    if not HUMANEVAL.is_file():
        pytest.skip("the HumanEval prompts are not there: shared/data/humaneval beside the repository")
    tokenizer = Tokenizer.from_file(str(ASSETS / "target" / "tokenizer.json"))
    rows = [json.loads(line)["prompt"] for line in HUMANEVAL.read_text().splitlines()[:NUM_PROMPTS]]
    prompts = [tokenizer.encode(row).ids for row in rows]
    model = AutoModelForCausalLM.from_pretrained(ASSETS / "target", dtype=torch.float32).eval()
    texts = [transformers_text(model, prompt) for prompt in prompts]
    target, drafter = (TreeLM.from_pretrained(ASSETS / name, "cpu", torch.float32) for name in ("target", "drafter"))
    return model, target, drafter, prompts, texts


def transformers_text(model: Any, prompt: list[int]) -> list[int]:
    inputs = torch.tensor([prompt])
    out = model.generate(
        inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=NUM_TOKENS, do_sample=False, eos_token_id=None,
        pad_token_id=0,
    )  # fmt: skip
    text: list[int] = out[0].tolist()
    return text


def tie_at(model: Any, text: list[int], place: int, token: int) -> float:
    """Measure by how much transformers preferred its own token at a place, of the largest logit."""
    with torch.no_grad():
        logits = model(torch.tensor([text[:place]]), use_cache=False).logits[0, -1]
    return float((logits[text[place]] - logits[token]) / logits.abs().max())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "rows"), [*((name, 4) for name in BUNDLED_WAYS), *((name, 1) for name in BUNDLED_WAYS[::3])]
)
def test_greedy_on_humaneval_is_token_identical_to_transformers(name: str, rows: int) -> None:
    model, target, draft, prompts, texts = bundled()
    kind, _, growth = name.partition("-")
    shape, budget = GROWTHS[growth] if growth else (None, 1 if kind == "none" else 16)
    drafter: Drafter = NoDrafter() if kind == "none" else SuffixDrafter()
    if growth:
        drafter = ModelDrafter(target if kind == "self" else draft)
    ties = []
    for begin in range(0, len(prompts), rows):
        out = stree.generate(
            target, prompts[begin : begin + rows], drafter, growth=shape, budget=budget, max_new_tokens=NUM_TOKENS
        )
        for row, found in enumerate(out.sequences, begin):
            if found == texts[row]:
                continue
            place = next(p for p, pair in enumerate(zip(found, texts[row], strict=True)) if pair[0] != pair[1])
            gap = tie_at(model, texts[row], place, found[place])
            assert abs(gap) < TIE, f"prompt {row} differs at token {place}, where the logits differ by {gap:.2g}"
            ties.append((row, place, gap))
    assert len(ties) <= 1, f"more than one float32 near-tie is no accident: {ties}"
