"""Scoring token trees with a patched model, and advancing a state along paths and chains."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import nullcontext
from functools import cached_property
from typing import Any, overload

import torch
from torch import Tensor

from stree.kernels.checks import checks_values
from stree.kernels.dispatch import fixes_shapes, host_bound
from stree.kernels.topology import Topology, most_nodes
from stree.models.checks import check_commit, check_first, check_path
from stree.models.compiled import CompiledSteps
from stree.models.hidden_states import check_hidden_layers
from stree.models.layers.base import state_dtype
from stree.models.layout import layout_of, sizes_of
from stree.models.packed_linear import pack_linears
from stree.models.patched_model import PatchedModel
from stree.models.state import DecodeState
from stree.models.tree_step import TreeInputs, TreeStep
from stree.tree import TokenTree, checks_everywhere

__all__ = ["TreeScorer"]

_replacing = threading.Lock()  # of compiled functions, after the model has changed


class TreeScorer(PatchedModel):
    """A patched model that verifies token trees and commits paths of them; see ``TreeLM``."""

    cache: dict[str, Any]
    is_compiled: bool = False
    is_sharded: bool = False

    @cached_property
    def _conv_width(self) -> int | None:
        """Taps of the longest short convolution."""
        return max((spec.conv_width for spec in self.specs.values() if spec.conv_width is not None), default=None)

    @overload
    def verify(self, state: DecodeState, tree: TokenTree, first: int = 0) -> Tensor: ...
    @overload
    def verify(
        self, state: DecodeState, tree: TokenTree, first: int = 0, *, hidden_layers: Sequence[int]
    ) -> tuple[Tensor, Tensor]: ...
    def verify(
        self, state: DecodeState, tree: TokenTree, first: int = 0, *, hidden_layers: Sequence[int] | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Score every node of a tree in one forward pass; the committed state is left unchanged.

        Args:
            state: prefilled or committed to; its stash is written.
            tree: one tree a sequence; nodes below ``first`` must be those of the last call.
            first: 0 starts a new tree and drops the last; k extends it: only nodes k.. are run.
            hidden_layers: layers whose hidden states are returned, too, n - first a sequence; see ``TreeLM``.

        Returns:
            float32[batch, n - first, vocab] logits (float64 for float64 models); those of padding are undefined.

        Raises:
            ValueError: tree and state disagree in batch, size, length, vocabulary, or in the nodes below ``first``; or
                a layer that the model does not have.
            RuntimeError: the state is inconsistent, the model in training mode, or autocast on.
        """
        check_hidden_layers(hidden_layers, self.num_layers)
        logits, hidden = self.score(state, tree, first, hidden_layers)
        return logits if hidden is None else (logits, hidden)

    @torch.no_grad()
    def score(
        self, state: DecodeState, tree: TokenTree, first: int, hidden_layers: Sequence[int] | None,
        positions: Tensor | None = None, **inputs: Tensor,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """Verify a tree and return logits, and hidden states or None.

        ``positions``, int64[batch, n - first], are those behind the text unless given; ``inputs`` go to ``forward``.
        """
        self.check_state(state)
        self._check_tree(state, tree, first)
        if positions is None and self.family.takes_positions:
            positions = (state.lengths[:, None] + tree.depths[:, first:]).long()
        nodes = TreeInputs(tree.tokens[:, first:], tree.parents, tree.ancestor_mask, tree.depths, positions, inputs)
        state.pending_tree = None  # its stash is overwritten, layer by layer
        compiled = self._compiled_for(state)
        score = self._score_nodes if compiled is None else compiled.score
        scored = score(state, nodes, hidden_layers)
        state.pending_tree = tree
        return scored

    def _score_nodes(
        self, state: DecodeState, nodes: TreeInputs, hidden_layers: Sequence[int] | None
    ) -> tuple[Tensor, Tensor | None]:
        """Call the model; return logits, and hidden states or None."""
        topology = Topology.of(nodes.parents, self._conv_width, mask=nodes.mask, depths=nodes.depths)
        first = nodes.first
        step = TreeStep(state, topology, first, state.max_length if state.fixed_shapes else state.length_bound)
        if nodes.positions is not None and not state.fixed_shapes:
            step.length_bound = host_bound(state.lengths, state.length_bound)
        deferred = state.deferred if first == 0 else None
        if deferred is not None:
            step.path, step.entries = deferred.accepted(self._conv_width)
            step.deferred_rows = state.deferred_rows
        with nullcontext() if deferred is None else state.changing():
            logits, hidden = self.forward_recording(hidden_layers, nodes.tokens, step, nodes.positions, **nodes.others)
            if deferred is not None:
                deferred.clear()
        return logits.to(state_dtype(logits.dtype)), hidden

    def compile(self) -> None:
        """Pack the weights of linear layers, and compile scoring and commit with torch.compile's backend, inductor.

        Linear layers in float32, or in bfloat16 where oneDNN packs it, run on a second copy of their weights in its
        layout wherever no gradient is kept.  It is made again after a weight was replaced or written to; in place
        through its ``data``, if some of 256 numbers have changed, as all do where peft merges an adapter.  Weights that
        were loaded under ``torch.inference_mode`` are not packed.

        On a CPU a small model's step is mostly calls of operators, of which the compiled functions make few.  They need
        a C++ compiler.  Each kind of call is compiled when it occurs for the first time, in seconds to a minute, and
        kept in inductor's cache on disk, from where later processes load it unless modules have hooks.  Attention then
        reads ``max_length`` rows of the state at any length.  Prefill is not compiled, nor is a model whose code
        depends on values, mixtures of experts, and of Mamba-1 and RG-LRU only trees of one node are (logged).  Hooks on
        modules run when a call is traced: what they do to tensors is compiled, their other effects are not repeated.

        Raises:
            NotImplementedError: the model is not on the CPU; on CUDA, steps are captured as CUDA graphs.
        """
        if {kind.type for kind in (self.device, *self.devices)} != {"cpu"} or self.is_sharded:
            raise NotImplementedError(f"only models on the CPU are compiled, got one on {self.device}")
        pack_linears(self.model)
        self.is_compiled = True

    def check_current(self) -> None:  # noqa: D102
        super().check_current()
        if self.is_compiled:
            self._compiled_now()

    @property
    def compile_s(self) -> float:
        """Seconds that compiling has taken so far."""
        compiled: CompiledSteps | None = self.cache.get("compiled")
        return 0.0 if compiled is None else compiled.compile_s

    def _compiled_for(self, state: DecodeState) -> CompiledSteps | None:
        """Return the compiled steps that serve a state, or None."""
        if not self.is_compiled or state.deferred is not None:
            return None
        return self.cache.get("compiled") or self._compiled_now()

    def _compiled_now(self) -> CompiledSteps:
        """Return the compiled steps of the model as it is now; all threads get the same ones."""
        layout = layout_of(self)
        with _replacing:
            compiled: CompiledSteps | None = self.cache.get("compiled")
            if compiled is None or compiled.layout != layout:
                self.cache["compiled"] = compiled = CompiledSteps(self, self._score_nodes, layout, sizes_of(self.model))
        return compiled

    @torch.no_grad()
    def commit(self, state: DecodeState, path: Tensor, path_lengths: Tensor) -> None:
        """Advance the state by a path of the last verified tree, and consume the tree.

        Args:
            state: with a verified tree.
            path: int32[batch, m] node indices from the root down; entries past a length are ignored.
            path_lengths: int32[batch]; 0 leaves a sequence untouched.

        Raises:
            RuntimeError: no verified tree, or one that was committed already; the state is inconsistent, the model in
                training mode, or autocast on.
            ValueError: shapes disagree, a path that does not descend from the root, or a text beyond max_length.
        """
        self.check_state(state)
        if state.pending_tree is None:
            raise RuntimeError("commit needs a tree that was verified and not yet committed; call verify first")
        check_commit(path, path_lengths, state.batch_size)
        if (state.pending_tree.is_checked and checks_values(path)) or checks_everywhere():
            check_path(state.pending_tree, path, path_lengths)
        # Lengths on a device are not read: every path there counts as the longest possible one.
        bound = state.length_bound + host_bound(path_lengths, path.shape[1])
        if bound > state.max_length and state.fixed_shapes and fixes_shapes(path):
            bound = state.max_length
        elif bound > state.max_length:
            bound = int((state.lengths + path_lengths).max())
            if bound > state.max_length:
                raise ValueError(f"committing makes {bound} tokens, which exceeds max_length {state.max_length}")
        compiled = self._compiled_for(state)
        state.commit(path.to(torch.int32), path_lengths.to(torch.int32), None if compiled is None else compiled.apply)
        state.length_bound = bound

    def run_chains(
        self, state: DecodeState, input_ids: Tensor, sizes: Sequence[int], hidden_layers: Sequence[int] | None,
        logits: Tensor | None = None,
    ) -> tuple[Tensor, list[Tensor]]:  # fmt: skip
        """Run tokens after those of a state as chains that are verified and committed, ``max_nodes`` at a time.

        Args:
            state: any; a pending tree is dropped.
            input_ids: int64[batch, n], right-padded.
            sizes: true lengths.
            hidden_layers: layers to record, or None.
            logits: float[batch, vocab], returned for rows without tokens; None for NaN.

        Returns:
            float[batch, vocab], the logits after each row's last token; and the hidden states of every chain,
            float[batch, nodes, len(hidden_layers), hidden_size].
        """
        device, recorded = input_ids.device, list[Tensor]()
        rows, lengths = torch.arange(state.batch_size, device=device), torch.tensor(sizes, device=device)
        most = min(state.max_nodes, most_nodes(self.device, self.dtype) or state.max_nodes)
        logits, begin = torch.tensor(torch.nan) if logits is None else logits, 0
        try:
            for begin in range(0, max(1, *sizes), most):
                count = (lengths - begin).clamp(0, most)
                index = torch.arange(min(most, max(1, *sizes) - begin), device=device)
                is_token = index < count[:, None]
                tokens = input_ids[:, begin : begin + len(index)].masked_fill(~is_token, 0)
                chain = TokenTree.unchecked(tokens, torch.where(is_token, index - 1, -1).to(torch.int32))
                scored, hidden = self.score(state, chain, 0, hidden_layers)
                self.commit(state, index.expand(len(rows), -1), count)
                last = scored[(rows.to(scored.device), (count - 1).clamp(min=0).to(scored.device))]
                logits = torch.where((count > 0)[:, None].to(last.device), last, logits.to(last))
                recorded += [] if hidden is None else [hidden]
        except BaseException:
            state.is_inconsistent |= begin > 0  # earlier chains were committed
            raise
        return logits, recorded

    def _check_tree(self, state: DecodeState, tree: TokenTree, first: int) -> None:
        """Check a tree's sizes, and its values if it is on the host or STREE_DEBUG is set."""
        if not isinstance(tree, TokenTree) or not isinstance(first, int):
            what = f"{type(tree).__name__} and {type(first).__name__}"
            raise TypeError(f"tree must be a stree.TokenTree and first an integer, got {what}")
        batch, n = tree.tokens.shape
        if batch != state.batch_size:
            raise ValueError(f"the tree must have batch {state.batch_size} as the state has, got {batch}")
        if n > state.max_nodes:
            raise ValueError(f"a tree of {n} nodes exceeds max_nodes {state.max_nodes}")
        if not 0 <= first < n:
            raise ValueError(f"first must be in [0, {n}), got {first}")
        if not (tree.is_checked and checks_values(tree.tokens)) and not checks_everywhere():
            return
        self.check_tokens(tree.tokens)
        deepest = int((state.lengths + tree.depths.max(1).values).max()) + 1
        if deepest > state.max_length:
            raise ValueError(f"the tree reaches {deepest} tokens, which exceeds max_length {state.max_length}")
        if first:
            check_first(state.pending_tree, tree, first)
