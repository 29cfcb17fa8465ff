"""Whether drafted trees may be verified without loss, whatever the target: by the distribution of every drawn token.

A verifier that reaches a node has read its ancestors, their earlier siblings and its own, and the distributions that
these are said to be drawn from.  Given all of that, the node's token must have the stated distribution without the
tokens of its earlier siblings.  A tree that keeps, drops or reorders nodes by their own tokens breaks this.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field

from stree.testing.enumeration import PLAIN, DraftedTrees, total_variation
from stree.testing.reference_rules import RULES, PlainTree, plain_trees
from stree.testing.report import compared, joint_of, table_of
from stree.testing.tables import TableModel, exact_probs
from stree.verify import DELTA

__all__ = ["drawn_problem", "emitted_problem"]

ROUNDING = 1e-6  # of stated distributions, which may be float32
UNLIKELY = 1e-6  # probability of a context below which its distribution is known less well


@dataclass(slots=True)
class NodeDraws:
    """Tokens of one node under one context.

    Attributes:
        path: tokens above the node.
        siblings: tokens of its earlier siblings.
        stated: distribution that its token must have.
        drawn: probability of each token together with the context.
    """

    path: list[int]
    siblings: list[int]
    stated: list[float]
    drawn: list[float] = field(default_factory=list)


class Distributions:
    """Numbers of distributions; those that differ by rounding have one number."""

    def __init__(self) -> None:
        self._different: list[list[float]] = []
        self._numbers: dict[tuple[float, ...], int] = {}

    def number(self, probs: list[float]) -> int:
        """Return the number of a distribution."""
        key = tuple(probs)
        if key not in self._numbers:
            alike = (
                number
                for number, other in enumerate(self._different)
                if max(abs(a - b) for a, b in zip(probs, other, strict=True)) < ROUNDING
            )
            self._numbers[key] = next(alike, len(self._different))
            if self._numbers[key] == len(self._different):
                self._different.append(probs)
        return self._numbers[key]


def drawn_problem(trees: Iterable[tuple[PlainTree, Hashable]], tolerance: float) -> tuple[float, str]:
    """Compare the distributions of drawn tokens with the stated ones: the largest distance, and where it is.

    Args:
        trees: all trees, each with what else is given, such as the tree of the step before.
        tolerance: distance that is not described.
    """
    contexts, stated = dict[Hashable, NodeDraws](), Distributions()
    for tree, given in trees:
        for node in range(1, len(tree.tokens)):
            if tree.parents[node] >= 0 and tree.kinds[node] != DELTA:
                key, seen = _context(tree, node, stated)
                entry = contexts.setdefault((given, key), seen)
                entry.drawn = entry.drawn or [0.0] * len(entry.stated)
                entry.drawn[tree.tokens[node]] += tree.weight
    worst, where = 0.0, ""
    for seen in contexts.values():
        total = sum(seen.drawn)
        drawn = [weight / total for weight in seen.drawn]
        apart = sum(abs(a - b) for a, b in zip(drawn, seen.stated, strict=True)) / 2
        apart *= min(1.0, total / UNLIKELY)  # rounding is a large part of an unlikely context
        if apart > worst:
            rows = [(str(token), *pair) for token, pair in enumerate(zip(drawn, seen.stated, strict=True))]
            worst, where = apart, _described(seen, rows) if apart > tolerance else ""
    return worst, where


def _described(seen: NodeDraws, rows: list[tuple[str, float, float]]) -> str:
    place = f"behind the siblings {seen.siblings}" if seen.siblings else "without earlier siblings"
    hint = (
        "Whether a token is drawn, kept, and where it stands, must not depend on that token, siblings are drawn "
        "without\nreplacement unless they are INDEPENDENT, and tokens are drawn by rng.choice('draft', ...)."
    )
    if max(drawn for _, drawn, _ in rows) == 1:
        hint = (
            "What was drawn before decides this token: a priority depends on it, it was not drawn by\n"
            "rng.choice('draft', ...), or its number was drawn already, by another node of the same `node` or, where\n"
            "observe does not move the positions, in the step before."
        )
    return (
        f"the child below the path {seen.path}, {place}, is not drawn from the distribution that is stated:\n"
        + table_of("token", ("drawn", "stated"), rows)
        + f"\n{hint}"
    )


def _context(tree: PlainTree, node: int, stated: Distributions) -> tuple[Hashable, NodeDraws]:
    """What is read before a node is tested, and what its token must be drawn from."""
    path = [node]
    while tree.parents[path[0]] > 0:
        path.insert(0, tree.parents[path[0]])
    key: list[Hashable] = [tree.tokens[0]]
    siblings: list[int] = []
    for step in path:
        siblings = [child for child in tree.children(tree.parents[step]) if child < step]
        key += [(tree.tokens[child], tree.kinds[child], stated.number(tree.stated[child])) for child in siblings]
        look = tree.kinds[step], stated.number(tree.stated[step])
        key.append((look, None if step == node else tree.tokens[step]))
    above = [tree.tokens[0], *(tree.tokens[step] for step in path[:-1])]
    return tuple(key), NodeDraws(above, [tree.tokens[child] for child in siblings], tree.drawn_from(node))


def emitted_problem(
    target: TableModel, trees: DraftedTrees, rule: str, root: int, tolerance: float
) -> tuple[float, str]:
    """Compare what a rule emits of the trees below a root with the target: total variation, and where it is.

    Args:
        target: the target.
        trees: all trees below the root, with their probabilities.
        rule: one of ``RULES``.
        root: the root's token.
        tolerance: distance that is not described.
    """
    length, probs = int(trees.tree.depths.max()) + 1, exact_probs(target.logits, PLAIN).tolist()
    strings = [(text, prob * tree.weight) for tree in plain_trees(trees) for text, prob in RULES[rule](tree, probs)]
    emitted, *sums = joint_of(strings, target.vocab, length)
    for one in sums:
        emitted = target.continued(emitted, PLAIN, root) + one
    right = target.joint(PLAIN, length, root)
    apart = total_variation(emitted, right)
    if apart <= tolerance:
        return apart, ""
    return apart, f"{rule} of its trees emits another distribution than the target's:\n" + compared(
        emitted, right, target.vocab, ("emitted", "target")
    )
