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
        self._grown = grown = _Grown(pending, self._leaf, self._has_leaf, plan)
        self._selected: Tensor | None = None  # of each node of the proposed tree, its number while it grew
        laws = self._grow_heap(grown, plan, growth) if plan.is_heap else self._grow_layers(grown, plan, growth)
        tree = grown.target_tree()
        row, depth = tree.parents, plan.num_nodes if plan.is_heap else grown.num_layers
        selected = grown.select(tree, plan)
        if selected is not None:
            self._selected = selected
            tree, row = _prune(tree, selected), row.gather(1, selected)
        draft_laws = None
        if not growth.sampling.is_greedy:
            draft_laws = DraftLaws(torch.cat(laws, 1), row, torch.full_like(row, SAMPLED, dtype=torch.int8))
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
        nodes = _num_columns(plan)
        length = state.length_bound + nodes
        if length > state.max_length or nodes > state.max_nodes:
            self._state = state.resized(
                max(state.max_length, 2 * length if length > state.max_length else 0), max(nodes, state.max_nodes)
            )

    def _grow_layers(self, grown: _Grown, plan: Plan, growth: Growth) -> list[Tensor]:
        """Grow layer by layer; return the laws of the nodes that were run, float[batch, nodes, vocab], if sampled."""
        greedy = growth.sampling.is_greedy
        left = torch.full_like(self._leaf, plan.num_nodes)
        laws: list[Tensor] = []
        for depth, layer in enumerate(plan.layers):
            logits = grown.run(self._lm, self._state)
            law = logits.softmax(-1) if greedy else growth.sampling.law(logits)
            tokens, probs = self._offer(law, layer, grown, greedy)
            value = grown.frontier_value[..., None] * probs
            if not greedy:
                laws.append(law)
            limit = left if not plan.is_pruned else torch.full_like(left, layer.width)
            sure = limit if plan.is_pruned else left // (len(plan.layers) - depth)
            priority = value if greedy else _reach(grown.frontier_value, probs)
            slots, is_taken = choose_slots(layer, priority.flatten(1), limit, plan.threshold, sure)
            if not grown.add(layer, slots, tokens.flatten(1), value.flatten(1), is_taken):
                break
            left = left - is_taken.sum(1)
        if not plan.layers:
            laws.append(grown.run(self._lm, self._state).softmax(-1))
        return laws

    def _offer(self, law: Tensor, layer: Layer, grown: _Grown, greedy: bool) -> tuple[Tensor, Tensor]:
        """Offer each frontier node's children: int64 and float[batch, above, ranks], in draw order."""
        if greedy:
            probs, tokens = law.topk(layer.ranks, -1)
            return tokens, probs
        number = torch.arange(grown.frontier_number, grown.frontier_number + law.shape[1], device=law.device)
        node = (number * MAX_RANKS).expand(law.shape[:2])
        return draw_without_replacement(self._rng, law, torch.zeros_like(node), node, layer.ranks)

    def _grow_heap(self, grown: _Grown, plan: Plan, growth: Growth) -> list[Tensor]:
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
            grown.add_below(torch.where(parent > 0, parent + 1, grown.lead[:, None]), token, is_taken)
        return laws or [logits.softmax(-1)]


MAX_RANKS = 1 << 20  # draft draws are numbered parent * MAX_RANKS + rank


def _num_columns(plan: Plan) -> int:
    """Count the columns of a draft model's tree: two lead ones and every node that the plan may grow."""
    return 2 + (plan.num_nodes if plan.is_heap else sum(layer.width for layer in plan.layers))


def _reach(value: Tensor, probs: Tensor) -> Tensor:
    """Estimate how often verification gets as far as testing each child; 0 where there is none to draw."""
    # Summed before the own probability: no rounding may let a slot depend on its token or pass its elder.
    spent = torch.cat([torch.zeros_like(probs[..., :1]), probs.cumsum(-1)[..., :-1]], -1)
    return value[..., None] * (1 - spent).clamp(min=0) * (probs > 0)


