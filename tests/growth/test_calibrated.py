"""Calibrated growth: its plans, its trees against oracles in plain Python, and exactness while it learns."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from stree.drafters import ModelDrafter
from stree.growth import AcceptanceModel, Calibrated, Layer, Proposal, Slots, choose_slots
from stree.growth.calibrated import typical_values
from stree.testing.enumeration import EXACT, PLAIN, drafts_of, step_bias
from stree.testing.tables import TableModel, table_drafter
from stree.tree import TokenTree


def test_it_is_the_default_of_a_model_drafter() -> None:
    assert ModelDrafter.default_growth == Calibrated()


@pytest.mark.parametrize("left", [0, 1, 4, 9, 40])
def test_a_layer_leaves_room_for_what_is_worth_as_much_below_it(left: int) -> None:
    below = tuple(typical_values(63, 2, 4))
    value = torch.tensor([[0.9, 0.06, 0.03, 0.0], [0.4, 0.35, 0.3, 0.2], [0.0, 0.0, 0.0, 0.0]])
    layer = Layer(4, 4, below=below)
    _, is_taken = choose_slots(layer, value, torch.full((3,), left), 0.0, 1)
    for row, values in enumerate(value.tolist()):
        wanted = 0
        for count, least in enumerate(values, 1):
            size = count + sum(above * each >= least for above in values[:count] for each in below)
            if least and count <= left and (size <= left or count == 1):
                wanted = count
        assert is_taken[row].tolist() == [place < wanted for place in range(4)]


@dataclass(frozen=True)
class Taught(Calibrated):
    """A growth that begins with what a log taught it: that eldest children are accepted."""

    def acceptance_model(self, batch: int, device: torch.device) -> AcceptanceModel:
        model = super().acceptance_model(batch, device)
        tree = TokenTree(torch.zeros(batch, 3).long(), torch.tensor([[-1, 0, 0]]).expand(batch, 3))
        dist = torch.tensor([[[0.42, 0.36, 0.22]]]).expand(batch, 1, 3)
        probs = torch.tensor([[[0.42, 0.36]]]).expand(batch, 1, 2)
        for _ in range(100):
            model.rate(Slots(torch.ones(batch, 1), probs, dist))
            kept_slots = [model.keep(torch.tensor([[0, 1]]).expand(batch, 2))]
            ratios = torch.tensor([[0.0, 1.0, 0.0]]).expand(batch, 3)
            proposal = Proposal(tree, torch.ones_like(ratios), None, kept_slots)
            model.learn(proposal, ratios, torch.ones(batch, dtype=torch.bool))
        return model


@pytest.mark.parametrize("verifier", ["rejection", "traversal"])
def test_the_emitted_distribution_is_the_target_s_whatever_was_learnt(verifier: str) -> None:
    target, dist = TableModel.random(3, 11, scale=0.5), TableModel.random(3, 12, scale=0.5)
    drafter = table_drafter(dist)
    trees, naive = (drafts_of(drafter, growth, 4, PLAIN, 3) for growth in (Taught(2, 2), Calibrated(2, 2)))
    shapes = [set(map(tuple, one.parents.tolist())) for one in (trees, naive)]
    assert shapes[0] != shapes[1], "what was learnt should change trees"
    assert step_bias(target, trees, verifier) < EXACT
