"""A drafter that keeps an eye on another: what was proposed, tested and accepted, by depth and by sibling rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from stree.drafters import Draft, Drafter, DraftRun
from stree.growth import Growth
from stree.sampling import Random
from stree.tree import TokenTree
from stree.verify import Acceptance

__all__ = ["Counts", "WatchedDrafter"]


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


class WatchedDrafter:
    """Draft as another drafter does, and remember trees and acceptances; they are read after the run.

    Args:
        drafter: the one that drafts.
    """

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self.default_growth: Growth | None = getattr(drafter, "default_growth", None)
        self.steps: list[tuple[TokenTree, Acceptance]] = []
        self.has_laws = False

    def start(self, vocab_size: int, prompts: Sequence[Sequence[int]], rng: Random) -> _WatchedRun:
        """Begin a run."""
        return _WatchedRun(self, self._drafter.start(vocab_size, prompts, rng))

    def counts(self) -> Counts:
        """Go through what happened."""
        counts = Counts(has_laws=self.has_laws)
        for tree, acceptance in self.steps:
            rows = zip(tree.parents.tolist(), acceptance.path.tolist(), acceptance.path_lengths.tolist(), strict=True)
            for parents, path, length in rows:
                if length:
                    counts.add(parents, path[:length])
        return counts


class _WatchedRun:
    """A run that is watched."""

    def __init__(self, watcher: WatchedDrafter, run: DraftRun) -> None:
        self._watcher, self._run = watcher, run
        self._tree: TokenTree | None = None

    def propose(self, pending: Tensor, growth: Growth | None, budget: int) -> Draft:
        """Let it propose."""
        draft = self._run.propose(pending, growth, budget)
        self._tree = draft.tree
        self._watcher.has_laws |= draft.laws is not None
        return draft

    def observe(self, acceptance: Acceptance) -> None:
        """Let it observe, and remember."""
        assert self._tree is not None, "observe follows propose"
        self._watcher.steps.append((self._tree, acceptance))
        self._run.observe(acceptance)
