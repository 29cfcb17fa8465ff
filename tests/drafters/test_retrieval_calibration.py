"""Correction of retrieved values: by temperature, and by which of them each sequence accepted."""

from __future__ import annotations

import math

import pytest
import torch

from stree.drafters.retrieval_calibration import GREEDY_SLOPE, PER_TEMPERATURE, RetrievalCalibration
from stree.tree import TokenTree

TREE = TokenTree(torch.tensor([[0, 1, 2, 3]]), torch.tensor([[-1, 0, 0, 1]]))
VALUES = torch.tensor([[1.0, 0.6, 0.2, 0.45]])


def chance(odds: float) -> float:
    return 1 / (1 + math.exp(-odds))


def log_odds(share: float) -> float:
    return math.log(share / (1 - share))


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_children_keep_their_shares_of_their_corrected_sum(temperature: float) -> None:
    slope = GREEDY_SLOPE if temperature == 0 else 1.0
    known = chance(slope * log_odds(0.8) + PER_TEMPERATURE * temperature)
    below = chance(slope * log_odds(0.45 / 0.6) + PER_TEMPERATURE * temperature)
    found = RetrievalCalibration(1).rate(TREE, VALUES, temperature)[0].tolist()
    assert found == pytest.approx([1, 0.75 * known, 0.25 * known, 0.75 * known * below], rel=1e-5)


def test_padding_is_worth_nothing_and_values_never_rise_along_a_path() -> None:
    tree = TokenTree(torch.tensor([[0, 1, 2, 0]]), torch.tensor([[-1, 0, 1, -1]]))
    found = RetrievalCalibration(1).rate(tree, torch.tensor([[1.0, 1.0, 1.0, 0.0]]), 0.0)[0]
    assert found[3] == 0 and 1 >= found[1] >= found[2] > 0.99


def test_accepted_values_are_raised_and_rejected_ones_lowered() -> None:
    before = float(RetrievalCalibration(1).rate(TREE, VALUES, 0.8)[0, 1:3].sum())
    for text, is_more in (([1, 3, 9], True), ([2], True), ([7], False)):
        calibration = RetrievalCalibration(1)
        calibration.rate(TREE, VALUES, 0.8)
        calibration.learn([text])
        after = float(calibration.rate(TREE, VALUES, 0.8)[0, 1:3].sum())
        assert (after > before) == is_more, text


def test_nothing_is_learnt_where_nothing_was_retrieved_or_the_sequence_is_inactive() -> None:
    calibration = RetrievalCalibration(1)
    calibration.rate(TokenTree(torch.tensor([[5]]), torch.tensor([[-1]])), torch.ones(1, 1), 0.0)
    calibration.learn([[3, 4]])
    calibration.rate(TREE, VALUES, 0.0)
    calibration.learn([[]])
    assert torch.equal(calibration.rate(TREE, VALUES, 0.0), RetrievalCalibration(1).rate(TREE, VALUES, 0.0))


def test_sequences_learn_by_themselves_and_another_text_begins_anew() -> None:
    tree = TokenTree(TREE.tokens.expand(2, -1), TREE.parents.expand(2, -1))
    calibration, alone = RetrievalCalibration(2), RetrievalCalibration(1)
    for one, batch, whole in ((calibration, 2, tree), (alone, 1, TREE)):
        one.rate(whole, VALUES.expand(batch, -1), 0.8)
        one.learn([[7], [1, 3]][:batch])
    found = calibration.rate(tree, VALUES.expand(2, -1), 0.8)
    assert torch.equal(found[0], alone.rate(TREE, VALUES, 0.8)[0])
    assert found[1, 1] > found[0, 1]
    calibration.forget(0)
    assert torch.equal(
        calibration.rate(tree, VALUES.expand(2, -1), 0.8)[0], RetrievalCalibration(1).rate(TREE, VALUES, 0.8)[0]
    )
