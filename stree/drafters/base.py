"""Base classes of drafters: a drafter starts a run for a batch, and the run proposes a token tree in every step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stree.drafters.candidates import Offered
from stree.growth import Growth
from stree.kernels.step.texts import Seen
from stree.models.prefix_cache import RequestPrefixes
from stree.models.tree_lm import TreeLM
from stree.sampling import AnySampling, Random
from stree.tree import TokenTree
from stree.verify import Acceptance, DraftProbs

__all__ = ["Draft", "DraftRun", "Drafter", "TreeProcessor", "check_vocabulary", "padded_prompts"]


@dataclass(frozen=True, slots=True, eq=False)
class Draft:
    """A proposed tree.

    Attributes:
        tree: the pending token and what is drafted below it.
        probs: from which the nodes were drawn; None where all are DELTA.
        max_depth: bound of the tree's depths, known to the host.  A deeper node is an error, which is noticed where the
            host can read the tree, as on a CPU, and under STREE_DEBUG=1.
        num_calls: forward passes of a draft model that it took.
        values: float[batch, n], estimated probability that each node is right, or None where there is no estimate.
        is_reused: whether it was drafted while the target verified the tree before it.
        column: int64[batch, n], place of each node in the tree that the run itself has grown: 0 for the root, 1 for the
            first drafted node; -1 where the run never had this node.  None: 0, 1, 2, ...
        is_united: whether another drafter's nodes were added.
        grown: what the run's ``observe`` reads of the tree that it has grown; None where it has grown none.
        offered: the candidates that nodes were chosen from, which have their probabilities; None where none are known.
    """

    tree: TokenTree
    probs: DraftProbs | None
    max_depth: int
    num_calls: int = 0
    values: Tensor | None = None
    is_reused: bool = False
    column: Tensor | None = None
    is_united: bool = False
    grown: Any = None
    offered: Offered | None = None

    @property
    def laws(self) -> DraftProbs | None:
        """Alias of ``probs``."""
        return self.probs


# Changes float[batch, columns, vocab] logits of the last columns of a draft model's own tree, whose root is column 1.
TreeProcessor = Callable[[TokenTree, Tensor], Tensor]


def _at_once(run: DraftRun, key: tuple[Any, ...], work: Callable[[], Draft]) -> Draft:
    """Do a run's work."""
    return work()


