"""Traversal verification in Triton: launches whose number depends on sizes alone, and nothing read by the host.

A child's test needs the sums that its elder siblings' rejections left at their parent, and the probability with which
that parent is held.  First children need no sum, so a test happens in the wave that counts the elder siblings along its
path.  A wave is two launches: one weighs its tests, the other sums what their rejections leave.  What trees need
beyond MAX_WAVES waves is done by one launch more, in which one program a sequence goes on alone.
"""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stree.kernels.sampling.blocks import MAX_VOCAB, is_aligned
from stree.kernels.sampling.kernel import keys_of
from stree.kernels.sampling.reference import TARGET, UNITS
from stree.kernels.tiles import MAX_NODES, check_inner, check_limit, padded
from stree.kernels.traversal import node_tests, plan_and_walk
from stree.kernels.traversal.operands import DELTA, INDEPENDENT, DraftProbs, TraversedPath

__all__ = ["ACCEPT", "MAX_WAVES", "constants", "num_waves", "traverse", "warps"]

ACCEPT = 1  # purpose of the numbers of acceptance tests
MAX_WAVES = 12  # a test for each of the 12 children that `calibrated` draws at the root
BLOCK = 4096  # of a vocabulary in one program
PARTS = 16  # sums of blocks that are read together


def num_waves(n: int, max_depth: int, max_children: int | None) -> int:
    """Bound the waves of trees of n nodes: a node with w elder siblings along its path is tested after w + 1 others."""
    bound = n - 1
    return bound if max_children is None else min(bound, max_depth * (max_children - 1) + 1)


def traverse(
    tree: tuple[Tensor, Tensor, Tensor, Tensor],
    dist: Tensor,
    draft: DraftProbs | None,
    numbers: tuple[int | Tensor, Tensor, Tensor],
    *,
    max_depth: int,
    max_children: int | None,
) -> TraversedPath:
    """Test all nodes, draw which nodes pass, walk down and draw the next token; see `stree.kernels.traversal.api`.

    Args:
        tree: tokens, parents, mask and depths.
        dist: the target's.
        draft: distributions of the nodes.
        numbers: seed, sequences and positions.
        max_depth: bound of the depths.
        max_children: bound of a node's children, or None.
    """
    _, n, vocab = dist.shape
    check_limit("traverse", "trees of nodes", n, MAX_NODES)
    check_limit("traverse", "a vocabulary", vocab, MAX_VOCAB)
    check_inner("dist", dist)
    if draft is not None:
        check_inner("draft.probs", draft.probs)
    seed, sequences, positions = numbers
    words = sequences.contiguous(), positions.contiguous(), keys_of(seed, dist)
    operands = tuple(tensor.contiguous() for tensor in tree)
    work = _Work.of(dist, draft)
    with torch.cuda.device_of(dist):  # Triton launches on the current device, wherever the tensors are
        work.plan_tests(operands, draft)
        work.run_tests(num_waves(n, max_depth, max_children), max_depth)
        return work.toss(operands, words, min(n, max_depth + 1))


