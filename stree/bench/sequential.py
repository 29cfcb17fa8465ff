"""Baselines that run a tree's recurrence node after node: with a state snapshot for every node, and with replay.

Both take the place of a ``TreeLM`` in ``stree.generate``: same weights, drafter, acceptance and tokens, and one forward
pass a tree.  Only the recurrence with a matrix state (Mamba-2, lightning attention, gated delta rule) is another: nodes
of one depth are run together from their parents' states, in plain torch, in place of the closed form over ancestors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from stree.kernels.dispatch import Behaviour, Operands, behaving
from stree.kernels.mamba2.reference import stash_rows
from stree.kernels.topology import AcceptedPath
from stree.models.layers.mamba1 import Mamba1Spec
from stree.models.layers.rg_lru import RgLruSpec
from stree.models.state import DecodeState
from stree.models.state_size import measure_state
from stree.models.tree_lm import TreeLM
from stree.tree import TokenTree

__all__ = ["ReplayLM", "SnapshotLM"]

CACHED = 1 << 20  # bytes of states that are computed at a time
KEPT = ("state", "stash_conv")  # tensors of a layer that a snapshot of a node takes the room of


@dataclass(frozen=True, slots=True, eq=False)
class _Levels:
    """The nodes of a batch of trees by depth; a node's place is its number in that order.

    Attributes:
        order: int64[batch * n], nodes by place, numbered through the batch.
        place: int64[batch * n], its inverse.
        spans: places of every depth, as slices.
        parents: of every depth: for the roots the row of the batch, for others the parent's place in its depth.
    """

    order: Tensor
    place: Tensor
    spans: list[slice]
    parents: list[list[int]]

    @classmethod
    def of(cls, tree: TokenTree) -> _Levels:
        """Sort the nodes; padding counts as roots."""
        n = tree.parents.shape[1]
        order = tree.depths.flatten().sort(stable=True).indices
        place = torch.empty_like(order)
        place[order] = torch.arange(len(order), device=order.device)
        ends = [*accumulate(tree.depths.flatten().bincount().tolist(), initial=0)]
        above = (tree.parents + n * torch.arange(len(tree.parents), device=order.device)[:, None]).flatten()
        spans = [slice(*span) for span in pairwise(ends)]
        begins = [0, *(span.start for span in spans)]
        parents = [order[spans[0]] // n]
        parents += [place[above[order[span]]] - begin for span, begin in zip(spans[1:], begins[1:], strict=False)]
        return cls(order, place, spans, [part.tolist() for part in parents])


class _LevelLM(TreeLM):
    """A target whose trees are scored depth by depth; model and attributes are the target's.

    Args:
        lm: the target.

    Raises:
        NotImplementedError: a layer has a diagonal state, Mamba-1 or RG-LRU: its scan computes every node's state.
    """

    def __init__(self, lm: TreeLM) -> None:
        other = {spec.kind for spec in lm.specs.values() if isinstance(spec, (Mamba1Spec, RgLruSpec))}
        if other:
            raise NotImplementedError(f"this baseline has no sequential scan of {', '.join(sorted(other))} layers")
        self.__dict__.update(lm.__dict__)
        # Verification reads trees on the host, which a CUDA graph cannot, and is not compiled.
        self.captures_steps = self.defers_commit = self.is_compiled = False
        self.fused_mixers = False  # the scans that are replaced are called alone
        scans: dict[str, Callable[..., Any]] = {"ssd_step": self._ssd_step, "gated_delta_step": self._delta_step}
        self._behaviour = Behaviour(replaced={**scans, **self._commits()})
        self._levels: _Levels
        self._scanned: list[tuple[Tensor, Tensor | None]] = []  # state and snapshots of every recurrence, in call order

    def verify(self, state: DecodeState, tree: TokenTree, first: int = 0, **options: Any) -> Any:
        """Score every node; ``first`` must be 0."""
        if first:
            raise NotImplementedError(f"this baseline scores whole trees, got first {first}")
        self._levels, self._scanned = _Levels.of(tree), []
        with behaving(self._behaviour):
            return super().verify(state, tree, **options)

    def commit(self, state: DecodeState, path: Tensor, path_lengths: Tensor) -> None:
        """Advance the state by a path of the last tree."""
        with behaving(self._behaviour):
            super().commit(state, path, path_lengths)

    def _commits(self) -> dict[str, Callable[..., None]]:
        """Return the operations that commit a path."""
        raise NotImplementedError

    def _snapshots(self, shape: Sequence[int], state: Tensor) -> Tensor | None:
        """Return memory for the states of all nodes of one recurrence, or None where they are not kept."""
        raise NotImplementedError

    def _ssd_step(self, a: Operands) -> Tensor:
        """Stash x, B, C and dt of the new rows, scan the new tree: ``stree.kernels.ops.ssd_step``."""
        x, dt, B, C = stash_rows(a)
        rows, dtype = x.to(a.state.dtype), a.state.dtype
        y, _ = self._scan(C.to(dtype), B.to(dtype), rows * dt[..., None], dt * a.A, a.state.transpose(2, 3))
        return (y if a.D is None else torch.addcmul(y, rows, a.D.to(dtype)[:, None])).to(x.dtype)

    def _delta_step(self, a: Operands) -> Tensor:
        """Stash k and g of the new rows, scan the new tree, stash u: ``stree.kernels.ops.gated_delta_step``."""
        n, dtype = a.topology.parents.shape[1], a.state.dtype
        a.stash_k[:, :n].copy_(a.k)
        a.stash_g[:, :n].copy_(a.g)
        query = a.q.to(dtype) * (a.k.shape[3] ** -0.5 if a.scale is None else a.scale)
        o, u = self._scan(query, a.k.to(dtype), a.v.to(dtype), a.stash_g[:, :n], a.state, a.beta.to(dtype))
        a.stash_u[:, :n].copy_(u)
        return o.to(a.v.dtype)

    def _scan(
        self, query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, state: Tensor, beta: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Run S_i = e^{g_i} S_parent + k_i u_i^T depth by depth and read o_i = S_i^T q_i.

        Args:
            query: [b, n, g, s]; g divides h.
            key: [b, n, g, s].
            value: [b, n, h, p], u itself without ``beta``; with it u_i = beta_i (v_i - e^{g_i} S_parent^T k_i).
            log_decay: [b, n, h], or [b, n, h, s] for a decay per key channel.
            state: [b, h, s, p].
            beta: [b, n, h] or None.

        Returns:
            o and u, [b, n, h, p] each.
        """
        levels, shared = self._levels, state.shape[1] // key.shape[2]
        q, k = (part.flatten(0, 1)[levels.order].repeat_interleave(shared, 1) for part in (query, key))
        u = value.flatten(0, 1)[levels.order]
        decay = log_decay.flatten(0, 1)[levels.order].exp()
        decay = decay[..., None, None] if log_decay.ndim == 3 else decay[..., None]
        strength = None if beta is None else beta.flatten(0, 1)[levels.order, :, None]
        out, above = torch.empty_like(u), state
        kept = self._snapshots((len(u), *state.shape[1:]), state)
        count = max(1, CACHED // state[0].nbytes)
        for span, parents in zip(levels.spans, levels.parents, strict=True):
            states = state.new_empty(len(parents), *state.shape[1:]) if kept is None else kept[span]
            for begin in range(0, len(parents), count):  # what is written is read again while it is in the cache
                uppers, new = parents[begin : begin + count], states[begin : begin + count]
                part = slice(span.start + begin, span.start + begin + len(new))
                old = above[uppers[0] : uppers[0] + 1] if len(uppers) == 1 else above[uppers]
                torch.mul(old, decay[part], out=new)
                if strength is not None:
                    u[part] = strength[part] * (u[part] - _read(new, k[part]))
                new.addcmul_(k[part, :, :, None], u[part, :, None])
                out[part] = _read(new, q[part])
            above = states
        self._scanned.append((state, kept))
        return tuple(part[levels.place].view(value.shape) for part in (out, u))  # type: ignore[return-value]


class SnapshotLM(_LevelLM):
    """Verify a tree with a full recurrent state for every node, as servers do; a commit copies the last one.

    Windows of convolutions, keys and values are kept as by ``TreeLM``: inputs of the nodes, not a window for each.

    Args:
        lm: the target.
    """

    def __init__(self, lm: TreeLM) -> None:
        super().__init__(lm)
        self._memory: list[Tensor] = []

    def commit(self, state: DecodeState, path: Tensor, path_lengths: Tensor) -> None:
        """Copy the snapshot of each path's last node into the state."""
        n, levels = state.pending_tree.tokens.shape[1], self._levels  # type: ignore[union-attr]
        super().commit(state, path, path_lengths)
        rows = path_lengths.nonzero()[:, 0]
        last = path[rows, path_lengths[rows].long() - 1].long()
        for recurrent, kept in self._scanned:
            recurrent[rows] = kept[levels.place[rows * n + last]]  # type: ignore[index]

    @property
    def node_bytes(self) -> int:
        """Bytes kept for a pending node, keys and values not counted."""
        kept = [getattr(stack, name, None) for stack in self.new_state(1, 1, 1).stacks.values() for name in KEPT]
        return sum(tensor.nbytes for tensor in kept if tensor is not None)

    def _commits(self) -> dict[str, Callable[..., None]]:
        return {name: lambda *_: None for name in ("ssd_commit", "gated_delta_commit")}

    def _snapshots(self, shape: Sequence[int], state: Tensor) -> Tensor:
        place = len(self._scanned)
        if place == len(self._memory):
            self._memory.append(state.new_empty(0))
        if self._memory[place].shape != shape:
            self._memory[place] = state.new_empty(shape)
        return self._memory[place]


class ReplayLM(_LevelLM):
    """Verify a tree without keeping states, and run the recurrence again over the accepted path (ReplaySSM).

    What is kept for a node are the inputs of its recurrence: x, B and the step size; of the delta rule k, the decay
    and the corrected write u, so that the second run is a plain sum.  ReplaySSM itself verifies chains, in one kernel
    with the second run.

    Args:
        lm: the target.
    """

    @property
    def node_bytes(self) -> int:
        """Bytes kept for a pending node, keys and values not counted."""
        return measure_state(self).stash_per_node

    def _commits(self) -> dict[str, Callable[..., None]]:
        return {"ssd_commit": _ssd_replay, "gated_delta_commit": _delta_replay}

    def _snapshots(self, shape: Sequence[int], state: Tensor) -> None:
        return None


def _read(state: Tensor, key: Tensor) -> Tensor:
    """Compute S^T k of float[rows, h, s, p] and [rows, h, s]: [rows, h, p]."""
    return (key[:, :, None] @ state).squeeze(2)


def _ssd_replay(state: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, accepted: AcceptedPath) -> None:
    """Run Mamba-2's recurrence over a path, in place; a step size of 0, past its length, changes nothing."""
    step = accepted.take(dt).to(state.dtype)
    write, key = accepted.take(x) * step[..., None], accepted.take(B).to(state.dtype)
    decay = (step * (A if A.ndim == 1 else A[:, None])).exp()
    _replay(state, decay[..., None, None], write, key.repeat_interleave(state.shape[1] // key.shape[2], 2))


def _delta_replay(state: Tensor, k: Tensor, u: Tensor, g: Tensor, accepted: AcceptedPath) -> None:
    """Run the delta rule's corrected writes over a path, in place."""
    key = accepted.take(k).to(state.dtype).repeat_interleave(state.shape[1] // k.shape[2], 2)
    decay = accepted.take(g).exp()
    decay = decay[..., None, None] if g.ndim == 3 else decay[..., None]
    _replay(state, decay, key, accepted.take(u).to(state.dtype))


def _replay(state: Tensor, decay: Tensor, left: Tensor, right: Tensor) -> None:
    """Run S = decay_j S + left_j right_j^T for every entry j of a path."""
    for entry in range(left.shape[1]):
        state.mul_(decay[:, entry]).addcmul_(left[:, entry, :, :, None], right[:, entry, :, None])