class DraftRun:
    """Drafting for one batch of texts; a subclass needs ``propose``, the rest is optional.

    A flag says that the methods named with it are implemented; all flags are False by default.

    Attributes:
        can_begin: rows can take another text when theirs has ended (``begin``).
        can_select: a run of some of its rows can be made between two steps (``select``).
        can_extend: its tree may be verified with another drafter's nodes added; needed by FusedDrafter, which replaces
            ``draft`` by the united one.
        is_on_device: ``propose`` and ``observe`` do the same work on the device in every step of one growth and budget,
            and nothing on the host that a later step reads: what they do can be replayed.
        draft: the draft that is verified.  A run that has ``can_extend`` sets it in ``propose`` and reads all that it
            needs from it in ``observe``; between them it is set when nodes are added.  A run of DELTA nodes finds those
            anywhere in a united tree: it learns from tokens.
        version: another number whenever tensors that outlive a step were replaced.
        launch: called with this run, does work of a part of it that is on the device; what has one key is always alike.
            A decode step sets it.
        seen: the texts as the decode step found them, their pending tokens included; None in a run that is used alone.
        processor: processes a draft model's logits as the target's are; None where these are not processed.
        sampling: temperature, top-k, top-p and min-p of the rows; ``sampling.probs(logits)`` are the distributions that
            the target is sampled from.  None in a run that is used alone.
        forced: returns, for each row, tokens that certainly follow its pending one, which need no draft; or None.
        prefixes: from which a draft model starts the texts that ``begin`` brings, and what it keeps of them; or None.
    """

    can_begin: bool = False
    can_select: bool = False
    can_extend: bool = False
    is_on_device: bool = False
    draft: Draft
    version: int = 0
    launch: Callable[[DraftRun, tuple[Any, ...], Callable[[], Draft]], Draft] = staticmethod(_at_once)
    seen: Seen | None = None
    processor: TreeProcessor | None = None
    sampling: AnySampling | None = None
    forced: Callable[[], Sequence[Sequence[int]]] | None = None
    prefixes: RequestPrefixes | None = None

    def prepare(self, seen: Seen, budget: int) -> int:
        """Do what only the next step needs of the host, before it drafts; return the draft calls that it took.

        Args:
            seen: the texts as the decode step has found them.
            budget: of the tree to come.
        """
        self.seen = seen
        return 0

    def propose(self, pending: Tensor, growth: Growth | None, budget: int) -> Draft:
        """Draft a tree of at most ``budget`` nodes below int64[batch] pending tokens, which are its roots.

        ``growth`` is bound to the sampling of the rows, or None where neither the caller nor ``default_growth`` names
        one.  ``pending`` is only read, and not after ``propose`` has returned.  What is returned is the step's from
        then on: the run changes nothing of it, and reads it until ``observe`` returns, not later.
        """
        raise NotImplementedError(f"{type(self).__name__} must implement propose")

    def observe(self, acceptance: Acceptance) -> None:
        """Read the accepted paths of the last draft; ``next_token`` is pending in the next step.

        A path length of 0 means that the sequence was inactive: its pending token stays the same.  The acceptance is
        over when this returns: what a run keeps of it, it copies.
        """

    def begin(self, rows: Sequence[int], prompts: Sequence[Sequence[int]]) -> None:
        """Begin another text in some rows, or all, whose own have ended; drafts must not depend on the old texts."""
        raise NotImplementedError(f"{type(self).__name__} must implement begin to take up a text in mid-run")

    def select(self, rows: Tensor, rng: Random) -> DraftRun:
        """Return a run of some rows, int64[batch'], with what each has learnt; ``rng`` supplies its random numbers.

        A row may occur twice; the second one is given another text before the next step.  This run is not used again.
        """
        raise NotImplementedError(f"{type(self).__name__} must implement select")

    def read_prompts(self, rows: Sequence[int], hidden: Tensor) -> None:
        """Read the target's hidden states of the prompts in some rows; called if the drafter has ``hidden_layers``.

        Args:
            rows: which have just begun, by ``Drafter.start`` or ``begin``.
            hidden: float[len(rows), longest, layers, hidden], undefined past a prompt's end.
        """

    def reserve(self, max_length: int, growth: Growth | None, budget: int, *, begins: bool) -> None:
        """Allocate a state for texts of ``max_length`` tokens and trees of ``budget`` nodes, where there is a state.

        Called once, before the first step.  With ``begins`` the first step drafts, so the prompts may be run now.
        """

    def leave(self, count: Tensor) -> bool:
        """Draft int64[batch] nodes fewer in the next step, by a growth that draws by value; return whether it does."""
        return False


class Drafter:
    """A way to draft.  It holds no state of a generation: ``start`` returns a run that does.

    Attributes:
        uses_growth: whether a growth shapes its trees.
        is_lossless: False for rules that only comparisons need, whose text is not distributed as the target's; their
            steps are not captured, and their budget "auto" is the size of the growth.
    """

    uses_growth: bool = True
    is_lossless: bool = True

    @property
    def default_growth(self) -> Growth | None:
        """Growth for callers who name none; None (the base class's) lets ``propose`` have None then."""
        return None

    @property
    def models(self) -> Sequence[TreeLM]:
        """The draft models that it runs."""
        return ()

    @property
    def hidden_layers(self) -> Sequence[int] | None:
        """Layers of the target whose hidden states its runs read, or None; see ``TreeLM``."""
        return None

    def with_model(self, change: Callable[[TreeLM], TreeLM]) -> Drafter:
        """Return this drafter with ``change`` applied to its models, such as one that trims their vocabulary."""
        return self

    def start(self, vocab_size: int, prompts: Sequence[Sequence[int]], rng: Random) -> DraftRun:
        """Begin a run for prompts, whose tokens may differ in number; ``rng`` supplies its random numbers.

        Raises:
            ValueError: the drafter's vocabulary is not of the target's size.
        """
        raise NotImplementedError(f"{type(self).__name__} must implement start")


def check_vocabulary(lm: TreeLM, vocab_size: int) -> None:
    """Refuse a draft model of another number of logits than the target's; ``load`` gives it the target's where it can.

    Raises:
        ValueError: the numbers differ.
    """
    if lm.vocab_size != vocab_size:
        raise ValueError(
            f"drafter and target must share one vocabulary: the drafter has {lm.vocab_size} tokens, "
            f"the target {vocab_size}"
        )


def padded_prompts(prompts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Lay prompts side by side: int64[batch, longest], right-padded, and their lengths int64[batch], on the host."""
    lengths = torch.tensor([len(prompt) for prompt in prompts], device="cpu")
    width = max(map(len, prompts))
    padded = [[*prompt, *[0] * (width - len(prompt))] for prompt in prompts]
    return torch.tensor(padded, device="cpu"), lengths
