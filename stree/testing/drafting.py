"""`check_growth` and `check_drafter`: trees that can be verified without loss, by enumeration of every draw."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from itertools import product

import torch
from torch import Tensor

from stree.checks import check_object, check_sizes, integers
from stree.drafters import Draft, Drafter, NoDrafter
from stree.drafters.checked import started
from stree.growth import Chain, Growth, Static, checked_plan
from stree.sampling import Random, Sampling
from stree.testing.distributions import drawn_problem, emitted_problem
from stree.testing.enumeration import DRAFTS, PLAIN, check_enumeration, drafts_of, with_own_probs
from stree.testing.inspection import Inspection
from stree.testing.outcomes import TooManyOutcomes, all_outcomes
from stree.testing.reference_rules import RULES, PlainTree, plain_trees
from stree.testing.report import CheckFailed, Report
from stree.testing.tables import PAIRS, TableModel, table_drafter
from stree.tree import TokenTree
from stree.verify import Acceptance

__all__ = ["check_drafter", "check_growth"]

MOST_TWICE = 20_000  # outcomes of two steps
MOST_RANKS = 64  # of which all but the vocabulary's are empty
PROMPT = 0, 1, 2, 0, 1, 1  # holds pairs that differ in number, for drafters that read the text

UNIFORM = (
    "all stated distributions were uniform, so that a wrong statement may not show: pass prompts in which they differ"
)
ONE_SHAPE = (
    "all trees of a budget had one shape, so that a choice by drawn tokens may not show: take fewer ranks, or a larger "
    "budget"
)


@dataclass(slots=True)
class Drafting:
    """A drafter with a growth that is checked.

    Attributes:
        name: of what is checked.
        drafter: drafts.
        growth: shapes the trees, or None.
        sampling: of the draft.
        vocab: size of the vocabulary.
        rows: most sequences of a batch.
        where: which models draft.
        worst: largest distance so far.
        cases: distributions compared.
        notes: what was left out.
        prompts: texts before the root; an empty one for the root's token alone.
        has_nodes: whether anything was drafted.
        has_shapes: whether the trees of a budget differed in shape.
        has_drawn: whether nodes were drawn.
        is_uneven: whether the distribution of one of them was not uniform.
    """

    name: str
    drafter: Drafter
    growth: Growth | None
    sampling: Sampling
    vocab: int
    rows: int = 8192
    where: str = ""
    worst: float = 0.0
    cases: int = 0
    notes: tuple[str, ...] = ()
    prompts: Sequence[Sequence[int]] = ((),)
    has_nodes: bool = False
    has_shapes: bool = False
    has_drawn: bool = False
    is_uneven: bool = False

    def check_step(self, budget: int, targets: Sequence[TableModel], seed: int) -> None:
        """Check the trees of one step below every root."""
        for prompt, root in product(self.prompts, range(self.vocab)):
            text = f", prompt {[*prompt]}" * bool(prompt)
            inspect = Inspection(self.name, budget, self.vocab)
            place = f"budget {budget}{text}, root {root}{self.where}"
            trees = drafts_of(
                self.drafter, self.growth, budget, self.sampling, self.vocab, root, seed, rows=self.rows,
                inspect=inspect, prompt=prompt,
            )  # fmt: skip
            self.has_nodes |= inspect.has_nodes
            self.has_shapes |= bool((trees.parents != trees.parents[:1]).any())
            self.has_drawn |= inspect.has_drawn
            self.is_uneven |= inspect.is_uneven
            tolerance = inspect.tolerance
            self._judge(place, tolerance, drawn_problem(((tree, None) for tree in plain_trees(trees)), tolerance))
            for target, rule in product(targets, RULES):
                self._judge(place, tolerance, emitted_problem(target, trees, rule, root, tolerance))

    def check_two_steps(self, budget: int) -> None:
        """Check the trees of a second step, given those of the first one, of which a child is accepted or none."""
        for accepts_child in (False, True):
            inspect, trees = Inspection(self.name, budget, self.vocab), list[tuple[PlainTree, Hashable]]()
            steps = self._two_steps(budget, inspect, accepts_child=accepts_child)
            try:
                for (first, second), _, weight in all_outcomes(
                    steps, 1, rows=self.rows, most=MOST_TWICE, purposes=DRAFTS
                ):
                    whole = (weight > 0).nonzero()[:, 0]
                    given = map(_paths, first.tree.tokens[whole].tolist(), first.tree.parents[whole].tolist())
                    own = with_own_probs(second, self.vocab, weight).select(whole)
                    trees += zip(plain_trees(own), given, strict=True)
            except TooManyOutcomes as error:
                self.notes = tuple(dict.fromkeys((*self.notes, f"left out: a second step of {budget} nodes, {error}")))
                return
            place = f"budget {budget}, second step, {'a child' if accepts_child else 'no child'} accepted{self.where}"
            self._judge(place, inspect.tolerance, drawn_problem(trees, inspect.tolerance))

    def _two_steps(
        self, budget: int, inspect: Inspection, *, accepts_child: bool
    ) -> Callable[[Random, Tensor], tuple[Draft, Draft]]:
        growth = None if self.growth is None else self.growth.bind(self.sampling)

        def run(rng: Random, cases: Tensor) -> tuple[Draft, Draft]:
            roots = torch.zeros_like(cases)
            text = [*self.prompts[-1]] or [0]
            drafting = started(self.drafter, self.vocab, [text] * len(cases), rng.at(roots + len(text)))
            drafting.sampling = self.sampling
            draft = drafting.propose(roots, growth, budget)
            inspect(drafting, draft, roots)
            first = replace(draft, tree=TokenTree(draft.tree.tokens.clone(), draft.tree.parents.clone()))
            child = first.tree.parents == 0
            is_accepted = child.any(1) & accepts_child
            place = torch.where(is_accepted, child.int().argmax(1), -1)
            path, lengths = torch.stack([roots, place], 1).int(), 1 + is_accepted.int()
            roots = roots + 1
            drafting.observe(Acceptance(path, lengths, roots))
            second = drafting.propose(roots, growth, budget)
            inspect(drafting, second, roots)
            return first, second

        return run

    def check_nodes(self, hint: str) -> None:
        """Refuse what has drafted nothing in any case, so that nothing was checked."""
        if not self.has_nodes:
            raise CheckFailed(f"{self.name} drafts nothing below any root, so that nothing was checked: {hint}")

    def _judge(self, place: str, tolerance: float, problem: tuple[float, str]) -> None:
        apart, description = problem
        if description:
            raise CheckFailed(f"{self.name} is not lossless ({place}):\n{description}")
        self.worst, self.cases = max(self.worst, apart), self.cases + 1


def _paths(tokens: Sequence[int], parents: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Return the paths of a tree's nodes, whatever its padding, which depends on other rows of a batch."""
    paths: list[tuple[int, ...]] = []
    for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
        paths.append(() if node and parent < 0 else (*(paths[parent] if node else ()), token))
    return tuple(filter(None, paths))


