"""Drafting the next tree while the target verifies this one (PEARL, arXiv 2408.11850, for trees)."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from stree.drafters.base import Draft, Drafter, DraftRun
from stree.drafters.model import ModelDrafter, ModelRun
from stree.growth import Growth
from stree.kernels.host_copies import side_stream
from stree.kernels.step.bookkeeping import path_on_nodes
from stree.kernels.step.texts import Seen
from stree.models.tree_lm import TreeLM
from stree.returned import check_kind
from stree.sampling import Random
from stree.tree import TokenTree
from stree.verify import Acceptance

__all__ = ["OverlappedDrafter"]


class OverlappedDrafter(Drafter):
    """A draft model that drafts below the likeliest accepted path before the path is known.

    While the target verifies, a copy of the draft model's state reads the path that is likeliest to be accepted, takes
    its own likeliest next token, and grows the next tree below it: in a thread, on CUDA in a stream of its own.  If
    this path was accepted and this token came next, in every row, the tree is used; otherwise another one is grown.

    The text is as exact as without: what is guessed depends on no random number, the tree was drawn from distributions
    that are stored, with the numbers of its own position, and whether it is used depends on the target alone.

    Args:
        drafter: of a draft model.

    Raises:
        TypeError: another drafter.
    """

    def __init__(self, drafter: Drafter) -> None:
        if not isinstance(drafter, ModelDrafter):
            what = "overlap needs a draft model, which drafts without the target's hidden states"
            raise TypeError(f"{what}, got {type(drafter).__name__}")
        self._drafter = drafter

    @property
    def default_growth(self) -> Growth | None:
        """Growth of the draft model."""
        return self._drafter.default_growth

    @property
    def models(self) -> Sequence[TreeLM]:
        """The draft model, once for each of the two states and trees that are in memory."""
        return [*self._drafter.models] * 2

    def start(self, vocab_size: int, prompts: Sequence[Sequence[int]], rng: Random) -> DraftRun:
        """Begin a run; the draft model reads the prompts when the first tree is drafted."""
        run = self._drafter.start(vocab_size, prompts, rng)
        check_kind(self._drafter, "start", run, ModelRun, "ModelDrafter's own run, to overlap")
        return _OverlappedRun(run)


@dataclass(frozen=True, slots=True, eq=False)
class _Guess:
    """What is drafted ahead.

    Attributes:
        last: int64[batch], the last node of the path that is assumed to be accepted.
        work: gives the copied run, int64[batch] next tokens, and the tree below them.
        growth: of the tree.
        budget: of the tree.
    """

    last: Tensor
    work: Future[tuple[ModelRun, Tensor, Draft]]
    growth: Growth | None
    budget: int


class _OverlappedRun(DraftRun):
    """A draft model's run, beside a guess of where it will go on."""

    can_begin = True

    def __init__(self, run: ModelRun) -> None:
        self._run, self._pool = run, ThreadPoolExecutor(1, thread_name_prefix="stree drafting")
        self._guess: _Guess | None = None
        self._ready: tuple[Draft, Growth | None, int] | None = None  # a tree that was drafted ahead, and is right
        self._stream: Any = None  # of all steps: the allocator of CUDA keeps freed memory for the stream that used it

    def prepare(self, seen: Seen, budget: int) -> int:
        return self._run.prepare(seen, budget)

    def propose(self, pending: Tensor, growth: Growth | None, budget: int) -> Draft:
        """Use the tree that was drafted ahead, or grow one; then begin with the next one, unless nothing is drafted."""
        ready, self._ready = self._ready, None
        if ready is not None and ready[1:] == (growth, budget):
            draft = replace(ready[0], is_reused=True)
        else:
            draft = self._run.propose(pending, growth, budget)
        if draft.values is not None and draft.tree.tokens.shape[1] > 1:
            self._guess = self._begin(draft, growth, budget)
        return draft

    def _begin(self, draft: Draft, growth: Growth | None, budget: int) -> _Guess:
        """Begin to draft below the likeliest path."""
        seen = self._run.seen
        assert draft.values is not None and seen is not None, "the caller has drafted"
        path, lengths, last = _likeliest_path(draft.tree, draft.values)
        guessed = _text_after(seen, draft.tree, path, lengths)
        if self._stream is None:
            self._stream = side_stream(last)
        run, stream = self._run, self._stream
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream(last.device))

        @torch.no_grad()
        def work() -> tuple[ModelRun, Tensor, Draft]:
            with nullcontext() if stream is None else torch.cuda.stream(stream):
                other, token = _after(run, guessed, path, lengths)
                other.seen = replace(guessed, pending=token)
                return other, token, other.grow(growth, budget)

        return _Guess(last, self._pool.submit(work), growth, budget)

    def observe(self, acceptance: Acceptance) -> None:
        """Take over what was drafted ahead, if the guess was right; read accepted tokens otherwise."""
        guess, self._guess = self._guess, None
        if guess is None:
            return self._run.observe(acceptance)
        other, token, draft = guess.work.result()
        if self._stream is not None:
            torch.cuda.current_stream(token.device).wait_stream(self._stream)
        lengths = acceptance.path_lengths.long()
        last = acceptance.path.long().gather(1, (lengths - 1).clamp(min=0)[:, None])[:, 0]
        is_right = (lengths == 0) | ((last == guess.last) & (acceptance.next_token == token))
        if bool(is_right.all()):
            other.append_own(self._run.draft, acceptance)
            self._run, self._ready = other, (draft, guess.growth, guess.budget)
        else:
            self._run.observe(acceptance)
        return None

    def begin(self, rows: Sequence[int], prompts: Sequence[Sequence[int]]) -> None:
        self._ready = None
        self._run.prefixes = self.prefixes
        self._run.begin(rows, prompts)

    def reserve(self, max_length: int, growth: Growth | None, budget: int, *, begins: bool) -> None:
        self._run.reserve(max_length, growth, budget, begins=begins)


