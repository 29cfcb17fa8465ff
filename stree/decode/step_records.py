"""What happened to each text in a step, where it is asked for, and how many drafted nodes the steps accepted."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from stree.drafters import Draft
from stree.sampling import AnySampling
from stree.verify import DELTA, Acceptance, Verifier

if TYPE_CHECKING:
    from stree.decode.step_result import StepResult

__all__ = ["AcceptedCounts", "StepRecord", "path_probs", "step_record"]


@dataclass(frozen=True, slots=True)
class StepRecord:
    """What happened to one text in one step; JSON-able by ``dataclasses.asdict``.

    Attributes:
        tokens: of the tree's nodes, each behind its parent, the root first.
        parents: of the nodes; -1 for the root.
        depths: of the nodes.
        path: the accepted nodes, the root first.
        emitted: tokens after the path's nodes: those of its drafted nodes, and the bonus or recovered token.  Where the
            step has ended the text, some of them may be behind its end.
        target_probs: the target's probability of each of these, given the text before it; at temperature 0 that of
            temperature 1.  None where they were not asked for.
        draft_probs: of each accepted drafted node the probability of its token in the distribution that it was drawn
            from, earlier siblings included; None for a node that was not drawn, as at temperature 0 and under MATCH.
        values: of all nodes, estimated probability that each is accepted; None where the drafter has no estimate.
        seconds: of the parts of the step, which the rows of a batch share.
        node_probs: of all nodes, also under MATCH and of those refused, the draft model's probability of its token
            after its parent, as in ``draft_probs``; at temperature 0 that of temperature 1.  The root's is None.  None
            where no draft model has grown the tree in layers.
    """

    tokens: list[int]
    parents: list[int]
    depths: list[int]
    path: list[int]
    emitted: list[int]
    target_probs: list[float] | None
    draft_probs: list[float | None] | None
    values: list[float] | None
    seconds: dict[str, float]
    node_probs: list[float | None] | None = None

    @property
    def num_accepted(self) -> int:
        """Drafted nodes that were accepted."""
        return len(self.path) - 1


def step_record(result: StepResult, row: int, committed: int, seconds: Mapping[str, float]) -> StepRecord:
    """Read what happened in a row of a step that has committed so many nodes, padding left out."""
    trees = result.trees
    assert trees is not None, "trees were asked for"
    tokens, parents = trees.tokens[row].tolist(), trees.parents[row].tolist()
    nodes = [node for node, parent in enumerate(parents) if not node or parent >= 0]
    number, depths = {node: place for place, node in enumerate(nodes)} | {-1: -1}, [0]
    for node in nodes[1:]:
        depths.append(depths[number[parents[node]]] + 1)
    target_probs = draft_probs = None
    if trees.probs is not None:
        target, drawn = trees.probs[row, :committed].unbind(-1)
        target_probs = target.tolist()
        draft_probs = [None if math.isnan(prob) else prob for prob in drawn[1:].tolist()]
    values, node_probs = (
        None if part is None else [*map(part[row].tolist().__getitem__, nodes)]
        for part in (trees.values, trees.node_probs)
    )
    return StepRecord(
        [tokens[node] for node in nodes], [number[parents[node]] for node in nodes], depths,
        [number[node] for node in trees.path[row, :committed].tolist()], result.report[row, :committed].tolist(),
        target_probs, draft_probs, values, {**seconds}, None if node_probs is None else [None, *node_probs[1:]],
    )  # fmt: skip


def path_probs(
    draft: Draft, acceptance: Acceptance, logits: Tensor, emitted: Tensor, sampling: AnySampling,
    verifier: str | Verifier,
) -> Tensor:  # fmt: skip
    """Return the probabilities of a step's path, float[batch, m, 2]: see ``StepRecord``; undefined past its length.

    Args:
        draft: of the step.
        acceptance: of the step.
        logits: float[batch, n, vocab], from which the target's tokens were drawn.
        emitted: int64[batch, m], tokens after the path's nodes.
        sampling: of the rows.
        verifier: which under "match" reads no draft distribution.

    Returns:
        The target's probability of the token after each node, and the draft's of the node, NaN where it was not drawn.
    """
    nodes, drawn_from = acceptance.path.clamp(min=0).long(), draft.probs
    batch = torch.arange(len(nodes), device=nodes.device)[:, None]
    after, _ = sampling.draft_probs(logits[batch, nodes])
    target = after.gather(-1, emitted[..., None]).squeeze(-1)
    drawn = torch.full_like(target, math.nan)
    if drawn_from is not None and verifier != "match":
        rows, tokens = drawn_from.row.gather(1, nodes).clamp(min=0).long(), draft.tree.tokens.gather(1, nodes)
        probs = drawn_from.probs[batch, rows, tokens].to(target.dtype)
        drawn = torch.where(drawn_from.kind.gather(1, nodes) == DELTA, drawn, probs)
    return torch.stack([target, drawn], -1)


@dataclass(slots=True)
class AcceptedCounts:
    """Counts steps by the drafted nodes that they accepted, of one text or several, before the text is cut at its end.

    Attributes:
        steps_by_accepted: number of steps that accepted exactly i drafted nodes.
    """

    steps_by_accepted: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, accepted: Iterable[int]) -> AcceptedCounts:
        """Count steps of which each accepted so many drafted nodes."""
        counts = cls()
        for number in accepted:
            counts.add(number)
        return counts

    def add(self, num_accepted: int) -> None:
        """Count a step."""
        self.steps_by_accepted += [0] * (num_accepted + 1 - len(self.steps_by_accepted))
        self.steps_by_accepted[num_accepted] += 1

    @property
    def steps(self) -> int:
        """Steps so far."""
        return sum(self.steps_by_accepted)

    @property
    def tokens(self) -> int:
        """Sum over the steps of the accepted nodes and the target's own token."""
        return sum((number + 1) * steps for number, steps in enumerate(self.steps_by_accepted))

    @property
    def tau(self) -> float:
        """Tokens a step; 0 without a step."""
        return self.tokens / self.steps if self.steps else 0.0

    @property
    def acceptance_by_depth(self) -> list[float]:
        """Share of the steps whose path reached depth d that accepted a node at depth d + 1, for d = 0, 1, ..."""
        reached = [sum(self.steps_by_accepted[depth:]) for depth in range(len(self.steps_by_accepted))]
        return [now / before for before, now in zip(reached, reached[1:], strict=False)]

    def report(self) -> dict[str, Any]:
        """Steps, tau and acceptance by depth, JSON-able."""
        return {"steps": self.steps, "tau": self.tau, "acceptance_by_depth": self.acceptance_by_depth}
