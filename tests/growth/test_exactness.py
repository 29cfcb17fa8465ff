"""Variants of the growths whose trees are cut, stopped or chosen, by enumeration of one step.

``tests/verify/test_exact.py`` enumerates every growth over several steps.
"""

from __future__ import annotations

import pytest
import torch
from helpers.fast_cases import slow_unless
from helpers.random_rows import random_rows
from helpers.table_drafts import draft_of

from stree import growth as growths
from stree.growth import Growth
from stree.sampling import Sampling
from stree.testing.enumeration import EXACT, PLAIN, drafts_of, step_bias
from stree.testing.tables import TableModel, table_drafter

# A decision model that goes on where the greatest of the draft's probabilities is above 0.7.
SURE = [[[100.0, *[0.0] * 10, -70.4]]]
TOP_2 = Sampling(0.9, top_k=2)  # so that some drafted tokens have probability zero
CASES: dict[str, tuple[Growth, int, Sampling]] = {
    "layers": (growths.DySpec(depth=2, ranks=2), 5, TOP_2),
    "layers-cut": (growths.DySpec(depth=2, ranks=2, threshold=0.0), 4, PLAIN),
    "layers-cut-top-2": (growths.DySpec(depth=2, ranks=2, threshold=0.0), 4, TOP_2),
    "layers-narrow": (growths.DySpec(depth=2, ranks=3, width=2), 5, PLAIN),
    "threshold": (growths.DySpec(depth=2, ranks=2, threshold=0.4, form="threshold"), 7, PLAIN),
    "threshold-top-2": (growths.DySpec(depth=2, ranks=2, threshold=0.4, form="threshold"), 4, TOP_2),
    "heap": (growths.DySpec(form="heap"), 5, TOP_2),
    "calibrated": (growths.Calibrated(depth=2, ranks=2), 5, PLAIN),
    "calibrated-cut": (growths.Calibrated(depth=2, ranks=2), 4, PLAIN),
    "calibrated-star": (growths.Calibrated(depth=1, ranks=3), 3, PLAIN),
    "opt-tree": (growths.OptTree(depth=3, least_gain=0.6), 5, PLAIN),
    "eagle2": (growths.Eagle2(depth=3, beam=1), 4, Sampling(0.5, top_k=2)),
    "eagle2-depth-stop": (growths.DepthStop(growths.Eagle2(3, 2), threshold=-0.6, layers=None), 5, PLAIN),
    "eagle2-decision": (growths.DecisionStop(growths.Eagle2(2, 2), weights=SURE), 5, PLAIN),
}
# Below a root of token 0 the draft is sure, below 2 less and below 1 not: greatest probabilities 0.77, 0.65, 0.42.
DRAFT = TableModel.random(3, 148)
STOPPED: dict[str, tuple[Growth, int]] = {
    "chain-sure": (growths.Chain(3, stop=growths.Confidence(least_prob=0.6)), 4),
    "chain-entropy": (growths.Chain(3, stop=growths.Confidence(most_entropy=0.8)), 4),
    "depth": (growths.DepthStop(growths.Static([2, 1]), threshold=-0.5, layers=[1]), 5),
    "depth-layers": (growths.DepthStop(growths.DySpec(depth=2, ranks=2), threshold=-0.3, layers=None), 5),
    "depth-rsds": (growths.DepthStop(growths.RSDS(2, 2), threshold=-0.5, layers=None), 5),
    "decision": (growths.DecisionStop(growths.Static([2, 1]), weights=SURE), 5),
    "decision-calibrated": (growths.DecisionStop(growths.Calibrated(depth=2, ranks=2), weights=SURE), 5),
}
CASES |= {name: (*case, PLAIN) for name, case in STOPPED.items()}


@pytest.mark.parametrize("verifier", ["rejection", "traversal"])
@pytest.mark.parametrize("name", slow_unless(lambda name: [*CASES].index(name) % 2 == 0, CASES))
def test_every_variant_emits_the_target_s_distribution_exactly(name: str, verifier: str) -> None:
    growth, budget, sampling = CASES[name]
    trees = drafts_of(table_drafter(DRAFT), growth, budget, sampling, 3)
    assert name not in STOPPED or len(trees.tree.num_nodes.unique()) > 1, "some trees stop, some do not"
    assert step_bias(TableModel.random(3, 11), trees, verifier, sampling) < EXACT


def test_a_later_sibling_is_never_taken_before_an_earlier_one() -> None:
    # The first draws use up nearly all of the distribution, so that what is left of it is rounding.
    probs = torch.tensor([0.9, 1e-8, 0.0999, 1e-9, 1e-4, 3e-8], dtype=torch.float32)
    dist = TableModel(probs.log().expand(6, 6).contiguous())
    for width in (1, 2, 3, 4, 5):
        growth = growths.DySpec(depth=1, ranks=6, width=width, threshold=0.0)
        draft = draft_of(dist, growth, 7, PLAIN, random_rows(4000), 4000)
        rng = random_rows(4000).at(torch.ones(4000, dtype=torch.long))
        rest = PLAIN.probs(dist.logits[:1]).repeat(4000, 1)
        for rank in range(int(draft.tree.num_nodes.max()) - 1):
            drawn = rng.choice("draft", rest, torch.zeros(4000, dtype=torch.long), rank)
            is_node = draft.tree.parents[:, 1 + rank] >= 0
            assert torch.equal(drawn[is_node], draft.tree.tokens[is_node, 1 + rank])
            rest = rest.scatter(1, drawn[:, None], 0.0)