def _after(run: ModelRun, guessed: Seen, path: Tensor, lengths: Tensor) -> tuple[ModelRun, Tensor]:
    """Copy a run, as if int32[batch, m] nodes of its last tree were accepted and the texts were those guessed.

    Returns:
        The copy, and int64[batch], its likeliest next tokens.
    """
    other = run.select(torch.arange(len(path), device=path.device), run.rng, run.state.prompts)
    proposal = run.draft.grown.proposal
    tokens = proposal.tree.tokens
    ratios, is_live = path_on_nodes(path, lengths, tokens.shape[1])
    other.acceptance_model.read_text(tokens, path, lengths)
    other.acceptance_model.learn(proposal, ratios, is_live)
    other.state.most_behind = path.shape[1]
    other.state.catch_up(guessed)
    return other, other.state.last_logits.argmax(-1)


def _likeliest_path(tree: TokenTree, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the path to the leaf of the greatest value: int32[batch, m], int32[batch], and its node, int64[batch]."""
    parents = tree.parents.long()
    has_child = torch.zeros_like(parents).scatter_add(1, parents.clamp(min=0), (parents >= 0).long()) > 0
    is_leaf = (parents >= 0) & ~has_child  # of the root there are children, unless nothing was drafted in its row
    last = values.masked_fill(~is_leaf, -torch.inf).argmax(1)
    mask = tree.ancestor_mask.take_along_dim(last[:, None, None], 1)[:, 0]
    path = mask.to(torch.int8).argsort(dim=1, descending=True, stable=True)
    lengths = mask.sum(1)
    path = torch.where(torch.arange(path.shape[1], device=path.device) < lengths[:, None], path, -1)
    return path.to(torch.int32), lengths.to(torch.int32), last


def _text_after(seen: Seen, tree: TokenTree, path: Tensor, lengths: Tensor) -> Seen:
    """Copy the texts with the first int32[batch] of int32[batch, m] nodes behind them; the last one stays pending."""
    place = torch.arange(path.shape[1], device=path.device)
    index = seen.lengths[:, None] + torch.where(place < lengths[:, None], place, 0)
    tokens = seen.tokens.scatter(1, index, tree.tokens.gather(1, path.clamp(min=0).long()))
    return replace(seen, tokens=tokens, lengths=seen.lengths + lengths)
