"""The suffix drafter: trees of a batch, and that every accepted token is read once."""

from __future__ import annotations

import torch
from helpers.outcomes import random_rows

from stree.drafters import SuffixDrafter
from stree.verify import Acceptance


def test_suffix_trees_of_a_batch_are_padded_and_independent() -> None:
    prompts = [[1, 2, 3, 1, 2, 3, 1], [4, 5], [7, 7, 7, 7]]
    pending = torch.tensor([2, 6, 7])
    draft = SuffixDrafter().start(10, prompts, random_rows(3)).propose(pending, None, 6)
    draft.tree.check()
    assert draft.probs is None
    assert draft.num_calls == 0
    assert draft.max_depth == int(draft.tree.depths.max())
    assert int(draft.tree.num_nodes[1]) == 1
    assert draft.tree.tokens.shape[1] <= 6
    for row, prompt in enumerate(prompts):
        alone = SuffixDrafter().start(10, [prompt], random_rows(1)).propose(pending[row : row + 1], None, 6).tree
        width = alone.tokens.shape[1]
        assert torch.equal(draft.tree.tokens[row, :width], alone.tokens[0])
        assert torch.equal(draft.tree.parents[row, :width], alone.parents[0])
        assert (draft.tree.parents[row, width:] == -1).all()


def test_what_was_accepted_is_read_and_no_token_twice() -> None:
    run, pending = SuffixDrafter().start(10, [[1, 2, 3, 4, 1], [5, 6, 5]], random_rows(2)), torch.tensor([2, 6])
    nothing = torch.zeros(2, 1, dtype=torch.int32)
    for _ in range(3):
        assert run.propose(pending, None, 4).tree.tokens[0, :3].tolist() == [2, 3, 4]
        run.observe(Acceptance(nothing, nothing[:, 0], pending))  # nothing happens: the same tokens are pending again
    path = torch.tensor([[0, 1, 2], [0, -1, -1]], dtype=torch.int32)
    run.observe(Acceptance(path, torch.tensor([3, 0], dtype=torch.int32), torch.tensor([9, 9])))
    found = run.propose(torch.tensor([9, 6]), None, 6).tree
    whole = [[1, 2, 3, 4, 1, 2, 3, 4], [5, 6, 5]]
    expected = SuffixDrafter().start(10, whole, random_rows(2)).propose(torch.tensor([9, 6]), None, 6).tree
    assert torch.equal(found.tokens, expected.tokens) and torch.equal(found.parents, expected.parents)


def test_a_text_that_ended_leaves_no_pending_token_behind() -> None:
    run = SuffixDrafter().start(50, [[5, 6, 7]], random_rows(1))
    run.propose(torch.tensor([6]), None, 4)  # reads the pending token, whose text has ended
    run.admit(0, [1, 2, 3, 9, 1, 2])
    assert run.propose(torch.tensor([3]), None, 4).tree.tokens[0, :3].tolist() == [3, 9, 1]
