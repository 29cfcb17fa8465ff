"""What proposes token trees: a draft model, the text's own repetitions, or nothing.

A drafter holds no state of a generation; ``start`` gives a run that does.  A run proposes a tree below the pending
token and observes what became of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from stree.growth import DySpec, Growth, Layer, Plan, choose_slots
from stree.models.tree_lm import TreeLM
from stree.sampling import Random, draw_without_replacement
from stree.suffix import SuffixAutomaton
from stree.tree import TokenTree
from stree.verify import SAMPLED, Acceptance, DraftLaws

__all__ = ["Draft", "DraftRun", "Drafter", "ModelDrafter", "NoDrafter", "SuffixDrafter"]


@dataclass(frozen=True, slots=True, eq=False)
class Draft:
    """A proposed tree.

    Attributes:
        tree: the pending token and what is drafted below it.
        laws: from which the nodes were drawn; None where all are DELTA.
        max_depth: bound of the tree's depths, known to the host.
        num_calls: forward passes of a draft model that it took.
    """

    tree: TokenTree
    laws: DraftLaws | None
    max_depth: int
    num_calls: int = 0


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


class NoDrafter:
    """Plain decoding: every tree is its root."""

    def start(self, vocab_size: int, prompts: Sequence[Sequence[int]], rng: Random) -> _NoRun:
        """Begin a run."""
        return _NoRun()


class _NoRun:
    """A run that drafts nothing."""

    def propose(self, pending: Tensor, growth: Growth | None, budget: int) -> Draft:
        """Return the roots."""
        batch = pending.shape[0]
        depths = torch.zeros(batch, 1, dtype=torch.int32, device=pending.device)
        mask = torch.ones(batch, 1, 1, dtype=torch.bool, device=pending.device)
        return Draft(TokenTree.unchecked(pending[:, None], depths - 1, depths, mask), None, 0)

    def observe(self, acceptance: Acceptance) -> None:
        """Ignore it."""


class SuffixDrafter:
    """Draft what followed when the last tokens occurred before, in prompt or output (SuffixDecoding, arXiv 2411.04975).

    No draft model, no random numbers: the tree holds the most frequent continuations of the longest suffixes that occur
    twice, best first, and all nodes are DELTA.  A growth is not used.

    Args:
        datastore: continuations from elsewhere; not supported yet, None.
        min_match: shortest suffix that may predict.

    Raises:
        NotImplementedError: a datastore is given.
    """

    def __init__(self, datastore: Any = None, *, min_match: int = 1) -> None:
        if datastore is not None:
            raise NotImplementedError("SuffixDrafter does not support a datastore yet; pass None")
        self.min_match = min_match

    def start(self, vocab_size: int, prompts: Sequence[Sequence[int]], rng: Random) -> _SuffixRun:
        """Begin a run with an automaton a prompt."""
        return _SuffixRun(prompts, self.min_match)


class _SuffixRun:
    """Automata of a batch, kept on the host."""

    def __init__(self, prompts: Sequence[Sequence[int]], min_match: int) -> None:
        self._automata = [SuffixAutomaton(prompt) for prompt in prompts]
        self._known = [-1] * len(prompts)  # the pending token that a sequence's automaton has read already
        self._min_match = min_match
        self._tree: TokenTree | None = None

    def propose(self, pending: Tensor, growth: Growth | None, budget: int) -> Draft:
        """Append the pending tokens to the texts and lay out their continuations."""
        trees = []
        for row, token in enumerate(pending.tolist()):
            if self._known[row] < 0:
                self._automata[row].extend([token])
                self._known[row] = token
            below, above = self._automata[row].tree(budget - 1, self._min_match)
            trees.append(([token, *below], [-1, *above]))
        n, deepest = max(len(tokens) for tokens, _ in trees), 0
        for tokens, parents in trees:
            depths = [0]
            for parent in parents[1:]:
                depths.append(depths[parent] + 1)
            deepest = max(deepest, *depths)
            tokens += [0] * (n - len(tokens))
            parents += [-1] * (n - len(parents))
        columns = torch.tensor(trees, device=pending.device)  # [batch, 2, n]
        self._tree = TokenTree.unchecked(columns[:, 0], columns[:, 1].to(torch.int32))
        return Draft(self._tree, None, deepest)

    def observe(self, acceptance: Acceptance) -> None:
        """Append the accepted tokens."""
        assert self._tree is not None, "observe follows propose"
        accepted = self._tree.tokens.gather(1, acceptance.path.clamp(min=0).long()).tolist()
        for row, length in enumerate(acceptance.path_lengths.tolist()):
            if length:
                self._automata[row].extend(accepted[row][1:length])
                self._known[row] = -1


class ModelDrafter:
    """Draft with a smaller language model, whose own state is committed in step with the target's.

    Args:
        lm: the draft model, of the target's vocabulary.
        vocab: trimmed vocabulary; not supported yet, None.

    Raises:
        NotImplementedError: a trimmed vocabulary is given.
    """

    default_growth: Growth = DySpec()

    def __init__(self, lm: TreeLM, vocab: Any = None) -> None:
        if vocab is not None:
            raise NotImplementedError("ModelDrafter does not support a trimmed vocabulary yet; pass None")
        self.lm = lm

    def start(self, vocab_size: int, prompts: Sequence[Sequence[int]], rng: Random) -> _ModelRun:
        """Prefill the draft model with the prompts."""
        if vocab_size != self.lm.vocab_size:
            raise ValueError(
                f"drafter and target must share one vocabulary: the drafter has {self.lm.vocab_size} tokens, "
                f"the target {vocab_size}"
            )
        return _ModelRun(self.lm, prompts, rng)


class _ModelRun:
    """A draft model's state for a batch of texts, and the tree that grows on it.

    The draft model's tree has one column more than the target's: it begins with the chain [leaf, pending] where the
    last accepted leaf was never run, and with [pending] and a padding column elsewhere.  Node i of the target's tree,
    i > 0, is node i + 1 of it.
    """

    def __init__(self, lm: TreeLM, prompts: Sequence[Sequence[int]], rng: Random) -> None:
        lengths = torch.tensor([len(prompt) for prompt in prompts])
        width = int(lengths.max())
        input_ids = torch.tensor([[*prompt, *[0] * (width - len(prompt))] for prompt in prompts])
        self._lm, self._rng = lm, rng
        self._state = lm.new_state(len(prompts), 2 * width + 1024, 66)
        lm.prefill(self._state, input_ids, lengths)
        self._leaf = torch.zeros(len(prompts), dtype=torch.long, device=lm.device)
        self._has_leaf = torch.zeros(len(prompts), dtype=torch.bool, device=lm.device)

    def propose(self, pending: Tensor, growth: Growth | None, budget: int) -> Draft:
        """Grow a tree with a draft call a layer (a node for a heap), the first of which also runs the last leaf."""
        growth = ModelDrafter.default_growth if growth is None else growth
        plan = growth.plan(budget)
        self._reserve(plan)
        self._rng = self._rng.at(self._state.lengths.long() + self._has_leaf)
        self._grown = grown = _Grown.root(pending, self._leaf, self._has_leaf)
        self._selected: Tensor | None = None  # of each node of the proposed tree, its number while it grew
        laws = self._grow_heap(grown, plan, growth) if plan.is_heap else self._grow_layers(grown, plan, growth)
        tree = grown.target_tree()
        row, depth = tree.parents, plan.num_nodes if plan.is_heap else len(plan.layers)
        if tree.tokens.shape[1] > plan.num_nodes + 1:
            # What was drawn stays: of a sampled tree only padding is dropped.
            worth = grown.value if plan.is_pruned else 1.0 * ~tree.is_padding
            tree, self._selected = _prune(tree, worth, plan.num_nodes + 1)
            row = row.gather(1, self._selected)
        draft_laws = None
        if not growth.sampling.is_greedy:
            draft_laws = DraftLaws(laws, row, torch.full_like(row, SAMPLED, dtype=torch.int8))
        return Draft(tree, draft_laws, depth, grown.num_calls)

    def observe(self, acceptance: Acceptance) -> None:
        """Commit the accepted nodes that were run; keep an accepted leaf that was not for the next call."""
        path, lengths = acceptance.path.long().clamp(min=0), acceptance.path_lengths
        if self._selected is not None:
            path = self._selected.gather(1, path)
        is_live = lengths > 0
        lead = self._has_leaf.long()
        nodes = torch.where(path > 0, path + 1, lead[:, None])
        last = nodes.gather(1, (lengths.long() - 1).clamp(min=0)[:, None])
        unrun = (last.squeeze(1) >= self._grown.num_run) & is_live
        # Shift by one where the leaf goes first.
        place = torch.arange(path.shape[1] + 1, device=path.device) - lead[:, None]
        full = nodes.gather(1, place.clamp(0, path.shape[1] - 1)).masked_fill(place < 0, 0)
        count = torch.where(is_live, lengths + lead - unrun.long(), 0)
        self._lm.commit(self._state, full.to(torch.int32), count.to(torch.int32))
        leaf = self._grown.tokens.gather(1, last).squeeze(1)
        self._leaf = torch.where(unrun, leaf, self._leaf)
        self._has_leaf = torch.where(is_live, unrun, self._has_leaf)

    def _reserve(self, plan: Plan) -> None:
        """Make the state larger where this plan needs it: the length of a text is not known at the start."""
        state = self._state
        nodes = 2 + (plan.num_nodes if plan.is_heap else sum(layer.width for layer in plan.layers))
        length = state.length_bound + nodes
        if length > state.max_length or nodes > state.max_nodes:
            self._state = state.resized(
                max(state.max_length, 2 * length if length > state.max_length else 0), max(nodes, state.max_nodes)
            )

    def _grow_layers(self, grown: _Grown, plan: Plan, growth: Growth) -> Tensor:
        """Grow layer by layer; return the laws of all nodes that were run, float[batch, 1 + ..., vocab]."""
        greedy = growth.sampling.is_greedy
        left = torch.full_like(self._leaf, plan.num_nodes)
        laws: list[Tensor] = []
        logits = grown.run(self._lm, self._state)
        for depth, layer in enumerate(plan.layers):
            law = logits.softmax(-1) if greedy else growth.sampling.law(logits)
            laws.append(law)
            tokens, probs = self._offer(law, layer, grown, greedy)
            # Summed before the own probability: no rounding may let a slot depend on its token or pass its elder.
            spent = torch.cat([torch.zeros_like(probs[..., :1]), probs.cumsum(-1)[..., :-1]], -1)
            reach = grown.frontier_value[..., None] * (1 - spent).clamp(min=0)
            value = grown.frontier_value[..., None] * probs
            priority = (value if greedy else reach * (probs > 0)).flatten(1)
            limit = left if not plan.is_pruned else torch.full_like(left, layer.width)
            sure = limit if plan.is_pruned else left // (len(plan.layers) - depth)
            slots, is_taken = choose_slots(layer, priority, limit, plan.threshold, sure)
            grown.add(slots, layer.ranks, tokens.flatten(1), value.flatten(1), is_taken)
            left = left - is_taken.sum(1)
            if depth + 1 < len(plan.layers):
                logits = grown.run(self._lm, self._state)
        return torch.cat(laws, 1) if laws else logits.softmax(-1)

    def _offer(self, law: Tensor, layer: Layer, grown: _Grown, greedy: bool) -> tuple[Tensor, Tensor]:
        """Offer each frontier node's children: int64 and float[batch, above, ranks], in draw order."""
        if greedy:
            probs, tokens = law.topk(layer.ranks, -1)
            return tokens, probs
        node = (grown.frontier * MAX_RANKS).expand(law.shape[:2])
        return draw_without_replacement(self._rng, law, torch.zeros_like(node), node, layer.ranks)

    def _grow_heap(self, grown: _Grown, plan: Plan, growth: Growth) -> Tensor:
        """Draw one node after the other at the best slot; a draft call each."""
        greedy = growth.sampling.is_greedy
        batch = self._leaf.shape[0]
        rows = torch.arange(batch, device=self._leaf.device)
        laws: list[Tensor] = []
        logits = grown.run(self._lm, self._state)
        reach = logits.new_ones(batch, 1)  # value of each node's next slot
        rest = logits.new_zeros(batch, 0, logits.shape[-1])  # laws without the tokens drawn
        draws = torch.zeros(batch, plan.num_nodes + 1, dtype=torch.long, device=rows.device)
        for node in range(plan.num_nodes):
            if node:
                logits = grown.run(self._lm, self._state)
            laws.append(logits.softmax(-1) if greedy else growth.sampling.law(logits))
            rest = torch.cat([rest, laws[-1]], 1)
            mass = rest.sum(-1)
            best = rest.max(-1).values / mass.clamp(min=1e-38) if greedy else (mass > 0).to(rest.dtype)
            parent = (reach * best).argmax(1, keepdim=True)
            law = rest[rows[:, None], parent]  # [batch, 1, vocab]
            number = parent * MAX_RANKS + draws.gather(1, parent)
            token = law.argmax(-1) if greedy else self._rng.choice("draft", law, torch.zeros_like(parent), number)
            draws.scatter_add_(1, parent, torch.ones_like(parent))
            share = law.gather(-1, token[..., None]).squeeze(-1) / law.sum(-1).clamp(min=1e-38)
            upper = reach.gather(1, parent)
            is_taken = (upper > 0) & (share > 0)
            rest[rows[:, None], parent] = law.scatter(-1, token[..., None], 0.0)
            reach = torch.cat([reach.scatter(1, parent, upper * (1 - share)), upper * share * is_taken], 1)
            grown.add_below(parent, token, is_taken)
        return torch.cat(laws, 1) if laws else logits.softmax(-1)


