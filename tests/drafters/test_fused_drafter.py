"""A model's tree with retrieved branches patched on: its shape, its exact distribution, and that the model keeps step.

Run: python -m pytest tests/drafters/test_fused_drafter.py
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from helpers.outcomes import random_rows
from helpers.enumeration import (
    DraftedTrees,
    Outcomes,
    TableLM,
    TableModel,
    as_random,
    emitted_probs,
    total_variation,
)
from helpers.fixed_tree_drafter import Retrieval
from helpers.tiny_models import patched, tiny_model
from torch import Tensor

import stree
from stree.drafters import Draft, Drafter, FusedDrafter, ModelDrafter, NoDrafter, SuffixDrafter
from stree.growth import RSDS, Calibrated, Chain, DepthStop, DySpec, Growth, Sequoia, Static
from stree.sampling import Random, Sampling
from stree.verify import DELTA, SAMPLED, Acceptance, DraftProbs


PLAIN = Sampling(1.0)
EXACT = 1e-12
RETRIEVED = ([0, 1, 2, 0, 1], [-1, 0, 1, 0, 3])  # paths 1-2 and 0-1 below the root


def num_draws(growth: Growth, budget: int, retrieved: int) -> int:
    """Count the draft draws of a growth; every layer offers its ranks below each place of the one above."""
    plan = growth.bind(PLAIN).plan(budget - min(retrieved, budget // 2))
    count, above = 0, 1
    for layer in plan.layers:
        count, above = count + above * layer.ranks, layer.width
    return count


def all_fused(
    dist: TableModel, growth: Growth, budget: int, retrieval: Retrieval, order: str = "model-first"
) -> DraftedTrees:
    """Draft with every outcome of every draw."""
    outcomes = Outcomes.all(0, num_draws(growth, budget, len(retrieval.tokens) - 1), dist.vocab)
    batch = len(outcomes.weight)
    parts: list[Drafter] = [ModelDrafter(TableLM(dist).as_lm()), retrieval]
    if order == "retrieved-first":
        parts.reverse()
    run = FusedDrafter(*parts, least_share=0.0).start(dist.vocab, [[0]] * batch, as_random(outcomes))
    draft = run.propose(torch.zeros(batch, dtype=torch.long), growth.bind(PLAIN), budget)
    assert draft.probs is not None
    draft.tree.check()
    assert draft.tree.tokens.shape[1] <= budget
    trees = DraftedTrees(draft.tree.tokens, draft.tree.parents, draft.probs, outcomes.weight)
    return trees.select((outcomes.weight > 0).nonzero()[:, 0])


GROWTHS: dict[str, tuple[Growth, int]] = {
    "chain": (Chain(1), 6),
    "static": (Static([2]), 6),
    "static-deep": (Static([1, 1]), 6),
    "layers": (DySpec(depth=1, ranks=2), 6),
}


ORDERS = ["model-first", "retrieved-first"]


@pytest.mark.parametrize("verifier", ["rejection", "traversal"])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", GROWTHS)
def test_every_fused_tree_emits_the_target_s_distribution_exactly(name: str, order: str, verifier: str) -> None:
    growth, budget = GROWTHS[name]
    target, dist = TableModel.random(3, 21), TableModel.random(3, 22)
    trees = all_fused(dist, growth, budget, Retrieval(*RETRIEVED), order)
    assert abs(float(trees.weight.sum()) - 1) < EXACT
    assert (trees.probs.kind == DELTA).any() and (trees.probs.kind == SAMPLED).any()
    length = int(trees.tree.depths.max()) + 1
    emitted = emitted_probs(target, trees, PLAIN, verifier, length)
    assert total_variation(emitted, target.joint(PLAIN, length)) < EXACT


def test_retrieved_nodes_that_come_first_are_tested_first_and_never_drawn_again() -> None:
    trees = all_fused(TableModel.random(3, 22), Static([2]), 6, Retrieval([0, 1, 2], [-1, 0, 1]), "retrieved-first")
    assert (trees.tokens[:, 1:3] == torch.tensor([1, 2])).all()
    assert (trees.probs.kind[:, 1:3] == DELTA).all()
    drawn = (trees.probs.kind == SAMPLED) & (trees.parents == 0)
    assert drawn[:, 3:].sum(1).tolist() == [2] * len(trees.weight)
    assert (trees.tokens[drawn] != 1).all()


def test_a_distribution_that_retrieval_uses_up_is_still_fused_exactly() -> None:
    target, dist = TableModel.random(3, 21), TableModel.random(3, 22)
    trees = all_fused(dist, Chain(1), 6, Retrieval([0, 0, 1, 2], [-1, 0, 0, 0]), "retrieved-first")
    emitted = emitted_probs(target, trees, PLAIN, "rejection", 2)
    assert total_variation(emitted, target.joint(PLAIN, 2)) < EXACT


def wrongly_marked(trees: DraftedTrees) -> DraftedTrees:
    """Call the sampled nodes that retrieval found too deterministic, as if they had been retrieved only."""
    found = (trees.tokens == 1) & (trees.parents == 0)
    return replace(trees, probs=replace(trees.probs, kind=trees.probs.kind.masked_fill(found, DELTA)))


def silently_dropped(trees: DraftedTrees) -> DraftedTrees:
    """Drop the sampled nodes whose token was retrieved too, and what stands below them."""
    dropped = (trees.tokens == 1) & (trees.parents == 0)
    below = (trees.tree.ancestor_mask & dropped[:, None]).any(-1)
    return replace(trees, parents=trees.parents.masked_fill(below, -1), tokens=trees.tokens.masked_fill(below, 0))


@pytest.mark.parametrize("broken", [wrongly_marked, silently_dropped])
def test_treating_a_duplicate_wrongly_is_seen(broken: Callable[[DraftedTrees], DraftedTrees]) -> None:
    target, dist = TableModel.random(3, 21), TableModel.random(3, 22)
    trees = broken(all_fused(dist, Static([2]), 6, Retrieval([0, 1], [-1, 0])))
    emitted = emitted_probs(target, trees, PLAIN, "rejection", 3)
    assert total_variation(emitted, target.joint(PLAIN, 3)) > 1e-3


def greedy_fused(retrieval: Retrieval, budget: int = 8, growth: Growth = Chain(2), **options: float) -> Draft:  # noqa: B008
    dist = TableModel(torch.tensor([[0.0, 3, 2, 1], [0, 1, 2, 3], [3, 0, 1, 2], [0, 0, 0, 9]], dtype=torch.float64))
    drafter = FusedDrafter(ModelDrafter(TableLM(dist).as_lm()), retrieval, **options)
    run = drafter.start(4, [[0]], Random(0, torch.zeros(1).long(), torch.zeros(1).long()))
    return run.propose(torch.tensor([0]), growth.bind(Sampling()), budget)


def test_retrieved_branches_hang_below_the_longest_prefix_that_they_share() -> None:
    # The chain is 0 - 1 - 3; retrieved are 1 - 3 - 2 and 1 - 0 and 2.
    draft = greedy_fused(Retrieval([0, 1, 3, 2, 0, 2], [-1, 0, 1, 2, 1, 0]))
    assert draft.tree.tokens.tolist() == [[0, 1, 3, 2, 0, 2]]
    assert draft.tree.parents.tolist() == [[-1, 0, 1, 2, 1, 0]]
    assert draft.probs is None
    assert draft.max_depth == 3
    assert draft.num_calls == 2


def test_retrieved_nodes_of_little_value_and_beyond_the_budget_are_left_out() -> None:
    retrieval = Retrieval([0, 2, 3, 0], [-1, 0, 0, 1], [1.0, 0.9, 0.01, 0.8])
    assert greedy_fused(retrieval, least_value=0.2).tree.tokens.tolist() == [[0, 1, 3, 2, 0]]
    assert greedy_fused(retrieval, budget=4).tree.tokens.tolist() == [[0, 1, 3, 2]], "a chain keeps its nodes"
    assert greedy_fused(retrieval).tree.tokens.tolist() == [[0, 1, 3, 2, 3, 0]]


def shared(values: Sequence[float], temperature: float, order: str, growth: Growth | None = None) -> Draft:
    """Fuse a retrieved chain of some values with a model's tree in 8 nodes, by default a calibrated one."""
    growth = Calibrated(3) if growth is None else growth
    retrieval = Retrieval([0, *[2] * (len(values) - 1)], range(-1, len(values) - 1), values)
    parts: list[Drafter] = [ModelDrafter(TableLM(TableModel.random(4, 5, scale=2.0)).as_lm()), retrieval]
    if order == "retrieved-first":
        parts.reverse()
    run = FusedDrafter(*parts, least_share=0.0).start(4, [[0]], Random(0, torch.zeros(1).long(), torch.zeros(1).long()))
    return run.propose(torch.tensor([0]), growth.bind(Sampling(temperature)), 8)


