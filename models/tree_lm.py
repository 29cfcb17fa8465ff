"""TreeLM: a transformers model that scores token trees and advances its state along a path of the last one."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from stree.checks import check_sizes
from stree.kernels.dispatch import host_can_read
from stree.kernels.topology import Topology, most_nodes
from stree.models.checks import check_commit, check_first, check_path
from stree.models.layers.base import state_dtype
from stree.models.loading import load_model
from stree.models.patched_model import PatchedModel
from stree.models.prefill import check_prompts, run_prompts
from stree.models.state import DecodeState, Pending, TreeStep
from stree.tree import TokenTree, checks_everywhere

__all__ = ["TreeLM"]


class TreeLM(PatchedModel):
    """A causal language model whose stateful layers are patched to verify token trees.

    A plain ``forward`` or ``generate`` of the model still runs transformers' code unchanged.

    Args:
        model: a loaded transformers model of a supported family.

    Raises:
        TypeError: not a model, for instance its path.
        NotImplementedError: the family is not supported; the message names those that are.

    Attributes:
        chunk_size: most prompt tokens that the model runs at once, or None for whole prompts; see ``prefill``.
        defers_commit: whether the commit of a path is deferred to the scan of the next tree; None: on devices that run
            the Triton kernels, where the scan applies it in one pass over the state.
        fused_layers: whether trees are scored with `stree.models.fused` in place of transformers' norms, rotary
            positions and feed-forwards on those devices.
        captures_steps: whether steps of a generation are captured as CUDA graphs and replayed; None: where possible.
        cache: objects that a generation stores for the next one, such as captured steps; clear it to free memory.
    """

    chunk_size: int | None = None
    captures_steps: bool | None = None

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        self.cache = dict[str, Any]()
        widths = [spec.conv_width for spec in self.specs.values() if spec.conv_width is not None]
        self._conv_width = max(widths, default=None)
        self._has_diagonal = any(spec.is_diagonal for spec in self.specs.values())

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str | Path,
        device: str | torch.device = "auto",
        dtype: str | torch.dtype = "auto",
        *,
        device_map: str | Mapping[str, Any] | None = None,
        trust_remote_code: bool = False,
    ) -> TreeLM:
        """Load a checkpoint from a local folder or by hub id: one of transformers, or a native one of mamba-ssm.

        Args:
            name_or_path: folder with config.json and weights, or a hub id.
            device: "auto" for CUDA where there is one, else the CPU.
            dtype: "auto" for the checkpoint's own on a GPU and float32 on the CPU; or a torch dtype or its name.
            device_map: instead of a device, "auto" or a map for accelerate, which spreads the layers over devices.
            trust_remote_code: whether the checkpoint's own code may be executed.

        Raises:
            ValueError: no checkpoint there, one that cannot be read, or one that would execute code.
            NotImplementedError: the family is not supported.
            RuntimeError: a device_map without accelerate.
        """
        return cls(
            load_model(
                name_or_path, device=device, dtype=dtype, device_map=device_map, trust_remote_code=trust_remote_code
            )
        )

    def check_ready(self) -> None:
        """Raise if the model cannot run now.

        Raises:
            RuntimeError: the model is in training mode, or autocast on.
            TypeError: ``chunk_size`` is not an integer.
            ValueError: it is below 1, or the model was changed since it was patched.
        """
        self.check_mode()
        check_sizes(chunk_size=self.chunk_size)
        self.check_current()

    @torch.no_grad()
    def prefill(
        self, state: DecodeState, input_ids: Tensor, lengths: Tensor | None = None, *, chunk_size: int | None = None
    ) -> Tensor:
        """Run prompts and fill an empty state.

        Args:
            state: empty, of this model.
            input_ids: int[batch, length], right-padded; padding may be any token of the vocabulary.
            lengths: int[batch], true lengths; None where no prompt is padded.
            chunk_size: most tokens that transformers' forward runs at once, which bounds the memory of a long prompt;
                the rest is run ``max_nodes`` at a time.  None for the attribute ``chunk_size``.

        Returns:
            float32[batch, vocab], logits of the next token (float64 for float64 models).

        Raises:
            TypeError: a chunk_size that is not an integer.
            ValueError: a wrong shape or dtype, an empty prompt, one beyond max_length, a token outside the vocabulary,
                or a model that was changed since it was patched.
            RuntimeError: the state is not empty, the model in training mode, or autocast on.
        """
        self.check_state(state)
        self.check_current()
        sizes = check_prompts(state, input_ids, lengths)
        chunk_size = self.chunk_size if chunk_size is None else chunk_size
        check_sizes(chunk_size=chunk_size)
        input_ids = input_ids.to(self.device, torch.int64)
        self.check_tokens(input_ids)
        try:
            logits = run_prompts(self, state, input_ids, [min(size, chunk_size or size) for size in sizes])
            return self._run_rest(state, input_ids, sizes, logits)
        except BaseException:
            state.reset()  # some rows, layers or chunks may have been written already
            raise

    def prefill_row(self, state: DecodeState, row: int, input_ids: Tensor) -> Tensor:
        """Run another prompt into a row of a state whose text has ended; a pending tree is dropped.

        Args:
            state: of this model.
            row: of the batch.
            input_ids: int64[1, length].

        Returns:
            float32[1, vocab], logits of the next token (float64 for float64 models).

        Raises:
            ValueError: a row outside the batch, or as for ``prefill``.
            RuntimeError: the state is inconsistent, the model in training mode, or autocast on.
        """
        self.check_state(state)
        if not 0 <= row < state.batch_size:
            raise ValueError(f"row must be in [0, {state.batch_size}), got {row}")
        single = self.new_state(1, state.max_length, state.max_nodes)
        logits = self.prefill(single, input_ids)
        state.write_row(row, single)
        return logits

    @torch.no_grad()
    def verify(self, state: DecodeState, tree: TokenTree, first: int = 0) -> Tensor:
        """Score every node of a tree in one forward pass; the committed state is left unchanged.

        Args:
            state: prefilled or committed to; its stash is written.
            tree: one tree a sequence; nodes below ``first`` must be those of the last call.
            first: 0 starts a new tree and drops the last; k extends it: only nodes k.. are run.

        Returns:
            float32[batch, n - first, vocab] logits (float64 for float64 models); those of padding are undefined.

        Raises:
            ValueError: tree and state disagree in batch, size, length, vocabulary, or in the nodes below ``first``.
            RuntimeError: the state is inconsistent, the model in training mode, or autocast on.
        """
        self.check_state(state)
        self._check_tree(state, tree, first)
        topology = Topology.of(
            tree.parents, self._conv_width, mask=tree.ancestor_mask, depths=tree.depths, jumps=self._has_diagonal
        )
        step = TreeStep(state, topology, first, state.max_length if state.fixed_shapes else state.length_bound)
        positions = None
        if self.family.takes_positions:
            positions = (state.lengths[:, None] + tree.depths[:, first:]).long()
            if host_can_read(tree.tokens) and not state.fixed_shapes:  # free to read here
                step.length_bound = int(state.lengths.max())
        deferred = state.deferred if first == 0 else None
        if deferred is not None:
            step.path, step.entries = deferred.accepted(self._conv_width)
        state.pending = None  # its stash is overwritten, layer by layer
        with nullcontext() if deferred is None else state.changing():
            logits = self.forward(tree.tokens[:, first:], step, positions)
            if deferred is not None:
                deferred.clear()
        state.pending = Pending(tree, topology)
        return logits.to(state_dtype(logits.dtype))

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
        if state.pending is None:
            raise RuntimeError("commit needs a tree that was verified and not yet committed; call verify first")
        check_commit(path, path_lengths, state.batch_size)
        if (state.pending.tree.is_checked and host_can_read(path)) or checks_everywhere():
            check_path(state.pending.tree, path, path_lengths)
        # Lengths on a device are not read: every path there counts as the longest possible one.
        longest = max(path_lengths.tolist(), default=0) if host_can_read(path_lengths) else path.shape[1]
        bound = state.length_bound + longest
        if bound > state.max_length and state.fixed_shapes and not host_can_read(path):
            bound = state.max_length
        elif bound > state.max_length:
            bound = int((state.lengths + path_lengths).max())
            if bound > state.max_length:
                raise ValueError(f"committing makes {bound} tokens, which exceeds max_length {state.max_length}")
        state.commit(path.to(torch.int32), path_lengths.to(torch.int32))
        state.length_bound = bound

    def _run_rest(self, state: DecodeState, input_ids: Tensor, sizes: list[int], logits: Tensor) -> Tensor:
        """Run the remaining tokens of prompts as chains that are verified and committed.

        transformers' continuation of a cache by several tokens is wrong for some families, so it is used for none.

        Args:
            state: holds the first tokens of every prompt: the same number of each, or all of a shorter one.
            input_ids: int64[batch, length], right-padded.
            sizes: true lengths.
            logits: float[batch, vocab], after the tokens that the state holds.

        Returns:
            float[batch, vocab], the logits after each prompt's last token.
        """
        rows = torch.arange(state.batch_size, device=input_ids.device)
        lengths = torch.tensor(sizes, dtype=torch.int32, device=input_ids.device)
        most = min(state.max_nodes, most_nodes(self.device, self.dtype) or state.max_nodes)
        for begin in range(state.length_bound, max(sizes), most):
            n = min(most, max(sizes) - begin)
            index = torch.arange(n, dtype=torch.int32, device=input_ids.device)
            count = (lengths - begin).clamp(0, n)  # 0 for a prompt that is finished
            is_token = index < count[:, None]
            chain = input_ids[:, begin : begin + n].masked_fill(~is_token, 0)
            scored = self.verify(
                state, TokenTree.unchecked(chain, torch.where(is_token, index - 1, -1).to(torch.int32))
            )
            last = scored[rows, (count - 1).clamp(min=0)]
            logits = torch.where(count[:, None] > 0, last.to(logits.device), logits)
            self.commit(state, index.expand(len(rows), n), count)
        return logits

    def _check_tree(self, state: DecodeState, tree: TokenTree, first: int) -> None:
        """Check a tree's sizes, and its values if it is on the host or STREE_DEBUG is set."""
        batch, n = tree.tokens.shape
        if batch != state.batch_size:
            raise ValueError(f"the tree must have batch {state.batch_size} as the state has, got {batch}")
        if n > state.max_nodes:
            raise ValueError(f"a tree of {n} nodes exceeds max_nodes {state.max_nodes}")
        if not 0 <= first < n:
            raise ValueError(f"first must be in [0, {n}), got {first}")
        if not (tree.is_checked and host_can_read(tree.tokens)) and not checks_everywhere():
            return
        self.check_tokens(tree.tokens)
        deepest = int((state.lengths + tree.depths.max(1).values).max()) + 1
        if deepest > state.max_length:
            raise ValueError(f"the tree reaches {deepest} tokens, which exceeds max_length {state.max_length}")
        if first:
            check_first(None if state.pending is None else state.pending.tree, tree, first)
