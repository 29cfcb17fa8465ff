"""Drafting with a smaller language model, whose tree grows layer by layer and whose state is committed in step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from stree.drafters.base import Draft, padded_prompts
from stree.drafters.candidates import candidate_source
from stree.drafters.catch_up import CatchUpTokens
from stree.drafters.tree_builder import FIRST_DRAFTED, GrownTree, narrowed, num_run
from stree.growth import AcceptanceModel, Calibrated, Growth, KeptSlots, Limited, Plan, Proposal, Slots, choose_slots
from stree.kernels.dispatch import host_can_read
from stree.kernels.sampling.softmax import probs_and_norms
from stree.kernels.step.bookkeeping import Drafted, path_on_columns, path_on_nodes
from stree.models.state import DecodeState, Pending
from stree.models.tree_lm import TreeLM
from stree.models.trimmed import TrimmedLM
from stree.sampling import MAX_RANKS, Random, Sampling
from stree.tree import TokenTree
from stree.verify import INDEPENDENT, SAMPLED, Acceptance, DraftProbs

__all__ = ["ModelDrafter", "check_vocabulary"]

MOST_CAUGHT_UP = 32  # tokens of a chain by which a model catches up


class ModelDrafter:
    """Draft with a smaller language model, whose own state is committed in step with the target's.

    Args:
        lm: the draft model, of the target's vocabulary.
        vocab: tokens that it may draft (``stree trim-vocab`` lists the most frequent ones), or None for all: a smaller
            head is faster, and what is left out is never drafted.

    Raises:
        TypeError: a model that is not patched.
        ValueError: tokens that are none of the vocabulary's, or that leave out a stop token.
    """

    default_growth: Growth = Calibrated()

    def __init__(self, lm: TreeLM, vocab: Sequence[int] | Tensor | None = None) -> None:
        if not hasattr(lm, "new_state"):
            raise TypeError(f"lm must be an object such as stree.TreeLM(model), got {type(lm).__name__}")
        self.lm = lm if vocab is None else TrimmedLM(lm, vocab)

    @property
    def models(self) -> Sequence[TreeLM]:
        """The draft model."""
        return [self.lm]

    def with_model(self, change: Callable[[TreeLM], TreeLM]) -> ModelDrafter:
        """Give a drafter over ``change`` of this one's model."""
        return ModelDrafter(change(self.lm))

    def start(self, vocab_size: int, prompts: Sequence[Sequence[int]], rng: Random) -> _ModelRun:
        """Prefill the draft model with the prompts."""
        check_vocabulary(self.lm, vocab_size)
        return _ModelRun(self.lm, prompts, rng)


def check_vocabulary(lm: TreeLM, vocab_size: int) -> None:
    """Refuse a draft model of another vocabulary than the target's.

    Raises:
        ValueError: it is one.
    """
    if lm.vocab_size != vocab_size:
        raise ValueError(
            f"drafter and target must share one vocabulary: the drafter has {lm.vocab_size} tokens, "
            f"the target {vocab_size}"
        )


@dataclass(frozen=True, slots=True, eq=False)
class _Made:
    """What observing a proposed tree takes.

    Attributes:
        proposal: it.
        columns: int64[batch, columns], tokens of the draft model's own tree.
        num_run: columns that were run.
    """

    proposal: Proposal
    columns: Tensor
    num_run: int


def _missed(tree: TokenTree, own: Acceptance, found: Acceptance) -> Tensor:
    """Tell which nodes were right, though others' were verified in their places: bool[batch, n].

    Args:
        tree: the own one.
        own: as far as the accepted path is in it.
        found: all of it, by matching: what follows is the target's own token.
    """
    lengths = own.path_lengths
    last = own.path.gather(1, (lengths[:, None].long() - 1).clamp(min=0))
    is_end = ((lengths > 0) & (lengths == found.path_lengths))[:, None]
    return (tree.parents == last) & (tree.tokens == found.next_token[:, None]) & is_end