def of_chain(draft: Draft) -> int:
    """Count the nodes of the longest path of 2s, which the retrieved chain is."""
    tree, node, count = draft.tree, 0, 0
    while True:
        below = (tree.parents[0] == node) & (tree.tokens[0] == 2)
        if not below.any():
            return count
        node, count = int(below.nonzero()[0]), count + 1


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_sure_retrieval_takes_the_budget_and_an_unsure_one_next_to_nothing(temperature: float, order: str) -> None:
    sure = shared([0.999**depth for depth in range(9)], temperature, order)
    unsure = shared([0.01**depth for depth in range(9)], temperature, order)
    assert sure.tree.num_nodes.tolist() == [8] and unsure.tree.num_nodes.tolist() == [8]
    assert of_chain(sure) >= 6
    assert of_chain(unsure) <= 4


@pytest.mark.parametrize("order", ORDERS)
def test_a_heap_leaves_places_to_what_was_retrieved(order: str) -> None:
    sure = shared([0.999**depth for depth in range(9)], 1.0, order, DySpec(form="heap"))
    assert sure.tree.num_nodes.tolist() == [8] and of_chain(sure) >= 5


class Drawn(Retrieval):
    """A drafter that draws the same tree always, whatever growth it is given."""

    def propose(self, pending: Tensor, growth: Growth | None, budget: int) -> Draft:
        draft = super().propose(pending, growth, budget)
        parents = draft.tree.parents
        dists = DraftProbs(
            torch.full((len(pending), 1, 4), 0.25), parents, torch.full_like(parents, SAMPLED).to(torch.int8)
        )
        return replace(draft, probs=dists)


