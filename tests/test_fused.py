"""A model's tree with retrieved branches grafted on: its shape, its exact law, and that the model keeps step.

Run: python -m pytest tests/test_fused.py
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from enumeration import (
    DraftedTrees,
    Outcomes,
    TableLaw,
    TableLM,
    as_random,
    emitted_law,
    total_variation,
)
from helpers.tiny_models import grafted, tiny_model
from torch import Tensor

import stree
from stree.drafters import Draft, Drafter, FusedDrafter, ModelDrafter, NoDrafter, SuffixDrafter
from stree.drafters.fused import _HidingLM
from stree.drafters.trust import Listed, Trust
from stree.drafters.union import graft_row
from stree.growth import RSDS, Calibrated, Chain, DepthStop, DySpec, Growth, Sequoia, Static
from stree.growth.estimates import LEVEL_WEIGHT
from stree.sampling import Random, Sampling
from stree.tree import TokenTree
from stree.verify import DELTA, SAMPLED, Acceptance, DraftLaws


def random_rows(batch: int) -> Random:
    return Random(0, torch.arange(batch), torch.zeros(batch).long())


PLAIN = Sampling(1.0)
EXACT = 1e-12
RETRIEVED = ([0, 1, 2, 0, 1], [-1, 0, 1, 0, 3])  # paths 1-2 and 0-1 below the root


class Retrieval:
    """A drafter that always retrieves the same tree; it is its own run."""

    def __init__(self, tokens: Sequence[int], parents: Sequence[int], values: Sequence[float] | None = None) -> None:
        self.tokens, self.parents = list(tokens), list(parents)
        self.values = list(values) if values is not None else [1.0] * len(self.tokens)
        self.seen: list[Acceptance] = []
        self.verified: TokenTree | None = None

    def start(self, vocab_size: int, prompts: Sequence[Sequence[int]], rng: Random) -> Retrieval:
        return self

    def propose(self, pending: Tensor, growth: Growth | None, budget: int) -> Draft:
        batch = len(pending)
        tree = TokenTree(torch.tensor([self.tokens] * batch), torch.tensor([self.parents] * batch, dtype=torch.int32))
        return Draft(tree, None, int(tree.depths.max()), values=torch.tensor([self.values] * batch))

    def extend(self, tree: TokenTree) -> None:
        self.verified = tree

    def observe(self, acceptance: Acceptance) -> None:
        self.seen.append(acceptance)


def num_draws(growth: Growth, budget: int, retrieved: int) -> int:
    """Count the draft draws of a growth; every layer offers its ranks below each place of the one above."""
    plan = growth.bind(PLAIN).plan(budget - min(retrieved, budget // 2))
    count, above = 0, 1
    for layer in plan.layers:
        count, above = count + above * layer.ranks, layer.width
    return count


def all_fused(
    law: TableLaw, growth: Growth, budget: int, retrieval: Retrieval, order: str = "model-first"
) -> DraftedTrees:
    """Draft with every outcome of every draw."""
    outcomes = Outcomes.all(0, num_draws(growth, budget, len(retrieval.tokens) - 1), law.vocab)
    batch = len(outcomes.weight)
    parts: list[Drafter] = [ModelDrafter(TableLM(law).as_lm()), retrieval]
    if order == "retrieved-first":
        parts.reverse()
    run = FusedDrafter(*parts, least_share=0.0).start(law.vocab, [[0]] * batch, as_random(outcomes))
    draft = run.propose(torch.zeros(batch, dtype=torch.long), growth.bind(PLAIN), budget)
    assert draft.laws is not None
    draft.tree.check()
    assert draft.tree.tokens.shape[1] <= budget
    trees = DraftedTrees(draft.tree.tokens, draft.tree.parents, draft.laws, outcomes.weight)
    return trees.select((outcomes.weight > 0).nonzero()[:, 0])


GROWTHS: dict[str, tuple[Growth, int]] = {
    "chain": (Chain(1), 6),
    "static": (Static([2]), 6),
    "static-deep": (Static([1, 1]), 6),
    "layers": (DySpec(depth=1, ranks=2), 6),
    "favourite": (Calibrated(1, 2, has_favourite=True), 6),
}


ORDERS = ["model-first", "retrieved-first"]


@pytest.mark.parametrize("verifier", ["rejection", "traversal"])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", GROWTHS)
def test_every_fused_tree_emits_the_target_s_law_exactly(name: str, order: str, verifier: str) -> None:
    growth, budget = GROWTHS[name]
    target, law = TableLaw.random(3, 21), TableLaw.random(3, 22)
    trees = all_fused(law, growth, budget, Retrieval(*RETRIEVED), order)
    assert abs(float(trees.weight.sum()) - 1) < EXACT
    assert (trees.laws.kind == DELTA).any() and (trees.laws.kind == SAMPLED).any()
    length = int(trees.tree.depths.max()) + 1
    emitted = emitted_law(target, trees, PLAIN, verifier, length)
    assert total_variation(emitted, target.joint(PLAIN, length)) < EXACT


def test_retrieved_nodes_that_come_first_are_tested_first_and_never_drawn_again() -> None:
    trees = all_fused(TableLaw.random(3, 22), Static([2]), 6, Retrieval([0, 1, 2], [-1, 0, 1]), "retrieved-first")
    assert (trees.tokens[:, 1:3] == torch.tensor([1, 2])).all()
    assert (trees.laws.kind[:, 1:3] == DELTA).all()
    drawn = (trees.laws.kind == SAMPLED) & (trees.parents == 0)
    assert drawn[:, 3:].sum(1).tolist() == [2] * len(trees.weight)
    assert (trees.tokens[drawn] != 1).all()


def test_a_law_that_retrieval_uses_up_is_still_fused_exactly() -> None:
    target, law = TableLaw.random(3, 21), TableLaw.random(3, 22)
    trees = all_fused(law, Chain(1), 6, Retrieval([0, 0, 1, 2], [-1, 0, 0, 0]), "retrieved-first")
    emitted = emitted_law(target, trees, PLAIN, "rejection", 2)
    assert total_variation(emitted, target.joint(PLAIN, 2)) < EXACT


def wrongly_marked(trees: DraftedTrees) -> DraftedTrees:
    """Call the sampled nodes that retrieval found too deterministic, as if they had been retrieved only."""
    found = (trees.tokens == 1) & (trees.parents == 0)
    return replace(trees, laws=replace(trees.laws, kind=trees.laws.kind.masked_fill(found, DELTA)))


def silently_dropped(trees: DraftedTrees) -> DraftedTrees:
    """Drop the sampled nodes whose token was retrieved too, and what stands below them."""
    dropped = (trees.tokens == 1) & (trees.parents == 0)
    below = (trees.tree.ancestor_mask & dropped[:, None]).any(-1)
    return replace(trees, parents=trees.parents.masked_fill(below, -1), tokens=trees.tokens.masked_fill(below, 0))


@pytest.mark.parametrize("broken", [wrongly_marked, silently_dropped])
def test_treating_a_duplicate_wrongly_is_seen(broken: Callable[[DraftedTrees], DraftedTrees]) -> None:
    target, law = TableLaw.random(3, 21), TableLaw.random(3, 22)
    trees = broken(all_fused(law, Static([2]), 6, Retrieval([0, 1], [-1, 0])))
    emitted = emitted_law(target, trees, PLAIN, "rejection", 3)
    assert total_variation(emitted, target.joint(PLAIN, 3)) > 1e-3


def greedy_fused(retrieval: Retrieval, budget: int = 8, **options: float) -> Draft:
    law = TableLaw(torch.tensor([[0.0, 3, 2, 1], [0, 1, 2, 3], [3, 0, 1, 2], [0, 0, 0, 9]], dtype=torch.float64))
    drafter = FusedDrafter(ModelDrafter(TableLM(law).as_lm()), retrieval, **options)
    run = drafter.start(4, [[0]], Random(0, torch.zeros(1).long(), torch.zeros(1).long()))
    return run.propose(torch.tensor([0]), Chain(2).bind(Sampling()), budget)


def test_retrieved_branches_hang_below_the_longest_prefix_that_they_share() -> None:
    # The chain is 0 - 1 - 3; retrieved are 1 - 3 - 2 and 1 - 0 and 2.
    draft = greedy_fused(Retrieval([0, 1, 3, 2, 0, 2], [-1, 0, 1, 2, 1, 0]))
    assert draft.tree.tokens.tolist() == [[0, 1, 3, 2, 0, 2]]
    assert draft.tree.parents.tolist() == [[-1, 0, 1, 2, 1, 0]]
    assert draft.laws is None
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
    parts: list[Drafter] = [ModelDrafter(TableLM(TableLaw.random(4, 5, scale=2.0)).as_lm()), retrieval]
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
        laws = DraftLaws(
            torch.full((len(pending), 1, 4), 0.25), parents, torch.full_like(parents, SAMPLED).to(torch.int8)
        )
        return replace(draft, laws=laws)


def test_what_was_drawn_stays_though_no_growth_says_that_it_is_drawn() -> None:
    drawn = Drawn([0, 3, 1], [-1, 0, 0], [1.0, 0.1, 0.05])
    sure = Retrieval([0, 2, 2, 2], [-1, 0, 1, 2], [1.0, 0.99, 0.98, 0.97])
    run = FusedDrafter(drawn, sure).start(4, [[0]], random_rows(1))
    assert run.propose(torch.zeros(1).long(), None, 4).tree.tokens.tolist() == [[0, 3, 1, 2]]


def test_a_sequence_learns_how_far_to_trust_retrieval_while_it_goes_on_and_anew_in_another_text() -> None:
    lm = TableLM(TableLaw.random(4, 5)).as_lm()
    retrieval = Retrieval([0, 2, 2], [-1, 0, 1], [1.0, 0.6, 0.3])
    run = FusedDrafter(ModelDrafter(lm), retrieval).start(4, [[0]] * 3, random_rows(3))
    run.propose(torch.zeros(3).long(), Chain(1).bind(Sampling()), 6)
    # Accepted: nothing of it; the first sequence's next token was retrieved, the second's not, the third stands still.
    path, lengths = torch.zeros(3, 1).int(), torch.tensor([1, 1, 0]).int()
    run.observe(Acceptance(path, lengths, torch.tensor([2, 3, 3])))
    levels = run._trust._level
    assert levels[0] > 0 > levels[1] and levels[2] == 0
    another = ModelDrafter(lm).start(4, [[0]] * 3, random_rows(3))
    run._runs = (another, SuffixDrafter().start(4, [[0]] * 3, random_rows(3)))
    run.admit(1, [0, 1])
    assert run._trust._level[1] == 0 < run._trust._level[0]


def test_a_text_in_the_place_of_another_learns_as_fast_as_that_did() -> None:
    retrieved = Retrieval([0, 2], [-1, 0], [1.0, 0.6]).propose(torch.zeros(1).long(), None, 2)
    assert retrieved.values is not None

    def level_after_a_hit(trust: Trust) -> float:
        trust.rate(retrieved.tree, retrieved.values, 0.0)  # type: ignore[arg-type]
        trust.learn([[2]])
        return trust._level[0]

    fresh, used = Trust(1), Trust(1)
    for _ in range(5):
        level_after_a_hit(used)
    used.forget(0)
    assert level_after_a_hit(used) == level_after_a_hit(fresh)


def test_what_both_find_is_worth_what_retrieval_says_and_the_model_s_share_of_the_rest() -> None:
    own = Listed([0, 1, 2, 3], [-1, 0, 0, 1], [1.0, 0.5, 0.25, 0.2])
    found = graft_row(own, Listed([0, 2, 5], [-1, 0, 1], [1.0, 0.8, 0.4]), [True] * 3, room=9, shares=True)
    assert found.tokens == [0, 1, 2, 3, 5] and found.parents == [-1, 0, 0, 1, 2]
    # 0.8 is retrieved below the root; the model shares out the other 0.2, and nothing was retrieved below its token 1.
    assert found.values == pytest.approx([1, 0.2 * 0.5, 0.8 + 0.2 * 0.25, 0.2 * 0.5 * 0.4, (0.8 + 0.05) * 0.5])


def test_retrieved_first_tokens_that_the_draft_finds_unlikely_are_left_out_when_sampling() -> None:
    law = TableLaw(torch.tensor([[0.0, 3, 2, -9]] * 4, dtype=torch.float64))
    for least_share, kept in ((0.01, [1, 2]), (0.0, [1, 2, 3, 2])):
        retrieval = Retrieval([0, 1, 2, 3, 2], [-1, 0, 1, 0, 3])
        drafter = FusedDrafter(ModelDrafter(TableLM(law).as_lm()), retrieval, least_share=least_share)
        run = drafter.start(4, [[0]], Random(0, torch.zeros(1).long(), torch.zeros(1).long()))
        tree = run.propose(torch.tensor([0]), DySpec(depth=1, ranks=1).bind(PLAIN), 8).tree
        below = tree.tokens[0][tree.ancestor_mask[0].any(0)].tolist()[1:]
        assert set(below) >= set(kept)
        assert (3 in below) == (3 in kept)


def test_first_tokens_are_pruned_by_the_root_s_law_not_by_that_of_the_last_leaf() -> None:
    logits = torch.tensor([[[9.0, 0, 0], [0, 9, 0]]] * 2)  # at columns 0 and 1

    class Scored:
        def verify(self, state: Any, tree: TokenTree, first: int = 0) -> Tensor:
            return logits

    offered = Retrieval([0, 1], [-1, 0]).propose(torch.zeros(2).long(), None, 2).tree
    hiding = _HidingLM(Scored())  # type: ignore[arg-type]
    hiding.hide(offered, torch.ones(2, 2, dtype=torch.bool), Chain(1).bind(PLAIN), 0.5)
    # The first row begins with its last leaf and the root, the second with the root and padding.
    found = hiding.verify(None, TokenTree.unchecked(torch.zeros(2, 2).long(), torch.tensor([[-1, 0], [-1, -1]]).int()))
    assert hiding.shown[:, 1].tolist() == [True, False]
    assert found[0, 1, 1] < -1e20 and found[1].equal(logits[1])


def test_what_is_hidden_from_the_model_is_in_the_tree() -> None:
    lm = TableLM(TableLaw.random(8, 2)).as_lm()
    retrieval = Retrieval(range(7), [-1, *[0] * 6], [1.0, 0.4, 0.2, 0.1, 0.1, 0.1, 0.1])
    run = FusedDrafter(retrieval, ModelDrafter(lm), least_share=0.0).start(8, [[0]], random_rows(1))
    tree = run.propose(torch.tensor([0]), DySpec(depth=1, ranks=2).bind(PLAIN), 4).tree
    assert run.hiding is not None
    hidden = retrieval.tokens[1 : 1 + int(run.hiding.shown[0, 1:].sum())]
    assert 0 < len(hidden) < 6 and {*hidden} <= {*tree.tokens[tree.parents == 0].tolist()}


def test_the_root_s_law_includes_the_model_s_favourite() -> None:
    lm = TableLM(TableLaw(torch.tensor([[0.0, 3, 2, -9]] * 4, dtype=torch.float64))).as_lm()
    retrieval = Retrieval([0, 1, 3, 3], [-1, 0, 0, 1])
    run = FusedDrafter(ModelDrafter(lm), retrieval, least_share=0.01).start(4, [[0]], random_rows(1))
    draft = run.propose(torch.tensor([0]), Calibrated(1, has_favourite=True).bind(PLAIN), 8)
    paths = draft.tree.tokens[0][draft.tree.ancestor_mask[0, -1]].tolist()
    assert paths == [0, 1, 3], "what was retrieved below the favourite stays, the draft's unlikely token goes"


PROMPTS = [[5, 6, 7, 8, 5, 6, 7, 8, 5, 6], [9, 3, 9, 3, 9], [1, 2, 4, 1, 2, 4, 1]]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("growth", [Chain(2), DySpec(depth=2)], ids=["chain", "layers"])
def test_generated_text_is_that_of_plain_decoding(temperature: float, growth: Growth, order: str) -> None:
    target, draft = grafted(tiny_model("bamba")), grafted(tiny_model("mamba2", seed=1))

    def text(drafter: Drafter, growth: Growth | None = None) -> list[list[int]]:
        return stree.generate(
            target, PROMPTS, drafter, growth, budget=8, sampling=Sampling(temperature), max_new_tokens=24,
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


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("growth", SHAPES.values(), ids=SHAPES)
def test_a_sampled_text_does_not_depend_on_its_neighbours(growth: Growth, order: str) -> None:
    few, rng = 11, random.Random(5)  # tokens so few that much repeats itself
    target, draft = (grafted(tiny_model("mamba2", seed=seed, vocab_size=few)) for seed in (0, 1))
    texts = [[rng.randrange(few) for _ in range(length)] for length in (3, 30, 1, 14, 26, 2, 35)]
    texts += [[1, 2, 3] * 8, [4, 5] * 9]
    parts: list[Drafter] = [ModelDrafter(draft), SuffixDrafter()]
    if order == "retrieved-first":
        parts.reverse()

    def text(prompts: list[list[int]]) -> list[list[int]]:
        return stree.generate(
            target, prompts, FusedDrafter(*parts), growth, budget=16, sampling=Sampling(1.0), max_new_tokens=20
        ).sequences  # fmt: skip

    assert text(texts)[:3] == text(texts[:3])


@pytest.mark.parametrize("budget", [2, 3, "auto"])
def test_small_and_changing_budgets_emit_the_same_text(budget: int | str) -> None:
    target, draft = grafted(tiny_model("bamba")), grafted(tiny_model("mamba2", seed=1))
    drafter = FusedDrafter(ModelDrafter(draft), SuffixDrafter())
    text = stree.generate(target, PROMPTS, drafter, budget=budget, max_new_tokens=40).sequences
    assert text == stree.generate(target, PROMPTS, NoDrafter(), budget=1, max_new_tokens=40).sequences


def test_a_fused_tree_has_values_where_retrieval_took_the_model_s_whole_budget() -> None:
    law = TableLaw.random(4, 0)
    run = FusedDrafter(ModelDrafter(TableLM(law).as_lm()), Retrieval([0, 2], [-1, 0])).start(
        4, [[0]], Random(0, torch.zeros(1).long(), torch.zeros(1).long())
    )
    draft = run.propose(torch.tensor([0]), DySpec(depth=2).bind(Sampling()), 2)
    assert draft.tree.tokens.tolist() == [[0, 2]]
    assert draft.values is not None and draft.values.tolist() == [[1.0, 1.0]]


def test_values_of_a_fused_tree_never_rise_along_a_path() -> None:
    draft = greedy_fused(Retrieval([0, 1, 3, 2, 0, 2], [-1, 0, 1, 2, 1, 0]))
    assert draft.values is not None
    above = draft.tree.parents[0, 1:].long()
    assert (draft.values[0, 1:] <= draft.values[0, above]).all()
    assert (draft.values > 0).all()


@pytest.mark.parametrize("order", ORDERS)
def test_the_model_keeps_step_when_retrieved_nodes_are_accepted(order: str) -> None:
    lm = grafted(tiny_model("mamba2"))
    texts = [[3, 1, 4, 1, 5], [9, 2, 6]]
    parts: list[Drafter] = [ModelDrafter(lm), Retrieval([0, 11, 12, 13], [-1, 0, 1, 2])]
    if order == "retrieved-first":
        parts.reverse()
    run = FusedDrafter(*parts).start(lm.vocab_size, texts, Random(0, torch.arange(2), torch.tensor([5, 3])))
    pending = [7, 8]
    # Accepted: all retrieved nodes and none; an own node and some retrieved ones; nothing, standing still.
    for taken in ((4, 1), (1, 3), (0, 4), (3, 0)):
        draft = run.propose(torch.tensor(pending), Chain(2).bind(Sampling()), 8)
        grown = [text + [token] for text, token in zip(texts, pending, strict=True)]
        path = torch.full((2, 4), -1, dtype=torch.int32)
        for row, length in enumerate(taken):
            nodes, tree = [0], draft.tree
            for token in (11, 12, 13)[: length - 1]:
                is_next = (tree.parents[row] == nodes[-1]) & (tree.tokens[row] == token)
                nodes.append(int(is_next.nonzero()[0]))
            path[row, :length] = torch.tensor(nodes[:length], dtype=torch.int32)
            if length:
                texts[row] = grown[row] + [11, 12, 13][: length - 1]
                pending[row] = 20 + length
        run.observe(Acceptance(path, torch.tensor(taken, dtype=torch.int32), torch.tensor(pending)))
        model_run = run._runs[0]
        if run.hiding is not None:
            run.hiding._offered = None
        draft = model_run.propose(torch.tensor(pending), Chain(1).bind(Sampling()), 2)
        for row, text in enumerate(texts):
            whole = torch.tensor([[*text, pending[row]]])
            with torch.no_grad():
                expected = int(lm.model(whole).logits[0, -1].argmax())
            assert int(draft.tree.tokens[row, 1]) == expected
        model_run.observe(Acceptance(torch.zeros(2, 1).int(), torch.zeros(2).int(), torch.tensor(pending)))


def test_a_model_is_told_verdicts_by_the_numbers_of_its_own_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    lm, told = grafted(tiny_model("mamba2")), list[Acceptance]()
    fused = FusedDrafter(Retrieval([0, 11, 12], [-1, 0, 1]), ModelDrafter(lm))
    run = fused.start(lm.vocab_size, [[3, 1, 4]], Random(0, torch.arange(1), torch.tensor([3])))
    tokens = run.propose(torch.tensor([7]), Chain(2).bind(Sampling()), 8).tree.tokens
    drafting: Any = run._runs[0]
    own = drafting.made[0].proposal.tree.tokens[0].tolist()
    monkeypatch.setattr(drafting, "observe", told.append)
    ratios, nothing = torch.arange(tokens.shape[1])[None] / 10, torch.zeros(1, 1, dtype=torch.int32)
    run.observe(Acceptance(nothing, nothing[:, 0], torch.tensor([7]), ratios))
    places = [tokens[0].tolist().index(token) for token in own]
    assert places == [0, 3, 4], "behind what was retrieved"
    assert told[0].ratios is not None and told[0].ratios[0, : len(own)].equal(ratios[0, places])


def test_the_model_keeps_step_when_the_accepted_path_runs_through_its_last_own_node_into_retrieved_ones() -> None:
    lm, text, pending = grafted(tiny_model("mamba2")), [3, 1, 4, 1, 5], 7
    own: list[int] = []
    for _ in range(2):  # what a chain of two drafts: its last node is never run
        with torch.no_grad():
            own.append(int(lm.model(torch.tensor([[*text, pending, *own]])).logits[0, -1].argmax()))
    retrieval = Retrieval([0, *own, 12, 13], [-1, 0, 1, 2, 3])
    run = FusedDrafter(ModelDrafter(lm), retrieval).start(
        lm.vocab_size, [text], Random(0, torch.arange(1), torch.tensor([5]))
    )
    draft = run.propose(torch.tensor([pending]), Chain(2).bind(Sampling()), 8)
    assert draft.tree.tokens.tolist() == [[pending, *own, 12, 13]]
    path = torch.arange(5, dtype=torch.int32)[None]
    run.observe(Acceptance(path, torch.tensor([5], dtype=torch.int32), torch.tensor([21])))
    whole = [*text, pending, *own, 12, 13, 21]
    model_run = run._runs[0]
    found = model_run.propose(torch.tensor([21]), Chain(1).bind(Sampling(1.0)), 2)
    assert found.laws is not None
    with torch.no_grad():
        expected = lm.model(torch.tensor([whole])).logits[0, -1].softmax(-1)
    torch.testing.assert_close(found.laws.probs[0, 0], expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("is_right", [True, False])
def test_a_level_learns_of_a_node_whose_place_retrieval_took_what_followed_and_nothing_of_its_children(
    is_right: bool,
) -> None:
    law = TableLaw.random(5, 1)
    retrieval = Retrieval([0, 1, 1, 1], [-1, 0, 1, 2])
    run = FusedDrafter(ModelDrafter(TableLM(law).as_lm()), retrieval).start(5, [[0]], random_rows(1))
    draft = run.propose(torch.tensor([0]), Calibrated(2).bind(Sampling()), 4)
    drafting: Any = run._runs[0]
    own, level = drafting._made.proposal, drafting._estimate._level
    eldest, chance = int(own.tree.tokens[0, 1]), float(own.values[0, 1])
    assert own.tree.parents[0].tolist()[:2] == [-1, 0] and 1 in own.tree.parents[0], "it has a child"
    assert draft.tree.tokens.tolist() == [[0, 1, 1, 1]] and eldest != 1, "all places are taken"
    following = torch.tensor([eldest if is_right else (eldest + 1) % 5])
    run.observe(Acceptance(torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, dtype=torch.int32), following))
    weight = LEVEL_WEIGHT + chance * (1 - chance)
    assert float(level.weight) == pytest.approx(weight, rel=1e-4)
    assert float(level.shift) == pytest.approx((is_right - chance) / weight, rel=1e-4)


def test_a_root_alone_is_not_taken_for_a_tree_that_was_extended_and_never_observed() -> None:
    law = TableLaw.random(5, 1)
    runs = [ModelDrafter(TableLM(law).as_lm()).start(5, [[0]], random_rows(1)) for _ in range(2)]
    runs[0].propose(torch.tensor([1]), Chain(2).bind(Sampling()), 3)
    runs[0].extend(TokenTree.chain([4, 4, 4, 4]))
    for run in runs:
        run.propose(torch.tensor([2]), None, 1)
        run.observe(Acceptance(torch.zeros(1, 1).int(), torch.ones(1).int(), torch.tensor([3])))
    assert [run._waiting.all()[0].tolist() for run in runs] == [[[2]]] * 2


def test_bad_parts_are_refused() -> None:
    part = ModelDrafter(TableLM(TableLaw.random(3, 0)).as_lm())
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


def test_laws_are_widened_by_deterministic_rows() -> None:
    target = TableLaw.random(3, 3)
    trees = all_fused(target, Chain(1), 4, Retrieval([0, 1], [-1, 0]))
    laws: DraftLaws = trees.laws
    assert laws.row.shape == laws.kind.shape == trees.tokens.shape


def test_the_bound_of_children_counts_retrieved_ones() -> None:
    part = ModelDrafter(TableLM(TableLaw(torch.tensor([[0.0, 0, 0, 9, 0]] * 5, dtype=torch.float64))).as_lm())
    run = FusedDrafter(part, Retrieval([0, 1, 2], [-1, 0, 0]), least_share=0.0).start(5, [[0]], random_rows(1))
    draft = run.propose(torch.tensor([0]), Chain(1).bind(PLAIN), 4)
    assert draft.tree.parents.tolist() == [[-1, 0, 0, 0]] and draft.laws is not None
    assert draft.laws.max_children is not None and draft.laws.max_children >= 3
