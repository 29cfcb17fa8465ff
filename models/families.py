"""Table of the supported model families: which modules hold a state, and how the model is called."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, DynamicCache, PreTrainedModel
from transformers.activations import ACT2FN
from transformers.cache_utils import CacheLayerMixin, DynamicLayer

from stree.models.checks import check_mixer, check_rotary
from stree.models.layers.attention import patch_attention
from stree.models.layers.base import LayerSpec, Placement
from stree.models.layers.delta_rule import patch_delta_rule
from stree.models.layers.lightning import lightning_cache, patch_lightning
from stree.models.layers.mamba1 import patch_mamba1
from stree.models.layers.mamba2 import patch_mamba2
from stree.models.layers.mla import patch_mla
from stree.models.layers.rg_lru import BlockCache, patch_rg_lru
from stree.models.layers.short_conv import patch_short_conv

__all__ = [
    "CACHE_ARGUMENTS",
    "FAMILIES",
    "Family",
    "cache_argument",
    "config_of_text_model",
    "family_of",
    "stateful_modules",
]

Patch = Callable[..., LayerSpec]  # of a module

# Those of modules whose own forward reads a cache also where it is called with several tokens.
CONTINUED = {patch_attention, patch_delta_rule, patch_mamba2, patch_mla, patch_short_conv}

# Attributes of transformers' attention and state space modules; an unpatched one would read a tree as a chain.
SIGNS = ("is_causal", "A_log")
# How a forward names its cache: since transformers 5.24; before; before in models of Mamba layers only.
CACHE_ARGUMENTS = ("cache", "past_key_values", "cache_params")


def _dynamic_cache(config: Any, kind: type[DynamicCache] = DynamicCache) -> DynamicCache:
    """Make the cache class that most families use."""
    cache = kind(config=config)
    if not any(isinstance(layer, CacheLayerMixin) for layer in cache.layers):
        cache.layers.append(
            DynamicLayer()
        )  # hybrids read the length of a text from an attention layer, and may have none
    return cache


def _whole_cache(_: Any) -> DynamicCache:
    """Make a cache of all rows: a config may name a sliding window that its model does not have."""
    return DynamicCache()


@dataclass(frozen=True, slots=True)
class Family:
    """One row of the table.

    Attributes:
        mixers: by name of a stateful module class, the function that patches it.
        stateless: classes of modules that a layer without a stateful one may hold.
        takes_positions: whether it takes position_ids.
        pads_exactly: whether the forward of left-padded prompts is exact where projections map zeros to zeros; if not,
            prompts of different lengths are run one by one.
        new_cache: makes, from the config, the transformers cache that prompts are run with.
    """

    mixers: Mapping[str, Patch]
    stateless: frozenset[str] = frozenset()
    takes_positions: bool = True
    pads_exactly: bool = True
    new_cache: Callable[[Any], Any] = _dynamic_cache

    @property
    def continues_caches(self) -> bool:
        """Whether the model's forward of several tokens is right behind a cache that is not empty."""
        return CONTINUED.issuperset(self.mixers.values())

    def patch(self, module: Any, layer: int, dtype: torch.dtype) -> LayerSpec:
        """Make a stateful module of a layer, whose activations have a dtype, score trees; return its sizes."""
        patch = self.mixers[type(module).__name__]
        placement = Placement(dtype=dtype, device=next(module.parameters()).device)
        # RecurrentGemma's blocks do not know their layer.
        return patch(module, placement, layer) if patch is patch_rg_lru else patch(module, placement)


def _attention_only(name: str) -> Family:
    """Make the row of a family whose layers all hold ``<name>Attention``."""
    return Family({f"{name}Attention": patch_attention}, new_cache=_whole_cache)


def _mamba_only(name: str, patch: Patch) -> Family:
    """Make the row of a family whose layers all hold ``<name>Mixer``."""
    return Family({f"{name}Mixer": patch}, takes_positions=False)