class _Grown:
    """A draft model's tree while it grows: columns are appended, and the new ones run.

    Columns 0 and 1 hold [leaf, pending] or [pending, padding]; the node i > 0 of the target's tree is column i + 1.

    Attributes:
        lead: int64[batch], column of the pending token.
        frontier_value: float[batch, above], estimated probability that verification reaches the nodes grown last.
        frontier_number: what the first of them is called in random draws; it does not depend on the batch.
        size: columns in use.
        num_run: columns that were run.
        num_calls: draft calls made.
        num_layers: layers added.
    """

    def __init__(self, pending: Tensor, leaf: Tensor, has_leaf: Tensor, plan: Plan) -> None:
        batch, device = pending.shape[0], pending.device
        room = _num_columns(plan)
        self.lead = lead = has_leaf.long()
        self._tokens = pending.new_zeros(batch, room)
        self._tokens[:, 0] = torch.where(has_leaf, leaf, pending)
        self._tokens[:, 1] = pending * lead
        self._parents = torch.full((batch, room), -1, dtype=torch.int32, device=device)
        self._parents[:, 1] += lead
        self._depths = torch.zeros(batch, room, dtype=torch.int32, device=device)
        self._depths[:, 1] = lead
        self._mask = torch.eye(room, dtype=torch.bool, device=device).repeat(batch, 1, 1)
        self._mask[:, 1, 0] = has_leaf
        self._value = torch.ones(batch, room - 1, device=device)  # of the target's nodes
        self.frontier_value = self._value[:, :1]
        self.frontier_number = self.num_run = self.num_calls = self.num_layers = 0
        self.size = 2
        self._begin, self._places = 0, 1  # of the frontier: its first node, and how many the plan gives it
        self._plan = plan

    def run(self, lm: TreeLM, state: Any) -> Tensor:
        """Run the columns that were not yet run; return the logits of the frontier, float[batch, above, vocab]."""
        size = self.size
        depths, mask = self._depths[:, :size], self._mask[:, :size, :size]
        tree = TokenTree.unchecked(self.tokens, self.parents, depths, mask)
        logits = lm.verify(state, tree, first=self.num_run)
        if not self.num_run:
            logits = logits.gather(1, self.lead.view(-1, 1, 1).expand(-1, 1, logits.shape[-1]))
        self.num_run = size
        self.num_calls += 1
        return logits

    @property
    def tokens(self) -> Tensor:
        """Tokens of the columns in use: int64[batch, size]."""
        return self._tokens[:, : self.size]

    @property
    def parents(self) -> Tensor:
        """Parents of the columns in use: int32[batch, size]."""
        return self._parents[:, : self.size]

    def add(self, layer: Layer, slots: Tensor, tokens: Tensor, value: Tensor, is_taken: Tensor) -> bool:
        """Append a layer below the frontier.

        Args:
            layer: the plan's layer.
            slots: int64[batch, width], slots of the frontier.
            tokens: int64[batch, above x ranks], of all slots.
            value: float[batch, above x ranks], of all slots.
            is_taken: bool[batch, width]; if slots are chosen by value, those taken come first.

        Returns:
            Whether there is a layer to go on from.
        """
        chosen = value.gather(1, slots) * is_taken
        width = slots.shape[1] if layer.slots is not None else self._worthwhile(chosen, is_taken)
        if not width:
            return False
        if width < slots.shape[1]:
            slots, chosen, is_taken = slots[:, :width], chosen[:, :width], is_taken[:, :width]
        parent = slots // layer.ranks
        column = parent + (self._begin + 1) if self._begin else self.lead[:, None].expand_as(slots)
        before = self.size - 1
        self._value[:, before : before + width] = chosen
        self.add_below(column, tokens.gather(1, slots), is_taken)
        self.frontier_value, self._begin = chosen, before
        self.frontier_number += self._places
        self._places = layer.width
        self.num_layers += 1
        return True

    def _worthwhile(self, chosen: Tensor, is_taken: Tensor) -> int:
        """Count the leading nodes of a layer that can matter: fewer than all only where reading waits for nothing.

        A pruned tree keeps its best nodes and values never grow along a path, so a node that is not among the best by
        now has no descendant that will be.
        """
        if chosen.device.type != "cpu":
            return chosen.shape[1]
        if self._plan.is_pruned and self.size - 1 + chosen.shape[1] > self._plan.num_nodes:
            known = torch.cat([self._value[:, : self.size - 1], chosen], 1)
            is_taken = is_taken & (chosen >= known.topk(self._plan.num_nodes + 1).values[:, -1:])
        return int(is_taken.sum(1).max())

    def add_below(self, column: Tensor, token: Tensor, is_taken: Tensor) -> None:
        """Append nodes int64[batch, width] below columns; padding where not taken."""
        begin = self.size
        end = self.size = begin + column.shape[1]
        above = self._mask[:, :begin, :begin]
        self._mask[:, begin:end, :begin] = above.take_along_dim(column[..., None], 1) & is_taken[..., None]
        self._depths[:, begin:end] = (self._depths.gather(1, column) + 1) * is_taken
        self._tokens[:, begin:end] = token * is_taken
        self._parents[:, begin:end] = torch.where(is_taken, column, -1)

    def select(self, tree: TokenTree, plan: Plan) -> Tensor | None:
        """Choose the nodes of the target's tree that are proposed: int64[batch, count], or None for all.

        Values never grow along a path and a stable order puts parents first, so what is kept is a tree.  What was drawn
        stays: of a sampled tree only padding is dropped.
        """
        n = tree.tokens.shape[1]
        if plan.is_pruned:
            if n <= plan.num_nodes + 1:
                return None
            order = self._value[:, :n].sort(dim=1, descending=True, stable=True).indices
            return order[:, : plan.num_nodes + 1].sort(1).values
        is_fixed = plan.is_heap or all(layer.slots is not None for layer in plan.layers)
        if is_fixed or (tree.tokens.device.type == "cpu" and len(tree.tokens) == 1):  # of one row no place is padding
            return None
        order = tree.is_padding.to(torch.int8).sort(dim=1, stable=True).indices
        return order[:, : plan.num_nodes + 1]

    def target_tree(self) -> TokenTree:
        """Cut the leading column away: the tree as the target sees it."""
        lead, size = self.lead[:, None], self.size
        tokens = self._tokens[:, 1:size].clone()
        tokens[:, :1] = self._tokens.gather(1, lead)
        is_node = self._parents[:, 2:size] >= 0
        parents = self._parents[:, 1:size].clone()
        parents[:, 0] = -1
        parents[:, 1:] = torch.where(is_node, (parents[:, 1:] - 1).clamp_(min=0), -1)
        depths = self._depths[:, 1:size].clone()
        depths[:, 0] = 0
        depths[:, 1:] -= lead * is_node
        mask = self._mask[:, 1:size, 1:size].clone()
        mask[:, 1:, 0] = is_node
        return TokenTree.unchecked(tokens, parents, depths, mask)


def _prune(tree: TokenTree, kept: Tensor) -> TokenTree:
    """Keep int64[batch, count] nodes, each behind its parent."""
    batch, n = tree.tokens.shape
    place = torch.full((batch, n), -1, device=kept.device)
    place.scatter_(1, kept, torch.arange(kept.shape[1], device=kept.device).expand(batch, -1))
    parents = tree.parents.gather(1, kept)
    parents = torch.where(parents >= 0, place.gather(1, parents.clamp(min=0).long()), -1).to(torch.int32)
    mask = tree.ancestor_mask.take_along_dim(kept[..., None], 1).take_along_dim(kept[:, None], 2)
    return TokenTree.unchecked(tree.tokens.gather(1, kept), parents, tree.depths.gather(1, kept), mask)
