"""TreeLM: a transformers model that scores token trees and advances its state along a path of the last one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, overload

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from stree.checks import check_sizes
from stree.models.hidden_states import check_hidden_layers
from stree.models.loading import load_model
from stree.models.packed_linear import pack_large_linears
from stree.models.patching import is_sharded
from stree.models.prefill import can_continue, check_extension, check_prompts, continue_prompts, run_prompts
from stree.models.self_check import check_adapters, check_model
from stree.models.state import DecodeState
from stree.models.tree_scorer import TreeScorer

__all__ = ["TreeLM"]


class TreeLM(TreeScorer):
    """A causal language model whose stateful layers are patched to verify token trees.

    A plain ``forward`` or ``generate`` of the model still runs transformers' code unchanged, except that calls which
    causal-conv1d, mamba-ssm or fla would refuse go to transformers' torch functions.  Several TreeLMs may share
    a model; ``release`` of one takes the patches off for all.  Threads may share a TreeLM, each with states of its own.

    ``prefill``, ``extend`` and ``verify`` take ``hidden_layers`` and then return a second tensor, float[batch, n,
    len(hidden_layers), hidden_size] in the model's dtype: the hidden states of those layers at every token or node that
    was run; at padding they are undefined.  Layer 0 is what the first layer is called with, the embeddings; i is the
    residual stream after i layers; both as in transformers' ``output_hidden_states`` (whose tuple lacks the embeddings
    for mamba, mamba2 and falcon_mamba).  ``num_layers`` is the output of the last layer before the final norm, and -1,
    as in transformers, that of the final norm, which the head reads.

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
            positions and feed-forwards on those devices, and of norms on CPUs.
        fused_mixers: whether states made from now on run Mamba-2 mixers on trees of up to 16 nodes in one launch or, on
            a CPU, one call of numba's code; None: on a CPU that defers no commit, on a GPU not until it is timed there.
        is_sharded: whether several processes hold parts of the weights; all must make the same calls.
        captures_steps: whether steps of a generation are captured as CUDA graphs and replayed; None: where possible.
        is_compiled: whether trees are scored by compiled functions; see ``compile``.
        cache: objects that a generation stores for the next one, such as captured steps; clear it to free memory.
    """

    chunk_size: int | None = None
    captures_steps: bool | None = None

    def __init__(self, model: PreTrainedModel) -> None:
        self.cache = dict[str, Any]()
        super().__init__(model)
        self.is_sharded = is_sharded(model)
        if self.is_sharded:
            self.captures_steps = False  # its layers wait for other processes
        try:
            check_adapters(self)
        except BaseException:
            self.release()
            raise
        if not self.is_sharded and {kind.type for kind in (self.device, *self.devices)} == {"cpu"}:
            pack_large_linears(model)

    def __getstate__(self) -> dict[str, Any]:
        """Leave captured steps out of copies and pickles: they hold memory addresses of this model."""
        return {**self.__dict__, "cache": {}}

    def release(self) -> PreTrainedModel:  # noqa: D102
        self.cache.clear()
        return super().release()

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str | Path,
        device: str | torch.device = "auto",
        dtype: str | torch.dtype = "auto",
        *,
        device_map: str | Mapping[str, Any] | None = None,
        tp_plan: str | None = None,
        trust_remote_code: bool = False,
    ) -> TreeLM:
        """Load a checkpoint from a local folder or by hub id: one of transformers, or a native one of mamba-ssm.

        Args:
            name_or_path: folder with config.json and weights, or a hub id.
            device: "auto" for CUDA where there is one, else the CPU.
            dtype: "auto" for the checkpoint's own on a GPU and float32 on the CPU; or a torch dtype or its name.
            device_map: instead of a device, "auto" or a map for accelerate, which spreads the layers over devices.
            tp_plan: instead of a device, "auto" shards the weights over the processes that torchrun started, as
                transformers does; each of them must make the same calls.
            trust_remote_code: whether the checkpoint's own code may be executed.

        Raises:
            ValueError: no checkpoint there, one that cannot be read, or one that would execute code.
            NotImplementedError: the family is not supported, or cannot be sharded.
        """
        return cls(load_model(
            name_or_path, device=device, dtype=dtype, device_map=device_map, tp_plan=tp_plan,
            trust_remote_code=trust_remote_code,
        ))  # fmt: skip

    def agreed(self, measured: float) -> float:
        """Return what the first of the processes that share the weights has measured, so that all decide the same."""
        if not self.is_sharded:
            return measured
        values = [measured]
        torch.distributed.broadcast_object_list(values, src=0)
        return values[0]

    def self_check(self) -> None:
        """Compare trees with the model's own forward: a layer of every kind in float32, then the whole model's logits.

        A layer of each class is compared already when the model is patched, once for each release of transformers.

        Raises:
            NotImplementedError: a layer computes something else than trees would; the message names its class.
            RuntimeError: the logits of three trees differ from those after the same texts.
        """
        self.check_ready()
        check_adapters(self, force=True)
        check_model(self)

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

    @overload
    def prefill(self, state: DecodeState, input_ids: Tensor, lengths: Tensor | None = None) -> Tensor: ...
    @overload
    def prefill(
        self, state: DecodeState, input_ids: Tensor, lengths: Tensor | None = None, *, hidden_layers: Sequence[int]
    ) -> tuple[Tensor, Tensor]: ...
    @torch.no_grad()
    def prefill(
        self, state: DecodeState, input_ids: Tensor, lengths: Tensor | None = None, *,
        hidden_layers: Sequence[int] | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
        """Run prompts and fill an empty state.

        Of a prompt longer than the attribute ``chunk_size`` the rest is run as by ``extend``, in chunks of that size.

        Args:
            state: empty, of this model.
            input_ids: int[batch, n], right-padded; padding may be any token of the vocabulary.
            lengths: int[batch], true lengths; None where no prompt is padded.
            hidden_layers: layers whose hidden states are returned, too; see the class.

        Returns:
            float32[batch, vocab], logits of the next token (float64 for float64 models).

        Raises:
            TypeError: the attribute ``chunk_size`` is not an integer.
            ValueError: a wrong shape or dtype, an empty prompt, one beyond max_length, a token outside the vocabulary,
                a layer that the model does not have, or a model that was changed since it was patched.
            RuntimeError: the state is not empty, the model in training mode, or autocast on.
        """
        self.check_state(state)
        self.check_current()
        sizes = check_prompts(state, input_ids, lengths)
        check_sizes(chunk_size=self.chunk_size)
        tokens = self._checked(input_ids, hidden_layers)
        begin = min(max(sizes), self.chunk_size or max(sizes))
        state.bind(self.mixers)  # weights may have been written to since the state was made
        try:
            logits, recorded = run_prompts(self, state, tokens, [min(size, begin) for size in sizes], hidden_layers)
            if begin < max(sizes):
                rest = [max(size - begin, 0) for size in sizes]
                logits, more = self._run_behind(state, tokens[:, begin:], rest, hidden_layers, logits)
                recorded += more
        except BaseException:
            state.reset()  # some rows, layers or chunks may have been written already
            raise
        return logits if hidden_layers is None else (logits, _joined(recorded, tokens.shape[1]))

    @overload
    def prefill_row(self, state: DecodeState, row: int, input_ids: Tensor) -> Tensor: ...
    @overload
    def prefill_row(
        self, state: DecodeState, row: int, input_ids: Tensor, *, hidden_layers: Sequence[int]
    ) -> tuple[Tensor, Tensor]: ...
    def prefill_row(
        self, state: DecodeState, row: int, input_ids: Tensor, *, hidden_layers: Sequence[int] | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Run another prompt into a row of a state whose text has ended; a pending tree is dropped.

        Args:
            state: of this model.
            row: of the batch.
            input_ids: int64[1, n].
            hidden_layers: layers whose hidden states are returned, too; see the class.

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
        if hidden_layers is None:
            result: Tensor | tuple[Tensor, Tensor] = self.prefill(single, input_ids)
        else:
            result = self.prefill(single, input_ids, hidden_layers=hidden_layers)
        state.write_row(row, single)
        return result

    @overload
    def extend(self, state: DecodeState, input_ids: Tensor, lengths: Tensor | None = None) -> Tensor: ...
    @overload
    def extend(
        self, state: DecodeState, input_ids: Tensor, lengths: Tensor | None = None, *, hidden_layers: Sequence[int]
    ) -> tuple[Tensor, Tensor]: ...
    def extend(
        self, state: DecodeState, input_ids: Tensor, lengths: Tensor | None = None, *,
        hidden_layers: Sequence[int] | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
        """Run more tokens after those that a state holds, such as the next message of a conversation.

        They run as trees do, ``max_nodes`` at a time; more by transformers' forward, ``chunk_size`` at a time,
        if all texts and all pieces are equally long and the family's forward is right behind a cache.  A verified tree
        that was not committed is dropped, as by ``verify``.  An empty state may be extended, too.

        Args:
            state: of this model.
            input_ids: int[batch, n], right-padded; padding may be any token of the vocabulary.
            lengths: int[batch], true lengths; 0 leaves a sequence untouched; None where no row is padded.
            hidden_layers: layers whose hidden states are returned, too; see the class.

        Returns:
            float32[batch, vocab], logits of the next token (float64 for float64 models); NaN for a sequence of length
            0, whose next logits are those of the call that ran its last token.

        Raises:
            ValueError: a wrong shape or dtype, no column, a text beyond max_length, a token outside the vocabulary, a
                layer that the model does not have, or a model that was changed since it was patched; nothing has run.
            RuntimeError: the state is inconsistent, the model in training mode, or autocast on.
        """
        self.check_state(state)
        self.check_current()
        sizes = check_extension(state, input_ids, lengths)
        tokens = self._checked(input_ids, hidden_layers)
        state.bind(self.mixers)
        logits, recorded = self._run_behind(state, tokens, sizes, hidden_layers)
        return logits if hidden_layers is None else (logits, _joined(recorded, tokens.shape[1]))

    def _run_behind(
        self, state: DecodeState, tokens: Tensor, sizes: Sequence[int], hidden_layers: Sequence[int] | None,
        logits: Tensor | None = None,
    ) -> tuple[Tensor, list[Tensor]]:  # fmt: skip
        """Run tokens behind those of a state by transformers' forward if it can, else as chains."""
        if can_continue(self, state, sizes):
            return continue_prompts(self, state, tokens[:, : sizes[0]], self.chunk_size or sizes[0], hidden_layers)
        return self.run_chains(state, tokens, sizes, hidden_layers, logits)

    def _checked(self, input_ids: Tensor, hidden_layers: Sequence[int] | None) -> Tensor:
        """Check tokens and layers; return the tokens as int64 on the model's device."""
        check_hidden_layers(hidden_layers, self.num_layers)
        tokens = input_ids.to(self.device, torch.int64)
        self.check_tokens(tokens)
        return tokens


def _joined(recorded: Sequence[Tensor], width: int) -> Tensor:
    """Join the hidden states of chunks and pad them to the width of the input."""
    hidden = torch.cat([*recorded], dim=1)
    return F.pad(hidden, (0, 0, 0, 0, 0, width - hidden.shape[1]))