def test_what_was_drawn_stays_though_no_growth_says_that_it_is_drawn() -> None:
    drawn = Drawn([0, 3, 1], [-1, 0, 0], [1.0, 0.1, 0.05])
    sure = Retrieval([0, 2, 2, 2], [-1, 0, 1, 2], [1.0, 0.99, 0.98, 0.97])
    run = FusedDrafter(drawn, sure).start(4, [[0]], random_rows(1))
    assert run.propose(torch.zeros(1).long(), None, 4).tree.tokens.tolist() == [[0, 3, 1, 2]]


def test_retrieved_first_tokens_that_the_draft_finds_unlikely_are_left_out_when_sampling() -> None:
    dist = TableModel(torch.tensor([[0.0, 3, 2, -9]] * 4, dtype=torch.float64))
    for least_share, kept in ((0.01, [1, 2]), (0.0, [1, 2, 3, 2])):
        retrieval = Retrieval([0, 1, 2, 3, 2], [-1, 0, 1, 0, 3])
        drafter = FusedDrafter(ModelDrafter(TableLM(dist).as_lm()), retrieval, least_share=least_share)
        run = drafter.start(4, [[0]], Random(0, torch.zeros(1).long(), torch.zeros(1).long()))
        tree = run.propose(torch.tensor([0]), DySpec(depth=1, ranks=1).bind(PLAIN), 8).tree
        below = tree.tokens[0][tree.ancestor_mask[0].any(0)].tolist()[1:]
        assert set(below) >= set(kept)
        assert (3 in below) == (3 in kept)


PROMPTS = [[5, 6, 7, 8, 5, 6, 7, 8, 5, 6], [9, 3, 9, 3, 9], [1, 2, 4, 1, 2, 4, 1]]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("growth", [Chain(2), DySpec(depth=2)], ids=["chain", "layers"])
def test_generated_text_is_that_of_plain_decoding(temperature: float, growth: Growth, order: str) -> None:
    target, draft = patched(tiny_model("bamba")), patched(tiny_model("mamba2", seed=1))

    def text(drafter: Drafter, growth: Growth | None = None) -> list[list[int]]:
        return stree.generate(
            target, PROMPTS, drafter, growth=growth, budget=8, sampling=Sampling(temperature), max_new_tokens=24,
            verifier="match",
        ).sequences  # fmt: skip

    parts: list[Drafter] = [ModelDrafter(draft), SuffixDrafter()]
    if order == "retrieved-first":
        parts.reverse()
    assert text(FusedDrafter(*parts), growth) == text(NoDrafter())