def check_growth(
    growth: Growth, *, budget: int = 4, vocab_size: int = 3, sampling: Sampling = PLAIN, seeds: Sequence[int] = (0, 1)
) -> Report:
    """Check that the trees of a growth can be verified without loss, by enumeration of every draw.

    Trees of up to ``budget`` nodes are drawn in every possible way, below every root, with random and adversarial draft
    models in float64.  Each drawn token must have the distribution that it is said to be drawn from, given what a
    verifier has read before it, and recursive rejection and traversal must emit the target's distribution.

    Args:
        growth: what is checked.
        budget: most nodes of a tree, root included; a growth of a fixed shape needs all of its nodes.
        vocab_size: tokens.
        sampling: of the draft, not greedy.
        seeds: of the models.

    Raises:
        CheckFailed: the growth is not lossless, or drafts nothing; the message says where.
        TypeError: no growth.
        ValueError: no tree fits the budget, or there are too many ranks or outcomes: take a smaller budget, depth or
            vocabulary.
    """
    check_object("growth", growth, "bind", "stree.growth.Chain(4)")
    seeds = check_enumeration(vocab_size, seeds, budget, sampling)
    sizes = _sizes(growth.bind(sampling), budget)
    plan, name = checked_plan(growth.bind(sampling), sizes[-1]), f"growth {type(growth).__name__}"
    if (ranks := max((layer.ranks for layer in plan.layers), default=0)) > MOST_RANKS:
        raise ValueError(f"ranks must be at most {MOST_RANKS} for enumeration, {name} has {ranks}")
    drafting = Drafting(name, NoDrafter(), growth, sampling, vocab_size)
    for (kind, make), seed in product(PAIRS.items(), seeds):
        target, draft = make(vocab_size, seed)
        drafting.drafter, drafting.where = table_drafter(draft), f", {kind} models of seed {seed}"
        for number, size in enumerate(sizes):
            try:
                drafting.check_step(size, [target, TableModel.random(vocab_size, seed + 7)], seed)
            except TooManyOutcomes as error:
                feasible = f"; budget={sizes[number - 1]} is feasible" if number else ""
                raise TooManyOutcomes(f"budget {size} of {name}: {error}{feasible}") from error
        if kind == "random":
            drafting.check_two_steps(sizes[0])
    drafting.check_nodes("no slot has a priority above 0")
    if not drafting.has_shapes and plan.drawing != "top" and any(layer.slots is None for layer in plan.layers):
        drafting.notes += (ONE_SHAPE,)
    return Report(name, drafting.cases, drafting.worst, drafting.notes)


