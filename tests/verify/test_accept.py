"""`accept`: the distribution of the output, by exact enumeration of every draft and every random choice."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from helpers.random_rows import random_rows
from torch import Tensor

from stree.sampling import Random, Sampling
from stree.testing.enumeration import EXACT, PLAIN, drafted_trees, every_outcome, step_bias
from stree.testing.tables import TableModel
from stree.tree import TokenTree
from stree.verify import DELTA, SAMPLED, VERIFIERS, Acceptance, DraftProbs, accept

CHAIN = [-1, 0, 1]
BINARY = [-1, 0, 0, 1, 1]
UNEVEN = [-1, 0, 0, 1, 3]

VERIFIER = pytest.mark.parametrize("verifier", [name for name in VERIFIERS if name not in ("auto", "block")])


@VERIFIER
@pytest.mark.parametrize(
    ("vocab", "parents", "delta"),
    [
        (4, CHAIN, {}),
        (4, [-1, 0, 0, 0, 0], {}),
        (3, BINARY, {}),
        (3, UNEVEN, {}),
        (4, BINARY, {1: 2, 2: 0, 3: 1, 4: 3}),
        (4, BINARY, {1: 3, 3: 0}),
    ],
    ids=["chain", "whole-vocabulary", "binary", "uneven", "deterministic", "deterministic-before-sampled"],
)
def test_the_emitted_distribution_is_the_target_s(
    vocab: int, parents: list[int], delta: dict[int, int], verifier: str
) -> None:
    target, draft = TableModel.random(vocab, 1), TableModel.random(vocab, 2)
    assert step_bias(target, drafted_trees(draft, parents, PLAIN, delta), verifier) < EXACT


@VERIFIER
@pytest.mark.parametrize(
    ("sampling", "draft_sampling"),
    [(Sampling(0.7), PLAIN), (Sampling(1.3, top_k=2), Sampling(0.8, top_k=2)), (Sampling(1.0, top_p=0.7), PLAIN)],
    ids=["T0.7", "top-2", "top-p"],
)
def test_the_distribution_is_exact_where_tokens_have_probability_zero(
    sampling: Sampling, draft_sampling: Sampling, verifier: str
) -> None:
    target, draft = TableModel.random(4, 3), TableModel.random(4, 4)
    # With top-k 2 the draft has no third child: that node is padding, and so is its child.
    trees = drafted_trees(draft, [-1, 0, 0, 0, 3], draft_sampling)
    assert bool((trees.parents[:, 1:] < 0).any()) == (draft_sampling.top_k is not None)
    assert step_bias(target, trees, verifier, sampling) < EXACT


def test_without_draft_distributions_every_node_is_deterministic() -> None:
    target = TableModel.random(4, 6)
    trees = drafted_trees(target, BINARY, PLAIN, delta={1: 2, 2: 0, 3: 1, 4: 3})

    def without_probs(tree: TokenTree, logits: Tensor, rng: Random, draft: DraftProbs | None) -> Acceptance:
        return accept(tree, logits, PLAIN, rng, None, "traversal")

    assert step_bias(target, trees, "traversal", verify=without_probs) < EXACT


def test_a_distribution_that_did_not_draw_the_nodes_gives_another_distribution() -> None:
    target, draft, other = (TableModel.random(4, seed) for seed in (1, 2, 3))
    trees = drafted_trees(draft, CHAIN, PLAIN)
    wrong = replace(trees.probs, probs=PLAIN.probs(other.logits)[trees.tokens])
    assert step_bias(target, replace(trees, probs=wrong), "rejection") > 0.01


def test_the_ratios_are_the_probabilities_that_tests_accept() -> None:
    target, draft = TableModel.random(4, 9), TableModel.random(4, 10)
    parents = [-1, 0, 0, 0, 2]
    trees = drafted_trees(draft, parents, PLAIN, delta={1: 3})
    for row in range(0, len(trees.weight), 21):
        one = trees.select(torch.tensor([row]))
        made, passed, ratios = torch.zeros(5), torch.zeros(5), None
        for _, accepted, weight in every_outcome(target, one, PLAIN, "rejection"):
            ratios = accepted.ratios
            is_on = (accepted.path[:, :, None] == torch.arange(5)).any(1)
            for node in range(1, 5):
                earlier = [other for other in range(1, node) if parents[other] == parents[node]]
                is_tested = is_on[:, parents[node]] & ~is_on[:, earlier].any(1)
                made[node] += weight[is_tested].sum()
                passed[node] += weight[is_tested & is_on[:, node]].sum()
        assert ratios is not None
        is_made = made > 1e-9
        assert int(is_made.sum()) >= 2
        torch.testing.assert_close(ratios[0, is_made], (passed / made)[is_made].double(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("verifier", ["rejection", "traversal"])
def test_the_tiny_mass_that_earlier_siblings_leave_of_a_float32_distribution_is_exact(verifier: str) -> None:
    first = torch.linspace(0.1, 0.9, 50)
    probs = torch.stack([first, 1 - 1e-6 - first, torch.full((50,), 6e-7), torch.full((50,), 4e-7)], -1)[:, None]
    tokens, parents = torch.arange(4).repeat(50, 1), torch.tensor([[-1, 0, 0, 0]] * 50)
    tokens[:, 1:] = torch.arange(3)
    draft = DraftProbs(probs, torch.zeros(50, 4).int(), torch.full((50, 4), SAMPLED).to(torch.int8))
    logits = torch.tensor([1e-9, 1e-9, 0.375, 0.625]).log().expand(50, 4, 4)
    ratios = accept(TokenTree(tokens, parents), logits, PLAIN, random_rows(50), draft, verifier).ratios
    assert ratios is not None
    whole, third = probs.double().sum(-1), probs[..., 2].double()
    rest = whole - probs[..., 0].double() - probs[..., 1].double()
    torch.testing.assert_close(ratios[:, 3:].double(), 0.375 * rest / third, rtol=1e-4, atol=0)


@pytest.mark.parametrize("verifier", ["auto", "match", "rejection", "traversal"])
def test_greedy_follows_the_argmax_whatever_the_verifier(verifier: str) -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(30):
        n = int(torch.randint(1, 12, (1,), generator=generator))
        parents = [-1] + [int(torch.randint(0, i, (1,), generator=generator)) for i in range(1, n)]
        tokens = torch.randint(0, 3, (n,), generator=generator).tolist()
        logits = torch.randn(1, n, 3, generator=generator)
        tree = TokenTree(torch.tensor(tokens), torch.tensor(parents, dtype=torch.int32))
        draft = DraftProbs(torch.full((1, 1, 3), 1 / 3), torch.zeros(1, n), torch.zeros(1, n))
        accepted = accept(tree, logits, Sampling(), random_rows(1), draft, verifier)
        argmax, depths = logits[0].argmax(-1).tolist(), [0] + [-1] * (n - 1)  # depth of each matching node
        for node in range(1, n):
            if depths[parents[node]] >= 0 and tokens[node] == argmax[parents[node]]:
                depths[node] = depths[parents[node]] + 1
        path = accepted.path[0, : accepted.path_lengths[0]].tolist()
        # Equal siblings may both match: the longest path counts.
        assert [depths[node] for node in path] == list(range(max(depths) + 1))
        assert all(parents[child] == parent for parent, child in itertools.pairwise(path))
        assert int(accepted.next_token[0]) == argmax[path[-1]]


def test_paths_are_padded_and_rows_of_a_batch_are_independent() -> None:
    generator = torch.Generator().manual_seed(1)
    target, draft = TableModel.random(4, 1), TableModel.random(4, 2)
    trees = drafted_trees(draft, [-1, 0, 0, 1, 3], PLAIN)
    trees = trees.select(torch.randint(0, len(trees.weight), (40,), generator=generator))
    logits = target.logits[trees.tokens]
    rng = random_rows(40)
    for verifier in ("match", "rejection", "traversal"):
        together = accept(trees.tree, logits, PLAIN, rng, trees.probs, verifier)
        assert together.path.dtype == together.path_lengths.dtype == torch.int32
        assert together.path.shape == (40, 4)
        assert torch.equal(together.num_accepted, together.path_lengths - 1)
        assert len(set(together.num_accepted.tolist())) >= 3
        place = torch.arange(4)
        assert torch.equal(together.path < 0, place >= together.path_lengths[:, None])
        assert (together.path[:, 0] == 0).all()
        for row in range(40):
            rows = torch.tensor([row])
            one = trees.select(rows)
            alone = accept(one.tree, logits[rows], PLAIN, rng.select(rows), one.probs, verifier, max_depth=3)
            assert torch.equal(alone.path[0], together.path[row])
            assert torch.equal(alone.next_token[0], together.next_token[row])


@VERIFIER
@pytest.mark.parametrize("sampling", [Sampling(), PLAIN], ids=["greedy", "T1"])
def test_padding_nodes_are_never_accepted_and_their_logits_ignored(sampling: Sampling, verifier: str) -> None:
    tree = TokenTree(torch.tensor([[5, 0, 0, 0]]), torch.tensor([[-1, 0, -1, -1]]))
    logits = torch.zeros(1, 4, 6)
    logits[..., 0] = 50.0  # the target's token is always 0, which padding has too
    logits[:, 2:] = torch.nan
    accepted = accept(tree, logits, sampling, random_rows(1), None, verifier)
    assert accepted.path.tolist() == [[0, 1]] and accepted.next_token.tolist() == [0]


def test_auto_is_traversal_with_distributions_and_match_without_or_where_every_node_is_deterministic() -> None:
    target, draft = TableModel.random(4, 1), TableModel.random(4, 2)
    trees = drafted_trees(draft, [-1, 0, 0, 1], PLAIN)
    logits, rng = target.logits[trees.tokens], random_rows(len(trees.weight))
    chosen = replace(trees.probs, kind=torch.full_like(trees.probs.kind, DELTA))
    for probs, verifier in ((trees.probs, "traversal"), (None, "match"), (chosen, "match")):
        auto = accept(trees.tree, logits, PLAIN, rng, probs)
        named = accept(trees.tree, logits, PLAIN, rng, probs, verifier)
        assert torch.equal(auto.path, named.path) and torch.equal(auto.next_token, named.next_token)


PROBS, ROW, KIND = torch.full((1, 3, 4), 0.25), torch.zeros(1, 3).int(), torch.zeros(1, 3).to(torch.int8)
NAN, INFINITE = (torch.zeros(1, 3, 4).index_fill(1, torch.tensor([1]), value) for value in (torch.nan, torch.inf))


@pytest.mark.parametrize(
    ("logits", "draft", "verifier", "message"),
    [
        (torch.zeros(1, 2, 4), None, "auto", r"target_logits must be float\[1, 3, vocab\], got \[1, 2, 4\]"),
        (torch.zeros(3, 4), None, "auto", r"target_logits must be float\[1, 3, vocab\], got \[3, 4\]"),
        (NAN, None, "auto", r"the target's logits are NaN at \(row, node\) \[\[0, 1\]\]"),
        (INFINITE, None, "auto", r"the target's logits are infinite at \(row, node\) \[\[0, 1\]\]"),
        (PROBS, None, "typical", "verifier must be one of auto, match, rejection, traversal, block, got 'typical'"),
        *(
            (PROBS, wrong, "auto", r"draft must have probs float\[1, rows, 4\], row and kind \[1, 3\], got")
            for wrong in ((PROBS[..., :3], ROW, KIND), (PROBS, ROW[:, :2], KIND), (PROBS, ROW, KIND[:, :2]))
        ),
    ],
)
def test_logits_draft_probabilities_and_verifiers_that_do_not_fit_are_refused(
    logits: Tensor, draft: tuple[Tensor, Tensor, Tensor] | None, verifier: str, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        probs = None if draft is None else DraftProbs(*draft)
        accept(TokenTree.chain([1, 2, 0]), logits, PLAIN, random_rows(1), probs, verifier)


def test_greedy_decoding_takes_an_infinite_logit_as_the_argmax() -> None:
    assert accept(TokenTree.chain([1, 2, 0]), INFINITE, Sampling(), random_rows(1)).next_token.tolist() == [0]


@pytest.mark.parametrize("verifier", ["rejection", "traversal"])
def test_unused_rows_of_draft_probabilities_may_hold_anything(verifier: str) -> None:
    """The last node of one tree is DELTA, so its row is unused; the other tree is padded there."""
    tokens, parents = torch.tensor([[0, 1, 2], [0, 3, 0]]), torch.tensor([[-1, 0, 0], [-1, 0, -1]])
    row = torch.tensor([[-1, 1, 7], [2, 1, -5]], dtype=torch.int32)
    kind = torch.tensor([[DELTA, SAMPLED, DELTA], [SAMPLED] * 3], dtype=torch.int8)
    tokens, parents, row, kind = (part.repeat(200, 1) for part in (tokens, parents, row, kind))
    tree, draft_probs = TokenTree(tokens, parents), torch.full((400, 3, 4), 0.25)
    logits = torch.tensor([0.1, 0.2, 0.4, 0.3]).log().expand(400, 3, -1)
    found, expected = (
        accept(tree, logits, PLAIN, random_rows(400), DraftProbs(probs, row, kind), verifier)
        for probs in (draft_probs.index_fill(1, torch.tensor([0, 2]), torch.nan), draft_probs)
    )
    assert torch.equal(found.path, expected.path) and torch.equal(found.next_token, expected.next_token)
    assert found.ratios is not None and expected.ratios is not None
    assert torch.equal(found.ratios[parents >= 0], expected.ratios[parents >= 0])
