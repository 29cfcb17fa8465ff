"""Fused drafter: shape and exact distribution of a model's tree with retrieved branches, and the model's own state."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.draft_steps import DraftSteps, Retrieval
from helpers.fast_cases import slow_unless
from helpers.random_rows import random_rows
from helpers.table_drafts import nodes_by_path
from helpers.tiny_models import TOLERANCE, VOCAB, fresh_logits, patched, tiny_model
from torch import Tensor

import stree
from stree.drafters import Draft, Drafter, FusedDrafter, ModelDrafter, NoDrafter, SuffixDrafter
from stree.growth import Calibrated, Chain, DySpec, Growth, Static
from stree.sampling import Sampling
from stree.testing.enumeration import EXACT, PLAIN, DraftedTrees, drafts_of, step_bias
from stree.testing.tables import TableModel, table_drafter
from stree.verify import DELTA, SAMPLED, DraftProbs

RETRIEVED = ([0, 1, 2, 0, 1], [-1, 0, 1, 0, 3])  # paths 1-2 and 0-1 below the root
TARGET, DIST = TableModel.random(3, 21), TableModel.random(3, 22)


def all_fused(growth: Growth, retrieval: Retrieval) -> DraftedTrees:
    """Draft 6 nodes with every outcome of every draw."""
    return drafts_of(FusedDrafter(table_drafter(DIST), retrieval, least_share=0.0), growth, 6, PLAIN, 3)


GROWTHS: dict[str, Growth] = {
    "chain": Chain(1), "static": Static([2]), "static-deep": Static([1, 1]), "layers": DySpec(depth=1, ranks=2),
}  # fmt: skip


@pytest.mark.parametrize("verifier", ["rejection", "traversal"])
@pytest.mark.parametrize("name", GROWTHS)
def test_every_fused_tree_emits_the_target_s_distribution_exactly(name: str, verifier: str) -> None:
    trees = all_fused(GROWTHS[name], Retrieval(*RETRIEVED))
    assert (trees.probs.kind == DELTA).any() and (trees.probs.kind == SAMPLED).any()
    assert trees.tokens.shape[1] <= 6
    assert step_bias(TARGET, trees, verifier) < EXACT


def test_either_drafter_may_be_named_first() -> None:
    drafters = table_drafter(DIST), Retrieval(*RETRIEVED)
    one, other = (drafts_of(FusedDrafter(*order), Static([2]), 6, PLAIN, 3) for order in (drafters, drafters[::-1]))
    assert torch.equal(one.tokens, other.tokens) and torch.equal(one.parents, other.parents)


def test_sampled_nodes_declared_deterministic_because_they_were_retrieved_too_are_biased() -> None:
    trees = all_fused(Static([2]), Retrieval([0, 1], [-1, 0]))
    is_retrieved = (trees.tokens == 1) & (trees.parents == 0)
    wrong = replace(trees.probs, kind=trees.probs.kind.masked_fill(is_retrieved, DELTA))
    assert step_bias(TARGET, replace(trees, probs=wrong), "rejection") > 1e-3


def greedy_fused(retrieval: Retrieval, budget: int = 8, growth: Growth = Chain(2), **options: float) -> Draft:  # noqa: B008
    dist = TableModel(torch.tensor([[0.0, 3, 2, 1], [0, 1, 2, 3], [3, 0, 1, 2], [0, 0, 0, 9]], dtype=torch.float64))
    run = FusedDrafter(table_drafter(dist), retrieval, **options).start(4, [[0]], random_rows(1))
    return run.propose(torch.tensor([0]), growth.bind(Sampling()), budget)


def test_retrieved_branches_hang_below_the_longest_prefix_that_they_share() -> None:
    # The chain is 0 - 1 - 3; retrieved are 1 - 3 - 2 and 1 - 0 and 2.
    draft = greedy_fused(Retrieval([0, 1, 3, 2, 0, 2], [-1, 0, 1, 2, 1, 0]))
    assert draft.tree.tokens.tolist() == [[0, 1, 3, 2, 0, 2]]
    assert draft.tree.parents.tolist() == [[-1, 0, 1, 2, 1, 0]]
    assert draft.probs is None
    assert draft.max_depth == 3
    assert draft.num_calls == 2


def test_retrieved_nodes_beyond_the_budget_are_left_out() -> None:
    retrieval = Retrieval([0, 2, 3, 0], [-1, 0, 0, 1], [1.0, 0.9, 0.01, 0.8])
    assert greedy_fused(retrieval, budget=4).tree.tokens.tolist() == [[0, 1, 3, 2]], "a chain keeps its nodes"
    assert greedy_fused(retrieval).tree.tokens.tolist() == [[0, 1, 3, 2, 3, 0]]


@pytest.mark.parametrize(
    ("growth", "temperature", "least"),
    [(Calibrated(3), 0.0, 6), (Calibrated(3), 0.8, 6), (DySpec(form="heap"), 1.0, 5)],
    ids=["greedy", "sampled", "heap"],
)
@pytest.mark.slow
def test_a_sure_retrieval_takes_the_budget_and_an_unsure_one_next_to_nothing(
    growth: Growth, temperature: float, least: int
) -> None:
    model = table_drafter(TableModel.random(4, 5, scale=2.0))
    counts = []
    for rate in (0.999, 0.01):  # a retrieved chain of 2s
        retrieval = Retrieval([0, *[2] * 8], range(-1, 8), [rate**depth for depth in range(9)])
        run = FusedDrafter(model, retrieval, least_share=0.0).start(4, [[0]], random_rows(1))
        tree = run.propose(torch.tensor([0]), growth.bind(Sampling(temperature)), 8).tree
        assert tree.num_nodes.tolist() == [8]
        paths = nodes_by_path(tree)
        counts.append(max((len(path) for path in paths if set(path) == {2}), default=0))
    assert counts[0] >= least and counts[1] <= 4


class Drawn(Retrieval):
    """A drafter that draws the same tree always, whatever growth it is given."""

    def propose(self, pending: Tensor, growth: Growth | None, budget: int) -> Draft:
        draft = super().propose(pending, growth, budget)
        parents = draft.tree.parents
        dists = DraftProbs(
            torch.full((len(parents), 1, 4), 0.25), parents, torch.full_like(parents, SAMPLED).to(torch.int8)
        )
        return replace(draft, probs=dists)


def test_what_was_drawn_stays_though_no_growth_says_that_it_is_drawn() -> None:
    drawn = Drawn([0, 3, 1], [-1, 0, 0], [1.0, 0.1, 0.05])
    sure = Retrieval([0, 2, 2, 2], [-1, 0, 1, 2], [1.0, 0.99, 0.98, 0.97])
    run = FusedDrafter(drawn, sure).start(4, [[0]], random_rows(1))
    assert run.propose(torch.tensor([0]), None, 4).tree.tokens.tolist() == [[0, 3, 1, 2]]


@pytest.mark.parametrize("sampling", [PLAIN, Sampling()], ids=["sampled", "greedy"])
def test_retrieved_first_tokens_that_the_draft_finds_unlikely_are_left_out(sampling: Sampling) -> None:
    dist = TableModel(torch.tensor([[0.0, 3, 2, -9]] * 4, dtype=torch.float64))
    for least_share, kept in ((0.01, [1, 2]), (0.0, [1, 2, 3, 2])):
        retrieval = Retrieval([0, 1, 2, 3, 2], [-1, 0, 1, 0, 3])
        run = FusedDrafter(table_drafter(dist), retrieval, least_share=least_share).start(4, [[0]], random_rows(1))
        tree = run.propose(torch.tensor([0]), DySpec(depth=1, ranks=1).bind(sampling), 8).tree
        below = tree.tokens[0][tree.ancestor_mask[0].any(0)].tolist()[1:]
        assert set(below) >= set(kept)
        assert (3 in below) == (3 in kept)


PROMPTS = [[5, 6, 7, 8, 5, 6, 7, 8, 5, 6], [9, 3, 9, 3, 9], [1, 2, 4, 1, 2, 4, 1]]


@pytest.mark.parametrize(
    ("temperature", "growth", "budget"),
    slow_unless(
        lambda _, __, budget: budget != 2,
        [(0.0, Chain(2), 8), (0.8, DySpec(depth=2), 8), (0.0, None, 2), (0.0, None, 3), (0.0, Chain(2), "auto")],
    ),
)
def test_generated_text_is_that_of_plain_decoding(temperature: float, growth: Growth | None, budget: int | str) -> None:
    target, draft = patched(tiny_model("bamba")), patched(tiny_model("mamba2", seed=1))

    def text(drafter: Drafter, growth: Growth | None = None) -> list[list[int]]:
        options: dict[str, Any] = {"sampling": Sampling(temperature), "max_new_tokens": 24, "verifier": "match"}
        return stree.generate(target, PROMPTS, drafter, growth=growth, budget=budget, **options).sequences

    assert text(FusedDrafter(ModelDrafter(draft), SuffixDrafter()), growth) == text(NoDrafter())


def test_a_fused_tree_has_values_that_never_rise_along_a_path() -> None:
    draft = greedy_fused(Retrieval([0, 1, 3, 2, 0, 2], [-1, 0, 1, 2, 1, 0]))
    assert draft.values is not None and (draft.values > 0).all()
    above = draft.tree.parents[0, 1:].long()
    assert (draft.values[0, 1:] <= draft.values[0, above]).all()
    taken = greedy_fused(Retrieval([0, 2], [-1, 0]), budget=2, growth=DySpec(depth=2))
    assert taken.tree.tokens.tolist() == [[0, 2]], "retrieval took the model's whole budget"
    assert taken.values is not None and taken.values.tolist() == [[1.0, 1.0]]


def test_the_model_s_state_follows_the_text_when_retrieved_nodes_are_accepted() -> None:
    model, texts = tiny_model("mamba2"), [[3, 1, 4, 1, 5], [9, 2, 6], [7]]
    drafter = FusedDrafter(ModelDrafter(patched(model)), Retrieval([0, 11, 12, 13], [-1, 0, 1, 2]))
    steps = DraftSteps(drafter, VOCAB, texts, Chain(2))
    for _ in range(12):
        steps.step()
    assert steps.error(model) < 20 * TOLERANCE[torch.float32]


def test_the_model_s_state_follows_when_its_last_node_and_retrieved_ones_below_it_are_accepted() -> None:
    model, text, own = tiny_model("mamba2"), [3, 1, 4, 1, 5], list[int]()
    steps = DraftSteps(ModelDrafter(patched(model)), VOCAB, [text], Chain(2))
    for _ in range(2):  # what a chain of two drafts: its last node is never run
        own.append(int(fresh_logits(model, [*text, *steps.pending.tolist(), *own])[-1].argmax()))
    drafter = FusedDrafter(ModelDrafter(patched(model)), Retrieval([0, *own, 12, 13], [-1, 0, 1, 2, 3]))
    steps = DraftSteps(drafter, VOCAB, [text], Chain(2))
    draft = steps.run.propose(steps.pending, steps.growth, 8)
    assert draft.tree.tokens.tolist() == [[*steps.pending.tolist(), *own, 12, 13]]
    steps.accept(draft.tree, [[0, 1, 2, 3, 4]])
    assert steps.error(model) < 20 * TOLERANCE[torch.float32]


def test_bad_parts_are_refused() -> None:
    part = table_drafter(TableModel.random(3, 0))
    with pytest.raises(ValueError, match=r"least_share must be in \[0, 1\], got 2"):
        FusedDrafter(part, SuffixDrafter(), least_share=2)
    rng = random_rows(1)
    with pytest.raises(TypeError, match="FusedDrafter needs drafters whose trees can be extended, got NoDrafter"):
        FusedDrafter(NoDrafter(), SuffixDrafter()).start(3, [[0]], rng)
    with pytest.raises(TypeError, match="needs a drafter that runs no model, got ModelDrafter and ModelDrafter"):
        FusedDrafter(part, part)
    without_values = Retrieval([0, 1], [-1, 0])
    propose = without_values.propose
    without_values.propose = lambda *arguments: replace(propose(*arguments), values=None)  # type: ignore[method-assign]
    run = FusedDrafter(part, without_values).start(3, [[0]], rng)
    with pytest.raises(ValueError, match="a drafter of FusedDrafter must draft deterministic nodes"):
        run.propose(torch.tensor([0]), Chain(1).bind(PLAIN), 4)