FAMILIES: dict[str, Family] = {
    "bailing_hybrid": Family({"BailingHybridDeltaAttention": patch_delta_rule, "BailingHybridAttention": patch_mla}),
    "bamba": Family({"BambaMixer": patch_mamba2, "BambaAttention": patch_attention}),
    "falcon_h1": Family({"FalconH1Mixer": patch_mamba2, "FalconH1Attention": patch_attention}),
    "falcon_mamba": _mamba_only("FalconMamba", patch_mamba1),
    "gemma": _attention_only("Gemma"),
    "gemma2": _attention_only("Gemma2"),
    "gemma3_text": _attention_only("Gemma3"),
    "granitemoehybrid": Family(
        {"GraniteMoeHybridMambaLayer": patch_mamba2, "GraniteMoeHybridAttention": patch_attention}
    ),
    "jamba": Family({"JambaMambaMixer": patch_mamba1, "JambaAttention": patch_attention}),
    "kimi_linear": Family({"KimiLinearDeltaAttention": patch_delta_rule, "KimiLinearAttention": patch_mla}),
    "lfm2": Family({"Lfm2ShortConv": patch_short_conv, "Lfm2Attention": patch_attention}),
    "lfm2_moe": Family({"Lfm2MoeShortConv": patch_short_conv, "Lfm2MoeAttention": patch_attention}),
    "lfm3": Family({"Lfm3ShortConv": patch_short_conv, "Lfm3Attention": patch_attention}),
    "llama": _attention_only("Llama"),
    "mamba": _mamba_only("Mamba", patch_mamba1),
    "mamba2": _mamba_only("Mamba2", patch_mamba2),
    "minimax": Family(
        {"MiniMaxLightningAttention": patch_lightning, "MiniMaxAttention": patch_attention}, new_cache=lightning_cache
    ),
    "mistral": _attention_only("Mistral"),
    "nemotron_h": Family(
        {"NemotronHMamba2Mixer": patch_mamba2, "NemotronHAttention": patch_attention},
        stateless=frozenset({"NemotronHMLP", "NemotronHMoE"}),
    ),
    "olmo_hybrid": Family({"OlmoHybridGatedDeltaNet": patch_delta_rule, "OlmoHybridAttention": patch_attention}),
    "qwen2": _attention_only("Qwen2"),
    "qwen3": _attention_only("Qwen3"),
    "qwen3_5_moe_text": Family({"Qwen3_5MoeGatedDeltaNet": patch_delta_rule, "Qwen3_5MoeAttention": patch_attention}),
    "qwen3_5_text": Family({"Qwen3_5GatedDeltaNet": patch_delta_rule, "Qwen3_5Attention": patch_attention}),
    "qwen3_next": Family({"Qwen3NextGatedDeltaNet": patch_delta_rule, "Qwen3NextAttention": patch_attention}),
    "recurrent_gemma": Family(
        {"RecurrentGemmaRecurrentBlock": patch_rg_lru, "RecurrentGemmaAttention": patch_attention},
        pads_exactly=False,
        new_cache=partial(_dynamic_cache, kind=BlockCache),
    ),
    "zamba": Family({"ZambaMambaMixer": patch_mamba1, "ZambaAttention": patch_attention}),
    "zamba2": Family({"Zamba2MambaMixer": patch_mamba2, "Zamba2Attention": patch_attention}),
}


def cache_argument(kind: type) -> str:
    """Return the keyword under which the forward of a class of transformers takes its cache."""
    names = inspect.signature(kind.forward).parameters  # type: ignore[attr-defined]
    return next((name for name in CACHE_ARGUMENTS if name in names), CACHE_ARGUMENTS[0])


def config_of_text_model(config: Any) -> Any:
    """Return the config with which a checkpoint is loaded as a causal language model.

    Of a multimodal checkpoint it is that of the text model, if transformers can load it alone (Qwen3.5).  That its
    embedding is the output head, too, may be said beside it alone, and is then written to it.
    """
    text = config.get_text_config()
    known = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
    if not known or MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].config_class is not type(text) or text is config:
        return config
    text.tie_word_embeddings |= config.tie_word_embeddings
    return text


def family_of(config: Any) -> Family:
    """Return the row of a transformers config's family.

    Raises:
        NotImplementedError: the family is not in the table; the message names those that are.
        ValueError: a config of no layers or tokens, or of an activation that transformers does not know.
    """
    model_type = getattr(config, "model_type", type(config).__name__)
    if model_type not in FAMILIES:
        raise NotImplementedError(f"model family {model_type!r} is not supported; supported: {', '.join(FAMILIES)}")
    for name in ("num_hidden_layers", "vocab_size"):
        if isinstance(count := getattr(config, name, None), int) and count < 1:
            raise ValueError(f"{name} of the model's config must be at least 1, got {count}")
    if isinstance(activation := getattr(config, "hidden_act", None), str) and activation not in ACT2FN:
        raise ValueError(f"hidden_act of the model's config must be an activation of transformers, got {activation!r}")
    return FAMILIES[model_type]


def stateful_modules(model: PreTrainedModel, family: Family) -> list[tuple[int, Any]]:
    """List layer index and module of every module of a model that holds a state.

    A layer may hold several such modules, and several layers may share one module, so the index is that of the
    module's path.

    Raises:
        NotImplementedError: a layer holds a module of an unknown class, or none of a known class; or a quantised one;
            or rotary positions change with the longest text.
    """
    check_rotary(model)
    found: list[tuple[int, Any]] = []
    covered: set[int] = set()
    inside = "?"  # path prefix of the parts of the last supported module
    for path, module in model.named_modules(remove_duplicate=False):
        kind = type(module).__name__
        layer = next((int(part) for part in path.split(".") if part.isdigit()), None)
        if layer is None:
            continue
        if kind in family.mixers:
            check_mixer(path, module)
            found.append((layer, module))
        elif kind not in family.stateless:
            if not path.startswith(inside) and any(hasattr(module, sign) for sign in SIGNS):
                raise NotImplementedError(
                    f"{kind} of layer {layer} is not known in a {model.config.model_type} model; "
                    f"known are {', '.join(family.mixers)}"
                )
            continue
        covered.add(layer)
        inside = f"{path}."
    if len(covered) != model.config.num_hidden_layers:
        raise NotImplementedError(
            f"{len(covered)} of {model.config.num_hidden_layers} layers of this {model.config.model_type} model have a "
            f"mixer that can be patched ({', '.join(family.mixers)})"
        )
    return found
