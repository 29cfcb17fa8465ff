"""Filling a growth's plan with the candidates of a draft model: layer by layer, or node by node from a heap."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from stree.drafters.candidates import Candidates, by_kind, candidate_source
from stree.drafters.tree_builder import GrownTree
from stree.growth import AcceptanceModel, KeptSlots, Plan, Slots, choose_slots
from stree.sampling import MAX_RANKS, AnySampling, Random

__all__ = ["grow_heap", "grow_layers"]

TINY = 1e-38


def grow_layers(
    grown: GrownTree,
    plan: Plan,
    sampling: AnySampling,
    rng: Random,
    acceptance_model: AcceptanceModel,
    run_frontier: Callable[[], Tensor],
    probs_buffer: Callable[[Tensor], Tensor],
) -> tuple[Tensor | None, KeptSlots, list[Candidates]]:
    """Grow a tree layer by layer, a draft call each.

    Args:
        grown: the tree, its root alone.
        plan: its layers.
        sampling: of the growth.
        rng: random numbers of the draft.
        acceptance_model: of the growth.
        run_frontier: runs the last layer; returns float[batch, nodes, vocab] logits.
        probs_buffer: memory for the distributions of all nodes that are run, from the first layer's logits.

    Returns:
        The distributions of the nodes that were run, float[batch, nodes, vocab], if sampled; layer by layer what the
        acceptance model keeps of the slots, and the candidates.
    """
    drawing = "top" if sampling.is_greedy else plan.drawing
    candidates_of = candidate_source(drawing, rng, plan, sampling)
    buffer, used, kept_slots, offered = None, 0, [], list[Candidates]()
    for depth, layer in enumerate(plan.layers):
        logits = run_frontier()
        if drawing == "top":
            probs, norms = sampling.draft_probs(logits)
        else:
            buffer = probs_buffer(logits) if buffer is None else buffer
            probs, norms = sampling.draft_probs(logits, out=buffer[:, used : used + logits.shape[1]])
            used += logits.shape[1]
        goes_on = acceptance_model.draws(grown.frontier_value, probs)
        values = grown.frontier_value if goes_on is None else grown.frontier_value * goes_on[:, None]
        candidates = candidates_of(probs, grown.frontier_number, layer.ranks)
        offered.append(candidates)
        context = grown.context(candidates.tokens)
        priority, value = acceptance_model.rate(Slots(values, candidates.probs, probs, norms, context))
        left, layers_left = None if plan.is_pruned else grown.left, len(plan.layers) - depth
        slots, is_taken = choose_slots(layer, priority.flatten(1), left, plan.threshold, layers_left)
        if not grown.add(layer, slots, is_taken, candidates, value):
            break
        goes_on = acceptance_model.goes_on(grown.frontier_value)
        kept_slots.append(acceptance_model.keep(slots[:, : grown.frontier_value.shape[1]]))
        if goes_on is not None and not grown.stop(goes_on):
            break
        del logits, probs, norms  # or they are there beside those of the next layer
    grown.add_leaves()
    if not plan.layers:
        run_frontier()
    return None if buffer is None else buffer[:, :used], kept_slots, offered


def grow_heap(
    grown: GrownTree, plan: Plan, sampling: AnySampling, rng: Random, run_frontier: Callable[[], Tensor]
) -> Tensor | None:
    """Grow a tree node by node, always at the slot of the greatest value, a draft call each.

    Returns:
        The distributions of the nodes, float[batch, nodes, vocab], if sampled.
    """
    dists: list[Tensor] = []
    logits = run_frontier()
    batch = len(logits)
    rows = torch.arange(batch, device=logits.device)
    priority = logits.new_ones(batch, 1)  # of each node's next slot
    rest = logits.new_zeros(batch, 0, logits.shape[-1])  # distributions without the tokens drawn
    draws = torch.zeros(batch, plan.num_nodes + 1, dtype=torch.long, device=rows.device)
    depth, max_depth = torch.zeros_like(draws[:, :1]), plan.num_nodes if plan.max_depth is None else plan.max_depth
    for node in range(plan.num_nodes):
        if node:
            logits = run_frontier()
        dists.append(sampling.draft_probs(logits)[0])
        rest = torch.cat([rest, dists[-1]], 1)
        best = by_kind(sampling, partial(_most_likely, rest), partial(_has_mass, rest))
        parent = (priority * best * (depth < max_depth)).argmax(1, keepdim=True)
        dist = rest[rows[:, None], parent]  # [batch, 1, vocab]
        number = parent * MAX_RANKS + draws.gather(1, parent)
        drawn = partial(rng.choice, "draft", dist, torch.zeros_like(parent), number)
        token = by_kind(sampling, partial(dist.argmax, -1), drawn)
        draws.scatter_add_(1, parent, torch.ones_like(parent))
        share = dist.gather(-1, token[..., None]).squeeze(-1) / dist.sum(-1).clamp(min=TINY)
        upper = priority.gather(1, parent)
        is_taken = (upper > 0) & (share > 0) & (node < grown.left[:, None])
        rest[rows[:, None], parent] = dist.scatter(-1, token[..., None], 0.0)
        value, depth = upper * share * is_taken, torch.cat([depth, depth.gather(1, parent) + 1], 1)
        priority = torch.cat([priority.scatter(1, parent, upper * (1 - share)), value], 1)
        grown.add_below(parent + 1, token, value, is_taken)
    return None if sampling.is_greedy else torch.cat(dists, 1)


def _most_likely(rest: Tensor) -> Tensor:
    """Return the share of the most probable token in each distribution float[batch, nodes, vocab]."""
    return rest.max(-1).values / rest.sum(-1).clamp(min=TINY)


def _has_mass(rest: Tensor) -> Tensor:
    """Return 1 where a distribution has tokens left, else 0."""
    return (rest.sum(-1) > 0).to(rest.dtype)