SHAPES: dict[str, Growth] = {
    "layers": Calibrated(2), "heap": DySpec(form="heap"), "chain": Chain(3), "fixed": Static([2, 1]),
    "stop": DepthStop(Chain(3)), "beam": RSDS(2, 3), "measured": Sequoia(3),
}  # fmt: skip


@pytest.mark.parametrize(("name", "order"), [*zip(SHAPES, [*ORDERS * 3, ORDERS[0]], strict=True)])
def test_a_sampled_text_does_not_depend_on_its_neighbours(name: str, order: str) -> None:
    few, rng = 11, random.Random(5)  # tokens so few that much repeats itself
    target, draft = (patched(tiny_model("mamba2", seed=seed, vocab_size=few)) for seed in (0, 1))
    texts = [[rng.randrange(few) for _ in range(length)] for length in (3, 30, 1, 14, 26, 2, 35)]
    texts += [[1, 2, 3] * 8, [4, 5] * 9]
    parts: list[Drafter] = [ModelDrafter(draft), SuffixDrafter()]
    if order == "retrieved-first":
        parts.reverse()

    def text(prompts: list[list[int]]) -> list[list[int]]:
        return stree.generate(
            target,
            prompts,
            FusedDrafter(*parts),
            growth=SHAPES[name],
            budget=16,
            sampling=Sampling(1.0),
            max_new_tokens=12,
        ).sequences

    assert text(texts)[:3] == text(texts[:3])


@pytest.mark.parametrize("budget", [2, 3])
def test_small_budgets_emit_the_same_text(budget: int) -> None:
    target, draft = patched(tiny_model("bamba")), patched(tiny_model("mamba2", seed=1))
    drafter = FusedDrafter(ModelDrafter(draft), SuffixDrafter())
    text = stree.generate(target, PROMPTS, drafter, budget=budget, max_new_tokens=40).sequences
    assert text == stree.generate(target, PROMPTS, NoDrafter(), budget=1, max_new_tokens=40).sequences


def test_a_fused_tree_has_values_that_never_rise_along_a_path() -> None:
    draft = greedy_fused(Retrieval([0, 1, 3, 2, 0, 2], [-1, 0, 1, 2, 1, 0]))
    assert draft.values is not None and (draft.values > 0).all()
    above = draft.tree.parents[0, 1:].long()
    assert (draft.values[0, 1:] <= draft.values[0, above]).all()
    taken = greedy_fused(Retrieval([0, 2], [-1, 0]), budget=2, growth=DySpec(depth=2))
    assert taken.tree.tokens.tolist() == [[0, 2]], "retrieval took the model's whole budget"
    assert taken.values is not None and taken.values.tolist() == [[1.0, 1.0]]


def test_a_sequence_learns_how_far_to_trust_retrieval_and_anew_in_another_text() -> None:
    retrieval = Retrieval([0, 2, 2], [-1, 0, 1], [1.0, 0.6, 0.3])
    run = FusedDrafter(ModelDrafter(TableLM(TableModel.random(4, 5)).as_lm()), retrieval).start(
        4, [[0]] * 4, random_rows(4)
    )

    def worth() -> list[float]:
        """Give what the retrieved first token of each sequence is worth."""
        draft = run.propose(torch.zeros(4).long(), Chain(1).bind(Sampling()), 6)
        found = (draft.tree.tokens == 2) & (draft.tree.parents == 0)
        assert draft.values is not None
        return [float(draft.values[row][found[row]][0]) for row in range(4)]

    worth()
    # Nothing is accepted; the next token was retrieved in the first row only; the third is inactive, the fourth ends.
    path, lengths = torch.zeros(4, 1).int(), torch.tensor([1, 1, 0, 1]).int()
    run.observe(Acceptance(path, lengths, torch.tensor([2, 3, 3, 3])))
    run.admit(3, [0, 1])
    right, wrong, inactive, new = worth()
    assert right > inactive > wrong and new == inactive


def taken_by(draft: Draft, row: int, tokens: Sequence[int]) -> list[int]:
    """Give the path from the root along some tokens."""
    nodes, tree = [0], draft.tree
    for token in tokens:
        nodes.append(int(((tree.parents[row] == nodes[-1]) & (tree.tokens[row] == token)).nonzero()[0]))
    return nodes


