"""Verification of unrolled paths emits the tokens that tree verification emits."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from helpers.tiny_pairs import tiny_pair
from torch import Tensor

import stree
from stree.bench.execute import Case, execute
from stree.bench.methods import parse_methods
from stree.bench.unrolled import UnrolledLM, UnrolledState
from stree.drafters import ModelDrafter
from stree.growth import DySpec

PAIRS = {family: tiny_pair(family) for family in ("mamba2", "bamba")}
PROMPT = tuple(range(5, 18))


@pytest.mark.parametrize("family", PAIRS)
@pytest.mark.parametrize("tree", ["dyspec:7", "static:3,2", "stree"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_unrolled_paths_emit_the_tokens_of_the_tree(family: str, tree: str, temperature: float) -> None:
    case = Case((PROMPT,), 12, temperature, seed=3)
    ours, unrolled = parse_methods(f"{tree},unrolled:{tree}")
    wanted = execute(PAIRS[family], ours, case)
    assert wanted.stats["tau"] > 1.2  # paths of several nodes are committed
    run = execute(PAIRS[family], unrolled, case)
    assert run.tokens == wanted.tokens and run.stats["steps"] == wanted.stats["steps"]


def test_unrolled_rows_of_a_batch_may_stop_and_stand_still() -> None:
    pair = PAIRS["mamba2"]
    prompts = [[5, 6, 7, 8], [9, 10, 11, 12, 13, 14], [20]]
    assert pair.drafter is not None
    options: dict[str, Any] = {
        "growth": DySpec(),
        "budget": 9,
        "max_new_tokens": 12,
        "sampling": stree.Sampling(0.8),
        "seed": 1,
    }
    free = stree.generate(pair.target, prompts, ModelDrafter(pair.drafter), **options)
    stop = free.sequences[1][-8]
    wanted = stree.generate(pair.target, prompts, ModelDrafter(pair.drafter), stop_token_ids=[stop], **options)
    lengths = [len(text) - len(prompt) for text, prompt in zip(wanted.sequences, prompts, strict=True)]
    assert min(lengths) < max(lengths)  # one stands still while another goes on
    lm = cast(stree.TreeLM, UnrolledLM(pair.target))
    found = stree.generate(lm, prompts, ModelDrafter(pair.drafter), stop_token_ids=[stop], **options)
    assert found.sequences == wanted.sequences


class _WrongRow(UnrolledLM):
    """A control: keeps the first row whatever was accepted."""

    def commit(self, state: UnrolledState, path: Tensor, path_lengths: Tensor) -> None:
        super().commit(state, torch.zeros_like(path), path_lengths)


def test_a_baseline_that_keeps_the_wrong_row_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case((PROMPT,), 12, 0.0)
    ours, unrolled = parse_methods("static:3,2,unrolled:static:3,2")
    monkeypatch.setattr("stree.bench.execute.UnrolledLM", _WrongRow)
    assert execute(PAIRS["mamba2"], unrolled, case).tokens != execute(PAIRS["mamba2"], ours, case).tokens
