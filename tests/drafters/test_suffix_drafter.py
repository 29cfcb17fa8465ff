"""The suffix drafter: after any steps its trees are those of a fresh run on each text alone."""

from __future__ import annotations

import random

import torch
from helpers.draft_steps import DraftSteps
from helpers.outcomes import random_rows

from stree.drafters import SuffixDrafter
from stree.growth import Chain

VOCAB = 6  # so few tokens that much repeats itself


def check_trees(steps: DraftSteps) -> None:
    draft = steps.run.propose(steps.pending, steps.growth, 6)
    draft.tree.check()
    assert (draft.probs, draft.num_calls, draft.max_depth) == (None, 0, int(draft.tree.depths.max()))
    assert draft.tree.tokens.shape[1] <= 6
    for row, text in enumerate(steps.texts):
        run = SuffixDrafter().start(VOCAB, [text], random_rows(1))
        alone = run.propose(steps.pending[row : row + 1], None, 6).tree
        width = alone.tokens.shape[1]
        assert torch.equal(draft.tree.tokens[row, :width], alone.tokens[0])
        assert torch.equal(draft.tree.parents[row, :width], alone.parents[0])
        assert (draft.tree.parents[row, width:] == -1).all()
    steps.accept(draft.tree, [[] for _ in steps.texts])  # nothing is accepted: the same tokens are pending again


def test_every_accepted_token_is_read_once_and_rows_are_independent() -> None:
    rng = random.Random(1)
    texts = [[rng.randrange(VOCAB) for _ in range(length)] for length in (20, 2, 9)]
    steps = DraftSteps(SuffixDrafter(), VOCAB, texts, Chain(1))
    for step in range(20):
        steps.step(budget=1 if step % 5 == 4 else 6)
        check_trees(steps)
    steps.texts[1] = [1, 2, 3, 5, 1, 2]  # of the text before, no pending token is left behind
    steps.run.admit(1, steps.texts[1])
    check_trees(steps)
