"""Drafters of the user's own that run on the device, in captured steps.

Run: python -m pytest tests/decode/test_captured_drafters.py
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.captured import TEXTS, captured, generate, launched
from torch import Tensor

import stree
from stree.drafters import Draft, Drafter, DraftRun, FusedDrafter, SuffixDrafter
from stree.growth import Growth
from stree.sampling import Random
from stree.tree import TokenTree


class Bigrams(Drafter):
    """A user's own drafter: it drafts what last followed the pending token, from a table on the device.

    Args:
        fails_at: the call of ``propose`` that fails.
    """

    def __init__(self, fails_at: int = -1) -> None:
        self.begun: list[list[int]] = []  # positions that runs began at
        self.fails_at = fails_at

    def start(self, vocab_size: int, prompts: Any, rng: Random) -> Any:
        self.begun.append(rng.positions.tolist())
        return BigramRun(len(prompts), vocab_size, self.fails_at)


class BigramRun(DraftRun):
    can_extend = is_on_device = True

    def __init__(self, batch: int, vocab_size: int, fails_at: int) -> None:
        self.following = torch.zeros(batch, vocab_size, dtype=torch.long)
        self.calls, self.fails_at = 0, fails_at

    def propose(self, pending: Tensor, growth: Growth | None, budget: int) -> Draft:
        self.calls += 1
        if self.calls == self.fails_at:
            raise ArithmeticError("the drafter broke")
        tokens = torch.cat([pending[:, None], self.following.gather(1, pending[:, None])], 1)
        parents = torch.zeros_like(tokens, dtype=torch.int32)
        parents[:, 0] = -1
        values = torch.ones_like(tokens, dtype=torch.float32)
        self.draft = Draft(TokenTree.unchecked(tokens, parents), None, 1, values=values)
        return self.draft

    def observe(self, acceptance: Any) -> None:
        self.following.scatter_(1, self.draft.tree.tokens[:, :1], acceptance.next_token[:, None])


@pytest.mark.parametrize("is_fused", [False, True])
def test_a_drafter_of_the_user_s_whose_runs_begin_with_every_text(
    is_fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafts = Bigrams()
    drafter: Any = FusedDrafter(drafts, SuffixDrafter()) if is_fused else drafts
    lm = captured(monkeypatch)
    for texts in (TEXTS, [[4, 8, 1], [7, 2]]):
        found = generate(lm, drafter, texts=texts, budget=4)
        assert found.sequences == generate(launched(), None, texts=texts, budget=1).sequences
        assert found.stats["graphs"]["replays"] > 0
    assert drafts.begun == [[6, 9], [3, 2]], "at the ends of their own texts"


@pytest.mark.parametrize("fails_at", [1, 3])
def test_a_drafter_that_fails_is_done_without(fails_at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    lm, drafter = captured(monkeypatch), Bigrams(fails_at)
    expected = generate(launched(), None, budget=1).sequences
    if fails_at == 3:  # while a step is captured, which is then launched; what it drafts is not said to be captured
        found = generate(lm, drafter, budget=4)
        assert "the drafter broke" in str(found.stats["graphs"]["not_captured"]) and found.sequences == expected
        return
    with pytest.raises(stree.GenerationError, match="decoded without it: the drafter broke") as error:
        generate(lm, drafter, budget=4)
    assert error.value.output.sequences == expected
