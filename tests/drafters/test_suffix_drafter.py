"""The suffix drafter: after any steps its trees are those of a fresh run on each text alone."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
import torch
from helpers.draft_steps import DraftSteps
from helpers.on_device import treat_as_on_device
from helpers.random_rows import random_rows
from torch.overrides import TorchFunctionMode

from stree.drafters import SuffixDrafter
from stree.growth import Chain
from stree.verify import Acceptance

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


@pytest.mark.parametrize("is_on_device", [False, True])
def test_every_accepted_token_is_read_once_and_rows_are_independent(
    is_on_device: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_on_device:
        treat_as_on_device(monkeypatch)
    rng = random.Random(1)
    texts = [[rng.randrange(VOCAB) for _ in range(length)] for length in (20, 2, 9)]
    steps = DraftSteps(SuffixDrafter(), VOCAB, texts, Chain(1))
    for step in range(20):
        steps.step(budget=1 if step % 5 == 4 else 6)
        check_trees(steps)
    steps.texts[1] = [1, 2, 3, 5, 1, 2]  # of the text before, no pending token is left behind
    steps.run.begin([1], [steps.texts[1]])
    check_trees(steps)


class Transfers(TorchFunctionMode):
    """Count the reads and copies of tensors, each of which would be a transfer between host and device."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        self.counts[name] += name in ("tolist", "item", "numpy", "__int__", "__bool__", "to", "cpu", "cuda")
        return func(*args, **(kwargs or {}))


def test_a_step_on_a_device_reads_once_and_uploads_once(monkeypatch: pytest.MonkeyPatch) -> None:
    treat_as_on_device(monkeypatch)
    run = SuffixDrafter().start(VOCAB, [[1, 2, 3, 1, 2], [4, 5, 4]], random_rows(2))
    pending, transfers = torch.tensor([3, 5]), Transfers()
    for step in range(3):
        with transfers if step else torch.no_grad():  # at first the pending tokens are read, too
            draft = run.propose(pending, None, 6)
            pending = draft.tree.tokens[:, 0] % 5 + 1
            lengths = torch.tensor([1, 1], dtype=torch.int32)
            run.observe(Acceptance(torch.zeros(2, 1, dtype=torch.int32), lengths, pending))
    assert +transfers.counts == {"tolist": 2, "to": 2}
