"""TreeLM: a transformers model that scores token trees and advances its state by any path of the last one.

It knows no drafting and no sampling: logits out, paths in.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from stree.counts import check_counts, check_sizes
from stree.kernels.dispatch import has_triton
from stree.kernels.topology import Topology, most_nodes, reads_freely
from stree.models.checks import change_of, check_path, describe, is_integer, places
from stree.models.families import family_of, stateful_modules
from stree.models.forwards import is_hooked, is_linear
from stree.models.lean import graft_lean, scoring
from stree.models.loading import load_model
from stree.models.placement import keep_on_device
from stree.models.prompts import check_prompts, continue_prefill
from stree.models.state import DecodeState, LayerSpec, Pending, Site, TreeStep, state_dtype
from stree.tree import TokenTree, checks_everywhere

__all__ = ["TreeLM"]

BEFORE_CONVOLUTION = ("in_proj", "in_proj_qkvz", "in_proj_qkv", "q_proj", "k_proj", "v_proj")  # parts of mixers


class TreeLM:
    """A causal language model with tree verification grafted onto its stateful layers.

    The model stays the caller's own: a plain ``forward`` or ``generate`` of it runs transformers' code unchanged.

    Args:
        model: a loaded transformers model of a supported family.

    Raises:
        TypeError: something else than a model, such as its path.
        NotImplementedError: the family is not supported; the message names those that are.

    Attributes:
        chunk_size: most prompt tokens that the model runs at once, or None for whole prompts; see ``prefill``.
        is_lazy: whether states let a committed path wait for the next tree's scan; None: where that scan folds it in
            one pass over a state, which are the devices that run the Triton versions.
        is_lean: whether trees may be scored with `stree.models.lean` in place of transformers' norms, rotary positions
            and feed-forwards, on those devices.
        is_captured: whether steps of a generation are captured as CUDA graphs and replayed; None: where they can be.
        kept: what a generation keeps with the model for the next one; clear it to free that memory.
    """

    chunk_size: int | None = None
    is_lazy: bool | None = None
    is_captured: bool | None = None
    is_lean: bool = True

    def __init__(self, model: PreTrainedModel) -> None:
        if not hasattr(model, "config"):
            raise TypeError(
                f"model must be a loaded transformers model (TreeLM.from_pretrained loads), got {model!r:.80}"
            )
        self.model, self.kept = model.eval(), dict[str, Any]()
        self.family = family_of(model.config)
        self._mixers: dict[Site, Any] = {}
        self._specs: dict[Site, LayerSpec] = {}
        for layer, mixer, graft in stateful_modules(model, self.family):
            spec = graft(mixer)
            self._mixers[layer, type(spec)], self._specs[layer, type(spec)] = mixer, spec
        graft_lean(model)
        if {self.device} != {spec.device for spec in self._specs.values()}:
            for site, mixer in self._mixers.items():
                keep_on_device(mixer, self._specs[site].device)
        self._places, self._modules = places(model), [*model.modules()]
        self.num_layers = model.config.num_hidden_layers
        widths = [spec.conv_width for spec in self._specs.values() if spec.conv_width is not None]
        self._conv_width = max(widths, default=None)
        self._jumps = any(spec.is_diagonal for spec in self._specs.values())
        self._convolving = [mixer for site, mixer in self._mixers.items() if self._specs[site].conv_width is not None]

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

    @property
    def vocab_size(self) -> int:
        """Number of logits."""
        return int(self.model.get_output_embeddings().weight.shape[0])

    @property
    def max_length(self) -> int | None:
        """Most tokens of a text that its positions allow, or None for a model without positions."""
        positions = getattr(self.model.config, "max_position_embeddings", None)
        return int(positions) if self.family.takes_positions and positions is not None else None

    @property
    def device(self) -> torch.device:
        """Where tokens go in."""
        return cast(Tensor, self.model.get_input_embeddings().weight).device

    @property
    def devices(self) -> set[torch.device]:
        """Where its stateful layers stand."""
        return {spec.device for spec in self._specs.values()}

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights."""
        return cast(Tensor, self.model.get_input_embeddings().weight).dtype

    @property
    def change(self) -> str | None:
        """What has become of the model since it was grafted, so that trees would be wrong; None for nothing."""
        return change_of(self.model, self._places, self._mixers.values())

    def check_ready(self) -> None:
        """Refuse to run.

        Raises:
            RuntimeError: the model is in training mode, or autocast on.
            TypeError: its chunk_size is no integer.
            ValueError: that is below 1, or the model was changed since it was grafted.
        """
        self._check_mode()
        check_sizes(chunk_size=self.chunk_size)
        self._check_current()

    def new_state(
        self, batch_size: int = 1, max_length: int = 4096, max_nodes: int = 64, *, fixed_shapes: bool = False
    ) -> DecodeState:
        """Allocate an empty state.

        Args:
            batch_size: sequences.
            max_length: most committed tokens a sequence.
            max_nodes: most nodes of a tree, root included.
            fixed_shapes: whether steps shall all have the same shapes, whatever the lengths, so that one can be
                captured and replayed.  On a device ``commit`` then trusts that no text goes beyond ``max_length``; rows
                of one that does are dropped.

        Raises:
            TypeError: a size that is no integer.
            ValueError: a size below 1, or a model that was changed since it was grafted.
            NotImplementedError: more nodes than the device's kernels take.
        """
        self._check_current()
        check_counts(batch_size=batch_size, max_length=max_length, max_nodes=max_nodes)
        most = most_nodes(self.device, self.dtype)
        if most is not None and max_nodes > most:
            raise NotImplementedError(f"max_nodes must be at most {most} on {self.device}, got {max_nodes}")
        self._modules = [*self.model.modules()]  # of which some may have been inserted since the last text
        is_lazy = has_triton("ssd_step", self.device, self.dtype) if self.is_lazy is None else self.is_lazy
        state = DecodeState(
            self._specs, batch_size, max_length, max_nodes, self.device, fixed_shapes=fixed_shapes, is_lazy=is_lazy
        )
        state.bind(self._mixers)
        return state

    @torch.no_grad()
    def prefill(
        self, state: DecodeState, input_ids: Tensor, lengths: Tensor | None = None, *, chunk_size: int | None = None
    ) -> Tensor:
        """Run prompts and fill an empty state.

        Args:
            state: empty, of this model.
            input_ids: int[batch, length], right-padded; padding may be any token of the vocabulary.
            lengths: int[batch], true lengths; None where no prompt is padded.
            chunk_size: most tokens that the model runs at once, which bounds the memory of a long prompt; what follows
                them is run ``max_nodes`` at a time.  None for the model's own ``chunk_size``.

        Returns:
            float32[batch, vocab], the law of the next token as logits (float64 for float64 models).

        Raises:
            TypeError: a chunk_size that is no integer.
            ValueError: a wrong shape or dtype, an empty prompt, one beyond max_length, a token outside the vocabulary,
                or a model that was changed since it was grafted.
            RuntimeError: the state is not empty, the model in training mode, or autocast on.
        """
        self._check_state(state)
        self._check_current()
        sizes = check_prompts(state, input_ids, lengths)
        chunk_size = self.chunk_size if chunk_size is None else chunk_size
        check_sizes(chunk_size=chunk_size)
        input_ids = input_ids.to(self.device, torch.int64)
        whole = torch.tensor(sizes, dtype=torch.int32, device=self.device)
        self._check_tokens(input_ids)
        sizes = [min(size, chunk_size or size) for size in sizes]
        try:
            if len(set(sizes)) > 1 and not self._pads():
                logits = self._prefill_rows(state, input_ids, sizes)
            else:
                logits = self._prefill_batch(state, input_ids, whole.clamp(max=max(sizes)), max(sizes))
            return continue_prefill(self, state, input_ids, whole, logits)
        except BaseException:
            state.reset()  # some rows, layers or chunks may stand in it already
            raise

    def prefill_row(self, state: DecodeState, row: int, input_ids: Tensor) -> Tensor:
        """Run another prompt into a row of a state whose text has ended; a pending tree is dropped.

        Args:
            state: of this model.
            row: of the batch.
            input_ids: int64[1, length].

        Returns:
            float32[1, vocab], the law of the next token as logits (float64 for float64 models).

        Raises:
            ValueError: a row outside the batch, or as for ``prefill``.
            RuntimeError: the state is lost, the model in training mode, or autocast on.
        """
        self._check_state(state)
        if not 0 <= row < state.batch_size:
            raise ValueError(f"row must be in [0, {state.batch_size}), got {row}")
        single = self.new_state(1, state.max_length, state.max_nodes)
        logits = self.prefill(single, input_ids)
        state.write_row(row, single)
        return logits

    @torch.no_grad()
    def verify(self, state: DecodeState, tree: TokenTree, first: int = 0) -> Tensor:
        """Score every node of a tree in one forward pass; the committed state is left as it is.

        Args:
            state: prefilled or committed to; its stash is written.
            tree: one tree a sequence; nodes below ``first`` must be those of the last call.
            first: 0 starts a new tree and drops the last; k extends it: only nodes k.. are run.

        Returns:
            float32[batch, n - first, vocab] logits (float64 for float64 models); those of padding are undefined.

        Raises:
            ValueError: tree and state disagree in batch, size, length, vocabulary, or in the nodes below ``first``.
            RuntimeError: the state is lost, the model in training mode, or autocast on.
        """
        self._check_state(state)
        batch, n = tree.tokens.shape
        if batch != state.batch_size:
            raise ValueError(f"the tree must have batch {state.batch_size} as the state has, got {batch}")
        if n > state.max_nodes:
            raise ValueError(f"a tree of {n} nodes exceeds max_nodes {state.max_nodes}")
        if not 0 <= first < n:
            raise ValueError(f"first must be in [0, {n}), got {first}")
        on_host = reads_freely(tree.tokens)
        if (tree.is_checked and on_host) or checks_everywhere():
            self._check_tree(state, tree, first)
        topology = Topology.of(
            tree.parents, self._conv_width, mask=tree.ancestor_mask, depths=tree.depths, jumps=self._jumps
        )
        step = TreeStep(state, topology, first, state.max_length if state.fixed_shapes else state.length_bound)
        positions = None
        if self.family.takes_positions:
            positions = (state.lengths[:, None] + tree.depths[:, first:]).long()
            if on_host and not state.fixed_shapes:  # reading the exact bound costs nothing here and makes it shorter
                step.length_bound = int(state.lengths.max())
        waits = state.unfolded if first == 0 else None
        if waits is not None:
            step.path, step.entries = waits.accepted(self._conv_width)
        state.pending = None  # the stash that it stands in is overwritten, layer by layer
        with nullcontext() if waits is None else state.changing():
            logits = self._forward(tree.tokens[:, first:], step, positions)
            if waits is not None:
                waits.lengths.zero_()
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
            RuntimeError: no verified tree, or one that was committed already; the state is lost, the model in training
                mode, or autocast on.
            ValueError: shapes disagree, a path that does not descend from the root, or a text beyond max_length.
        """
        self._check_state(state)
        pending = state.pending
        if pending is None:
            raise RuntimeError("commit needs a tree that was verified and not yet committed; call verify first")
        batch = state.batch_size
        are_integers = is_integer(path) and is_integer(path_lengths)
        if not are_integers or path.dim() != 2 or path.shape[0] != batch or path_lengths.shape != (batch,):
            raise ValueError(
                f"path must be int32[{batch}, m] and path_lengths int32[{batch}], "
                f"got {describe(path)} and {describe(path_lengths)}"
            )
        if (pending.tree.is_checked and reads_freely(path)) or checks_everywhere():
            check_path(pending.tree, path, path_lengths)
        # A device is not asked: there an empty path counts as the longest one that it could be.
        longest = max(path_lengths.tolist(), default=0) if reads_freely(path_lengths) else path.shape[1]
        bound = state.length_bound + longest
        if bound > state.max_length and state.fixed_shapes and not reads_freely(path):
            bound = state.max_length
        elif bound > state.max_length:
            bound = int((state.lengths + path_lengths).max())
            if bound > state.max_length:
                raise ValueError(f"committing makes {bound} tokens, which exceeds max_length {state.max_length}")
        state.commit(path.to(torch.int32), path_lengths.to(torch.int32))
        state.length_bound = bound

    def _forward(
        self, input_ids: Tensor, cache: Any, positions: Tensor | None, mask: Tensor | None = None, **kwargs: Any
    ) -> Tensor:
        """Call the model under its own argument names; a tree needs no mask, so a 4-d dummy stops it making one."""
        is_tree = isinstance(cache, TreeStep)
        if is_tree:
            mask = torch.empty(1, 1, 1, 1, dtype=torch.bool, device=input_ids.device)
        if self.family.takes_positions:
            kwargs["position_ids"] = positions
        kwargs |= {self.family.cache_argument: cache, "return_dict": True}  # whatever the config says, as generate does
        if getattr(self.model.config, "output_router_logits", False):  # for a loss, which would read the mask
            kwargs["output_router_logits"] = False
        # A hook may write to a tensor in place, or ask whether it is one: then it must not be a sum that waits.
        may_wait = functools.cache(lambda: not any(map(is_hooked, self._modules)))
        # Without use_cache a model hands on whatever cache it is given; with it, some insist on a class of their own.
        with scoring(is_tree and self.is_lean, may_wait):
            return cast(Tensor, self.model(input_ids, attention_mask=mask, use_cache=not is_tree, **kwargs).logits)

    def _pads(self) -> bool:
        """Tell whether prompts may be padded."""
        # Eager attention masks float64 scores with the least float64 and takes their softmax in float32, where that is
        # -inf: a column of padding, which sees nothing, becomes NaN.
        is_eager = getattr(self.model.config, "_attn_implementation", None) == "eager"
        if not self.family.pads_exactly or (is_eager and self.dtype == torch.float64):
            return False
        parts = (getattr(mixer, name, None) for mixer in self._convolving for name in BEFORE_CONVOLUTION)
        return all(part is None or _makes_nothing_of_nothing(part) for part in parts)

    def _prefill_batch(self, state: DecodeState, input_ids: Tensor, lengths: Tensor, longest: int) -> Tensor:
        """Run prompts together, left-padded where their lengths differ."""
        columns = torch.arange(longest, device=input_ids.device) - (longest - lengths.long())[:, None]
        positions = columns.clamp(min=0)
        mask = (columns >= 0).long()
        input_ids = input_ids.gather(1, positions)
        cache = self.family.new_cache(self.model.config)
        logits = self._forward(input_ids, cache, positions, mask, logits_to_keep=1)[:, -1]
        state.load(cache, self._mixers, lengths, longest)
        return logits.to(state_dtype(logits.dtype))

    def _prefill_rows(self, state: DecodeState, input_ids: Tensor, sizes: list[int]) -> Tensor:
        """Run prompts one by one."""
        rows = []
        for row, size in enumerate(sizes):
            single = self.new_state(1, state.max_length, state.max_nodes)
            lengths = torch.tensor([size], dtype=torch.int32, device=self.device)
            rows.append(self._prefill_batch(single, input_ids[row : row + 1, :size], lengths, size))
            state.write_row(row, single)
        return torch.cat(rows)

    def _check_mode(self) -> None:
        """Refuse a model in training, and to run under autocast: states, stashes and caches have the weights' dtype."""
        if self.model.training:
            raise RuntimeError("the model is in training mode, in which its laws are random; call its eval() first")
        kind = self.device.type
        if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
            raise RuntimeError(
                "torch.autocast is on, under which layers work in another dtype than their states; leave it, and load "
                "the model in that dtype"
            )

    def _check_current(self) -> None:
        """Refuse a model that was changed since it was grafted."""
        change = self.change
        if change is not None:
            raise ValueError(f"{change}; make a new TreeLM of it")

    def _check_state(self, state: DecodeState) -> None:
        """Refuse a model in training, and the state of another: it may fit in shape and still hold its decay rates."""
        self._check_mode()
        if state.specs is not self._specs:
            raise ValueError("the state belongs to another TreeLM; use one from this one's new_state")
        if state.is_torn:
            raise RuntimeError(
                "the state is lost: a call failed when some of its layers were changed, others not; make a new one"
            )

    def _check_tokens(self, tokens: Tensor) -> None:
        """Refuse tokens outside the vocabulary."""
        low, high = int(tokens.min()), int(tokens.max())
        if low < 0 or high >= self.vocab_size:
            bad = low if low < 0 else high
            raise ValueError(f"token {bad} is outside the vocabulary of {self.vocab_size}")

    def _check_tree(self, state: DecodeState, tree: TokenTree, first: int) -> None:
        """Look at a user's tree before it is run."""
        self._check_tokens(tree.tokens)
        deepest = int((state.lengths + tree.depths.max(1).values).max()) + 1
        if deepest > state.max_length:
            raise ValueError(f"the tree reaches {deepest} tokens, which exceeds max_length {state.max_length}")
        if not first:
            return
        last = state.pending.tree if state.pending is not None else None
        if last is None or last.tokens.shape[1] < first:
            known = 0 if last is None else last.tokens.shape[1]
            raise ValueError(f"first={first} needs {first} verified nodes in the pending tree, got {known}")
        same = torch.equal(last.tokens[:, :first], tree.tokens[:, :first])
        if not (same and torch.equal(last.parents[:, :first], tree.parents[:, :first])):
            raise ValueError(f"nodes below first={first} must be those of the last verified tree, but they differ")


def _makes_nothing_of_nothing(projection: Any) -> bool:
    """Tell whether zeros stay zeros: else, as by the bias of an adapter, padding enters the convolution window."""
    if is_linear(projection):
        return projection.bias is None
    weight = projection.weight
    return not is_hooked(projection) and not bool(projection(weight.new_zeros(1, 1, weight.shape[1])).any())
