"""A transformers model whose stateful layers are patched: sizes, states, forward, and checks before a run."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from stree.checks import check_counts
from stree.kernels.dispatch import has_own, has_triton
from stree.kernels.topology import most_nodes
from stree.models.bounded_scan import memory_bounded
from stree.models.checks import check_peft, model_change, weight_places
from stree.models.families import cache_argument, family_of, stateful_modules
from stree.models.fused.fused_layers import FUSED, fused_scope, patch_fused_layers
from stree.models.hidden_states import patch_for_recording, recording, stacked
from stree.models.layers.base import LayerSpec, Site
from stree.models.patching import is_hooked, is_patched, num_features, unpatch_forward
from stree.models.placement import keep_on_device
from stree.models.prefill_functions import route_functions, warn_of_torch_functions
from stree.models.state import DecodeState
from stree.models.tree_step import TreeStep

__all__ = ["PatchedModel"]

RELEASED = "the model was released, which took its patches off"


class PatchedModel:
    """A causal language model with patches on its stateful layers; see ``TreeLM`` for arguments and attributes.

    Attributes:
        family: the model's row of ``FAMILIES``.
        cache_argument: keyword under which the model takes its cache.
        mixers: by site, the stateful modules.
        specs: by site, their sizes.
    """

    defers_commit: bool | None = None
    fused_layers: bool = True
    fused_mixers: bool | None = None
    _was_released: bool = False

    def __init__(self, model: PreTrainedModel) -> None:
        if not hasattr(model, "config"):
            raise TypeError(
                f"model must be a loaded transformers model (TreeLM.from_pretrained loads), got {model!r:.80}"
            )
        check_peft(model)
        self.family = family_of(model.config)
        self.cache_argument = cache_argument(type(model.get_decoder()))
        found = stateful_modules(model, self.family)
        self._in_training = [module for module in model.modules() if module.training]
        self.model = model.eval()
        self.mixers: dict[Site, Any] = {}
        self.specs: dict[Site, LayerSpec] = {}
        try:
            for layer, mixer in found:
                spec = self.family.patch(mixer, layer, self.dtype)
                self.mixers[layer, type(spec)], self.specs[layer, type(spec)] = mixer, spec
        except NotImplementedError:
            self.release()
            raise
        kinds = {type(mixer) for mixer in self.mixers.values()}
        for kind in kinds:
            route_functions(kind)
        for device in self.devices:
            warn_of_torch_functions(kinds, device)
        self._fused: frozenset[str] = frozenset()  # operations for which layers are patched: with the first state
        if {self.device} != self.devices:
            for site, mixer in self.mixers.items():
                keep_on_device(mixer, self.specs[site].device)
        self._modules = [*model.modules()]
        self._weight_places = weight_places(self._modules)
        self.num_layers = model.config.num_hidden_layers

    @property
    def model_class(self) -> Any:
        """Class of the model, or of the one in it, as a ``PeftModel`` wraps one."""
        return next(type(module) for module in self.model.modules() if isinstance(module, PreTrainedModel))

    @property
    def vocab_size(self) -> int:
        """Number of logits."""
        return num_features(self.model.get_output_embeddings())[1]

    @property
    def max_length(self) -> int | None:
        """Most tokens of a text that its positions allow, or None for a model without positions."""
        positions = getattr(self.model.config, "max_position_embeddings", None)
        return int(positions) if self.family.takes_positions and positions is not None else None

    @property
    def eos_token_ids(self) -> list[int]:
        """Tokens that end a text, from the model's generation config; none where it names none."""
        stop = getattr(self.model.generation_config, "eos_token_id", None)
        tokens = stop if isinstance(stop, list) else [] if stop is None else [stop]
        if not all(isinstance(token, int) for token in tokens):
            raise ValueError(f"eos_token_id of the model's generation config must be token ids, got {stop!r:.80}")
        return list(tokens)

    @property
    def device(self) -> torch.device:
        """Device of the input embedding."""
        return cast(Tensor, self.model.get_input_embeddings().weight).device

    @property
    def devices(self) -> set[torch.device]:
        """Devices of the stateful layers."""
        return {spec.device for spec in self.specs.values()}

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights."""
        return cast(Tensor, self.model.get_input_embeddings().weight).dtype

    @property
    def is_released(self) -> bool:
        """Whether the patches were taken off, by this TreeLM or by another one of the same model."""
        return self._was_released or not is_patched(next(iter(self.mixers.values())))

    @property
    def change(self) -> str | None:
        """Description of a change of the model since it was patched that would make trees wrong, or None."""
        if self.is_released:
            return RELEASED
        return model_change(self.model, self._weight_places, self.mixers.values())

    def release(self) -> PreTrainedModel:
        """Take every patch off and give the transformers model back as it was; this TreeLM cannot be used afterwards.

        Forwards that another library had set before come back, and modules that were in training mode return to it.
        A forward that was set over a patch since then stays, and runs the module as before.  Other TreeLMs of the same
        model refuse to run from then on; a new one can be made.
        """
        for module in self.model.modules():
            unpatch_forward(module)
        for module in self._in_training:
            module.training = True
        self.model.__dict__.pop("_stree", None)  # a TreeLM that the generate hook keeps there
        self._was_released = True
        return self.model

    def new_state(
        self, batch_size: int = 1, max_length: int = 4096, max_nodes: int = 64, *, fixed_shapes: bool = False
    ) -> DecodeState:
        """Allocate an empty state.

        Args:
            batch_size: sequences.
            max_length: most committed tokens a sequence.
            max_nodes: most nodes of a tree, root included.
            fixed_shapes: whether all steps have the same shapes at any length, so that one can be captured and
                replayed.  On a device ``commit`` then does not check ``max_length``; rows beyond it are dropped.

        Raises:
            TypeError: a size that is no integer.
            ValueError: a size below 1, or a model that was changed since it was patched.
            NotImplementedError: more nodes than the device's kernels take.
        """
        self.check_current()
        check_counts(below=1 << 31, batch_size=batch_size, max_length=max_length, max_nodes=max_nodes)
        batch_size, max_length, max_nodes = int(batch_size), int(max_length), int(max_nodes)
        most = most_nodes(self.device, self.dtype)
        if most is not None and max_nodes > most:
            raise NotImplementedError(f"max_nodes must be at most {most} on {self.device}, got {max_nodes}")
        self._modules = [*self.model.modules()]  # modules may have been inserted since the last state
        devices = {self.device, *self.devices}
        fused = frozenset(op for op in FUSED if any(has_own(op, device, self.dtype) for device in devices))
        if not fused <= self._fused:
            patch_fused_layers(self.model, fused)
            self._fused |= fused
        defers_commit = self.defers_commit
        if defers_commit is None:
            defers_commit = has_triton("ssd_step", self.device, self.dtype)
        fused_mixers = self.fused_mixers
        if fused_mixers is None:
            fused_mixers = not (defers_commit or has_triton("mamba2_step", self.device, self.dtype))
        fused_mixers &= has_own("mamba2_step", self.device, self.dtype)
        state = DecodeState(
            self.specs, batch_size, max_length, max_nodes, self.device,
            fixed_shapes=fixed_shapes, defers_commit=defers_commit, fused_mixers=fused_mixers,
        )  # fmt: skip
        state.bind(self.mixers)
        return state

    def forward(
        self, input_ids: Tensor | None, cache: Any, positions: Tensor | None, mask: Tensor | None = None, **kwargs: Any
    ) -> Tensor:
        """Call the model under its own argument names; a ``TreeStep`` as the cache makes it score a tree.

        Args:
            input_ids: int64[batch, n], or None with ``inputs_embeds`` among the further arguments.
            cache: a cache of transformers, or a ``TreeStep``.
            positions: int64[batch, n], for families that take them.
            mask: of padded prompts; a tree needs none.
            kwargs: further arguments of the model.

        Returns:
            float[batch, n, vocab] logits, in the model's dtype.
        """
        is_tree = isinstance(cache, TreeStep)
        if is_tree:  # with a 4-d mask the model makes none
            mask = torch.empty(1, 1, 1, 1, dtype=torch.bool, device=cache.topology.parents.device)
        if self.family.takes_positions:
            kwargs["position_ids"] = positions
        kwargs |= {self.cache_argument: cache, "return_dict": True}  # as generate does
        if getattr(
            self.model.config, "output_router_logits", False
        ):  # they are needed for a loss only, which would read the mask
            kwargs["output_router_logits"] = False
        # A hook may write to a tensor in place or check its type: then no lazy residual may reach it.
        may_defer = functools.cache(lambda: not any(map(is_hooked, self._modules)))
        fused = self._fused if self.fused_layers else frozenset()
        # Without use_cache a model passes any cache object on; with it, some require a certain class.
        with fused_scope(fused, may_defer) if is_tree else memory_bounded():
            return cast(Tensor, self.model(input_ids, attention_mask=mask, use_cache=not is_tree, **kwargs).logits)

    def forward_recording(
        self, hidden_layers: Sequence[int] | None, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Call ``forward`` and return float[batch, n, len(hidden_layers), hidden_size] beside the logits, or None."""
        if hidden_layers is None:
            return self.forward(*args, **kwargs), None
        patch_for_recording(self.model)  # with the first call that asks
        with recording(hidden_layers) as recorded:
            logits = self.forward(*args, **kwargs)
        return logits, stacked(recorded, hidden_layers, self.dtype, logits.device)

    def check_mode(self) -> None:
        """Refuse training mode, some adapters of peft, and autocast: states have the dtype of the weights."""
        check_peft(self.model)
        if self.model.training:
            raise RuntimeError("the model is in training mode, in which its logits are random; call its eval() first")
        kind = self.device.type
        if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
            raise RuntimeError(
                "torch.autocast is on, under which layers work in another dtype than their states; leave it, and load "
                "the model in that dtype"
            )

    def check_current(self) -> None:
        """Refuse a model that was changed since it was patched, before a state of it is made or filled."""
        change = self.change
        if change is not None:
            raise ValueError(f"{change}; make a new TreeLM of it")

    def check_state(self, state: DecodeState) -> None:
        """Refuse a released model, training mode, autocast, no state or another model's, and an inconsistent one."""
        if not isinstance(state, DecodeState):
            raise TypeError(f"state must be what new_state returns, got {type(state).__name__}")
        if self.is_released:
            raise ValueError(f"{RELEASED}; make a new TreeLM of it")
        self.check_mode()
        if state.specs is not self.specs:
            raise ValueError("the state belongs to another TreeLM; use one from this one's new_state")
        if state.is_inconsistent:
            raise RuntimeError(
                "the state is lost: a call failed when some of its layers were changed, others not; make a new one"
            )

    def check_tokens(self, tokens: Tensor) -> None:
        """Refuse tokens outside the vocabulary."""
        low, high = int(tokens.min()), int(tokens.max())
        if low < 0 or high >= self.vocab_size:
            bad = low if low < 0 else high
            raise ValueError(f"token {bad} is outside the vocabulary of {self.vocab_size}")
