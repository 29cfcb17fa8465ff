"""Growth: plans, budgets, and the trees that come of them, against oracles that share no code with the drafter."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from helpers.enumeration import (
    DraftedTrees,
    Outcomes,
    TableLM,
    TableModel,
    as_random,
    emitted_probs,
    short_texts,
    total_variation,
)
from torch import Tensor

from stree import growth as growth_module
from stree.drafters import Draft, ModelDrafter
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
    TargetInit,
)
from stree.sampling import Random, Sampling
from stree.tree import TokenTree
from stree.verify import DELTA, INDEPENDENT, SAMPLED, DraftProbs

PLAIN = Sampling(1.0)
EXACT = 1e-12  # total variation: sums in float64


def random_rows(batch: int, seed: int = 0) -> Random:
    return Random(seed, torch.arange(batch), torch.zeros(batch, dtype=torch.long))


def draft_of(dist: TableModel, growth: Growth, budget: int, sampling: Sampling, rng: Random, batch: int = 1) -> Draft:
    """Propose trees below pending tokens 0 of one-token texts."""
    run = ModelDrafter(TableLM(dist).as_lm()).start(dist.vocab, [[0]] * batch, rng)
    return run.propose(torch.zeros(batch, dtype=torch.long), growth.bind(sampling), budget)


def nodes_by_path(tree: TokenTree, row: int = 0) -> list[tuple[int, ...]]:
    """List the token path below the root of every node that is not padding."""
    parents, tokens = tree.parents[row].tolist(), tree.tokens[row].tolist()
    paths: dict[int, tuple[int, ...]] = {0: ()}
    for node in range(1, len(parents)):
        if parents[node] >= 0:
            paths[node] = (*paths[parents[node]], tokens[node])
    return [path for node, path in paths.items() if node]


def path_prob(dist: TableModel, path: Sequence[int]) -> float:
    prob, last = 1.0, 0
    for token in path:
        prob *= float(dist.logits[last].softmax(-1)[token])
        last = token
    return prob


def test_a_chain_is_a_layer_of_one_node_for_every_drafted_token() -> None:
    plan = Chain(3).plan(4)
    assert plan.layers == (Layer(1, 1, (0,)),) * 3
    assert plan.num_nodes == 3


def test_widths_multiply_from_depth_to_depth() -> None:
    plan = Static([3, 1, 2]).plan(16)
    assert [(layer.width, layer.ranks) for layer in plan.layers] == [(3, 3), (3, 1), (6, 2)]
    assert [layer.slots for layer in plan.layers] == [(0, 1, 2), (0, 1, 2), (0, 1, 2, 3, 4, 5)]
    assert plan.num_nodes == 12


def test_parents_become_slots_of_their_layers() -> None:
    #      0         parents in no order of depth: 1 and 4 at depth 1; 2, 3 below 1; 5 below 4; 6 below 3
    plan = Static([-1, 0, 1, 1, 0, 4, 3]).plan(7)
    assert plan.layers == (Layer(2, 2, (0, 1)), Layer(3, 2, (0, 1, 2)), Layer(1, 1, (1,)))


def test_the_tree_of_the_stree_paper_has_thirteen_nodes_in_four_levels() -> None:
    plan = Static.stree().plan(13)
    assert plan.num_nodes == 12
    assert [layer.width for layer in plan.layers] == [3, 3, 3, 3]
    dist = TableModel.random(7, 0)
    for sampling in (Sampling(), PLAIN):
        tree = draft_of(dist, Static.stree(), 13, sampling, random_rows(1)).tree
        tree.check()
        # Level 2: two below the first of level 1, one below its second; level 3 alike; level 4: three below the first.
        assert tree.parents.tolist() == [[-1, 0, 0, 0, 1, 1, 2, 4, 4, 5, 7, 7, 7]]


@pytest.mark.parametrize(
    ("growth", "budget", "message"),
    [
        (Chain(4), 4, r"a tree of 5 nodes \(root included\) exceeds the budget of 4"),
        (Static([2, 2]), 6, r"a tree of 7 nodes \(root included\) exceeds the budget of 6"),
        (Static([-1, 0, 0, 1]), 3, r"a tree of 4 nodes \(root included\) exceeds the budget of 3"),
        (Static.stree(), 12, r"a tree of 13 nodes \(root included\) exceeds the budget of 12"),
    ],
    ids=["chain", "widths", "parents", "stree"],
)
def test_a_fixed_shape_above_the_budget_is_refused(growth: Growth, budget: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        growth.plan(budget)
    assert growth.plan(budget + 1).num_nodes == budget


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Chain(0), "depth must be at least 1, got 0"),
        (lambda: Static([]), "Static needs widths or parents, got an empty list"),
        (lambda: Static([2, 0]), r"every width must be at least 1, got \[2, 0\]"),
        (lambda: Static([-1, 0, 2]), r"parents must name an earlier node each, got \[-1, 0, 2\]"),
        (lambda: Static([-1, 0, -1]), r"parents must name an earlier node each, got \[-1, 0, -1\]"),
        (lambda: DySpec(depth=0), "depth must be at least 1, got 0"),
        (lambda: DySpec(ranks=0), "ranks must be at least 1, got 0"),
        (lambda: DySpec(width=-2), "width must be at least 1, got -2"),
        (lambda: DySpec(width=0), "width must be at least 1, got 0"),
        (lambda: DySpec(threshold=1.0), r"threshold must be in \[0, 1\), got 1.0"),
        (lambda: DySpec(form="beam"), "form must be 'layers' or 'heap', got 'beam'"),
    ],
    ids=[
        "chain",
        "empty",
        "width",
        "later-parent",
        "second-root",
        "depth",
        "ranks",
        "negative",
        "zero",
        "threshold",
        "form",
    ],
)
def test_a_shape_that_is_none_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


HALF: Any = 2.5


@pytest.mark.parametrize(
    "make",
    [
        lambda: Chain(HALF), lambda: DySpec(depth=HALF), lambda: Calibrated(ranks=HALF), lambda: OptTree(HALF),
        lambda: Eagle2(beam=HALF), lambda: RSDS(HALF, 2), lambda: Sequoia(depth=HALF), lambda: TargetInit(HALF),
        lambda: Static([HALF]), lambda: RSDC([HALF]), lambda: SpecInfer([HALF]),
    ],
    ids=["chain", "dyspec", "calibrated", "opt-tree", "eagle2", "rsds", "sequoia", "target-init", "static", "rsdc",
         "specinfer"],
)  # fmt: skip
def test_a_size_that_is_no_integer_is_refused(make: Any) -> None:
    with pytest.raises(TypeError, match=r"must be an integer, got float|cannot be interpreted as an integer"):
        make()


@pytest.mark.parametrize("base", [None, "chain:4", Chain])
def test_a_stop_rule_for_what_is_no_growth_is_refused(base: Any) -> None:
    for stopped in (DepthStop, DecisionStop):
        with pytest.raises(TypeError, match=r"base must be a growth such as Chain\(4\), got "):
            stopped(base)


def test_a_chain_that_something_else_than_a_rule_shall_stop_is_refused() -> None:
    rule: Any = 3
    with pytest.raises(TypeError, match=r"stop must be a rule such as Confidence\(0.4\), got 3"):
        Chain(4, stop=rule)


def test_a_shape_may_be_a_tensor() -> None:
    widths: Any = torch.tensor([2, 2])
    assert Static(widths) == Static([2, 2])
    assert RSDC(widths).widths == (2, 2)


@pytest.mark.parametrize("sampling", [Sampling(), PLAIN, Sampling(0.6, top_k=2)], ids=["greedy", "T1", "top2"])
@pytest.mark.parametrize(
    "growth",
    [DySpec(), DySpec(depth=2, ranks=3), DySpec(width=3), DySpec(threshold=0.0), DySpec(form="heap"), Calibrated()],
    ids=["default", "shallow", "narrow", "no-threshold", "heap", "calibrated"],
)
def test_a_dynamic_tree_keeps_the_budget_and_is_a_tree(growth: Growth, sampling: Sampling) -> None:
    for budget in (2, 3, 8, 17):
        draft = draft_of(TableModel.random(9, 1, scale=3.0), growth, budget, sampling, random_rows(5), 5)
        draft.tree.check()
        assert draft.tree.tokens.shape[1] <= budget
        assert int(draft.tree.num_nodes.max()) <= budget
        assert int(draft.tree.depths.max()) <= draft.max_depth
        derived = TokenTree(draft.tree.tokens, draft.tree.parents)
        assert torch.equal(draft.tree.depths, derived.depths)
        assert torch.equal(draft.tree.ancestor_mask, derived.ancestor_mask)
        for row in range(5):
            paths = nodes_by_path(draft.tree, row)
            assert len(set(paths)) == len(paths), "siblings are drawn without replacement"


@pytest.mark.parametrize("sampling", [Sampling(), PLAIN], ids=["greedy", "T1"])
@pytest.mark.parametrize("growth", [DySpec(depth=2, ranks=9), Static([5, 2])], ids=["layers", "static"])
def test_more_ranks_than_tokens_leave_the_surplus_empty(growth: Growth, sampling: Sampling) -> None:
    draft = draft_of(TableModel.random(3, 1), growth, 40, sampling, random_rows(2), 2)
    draft.tree.check()
    for row in range(2):
        paths = nodes_by_path(draft.tree, row)
        assert {path for path in paths if len(path) == 1} == {(0,), (1,), (2,)}
        assert len(set(paths)) == len(paths)


@pytest.mark.parametrize("sampling", [Sampling(), PLAIN], ids=["greedy", "T1"])
@pytest.mark.parametrize("form", ["layers", "heap"])
def test_a_dynamic_tree_fills_the_budget_when_the_draft_is_unsure(form: str, sampling: Sampling) -> None:
    for budget in (2, 5, 16, 33):
        draft = draft_of(TableModel.random(50, 2, scale=0.5), DySpec(form=form), budget, sampling, random_rows(3), 3)
        assert draft.tree.num_nodes.tolist() == [budget] * 3


@pytest.mark.parametrize("form", ["layers", "heap"])
@pytest.mark.parametrize("seed", range(5))
def test_at_temperature_0_the_nodes_are_those_of_greatest_path_probability(form: str, seed: int) -> None:
    dist, nodes = TableModel.random(6, seed, scale=2.0), 11
    heap: list[tuple[float, tuple[int, ...]]] = [(-path_prob(dist, (token,)), (token,)) for token in range(6)]
    heapq.heapify(heap)
    best: list[tuple[int, ...]] = []
    while len(best) < nodes:
        negative, path = heapq.heappop(heap)
        best.append(path)
        for token in range(6):
            heapq.heappush(heap, (-path_prob(dist, (*path, token)), (*path, token)))
    draft = draft_of(dist, DySpec(depth=nodes, ranks=6, form=form), nodes + 1, Sampling(), random_rows(1))
    assert draft.probs is None
    assert set(nodes_by_path(draft.tree)) == set(best)


def draw(rng: Random, dist: Tensor, node: int) -> int:
    """Draw from one distribution by inversion in plain Python."""
    level = float(rng.uniform("draft", torch.zeros(1, dtype=torch.long), node)) * float(dist.sum())
    for token, prob in enumerate(dist.tolist()):
        level -= prob
        if level < 0:
            return token
    raise AssertionError("the distribution ran out before the number did")


@pytest.mark.parametrize("seed", range(8))
def test_the_heap_draws_at_the_slot_of_greatest_value(seed: int) -> None:
    dist, sampling = TableModel.random(6, seed), Sampling(0.9)
    draft = draft_of(dist, DySpec(form="heap"), 12, sampling, random_rows(1, seed))
    rows = [sampling.probs(dist.logits[[0]])[0]]
    values, counts, tokens, parents = [1.0], [0], [0], [-1]
    for _ in range(11):
        parent = max(range(len(values)), key=lambda node: values[node])
        token = draw(random_rows(1, seed).at(torch.tensor([1])), rows[parent], (parent << 20) + counts[parent])
        share = float(rows[parent][token] / rows[parent].sum())
        counts[parent] += 1
        rows[parent][token] = 0.0
        values.append(values[parent] * share)
        values[parent] *= 1 - share
        rows.append(sampling.probs(dist.logits[[token]])[0])
        counts.append(0)
        tokens.append(token)
        parents.append(parent)
    assert draft.tree.parents.tolist() == [parents]
    assert draft.tree.tokens.tolist() == [tokens]


@pytest.mark.parametrize("threshold", [None, 0.0, 0.15])
@pytest.mark.parametrize("seed", range(4))
def test_layers_take_the_best_slots_before_their_tokens_are_drawn(seed: int, threshold: float | None) -> None:
    dist, sampling, budget = TableModel.random(8, seed, scale=2.0), Sampling(0.9), 10
    growth = DySpec(depth=3, ranks=3, threshold=threshold)
    draft = draft_of(dist, growth, budget, sampling, random_rows(1, seed))
    least = 1 / budget if threshold is None else threshold
    rng = random_rows(1, seed).at(torch.tensor([1]))
    # The frontier: (number of the node, its path, value); numbers count the layers' places, padding included.
    frontier: list[tuple[int, tuple[int, ...], float]] = [(0, (), 1.0)]
    expected: list[tuple[int, ...]] = []
    number, width = 1, 1
    for depth in range(3):
        slots = []
        for node, path, value in frontier:
            row = sampling.probs(dist.logits[[path[-1] if path else 0]])[0]
            rest, spent = row.clone(), 0.0
            for rank in range(3):
                token = draw(rng, rest, (node << 20) + rank)
                slots.append((value * (1 - spent), node, rank, (*path, token), value * float(row[token])))
                spent += float(row[token])
                rest[token] = 0.0
        slots.sort(key=lambda slot: (-slot[0], slot[1], slot[2]))
        width = min(budget - 1, 3 * width)
        taken = slots[: min(width, budget - 1 - len(expected))]
        sure = (budget - 1 - len(expected)) // (3 - depth)  # the last layer takes all that is left
        taken = [slot for place, slot in enumerate(taken) if slot[0] >= least or place < sure]
        frontier = [(number + place, slot[3], slot[4]) for place, slot in enumerate(taken)]
        number += width
        expected += [slot[3] for slot in taken]
    assert nodes_by_path(draft.tree) == expected


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
    "specinfer": (SpecInfer([2, 1]), 5),
    "specinfer-deep": (SpecInfer([1, 2]), 4),
    "rsds": (RSDS(2, 2), 5),
}
# Of sampled children: below a root of token 0 the draft is sure, below 2 less and below 1 not (see STOPPED_LAW).
STOPPED: dict[str, tuple[Growth, int]] = {
    "chain-sure": (Chain(3, stop=Confidence(least_prob=0.6)), 4),
    "chain-entropy": (Chain(3, stop=Confidence(most_entropy=0.8)), 4),
    "depth": (DepthStop(Static([2, 1]), threshold=-0.5, layers=[1]), 5),
    "depth-layers": (DepthStop(DySpec(depth=2, ranks=2), threshold=-0.3, layers=None), 5),
    "depth-rsds": (DepthStop(RSDS(2, 2), threshold=-0.5, layers=None), 5),
    "decision": (DecisionStop(Static([2, 1]), weights=SURE), 5),
    "decision-calibrated": (DecisionStop(Calibrated(depth=2, ranks=2), weights=SURE), 5),
}
STOPPED_LAW = TableModel.random(3, 148)  # greatest probabilities 0.77, 0.42, 0.65
# Of deterministic children, with the stop rules that they are meant for.
DELTAS: dict[str, tuple[Growth, int]] = {
    "opt-tree": (OptTree(depth=2, least_gain=0.0), 5),
    "opt-tree-stop": (OptTree(depth=3, least_gain=0.6), 5),
    "eagle2": (Eagle2(depth=2, beam=2), 5),
    "eagle2-narrow": (Eagle2(depth=3, beam=1), 4),
    "eagle2-depth-stop": (DepthStop(Eagle2(depth=3, beam=2), threshold=-0.6, layers=None), 5),
    "eagle2-decision": (DecisionStop(Eagle2(depth=2, beam=2), weights=SURE), 5),
}


def num_draws(growth: Growth, budget: int) -> int:
    plan = growth.plan(budget)
    above = [1] + [layer.width for layer in plan.layers]
    return (
        plan.num_nodes if plan.is_heap else sum(w * layer.ranks for w, layer in zip(above, plan.layers, strict=False))
    )


class Timed(Outcomes):
    """Outcomes with fixed uniform numbers besides: growth may ask for them, verification may not."""

    def uniform(self, purpose: str, offset: Tensor, node: Tensor) -> Tensor:
        assert purpose == "draft"
        seeds = (node.long() * 2654435761 % 2**32).double() / 2**32
        return (seeds + SEED * 0.3819660113) % 1.0


SEED = 1


def all_drafts(dist: TableModel, growth: Growth, budget: int, sampling: Sampling) -> tuple[DraftedTrees, Tensor]:
    """Draft with every outcome of every draw: the trees, and int64[batch, draws] what was drawn, if it can be."""
    plan = growth.bind(sampling).plan(budget)
    is_drawn = plan.drawing != "top" and not sampling.is_greedy
    outcomes = Timed.all(0, num_draws(growth.bind(sampling), budget) if is_drawn else 0, dist.vocab)
    with short_texts():
        draft = draft_of(dist, growth, budget, sampling, as_random(outcomes), len(outcomes.weight))
    rows = (outcomes.weight > 0).nonzero()[:, 0]
    parents = draft.tree.parents
    nothing = torch.zeros(len(outcomes.weight), 1, dist.vocab, dtype=dist.logits.dtype)
    dists = draft.probs or DraftProbs(nothing, parents, torch.full_like(parents, DELTA, dtype=torch.int8))
    return DraftedTrees(draft.tree.tokens, draft.tree.parents, dists, outcomes.weight).select(rows), outcomes.tokens[
        rows
    ]


@pytest.mark.parametrize("verifier", ["match", "rejection", "traversal"])
@pytest.mark.parametrize("policy", POLICIES)
def test_every_growth_emits_the_target_s_distribution_exactly(policy: str, verifier: str) -> None:
    growth, budget = POLICIES[policy]
    target, dist = TableModel.random(3, 11), TableModel.random(3, 12)
    trees, _ = all_drafts(dist, growth, budget, PLAIN)
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
    trees, _ = all_drafts(STOPPED_LAW, growth, budget, PLAIN)
    assert abs(float(trees.weight.sum()) - 1) < EXACT
    assert len(trees.tree.num_nodes.unique()) > 1, "some trees stop, some do not"
    length = int(trees.tree.depths.max()) + 1
    assert total_variation(emitted_probs(target, trees, PLAIN, verifier, length), target.joint(PLAIN, length)) < EXACT


@pytest.mark.parametrize("verifier", ["match", "rejection", "traversal"])
@pytest.mark.parametrize("policy", DELTAS)
def test_trees_of_the_most_probable_tokens_emit_the_distribution_exactly(policy: str, verifier: str) -> None:
    growth, budget = DELTAS[policy]
    for seed, dist, sampling in ((11, STOPPED_LAW, PLAIN), (13, TableModel.random(3, 14), Sampling(0.5, top_k=2))):
        target = TableModel.random(3, seed)
        assert draft_of(dist, growth, budget, sampling, random_rows(1)).probs is None
        trees, _ = all_drafts(dist, growth, budget, sampling)
        length = int(trees.tree.depths.max()) + 1
        emitted = emitted_probs(target, trees, sampling, verifier, length)
        assert total_variation(emitted, target.joint(sampling, length)) < EXACT


@pytest.mark.parametrize("policy", ["layers", "layers-cut", "heap"])
def test_every_growth_emits_the_distribution_exactly_where_drafted_tokens_have_probability_zero(policy: str) -> None:
    growth, budget = POLICIES[policy]
    target, dist, sampling = TableModel.random(3, 13), TableModel.random(3, 14), Sampling(0.9, top_k=2)
    trees, _ = all_drafts(dist, growth, budget, sampling)
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

    monkeypatch.setattr("stree.drafters.model.choose_slots", recorded)
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
