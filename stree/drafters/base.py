"""What the generation loop knows of drafters: a tree is proposed below the pending token, and its fate observed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from stree.growth import Growth
from stree.models.tree_lm import TreeLM
from stree.sampling import Random
from stree.tree import TokenTree
from stree.verify import Acceptance, DraftProbs

__all__ = [
    "Bounded",
    "Capturable",
    "Composed",
    "Draft",
    "DraftRun",
    "Drafter",
    "Extensible",
    "HasModel",
    "Replay",
    "Restartable",
    "Resumable",
    "Slotted",
    "padded_prompts",
]


@dataclass(frozen=True, slots=True, eq=False)
class Draft:
    """A proposed tree.

    Attributes:
        tree: the pending token and what is drafted below it.
        probs: from which the nodes were drawn; None where all are DELTA.
        max_depth: bound of the tree's depths, known to the host.
        num_calls: forward passes of a draft model that it took.
        values: float[batch, n], estimated probability that each node is right, or None where there is no estimate.
    """

    tree: TokenTree
    probs: DraftProbs | None
    max_depth: int
    num_calls: int = 0
    values: Tensor | None = None

    @property
    def laws(self) -> DraftProbs | None:
        """Alias of ``probs``."""
        return self.probs


class DraftRun(Protocol):
    """Drafting for one batch of texts."""

    def propose(self, pending: Tensor, growth: Growth | None, budget: int) -> Draft:
        """Draft a tree of at most ``budget`` nodes below int64[batch] pending tokens, which are its roots."""
        ...

    def observe(self, acceptance: Acceptance) -> None:
        """Take note of the accepted paths of the last draft; ``next_token`` will be pending.

        A path length of 0 means that the sequence stood still: the same token will be pending again.
        """
        ...


class Drafter(Protocol):
    """A way to draft; it may have an attribute ``default_growth`` for callers who name no growth."""

    def start(self, vocab_size: int, prompts: Sequence[Sequence[int]], rng: Random) -> DraftRun:
        """Begin a run for prompts, whose tokens may differ in number; ``rng`` gives the draft's random numbers.

        Raises:
            ValueError: the drafter's vocabulary is not of the target's size.
        """
        ...


@runtime_checkable
class Extensible(Protocol):
    """A run whose proposed tree may be verified with nodes of others appended to it."""

    def extend(self, tree: TokenTree) -> None:
        """Take note that ``tree`` is verified instead; the next ``observe`` speaks of its nodes.

        A run whose nodes do not stand first in it, in their own order, must learn from tokens alone.
        """
        ...


@runtime_checkable
class Slotted(Protocol):
    """A run whose rows can hold one text after the other."""

    def admit(self, row: int, prompt: Sequence[int]) -> None:
        """Begin another text in place of one that has ended; nothing that was learnt of that may matter to it."""
        ...


@runtime_checkable
class Bounded(Protocol):
    """A run that has a state of its own, whose memory can be reserved."""

    def reserve(self, max_length: int, growth: Growth | None, budget: int, *, begins: bool) -> None:
        """Make room once for texts of ``max_length`` tokens and trees of a budget; run the prompts if it ``begins``."""
        ...


@runtime_checkable
class Restartable(Protocol):
    """A run that can begin anew, in the memory that it has."""

    def restart(self, prompts: Sequence[Sequence[int]]) -> None:
        """Begin as many other texts as it has; nothing that was learnt of the old ones may matter to them."""
        ...


@runtime_checkable
class Capturable(Protocol):
    """A run that drafts on the device alone, so that a step can be captured and replayed.

    Attributes:
        version: another number whenever tensors that captured work reads or writes were replaced.
    """

    version: int

    def settle(self, budget: int) -> int:
        """Do what only this step of its budget needs, so that it is like all others; give the draft calls it took."""
        ...

    def replayed(self, budget: int) -> None:
        """Take note that a step was replayed, whose host code did not run."""
        ...

    def give_up(self) -> None:
        """Take note that a step's host code ran, but nothing on the device."""
        ...


@runtime_checkable
class Resumable(Capturable, DraftRun, Protocol):
    """A run whose proposals alone can be captured: what observing one takes can be kept, and given back.

    Attributes:
        made: what observing the last proposal takes; set when one is replayed.
    """

    made: Any


# Do work of a name that belongs to a run, at first as it is and then as a replay; tell whether it was one.
Replay = Callable[[Capturable, str, Callable[[], Any]], tuple[Any, bool]]


@runtime_checkable
class Composed(Protocol):
    """A run that drafts on the host, but for a part that drafts on the device alone.

    Attributes:
        replay: how that part's work is captured and replayed; None: it is launched.
    """

    replay: Replay | None


@runtime_checkable
class HasModel(Protocol):
    """A drafter that runs a model."""

    @property
    def models(self) -> Sequence[TreeLM]:
        """The models that a draft call runs."""
        ...

    def with_model(self, change: Callable[[TreeLM], TreeLM]) -> Drafter:
        """Give a drafter like this one over ``change`` of its model: what the loop processes logits with."""
        ...


def padded_prompts(prompts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Lay prompts side by side: int64[batch, longest], right-padded, and their lengths int64[batch], on the host."""
    lengths = torch.tensor([len(prompt) for prompt in prompts], device="cpu")
    width = int(lengths.max())
    padded = [[*prompt, *[0] * (width - len(prompt))] for prompt in prompts]
    return torch.tensor(padded, device="cpu"), lengths
