"""An eye on a drafter: what was proposed, tested and accepted, by depth and by sibling rank."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import Tensor

from stree.budget.policy import AutoSize
from stree.drafters import Draft, Drafter, DraftRun, HasModel
from stree.growth import Growth
from stree.sampling import Random
from stree.tree import TokenTree
from stree.verify import Acceptance

__all__ = ["Counts", "Watch"]


@dataclass(slots=True)
class Counts:
    """Sums over the steps of a generation and its sequences.

    Attributes:
        drafted: nodes proposed, roots and padding not counted.
        tested: for each sibling rank, how many children of that rank verification got as far as testing.
        accepted: how many of those it accepted.
        reached: for each depth, in how many steps at least so many drafted nodes were accepted.
        has_laws: whether any tree came with the laws that its nodes were drawn from.
    """

    drafted: int = 0
    tested: Counter[int] = field(default_factory=Counter)
    accepted: Counter[int] = field(default_factory=Counter)
    reached: Counter[int] = field(default_factory=Counter)
    has_laws: bool = False

    def add(self, parents: Sequence[int], path: Sequence[int]) -> None:
        """Count one tree and its accepted path, which begins with the root."""
        self.drafted += sum(parent >= 0 for parent in parents)
        self.reached.update(range(len(path)))
        children: dict[int, list[int]] = {}
        for node, parent in enumerate(parents[1:], 1):
            children.setdefault(parent, []).append(node)
        for node, following in zip(path, [*path[1:], None], strict=True):
            for rank, child in enumerate(children.get(node, ())):
                self.tested[rank] += 1
                if child == following:
                    self.accepted[rank] += 1
                    break


class Watch:
    """Trees and acceptances of a generation; they are read after it.

    A drafter's host code does not run when a step is replayed, so ``over`` hears of launched steps only.

    Attributes:
        steps: what was proposed and what was accepted of it.
        has_laws: whether any tree came with the laws that its nodes were drawn from.
    """

    def __init__(self) -> None:
        self.steps: list[tuple[TokenTree, Acceptance]] = []
        self.has_laws = False

    def over(self, drafter: Drafter) -> Drafter:
        """Give a copy of a drafter whose runs are watched; it is of the same class, so all else is as it was.

        What is made of it over another model is watched too.
        """
        watched = copy.copy(drafter)

        def start(vocab_size: int, prompts: Sequence[Sequence[int]], rng: Random) -> DraftRun:
            return self._over_run(drafter.start(vocab_size, prompts, rng))

        setattr(watched, "start", start)  # noqa: B010  a method of the class, overridden on this object
        if isinstance(drafter, HasModel):
            with_model = drafter.with_model
            setattr(watched, "with_model", lambda change: self.over(with_model(change)))  # noqa: B010
        return watched

    @contextmanager
    def over_sizes(self) -> Iterator[None]:
        """Watch what controllers over sizes are told: for them every step is brought to the host, replayed or not."""
        observe = AutoSize.observe

        def watched_observe(steering: AutoSize, draft: Draft, acceptance: Acceptance) -> None:
            if type(steering) is AutoSize:  # no rehearsal
                self.steps.append((draft.tree, acceptance))
                self.has_laws |= draft.laws is not None
            observe(steering, draft, acceptance)

        setattr(AutoSize, "observe", watched_observe)  # noqa: B010
        try:
            yield
        finally:
            setattr(AutoSize, "observe", observe)  # noqa: B010

    def counts(self) -> Counts:
        """Go through what happened."""
        counts = Counts(has_laws=self.has_laws)
        for tree, acceptance in self.steps:
            rows = zip(tree.parents.tolist(), acceptance.path.tolist(), acceptance.path_lengths.tolist(), strict=True)
            for parents, path, length in rows:
                if length:
                    counts.add(parents, path[:length])
        return counts

    def _over_run(self, run: DraftRun) -> DraftRun:
        """Override what a run proposes and observes."""
        propose, observe = run.propose, run.observe
        tree: TokenTree

        def watched_propose(pending: Tensor, growth: Growth | None, budget: int) -> Draft:
            nonlocal tree
            draft = propose(pending, growth, budget)
            tree = draft.tree
            self.has_laws |= draft.laws is not None
            return draft

        def watched_observe(acceptance: Acceptance) -> None:
            self.steps.append((tree, acceptance))
            observe(acceptance)

        setattr(run, "propose", watched_propose)  # noqa: B010
        setattr(run, "observe", watched_observe)  # noqa: B010
        return run