def _judged_up_to(proposal: Proposal, is_missed: Tensor) -> Proposal:
    """Leave out the children of bool[batch, n] nodes that were not verified: nobody knows of them."""
    tree = proposal.tree
    parents = tree.parents.masked_fill(is_missed.gather(1, tree.parents.clamp(min=0).long()), -1)
    return replace(proposal, tree=TokenTree.unchecked(tree.tokens, parents, tree.depths, tree.ancestor_mask))


@cache  # captured steps read them: none may be dropped
def _kinds(shape: torch.Size, kind: int, device: torch.device) -> Tensor:
    """Give nodes that are all of one kind: int8 of a shape."""
    return torch.full(shape, kind, dtype=torch.int8, device=device)


class _ModelRun:
    """A draft model's state for a batch of texts, and the tree that grows on it.

    The draft model's tree has one column more than the target's: it begins with the chain [leaf, pending] where the
    last accepted leaf was never run, and with [pending] and a padding column elsewhere.  Node i of the target's tree,
    i > 0, is node i + 1 of it.

    Attributes:
        version: counts how often tensors that outlive a step were replaced by larger ones.
    """

    def __init__(self, lm: TreeLM, prompts: Sequence[Sequence[int]], rng: Random) -> None:
        self._lm, self._rng, self._prompts = lm, rng, list(prompts)
        self._leaf = torch.zeros(len(prompts), dtype=torch.long, device=lm.device)
        self._max_length: int | None = None  # of a text, where it is known
        self._largest: Plan | None = None  # of all plans to come, where it is known
        self.version = 0
        self._begun: DecodeState | None = None  # None until the prompts have been run
        self._has_leaf = torch.zeros(len(prompts), dtype=torch.bool, device=lm.device)
        self._growth: Growth | None = None  # the one that the acceptance model belongs to
        self.acceptance_model: AcceptanceModel
        self._extension: tuple[int, Tensor] | None = None  # nodes of the own tree; tokens of the one verified instead
        self._catch_up_tokens = CatchUpTokens(len(prompts), lm.device)
        self._is_extended = False
        self._root: Tensor | None = None  # the pending tokens where nothing else was proposed
        self._room: Tensor | None = None  # for the distributions of a step
        self._left_out = torch.zeros_like(self._leaf)  # nodes of the next budget that others fill

    def propose(self, pending: Tensor, growth: Growth | None, budget: int) -> Draft:
        """Grow a tree with a draft call a layer (a node for a heap), the first of which also runs the last leaf.

        A budget of 1 draws nothing and runs nothing.
        """
        growth = ModelDrafter.default_growth if growth is None else growth
        self._root = self._extension = None
        if budget == 1:
            return self._propose_root(pending)
        plan = narrowed(growth.plan(budget))
        self._use(growth)
        self._begin()
        num_calls = self._catch_up()
        self._reserve(num_run(plan) + FIRST_DRAFTED - 1)
        self._rng = self._rng.at(self._state.lengths + self._has_leaf)
        self.acceptance_model.begin(plan, self._rng)
        grown = GrownTree(pending, self._leaf, self._has_leaf, plan.num_nodes - self._left_out, plan)
        grow = self._grow_heap if plan.is_heap else self._grow_layers
        dists, kept_slots = grow(grown, plan, growth.sampling)
        depth = plan.num_nodes if plan.is_heap else grown.num_layers
        selected = grown.select(plan)
        made = grown.proposed(selected)
        tree = TokenTree.unchecked(made.tokens, made.parents, made.depths, made.mask)
        proposal = Proposal(tree, made.values, selected, kept_slots)
        self._made = _Made(proposal, grown.tokens, grown.num_run)
        draft_probs = None
        if dists is not None:
            most = plan.num_nodes if plan.is_heap else max((layer.ranks for layer in plan.layers), default=0)
            kind = INDEPENDENT if plan.drawing == "independent" else SAMPLED
            draft_probs = DraftProbs(dists, made.rows, _kinds(made.rows.shape, kind, made.rows.device), most)
        return Draft(tree, draft_probs, depth, num_calls + grown.num_calls, made.values)

    def _use(self, growth: Growth) -> None:
        """Take the acceptance model of a growth, unless that growth is in use already."""
        base = growth.base if isinstance(growth, Limited) else growth
        if base is self._growth:
            return
        if self._growth is None or repr(base) != repr(self._growth):
            self.acceptance_model = base.acceptance_model(len(self._leaf), self._leaf.device)
            self._read_prompts(range(len(self._prompts)))
            self.version += 1
        self._growth = base

    def _read_prompts(self, rows: Sequence[int]) -> None:
        """Let the acceptance model read the prompts of some rows."""
        prompts = [torch.tensor(prompt, dtype=torch.long) for prompt in self._prompts]
        lengths = torch.tensor([len(prompt) if row in rows else 0 for row, prompt in enumerate(prompts)])
        tokens = torch.nn.utils.rnn.pad_sequence(prompts, batch_first=True)
        self.acceptance_model.read_text(tokens.to(self._leaf.device), None, lengths.to(self._leaf.device, torch.int32))

    def _propose_root(self, pending: Tensor) -> Draft:
        """Propose nothing and run nothing; the model catches up before it drafts again."""
        depths = torch.zeros(len(pending), 1, dtype=torch.int32, device=pending.device)
        mask = torch.ones(len(pending), 1, 1, dtype=torch.bool, device=pending.device)
        self._root = pending.clone()  # the next one is written in its place
        tree = TokenTree.unchecked(pending[:, None], depths - 1, depths, mask)
        return Draft(tree, None, 0, values=torch.ones(len(pending), 1, dtype=torch.float32, device=pending.device))

    @property
    def made(self) -> tuple[_Made, Pending | None]:
        """What observing the last tree takes; it is set when one is replayed, whose host code did not run."""
        return self._made, self._state.pending

    @made.setter
    def made(self, made: tuple[_Made, Pending | None]) -> None:
        self._made, self._state.pending = made
        self._root = self._extension = None

    def leave(self, count: Tensor) -> None:
        """Leave int64[batch] nodes of the next budget to others; a growth that draws by value heeds it."""
        self._left_out.copy_(count)

    def extend(self, tree: TokenTree) -> None:
        """Take note that others appended nodes to the proposed tree, and that ``tree`` is verified instead."""
        own = 1 if self._root is not None else self._made.proposal.tree.tokens.shape[1]
        self._extension, self._is_extended = (own, tree.tokens), True

    def observe(self, acceptance: Acceptance) -> None:
        """Commit the accepted nodes that were run; keep an accepted leaf that was not for the next call."""
        if self._root is not None:
            return self._observe_root(acceptance)
        is_extended, made = self._extension is not None, self._made
        tokens = made.proposal.tree.tokens if self._extension is None else self._extension[1]
        self.acceptance_model.read_text(tokens, acceptance.path, acceptance.path_lengths)
        proposal, own = made.proposal, self._own_part(acceptance)
        n = proposal.tree.tokens.shape[1]
        if acceptance.ratios is None:  # whoever matches keeps no log
            ratios, is_live = path_on_nodes(own.path, own.path_lengths, n)
            if is_extended:
                is_missed = _missed(proposal.tree, own, acceptance)
                proposal, ratios = _judged_up_to(proposal, is_missed), ratios.masked_fill(is_missed, 1.0)
        else:
            ratios, is_live = acceptance.ratios[:, :n], acceptance.path_lengths > 0  # others may have appended nodes
        self.acceptance_model.learn(proposal, ratios, is_live)
        drafted = Drafted(made.proposal.selected, made.columns, self._has_leaf, self._leaf, made.num_run)
        path, count = path_on_columns(own.path, own.path_lengths, drafted)
        self._lm.commit(self._state, path, count)

    def _observe_root(self, acceptance: Acceptance) -> None:
        """Put accepted tokens that were never run behind those that wait already."""
        assert self._root is not None, "observe follows propose"
        root, self._root = self._root, None
        path, lengths = acceptance.path, acceptance.path_lengths.long()
        tokens = root[:, None]
        if self._extension is not None:
            (_, tokens), self._extension = self._extension, None
        if self._growth is not None:
            self.acceptance_model.read_text(tokens, path, acceptance.path_lengths)
        self._catch_up_tokens.put(tokens.gather(1, path.clamp(min=0).long()), lengths, self._max_length)

    def admit(self, row: int, prompt: Sequence[int]) -> None:
        """Run another prompt into a row whose text has ended."""
        self._prompts[row] = prompt
        if self._begun is not None:
            if len(prompt) > self._state.max_length:
                self._resize(2 * len(prompt), self._state.max_nodes)
            self._lm.prefill_row(self._state, row, torch.tensor([prompt]))
        self._has_leaf[row] = False
        if self._growth is not None:
            self.acceptance_model.reset(row)
            self._read_prompts([row])
        self._catch_up_tokens.forget(row)

    def _own_part(self, acceptance: Acceptance) -> Acceptance:
        """Cut accepted paths where they leave the own tree; what follows there is run before the next draft."""
        if self._extension is None:
            return acceptance
        (own, tokens), self._extension = self._extension, None
        path, lengths = acceptance.path.long(), acceptance.path_lengths
        place = torch.arange(path.shape[1], device=path.device)
        is_own = (path < own) & (place < lengths[:, None])
        count = is_own.sum(1, dtype=torch.int32)
        beyond = (place + count[:, None]).clamp(max=path.shape[1] - 1).long()
        unseen = tokens.gather(1, path.gather(1, beyond).clamp(min=0))
        self._catch_up_tokens.put(unseen, (lengths - count).long(), self._max_length)
        own_path = torch.where(is_own, path, -1).to(torch.int32)
        return Acceptance(own_path, count, acceptance.next_token)

    def _catch_up(self) -> int:
        """Run and commit the accepted tokens that were never run, as chains; return the draft calls it took."""
        if not self._catch_up_tokens.most:
            return 0
        tokens, number = self._catch_up_tokens.all()
        most = self._catch_up_tokens.most
        if host_can_read(number) or self._is_extended:  # who extends trees has waited for the host anyway
            most = int(number.max())
        for begin in range(0, most, MOST_CAUGHT_UP):
            piece = tokens[:, begin : min(begin + MOST_CAUGHT_UP, most)]
            self._run_chain(piece, (number - begin).clamp(0, piece.shape[1]))
        self._catch_up_tokens.clear()
        return -(-most // MOST_CAUGHT_UP)

    def _run_chain(self, tokens: Tensor, count: Tensor) -> None:
        """Run and commit the last leaf and the first ``count`` of int64[batch, m] tokens of every sequence."""
        width = tokens.shape[1]
        self._reserve(width + 1)
        has_leaf = self._has_leaf & (count > 0)
        tokens = torch.cat([self._leaf[:, None], tokens], 1)
        place = torch.arange(width + 1, device=tokens.device)
        tokens = tokens.gather(1, (place + (~has_leaf).long()[:, None]).clamp(max=width))
        lengths = torch.where(count > 0, count + has_leaf, 0)
        is_node = (place < lengths[:, None]) | (place == 0)
        chain = torch.where(is_node, place - 1, -1).to(torch.int32)
        self._lm.verify(self._state, TokenTree.unchecked(tokens * is_node, chain))
        path = place.to(torch.int32).expand(len(tokens), -1)
        self._lm.commit(self._state, path, lengths.to(torch.int32))
        self._has_leaf &= count == 0

    def reserve(self, max_length: int, growth: Growth | None, budget: int, *, begins: bool) -> None:
        """Make room once for texts of ``max_length`` tokens and trees of a budget: no later step has to."""
        if growth is not None:
            self._use(growth)
        if budget > 1:
            self._largest = narrowed((ModelDrafter.default_growth if growth is None else growth).plan(budget))
        if max_length != self._max_length:
            self._max_length = max_length
            self._catch_up_tokens.reserve(max_length)
            self.version += 1
        if begins:
            self._begin()

    def restart(self, prompts: Sequence[Sequence[int]]) -> None:
        """Begin as many other texts; those that run already keep their memory."""
        self._prompts = list(prompts)
        if self._growth is not None:
            for row in range(len(prompts)):
                self.acceptance_model.reset(row)
            self._read_prompts(range(len(prompts)))
        self._has_leaf.zero_()
        self._catch_up_tokens.clear()
        self._root, self._extension = None, None
        if self._begun is not None:
            input_ids, lengths = padded_prompts(prompts)
            filled = self._lm.new_state(len(prompts), input_ids.shape[1], self._begun.max_nodes)
            self._lm.prefill(filled, input_ids, lengths)
            self._begun.overwrite(filled)

    def settle(self, budget: int) -> int:
        """Run the prompts and what was accepted unseen, if a tree is to be drafted; give the draft calls it took."""
        if budget == 1:
            return 0
        self._begin()
        return self._catch_up()

    def replayed(self, budget: int) -> None:
        """Take note of a token that waits now."""
        self._catch_up_tokens.most += budget == 1

    def give_up(self) -> None:
        """Forget what a step has begun on the host."""
        self._root, self._extension = None, None
        if self._begun is not None:
            self._begun.is_inconsistent = False

    @property
    def _state(self) -> DecodeState:
        """The draft model's state."""
        assert self._begun is not None, "a tree begins the run"
        return self._begun

    def _begin(self) -> None:
        """Run the prompts, once: plain decoding does without."""
        if self._begun is not None:
            return
        input_ids, lengths = padded_prompts(self._prompts)
        width = input_ids.shape[1]
        nodes = 66 if self._largest is None else max(num_run(self._largest) + FIRST_DRAFTED - 1, MOST_CAUGHT_UP + 1)
        self._begun = self._lm.new_state(len(lengths), max(self._max_length or 2 * width + 1024, width), nodes)
        self._begun.fixed_shapes = not host_can_read(self._leaf)
        self._lm.prefill(self._begun, input_ids, lengths)

    def _reserve(self, nodes: int) -> None:
        """Make the state larger where so many nodes, or a text whose length was not known, need it."""
        state = self._state
        length = state.length_bound + nodes if self._max_length is None else self._max_length
        if length > state.max_length or nodes > state.max_nodes:
            self._resize(
                max(state.max_length, 2 * length if length > state.max_length else 0), max(nodes, state.max_nodes)
            )

    def _resize(self, max_length: int, max_nodes: int) -> None:
        """Put a larger state in the place of the present one."""
        self._begun = self._state.resized(max_length, max_nodes)
        self.version += 1

    def _room_for_probs(self, plan: Plan, logits: Tensor) -> Tensor:
        """Give memory for the distributions of a tree's nodes that are run: the same for every step."""
        batch, vocab = len(logits), logits.shape[-1]
        rows = num_run(plan)
        if self._room is None or self._room.numel() < batch * rows * vocab:
            most = max(rows, 0 if self._largest is None else num_run(self._largest))
            self._room = logits.new_empty(batch * most * vocab)
            self.version += 1
        return self._room[: batch * rows * vocab].view(batch, rows, vocab)

    def _grow_layers(self, grown: GrownTree, plan: Plan, sampling: Sampling) -> tuple[Tensor | None, KeptSlots]:
        """Grow layer by layer.

        Returns:
            The distributions of the nodes that were run, float[batch, nodes, vocab], if sampled, and what the
            acceptance model keeps of the slots, layer by layer.
        """
        model, drawing = self.acceptance_model, "top" if sampling.is_greedy else plan.drawing
        candidates_of = candidate_source(drawing, self._rng, plan)
        self._left_out.zero_()
        dists, used, kept_slots = None, 0, []
        for depth, layer in enumerate(plan.layers):
            logits = grown.run(self._lm, self._state)
            if drawing == "top":
                dist, norms = probs_and_norms(logits) if sampling.is_greedy else sampling.probs_and_norms(logits)
            else:
                dists = self._room_for_probs(plan, logits)
                dist, norms = sampling.probs_and_norms(logits, out=dists[:, used : used + logits.shape[1]])
                used += logits.shape[1]
            goes_on = model.draws(grown.frontier_value, dist)
            values = grown.frontier_value if goes_on is None else grown.frontier_value * goes_on[:, None]
            candidates = candidates_of(dist, grown.frontier_number, layer.ranks)
            context = grown.context(candidates.tokens)
            priority, value = model.rate(Slots(values, candidates.probs, dist, norms, context))
            left, layers_left = None if plan.is_pruned else grown.left, len(plan.layers) - depth
            slots, is_taken = choose_slots(layer, priority.flatten(1), left, plan.threshold, layers_left)
            if not grown.add(layer, slots, is_taken, candidates, value):
                break
            goes_on = model.goes_on(grown.frontier_value)
            kept_slots.append(model.keep(slots[:, : grown.frontier_value.shape[1]]))
            if goes_on is not None and not grown.stop(goes_on):
                break
        grown.add_leaves()
        if not plan.layers:
            grown.run(self._lm, self._state)
        return None if dists is None else dists[:, :used], kept_slots

    def _grow_heap(self, grown: GrownTree, plan: Plan, sampling: Sampling) -> tuple[Tensor | None, KeptSlots]:
        """Draw one node after the other at the best slot, a draft call each; return the distributions if sampled."""
        greedy = sampling.is_greedy
        batch = self._leaf.shape[0]
        rows = torch.arange(batch, device=self._leaf.device)
        dists: list[Tensor] = []
        logits = grown.run(self._lm, self._state)
        priority = logits.new_ones(batch, 1)  # of each node's next slot
        rest = logits.new_zeros(batch, 0, logits.shape[-1])  # distributions without the tokens drawn
        draws = torch.zeros(batch, plan.num_nodes + 1, dtype=torch.long, device=rows.device)
        self._left_out.zero_()
        for node in range(plan.num_nodes):
            if node:
                logits = grown.run(self._lm, self._state)
            dists.append(logits.softmax(-1) if greedy else sampling.probs(logits))
            rest = torch.cat([rest, dists[-1]], 1)
            mass = rest.sum(-1)
            best = rest.max(-1).values / mass.clamp(min=1e-38) if greedy else (mass > 0).to(rest.dtype)
            parent = (priority * best).argmax(1, keepdim=True)
            dist = rest[rows[:, None], parent]  # [batch, 1, vocab]
            number = parent * MAX_RANKS + draws.gather(1, parent)
            token = dist.argmax(-1) if greedy else self._rng.choice("draft", dist, torch.zeros_like(parent), number)
            draws.scatter_add_(1, parent, torch.ones_like(parent))
            share = dist.gather(-1, token[..., None]).squeeze(-1) / dist.sum(-1).clamp(min=1e-38)
            upper = priority.gather(1, parent)
            is_taken = (upper > 0) & (share > 0) & (node < grown.left[:, None])
            rest[rows[:, None], parent] = dist.scatter(-1, token[..., None], 0.0)
            value = upper * share * is_taken
            priority = torch.cat([priority.scatter(1, parent, upper * (1 - share)), value], 1)
            grown.add_below(torch.where(parent > 0, parent + 1, grown.root_offset[:, None]), token, value, is_taken)
        return None if greedy else torch.cat(dists, 1), []