MAX_RANKS = 1 << 20  # draft draws are numbered parent * MAX_RANKS + rank


class _Grown:
    """A draft model's tree while it grows: columns are appended, and the new ones run.

    Attributes:
        tokens: int64[batch, columns]; column 0 and 1 hold [leaf, pending] or [pending, padding].
        frontier: int64[1, above], the target tree's numbers of the nodes whose children come next.
        frontier_value: float[batch, above], estimated probability that verification reaches them.
        value: float[batch, n], the same for every node of the target's tree; 0 for padding.
        num_run: columns that were run.
        num_calls: draft calls made.
    """

    def __init__(self, tokens: Tensor, parents: Tensor, depths: Tensor, mask: Tensor, lead: Tensor) -> None:
        self.tokens, self.parents, self.depths, self.mask, self.lead = tokens, parents, depths, mask, lead
        self.value = torch.ones(tokens.shape[0], 1, device=tokens.device)
        self.frontier_value = self.value
        self.frontier = torch.zeros(1, 1, dtype=torch.long, device=tokens.device)
        self.num_run = self.num_calls = 0

    @classmethod
    def root(cls, pending: Tensor, leaf: Tensor, has_leaf: Tensor) -> _Grown:
        """Make the two columns that a tree begins with."""
        lead = has_leaf.long()
        tokens = torch.stack([torch.where(has_leaf, leaf, pending), pending * lead], 1)
        parents = torch.stack([torch.full_like(lead, -1), lead - 1], 1).to(torch.int32)
        depths = torch.stack([torch.zeros_like(lead), lead], 1).to(torch.int32)
        mask = torch.eye(2, dtype=torch.bool, device=pending.device).repeat(pending.shape[0], 1, 1)
        mask[:, 1, 0] = has_leaf
        return cls(tokens, parents, depths, mask, lead)

    def run(self, lm: TreeLM, state: Any) -> Tensor:
        """Run the columns that were not yet run; return the logits of the frontier, float[batch, above, vocab]."""
        tree = TokenTree.unchecked(self.tokens, self.parents, self.depths, self.mask)
        logits = lm.verify(state, tree, first=self.num_run)
        if not self.num_run:
            logits = logits.gather(1, self.lead.view(-1, 1, 1).expand(-1, 1, logits.shape[-1]))
        self.num_run = self.tokens.shape[1]
        self.num_calls += 1
        return logits

    def add(self, slots: Tensor, ranks: int, tokens: Tensor, value: Tensor, is_taken: Tensor) -> None:
        """Append a layer: slots int64[batch, width] of the frontier's, tokens and values of all of them."""
        parent = self.frontier.expand(slots.shape[0], -1).gather(1, slots // ranks)
        token = tokens.gather(1, slots)
        before = self.value.shape[1]
        self.frontier_value = value.gather(1, slots) * is_taken
        self.value = torch.cat([self.value, self.frontier_value], 1)
        self.add_below(parent, token, is_taken)
        self.frontier = torch.arange(before, before + slots.shape[1], device=slots.device)[None]

    def add_below(self, parent: Tensor, token: Tensor, is_taken: Tensor) -> None:
        """Append nodes int64[batch, width] below nodes of the target's tree; padding where not taken."""
        column = torch.where(parent > 0, parent + 1, self.lead[:, None])
        batch, width = parent.shape
        size = self.tokens.shape[1]
        rows = self.mask.gather(1, column[..., None].expand(-1, -1, size)) & is_taken[..., None]
        eye = torch.eye(width, dtype=torch.bool, device=parent.device).expand(batch, width, width)
        above = torch.cat([self.mask, self.mask.new_zeros(batch, size, width)], 2)
        self.mask = torch.cat([above, torch.cat([rows, eye], 2)], 1)
        self.depths = torch.cat([self.depths, (self.depths.gather(1, column) + 1) * is_taken], 1).to(torch.int32)
        self.tokens = torch.cat([self.tokens, token * is_taken], 1)
        self.parents = torch.cat([self.parents, torch.where(is_taken, column, -1).to(torch.int32)], 1)

    def target_tree(self) -> TokenTree:
        """Cut the leading column away: the tree as the target sees it."""
        lead = self.lead[:, None]
        root = self.tokens.gather(1, lead)
        is_node = self.parents[:, 2:] >= 0
        parents = torch.where(self.parents[:, 2:] > 1, self.parents[:, 2:] - 1, 0)
        parents = torch.where(is_node, parents, -1)
        first = torch.full_like(lead, -1).to(torch.int32)
        depths = (self.depths[:, 2:] - lead * is_node).to(torch.int32)
        below = torch.cat([is_node[..., None], self.mask[:, 2:, 2:]], 2)
        mask = torch.cat(
            [torch.zeros_like(below[:, :1]) if below.shape[1] else below.new_zeros(below.shape[0], 1, 1), below], 1
        )
        mask[:, 0, 0] = True
        return TokenTree.unchecked(
            torch.cat([root, self.tokens[:, 2:]], 1),
            torch.cat([first, parents.to(torch.int32)], 1),
            torch.cat([first + 1, depths], 1),
            mask,
        )


def _prune(tree: TokenTree, value: Tensor, num_nodes: int) -> tuple[TokenTree, Tensor]:
    """Keep the root and the nodes of the greatest value: the tree, and int64[batch, num_nodes] where they stood.

    Values never grow along a path and a stable order puts parents first, so what is kept is a tree.
    """
    kept = value.sort(dim=1, descending=True, stable=True).indices[:, :num_nodes].sort(1).values
    batch, n = tree.tokens.shape
    place = torch.full((batch, n), -1, device=kept.device)
    place.scatter_(1, kept, torch.arange(num_nodes, device=kept.device).expand(batch, -1))
    parents = tree.parents.gather(1, kept)
    parents = torch.where(parents >= 0, place.gather(1, parents.clamp(min=0).long()), -1).to(torch.int32)
    mask = tree.ancestor_mask.gather(1, kept[..., None].expand(-1, -1, n)).gather(
        2, kept[:, None].expand(-1, num_nodes, -1)
    )
    pruned = TokenTree.unchecked(tree.tokens.gather(1, kept), parents, tree.depths.gather(1, kept), mask)
    return pruned, kept