@pytest.mark.parametrize("order", ORDERS)
def test_the_model_keeps_step_when_retrieved_nodes_are_accepted(order: str) -> None:
    lm, texts, pending = patched(tiny_model("mamba2")), [[3, 1, 4, 1, 5], [9, 2, 6]], [7, 8]
    parts: list[Drafter] = [ModelDrafter(lm), Retrieval([0, 11, 12, 13], [-1, 0, 1, 2])]
    if order == "retrieved-first":
        parts.reverse()
    run = FusedDrafter(*parts).start(lm.vocab_size, texts, Random(0, torch.arange(2), torch.tensor([5, 3])))
    # Accepted: all retrieved nodes and the root alone; some retrieved ones; of an inactive sequence nothing.
    for taken in ((4, 1), (1, 3), (0, 4), (3, 0)):
        draft = run.propose(torch.tensor(pending), Chain(2).bind(Sampling()), 8)
        for row, text in enumerate(texts):
            with torch.no_grad():
                expected = int(lm.model(torch.tensor([[*text, pending[row]]])).logits[0, -1].argmax())
            assert expected in draft.tree.tokens[row][draft.tree.parents[row] == 0], "the model's own first token"
        path = torch.full((2, 4), -1, dtype=torch.int32)
        for row, length in enumerate(taken):
            nodes = taken_by(draft, row, (11, 12, 13)[: max(length - 1, 0)])
            path[row, :length] = torch.tensor(nodes[:length], dtype=torch.int32)
            if length:
                texts[row] = [*texts[row], pending[row], *(11, 12, 13)[: length - 1]]
                pending[row] = 20 + length
        run.observe(Acceptance(path, torch.tensor(taken, dtype=torch.int32), torch.tensor(pending)))


def test_the_model_keeps_step_when_its_last_node_and_retrieved_ones_below_are_accepted() -> None:
    lm, text, own = patched(tiny_model("mamba2")), [3, 1, 4, 1, 5, 7], list[int]()
    for _ in range(2):  # what a chain of two drafts: its last node is never run
        with torch.no_grad():
            own.append(int(lm.model(torch.tensor([[*text, *own]])).logits[0, -1].argmax()))
    run = FusedDrafter(ModelDrafter(lm), Retrieval([0, *own, 12, 13], [-1, 0, 1, 2, 3])).start(
        lm.vocab_size, [text[:-1]], Random(0, torch.arange(1), torch.tensor([5]))
    )
    draft = run.propose(torch.tensor([7]), Chain(2).bind(Sampling()), 8)
    assert draft.tree.tokens.tolist() == [[7, *own, 12, 13]]
    run.observe(Acceptance(torch.arange(5).int()[None], torch.tensor([5]).int(), torch.tensor([21])))
    found = run.propose(torch.tensor([21]), Chain(1).bind(Sampling(1.0)), 8)
    assert found.probs is not None
    with torch.no_grad():
        expected = lm.model(torch.tensor([[*text, *own, 12, 13, 21]])).logits[0, -1].softmax(-1)
    torch.testing.assert_close(found.probs.probs[0, 0], expected, rtol=1e-3, atol=1e-5)


def test_bad_parts_are_refused() -> None:
    part = ModelDrafter(TableLM(TableModel.random(3, 0)).as_lm())
    with pytest.raises(ValueError, match=r"least_value must be in \[0, 1\], got 2"):
        FusedDrafter(part, SuffixDrafter(), least_value=2)
    rng = Random(0, torch.zeros(1).long(), torch.zeros(1).long())
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


def test_the_bound_of_children_counts_retrieved_ones() -> None:
    part = ModelDrafter(TableLM(TableModel(torch.tensor([[0.0, 0, 0, 9, 0]] * 5, dtype=torch.float64))).as_lm())
    run = FusedDrafter(part, Retrieval([0, 1, 2], [-1, 0, 0]), least_share=0.0).start(5, [[0]], random_rows(1))
    draft = run.propose(torch.tensor([0]), Chain(1).bind(PLAIN), 4)
    assert draft.tree.parents.tolist() == [[-1, 0, 0, 0]] and draft.probs is not None
    assert draft.probs.max_children is not None and draft.probs.max_children >= 3