def constants(n: int, vocab: int, *, aligned: bool = True) -> dict[str, Any]:
    """List the compile-time constants that the kernels choose from; ahead-of-time builds take theirs from here too."""
    block = min(BLOCK, padded(vocab))
    return {
        "NODES": padded(n), "PARTS": PARTS, "BLOCK": block, "BLOCKS": padded(-(-vocab // block)), "ALIGNED": aligned,
        "UNITS": UNITS,
    }  # fmt: skip


def warps(nodes: int) -> dict[str, int]:
    """Choose warps that do not spill: of programs that go through all pairs of nodes, all nodes, blocks, or all."""
    return {"pairs": 4 if nodes < 64 else 8, "nodes": max(4, nodes // 16), "block": 8, "rest": 8}


@dataclass(frozen=True, slots=True, eq=False)
class _Work:
    """Operands of the launches, and what they leave for each other.

    Attributes:
        dist: float32[b, n, vocab], the target's.
        probs: float[b, rows, vocab] or None.
        plan: int32[b, rows of integers, nodes], see `stree.kernels.traversal.node_tests`.
        state: float32[b, rows of numbers, nodes], likewise.
        parts: float32[b, nodes, blocks], sums of what each node's rejection leaves at its parent.
        constants: see `constants`.
        warps: see `warps`.
    """

    dist: Tensor
    probs: Tensor | None
    plan: Tensor
    state: Tensor
    parts: Tensor
    constants: dict[str, Any]
    warps: dict[str, int]

    @classmethod
    def of(cls, dist: Tensor, draft: DraftProbs | None) -> _Work:
        """Allocate the tables."""
        batch, n, vocab = dist.shape
        probs = None if draft is None else draft.probs
        values = constants(n, vocab, aligned=is_aligned(dist) and (probs is None or is_aligned(probs)))
        nodes = values["NODES"]
        return cls(
            dist=dist,
            probs=probs,
            plan=dist.new_empty(batch, node_tests.PLAN_ROWS.value, nodes, dtype=torch.int32),
            state=dist.new_empty(batch, node_tests.STATE_ROWS.value, nodes),
            parts=dist.new_empty(batch, nodes, -(-vocab // values["BLOCK"])),
            constants=values,
            warps=warps(nodes),
        )

    def plan_tests(self, tree: tuple[Tensor, ...], draft: DraftProbs | None) -> None:
        """Launch the order of the tests and the numbers that they need."""
        tokens, parents, mask, _ = tree
        batch, n, vocab = self.dist.shape
        blocks, rows, sums = self.parts.shape[2], 0, None
        row, kind = None, None
        if draft is not None:
            rows, row, kind = draft.probs.shape[1], draft.row.contiguous(), draft.kind.contiguous()
            sums = self.dist.new_empty(batch, rows, blocks, dtype=torch.float64)
            plan_and_walk.sums_kernel[(blocks, rows, batch)](
                draft.probs, sums, vocab, *self._strides[2:], **self._take("BLOCK", "ALIGNED"),
                num_warps=self.warps["block"],
            )  # fmt: skip
        plan_and_walk.plan_kernel[(batch,)](
            tokens, parents, mask, self.dist, self.probs, row, kind, sums, self.plan, self.state, n, rows, blocks,
            *self._strides, DELTA=DELTA, INDEPENDENT=INDEPENDENT, **self._take("NODES", "PARTS"),
            num_warps=self.warps["pairs"],
        )  # fmt: skip

    def run_tests(self, waves: int, rounds: int) -> None:
        """Launch this many waves, or as many as there are launches for and the rest of them in one."""
        batch, n, vocab = self.dist.shape
        blocks, lanes = self.parts.shape[2], self._take("NODES", "BLOCK", "ALIGNED")
        for wave in range(min(waves, MAX_WAVES)):
            node_tests.settle_kernel[(batch,)](
                self.probs, self.plan, self.state, self.parts, blocks, wave, rounds, *self._strides[2:],
                **self._take("NODES", "PARTS"), num_warps=self.warps["nodes"],
            )  # fmt: skip
            node_tests.reject_kernel[(blocks, n, batch)](
                *self._operands, self.parts, vocab, wave, *self._strides, **lanes, num_warps=self.warps["block"]
            )
        if waves > MAX_WAVES:
            node_tests.rest_kernel[(batch,)](
                *self._operands, self.parts, n, vocab, blocks, MAX_WAVES, rounds, *self._strides,
                PARTS=self.constants["PARTS"], **lanes, num_warps=self.warps["rest"],
                maxnreg=128,  # left alone, Triton 3.6's assembler takes 64 and spills
            )  # fmt: skip

    def toss(self, tree: tuple[Tensor, ...], words: tuple[Tensor, ...], width: int) -> TraversedPath:
        """Draw which nodes pass, walk down, and draw the next token."""
        _, _, mask, depths = tree
        batch, n, vocab = self.dist.shape
        new, blocks = self.dist.new_empty, self.parts.shape[2]
        found = TraversedPath(
            path=new(batch, width, dtype=torch.int32),
            path_lengths=new(batch, dtype=torch.int32),
            next_token=new(batch, dtype=torch.int64),
            ratios=new(batch, n),
            accept_probs=new(batch, n),
        )
        leaf, sums = new(batch, dtype=torch.int32), new(batch, blocks, dtype=torch.int64)
        plan_and_walk.toss_kernel[(batch,)](
            mask, depths, *words, self.plan, self.state, self.parts, found.accept_probs, found.ratios, found.path,
            found.path_lengths, leaf, n, width, blocks, PURPOSE=ACCEPT, **self._take("NODES", "PARTS"),
            num_warps=self.warps["pairs"],
        )  # fmt: skip
        lanes = self._take("NODES", "UNITS", "BLOCK", "ALIGNED")
        plan_and_walk.leaf_kernel[(blocks, batch)](
            *self._operands, leaf, sums, vocab, *self._strides, **lanes, num_warps=self.warps["block"]
        )
        plan_and_walk.next_kernel[(batch,)](
            *self._operands, leaf, sums, found.path_lengths, *words, found.next_token, vocab, blocks, *self._strides,
            PURPOSE=TARGET, BLOCKS=self.constants["BLOCKS"], **lanes, num_warps=self.warps["block"],
        )  # fmt: skip
        return found

    @property
    def _operands(self) -> tuple[Tensor | None, ...]:
        """Distributions and tables, the first arguments of most launches."""
        return self.dist, self.probs, self.plan, self.state

    @property
    def _strides(self) -> tuple[int, ...]:
        """Strides of both distributions by sequence and row."""
        return (*self.dist.stride()[:2], *((0, 0) if self.probs is None else self.probs.stride()[:2]))

    def _take(self, *names: str) -> dict[str, Any]:
        """Choose some constants."""
        return {name: self.constants[name] for name in names}