def _sizes(growth: Growth, budget: int) -> list[int]:
    """Budgets that a growth's trees fit, of those from two nodes up."""
    sizes, reason = [], None
    for size in range(2, budget + 1):
        try:
            checked_plan(growth, size)
            sizes.append(size)
        except ValueError as error:
            reason = error
    if not sizes:
        raise ValueError(f"no tree of {growth} has 2 to {budget} nodes: {reason}")
    return sizes


def check_drafter(
    drafter: Drafter,
    *,
    vocab_size: int | None = None,
    growth: Growth | None = None,
    budget: int = 4,
    sampling: Sampling = PLAIN,
    seeds: Sequence[int] = (0, 1),
    max_batch: int | None = None,
    prompts: Sequence[Sequence[int]] | None = None,
) -> Report:
    """Check that what a drafter drafts can be verified without loss, by enumeration of every draw.

    Its trees are drawn in every possible way, below every token, behind texts of one token and of several, and once
    more in a second step; ``begin`` and ``select`` are not called.  Each drawn token must have the distribution that
    ``Draft.probs`` states for it, and what is emitted must have the distribution of the target, whatever the target.

    Args:
        drafter: what is checked.  It draws by ``rng.choice("draft", probs, offset, node)``, and its model, if it has
            one, has a small vocabulary, such as ``stree.testing.TableLM``.
        vocab_size: tokens; None for those of its model, and 3 where it has none.
        growth: of its trees; None for a chain and for siblings where it uses a growth at all.
        budget: most nodes of a tree, root included.
        sampling: of the draft, not greedy.
        seeds: of the targets.
        max_batch: most sequences of a batch; 1 for a drafter that takes one at a time.
        prompts: texts before the trees; None for one of one token and one of six.  A drafter that counts in its text
            needs texts in which its counts differ: where all stated distributions were uniform, a note says so.

    Raises:
        CheckFailed: the drafter is not lossless, drafts no tree, or nothing; the message says what and where.
        TypeError: no drafter.
        ValueError: the vocabulary is too large, or there are too many outcomes.
        NotImplementedError: a drafter that reads a target's hidden states.
    """
    check_object("drafter", drafter, "hidden_layers", "stree.drafters.SuffixDrafter()")
    if drafter.hidden_layers is not None:
        raise NotImplementedError(f"{type(drafter).__name__} reads hidden states; check_drafter runs no target")
    vocab = vocab_size if vocab_size is not None else next((model.vocab_size for model in drafter.models), 3)
    seeds = check_enumeration(vocab, seeds, budget, sampling)
    check_sizes(max_batch=max_batch)
    if growth is not None:
        check_object("growth", growth, "bind", "stree.growth.Chain(4)")
    shapes: list[Growth | None] = [growth]
    if growth is None and drafter.uses_growth:
        shapes = [Chain(2), Static([2])] if budget > 2 else [Chain(1)]
    texts = [(), tuple(token % vocab for token in PROMPT)]
    if prompts is not None:
        texts = [integers("prompts", one) for one in prompts]
    if not texts or any(not 0 <= token < vocab for text in texts for token in text) or (prompts and not all(texts)):
        raise ValueError(f"prompts must be texts of tokens in [0, {vocab}), got {prompts!r:.80}")
    targets = [make(vocab, seed)[0] for make, seed in product(PAIRS.values(), seeds)]
    name = f"drafter {type(drafter).__name__}"
    drafting = Drafting(name, drafter, growth, sampling, vocab, max_batch or 8192, prompts=texts)
    for drafting.growth in shapes:
        drafting.where = "" if drafting.growth is None else f", growth {drafting.growth}"
        drafting.check_step(budget, targets, 0)
        drafting.check_two_steps(min(budget, 3))
    if not isinstance(drafter, NoDrafter):
        drafting.check_nodes("pass prompts behind which it drafts")
    if drafting.has_drawn and not drafting.is_uneven:
        drafting.notes += (UNIFORM,)
    return Report(name, drafting.cases, drafting.worst, drafting.notes)
