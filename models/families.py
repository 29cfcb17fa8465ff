"""The families that can be grafted, a row each: which modules keep a state, and how the model wants to be called."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, DynamicCache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin, DynamicLayer

from stree.models.attention import graft_attention
from stree.models.checks import check_mixer, check_rotary
from stree.models.gated_delta import graft_gated_delta
from stree.models.lightning import graft_lightning, lightning_cache
from stree.models.mla import graft_mla
from stree.models.rg_lru import BlockCache, graft_rg_lru
from stree.models.selective import graft_selective
from stree.models.short_conv import graft_short_conv
from stree.models.ssd import graft_ssd
from stree.models.state import LayerSpec

__all__ = ["FAMILIES", "Family", "config_of_text_model", "family_of", "stateful_modules"]

Graft = Callable[[Any], LayerSpec]

# What attention and state space modules of transformers have; one left without a graft would mistake a tree for a text.
SIGNS = ("is_causal", "A_log")


def _dynamic_cache(config: Any, kind: type[DynamicCache] = DynamicCache) -> DynamicCache:
    """Make the cache that transformers gives most families."""
    cache = kind(config=config)
    if not any(isinstance(layer, CacheLayerMixin) for layer in cache.layers):
        cache.layers.append(DynamicLayer())  # hybrids ask a layer of attention how long texts are, and may have none
    return cache


def _whole_cache(_: Any) -> DynamicCache:
    """Make a cache that keeps every row: a config may name a sliding window that its model does not have."""
    return DynamicCache()


@dataclass(frozen=True, slots=True)
class Family:
    """What differs between families.

    Attributes:
        mixers: adapter of each stateful module class, by class name.
        stateless: classes of modules that may stand in a layer which has no stateful one.
        cache_argument: keyword under which the model takes its cache.
        takes_positions: whether it takes position_ids.
        pads_exactly: whether its own forward of left-padded prompts is exact where projections make nothing of
            nothing; if not, prompts of different lengths are run one by one.
        new_cache: makes, from the config, the transformers cache that prompts are run with.
    """

    mixers: Mapping[str, Graft]
    stateless: frozenset[str] = frozenset()
    cache_argument: str = "past_key_values"
    takes_positions: bool = True
    pads_exactly: bool = True
    new_cache: Callable[[Any], Any] = _dynamic_cache


def _attention_only(name: str) -> Family:
    """Make the row of a family whose layers all hold ``<name>Attention``."""
    return Family({f"{name}Attention": graft_attention}, new_cache=_whole_cache)


FAMILIES: dict[str, Family] = {
    "bailing_hybrid": Family({"BailingHybridDeltaAttention": graft_gated_delta, "BailingHybridAttention": graft_mla}),
    "bamba": Family({"BambaMixer": graft_ssd, "BambaAttention": graft_attention}),
    "falcon_h1": Family({"FalconH1Mixer": graft_ssd, "FalconH1Attention": graft_attention}),
    "falcon_mamba": Family({"FalconMambaMixer": graft_selective}, cache_argument="cache_params", takes_positions=False),
    "gemma": _attention_only("Gemma"),
    "gemma2": _attention_only("Gemma2"),
    "gemma3_text": _attention_only("Gemma3"),
    "granitemoehybrid": Family({"GraniteMoeHybridMambaLayer": graft_ssd, "GraniteMoeHybridAttention": graft_attention}),
    "jamba": Family({"JambaMambaMixer": graft_selective, "JambaAttention": graft_attention}),
    "kimi_linear": Family({"KimiLinearDeltaAttention": graft_gated_delta, "KimiLinearAttention": graft_mla}),
    "lfm2": Family({"Lfm2ShortConv": graft_short_conv, "Lfm2Attention": graft_attention}),
    "lfm2_moe": Family({"Lfm2MoeShortConv": graft_short_conv, "Lfm2MoeAttention": graft_attention}),
    "lfm3": Family({"Lfm3ShortConv": graft_short_conv, "Lfm3Attention": graft_attention}),
    "llama": _attention_only("Llama"),
    "mamba": Family({"MambaMixer": graft_selective}, cache_argument="cache_params", takes_positions=False),
    "mamba2": Family({"Mamba2Mixer": graft_ssd}, cache_argument="cache_params", takes_positions=False),
    "minimax": Family(
        {"MiniMaxLightningAttention": graft_lightning, "MiniMaxAttention": graft_attention}, new_cache=lightning_cache
    ),
    "mistral": _attention_only("Mistral"),
    "nemotron_h": Family(
        {"NemotronHMamba2Mixer": graft_ssd, "NemotronHAttention": graft_attention},
        stateless=frozenset({"NemotronHMLP", "NemotronHMoE"}),
    ),
    "olmo_hybrid": Family({"OlmoHybridGatedDeltaNet": graft_gated_delta, "OlmoHybridAttention": graft_attention}),
    "qwen2": _attention_only("Qwen2"),
    "qwen3": _attention_only("Qwen3"),
    "qwen3_5_moe_text": Family({"Qwen3_5MoeGatedDeltaNet": graft_gated_delta, "Qwen3_5MoeAttention": graft_attention}),
    "qwen3_5_text": Family({"Qwen3_5GatedDeltaNet": graft_gated_delta, "Qwen3_5Attention": graft_attention}),
    "qwen3_next": Family({"Qwen3NextGatedDeltaNet": graft_gated_delta, "Qwen3NextAttention": graft_attention}),
    "recurrent_gemma": Family(
        {"RecurrentGemmaRecurrentBlock": graft_rg_lru, "RecurrentGemmaAttention": graft_attention},
        pads_exactly=False,
        new_cache=partial(_dynamic_cache, kind=BlockCache),
    ),
    "zamba": Family({"ZambaMambaMixer": graft_selective, "ZambaAttention": graft_attention}),
    "zamba2": Family({"Zamba2MambaMixer": graft_ssd, "Zamba2Attention": graft_attention}),
}


def config_of_text_model(config: Any) -> Any:
    """Give the config with which a checkpoint is loaded as a causal language model.

    It is the text model's own where transformers loads that without the vision tower beside it (Qwen3.5).
    """
    text = config.get_text_config()
    known = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
    return text if known and MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].config_class is type(text) else config


def family_of(config: Any) -> Family:
    """Find the row of a transformers config.

    Raises:
        NotImplementedError: none; the message names the supported families.
    """
    model_type = getattr(config, "model_type", type(config).__name__)
    if model_type not in FAMILIES:
        raise NotImplementedError(f"model family {model_type!r} is not supported; supported: {', '.join(FAMILIES)}")
    return FAMILIES[model_type]


def stateful_modules(model: PreTrainedModel, family: Family) -> list[tuple[int, Any, Graft]]:
    """List layer index, module and adapter of everything in a model that keeps a state.

    A layer may hold several such modules, and one module may stand in several layers, so the index is that of the
    module's path.

    Raises:
        NotImplementedError: a layer holds a module of an unknown kind, or none that is known; or a quantised one; or
            rotary positions change with the longest text.
    """
    check_rotary(model)
    found: list[tuple[int, Any, Graft]] = []
    known: set[int] = set()
    inside = "?"  # start of the paths of the parts of the last module that was known
    for path, module in model.named_modules(remove_duplicate=False):
        kind = type(module).__name__
        layer = next((int(part) for part in path.split(".") if part.isdigit()), None)
        if layer is None:
            continue
        if kind in family.mixers:
            if not hasattr(module, "layer_idx"):  # RecurrentGemma's blocks are not told where they stand
                module.layer_idx = layer
            check_mixer(path, module)
            found.append((layer, module, family.mixers[kind]))
        elif kind not in family.stateless:
            if not path.startswith(inside) and any(hasattr(module, sign) for sign in SIGNS):
                raise NotImplementedError(
                    f"{kind} of layer {layer} is not known in a {model.config.model_type} model; "
                    f"known are {', '.join(family.mixers)}"
                )
            continue
        known.add(layer)
        inside = f"{path}."
    if len(known) != model.config.num_hidden_layers:
        raise NotImplementedError(
            f"{len(known)} of {model.config.num_hidden_layers} layers of this {model.config.model_type} model have a "
            f"mixer that can be grafted ({', '.join(family.mixers)})"
        )
    return found
