"""Every growth emits the target's distribution exactly, and no slot depends on the token that is drawn there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.enumeration import Outcomes, TableModel, as_random, emitted_probs, total_variation
from helpers.growth_drafts import EXACT, PLAIN, all_drafts, draft_of, num_draws, random_rows
from torch import Tensor

from stree import growth as growth_module
from stree.growth import (
    RSDC,
    RSDS,
    Calibrated,
    Chain,
    Confidence,
    DecisionStop,
    DepthStop,
    DySpec,
    Eagle2,
    Growth,
    Layer,
    OptTree,
    Sequoia,
    SpecInfer,
    Static,
)
from stree.sampling import Sampling
from stree.verify import INDEPENDENT, SAMPLED

# A decision model that goes on where the greatest of the draft's probabilities is above 0.7.
SURE = [[[100.0, *[0.0] * 10, -70.4]]]
POLICIES: dict[str, tuple[Growth, int]] = {
    "chain": (Chain(2), 3),
    "static-2-1": (Static([2, 1]), 5),
    "static-parents": (Static([-1, 0, 0, 0, 2]), 5),
    "layers": (DySpec(depth=2, ranks=2), 5),
    "layers-cut": (DySpec(depth=2, ranks=2, threshold=0.0), 4),
    "layers-narrow": (DySpec(depth=2, ranks=3, width=2), 5),
    "heap": (DySpec(form="heap"), 5),
    "rsdc": (RSDC([2, 1]), 5),
    "sequoia": (Sequoia(depth=2, rates=(0.5, 0.2)), 5),
    "calibrated": (Calibrated(depth=2, ranks=2), 5),
    "calibrated-cut": (Calibrated(depth=2, ranks=2), 4),
    "calibrated-star": (Calibrated(depth=1, ranks=3), 3),
    "specinfer": (SpecInfer([2, 1]), 5),
    "specinfer-deep": (SpecInfer([1, 2]), 4),
    "rsds": (RSDS(2, 2), 5),
}
# Of sampled children: below a root of token 0 the draft is sure, below 2 less and below 1 not (see STOPPED_DRAFT).
STOPPED: dict[str, tuple[Growth, int]] = {
    "chain-sure": (Chain(3, stop=Confidence(least_prob=0.6)), 4),
    "chain-entropy": (Chain(3, stop=Confidence(most_entropy=0.8)), 4),
    "depth": (DepthStop(Static([2, 1]), threshold=-0.5, layers=[1]), 5),
    "depth-layers": (DepthStop(DySpec(depth=2, ranks=2), threshold=-0.3, layers=None), 5),
    "depth-rsds": (DepthStop(RSDS(2, 2), threshold=-0.5, layers=None), 5),
    "decision": (DecisionStop(Static([2, 1]), weights=SURE), 5),
    "decision-calibrated": (DecisionStop(Calibrated(depth=2, ranks=2), weights=SURE), 5),
}
STOPPED_DRAFT = TableModel.random(3, 148)  # greatest probabilities 0.77, 0.42, 0.65
# Of deterministic children, with the stop rules that they are meant for.
DELTAS: dict[str, tuple[Growth, int]] = {
    "opt-tree": (OptTree(depth=2, least_gain=0.0), 5),
    "opt-tree-stop": (OptTree(depth=3, least_gain=0.6), 5),
    "eagle2": (Eagle2(depth=2, beam=2), 5),
    "eagle2-narrow": (Eagle2(depth=3, beam=1), 4),
    "eagle2-depth-stop": (DepthStop(Eagle2(depth=3, beam=2), threshold=-0.6, layers=None), 5),
    "eagle2-decision": (DecisionStop(Eagle2(depth=2, beam=2), weights=SURE), 5),
}


@pytest.mark.parametrize("verifier", ["match", "rejection", "traversal"])
@pytest.mark.parametrize("policy", POLICIES)
def test_every_growth_emits_the_target_s_distribution_exactly(policy: str, verifier: str) -> None:
    growth, budget = POLICIES[policy]
    target, dist = TableModel.random(3, 11), TableModel.random(3, 12)
    trees = all_drafts(dist, growth, budget, PLAIN)
    assert abs(float(trees.weight.sum()) - 1) < EXACT
    kind = INDEPENDENT if policy.startswith("specinfer") else SAMPLED
    assert set(trees.probs.kind.unique().tolist()) == {kind}
    length = int(trees.tree.depths.max()) + 1
    assert total_variation(emitted_probs(target, trees, PLAIN, verifier, length), target.joint(PLAIN, length)) < EXACT


@pytest.mark.parametrize("verifier", ["match", "rejection", "traversal"])
@pytest.mark.parametrize("policy", STOPPED)
def test_every_stopped_growth_emits_the_target_s_distribution_exactly(policy: str, verifier: str) -> None:
    growth, budget = STOPPED[policy]
    target = TableModel.random(3, 11)
    trees = all_drafts(STOPPED_DRAFT, growth, budget, PLAIN)
    assert abs(float(trees.weight.sum()) - 1) < EXACT
    assert len(trees.tree.num_nodes.unique()) > 1, "some trees stop, some do not"
    length = int(trees.tree.depths.max()) + 1
    assert total_variation(emitted_probs(target, trees, PLAIN, verifier, length), target.joint(PLAIN, length)) < EXACT


@pytest.mark.parametrize("verifier", ["match", "rejection", "traversal"])
@pytest.mark.parametrize("policy", DELTAS)
def test_trees_of_the_most_probable_tokens_emit_the_distribution_exactly(policy: str, verifier: str) -> None:
    growth, budget = DELTAS[policy]
    for seed, dist, sampling in ((11, STOPPED_DRAFT, PLAIN), (13, TableModel.random(3, 14), Sampling(0.5, top_k=2))):
        target = TableModel.random(3, seed)
        assert draft_of(dist, growth, budget, sampling, random_rows(1)).probs is None
        trees = all_drafts(dist, growth, budget, sampling)
        length = int(trees.tree.depths.max()) + 1
        emitted = emitted_probs(target, trees, sampling, verifier, length)
        assert total_variation(emitted, target.joint(sampling, length)) < EXACT


@pytest.mark.parametrize("policy", ["layers", "layers-cut", "heap"])
def test_every_growth_emits_the_distribution_exactly_where_drafted_tokens_have_probability_zero(policy: str) -> None:
    growth, budget = POLICIES[policy]
    target, dist, sampling = TableModel.random(3, 13), TableModel.random(3, 14), Sampling(0.9, top_k=2)
    trees = all_drafts(dist, growth, budget, sampling)
    assert abs(float(trees.weight.sum()) - 1) < EXACT
    length = int(trees.tree.depths.max()) + 1
    emitted = emitted_probs(target, trees, sampling, "rejection", length)
    assert total_variation(emitted, target.joint(sampling, length)) < EXACT


@pytest.mark.parametrize("policy", ["layers", "layers-cut", "layers-narrow", "calibrated", "calibrated-cut"])
def test_whether_a_slot_is_taken_does_not_depend_on_its_own_token(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    growth, budget = POLICIES[policy]
    choices: list[tuple[Layer, Tensor, Tensor]] = []
    choose = growth_module.choose_slots

    def recorded(layer: Layer, *arguments: Any, **options: Any) -> tuple[Tensor, Tensor]:
        slots, is_taken = choose(layer, *arguments, **options)
        choices.append((layer, slots, is_taken))
        return slots, is_taken

    monkeypatch.setattr("stree.drafters.growing.choose_slots", recorded)
    dist = TableModel.random(3, 12)
    outcomes = Outcomes.all(0, num_draws(growth.bind(PLAIN), budget), dist.vocab)
    draft_of(dist, growth, budget, PLAIN, as_random(outcomes), len(outcomes.weight))
    possible, begin, compared = outcomes.weight > 0, 0, 0
    above = 1
    for layer, slots, is_taken in choices:
        taken = torch.zeros(len(slots), above * layer.ranks, dtype=torch.bool).scatter(1, slots, is_taken)
        for place in range(above):
            for rank in range(layer.ranks):
                own = begin + rank * above + place  # draws are asked for rank by rank, all nodes at once
                others = outcomes.tokens[possible].clone()
                others[:, own] = 0
                chosen = taken[possible, place * layer.ranks + rank]
                groups: dict[tuple[int, ...], set[bool]] = {}
                for key, choice in zip(map(tuple, others.tolist()), chosen.tolist(), strict=True):
                    groups.setdefault(key, set()).add(choice)
                    compared += len(groups[key]) > 1
                assert all(len(group) == 1 for group in groups.values()), f"slot {place, rank} of layer {layer}"
        begin += above * layer.ranks
        above = layer.width


def test_a_later_sibling_is_never_taken_before_an_earlier_one() -> None:
    # The first draws use up nearly all of the distribution, so that what is left of it is rounding.
    probs = torch.tensor([0.9, 1e-8, 0.0999, 1e-9, 1e-4, 3e-8], dtype=torch.float32)
    dist = TableModel(probs.log().expand(6, 6).contiguous())
    for width in (1, 2, 3, 4, 5):
        draft = draft_of(dist, DySpec(depth=1, ranks=6, width=width, threshold=0.0), 7, PLAIN, random_rows(4000), 4000)
        rng = random_rows(4000).at(torch.ones(4000, dtype=torch.long))
        rest = PLAIN.probs(dist.logits[:1]).repeat(4000, 1)
        for rank in range(int(draft.tree.num_nodes.max()) - 1):
            drawn = rng.choice("draft", rest, torch.zeros(4000, dtype=torch.long), rank)
            is_node = draft.tree.parents[:, 1 + rank] >= 0
            assert torch.equal(drawn[is_node], draft.tree.tokens[is_node, 1 + rank])
            rest = rest.scatter(1, drawn[:, None], 0.0)
