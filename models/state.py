"""The state of a batch of sequences: recurrent states, convolution windows, keys, values, the stash of a pending tree.

Tensors are allocated, copied and committed per stack: all layers of one kind and shape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from copy import copy
from typing import Any

import torch
from torch import Tensor

from stree.models.checks import check_rows
from stree.models.deferred_commit import MAX_DEFERRED, DeferredCommit
from stree.models.layers.base import LayerSpec, LayerStack, Prefilled, Site
from stree.tree import TokenTree

__all__ = ["DecodeState", "recorded"]

DERIVED = ("layers", "stack_tensors", "layer_tensors", "deferred", "deferred_rows")  # attributes made from the stacks

_is_recorded: ContextVar[bool] = ContextVar("is_recorded", default=False)


@contextmanager
def recorded() -> Iterator[None]:
    """Let a failure inside leave states as consistent as they were: operations are recorded there, and do not run."""
    token = _is_recorded.set(True)
    try:
        yield
    finally:
        _is_recorded.reset(token)


class DecodeState:
    """The state of a batch of sequences: memory for ``max_length`` tokens and ``max_nodes`` pending nodes each.

    ``TreeLM.prefill`` fills it, ``TreeLM.commit`` advances it; ``verify`` writes the stash only.

    Attributes:
        lengths: int32[batch], committed tokens of each sequence.
        max_length: most committed tokens a sequence.
        max_nodes: most nodes of a tree, root included.
        pending_tree: the last verified and not yet committed tree; ``commit`` applies, ``verify(first=k)`` extends it.
        length_bound: int on the host; no sequence is longer.
        fixed_shapes: whether all steps have the same shapes, as a captured graph needs: attention then runs over
            ``max_length`` rows at any length.
        defers_commit: whether a committed path is applied by the scan of the next tree.
        fused_mixers: whether Mamba-2 mixers run in one launch on small trees; their windows are then committed at once.
        deferred: that path; None where no layer can defer.
        deferred_rows: by site, the rows of that path in the layer's ``shared`` tensors.
        stack_tensors: those of every stack, in their order.
        layer_tensors: the same as those of every layer, in their order.
        is_inconsistent: whether a commit or copy failed after some layers were changed.
    """

    @torch.inference_mode(False)  # a state may be used after the block
    def __init__(
        self,
        specs: Mapping[Site, LayerSpec],
        batch: int,
        max_length: int,
        max_nodes: int,
        device: Any,
        *,
        fixed_shapes: bool = False,
        defers_commit: bool = False,
        fused_mixers: bool = False,
    ) -> None:
        self.max_length, self.max_nodes, self.fixed_shapes = max_length, max_nodes, fixed_shapes
        self.specs, self.defers_commit, self.is_inconsistent = specs, defers_commit, False
        self.fused_mixers = fused_mixers
        self.lengths = torch.zeros(batch, dtype=torch.int32, device=device)
        self.pending_tree: TokenTree | None = None
        self.length_bound = 0
        self._slots: dict[Site, tuple[LayerSpec, int]] = {}
        counts: dict[LayerSpec, int] = {}
        for site, spec in specs.items():
            self._slots[site] = (spec, counts.get(spec, 0))
            counts[spec] = counts.get(spec, 0) + 1
        stacks = {spec: spec.allocate(count, batch, max_length, max_nodes) for spec, count in counts.items()}
        self._set_stacks({spec: stack.with_fused_mixer() if fused_mixers else stack for spec, stack in stacks.items()})

    @property
    def batch_size(self) -> int:
        """Number of sequences."""
        return self.lengths.shape[0]

    @property
    def num_bytes(self) -> int:
        """Bytes of memory, stash included."""
        deferred = 0 if self.deferred is None else self.deferred.num_bytes
        return deferred + sum(stack.num_bytes for stack in self.stacks.values())

    def clone(self) -> DecodeState:
        """Copy the committed state; a pending tree is left out."""
        return self.select(torch.arange(self.batch_size, device=self.lengths.device))

    def __deepcopy__(self, _: Any) -> DecodeState:
        """Copy as ``clone`` does: a state of the same TreeLM without a pending tree."""
        return self.clone()

    def __copy__(self) -> DecodeState:
        """Return a state that shares every tensor."""
        other = object.__new__(DecodeState)
        other.__dict__.update(self.__dict__)
        return other

    def __getstate__(self) -> dict[str, Any]:
        """Leave the views of layers out of pickles, in which they would be tensors of their own."""
        self.apply_deferred()
        return {name: value for name, value in self.__dict__.items() if name not in DERIVED}

    def __setstate__(self, values: dict[str, Any]) -> None:
        """Make the views of layers again."""
        self.__dict__.update(values)
        self._set_stacks(self.stacks)

    @torch.inference_mode(False)
    def select(self, batch_indices: Tensor) -> DecodeState:
        """Copy some sequences into a new state, int[batch']; indices may repeat; a pending tree is left out.

        Raises:
            ValueError: no list of indices, an empty one, or an index outside the batch (checked for CPU tensors).
        """
        try:
            rows = torch.as_tensor(batch_indices, device=self.lengths.device)
        except (RuntimeError, ValueError, TypeError):
            raise TypeError(f"batch_indices must be a list of integers, got {batch_indices!r:.80}") from None
        check_rows(rows, self.batch_size)
        self.apply_deferred()
        other = copy(self)
        other.pending_tree = None
        other.lengths = self.lengths[rows.long()]
        other._set_stacks({spec: stack.select(rows.long()) for spec, stack in self.stacks.items()})
        return other

    def resized(self, max_length: int, max_nodes: int) -> DecodeState:
        """Copy the committed state into one with more room, or less; a pending tree is left out.

        Raises:
            ValueError: no room for the committed tokens.
        """
        if max_length < self.max_length and max_length < (longest := int(self.lengths.max())):
            raise ValueError(f"a resized state must have room for its {longest} tokens, got max_length {max_length}")
        other = DecodeState(
            self.specs, self.batch_size, max_length, max_nodes, self.lengths.device,
            fixed_shapes=self.fixed_shapes, defers_commit=self.defers_commit, fused_mixers=self.fused_mixers,
        )  # fmt: skip
        other.overwrite(self)
        return other

    def overwrite(self, other: DecodeState) -> None:
        """Copy in the sequences of a state of the same batch that fit in this one's sizes; no tensor is replaced."""
        other.apply_deferred()
        with self.changing():
            for spec, stack in self.stacks.items():
                stack.overwrite(other.stacks[spec])
            if self.deferred is not None:
                self.deferred.clear()
            self.lengths.copy_(other.lengths)
        self.length_bound, self.pending_tree = min(other.length_bound, self.max_length), None
        self.is_inconsistent = other.is_inconsistent

    def reset(self) -> None:
        """Empty every sequence; no tensor is replaced."""
        for stack in self.stacks.values():
            stack.reset()
        if self.deferred is not None:
            self.deferred.clear()
        self.lengths.zero_()
        self.length_bound, self.pending_tree, self.is_inconsistent = 0, None, False

    def reset_rows(self, rows: Sequence[int]) -> None:
        """Empty some sequences; no tensor is replaced, and a pending tree is dropped."""
        self.apply_deferred()
        self.pending_tree = None  # the rows' stash is overwritten, too
        index = torch.tensor(rows, device=self.lengths.device)
        for stack in self.stacks.values():
            stack.reset_rows(index)
        self.lengths[index] = 0

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Mark the state as inconsistent if the body raises, unless it is ``recorded``."""
        was_inconsistent, self.is_inconsistent = self.is_inconsistent, not _is_recorded.get()
        yield
        self.is_inconsistent = was_inconsistent

    def commit(
        self, path: Tensor, path_lengths: Tensor, apply: Callable[[DecodeState, Tensor, Tensor], None] | None = None
    ) -> None:
        """Apply int32[batch, m] paths of the pending tree by ``apply``, or defer that; the tree is consumed."""
        if path.shape[1]:
            with self.changing():
                if self.deferred is not None and path.shape[1] <= MAX_DEFERRED:
                    at_once = [spec for spec, stack in self.stacks.items() if stack.shared is None]
                    self._apply_to(at_once, path, path_lengths)
                    for spec, stack in self.stacks.items():
                        stack.commit_early(path.to(spec.device), path_lengths.to(spec.device))
                    self.deferred.put(path, path_lengths, self.lengths)
                else:
                    (apply or DecodeState.apply)(self, path, path_lengths)
        self.pending_tree = None

    def apply(self, path: Tensor, path_lengths: Tensor) -> None:
        """Apply int32[batch, m] paths of the stash to every layer, and to the lengths."""
        self._apply_to(self.stacks, path, path_lengths)
        self.lengths += path_lengths

    def apply_deferred(self) -> None:
        """Apply the deferred commit, if any, so that the states can be read."""
        if self.deferred is None:
            return
        deferring = [spec for spec, stack in self.stacks.items() if stack.shared is not None]
        with self.changing():
            self._apply_to(deferring, self.deferred.path.int(), self.deferred.lengths, is_late=True)
            self.deferred.clear()

    def _apply_to(
        self, specs: Iterable[LayerSpec], path: Tensor, path_lengths: Tensor, *, is_late: bool = False
    ) -> None:
        """Apply paths of the stash to the layers of some stacks."""
        for spec in specs:
            commit = self.stacks[spec].commit_late if is_late else self.stacks[spec].commit
            commit(*(tensor.to(spec.device) for tensor in (path, path_lengths, self.lengths)))

    def bind(self, mixers: Mapping[Site, Any]) -> None:
        """Copy the weights that committing needs, such as decay rates."""
        for site, (spec, slot) in self._slots.items():
            self.stacks[spec].bind(slot, mixers[site])

    def load(self, cache: Any, mixers: Mapping[Site, Any], lengths: Tensor, padded_length: int) -> None:
        """Copy what prompts left-padded to ``padded_length`` have written to a transformers cache."""
        padding = padded_length - lengths.long()
        for site, (spec, slot) in self._slots.items():
            self.stacks[spec].load(slot, Prefilled(cache, site[0], mixers[site], padding))
        self.lengths.copy_(lengths)
        self.length_bound = padded_length

    def store(self, cache: Any, length: int) -> None:
        """Copy what texts of ``length`` tokens each have left into an empty transformers cache."""
        self.apply_deferred()
        for site, (spec, slot) in self._slots.items():
            self.stacks[spec].store(slot, cache, site[0], length)

    def write_row(self, row: int, other: DecodeState) -> None:
        """Copy in sequence ``row`` from a state of batch 1 and equal sizes; a pending tree is dropped."""
        self.apply_deferred()
        other.apply_deferred()
        self.pending_tree = None  # the row's stash is overwritten, too
        with self.changing():
            for spec, stack in self.stacks.items():
                stack.write_row(row, other.stacks[spec])
            self.lengths[row] = other.lengths[0]
        self.length_bound = max(self.length_bound, other.length_bound)
        self.is_inconsistent |= other.is_inconsistent

    def _set_stacks(self, stacks: dict[LayerSpec, LayerStack]) -> None:
        """Store the stacks, and a view of every layer, so that steps create none."""
        self.stacks = stacks
        self.layers: dict[Site, Any] = {site: stacks[spec].layer(slot) for site, (spec, slot) in self._slots.items()}
        self.stack_tensors = [tensor for stack in stacks.values() for _, tensor in stack.tensors()]
        self.layer_tensors = [tensor for layer in self.layers.values() for _, tensor in layer.tensors()]
        deferring = {spec: stack for spec, stack in stacks.items() if stack.shared is not None}
        self.deferred = DeferredCommit(deferring, self.lengths) if self.defers_commit and deferring else None
        self.deferred_rows: dict[Site, tuple[Tensor, ...]] = {}
        if self.deferred is not None:
            for site, (spec, slot) in self._slots.items():
                self.deferred_rows[site] = tuple(rows[slot] for rows in self.deferred.rows.get(spec, ()))
